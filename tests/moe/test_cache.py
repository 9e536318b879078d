"""The expert cache against a sequential model that keeps everything in plain dicts and sorted lists."""

import random
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds41rt.errors import CacheError, InputError
from ds41rt.moe.cache import ExpertCache
from ds41rt.moe.plan import FetchPlan, Ticket, TicketState, reads_failed

Key = tuple[int, int]


def fill(cache: ExpertCache, layer: int, experts: list[int]) -> FetchPlan:
    """A fetch in which every read succeeds, in an epoch of its own."""
    cache.begin_epoch()
    plan = cache.plan_fetch(layer, experts)
    for ticket in plan.tickets:
        cache.evict(ticket)
        cache.commit(ticket)
    return plan


@dataclass
class Model:
    """What the cache must look like. `ages` holds unpinned and pinned keys, oldest first."""

    cache: ExpertCache
    pct: float
    where: dict[Key, int] = field(default_factory=dict)
    ages: list[Key] = field(default_factory=list)
    pinned: set[Key] = field(default_factory=set)
    table: dict[Key, int] = field(default_factory=dict)
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    failed: int = 0

    def begin_epoch(self) -> None:
        self.pinned.clear()
        self.cache.begin_epoch()

    def touch(self, key: Key) -> None:
        if key not in self.pinned:
            self.ages.remove(key)
            self.ages.append(key)
            self.pinned.add(key)

    def oldest(self) -> list[Key]:
        unpinned = [k for k in self.ages if k not in self.pinned]
        return unpinned[: max(1, int(len(unpinned) * self.pct / 100))]

    def fetch(self, layer: int, experts: list[int], count: bool, fate: Callable[[], str]) -> None:
        """One call. `fate` says for each ticket "commit", "evict" (fails after the eviction) or "read" (before it)."""
        cache = self.cache
        keys = [(layer, e) for e in experts]
        absent = [k for k in keys if k not in self.where]
        missing = list(dict.fromkeys(absent))
        hit = {k for k in keys if k in self.where}
        if count:
            self.hits += len(keys) - len(absent)
            self.misses += len(absent)
        n_empty = cache.n_slots - len(self.where)
        room = n_empty + len([k for k in self.ages if k not in self.pinned | hit])
        if len(missing) > room:
            self.failed += len(missing)
            with pytest.raises(CacheError, match="smaller than one token's working set"):
                cache.plan_fetch(layer, experts, count=count)
            return
        plan = cache.plan_fetch(layer, experts, count=count)
        for k in keys:
            if k in hit:
                self.touch(k)
        assert [(t.layer, t.expert) for t in plan.tickets] == missing
        by_slot = {slot: k for k, slot in self.where.items()}
        victims: list[Key | None] = []
        for ticket in plan.tickets:
            victim = by_slot.get(ticket.slot)
            victims.append(victim)
            assert (victim is None) == (n_empty > 0), "empty slots come first"
            if victim is None:
                n_empty -= 1
            else:
                assert victim not in self.pinned
                assert victim in self.oldest()
                self.ages.remove(victim)  # out of the order while it is reserved
        assert len({t.slot for t in plan.tickets}) == len(plan.tickets)
        assert all(0 < t.slot <= cache.n_slots and not t.to_host for t in plan.tickets)
        given_back: list[Key] = []
        for ticket, victim in zip(plan.tickets, victims, strict=True):
            what = fate()
            if what == "read":
                if victim is not None:
                    given_back.append(victim)
                self.failed += 1
                continue
            cache.evict(ticket)
            if victim is not None:
                del self.where[victim]
                self.table[victim] = -1
                self.evictions += 1
                assert cache.slot_of(*victim) == 0
            if what == "evict":
                self.failed += 1
                continue
            cache.commit(ticket)
            key = (layer, ticket.expert)
            self.where[key] = self.table[key] = ticket.slot
            self.ages.append(key)
            self.pinned.add(key)
        cache.abort(plan)
        cache.abort(plan)  # a second time does nothing
        # Given back with its old age: the model asks the order of the cache only through later victims.
        self.ages = sorted(self.ages + given_back, key=self.old_order.index) if given_back else self.ages

    old_order: list[Key] = field(default_factory=list)

    def snapshot_order(self, layer: int, experts: list[int]) -> None:
        """The order that a failed ticket's victim must return to: the present one, this call's hits and reads last."""
        asked = [(layer, e) for e in dict.fromkeys(experts)]
        hits = [k for k in asked if k in self.where]
        moved = [k for k in hits if k not in self.pinned]
        new = [k for k in asked if k not in self.where]
        self.old_order = [k for k in self.ages if k not in moved] + moved + new

    def check(self) -> None:
        cache = self.cache
        got = {
            (layer, e): cache.slot_of(layer, e)
            for layer in range(cache.n_layers)
            for e in range(cache.n_experts)
            if cache.slot_of(layer, e)
        }
        assert got == self.where
        reverse = {slot: key for slot in range(-1, cache.n_slots + 2) if (key := cache.key_of(slot)) is not None}
        assert reverse == {slot: key for key, slot in self.where.items()}
        assert all(0 < slot <= cache.n_slots for slot in self.where.values())
        assert (cache.hits, cache.misses, cache.evictions, cache.failed) == (
            self.hits,
            self.misses,
            self.evictions,
            self.failed,
        )
        changes = cache.changes()
        assert len({t[:2] for t in changes.triples}) == len(changes.triples)


