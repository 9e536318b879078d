"""Compressor, indexer, Engram, head and slot table: random data against plain float64."""

from typing import Any

import numpy as np
import pytest
from kernel_harness import Memory, bf16, poisoned, run
from numpy.typing import NDArray

from ds41rt.cu.kernel import BF16, Span
from ds41rt.kernels import compressor, engram, formats, head, indexer, rope, slots
from ds41rt.kernels.registry import SPECS

DIM, HEAD, INDEX, HEADS, ROPE = 128, 64, 32, 32, 16
EPS = 1e-20


def norm(x: NDArray[Any], w: NDArray[Any]) -> NDArray[Any]:
    wide = x.astype(np.float64)
    out: NDArray[Any] = wide / np.sqrt((wide**2).mean() + EPS) * w.astype(np.float64)
    return out


def test_names_are_unique() -> None:
    assert len({spec.name for spec in SPECS}) == len(SPECS) == 27


@pytest.mark.parametrize("ratio", [1, 2])
def test_comp_proj(ratio: int) -> None:
    rng = np.random.default_rng(ratio)
    x, wkv, wgate = (bf16(rng.normal(size=s)) for s in (DIM, (HEAD, DIM), (HEAD, DIM)))
    args = {"normed": x, "wkv": wkv, "dim": DIM, "head_dim": HEAD, "ratio": ratio}
    out = run(compressor.COMP_PROJ, args | ({"wgate": wgate} if ratio == 2 else {}))
    exact = (wkv.astype(np.float64) @ x.astype(np.float64)).astype(np.float32)
    if ratio == 1:
        np.testing.assert_array_equal(out["kv"], formats.round_bf16(exact))
        assert "gate" not in out
    else:
        np.testing.assert_allclose(out["kv"], exact, rtol=2**-22)
        np.testing.assert_allclose(out["gate"], wgate.astype(np.float64) @ x.astype(np.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("ratio", "position"), [(1, 0), (1, 9), (2, 0), (2, 8), (2, 1), (2, 9)])
def test_comp_row(ratio: int, position: int) -> None:
    rng = np.random.default_rng(10 * position + ratio)
    memory = Memory()
    comp, ikey = poisoned((16, HEAD), BF16), poisoned((16, INDEX), BF16)
    pool = rng.normal(size=(2, 2, HEAD)).astype(np.float32)
    before = pool.copy()
    j = position // ratio
    cell = rope.rope_cell(j * ratio, rope.rope_freqs(ROPE, 1e4))
    kv = formats.round_bf16(rng.normal(size=HEAD).astype(np.float32))
    norm_w, k_norm, wk = (bf16(rng.normal(size=s)) for s in (HEAD, INDEX, (INDEX, HEAD)))
    args: dict[str, Any] = {
        "kv": kv,
        "norm_w": norm_w,
        "rope_c": cell,
        "step": np.array([position, 3], np.int32),
        "comp_cell": memory.cell(comp),
        "ikey_cell": memory.cell(ikey),
        "wk": wk,
        "k_norm": k_norm,
        "head_dim": HEAD,
        "rope_dim": ROPE,
        "index_dim": INDEX,
        "ratio": ratio,
        "eps": EPS,
    }
    latent = kv.astype(np.float64)
    slot = position % 2
    if ratio == 2:
        gate = rng.normal(size=HEAD).astype(np.float32)
        args |= {"gate": gate, "pool_cell": memory.cell(pool)}
        e = np.exp(np.stack([before[0, 1], gate]).astype(np.float64))
        latent = (e / e.sum(0) * np.stack([before[0, 0], kv])).sum(0)
    run(compressor.COMP_ROW, args, memory)

    if ratio == 2:
        np.testing.assert_array_equal(pool[slot], np.stack([kv, args["gate"]]))
        np.testing.assert_array_equal(pool[1 - slot], before[1 - slot])
        if slot == 0:
            assert [span.access for span in memory.touched] == ["rw"]
            assert np.isnan(comp.astype(np.float32)).all()
            return
    others = np.arange(16) != j
    assert np.isnan(comp[others].astype(np.float32)).all()
    assert np.isnan(ikey[others].astype(np.float32)).all()
    row = bf16(norm(bf16(latent.astype(np.float32)), norm_w).astype(np.float32))
    key = bf16(norm(bf16((wk.astype(np.float64) @ row.astype(np.float64)).astype(np.float32)), k_norm))
    rope.rotate_tail(row, cell)
    rope.rotate_tail(key, cell)
    want_row = formats.dequant_e2m1(*formats.fp4_e4m3(row.astype(np.float32))).reshape(-1)
    want_key = formats.dequant_e2m1(*formats.fp4_pow2(key.astype(np.float32))).reshape(-1)
    # A last-bit difference before the FP4 rounding moves an element by one step of the grid, rarely.
    assert np.count_nonzero(comp[j].astype(np.float32) != want_row) <= 2
    assert np.count_nonzero(ikey[j].astype(np.float32) != want_key) <= 2


def test_index_q() -> None:
    rng = np.random.default_rng(3)
    rank = 64
    qr, x, wproj = bf16(rng.normal(size=rank)), bf16(rng.normal(size=DIM)), bf16(rng.normal(size=(HEADS, DIM)))
    codes = rng.integers(0, 126, (HEADS * INDEX, rank)).astype(np.uint8)
    scales = rng.integers(115, 120, (HEADS * INDEX // 32, 2)).astype(np.uint8)
    cell = rope.rope_cell(77, rope.rope_freqs(ROPE, 1e4))
    out = run(
        indexer.INDEX_Q,
        {
            "qr": qr,
            "wq_b": codes,
            "s": scales,
            "normed": x,
            "wproj": wproj,
            "rope": cell,
            "q_rank": rank,
            "dim": DIM,
            "index_heads": HEADS,
            "index_dim": INDEX,
            "rope_dim": ROPE,
        },
    )
    grid = formats.act_quant_dequant(qr.astype(np.float32)).astype(np.float64)
    weight = formats.E4M3_VALUE[codes] * np.exp2(scales.astype(np.float64) - 127).repeat(32, 0).repeat(32, 1)
    q = bf16((weight @ grid).reshape(HEADS, INDEX))
    rope.rotate_tail(q, cell)
    want = formats.dequant_e2m1(*formats.fp4_pow2(q.astype(np.float32))).reshape(HEADS, INDEX)
    assert np.mean(out["q"].astype(np.float32) != want) < 0.01
    omega = bf16(wproj.astype(np.float64) @ x.astype(np.float64)).astype(np.float64) * 2**-5
    np.testing.assert_allclose(out["omega"].astype(np.float64), omega, rtol=2**-8)


@pytest.mark.parametrize(("position", "ratio"), [(0, 2), (0, 1), (1, 2), (6, 2), (30, 1), (63, 2)])
def test_index_score(position: int, ratio: int) -> None:
    rng = np.random.default_rng(position + ratio)
    memory = Memory()
    rows, n = 40, (position + 1) // ratio
    keys = poisoned((rows, INDEX), BF16)
    keys[:n] = rng.integers(-6, 7, (n, INDEX)) / 2
    q, omega = bf16(rng.integers(-6, 7, (HEADS, INDEX)) / 2), bf16(rng.normal(size=HEADS))
    scores = run(
        indexer.INDEX_SCORE,
        {
            "q": q,
            "omega": omega,
            "ikey_cell": memory.cell(keys),
            "step": np.array([position, 0], np.int32),
            "index_heads": HEADS,
            "index_dim": INDEX,
            "ratio": ratio,
            "max_rows": rows,
        },
        memory,
    )["scores"]
    assert np.isneginf(scores[n:]).all()
    assert len(memory.touched) == bool(n)
    for j in range(n):
        total = np.float32(0)
        for h in range(HEADS):
            dot = bf16(np.float32(np.dot(q[h].astype(np.float64), keys[j].astype(np.float64))))
            product = bf16(np.float32(max(float(dot), 0.0) * float(omega[h])))
            total = np.float32(total + product.astype(np.float32))
        assert scores[j] == bf16(total).astype(np.float32)


def test_pointers_to_rows() -> None:
    """The addresses that the specs name, by hand."""
    q = bf16(np.zeros((HEADS, INDEX)))
    cell = np.array([0x1000], np.uint64)
    assert indexer.INDEX_SCORE.indirect is not None
    spans = indexer.INDEX_SCORE.indirect(q, q[:, 0], cell, np.array([9, 0], np.int32), None, HEADS, INDEX, 2, 40)
    assert spans == [Span(0x1000, BF16, (5, INDEX), "r")]


def test_engram() -> None:
    rng = np.random.default_rng(4)
    cols, width, hc = 6, 32, 4
    n, k = (hc + 1) * DIM, cols * width
    codes = rng.integers(0, 126, (cols, width)).astype(np.uint8)
    codes[rng.random(codes.shape) < 0.5] |= 0x80
    scales = rng.integers(112, 118, (cols, 1)).astype(np.uint8)
    w = rng.integers(0, 126, (n, k)).astype(np.uint8)
    w[rng.random(w.shape) < 0.5] |= 0x80
    ws = rng.integers(112, 118, (n // 32, k // 32)).astype(np.uint8)
    kv = run(
        engram.ENGRAM_KV,
        {"codes": codes, "scales": scales, "w": w, "ws": ws, "cols": cols, "head_dim": width, "n": n, "k": k},
    )["kv"]
    # The rows are on the FP8 grid already: the activation quantisation loses nothing here.
    e = (formats.E4M3_VALUE[codes] * np.exp2(scales.astype(np.float64) - 127)).reshape(-1)
    weight = formats.E4M3_VALUE[w] * np.exp2(ws.astype(np.float64) - 127).repeat(32, 0).repeat(32, 1)
    want, size = weight @ e, np.abs(weight) @ np.abs(e)
    assert np.all(np.abs(kv.astype(np.float64) - want) <= 2**-8 * np.abs(want) + 2**-22 * size)

    streams, qw, kw = (bf16(rng.normal(size=(hc, DIM))) for _ in range(3))
    before = streams.astype(np.float64)
    out = run(
        engram.ENGRAM_APPLY,
        {"kv": kv, "q_weight": qw, "k_weight": kw, "streams": streams, "dim": DIM, "hc": hc, "eps": EPS},
    )
    keys, value = kv.astype(np.float64)[: hc * DIM].reshape(hc, DIM), kv.astype(np.float64)[hc * DIM :]
    rho = 1 / np.sqrt((before**2).mean(1) + EPS) / np.sqrt((keys**2).mean(1) + EPS)
    delta = rho * DIM**-0.5 * (before * qw.astype(np.float64) * kw.astype(np.float64) * keys).sum(1)
    gate = 1 / (1 + np.exp(-np.copysign(np.sqrt(np.maximum(np.abs(delta), 1e-6)), delta)))
    np.testing.assert_allclose(out["gate"], gate, rtol=1e-5)
    new = before + gate[:, None] * value
    np.testing.assert_allclose(streams.astype(np.float64), new, rtol=2**-8, atol=1e-5 * np.abs(value).max())


def test_engram_gate_of_zero_is_of_plus_a_thousandth() -> None:
    """copysign, not sign: with delta = +0 the gate is sigmoid(+1e-3)."""
    rng = np.random.default_rng(5)
    kv = bf16(rng.normal(size=5 * 32))
    ones = bf16(np.ones((4, 32)))
    streams = bf16(np.zeros((4, 32)))
    gate = run(
        engram.ENGRAM_APPLY,
        {
            "kv": bf16(np.abs(kv.astype(np.float32))),
            "q_weight": ones,
            "k_weight": ones,
            "streams": streams,
            "dim": 32,
            "hc": 4,
            "eps": EPS,
        },
    )["gate"]
    np.testing.assert_allclose(gate, 1 / (1 + np.exp(-1e-3)), rtol=1e-6)


def test_head() -> None:
    rng = np.random.default_rng(6)
    hidden, norm_w, w = (bf16(rng.normal(size=s)) for s in (DIM, DIM, (300, DIM)))
    out = run(head.HEAD, {"hidden": hidden, "norm_w": norm_w, "w": w, "dim": DIM, "vocab": 300, "eps": EPS})
    np.testing.assert_allclose(out["normed"].astype(np.float64), norm(hidden, norm_w), rtol=2**-8)
    want = w.astype(np.float64) @ out["normed"].astype(np.float64)
    np.testing.assert_allclose(out["logits"], want, rtol=2**-22, atol=1e-6)


def test_slot_table_set_applies_the_counted_triples() -> None:
    rng = np.random.default_rng(7)
    table = rng.integers(-1, 50, (8, 384)).astype(np.int32)
    want = table.copy()
    keys = rng.permutation(8 * 384)[:20]
    triples = poisoned(1 + 3 * 32, np.int32)
    triples[0] = 20
    for i, key in enumerate(keys.tolist()):
        layer, expert = divmod(key, 384)
        want[layer, expert] = 1000 + i
        triples[1 + 3 * i : 4 + 3 * i] = layer, expert, 1000 + i
    run(slots.SLOT_TABLE_SET, {"table": table, "triples": triples, "n_layers": 8, "n_experts": 384, "capacity": 32})
    np.testing.assert_array_equal(table, want)


def test_duplicate_triples_are_not_the_last_one_wins() -> None:
    table = np.full((2, 4), -1, np.int32)
    triples = np.array([2, 1, 2, 10, 1, 2, 20], np.int32)
    run(slots.SLOT_TABLE_SET, {"table": table, "triples": triples, "n_layers": 2, "n_experts": 4, "capacity": 2})
    assert table[1, 2] == 10
