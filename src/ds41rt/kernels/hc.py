"""The residual highway: start of the streams, mixing coefficients, collapse and expand.

The coefficients are computed in float64 from the float32 products with `fn` and rounded once: closer to the formula
than float32 steps are, and the 40 normalisations of a 4x4 matrix are far cheaper on Python floats than on arrays.
`hc` is 4: the Sinkhorn loop is written out for it.
"""

import numpy as np

from ds41rt.cu.kernel import BF16, F32, I32, U8, Array, Geometry, KernelSpec, Pointer, Scalar, Scalars
from ds41rt.kernels.linear import inv_rms, plain_matvec, rms_norm, sigmoid, sum_rows
from ds41rt.kernels.params import r, rw, scalars, step_shape, w

# Positions of all streams that a block of the mixing kernels takes; dim is a multiple of it.
_SLICE = 32


def mix_work_nbytes(dim: int, hc: int) -> int:
    """Size of the workspace `work` of the two mixing kernels: a ticket, then each block's sums: the mixes' products,
    the squares of its streams and of its collapsed slice."""
    return 128 + 4 * (hc * (hc + 2) + 2) * (dim // _SLICE)


def _mix_geometry(s: Scalars, n_sms: int) -> Geometry:
    return Geometry((s.dim // _SLICE, 1, 1), 256)


def pairs_geometry(s: Scalars, n_sms: int) -> Geometry:
    """One thread a pair of positions."""
    return Geometry((-(-s.dim // 128), 1, 1), 64)


def sinkhorn(c: list[list[float]], iters: int, eps: float) -> list[list[float]]:
    """Normalise the columns of a positive 4x4 matrix, then `iters` - 1 times rows and columns; sums get + `eps`."""
    (a0, a1, a2, a3), (b0, b1, b2, b3), (c0, c1, c2, c3), (d0, d1, d2, d3) = c
    for k in range(iters):
        if k:
            t = a0 + a1 + a2 + a3 + eps
            a0, a1, a2, a3 = a0 / t, a1 / t, a2 / t, a3 / t
            t = b0 + b1 + b2 + b3 + eps
            b0, b1, b2, b3 = b0 / t, b1 / t, b2 / t, b3 / t
            t = c0 + c1 + c2 + c3 + eps
            c0, c1, c2, c3 = c0 / t, c1 / t, c2 / t, c3 / t
            t = d0 + d1 + d2 + d3 + eps
            d0, d1, d2, d3 = d0 / t, d1 / t, d2 / t, d3 / t
        t = a0 + b0 + c0 + d0 + eps
        a0, b0, c0, d0 = a0 / t, b0 / t, c0 / t, d0 / t
        t = a1 + b1 + c1 + d1 + eps
        a1, b1, c1, d1 = a1 / t, b1 / t, c1 / t, d1 / t
        t = a2 + b2 + c2 + d2 + eps
        a2, b2, c2, d2 = a2 / t, b2 / t, c2 / t, d2 / t
        t = a3 + b3 + c3 + d3 + eps
        a3, b3, c3, d3 = a3 / t, b3 / t, c3 / t, d3 / t
    return [[a0, a1, a2, a3], [b0, b1, b2, b3], [c0, c1, c2, c3], [d0, d1, d2, d3]]


def coefficients(
    streams: Array, fn: Array, scale: Array, base: Array, *, iters: int, eps: float, hc_eps: float
) -> tuple[Array, Array, list[list[float]]]:
    """Mixes of one site from its streams bf16[4, dim]: (pre f64[4], post f64[4], comb 4x4), unrounded.

    `fn` f32[24, 4*dim], `scale` f32[3] (pre, post, comb), `base` f32[24]: 4 pre, 4 post, 16 comb, row-major.
    """
    flat = streams.reshape(-1).astype(np.float64)
    m = (plain_matvec(fn, flat) * inv_rms(flat, eps)).astype(np.float64)
    m *= scale.repeat((4, 4, 16))
    m += base
    sig = sigmoid(m[:8])
    c = m[8:].reshape(4, 4)
    c = np.exp(c - c.max(axis=1, keepdims=True))
    c /= np.add.reduce(c, axis=1, keepdims=True)
    c += hc_eps
    return sig[:4] + hc_eps, sig[4:] * 2.0, sinkhorn(c.tolist(), iters, hc_eps)


def collapse(streams: Array, pre: Array) -> Array:
    """f32[hc, dim] streams, f32[hc] -> f32[dim], streams added in order."""
    return sum_rows(pre[:, None] * streams)


def expand(y: Array, streams: Array, post: Array, comb: Array) -> Array:
    """New streams f32[hc, dim]: stream j is post[j] * y, plus comb[i, j] * old stream i in order of i."""
    hc, dim = streams.shape
    terms = np.empty((hc + 1, hc, dim), np.float32)
    np.multiply(post[:, None], y, out=terms[0])
    np.multiply(comb[:, :, None], streams[:, None, :], out=terms[1:])
    return sum_rows(terms)


def _embed_expand(embed: Array, step: Array, streams: Array, pre_prev: Array, vocab: int, dim: int, hc: int) -> None:
    streams[...] = embed[int(step[1])]
    pre_prev[...] = 0
    pre_prev[0] = 1


def _hc_in(
    streams: Array,
    pre_in: Array,
    fn: Array,
    scale: Array,
    base: Array,
    norm_w: Array,
    pre_out: Array,
    post: Array,
    comb: Array,
    hidden: Array,
    normed: Array,
    work: Array,
    dim: int,
    hc: int,
    iters: int,
    eps: float,
    hc_eps: float,
) -> None:
    # `pre_in` is read before `pre_out` is written: the two may be one buffer.
    hidden[...] = collapse(streams.astype(np.float32), pre_in)
    normed[...] = rms_norm(hidden.astype(np.float32), norm_w, eps)
    pre_out[...], post[...], comb[...] = coefficients(streams, fn, scale, base, iters=iters, eps=eps, hc_eps=hc_eps)


def _hc_expand_in(
    y: Array,
    streams: Array,
    pre_in: Array,
    fn: Array,
    scale: Array,
    base: Array,
    norm_w: Array,
    pre_out: Array,
    post: Array,
    comb: Array,
    hidden: Array,
    normed: Array,
    work: Array,
    dim: int,
    hc: int,
    iters: int,
    eps: float,
    hc_eps: float,
) -> None:
    streams[...] = expand(y.astype(np.float32), streams.astype(np.float32), post, comb)
    _hc_in(
        streams, pre_in, fn, scale, base, norm_w, pre_out, post, comb, hidden, normed, work, dim, hc, iters, eps, hc_eps
    )


def _hc_collapse(streams: Array, pre: Array, hidden: Array, dim: int, hc: int) -> None:
    hidden[...] = collapse(streams.astype(np.float32), pre)


EMBED_EXPAND = KernelSpec(
    "embed_expand",
    (
        r("embed", BF16, lambda s: (s.vocab, s.dim)),
        r("step", I32, step_shape),
        w("streams", BF16, lambda s: (s.hc, s.dim)),
        w("pre_prev", F32, lambda s: (s.hc,)),
        *scalars("u32", "vocab", "dim", "hc"),
    ),
    _embed_expand,
    geometry=pairs_geometry,
)

_MIX_INPUTS: tuple[Pointer, ...] = (
    r("pre_in", F32, lambda s: (s.hc,)),
    r("fn", F32, lambda s: (s.hc * (s.hc + 2), s.hc * s.dim)),
    r("scale", F32, lambda s: (3,)),
    r("base", F32, lambda s: (s.hc * (s.hc + 2),)),
    r("norm_w", BF16, lambda s: (s.dim,)),
    w("pre_out", F32, lambda s: (s.hc,)),
)
_MIX_OUTPUTS: tuple[Pointer | Scalar, ...] = (
    w("hidden", BF16, lambda s: (s.dim,)),
    w("normed", BF16, lambda s: (s.dim,)),
    # A device's scratch. Its first word must be zero before the first launch and is left zero by every launch.
    rw("work", U8, lambda s: (mix_work_nbytes(s.dim, s.hc),)),
    *scalars("u32", "dim", "hc", "iters"),
    *scalars("f32", "eps", "hc_eps"),
)

HC_IN = KernelSpec(
    "hc_in",
    (
        r("streams", BF16, lambda s: (s.hc, s.dim)),
        *_MIX_INPUTS,
        w("post", F32, lambda s: (s.hc,)),
        w("comb", F32, lambda s: (s.hc, s.hc)),
        *_MIX_OUTPUTS,
    ),
    _hc_in,
    geometry=_mix_geometry,
)

HC_EXPAND_IN = KernelSpec(
    "hc_expand_in",
    (
        r("y", BF16, lambda s: (s.dim,)),
        rw("streams", BF16, lambda s: (s.hc, s.dim)),
        *_MIX_INPUTS,
        rw("post", F32, lambda s: (s.hc,)),
        rw("comb", F32, lambda s: (s.hc, s.hc)),
        *_MIX_OUTPUTS,
    ),
    _hc_expand_in,
    geometry=_mix_geometry,
)

HC_COLLAPSE = KernelSpec(
    "hc_collapse",
    (
        r("streams", BF16, lambda s: (s.hc, s.dim)),
        r("pre", F32, lambda s: (s.hc,)),
        w("hidden", BF16, lambda s: (s.dim,)),
        *scalars("u32", "dim", "hc"),
    ),
    _hc_collapse,
    geometry=pairs_geometry,
)
