"""Attention over the list of window slots and selected compressed rows.

The list of a position p: window slots oldest first, (p mod W)+1 .. W-1 then 0 .. p mod W, then the selected compressed
rows ascending. While the ring fills, slots above p are empty entries at the front: they score -inf and are never read
(their memory is undefined), yet they count in the blocks of 64. At position 0 the window part is slot 0 alone.
"""

from collections.abc import Sequence

import numpy as np

from ds41rt.cu.kernel import BF16, F32, I32, U64, Array, Geometry, KernelSpec, Scalars, Span
from ds41rt.kernels.params import cell, r, scalars, step_shape, w
from ds41rt.kernels.rope import rotate_tail

BLOCK = 64


def window_list(position: int, window: int) -> tuple[int, int]:
    """(first, end): the list indices of the window's valid entries are first .. end-1; before `first` it is empty."""
    if position == 0:
        return 0, 1
    return max(window - 1 - position, 0), window


def gather_rows(position: int, window: int, ring: Array, comp: Array | None, sel: Array | None) -> Array:
    """The rows of the valid list entries in list order, f64[entries, head_dim]."""
    slot = position % window
    parts = [ring[slot + 1 :], ring[: slot + 1]] if position >= window else [ring[: position + 1]]
    if comp is not None and sel is not None:
        parts.append(comp.take(sel[1 : 1 + int(sel[0])], axis=0))
    return np.concatenate(parts).astype(np.float64)


def sink_attention(scores: Array, rows: Array, sink: Array, first: int) -> Array:
    """Softmax with a sink over the list entries from `first` on: f32[heads, n], f64[n, d] rows -> f32[heads, d].

    Works in blocks of 64 list entries with a running maximum that starts at -1e30. Probabilities are summed in f32
    unrounded and multiply the rows as bf16; a block's products are summed in float64 and added to the f32 sum. The
    sink (f32[heads]) adds e^(sink - maximum) to the denominator. -inf scores weigh nothing; with none finite the
    result is 0.
    """
    heads, n = scores.shape
    top = np.full((heads, 1), -1e30, np.float32)
    total = np.zeros((heads, 1), np.float32)
    acc = np.zeros((heads, rows.shape[1]), np.float32)
    start = 0
    while start < n:
        end = min(start + BLOCK - (first + start) % BLOCK, n)
        block = scores[:, start:end]
        new_top = np.maximum(top, np.maximum.reduce(block, axis=1, keepdims=True))
        prob = _exp(block - new_top)
        keep = _exp(top - new_top)
        total = total * keep + np.add.reduce(prob, axis=1, keepdims=True, dtype=np.float64).astype(np.float32)
        weights = prob.astype(BF16).astype(np.float64)
        acc = (acc * keep + np.einsum("ht,td->hd", weights, rows[start:end])).astype(np.float32)
        top, start = new_top, end
    total += _exp(sink[:, None] - top)
    out: Array = acc / total
    return out


def _exp(x: Array) -> Array:
    """e^x of an f32 array, rounded once."""
    return np.exp(x.astype(np.float64)).astype(np.float32)


def _attn_score(
    q: Array,
    ring_cell: Array,
    comp_cell: Array | None,
    sel: Array | None,
    step: Array,
    scores: Array,
    heads: int,
    head_dim: int,
    window: int,
    topk: int,
    spans: Sequence[Array],
) -> None:
    position = int(step[0])
    first, _ = window_list(position, window)
    rows = gather_rows(position, window, spans[0], spans[1] if len(spans) > 1 else None, sel)
    scores.fill(-np.inf)
    dots = np.einsum("hd,td->ht", q.astype(np.float64), rows).astype(np.float32)
    np.multiply(dots, np.float32(head_dim**-0.5), out=scores[:, first : first + len(rows)])


def _attn_score_spans(
    q: Array,
    ring_cell: Array,
    comp_cell: Array | None,
    sel: Array | None,
    step: Array,
    scores: Array,
    heads: int,
    head_dim: int,
    window: int,
    topk: int,
) -> list[Span]:
    return _list_spans(ring_cell, comp_cell, sel, step, head_dim, window)


