"""Engram: keys and value of a token from its table rows, and the gated addition into the streams."""

import numpy as np

from ds41rt.cu.kernel import BF16, F32, U8, Array, Geometry, KernelSpec, Scalars
from ds41rt.kernels.formats import E4M3_VALUE, E8M0_VALUE, act_quant
from ds41rt.kernels.linear import fp8_geometry, fp8_matvec, sigmoid
from ds41rt.kernels.params import r, rw, scalars, tiles, w


def _engram_kv(
    codes: Array, scales: Array, w: Array, ws: Array, kv: Array, cols: int, head_dim: int, n: int, k: int
) -> None:
    rows = E4M3_VALUE.take(codes).reshape(-1, 32) * E8M0_VALUE.take(scales).reshape(-1, 1)
    kv[...] = fp8_matvec(act_quant(rows.reshape(-1)), w, ws)


def _engram_apply(
    kv: Array, q_weight: Array, k_weight: Array, streams: Array, gate: Array, dim: int, hc: int, eps: float
) -> None:
    wide = kv.reshape(hc + 1, dim).astype(np.float64)
    keys = wide[:hc]
    x = streams.astype(np.float64)
    pair = (q_weight.astype(np.float32) * k_weight.astype(np.float32)).astype(np.float64)
    mean_sq = np.add.reduce(np.stack((x * x, keys * keys)), axis=2) / dim
    inv = (1.0 / np.sqrt(mean_sq + eps)).astype(np.float32)
    dot = np.add.reduce(x * pair * keys, axis=1).astype(np.float32)
    delta = inv[0] * inv[1] * np.float32(dim**-0.5) * dot
    root = np.sqrt(np.maximum(np.abs(delta), np.float32(1e-6)))
    gate[...] = sigmoid(np.copysign(root, delta).astype(np.float64))
    streams[...] = x.astype(np.float32) + gate[:, None] * wide[hc].astype(np.float32)


def _apply_geometry(s: Scalars, n_sms: int) -> Geometry:
    # A block a stream, a thread a pair of positions or a few.
    return Geometry((s.hc, 1, 1), min(-(-s.dim // 64) * 32, 1024))


ENGRAM_KV = KernelSpec(
    "engram_kv",
    (
        r("codes", U8, lambda s: (s.cols, s.head_dim)),
        r("scales", U8, lambda s: (s.cols, tiles(s.head_dim))),
        r("w", U8, lambda s: (s.n, s.k)),
        r("ws", U8, lambda s: (tiles(s.n), tiles(s.k))),
        w("kv", BF16, lambda s: (s.n,)),
        *scalars("u32", "cols", "head_dim", "n", "k"),
    ),
    _engram_kv,
    geometry=lambda s, n_sms: fp8_geometry(n_sms, s.n, s.k),
)

ENGRAM_APPLY = KernelSpec(
    "engram_apply",
    (
        r("kv", BF16, lambda s: ((s.hc + 1) * s.dim,)),
        r("q_weight", BF16, lambda s: (s.hc, s.dim)),
        r("k_weight", BF16, lambda s: (s.hc, s.dim)),
        rw("streams", BF16, lambda s: (s.hc, s.dim)),
        w("gate", F32, lambda s: (s.hc,)),
        *scalars("u32", "dim", "hc"),
        *scalars("f32", "eps"),
    ),
    _engram_apply,
    geometry=_apply_geometry,
)