def drive(rng: random.Random, n_steps: int, n_layers: int, n_experts: int, n_slots: int, pct: float) -> None:
    """Random calls; the table that is built from the log equals the map at every drained point."""
    model = Model(ExpertCache(n_layers, n_experts, n_slots, evict_random_pct=pct, seed=rng.randrange(99)), pct)
    table: dict[Key, int] = {}
    snapshots = []
    for _ in range(n_steps):
        if rng.random() < 0.7:
            model.begin_epoch()
        layer = rng.randrange(n_layers)
        # A skewed choice, so that hits and misses both occur; duplicates are wanted.
        experts = [int(n_experts * rng.random() ** 2) for _ in range(rng.randrange(0, 7))]
        if rng.random() < 0.2 and model.where:
            key = rng.choice(sorted(model.where))
            model.touch(key)
            model.cache.touch(model.where[key])
        p_fail = rng.choice((0.0, 0.0, 0.3, 1.0))

        def fate(p_fail: float = p_fail) -> str:
            return rng.choice(("read", "evict")) if rng.random() < p_fail else "commit"

        model.snapshot_order(layer, experts)
        model.fetch(layer, experts, rng.random() < 0.8, fate)
        model.check()
        if rng.random() < 0.1:
            snapshots.append(model.cache.changes())
            for layer_, e, slot in snapshots[-1].triples:
                table[layer_, e] = slot
        if snapshots and rng.random() < 0.1:
            model.cache.changes_applied(snapshots.pop(0))
    for layer_, e, slot in model.cache.changes().triples:
        table[layer_, e] = slot
    assert {k: s for k, s in table.items() if s != -1} == model.where


@pytest.mark.parametrize("pct", [0.0, 8.0, 50.0, 100.0])
@pytest.mark.parametrize("n_slots", [1, 6, 7, 20, 48])
def test_agrees_with_sequential_model(n_slots: int, pct: float) -> None:
    drive(random.Random(f"{n_slots} {pct}"), 800, 3, 16, n_slots, pct)


def test_agrees_with_sequential_model_many_blocks() -> None:
    """More slots than one block of the age list, so that ranks cross block borders."""
    drive(random.Random(5), 2500, 8, 64, 300, 60.0)


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 12), st.sampled_from([0.0, 8.0, 34.0]))
def test_agrees_with_sequential_model_shrinkable(rng: random.Random, n_slots: int, pct: float) -> None:
    drive(rng, 40, 2, 8, n_slots, pct)


def test_strict_lru_evicts_the_oldest() -> None:
    cache = ExpertCache(1, 16, 4, evict_random_pct=0.0)
    for e in (0, 1, 2, 3):
        fill(cache, 0, [e])
    fill(cache, 0, [0])
    for e in (4, 5):
        fill(cache, 0, [e])
    assert [e for e in range(16) if cache.slot_of(0, e)] == [0, 3, 4, 5]


