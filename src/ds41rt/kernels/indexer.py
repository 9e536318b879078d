"""The indexer: queries and head weights of a token, and the score of every compressed row.

Keys and queries are FP4 values, so their dots are exact; the head sum is float32 in head order. Scores are therefore
reproducible bit for bit, and with them the selection.
"""

from collections.abc import Sequence

import numpy as np

from ds41rt.cu.kernel import BF16, F32, I32, U8, U64, Array, Geometry, KernelSpec, Scalars, Span
from ds41rt.kernels.formats import act_quant, dequant_e2m1, fp4_pow2, round_bf16
from ds41rt.kernels.geometry import BF16_PLAIN, FP8, matrix_geometry, shared_nbytes, tiles_of, units
from ds41rt.kernels.linear import fp8_matvec, plain_matvec, sum_rows
from ds41rt.kernels.params import cell, r, scalars, step_shape, tiles, w
from ds41rt.kernels.rope import rotate_tail


def _index_q(
    qr: Array,
    wq_b: Array,
    s: Array,
    normed: Array,
    wproj: Array,
    rope: Array,
    q: Array,
    omega: Array,
    q_rank: int,
    dim: int,
    index_heads: int,
    index_dim: int,
    rope_dim: int,
) -> None:
    q[...] = fp8_matvec(act_quant(qr.astype(np.float32)), wq_b, s).reshape(index_heads, index_dim)
    rotate_tail(q, rope)
    q[...] = dequant_e2m1(*fp4_pow2(q.astype(np.float32))).reshape(index_heads, index_dim)
    factor = np.float32(index_dim**-0.5 * index_heads**-0.5)
    omega[...] = round_bf16(plain_matvec(wproj, normed)) * factor


def _index_score(
    q: Array,
    omega: Array,
    ikey_cell: Array,
    step: Array,
    scores: Array,
    index_heads: int,
    index_dim: int,
    ratio: int,
    max_rows: int,
    spans: Sequence[Array],
) -> None:
    scores.fill(-np.inf)
    if not spans:
        return
    keys = spans[0]
    dots = round_bf16(np.matmul(q.astype(np.float64), keys.astype(np.float64).T))
    np.maximum(dots, 0, out=dots)
    dots *= omega.astype(np.float32)[:, None]
    scores[: len(keys)] = round_bf16(sum_rows(round_bf16(dots)))


def _index_score_spans(
    q: Array,
    omega: Array,
    ikey_cell: Array,
    step: Array,
    scores: Array,
    index_heads: int,
    index_dim: int,
    ratio: int,
    max_rows: int,
) -> list[Span]:
    rows = (int(step[0]) + 1) // ratio
    return [Span(int(ikey_cell[0]), BF16, (rows, index_dim), "r")] if rows else []


def _score_geometry(s: Scalars, n_sms: int) -> Geometry:
    # Two warps of 16 rows a block; the queries of all heads (in eights) stand in shared memory.
    return Geometry((min(-(-s.max_rows // 32), 8 * n_sms), 1, 1), 64, -(-s.index_heads // 8) * 16 * s.index_dim)


def _q_geometry(s: Scalars, n_sms: int) -> Geometry:
    n_units = units(FP8, s.q_rank, s.index_heads * s.index_dim // 32, matrices=2)
    nbytes = max(shared_nbytes(FP8, s.q_rank), shared_nbytes(BF16_PLAIN, s.dim))
    return matrix_geometry(n_sms, n_units, nbytes, extra=tiles_of(BF16_PLAIN, s.index_heads))  # the head weights


INDEX_Q = KernelSpec(
    "index_q",
    (
        r("qr", BF16, lambda s: (s.q_rank,)),
        r("wq_b", U8, lambda s: (s.index_heads * s.index_dim, s.q_rank)),
        r("s", U8, lambda s: (tiles(s.index_heads * s.index_dim), tiles(s.q_rank))),
        r("normed", BF16, lambda s: (s.dim,)),
        r("wproj", BF16, lambda s: (s.index_heads, s.dim)),
        r("rope", F32, lambda s: (s.rope_dim,)),
        w("q", BF16, lambda s: (s.index_heads, s.index_dim)),
        w("omega", BF16, lambda s: (s.index_heads,)),
        *scalars("u32", "q_rank", "dim", "index_heads", "index_dim", "rope_dim"),
    ),
    _index_q,
    geometry=_q_geometry,
)

INDEX_SCORE = KernelSpec(
    "index_score",
    (
        r("q", BF16, lambda s: (s.index_heads, s.index_dim)),
        r("omega", BF16, lambda s: (s.index_heads,)),
        r("ikey_cell", U64, cell),
        r("step", I32, step_shape),
        w("scores", F32, lambda s: (s.max_rows,)),
        *scalars("u32", "index_heads", "index_dim", "ratio", "max_rows"),
    ),
    _index_score,
    _index_score_spans,
    geometry=_score_geometry,
)
