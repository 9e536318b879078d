"""The simulation of two tiers against a model of the scheme in plain lists, for strict LRU, which leaves no choice."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from ds41rt.errors import InputError
from ds41rt.moe.route_trace import RouteFacts, RouteTrace
from ds41rt.tools.route_synth import Pattern, synthetic_routes
from ds41rt.tools.tier_sim import Counts, Tiers, TierSimulator

FACTS = RouteFacts(n_layers=5, n_experts=24, top_k=3, expert_nbytes=10, slot_nbytes=16, segment_starts=(0, 2, 3))
PATTERN = Pattern(spread=1.5, lasting=0.3, drift_tokens=60.0, boost=1.0, boost_half_life=4.0)
Key = tuple[int, int]


def some_trace(n_tokens: int, seed: int = 0) -> RouteTrace:
    ids = synthetic_routes(PATTERN, n_tokens, n_layers=5, n_experts=24, top_k=3, seed=seed)
    return RouteTrace(FACTS, ids)


@dataclass
class Model:
    """Both tiers as lists of keys, the least recently used first."""

    tiers: Tiers
    device: list[Key] = field(default_factory=list)
    host: list[Key] = field(default_factory=list)
    uses: dict[Key, int] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)

    def token(self, picks: list[list[int]]) -> None:
        missed = set()
        used: list[Key] = []
        for layer, experts in enumerate(picks):
            keys = [(layer, e) for e in experts]
            for key in [key for key in keys if key in self.device]:
                self.device.remove(key)
                self.device.append(key)
                self.counts.device_hits += 1
            hits = [key for key in keys if key in self.host]
            for key in hits:
                self.host.remove(key)
                self.host.append(key)
                self.uses[key] += 1
                used.append(key)
                self.counts.host_hits += 1
            new = [key for key in keys if key not in self.device and key not in self.host]
            for key in new:
                missed.add(layer)
                self.counts.misses += 1
                self.place(key, set(keys))
        for i, layers in enumerate(((0, 1), (2,), (3, 4))):
            self.counts.clean[i] += missed.isdisjoint(layers)
        self.counts.tokens += 1
        self.promote(used)

    def place(self, key: Key, pinned: set[Key]) -> None:
        tiers = self.tiers
        if len(self.device) < tiers.device_slots:
            self.device.append(key)
            return
        self.uses[key] = 0
        if len(self.host) < tiers.host_slots:
            self.host.append(key)
        elif victims := [k for k in self.host if k not in pinned]:
            self.host.remove(victims[0])
            self.host.append(key)
        else:
            self.device.remove(next(k for k in self.device if k not in pinned))
            self.device.append(key)

    def promote(self, used: list[Key]) -> None:
        wanted = [key for key in used if key in self.host and self.uses[key] >= self.tiers.promote_after]
        if self.tiers.most_used_first:
            wanted.sort(key=lambda key: -self.uses[key])
        if not self.device and not self.tiers.device_slots:
            return
        moved = wanted[: self.tiers.moves]
        # All that move come in behind what was there: they are the newest of their new tier, and no victims.
        for key in moved:
            if len(self.device) == self.tiers.device_slots:
                victim = self.device.pop(0)
                self.host.append(victim)
                self.uses[victim] = 0
            self.host.remove(key)
            self.device.append(key)
        self.counts.moved += len(moved)


def modelled(trace: RouteTrace, tiers: Tiers, warm: int) -> Counts:
    model = Model(tiers)
    model.counts.clean = [0, 0, 0]
    for i, picks in enumerate(trace.expert_ids.tolist()):
        if i == warm:
            model.counts = Counts(clean=[0, 0, 0])
        model.token(picks)
    return model.counts


LRU = Tiers(30, policy="oldest", evict_random_pct=0.0)


@pytest.mark.parametrize(
    "tiers",
    [
        LRU,
        replace(LRU, device_slots=3),
        replace(LRU, device_slots=120),
        replace(LRU, host_slots=20),
        replace(LRU, host_slots=20, moves=2),
        replace(LRU, host_slots=20, moves=0),
        replace(LRU, host_slots=20, promote_after=2),
        replace(LRU, host_slots=40, moves=3, most_used_first=False),
        replace(LRU, host_slots=40, moves=2, promote_after=2, most_used_first=False),
        replace(LRU, device_slots=16, host_slots=3),
        replace(LRU, device_slots=0, host_slots=25),
        replace(LRU, device_slots=60, host_slots=60),
    ],
)
def test_agrees_with_the_model(tiers: Tiers) -> None:
    for seed in range(3):
        trace = some_trace(150, seed)
        for warm in (0, 70):
            counts = TierSimulator(trace, tiers).run(warm)
            assert counts == modelled(trace, tiers, warm)
            assert counts.device_hits + counts.host_hits + counts.misses == 15 * counts.tokens


def test_all_resident_misses_each_expert_once() -> None:
    trace = some_trace(100)
    n_seen = len({(layer, e) for token in trace.expert_ids.tolist() for layer, row in enumerate(token) for e in row})
    for tiers in (Tiers(120), Tiers(60, 60), Tiers(0, 120)):
        counts = TierSimulator(trace, tiers).run(0)
        assert counts.misses == n_seen
        assert counts.tokens == 100


@pytest.mark.parametrize("policy", ["oldest", "least-used"])
def test_chance_follows_the_seed_and_a_host_tier_saves_reads(policy: str) -> None:
    trace = some_trace(150)

    def run(host_slots: int, seed: int) -> Counts:
        return TierSimulator(trace, Tiers(20, host_slots, policy, evict_random_pct=40.0, seed=seed)).run(50)

    assert run(20, 1) == run(20, 1)
    assert run(20, 1) != run(20, 2)
    alone, both = run(0, 1), run(40, 1)
    assert both.misses < 0.8 * alone.misses
    assert sum(both.clean) > sum(alone.clean)
    assert alone.host_hits == alone.moved == 0
    assert both.moved > 0


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        (Tiers(2), "2 device and 0 host slots cannot hold"),
        (Tiers(1, 1), "1 device and 1 host slots cannot hold one token's working set of 3"),
        (Tiers(-1, 40), "-1 device"),
        (Tiers(40, -1), "-1 host slots"),
        (Tiers(9, 9, moves=-1), "moves must be at least 0, is -1"),
        (Tiers(9, 9, promote_after=0), "promote-after 1, is 0"),
        (Tiers(9, policy="newest"), "'newest' is unknown"),
        (Tiers(9, evict_random_pct=101.0), "evict_random_pct"),
    ],
)
def test_impossible_tiers_are_refused(tiers: Tiers, words: str) -> None:
    with pytest.raises(InputError, match=words):
        TierSimulator(some_trace(3), tiers)


@pytest.mark.parametrize("warm", [-1, 3, 4])
def test_a_warm_up_must_leave_something(warm: int) -> None:
    with pytest.raises(InputError, match=f"{warm} warm-up tokens of 3"):
        TierSimulator(some_trace(3), Tiers(9)).run(warm)
    assert np.isfinite(TierSimulator(some_trace(3), Tiers(9)).run(2).misses)