def test_victims_are_uniform_among_the_oldest_share() -> None:
    """100 unpinned slots, 8 %: each of the eight oldest is hit about 1/8 of the time, no other ever."""
    counts = [0] * 100
    cache = ExpertCache(1, 1000, 100, evict_random_pct=8.0, seed=3)
    for e in range(100):
        fill(cache, 0, [e])
    n_draws = 4000
    for _ in range(n_draws):
        cache.begin_epoch()
        plan = cache.plan_fetch(0, [500])
        key = cache.key_of(plan.tickets[0].slot)
        assert key is not None
        counts[key[1]] += 1
        cache.abort(plan)  # given back with its old age: the same eight stay the oldest
    assert sum(counts[:8]) == n_draws
    assert all(abs(n - n_draws / 8) < 150 for n in counts[:8])


def cyclic_misses(pct: float, n_slots: int, n_rounds: int) -> float:
    """Share of misses on a loop over n_slots + 1 keys, the first two rounds left out."""
    cache = ExpertCache(1, n_slots + 1, n_slots, evict_random_pct=pct, seed=1)
    for r in range(n_rounds):
        if r == 2:
            cache.hits = cache.misses = 0
        for e in range(n_slots + 1):
            fill(cache, 0, [e])
    return cache.misses / (cache.hits + cache.misses)


def test_cyclic_trace_beats_strict_lru() -> None:
    assert cyclic_misses(0.0, 200, 12) == 1.0
    assert cyclic_misses(8.0, 200, 12) < 0.2


def test_equal_seeds_give_equal_victims() -> None:
    def trace(seed: int) -> list[int]:
        cache = ExpertCache(2, 64, 40, evict_random_pct=50.0, seed=seed)
        rng = random.Random(0)
        plans = [fill(cache, rng.randrange(2), rng.sample(range(64), 6)) for _ in range(300)]
        return [ticket.slot for plan in plans for ticket in plan.tickets]

    assert trace(7) == trace(7)
    assert trace(7) != trace(8)


def test_top_k_slots_are_enough_and_one_less_is_refused() -> None:
    cache = ExpertCache(2, 32, 6)
    for start in (0, 6, 12):
        fill(cache, 1, list(range(start, start + 6)))
    assert cache.evictions == 12

    small = ExpertCache(2, 32, 5)
    fill(small, 0, [0, 1, 2])
    small.changes_applied(small.changes())
    small.begin_epoch()
    before = [small.key_of(s) for s in range(1, 6)]
    with pytest.raises(CacheError, match=r"layer 1: 6 experts .* only 5 of 5 slots .* at least 6 slots"):
        small.plan_fetch(1, [9, 8, 7, 6, 5, 4])
    assert [small.key_of(s) for s in range(1, 6)] == before
    assert small.changes().triples == []
    assert (small.hits, small.misses, small.failed) == (0, 9, 6)
    small.begin_epoch()  # nothing was left open
    # The refused call pinned nothing: a request that fits can still take every slot.
    assert len(small.plan_fetch(1, [9, 8, 7, 6, 5]).tickets) == 5


def test_hits_of_the_same_call_are_no_victims() -> None:
    """All slots are resident; five hits and one miss in one call leave exactly one slot to give up."""
    cache = ExpertCache(1, 32, 6, evict_random_pct=100.0)
    fill(cache, 0, [0, 1, 2, 3, 4, 5])
    (ticket,) = fill(cache, 0, [9, 1, 2, 3, 4, 5]).tickets
    assert [cache.slot_of(0, e) for e in (9, 1, 2, 3, 4, 5)] == [ticket.slot, 2, 3, 4, 5, 6]
    assert cache.slot_of(0, 0) == 0
    with pytest.raises(CacheError):
        cache.plan_fetch(0, [20])  # the same epoch: everything is pinned


