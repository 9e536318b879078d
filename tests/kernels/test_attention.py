"""Attention: golden cases, the list at every stage of the ring, and the kernels against a plain float64 version."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_harness import Memory, bf16, poisoned, run
from numpy.typing import NDArray

from ds41rt.cu.kernel import BF16
from ds41rt.kernels import attention, formats, projection, rope

Goldens = Mapping[str, NDArray[Any]]
HEADS, DIM, ROPE, WINDOW, TOPK = 4, 64, 16, 8, 6


@pytest.fixture(scope="module")
def goldens() -> Goldens:
    return dict(np.load(Path(__file__).parents[1] / "goldens" / "formats.npz"))


@pytest.mark.parametrize("case", ["attnA", "attnB", "attnC"])
def test_sink_attention_matches_goldens(goldens: Goldens, case: str) -> None:
    q, kv = (bf16(goldens[f"{case}_{n}"]).astype(np.float64) for n in ("q", "kv"))
    scores = (q @ kv.T).astype(np.float32) * np.float32(q.shape[1] ** -0.5)
    valid, want = goldens[f"{case}_valid"], bf16(goldens[f"{case}_out"]).astype(np.float64)
    scores[:, ~valid] = -np.inf
    got = attention.sink_attention(scores, kv, goldens[f"{case}_sink"], 0).astype(BF16).astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-30)
    assert np.linalg.norm(got - want) <= 1e-3 * np.linalg.norm(want)
    # Leaving out empty entries at the front changes no bit as long as the blocks stay where they were.
    first = int(valid.argmax())
    short = attention.sink_attention(scores[:, first:], kv[first:], goldens[f"{case}_sink"], first)
    np.testing.assert_array_equal(short.astype(BF16).astype(np.float64), got)


def test_sink_by_hand() -> None:
    row = np.linspace(1, 2, 8)[None]
    scores = np.zeros((3, 1), np.float32)
    sink = np.array([0, np.log(3), -1e5], np.float32)
    got = attention.sink_attention(scores, row, sink, 0)
    np.testing.assert_allclose(got, [row[0] / 2, row[0] / 4, row[0]], rtol=1e-6)
    with np.errstate(over="ignore"):
        none = attention.sink_attention(np.full((3, 1), -np.inf, np.float32), row, sink, 0)
    assert not none.any()


def slow_list(position: int, sel: list[int]) -> list[tuple[str, int] | None]:
    """The list entry by entry; None is an empty one."""
    if position == 0:
        slots = [0]
    else:
        now = position % WINDOW
        slots = [*range(now + 1, WINDOW), *range(now + 1)]
    return [("ring", s) if s <= position else None for s in slots] + [("comp", j) for j in sel]


def slow_attention(entries: list[NDArray[Any] | None], q: NDArray[Any], sink: NDArray[Any]) -> NDArray[Any]:
    """One head in plain float64: no running maximum, probabilities unrounded."""
    scores = [q @ e * len(q) ** -0.5 for e in entries if e is not None]
    top = max([*scores, float(sink)])
    p = np.exp(np.array(scores) - top)
    rows = np.stack([e for e in entries if e is not None])
    out: NDArray[Any] = p @ rows / (p.sum() + np.exp(float(sink) - top))
    return out


@pytest.mark.parametrize("position", [0, 1, 3, 6, 7, 8, 9, 20, 47])
@pytest.mark.parametrize("selected", [None, [], [0], [0, 2, 3, 9, 10, 11]])
def test_score_and_value_over_the_list(position: int, selected: list[int] | None) -> None:
    rng = np.random.default_rng(position)
    memory = Memory()
    ring = poisoned((WINDOW, DIM), BF16)
    filled = min(position + 1, WINDOW)
    ring[:filled] = rng.normal(size=(filled, DIM))
    # Compressed rows that are not selected may hold anything.
    comp = poisoned((64, DIM), BF16)
    topk = 0 if selected is None else TOPK
    q, sink = bf16(rng.normal(size=(HEADS, DIM)) * 2), rng.normal(size=HEADS).astype(np.float32)
    cell = rope.rope_cell(position, rope.rope_freqs(ROPE, 1e4))
    args: dict[str, Any] = {
        "ring_cell": memory.cell(ring),
        "step": np.array([position, 5], np.int32),
        "heads": HEADS,
        "head_dim": DIM,
        "window": WINDOW,
        "topk": topk,
    }
    if selected is not None:
        comp[selected] = rng.normal(size=(len(selected), DIM))
        sel = poisoned(1 + TOPK, np.int32)
        sel[: 1 + len(selected)] = [len(selected), *selected]
        args |= {"comp_cell": memory.cell(comp), "sel": sel}
    scores = run(attention.ATTN_SCORE, {**args, "q": q}, memory)["scores"]
    o = run(attention.ATTN_VALUE, {**args, "scores": scores, "sink": sink, "rope": cell, "rope_dim": ROPE}, memory)["o"]

    where = slow_list(position, selected or [])
    memories = {"ring": ring.astype(np.float64), "comp": comp.astype(np.float64)}
    entries = [None if e is None else memories[e[0]][e[1]] for e in where]
    for t in range(WINDOW + topk):
        entry = entries[t] if t < len(entries) else None
        if entry is None:
            assert np.isneginf(scores[:, t]).all()
        else:
            want = q.astype(np.float64) @ entry * DIM**-0.5
            np.testing.assert_allclose(scores[:, t], want, rtol=2**-22, atol=1e-6)
    turned = bf16(np.stack([slow_attention(entries, q[h].astype(np.float64), sink[h]) for h in range(HEADS)]))
    rope.rotate_tail(turned, cell, inverse=True)
    # bf16 probabilities and two bf16 roundings of values around 1.
    np.testing.assert_allclose(o.astype(np.float64), turned.astype(np.float64), rtol=0, atol=0.03)
    for span in memory.touched:
        assert span.access == "r"
        assert span.shape[0] in (filled, *[j + 1 for j in (selected or [])[-1:]])


def test_many_blocks() -> None:
    """A list of 300 entries that starts inside the second block: the running maximum moves several times."""
    rng = np.random.default_rng(3)
    rows = formats.round_bf16(rng.normal(size=(300, DIM)).astype(np.float32)).astype(np.float64)
    scores = (rng.normal(size=(HEADS, 300)) * 4 + np.arange(300) / 30).astype(np.float32)
    sink = rng.normal(size=HEADS).astype(np.float32)
    got = attention.sink_attention(scores, rows, sink, 70)
    p = np.exp(scores.astype(np.float64))
    want = p @ rows / (p.sum(1) + np.exp(sink.astype(np.float64)))[:, None]
    np.testing.assert_allclose(got, want, rtol=0, atol=2**-8)
    assert np.abs(got - want).max() > 2**-24, "probabilities must be rounded to bf16"
    assert (got != attention.sink_attention(scores, rows, sink, 0)).any(), "block boundaries must matter"


def test_attn_q_writes_heads_and_the_ring_row() -> None:
    rng = np.random.default_rng(4)
    rank = 64
    memory = Memory()
    ring = bf16(rng.normal(size=(WINDOW, DIM)))
    before = ring.copy()
    position = 21
    cell = rope.rope_cell(position, rope.rope_freqs(ROPE, 1e4))
    qa, kv = bf16(rng.normal(size=rank)), bf16(rng.normal(size=DIM))
    q_norm, kv_norm = bf16(rng.normal(size=rank)), bf16(rng.normal(size=DIM))
    codes = rng.integers(0, 126, (HEADS * DIM, rank)).astype(np.uint8)
    scales = rng.integers(115, 120, (HEADS * DIM // 32, 2)).astype(np.uint8)
    out = run(
        projection.ATTN_Q,
        {
            "qa": qa,
            "q_norm": q_norm,
            "wq_b": codes,
            "sq_b": scales,
            "kv": kv,
            "kv_norm": kv_norm,
            "rope": cell,
            "step": np.array([position, 1], np.int32),
            "ring_cell": memory.cell(ring),
            "q_rank": rank,
            "heads": HEADS,
            "head_dim": DIM,
            "rope_dim": ROPE,
            "window": WINDOW,
            "eps": 1e-20,
        },
        memory,
    )

    def norm(x: NDArray[Any], w: NDArray[Any]) -> NDArray[Any]:
        wide = x.astype(np.float64)
        out: NDArray[Any] = wide / np.sqrt((wide**2).mean()) * w.astype(np.float64)
        return out

    np.testing.assert_allclose(out["qr"].astype(np.float64), norm(qa, q_norm), rtol=2**-8)
    grid = formats.act_quant_dequant(out["qr"].astype(np.float32)).astype(np.float64)
    weight = formats.E4M3_VALUE[codes] * np.exp2(scales.astype(np.float64) - 127).repeat(32, 0).repeat(32, 1)
    want = bf16((weight @ grid).reshape(HEADS, DIM))
    rope.rotate_tail(want, cell)
    np.testing.assert_allclose(out["q"].astype(np.float64), want.astype(np.float64), rtol=2**-6, atol=2**-6)
    row = bf16(norm(kv, kv_norm))
    rope.rotate_tail(row, cell)
    stored = ring[position % WINDOW].astype(np.float32)
    np.testing.assert_array_equal(stored, formats.act_quant_dequant(row.astype(np.float32)))
    untouched = np.arange(WINDOW) != position % WINDOW
    np.testing.assert_array_equal(ring[untouched].view(np.uint16), before[untouched].view(np.uint16))


def test_qkv_a() -> None:
    rng = np.random.default_rng(5)
    dim, rank, head_dim = 128, 64, 32
    codes = {n: rng.integers(0, 126, (rows, dim)).astype(np.uint8) for n, rows in (("wq_a", rank), ("wkv", head_dim))}
    scales = {n: rng.integers(115, 120, (rows // 32, 4)).astype(np.uint8) for n, rows in (("sq_a", 64), ("skv", 32))}
    x = bf16(rng.normal(size=dim))
    out = run(
        projection.ATTN_QKV_A,
        {"normed": x, **codes, **scales, "dim": dim, "q_rank": rank, "head_dim": head_dim},
    )
    grid = formats.act_quant_dequant(x.astype(np.float32)).astype(np.float64)
    for w, s, y in (("wq_a", "sq_a", "qa"), ("wkv", "skv", "kv")):
        weight = formats.E4M3_VALUE[codes[w]] * np.exp2(scales[s].astype(np.float64) - 127).repeat(32, 0).repeat(32, 1)
        size = weight @ np.abs(grid)
        assert np.all(np.abs(out[y].astype(np.float64) - weight @ grid) <= 2**-8 * np.abs(weight @ grid) + 1e-6 * size)


def test_grouped_output() -> None:
    rng = np.random.default_rng(6)
    groups, rank, k = 2, 32, 128
    o, w = bf16(rng.normal(size=(groups, k))), rng.integers(0, 126, (groups * rank, k)).astype(np.uint8)
    s = rng.integers(115, 120, (2, 4)).astype(np.uint8)
    u = run(projection.ATTN_WO_A, {"o": o, "w": w, "s": s, "groups": groups, "rank": rank, "k": k})["u"]
    weight = formats.E4M3_VALUE[w] * np.exp2(s.astype(np.float64) - 127).repeat(32, 0).repeat(32, 1)
    want = np.concatenate([weight[:32] @ o[0].astype(np.float64), weight[32:] @ o[1].astype(np.float64)])
    np.testing.assert_array_equal(u.view(np.uint16), bf16(want.astype(np.float32)).view(np.uint16))
