"""The compressor of a KV source layer: its projections, and the compressed row with its index key.

Ratio 1 makes a row every token. Ratio 2 keeps the last two tokens' projections in a pool whose slot is position mod 2
and makes a row at odd positions; writing a slot derived from the position is idempotent, so a step may be rerun.
"""

from collections.abc import Sequence

import numpy as np

from ds41rt.cu.kernel import BF16, F32, I32, U64, Array, Geometry, KernelSpec, Scalars, Span
from ds41rt.kernels.formats import dequant_e2m1, fp4_e4m3, fp4_pow2, round_bf16
from ds41rt.kernels.geometry import BF16_PLAIN, matrix_geometry, shared_nbytes, tiles_of, units
from ds41rt.kernels.linear import plain_matvec, rms_norm
from ds41rt.kernels.params import cell, r, scalars, step_shape, w
from ds41rt.kernels.rope import rotate_tail


def pooled(pool: Array) -> Array:
    """f32[2, 2, d] ([slot][kv, gate]) -> f32[d]: per channel, both slots' kv weighted by the softmax of the gates."""
    kv, gate = pool[:, 0], pool[:, 1]
    e = np.exp((gate - np.maximum(gate[0], gate[1])).astype(np.float64)).astype(np.float32)
    e /= e[0] + e[1]
    e *= kv
    out: Array = e[0] + e[1]
    return out


def _comp_proj(
    normed: Array, wkv: Array, wgate: Array | None, kv: Array, gate: Array | None, dim: int, head_dim: int, ratio: int
) -> None:
    latent = plain_matvec(wkv, normed)
    if wgate is None or gate is None:
        kv[...] = round_bf16(latent)
        return
    kv[...] = latent
    gate[...] = plain_matvec(wgate, normed)


def _comp_row(
    kv: Array,
    gate: Array | None,
    norm_w: Array,
    rope_c: Array,
    step: Array,
    pool_cell: Array | None,
    comp_cell: Array,
    ikey_cell: Array,
    wk: Array,
    k_norm: Array,
    head_dim: int,
    rope_dim: int,
    index_dim: int,
    ratio: int,
    eps: float,
    spans: Sequence[Array],
) -> None:
    if gate is not None:
        pool = spans[0]
        slot = int(step[0]) % 2
        pool[slot, 0] = kv
        pool[slot, 1] = gate
        if slot == 0:
            return
        kv = round_bf16(pooled(pool))
    row, ikey = spans[-2:]
    latent = rms_norm(kv, norm_w, eps).astype(BF16)
    # The key is made from the latent before its rotation.
    key = rms_norm(round_bf16(plain_matvec(wk, latent)), k_norm, eps).astype(BF16)
    rotate_tail(key, rope_c)
    ikey[...] = dequant_e2m1(*fp4_pow2(key.astype(np.float32))).reshape(-1)
    rotate_tail(latent, rope_c)
    row[...] = dequant_e2m1(*fp4_e4m3(latent.astype(np.float32))).reshape(-1)


def _comp_row_spans(
    kv: Array,
    gate: Array | None,
    norm_w: Array,
    rope_c: Array,
    step: Array,
    pool_cell: Array | None,
    comp_cell: Array,
    ikey_cell: Array,
    wk: Array,
    k_norm: Array,
    head_dim: int,
    rope_dim: int,
    index_dim: int,
    ratio: int,
    eps: float,
) -> list[Span]:
    position = int(step[0])
    spans = []
    if pool_cell is not None:
        spans.append(Span(int(pool_cell[0]), F32, (2, 2, head_dim), "rw"))
    if (position + 1) % ratio == 0:
        j = position // ratio
        spans.append(Span(int(comp_cell[0]) + j * head_dim * BF16.itemsize, BF16, (head_dim,), "w"))
        spans.append(Span(int(ikey_cell[0]) + j * index_dim * BF16.itemsize, BF16, (index_dim,), "w"))
    return spans


def _row_geometry(s: Scalars, n_sms: int) -> Geometry:
    return Geometry((1, 1, 1), 512, 6 * (s.head_dim + s.index_dim))


def _proj_geometry(s: Scalars, n_sms: int) -> Geometry:
    tiles = tiles_of(BF16_PLAIN, *([s.head_dim] * (2 if s.ratio > 1 else 1)))
    return matrix_geometry(n_sms, units(BF16_PLAIN, s.dim, tiles), shared_nbytes(BF16_PLAIN, s.dim))


COMP_PROJ = KernelSpec(
    "comp_proj",
    (
        r("normed", BF16, lambda s: (s.dim,)),
        r("wkv", BF16, lambda s: (s.head_dim, s.dim)),
        r("wgate", BF16, lambda s: (s.head_dim, s.dim) if s.ratio > 1 else (0,)),
        w("kv", F32, lambda s: (s.head_dim,)),
        w("gate", F32, lambda s: (s.head_dim if s.ratio > 1 else 0,)),
        *scalars("u32", "dim", "head_dim", "ratio"),
    ),
    _comp_proj,
    geometry=_proj_geometry,
)

COMP_ROW = KernelSpec(
    "comp_row",
    (
        r("kv", F32, lambda s: (s.head_dim,)),
        r("gate", F32, lambda s: (s.head_dim if s.ratio > 1 else 0,)),
        r("norm_w", BF16, lambda s: (s.head_dim,)),
        r("rope_c", F32, lambda s: (s.rope_dim,)),
        r("step", I32, step_shape),
        r("pool_cell", U64, lambda s: (1 if s.ratio > 1 else 0,)),
        r("comp_cell", U64, cell),
        r("ikey_cell", U64, cell),
        r("wk", BF16, lambda s: (s.index_dim, s.head_dim)),
        r("k_norm", BF16, lambda s: (s.index_dim,)),
        *scalars("u32", "head_dim", "rope_dim", "index_dim", "ratio"),
        *scalars("f32", "eps"),
    ),
    _comp_row,
    _comp_row_spans,
    geometry=_row_geometry,
)