def test_every_read_fails_and_the_token_asks_again() -> None:
    cache = ExpertCache(1, 32, 8)
    fill(cache, 0, list(range(8)))
    keys = [cache.key_of(s) for s in range(1, 9)]
    cache.hits = cache.misses = 0
    cache.changes_applied(cache.changes())
    cache.begin_epoch()
    plan = cache.plan_fetch(0, [20, 21, 22, 20])
    cache.abort(plan)
    assert (cache.hits, cache.misses, cache.failed, cache.evictions) == (0, 4, 3, 0)
    assert [cache.key_of(s) for s in range(1, 9)] == keys
    assert cache.changes().triples == []
    assert [t.state for t in plan.tickets] == [TicketState.ABORTED] * 3

    cache.begin_epoch()
    again = cache.plan_fetch(0, [20, 21, 22, 20], count=False)
    for ticket in again.tickets:
        cache.evict(ticket)
        cache.commit(ticket)
    assert (cache.hits, cache.misses, cache.failed, cache.evictions) == (0, 4, 3, 3)
    assert again.tickets[0].slot == cache.slot_of(0, 20)


def test_empty_slots_given_back_are_handed_out_in_the_same_order() -> None:
    cache = ExpertCache(1, 32, 8)
    plan = cache.plan_fetch(0, [20, 21, 22])
    cache.abort(plan)
    assert [t.slot for t in cache.plan_fetch(0, [5, 6, 7, 8]).tickets] == [*(t.slot for t in plan.tickets), 4]


def test_memory_does_not_grow() -> None:
    cache = ExpertCache(2, 24, 20)
    rng = random.Random(1)
    before = 0
    tracemalloc.start()
    try:
        for i in range(1500):
            fill(cache, rng.randrange(2), rng.sample(range(24), 6))
            if i == 300:
                before = tracemalloc.get_traced_memory()[0]
        assert tracemalloc.get_traced_memory()[0] - before < 8192
    finally:
        tracemalloc.stop()


def test_a_failure_after_the_eviction_leaves_an_empty_slot() -> None:
    cache = ExpertCache(1, 32, 6, evict_random_pct=0.0)
    fill(cache, 0, [0, 1, 2, 3, 4, 5])
    cache.changes_applied(cache.changes())
    cache.begin_epoch()
    plan = cache.plan_fetch(0, [10])
    (ticket,) = plan.tickets
    cache.evict(ticket)
    cache.abort(plan)
    assert cache.slot_of(0, 0) == 0
    assert cache.slot_of(0, 10) == 0
    assert cache.key_of(ticket.slot) is None
    assert cache.changes().triples == [(0, 0, -1)]
    assert [t.slot for t in fill(cache, 0, [11]).tickets] == [ticket.slot]  # the empty slot is used before any victim
    assert cache.evictions == 1


def test_evict_comes_before_the_new_key_and_the_log_keeps_the_order() -> None:
    cache = ExpertCache(1, 8, 1)
    fill(cache, 0, [3])
    cache.begin_epoch()
    plan = cache.plan_fetch(0, [5])
    assert cache.slot_of(0, 3) == 1  # reserving alone changes no key
    with pytest.raises(InputError, match="cannot be committed expert 5: its ticket is reserved"):
        cache.commit(plan.tickets[0])
    cache.evict(plan.tickets[0])
    assert (cache.slot_of(0, 3), cache.slot_of(0, 5)) == (0, 0)
    cache.commit(plan.tickets[0])
    assert cache.changes().triples == [(0, 3, -1), (0, 5, 1)]
    for call in (cache.evict, cache.commit):
        with pytest.raises(InputError, match="its ticket is committed"):
            call(plan.tickets[0])


