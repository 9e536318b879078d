"""The routed experts through the pointer table, and the ordered sum with the shared expert.

A routed expert's weights are FP4, their scales one byte per row and 32 inputs, at a fixed displacement behind each
weight pointer. Experts stay separate until the sum, which runs in plan order.
"""

from collections.abc import Sequence

import numpy as np

from ds41rt.cu.kernel import BF16, F32, U8, U64, Array, Geometry, KernelSpec, Scalars, Span
from ds41rt.kernels.formats import E8M0_VALUE, act_quant, decode_e2m1, round_bf16
from ds41rt.kernels.geometry import FP4, matrix_geometry, shared_nbytes, tiles_of, units
from ds41rt.kernels.hc import expand, pairs_geometry
from ds41rt.kernels.linear import quant_matvec, sum_rows, swiglu
from ds41rt.kernels.params import r, rw, scalars, w


def _matrix_spans(ptr: int, scale_disp: int, n: int, k: int) -> tuple[Span, Span]:
    return Span(ptr, U8, (n, k // 2), "r"), Span(ptr + scale_disp, U8, (n, k // 32), "r")


def _expert_gate_up(
    normed: Array,
    ptrs_dev: Array,
    weight_dev: Array,
    t: Array,
    dim: int,
    inter: int,
    top_k: int,
    gate_scale_disp: int,
    up_scale_disp: int,
    limit: float,
    spans: Sequence[Array],
) -> None:
    # All gates, then all ups, as the rows of one matrix.
    weight = decode_e2m1(np.concatenate(spans[0::2]))
    scales = E8M0_VALUE.take(np.concatenate(spans[1::2]))
    y = round_bf16(quant_matvec(act_quant(normed.astype(np.float32)), weight, scales)).reshape(2, top_k, inter)
    t[...] = weight_dev[:, None] * swiglu(y[0], y[1], limit)


def _expert_gate_up_spans(
    normed: Array,
    ptrs_dev: Array,
    weight_dev: Array,
    t: Array,
    dim: int,
    inter: int,
    top_k: int,
    gate_scale_disp: int,
    up_scale_disp: int,
    limit: float,
) -> list[Span]:
    gates, ups, _ = ptrs_dev.tolist()
    return [
        span
        for ptrs, disp in ((gates, gate_scale_disp), (ups, up_scale_disp))
        for ptr in ptrs
        for span in _matrix_spans(ptr, disp, inter, dim)
    ]


def _expert_down(
    t: Array,
    ptrs_dev: Array,
    out: Array,
    dim: int,
    inter: int,
    top_k: int,
    down_scale_disp: int,
    spans: Sequence[Array],
) -> None:
    values, act_scale = act_quant(t.astype(np.float32))
    weight = decode_e2m1(np.concatenate(spans[0::2])).reshape(top_k, dim, -1, 32)
    scales = E8M0_VALUE.take(np.concatenate(spans[1::2])).reshape(top_k, dim, -1)
    # Leading axis K, so that its blocks are added in order for all experts at once.
    dots = np.matmul(weight.transpose(2, 0, 1, 3), values.transpose(1, 0, 2)[..., None])[..., 0].astype(np.float32)
    dots *= act_scale.T[:, :, None]
    dots *= scales.transpose(2, 0, 1)
    out[...] = sum_rows(dots)


def _expert_down_spans(
    t: Array, ptrs_dev: Array, out: Array, dim: int, inter: int, top_k: int, down_scale_disp: int
) -> list[Span]:
    return [span for ptr in ptrs_dev[2].tolist() for span in _matrix_spans(ptr, down_scale_disp, dim, inter)]


def _moe_combine(
    expert_out: Array,
    shared_out: Array,
    post: Array,
    comb: Array,
    streams: Array,
    moe_out: Array,
    dim: int,
    hc: int,
    top_k: int,
) -> None:
    terms = np.empty((top_k + 1, dim), np.float32)
    terms[:top_k] = expert_out
    terms[top_k] = shared_out
    moe_out[...] = sum_rows(terms)
    streams[...] = expand(moe_out.astype(np.float32), streams.astype(np.float32), post, comb)


def _gate_up_geometry(s: Scalars, n_sms: int) -> Geometry:
    n_units = units(FP4, s.dim, tiles_of(FP4, *([s.inter] * s.top_k)), matrices=2)
    return matrix_geometry(n_sms, n_units, shared_nbytes(FP4, s.dim))


def _down_geometry(s: Scalars, n_sms: int) -> Geometry:
    return matrix_geometry(n_sms, units(FP4, s.inter, tiles_of(FP4, s.dim), sets=s.top_k), shared_nbytes(FP4, s.inter))


def _matrices_nbytes(s: Scalars, n: int) -> int:
    """`n` expert matrices: a code is half a byte, a scale a byte per 32 codes."""
    return int(n * s.inter * s.dim * 17 // 32)


EXPERT_GATE_UP = KernelSpec(
    "expert_gate_up",
    (
        r("normed", BF16, lambda s: (s.dim,)),
        r("ptrs_dev", U64, lambda s: (3, s.top_k)),
        r("weight_dev", F32, lambda s: (s.top_k,)),
        w("t", BF16, lambda s: (s.top_k, s.inter)),
        *scalars("u32", "dim", "inter", "top_k"),
        *scalars("u64", "gate_scale_disp", "up_scale_disp"),
        *scalars("f32", "limit"),
    ),
    _expert_gate_up,
    _expert_gate_up_spans,
    geometry=_gate_up_geometry,
    indirect_nbytes=lambda s: _matrices_nbytes(s, 2 * s.top_k),
)

EXPERT_DOWN = KernelSpec(
    "expert_down",
    (
        r("t", BF16, lambda s: (s.top_k, s.inter)),
        r("ptrs_dev", U64, lambda s: (3, s.top_k)),
        w("out", BF16, lambda s: (s.top_k, s.dim)),
        *scalars("u32", "dim", "inter", "top_k"),
        *scalars("u64", "down_scale_disp"),
    ),
    _expert_down,
    _expert_down_spans,
    geometry=_down_geometry,
    indirect_nbytes=lambda s: _matrices_nbytes(s, s.top_k),
)

MOE_COMBINE = KernelSpec(
    "moe_combine",
    (
        r("expert_out", BF16, lambda s: (s.top_k, s.dim)),
        r("shared_out", BF16, lambda s: (s.dim,)),
        r("post", F32, lambda s: (s.hc,)),
        r("comb", F32, lambda s: (s.hc, s.hc)),
        rw("streams", BF16, lambda s: (s.hc, s.dim)),
        w("moe_out", BF16, lambda s: (s.dim,)),
        *scalars("u32", "dim", "hc", "top_k"),
    ),
    _moe_combine,
    geometry=pairs_geometry,
)