def _list_spans(
    ring_cell: Array, comp_cell: Array | None, sel: Array | None, step: Array, head_dim: int, window: int
) -> list[Span]:
    """The filled part of the ring, and the compressed rows up to the last selected one."""
    filled = min(int(step[0]) + 1, window)
    spans = [Span(int(ring_cell[0]), BF16, (filled, head_dim), "r")]
    if comp_cell is not None and sel is not None and sel[0] > 0:
        spans.append(Span(int(comp_cell[0]), BF16, (int(sel[sel[0]]) + 1, head_dim), "r"))
    return spans


def _attn_value(
    scores: Array,
    ring_cell: Array,
    comp_cell: Array | None,
    sel: Array | None,
    step: Array,
    sink: Array,
    rope: Array,
    o: Array,
    heads: int,
    head_dim: int,
    rope_dim: int,
    window: int,
    topk: int,
    spans: Sequence[Array],
) -> None:
    position = int(step[0])
    first, _ = window_list(position, window)
    rows = gather_rows(position, window, spans[0], spans[1] if len(spans) > 1 else None, sel)
    o[...] = sink_attention(scores[:, first : first + len(rows)], rows, sink, first)
    rotate_tail(o, rope, inverse=True)


def _attn_value_spans(
    scores: Array,
    ring_cell: Array,
    comp_cell: Array | None,
    sel: Array | None,
    step: Array,
    sink: Array,
    rope: Array,
    o: Array,
    heads: int,
    head_dim: int,
    rope_dim: int,
    window: int,
    topk: int,
) -> list[Span]:
    return _list_spans(ring_cell, comp_cell, sel, step, head_dim, window)


def _score_geometry(s: Scalars, n_sms: int) -> Geometry:
    # 16 list entries x 32 heads a block.
    return Geometry((-(-(s.window + s.topk) // 16), -(-s.heads // 32), 1), 256)


def _value_geometry(s: Scalars, n_sms: int) -> Geometry:
    # 32 positions x 16 heads a block, a warp a block of 64 list entries as far as warps go.
    blocks = -(-(s.window + s.topk) // BLOCK)
    warps = min(max(blocks, 4), 16)
    shared = warps * BLOCK * 8 + blocks * 16 * 4 * (1 + 1 + 36)
    return Geometry((s.head_dim // 32, -(-s.heads // 16), 1), 32 * warps, shared)


def _rows_nbytes(s: Scalars) -> int:
    """The rows of a full list."""
    return int(2 * s.head_dim * (s.window + s.topk))


_LIST = (
    r("ring_cell", U64, cell),
    r("comp_cell", U64, lambda s: (1 if s.topk else 0,)),
    r("sel", I32, lambda s: (1 + s.topk if s.topk else 0,)),
    r("step", I32, step_shape),
)

ATTN_SCORE = KernelSpec(
    "attn_score",
    (
        r("q", BF16, lambda s: (s.heads, s.head_dim)),
        *_LIST,
        w("scores", F32, lambda s: (s.heads, s.window + s.topk)),
        *scalars("u32", "heads", "head_dim", "window", "topk"),
    ),
    _attn_score,
    _attn_score_spans,
    geometry=_score_geometry,
    indirect_nbytes=_rows_nbytes,
)

ATTN_VALUE = KernelSpec(
    "attn_value",
    (
        r("scores", F32, lambda s: (s.heads, s.window + s.topk)),
        *_LIST,
        r("sink", F32, lambda s: (s.heads,)),
        r("rope", F32, lambda s: (s.rope_dim,)),
        w("o", BF16, lambda s: (s.heads, s.head_dim)),
        *scalars("u32", "heads", "head_dim", "rope_dim", "window", "topk"),
    ),
    _attn_value,
    _attn_value_spans,
    geometry=_value_geometry,
    indirect_nbytes=_rows_nbytes,
)