def test_change_log_is_bounded_and_clears_only_what_did_not_change_since() -> None:
    cache = ExpertCache(2, 8, 3, seed=4)
    rng = random.Random(1)
    for _ in range(3000):
        fill(cache, rng.randrange(2), rng.sample(range(8), 2))
    assert len(cache.changes().triples) <= 16

    cache.changes_applied(cache.changes())
    assert cache.changes().triples == []
    one = ExpertCache(1, 8, 1)
    fill(one, 0, [3])
    first = one.changes()
    fill(one, 0, [4])
    fill(one, 0, [3])  # expert 3 is back in slot 1, but it was -1 in between: not covered by `first`
    one.changes_applied(first)
    assert one.changes().triples == [(0, 4, -1), (0, 3, 1)]
    second = one.changes()
    fill(one, 0, [6])
    one.changes_applied(second)
    one.changes_applied(first)
    assert one.changes().triples == [(0, 3, -1), (0, 6, 1)]


def test_an_open_plan_is_an_error() -> None:
    cache = ExpertCache(2, 8, 4)
    plan = cache.plan_fetch(1, [0, 1])
    with pytest.raises(InputError, match="layer 0: the fetch of layer 1 is still open"):
        cache.plan_fetch(0, [0])
    with pytest.raises(CacheError, match="layer 1: a fetch with 2 unfilled slots is still open"):
        cache.begin_epoch()
    cache.evict(plan.tickets[0])
    cache.commit(plan.tickets[0])
    with pytest.raises(CacheError, match="with 1 unfilled"):
        cache.begin_epoch()
    cache.abort(plan)
    cache.begin_epoch()


def test_a_reserved_or_empty_slot_cannot_be_touched() -> None:
    cache = ExpertCache(1, 8, 2, evict_random_pct=0.0)
    fill(cache, 0, [0])
    for slot in (-1, 0, 3):
        with pytest.raises(InputError, match=f"slot {slot} is outside"):
            cache.touch(slot)
    with pytest.raises(InputError, match="slot 2 holds no expert"):
        cache.touch(2)
    fill(cache, 0, [1])
    cache.begin_epoch()
    (ticket,) = cache.plan_fetch(0, [5]).tickets
    with pytest.raises(InputError, match=f"slot {ticket.slot} holds no expert"):
        cache.touch(ticket.slot)


def test_touch_saves_a_slot_from_eviction() -> None:
    cache = ExpertCache(1, 8, 3, evict_random_pct=0.0)
    for e in (0, 1, 2):
        fill(cache, 0, [e])
    cache.begin_epoch()
    cache.touch(cache.slot_of(0, 0))
    plan = cache.plan_fetch(0, [7])
    assert cache.key_of(plan.tickets[0].slot) == (0, 1)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [((0, 8, 4), "n_layers"), ((1, 0, 4), "n_experts"), ((1, 8, 0), "n_slots"), ((1, 8, -3), "n_slots")],
)
def test_impossible_sizes_are_refused(sizes: tuple[int, int, int], name: str) -> None:
    with pytest.raises(InputError, match=f"{name} must be at least 1"):
        ExpertCache(*sizes)


@pytest.mark.parametrize("pct", [-0.1, 100.1, float("nan")])
def test_an_impossible_share_is_refused(pct: float) -> None:
    with pytest.raises(InputError, match="evict_random_pct"):
        ExpertCache(1, 8, 4, evict_random_pct=pct)


def test_ids_out_of_range_are_refused_and_change_nothing() -> None:
    cache = ExpertCache(2, 8, 4)
    for layer, experts, message in (
        (2, [0], "layer 2 is outside 0..1"),
        (-1, [0], "layer -1 is outside"),
        (1, [3, 8], "expert 8 is outside 0..7"),
        (1, [3, -1], "expert -1 is outside"),
    ):
        with pytest.raises(InputError, match=message):
            cache.plan_fetch(layer, experts)
        with pytest.raises(InputError, match=message):
            cache.slot_of(layer, experts[-1])
    assert (cache.hits, cache.misses) == (0, 0)
    cache.begin_epoch()
    assert cache.key_of(0) is None


def test_reads_failed_counts_and_names_the_first() -> None:
    plan = ExpertCache(4, 8, 4).plan_fetch(2, [5, 6, 7])
    failures: list[tuple[Ticket, Exception]] = [(t, OSError(f"no {t.expert}")) for t in plan.tickets[1:]]
    assert str(reads_failed(plan, failures)) == "layer 2: 2 of 3 expert reads failed; first: expert 6: no 6"
