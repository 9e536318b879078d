"""Every eviction policy against a sequential model that knows the rules and nothing of how a policy keeps its order."""

import math
import random
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from types import FrameType
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ds41rt.errors import InputError
from ds41rt.moe.least_used import LeastUsed
from ds41rt.moe.policy import EvictionPolicy, PolicyName, make_policy
from ds41rt.moe.recency import Recency
from ds41rt.settings import EvictPolicy

NAMES = get_args(PolicyName)


def make(name: str, n_slots: int, pct: float = 8.0, seed: int = 0) -> EvictionPolicy:
    return make_policy(name, n_slots, evict_random_pct=pct, seed=seed)


@dataclass
class Model:
    """The slots in the order: when each was used last, as a running number, and the clock readings of all its uses."""

    policy: EvictionPolicy
    n_slots: int
    pct: float
    last: dict[int, int] = field(default_factory=dict)
    uses: dict[int, list[int]] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)
    out: dict[int, tuple[int, int, list[int]]] = field(default_factory=dict)  # victims of this epoch
    n_uses: int = 0
    clock: int = 0  # uses before this epoch

    def begin_epoch(self) -> None:
        self.policy.begin_epoch()
        self.clock += len(self.pinned)
        self.pinned.clear()
        self.out.clear()

    def _use(self, slot: int) -> None:
        self.n_uses += 1
        self.last[slot] = self.n_uses
        self.uses.setdefault(slot, []).append(self.clock)
        self.pinned.add(slot)

    def add(self, slot: int) -> None:
        self.policy.add(slot)
        self.out.pop(slot, None)
        self._use(slot)

    def touch(self, slots: list[int]) -> None:
        self.policy.touch(slots)
        for slot in slots:
            if slot and slot not in self.pinned:
                self._use(slot)

    def free(self) -> list[int]:
        """The unpinned slots, oldest first."""
        return sorted(self.last.keys() - self.pinned, key=lambda slot: self.last[slot])

    def take(self) -> None:
        before = self.free()
        slot, place = self.policy.take_victim()
        assert slot in before
        if isinstance(self.policy, LeastUsed):
            self.check_least_used(self.policy, slot, before)
        else:
            assert slot in before[: max(1, int(len(before) * self.pct / 100))]
        self.out[slot] = (place, self.last.pop(slot), self.uses.pop(slot))

    def put_back(self, slot: int) -> None:
        place, self.last[slot], self.uses[slot] = self.out.pop(slot)
        self.policy.put_back(slot, place)

    def remove(self, slot: int) -> None:
        self.policy.remove(slot)
        del self.last[slot], self.uses[slot]

    def score(self, slot: int) -> float:
        """Uses, halved for each four uses a slot that have passed since."""
        return float(sum(2.0 ** ((then - self.clock) / (4 * self.n_slots)) for then in self.uses[slot]))

    def check_least_used(self, policy: LeastUsed, victim: int, candidates: list[int]) -> None:
        """Some window of the right size that holds the victim has no candidate with a lower score."""
        n = self.n_slots
        size = n if self.pct == 0 else min(math.ceil(200 / self.pct), (n + 1) // 2)
        at = {slot: place for place, slot in enumerate(policy._slot)}
        assert sorted(at) == list(range(1, n + 1))
        limit = self.score(victim) * (1 - 1e-9)
        lower = [at[slot] for slot in candidates if self.score(slot) < limit]
        starts = [(at[victim] - i) % n for i in range(size)]
        assert any(all((place - start) % n >= size for place in lower) for start in starts)

    def check(self) -> None:
        n_free = len(self.free())
        assert self.policy.unpinned == n_free
        assert self.policy.n_unpinned(range(self.n_slots + 1)) == n_free


def drive(name: str, rng: random.Random, n_steps: int, n_slots: int, pct: float) -> None:
    model = Model(make(name, n_slots, pct, rng.randrange(99)), n_slots, pct)
    for _ in range(n_steps):
        what = rng.choices(("epoch", "add", "touch", "take", "put back", "remove"), (6, 4, 5, 4, 2, 1))[0]
        outside = sorted(set(range(1, n_slots + 1)) - set(model.last))
        if what == "epoch":
            model.begin_epoch()
        elif what == "add" and outside:
            model.add(rng.choice(outside))
        elif what == "touch":
            # skewed, so that some slots are used often; zeros and repeats are wanted
            inside = [0, *sorted(model.last)]
            model.touch([inside[int(len(inside) * rng.random() ** 2)] for _ in range(rng.randrange(7))])
        elif what == "take" and model.policy.unpinned:
            model.take()
        elif what == "put back" and model.out:
            model.put_back(rng.choice(sorted(model.out)))
        elif what == "remove" and model.free():
            model.remove(rng.choice(model.free()))
        model.check()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pct", [0.0, 8.0, 50.0, 100.0])
@pytest.mark.parametrize("n_slots", [1, 2, 7, 40])
def test_agrees_with_the_sequential_model(name: str, n_slots: int, pct: float) -> None:
    drive(name, random.Random(f"{name} {n_slots} {pct}"), 700, n_slots, pct)


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_the_sequential_model_when_large(name: str) -> None:
    """More slots than one block of the order of ages, and than one window of places."""
    drive(name, random.Random(5), 1500, 300, 30.0)


@pytest.mark.parametrize("name", NAMES)
@hypothesis_settings(max_examples=40, deadline=None)
@given(rng=st.randoms(use_true_random=False), n_slots=st.integers(1, 12), pct=st.sampled_from([0.0, 8.0, 34.0]))
def test_agrees_with_the_sequential_model_shrinkable(name: str, rng: random.Random, n_slots: int, pct: float) -> None:
    drive(name, rng, 40, n_slots, pct)


def test_scores_survive_being_scaled_down() -> None:
    """Six slots, so that a few thousand uses are hundreds of half-lives."""
    policy = LeastUsed(6, 0.0, seed=1)
    model = Model(policy, 6, 0.0)
    rng = random.Random(2)
    for slot in range(1, 7):
        model.add(slot)
    weights = []
    for i in range(9000):
        model.begin_epoch()
        weights.append(policy._weight)
        model.touch([rng.choices(range(1, 7), (1, 1, 2, 3, 5, 8))[0], rng.randrange(1, 7)])
        for uses in model.uses.values():
            del uses[:-400]  # what lies behind weighs nothing
        if i % 7 == 0:
            model.begin_epoch()
            model.take()
            (slot,) = model.out
            model.add(slot)
    assert max(weights) > 1e100
    assert any(a > 1e100 and b < 1e3 for a, b in pairwise(weights)), "never scaled down"


@pytest.mark.parametrize("name", NAMES)
def test_a_victim_that_is_put_back_was_never_taken(name: str) -> None:
    """With 0 % the whole order can be read off: it is the same with and without victims that came back."""

    def order(n_disturbed: int) -> list[int]:
        policy = make(name, 200, 0.0)
        rng = random.Random(3)
        for slot in range(1, 201):
            policy.begin_epoch()  # one use an epoch: chance decides between equal scores
            policy.add(slot)
        for _ in range(120):
            policy.begin_epoch()
            taken = [policy.take_victim() for _ in range(n_disturbed)]
            for slot, place in taken if rng.random() < 0.5 else reversed(taken):
                policy.put_back(slot, place)
            policy.touch([rng.randrange(1, 201)])
        policy.begin_epoch()
        policy.touch([7])
        return [policy.take_victim()[0] for _ in range(199)]

    undisturbed = order(0)
    assert undisturbed == order(5) == order(150)
    assert sorted([*undisturbed, 7]) == list(range(1, 201))


def test_the_least_used_go_first_and_age_counts_too() -> None:
    """Twice-used slots outlive one that was used once a little later, and not one that is used much later."""
    policy = make("least-used", 8, 0.0)
    for slot in range(1, 9):
        policy.add(slot)
    policy.begin_epoch()
    policy.touch([1, 2, 3])
    policy.begin_epoch()
    policy.touch([4, 5, 6, 7, 8])
    policy.begin_epoch()
    policy.remove(8)
    policy.begin_epoch()
    policy.add(8)  # its count began anew: now the only one that was used once
    policy.begin_epoch()
    assert policy.take_victim()[0] == 8
    policy.add(8)
    for _ in range(200):
        policy.begin_epoch()
        policy.touch([4, 5, 6, 7, 8])
    policy.begin_epoch()
    assert {policy.take_victim()[0] for _ in range(3)} == {1, 2, 3}


def ranks(name: str, n_slots: int, pct: float, n_draws: int) -> list[int]:
    """0 = the oldest (and least used) slot, for draws that are put back again."""
    found = []
    for seed in range(20):
        policy = make(name, n_slots, pct, seed)
        for slot in range(1, n_slots + 1):
            policy.begin_epoch()
            policy.add(slot)
        policy.begin_epoch()
        for _ in range(n_draws // 20):
            slot, place = policy.take_victim()
            policy.put_back(slot, place)
            found.append(slot - 1)
    return found


def test_victims_are_uniform_among_the_oldest_share() -> None:
    found = ranks("oldest", 100, 8.0, 4000)
    assert set(found) == set(range(8))
    assert all(abs(found.count(rank) - 500) < 100 for rank in range(8))


def test_victims_of_a_sample_have_the_same_mean_rank() -> None:
    """A sample of 25 of 1,000: the mean rank of its lowest is 1000 / 26, that of a draw from 8 % of them 40."""
    found = ranks("least-used", 1000, 8.0, 4000)
    mean = sum(found) / len(found)
    assert 34 < mean < 43
    assert len(set(found)) > 100
    # The lowest of 25 has a rank above 250 in 0.75 ** 25 of the draws: three of these.
    assert sum(rank > 250 for rank in found) < 20


@pytest.mark.parametrize("name", NAMES)
def test_equal_seeds_give_equal_victims(name: str) -> None:
    def victims(seed: int) -> list[int]:
        policy = make(name, 60, 50.0, seed)
        rng = random.Random(0)
        for slot in range(1, 61):
            policy.add(slot)
        found = []
        for _ in range(200):
            policy.begin_epoch()
            policy.touch([rng.randrange(1, 61) for _ in range(5)])
            slot, _ = policy.take_victim()
            policy.add(slot)
            found.append(slot)
        return found

    assert victims(7) == victims(7)
    assert victims(7) != victims(8)


def cyclic_misses(name: str, pct: float, n_slots: int) -> float:
    """Share of misses on a loop over one key more than there are slots, the first two of twelve rounds left out."""
    policy = make(name, n_slots, pct, seed=1)
    slot_of: dict[int, int] = {}
    empty = list(range(1, n_slots + 1))
    misses = total = 0
    for round_ in range(12):
        for key in range(n_slots + 1):
            policy.begin_epoch()
            total += round_ >= 2
            if key in slot_of:
                policy.touch([slot_of[key]])
                continue
            misses += round_ >= 2
            slot = empty.pop() if empty else policy.take_victim()[0]
            slot_of = {k: s for k, s in slot_of.items() if s != slot}
            slot_of[key] = slot
            policy.add(slot)
    return misses / total


def test_a_loop_one_larger_than_the_cache() -> None:
    """Strict LRU misses always; chance keeps most of the loop."""
    for name in NAMES:
        assert cyclic_misses(name, 0.0, 100) == 1.0
    assert cyclic_misses("oldest", 8.0, 100) < 0.3
    for n_slots in (6, 20, 100):
        assert cyclic_misses("least-used", 8.0, n_slots) < 0.3


@pytest.mark.parametrize("name", NAMES)
def test_wrong_slots_are_refused_and_change_nothing(name: str) -> None:
    policy = make(name, 4)
    for slot in (1, 2, 3):
        policy.add(slot)
    with pytest.raises(InputError, match="slot 1 is pinned"):
        policy.remove(1)
    policy.begin_epoch()
    with pytest.raises(InputError, match="slot 4 holds no expert and cannot be touched"):
        policy.touch([0, 1, 1, 4, 2])
    assert policy.unpinned == policy.n_unpinned([1, 2, 3, 4]) == 2
    with pytest.raises(InputError, match=r"slot 4 .*cannot leave the order"):
        policy.remove(4)
    policy.remove(2)
    with pytest.raises(InputError, match=r"slot 2 .*cannot leave the order"):
        policy.remove(2)
    assert policy.unpinned == 1
    assert policy.take_victim()[0] == 3
    with pytest.raises(InputError, match="slot 3 holds no expert"):
        policy.touch([3])


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"name": "newest"}, "'newest' is unknown; use one of oldest, least-used"),
        ({"n_slots": 0}, "n_slots must be at least 1, is 0"),
        ({"evict_random_pct": -0.1}, "evict_random_pct must be in 0..100, is -0.1"),
        ({"evict_random_pct": 100.5}, "evict_random_pct"),
        ({"evict_random_pct": float("nan")}, "evict_random_pct"),
    ],
)
def test_impossible_policies_are_refused(kwargs: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {"name": "oldest", "n_slots": 4, "evict_random_pct": 8.0, "seed": 0, **kwargs}
    with pytest.raises(InputError, match=words):
        make_policy(**arguments)


def test_the_setting_has_the_same_choices() -> None:
    assert get_args(EvictPolicy) == NAMES
    assert isinstance(make("oldest", 4), Recency)
    assert isinstance(make("least-used", 4), LeastUsed)


def use_all(policy: EvictionPolicy, n_slots: int, n_epochs: int) -> None:
    for i in range(n_epochs):
        policy.begin_epoch()
        policy.touch([1 + (i * 6 + j) % n_slots for j in range(6)])


@pytest.mark.parametrize(("name", "nbytes"), [("oldest", 14), ("least-used", 16)])
def test_memory_a_slot(name: str, nbytes: int) -> None:
    """What the docstrings say, at every moment of a long use, also when victims were taken of most places."""
    n_slots = 4000
    tracemalloc.start()
    try:
        policy = make(name, n_slots)
        for slot in range(1, n_slots + 1):
            policy.begin_epoch()
            policy.add(slot)
        most = 0
        for _ in range(60):  # nine times all slots
            use_all(policy, n_slots, 100)
            for _ in range(100):
                policy.begin_epoch()
                policy.add(policy.take_victim()[0])
            most = max(most, tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert most < nbytes * n_slots + 9000  # the second part: the random generator and other small things


def opcodes(work: Callable[[], object]) -> int:
    """Bytecode instructions that `work` runs."""
    n = 0

    if sys.version_info >= (3, 12):  # where a trace function no longer sees them in frames that it enters

        def count(code: object, offset: int) -> None:
            nonlocal n
            n += 1

        seen = sys.monitoring
        seen.use_tool_id(seen.PROFILER_ID, "opcodes")
        seen.register_callback(seen.PROFILER_ID, seen.events.INSTRUCTION, count)
        seen.set_events(seen.PROFILER_ID, seen.events.INSTRUCTION)
        try:
            work()
        finally:
            seen.set_events(seen.PROFILER_ID, 0)
            seen.free_tool_id(seen.PROFILER_ID)
        return n

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal n
        frame.f_trace_opcodes = True
        n += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return n


@pytest.mark.parametrize("name", NAMES)
def test_a_touch_costs_the_same_in_a_large_arena(name: str) -> None:
    def cost(n_slots: int) -> int:
        policy = make(name, n_slots)
        for slot in range(1, n_slots + 1):
            policy.begin_epoch()
            policy.add(slot)
        return opcodes(lambda: use_all(policy, n_slots, 300))

    small, large = cost(200), cost(6600)
    assert small > 10_000
    assert large < 1.3 * small
