"""Routing: softplus and selections against goldens, an independent slow chain, and the kernel's header and pointers."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_harness import bf16, run
from numpy.typing import NDArray

from ds41rt.kernels import router
from ds41rt.kernels.softplus import sqrt_softplus

GOLDENS = Path(__file__).parents[1] / "goldens"
N, K = 384, 6
RULE: dict[str, Any] = {"top_k": K, "temperature": 1.0, "route_scale": 1.5, "normalise": True}


def f32(x: float) -> float:
    return float(np.float32(x))


def slow_select(
    scores: list[float], logits: list[float], bias: list[float], scale: float, normalise: bool, k: int = K
) -> tuple[list[int], list[float], bool]:
    """The rule on Python floats, rounding every step to float32; scores are given (softplus is tested by itself)."""
    with np.errstate(all="ignore"):
        keys = [f32(s + b) for s, b in zip(scores, bias, strict=True)]
        keys = [-math.inf if math.isnan(key) else key for key in keys]
        ids = sorted(range(len(keys)), key=lambda e: (-keys[e], e))[:k]
        weights = [scores[e] for e in ids]
        if normalise:
            total = 0.0
            for w in weights:
                total = f32(total + w)
            total = f32(total + f32(1e-20))
            weights = [float(np.float32(w) / np.float32(total)) for w in weights]
        weights = [f32(w * f32(scale)) for w in weights]
    bad = any(map(math.isnan, logits)) or not all(map(math.isfinite, weights))
    return ids, weights, bad


def test_sqrt_softplus_matches_libm_bit_for_bit() -> None:
    z = dict(np.load(GOLDENS / "softplus.npz"))
    with np.errstate(all="ignore"):
        got = sqrt_softplus(z["x"])
    nan = np.isnan(z["glibc"])
    assert np.isnan(got[nan]).all()
    np.testing.assert_array_equal(got[~nan].view(np.uint32), z["glibc"][~nan].view(np.uint32))


def test_routes_match_goldens() -> None:
    z = dict(np.load(GOLDENS / "formats.npz"))
    for i in range(2000):
        bias = z["route_bias_sets"][z["route_bias_id"][i]]
        ids, weights, not_finite = router.select_experts(z["route_logits"][i], bias, **RULE)
        assert not not_finite
        margin = z["route_margin"][i]
        if margin == 0 or margin > 8 * np.spacing(z["route_seventh"][i]):
            assert set(ids.tolist()) == set(z["route_ids"][i].tolist()), f"route {i}"
        if ids.tolist() == z["route_ids"][i].tolist():
            rtol = 2e-2 if z["route_kind"][i] in (4, 6) else 1e-6
            np.testing.assert_allclose(weights, z["route_weights"][i], rtol=rtol, atol=1e-30)


def random_route(rng: np.random.Generator, i: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """A kind of logits and of bias by `i`: ties, subnormal, huge, around 20, not finite."""
    logits = rng.normal(size=N).astype(np.float32)
    bias = (rng.normal(size=N) * 0.1).astype(np.float32)
    match i % 13:
        case 1:
            logits = np.round(logits * 2) / np.float32(2)
            bias = np.round(bias * 4) / np.float32(4)
        case 2:
            logits[:] = logits[0]
            bias[:] = 0
        case 3:
            logits = (rng.normal(size=N) * 1e-40).astype(np.float32)
        case 4:
            logits = (logits * np.float32(1e4)).astype(np.float32)
        case 5:
            logits = np.float32(20) + (rng.integers(-3, 4, N) * np.float32(2**-19)).astype(np.float32)
            bias[:] = 0
        case 6:
            logits = -np.abs(logits) * np.float32(60) - np.float32(60)
            bias *= np.float32(1e-30)
        case 7:
            logits[rng.integers(0, N, 3)] = np.nan
        case 8:
            logits[rng.integers(0, N, 2)] = np.inf
        case 9:
            logits[rng.random(N) < 0.99] = -np.inf
            bias[:] = rng.choice(np.array([0.0, -0.0], np.float32), N)
        case 10:
            logits = np.where(rng.random(N) < 0.5, np.float32(0.0), np.float32(-0.0)).astype(np.float32)
            bias = np.round(bias * 4) / np.float32(4)
        case 11:
            logits[:] = np.nan if i % 24 == 11 else np.float32(3e38)
            bias[rng.integers(0, N, 4)] = np.nan
        case 12:
            # Fewer than six finite keys: -inf and NaN keys rank together, by id.
            bias[4:] = -np.inf
            logits[rng.integers(0, 20, 5)] = np.nan
    return logits, bias


def test_twenty_thousand_random_routes_match_the_slow_chain() -> None:
    rng = np.random.default_rng(41)
    bad_seen = 0
    for i in range(20_000):
        logits, bias = random_route(rng, i)
        normalise, scale = bool(i % 5), (1.5, 2.5)[i % 2]
        ids, weights, bad = router.select_experts(
            logits, bias, top_k=K, temperature=1.0, route_scale=scale, normalise=normalise
        )
        with np.errstate(all="ignore"):
            scores = sqrt_softplus(logits)
        some = candidates(scores, bias)
        want_ids, want_weights, want_bad = slow_select(
            scores[some].tolist(), logits[some].tolist(), bias[some].tolist(), scale, normalise
        )
        want_bad = want_bad or bool(np.isnan(logits).any())
        assert ids.tolist() == [some[e] for e in want_ids], f"route {i}"
        np.testing.assert_array_equal(weights, np.array(want_weights, np.float32), err_msg=f"route {i}")
        assert bad == want_bad, f"route {i}"
        assert len(set(ids.tolist())) == K
        bad_seen += bad
    assert 2000 < bad_seen < 8000


def candidates(scores: NDArray[Any], bias: NDArray[Any]) -> list[int]:
    """Ascending ids of every key that is not below the sixth largest: a superset of any right selection."""
    with np.errstate(all="ignore"):
        keys = scores + bias
    keys[np.isnan(keys)] = -np.inf
    some: list[int] = np.flatnonzero(keys >= np.sort(keys)[-K]).tolist()
    return some


@pytest.mark.parametrize("low", [0, 256, 378])
def test_every_expert_can_win(low: int) -> None:
    rng = np.random.default_rng(low)
    for first in range(low, min(low + 128, N - K + 1), 3):
        logits = rng.normal(size=N).astype(np.float32)
        winners = np.arange(first, first + K)
        logits[winners] += np.float32(30)
        ids, _, bad = router.select_experts(logits, np.zeros(N, np.float32), **RULE)
        assert sorted(ids.tolist()) == winners.tolist()
        assert not bad


def test_not_finite_logits() -> None:
    rng = np.random.default_rng(1)
    base = rng.normal(size=N).astype(np.float32)
    zero = np.zeros(N, np.float32)
    one = base.copy()
    one[200] = np.nan
    for logits in (one, np.full(N, np.nan, np.float32), np.where(np.arange(N) == 7, np.float32(np.inf), base)):
        ids, _, bad = router.select_experts(logits, zero, **RULE)
        assert bad
        assert len(set(ids.tolist())) == K
        assert ids.min() >= 0
        assert ids.max() < N
    ids, _, _ = router.select_experts(np.full(N, np.nan, np.float32), zero, **RULE)
    assert ids.tolist() == [0, 1, 2, 3, 4, 5]
    # Legal: all -inf, all very negative, all equal. Lower ids first.
    for value in (-np.inf, -1e30, 0.25):
        ids, weights, bad = router.select_experts(np.full(N, value, np.float32), zero, **RULE)
        assert ids.tolist() == [0, 1, 2, 3, 4, 5]
        assert not bad
        assert np.isfinite(weights).all()


def test_scores_an_ulp_apart_stay_ordered() -> None:
    logits = np.full(N, -5, np.float32)
    order = np.random.default_rng(2).permutation(40)[:8] + 100
    value = np.float32(25)
    for e in order:
        logits[e] = value
        value = np.nextafter(value, np.float32(0))
    bias = np.zeros(N, np.float32)
    scores = sqrt_softplus(logits)
    # A square root maps two neighbours to one value at times; equal scores: lower id first.
    want = sorted(range(N), key=lambda e: (-scores[e], e))[:K]
    assert router.select_experts(logits, bias, **RULE)[0].tolist() == want
    scale = np.float32(1.0)
    for e in order:
        bias[e], scale = scale, np.nextafter(scale, np.float32(0))
    logits[:] = -200
    assert router.select_experts(logits, bias, **RULE)[0].tolist() == order[:K].tolist()


def test_temperature_divides_the_logits_first() -> None:
    rng = np.random.default_rng(3)
    logits, bias = rng.normal(size=N).astype(np.float32), (rng.normal(size=N) / 10).astype(np.float32)
    got = router.select_experts(logits, bias, **{**RULE, "temperature": 0.7})
    want = router.select_experts(logits / np.float32(0.7), bias, **RULE)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])


def test_eight_weights_are_summed_in_pick_order() -> None:
    """With eight picks a pairwise sum would give other bits."""
    rng = np.random.default_rng(4)
    pairwise_differs = 0
    for _ in range(50):
        logits = (rng.normal(size=N) * 3).astype(np.float32)
        bias = np.zeros(N, np.float32)
        got = router.select_experts(logits, bias, top_k=8, temperature=1.0, route_scale=1.0, normalise=True)
        scores = sqrt_softplus(logits)
        want = slow_select(scores.tolist(), logits.tolist(), bias.tolist(), 1.0, True, k=8)
        assert got[0].tolist() == want[0]
        np.testing.assert_array_equal(got[1], np.array(want[1], np.float32))
        w = scores[got[0]]
        pairwise_differs += bool((w / np.add.reduce(w) != got[1]).any())
    assert pairwise_differs


DEV, HOST, SLOT = 0x7F00_0000_0000, 0x7E00_0000_0000, 18_800_640
OFFS = (0, 5_898_240, 11_796_480)


def select_args(logits: NDArray[Any], slot_row: NDArray[np.int32]) -> dict[str, Any]:
    return {
        "logits": logits,
        "bias": np.zeros(N, np.float32),
        "slot_row": slot_row,
        "n_experts": N,
        "top_k": K,
        "temperature": 1.0,
        "route_scale": 1.5,
        "normalise": 1,
        "dev_base": DEV,
        "host_base": HOST,
        "slot_nbytes": SLOT,
        "gate_off": OFFS[0],
        "up_off": OFFS[1],
        "down_off": OFFS[2],
    }


def test_header_and_pointer_table() -> None:
    rng = np.random.default_rng(5)
    misses = 0
    for _ in range(200):
        logits = rng.normal(size=N).astype(np.float32)
        slot_row = rng.permutation(np.arange(1, N + 1)).astype(np.int32)
        slot_row[rng.random(N) < 0.15] = -1
        host = (rng.random(N) < 0.3) & (slot_row > 0)
        slot_row[host] |= 1 << 30
        args = select_args(logits, slot_row)
        out = run(router.ROUTE_SELECT, args)
        ids, weights, _ = router.select_experts(logits, args["bias"], **RULE)
        header = out["header"].tolist()
        planned = sorted(range(K), key=lambda i: ids[i])
        codes = [int(slot_row[ids[i]]) for i in planned]
        assert header[0] == (1 if -1 in codes else 0)
        misses += header[0]
        assert header[1:7] == ids.tolist()
        assert header[7:13] == weights.view(np.int32).tolist()
        assert header[13:] == codes
        np.testing.assert_array_equal(out["weight_dev"], weights[planned])
        assert not out["rows_dev"].any()
        for matrix, off in enumerate(OFFS):
            for i, code in enumerate(codes):
                slot = 0 if code == -1 else code & ~(1 << 30)
                base = HOST if code > 0 and code >> 30 else DEV
                assert int(out["ptrs_dev"][matrix, i]) == base + slot * SLOT + off
    assert 0 < misses < 200


def test_flags_of_a_miss_that_is_not_finite() -> None:
    logits = np.full(N, np.nan, np.float32)
    out = run(router.ROUTE_SELECT, select_args(logits, np.full(N, -1, np.int32)))
    assert out["header"][0] == 3
    assert out["header"][1:7].tolist() == [0, 1, 2, 3, 4, 5]
    assert (out["ptrs_dev"] == np.array(OFFS, np.uint64)[:, None] + np.uint64(DEV)).all()
    out = run(router.ROUTE_SELECT, select_args(logits, np.full(N, 9, np.int32)))
    assert out["header"][0] == 2


def test_a_slot_code_of_0_is_no_slot() -> None:
    """Slot 0 is never handed out: a table that says so (zeroed by mistake) must be seen as a miss."""
    logits = np.random.default_rng(6).normal(size=N).astype(np.float32)
    assert run(router.ROUTE_SELECT, select_args(logits, np.zeros(N, np.int32)))["header"][0] == 1


def test_router_logits() -> None:
    rng = np.random.default_rng(7)
    x, w = bf16(rng.normal(size=256)), bf16(rng.normal(size=(N, 256)))
    got = run(router.ROUTER_LOGITS, {"normed": x, "w": w, "dim": 256, "n_experts": N})["logits"]
    want = w.astype(np.longdouble) @ x.astype(np.longdouble)
    assert np.all(np.abs(got - want) <= 2**-24 * np.abs(want) + 1e-13)


def test_plan() -> None:
    order, ids, weights = router.plan(np.array([9, 2, 300, 4], np.int32), np.array([4, 3, 2, 1], np.float32))
    assert order.tolist() == [1, 3, 0, 2]
    assert ids.tolist() == [2, 4, 9, 300]
    assert weights.tolist() == [3, 1, 4, 2]
