"""The projections around attention: low-rank q and kv, the q heads and the window row, the grouped output."""

from collections.abc import Sequence

import numpy as np

from ds41rt.cu.kernel import BF16, F32, I32, U8, U64, Array, Geometry, KernelSpec, Scalars, Span
from ds41rt.kernels.formats import act_quant, act_quant_dequant, decode_e4m3, tile_scales
from ds41rt.kernels.geometry import FP8, matrix_geometry, shared_nbytes, tiles_of, units
from ds41rt.kernels.linear import fp8_matvec, rms_norm
from ds41rt.kernels.params import cell, r, scalars, step_shape, tiles, w
from ds41rt.kernels.rope import rotate_tail


def _attn_qkv_a(
    normed: Array,
    wq_a: Array,
    sq_a: Array,
    wkv: Array,
    skv: Array,
    qa: Array,
    kv: Array,
    dim: int,
    q_rank: int,
    head_dim: int,
) -> None:
    x = act_quant(normed.astype(np.float32))
    qa[...] = fp8_matvec(x, wq_a, sq_a)
    kv[...] = fp8_matvec(x, wkv, skv)


def _attn_q(
    qa: Array,
    q_norm: Array,
    wq_b: Array,
    sq_b: Array,
    kv: Array,
    kv_norm: Array,
    rope: Array,
    step: Array,
    ring_cell: Array,
    qr: Array,
    q: Array,
    q_rank: int,
    heads: int,
    head_dim: int,
    rope_dim: int,
    window: int,
    eps: float,
    spans: Sequence[Array],
) -> None:
    qr[...] = rms_norm(qa.astype(np.float32), q_norm, eps)
    q[...] = fp8_matvec(act_quant(qr.astype(np.float32)), wq_b, sq_b).reshape(heads, head_dim)
    rotate_tail(q, rope)
    row = rms_norm(kv.astype(np.float32), kv_norm, eps).astype(BF16)
    rotate_tail(row, rope)
    spans[0][...] = act_quant_dequant(row.astype(np.float32))


def _attn_q_spans(
    qa: Array,
    q_norm: Array,
    wq_b: Array,
    sq_b: Array,
    kv: Array,
    kv_norm: Array,
    rope: Array,
    step: Array,
    ring_cell: Array,
    qr: Array,
    q: Array,
    q_rank: int,
    heads: int,
    head_dim: int,
    rope_dim: int,
    window: int,
    eps: float,
) -> list[Span]:
    slot = int(step[0]) % window
    return [Span(int(ring_cell[0]) + slot * head_dim * BF16.itemsize, BF16, (head_dim,), "w")]


def _attn_wo_a(o: Array, w: Array, s: Array, u: Array, groups: int, rank: int, k: int) -> None:
    # Codes times scales are exact in bf16 for every scale above 2^-120: no rounding is needed here.
    weight = decode_e4m3(w).reshape(groups * rank, -1, 32)
    weight *= tile_scales(s, groups * rank)[:, :, None]
    u[...] = np.einsum("grk,gk->gr", weight.reshape(groups, rank, k), o.astype(np.float64)).reshape(-1)


def _attn_qkv_a_geometry(s: Scalars, n_sms: int) -> Geometry:
    return matrix_geometry(n_sms, units(FP8, s.dim, tiles_of(FP8, s.q_rank, s.head_dim)), shared_nbytes(FP8, s.dim))


def _attn_q_geometry(s: Scalars, n_sms: int) -> Geometry:
    n_units = units(FP8, s.q_rank, tiles_of(FP8, s.heads * s.head_dim))
    return matrix_geometry(n_sms, n_units, shared_nbytes(FP8, s.q_rank), extra=1)  # the window row


def _attn_wo_a_geometry(s: Scalars, n_sms: int) -> Geometry:
    return matrix_geometry(n_sms, units(FP8, s.k, tiles_of(FP8, s.rank), sets=s.groups), shared_nbytes(FP8, s.k))


ATTN_QKV_A = KernelSpec(
    "attn_qkv_a",
    (
        r("normed", BF16, lambda s: (s.dim,)),
        r("wq_a", U8, lambda s: (s.q_rank, s.dim)),
        r("sq_a", U8, lambda s: (tiles(s.q_rank), tiles(s.dim))),
        r("wkv", U8, lambda s: (s.head_dim, s.dim)),
        r("skv", U8, lambda s: (tiles(s.head_dim), tiles(s.dim))),
        w("qa", BF16, lambda s: (s.q_rank,)),
        w("kv", BF16, lambda s: (s.head_dim,)),
        *scalars("u32", "dim", "q_rank", "head_dim"),
    ),
    _attn_qkv_a,
    geometry=_attn_qkv_a_geometry,
)

ATTN_Q = KernelSpec(
    "attn_q",
    (
        r("qa", BF16, lambda s: (s.q_rank,)),
        r("q_norm", BF16, lambda s: (s.q_rank,)),
        r("wq_b", U8, lambda s: (s.heads * s.head_dim, s.q_rank)),
        r("sq_b", U8, lambda s: (tiles(s.heads * s.head_dim), tiles(s.q_rank))),
        r("kv", BF16, lambda s: (s.head_dim,)),
        r("kv_norm", BF16, lambda s: (s.head_dim,)),
        r("rope", F32, lambda s: (s.rope_dim,)),
        r("step", I32, step_shape),
        r("ring_cell", U64, cell),
        w("qr", BF16, lambda s: (s.q_rank,)),
        w("q", BF16, lambda s: (s.heads, s.head_dim)),
        *scalars("u32", "q_rank", "heads", "head_dim", "rope_dim", "window"),
        *scalars("f32", "eps"),
    ),
    _attn_q,
    _attn_q_spans,
    geometry=_attn_q_geometry,
)

ATTN_WO_A = KernelSpec(
    "attn_wo_a",
    (
        r("o", BF16, lambda s: (s.groups, s.k)),
        r("w", U8, lambda s: (s.groups * s.rank, s.k)),
        r("s", U8, lambda s: (tiles(s.groups * s.rank), tiles(s.k))),
        w("u", BF16, lambda s: (s.groups * s.rank,)),
        *scalars("u32", "groups", "rank", "k"),
    ),
    _attn_wo_a,
    geometry=_attn_wo_a_geometry,
)
