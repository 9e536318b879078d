"""Matrix-vector products, the norm and SwiGLU: the arithmetic that the other families share.

Two kinds of product. The *quantised linear* multiplies e4m3 activations with e4m3 or e2m1 weights. A dot over one
32-block is exact in float64 (a multiple of 2^-18 below 2^23), so no summation order inside it can matter; it is
rounded to float32 once and added to the float32 sum in increasing K. The *plain product* (bf16 or float32 operands)
accumulates in float64 and rounds to float32 once: with K terms the error before that rounding is below
K * 2^-52 * sum|w x|. It goes through `einsum`, whose loop order depends on the shape alone: no BLAS, no threads, no
alignment.
"""

import math

import numpy as np

from ds41rt.cu.kernel import BF16, U8, Array, Geometry, KernelSpec, Scalars
from ds41rt.kernels.formats import act_quant, decode_e4m3, round_bf16, tile_scales
from ds41rt.kernels.geometry import FP8, matrix_geometry, shared_nbytes, tiles_of, units
from ds41rt.kernels.params import r, scalars, tiles, w


def sum_rows(terms: Array) -> Array:
    """f32[m, ...] -> f32[...]: the sum over the first axis, added one after another in float32."""
    # A single column would be summed pairwise by `reduce`.
    total: Array = np.add.reduce(terms, axis=0) if terms[0].size > 1 else np.add.accumulate(terms, axis=0)[-1]
    return total


def plain_matvec(weight: Array, x: Array) -> Array:
    """Matrix [n, k] times vector [k], of any float type -> f32[n]."""
    y: Array = np.einsum("nk,k->n", weight.astype(np.float64), x.astype(np.float64)).astype(np.float32)
    return y


def quant_matvec(x: tuple[Array, Array], weight: Array, scales: Array) -> Array:
    """The quantised linear: `act_quant`'s pair for f32[k], f64[n, k] weight codes' values, f32[n, k/32] -> f32[n]."""
    values, act_scale = x
    blocks = weight.reshape(len(weight), -1, 32).transpose(1, 0, 2)
    dots = np.matmul(blocks, values[:, :, None])[:, :, 0].astype(np.float32)
    dots *= act_scale[:, None]
    dots *= scales.T
    return sum_rows(dots)


def fp8_matvec(x: tuple[Array, Array], codes: Array, scales: Array) -> Array:
    """Quantised linear with e4m3 codes u8[n, k] and a scale byte per 32x32 tile -> f32[n]."""
    return quant_matvec(x, decode_e4m3(codes), tile_scales(scales, len(codes)))


def inv_rms(x: Array, eps: float) -> np.float32:
    """1 / sqrt(mean(x^2) + eps) of a float array, from a float64 sum in a fixed order, rounded once."""
    wide = x.astype(np.float64).reshape(-1)
    wide *= wide
    return np.float32(1.0 / math.sqrt(float(np.add.reduce(wide)) / wide.size + eps))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """f32[n] (bf16 values) and bf16[n] -> f32[n], to be rounded to bf16 by the caller."""
    y = x * inv_rms(x, eps)
    y *= weight.astype(np.float32)
    return y


def sigmoid(x: Array) -> Array:
    """Float64 array -> float64 array; saturates without overflow."""
    return 1.0 / (1.0 + np.exp(np.minimum(-x, 700.0)))


def swiglu(gate: Array, up: Array, limit: float) -> Array:
    """(g * sigmoid(g)) * u in f32 with g clamped from above and u from both sides; inputs are bf16 values in f32."""
    bound = np.float32(limit)
    gate = np.minimum(gate, bound)
    up = np.minimum(np.maximum(up, -bound), bound)
    gate = gate * sigmoid(gate.astype(np.float64)).astype(np.float32)
    gate *= up
    return gate


def _linear_fp8(x: Array, w: Array, s: Array, y: Array, n: int, k: int) -> None:
    y[...] = fp8_matvec(act_quant(x.astype(np.float32)), w, s)


def _shared_gate_up(
    normed: Array, w1: Array, s1: Array, w3: Array, s3: Array, t: Array, dim: int, inter: int, limit: float
) -> None:
    x = act_quant(normed.astype(np.float32))
    t[...] = swiglu(round_bf16(fp8_matvec(x, w1, s1)), round_bf16(fp8_matvec(x, w3, s3)), limit)


def fp8_geometry(n_sms: int, n: int, k: int) -> Geometry:
    """Launch shape of a plain FP8 product with n rows."""
    return matrix_geometry(n_sms, units(FP8, k, tiles_of(FP8, n)), shared_nbytes(FP8, k))


def _shared_gate_up_geometry(s: Scalars, n_sms: int) -> Geometry:
    return matrix_geometry(n_sms, units(FP8, s.dim, tiles_of(FP8, s.inter), matrices=2), shared_nbytes(FP8, s.dim))


LINEAR_FP8 = KernelSpec(
    "linear_fp8",
    (
        r("x", BF16, lambda s: (s.k,)),
        r("w", U8, lambda s: (s.n, s.k)),
        r("s", U8, lambda s: (tiles(s.n), tiles(s.k))),
        w("y", BF16, lambda s: (s.n,)),
        *scalars("u32", "n", "k"),
    ),
    _linear_fp8,
    geometry=lambda s, n_sms: fp8_geometry(n_sms, s.n, s.k),
)

SHARED_GATE_UP = KernelSpec(
    "shared_gate_up",
    (
        r("normed", BF16, lambda s: (s.dim,)),
        r("w1", U8, lambda s: (s.inter, s.dim)),
        r("s1", U8, lambda s: (tiles(s.inter), tiles(s.dim))),
        r("w3", U8, lambda s: (s.inter, s.dim)),
        r("s3", U8, lambda s: (tiles(s.inter), tiles(s.dim))),
        w("t", BF16, lambda s: (s.inter,)),
        *scalars("u32", "dim", "inter"),
        *scalars("f32", "limit"),
    ),
    _shared_gate_up,
    geometry=_shared_gate_up_geometry,
)
