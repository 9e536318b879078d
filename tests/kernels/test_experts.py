"""Routed experts through made-up pointers, and the ordered sum."""

from typing import Any

import numpy as np
import pytest
from kernel_harness import Memory, bf16, run
from numpy.typing import NDArray

from ds41rt.cu.kernel import BF16
from ds41rt.kernels import experts, formats, hc

DIM, INTER, K, LIMIT = 128, 64, 6, 10.0
N_W = INTER * DIM // 2
N_S = INTER * DIM // 32
DISP = 3 * N_W


def make_experts(rng: np.random.Generator) -> NDArray[np.uint8]:
    """Six slots in file order: three weight matrices, then their three scale matrices."""
    slots = np.empty((K, 3 * (N_W + N_S)), np.uint8)
    slots[:, :DISP] = rng.integers(0, 256, (K, DISP))
    slots[:, DISP:] = rng.integers(121, 128, (K, 3 * N_S))
    return slots


def pointer_args(memory: Memory, slots: NDArray[np.uint8]) -> NDArray[np.uint64]:
    bases = [memory.put(slot) for slot in slots]
    return np.array([[base + m * N_W for base in bases] for m in range(3)], np.uint64)


def scale_disp(matrix: int) -> int:
    return DISP + matrix * N_S - matrix * N_W


def full_matrix(slot: NDArray[np.uint8], matrix: int, n: int, k: int) -> NDArray[np.float64]:
    packed = slot[matrix * N_W : (matrix + 1) * N_W].reshape(n, k // 2)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(n, k)
    scales = slot[DISP + matrix * N_S : DISP + (matrix + 1) * N_S].reshape(n, k // 32)
    full: NDArray[np.float64] = formats.E2M1_VALUE[codes] * np.exp2(scales.astype(np.float64) - 127).repeat(32, 1)
    return full


@pytest.fixture
def setup() -> tuple[np.random.Generator, Memory, NDArray[np.uint8], NDArray[np.uint64]]:
    rng, memory = np.random.default_rng(1), Memory()
    slots = make_experts(rng)
    return rng, memory, slots, pointer_args(memory, slots)


def test_gate_up(setup: Any) -> None:
    rng, memory, slots, ptrs = setup
    x, weights = bf16(rng.normal(size=DIM)), rng.uniform(0.1, 1, K).astype(np.float32)
    t = run(
        experts.EXPERT_GATE_UP,
        {
            "normed": x,
            "ptrs_dev": ptrs,
            "weight_dev": weights,
            "dim": DIM,
            "inter": INTER,
            "top_k": K,
            "gate_scale_disp": scale_disp(0),
            "up_scale_disp": scale_disp(1),
            "limit": LIMIT,
        },
        memory,
    )["t"]
    grid = formats.act_quant_dequant(x.astype(np.float32)).astype(np.float64)
    clamped = 0
    for e in range(K):
        g = bf16(full_matrix(slots[e], 0, INTER, DIM) @ grid).astype(np.float64)
        u = bf16(full_matrix(slots[e], 1, INTER, DIM) @ grid).astype(np.float64)
        clamped += int((g > LIMIT).sum() + (np.abs(u) > LIMIT).sum())
        g, u = np.minimum(g, LIMIT), u.clip(-LIMIT, LIMIT)
        want = weights[e] * (g / (1 + np.exp(-g)) * u)
        # A bf16 ulp in g or u where the float32 sum fell on the other side, and the last rounding.
        np.testing.assert_allclose(t[e].astype(np.float64), want, rtol=2**-5, atol=1e-6)
        exact = bf16(want.astype(np.float32)).view(np.uint16) == t[e].view(np.uint16)
        assert exact.mean() > 0.95
    assert clamped > 20


def test_down(setup: Any) -> None:
    rng, memory, slots, ptrs = setup
    t = bf16(rng.normal(size=(K, INTER)))
    out = run(
        experts.EXPERT_DOWN,
        {"t": t, "ptrs_dev": ptrs, "dim": DIM, "inter": INTER, "top_k": K, "down_scale_disp": scale_disp(2)},
        memory,
    )["out"]
    for e in range(K):
        full = full_matrix(slots[e], 2, DIM, INTER)
        grid = formats.act_quant_dequant(t[e].astype(np.float32)).astype(np.float64)
        want, size = full @ grid, np.abs(full) @ np.abs(grid)
        assert np.all(np.abs(out[e].astype(np.float64) - want) <= 2**-8 * np.abs(want) + 2**-22 * size)


def test_a_harmless_slot_0_gives_zeros(setup: Any) -> None:
    """What an absent expert computes: all bytes 0, so every scale is 2^-127 and every code 0."""
    rng, memory, slots, ptrs = setup
    slots[3] = 0
    x = bf16(rng.normal(size=DIM))
    args = {"ptrs_dev": ptrs, "dim": DIM, "inter": INTER, "top_k": K}
    t = run(
        experts.EXPERT_GATE_UP,
        {
            "normed": x,
            "weight_dev": np.ones(K, np.float32),
            "gate_scale_disp": scale_disp(0),
            "up_scale_disp": scale_disp(1),
            "limit": LIMIT,
            **args,
        },
        memory,
    )["t"]
    assert not t[3].astype(np.float32).any()
    assert t[[0, 1, 2, 4, 5]].astype(np.float32).any(axis=1).all()
    out = run(experts.EXPERT_DOWN, {"t": t, "down_scale_disp": scale_disp(2), **args}, memory)["out"]
    assert not out[3].astype(np.float32).any()
    assert np.isfinite(out.astype(np.float32)).all()


def test_combine_adds_in_plan_order_then_shared_then_expands() -> None:
    rng = np.random.default_rng(2)
    out, shared = bf16(rng.normal(size=(K, DIM)) * 10 ** rng.uniform(-2, 2, (K, DIM))), bf16(rng.normal(size=DIM))
    post, comb = rng.normal(size=4).astype(np.float32), rng.normal(size=(4, 4)).astype(np.float32)
    streams = bf16(rng.normal(size=(4, DIM)))
    before = streams.copy()
    args = {"post": post, "comb": comb, "dim": DIM, "hc": 4, "top_k": K}
    moe = run(experts.MOE_COMBINE, {"expert_out": out, "shared_out": shared, "streams": streams, **args})["moe_out"]
    total = np.zeros(DIM, np.float32)
    for row in [*out, shared]:
        total = total + row.astype(np.float32)
    np.testing.assert_array_equal(moe.view(np.uint16), total.astype(BF16).view(np.uint16))
    want = hc.expand(moe.astype(np.float32), before.astype(np.float32), post, comb).astype(BF16)
    np.testing.assert_array_equal(streams.view(np.uint16), want.view(np.uint16))
