"""Made-up routes: what they promise, and the published hit rates that they are made for."""

import numpy as np
import pytest

from ds41rt.errors import InputError
from ds41rt.moe.route_trace import RouteFacts, RouteTrace
from ds41rt.tools.route_synth import PATTERNS, Pattern, synthetic_routes
from ds41rt.tools.tier_sim import Tiers, TierSimulator

SMALL = {"n_layers": 5, "n_experts": 48, "top_k": 4}


@pytest.mark.parametrize("name", PATTERNS)
def test_routes_are_distinct_experts_and_follow_the_seed(name: str) -> None:
    routes = synthetic_routes(PATTERNS[name], 60, **SMALL, seed=3)
    assert routes.dtype == np.int16
    assert routes.shape == (60, 5, 4)
    assert routes.min() >= 0
    assert routes.max() == 47
    ordered = np.sort(routes, axis=2)
    assert (ordered[:, :, 1:] > ordered[:, :, :-1]).all()
    assert np.array_equal(routes, synthetic_routes(PATTERNS[name], 60, **SMALL, seed=3))
    assert np.array_equal(routes[:20], synthetic_routes(PATTERNS[name], 20, **SMALL, seed=3))
    assert not np.array_equal(routes, synthetic_routes(PATTERNS[name], 60, **SMALL, seed=4))


def shares(pattern: Pattern, n_tokens: int = 1500) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """How often each expert of one layer is picked, in the first and in the second half."""
    routes = synthetic_routes(pattern, n_tokens, n_layers=1, n_experts=48, top_k=4, seed=1)
    halves = np.split(routes.reshape(n_tokens, 4), 2)
    return np.array([np.bincount(half.ravel(), minlength=48) / len(half) for half in halves])


def test_what_the_numbers_of_a_pattern_mean() -> None:
    even = shares(Pattern(spread=0.0, lasting=1.0, drift_tokens=100.0, boost=0.0, boost_half_life=5.0))
    assert np.abs(even - 4 / 48).max() < 0.05
    skewed = shares(Pattern(spread=2.0, lasting=1.0, drift_tokens=100.0, boost=0.0, boost_half_life=5.0))
    assert skewed.max() > 0.4
    assert np.abs(skewed[0] - skewed[1]).max() < 0.1  # it lasts
    moving = shares(Pattern(spread=2.0, lasting=0.0, drift_tokens=100.0, boost=0.0, boost_half_life=5.0))
    assert np.abs(moving[0] - moving[1]).max() > 0.15
    repeats = []
    for boost in (0.0, 3.0):
        pattern = Pattern(spread=0.0, lasting=1.0, drift_tokens=100.0, boost=boost, boost_half_life=5.0)
        routes = synthetic_routes(pattern, 400, n_layers=1, n_experts=48, top_k=4, seed=1)[:, 0]
        repeats.append(
            np.mean([len(set(a) & set(b)) for a, b in zip(routes[1:].tolist(), routes[:-1].tolist(), strict=True)])
        )
    assert repeats[0] < 0.6
    assert repeats[1] > 1.2


def test_the_best_expert_comes_first() -> None:
    """The earlier a pick stands, the more popular is its expert on average."""
    pattern = Pattern(spread=2.0, lasting=1.0, drift_tokens=100.0, boost=0.0, boost_half_life=5.0)
    routes = synthetic_routes(pattern, 1000, n_layers=1, n_experts=48, top_k=4, seed=1)[:, 0]
    picked = np.bincount(routes.ravel(), minlength=48)
    means = picked[routes].mean(axis=0)
    assert (means[:-1] > 1.02 * means[1:]).all()


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"n_tokens": 0}, "at least one token, not 0"),
        ({"top_k": 0}, "cannot pick 0 of 48"),
        ({"top_k": 49}, "cannot pick 49 of 48"),
        ({"n_experts": 40000}, "experts <= 32767"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        synthetic_routes(PATTERNS["drift"], **{"n_tokens": 5, **SMALL, "seed": 0, **sizes})


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 5])
@pytest.mark.parametrize("name", PATTERNS)
def test_strict_lru_hits_as_often_as_published(name: str, seed: int) -> None:
    """.808, .893 and .960 with 3,000, 5,000 and 8,000 of the released model's 15,360 experts, each within 0.01."""
    routes = synthetic_routes(PATTERNS[name], 4000, n_layers=40, n_experts=384, top_k=6, seed=seed)
    trace = RouteTrace(RouteFacts(40, 384, 6, 1, 1, (0,)), routes)
    for n_slots, published in ((3000, 0.808), (5000, 0.893), (8000, 0.960)):
        counts = TierSimulator(trace, Tiers(n_slots, policy="oldest", evict_random_pct=0.0)).run(1500)
        assert counts.device_hits / routes[1500:].size == pytest.approx(published, abs=0.01)
