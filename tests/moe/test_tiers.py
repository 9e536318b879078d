"""The cache with two tiers against a sequential model: plain dicts and lists, no policy, no reverse maps."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds41rt.errors import CacheError, InputError
from ds41rt.kernels.router import HOST_SLOT_BIT
from ds41rt.moe.cache import ExpertCache
from ds41rt.moe.plan import Move, Ticket

N_LAYERS, N_EXPERTS = 3, 12


class Model:
    """What the cache must look like. `place` maps a key to its tier; `spare` are pool slots without a key."""

    def __init__(self, rng: random.Random, device: int, host: int, policy: str) -> None:
        self.rng = rng
        self.device = device
        self.host = host
        pool = host + 6 if host else 0
        self.spare = list(range(1, pool + 1))
        self.cache = ExpertCache(
            N_LAYERS,
            N_EXPERTS,
            device,
            host_slots=host,
            pool_slots=pool,
            policy=policy,
            evict_random_pct=rng.choice((0.0, 8.0, 50.0)),
            seed=rng.randrange(99),
        )
        self.place: dict[int, str] = {}
        self.table: dict[int, int] = {}  # the last change of every key
        self.pinned: set[int] = set()
        self.used_in_host: list[int] = []
        self.saving: list[tuple[Move, int]] = []
        self.filling: list[Move] = []
        self.moving: Counter[int] = Counter()  # keys that are no victims because of a move
        self.touched: set[int] = set()  # of those, victims that were used
        self.n_over = 0  # keys too many in the host tier, at most, after moves that were cancelled
        self.counts: Counter[str] = Counter()

    def in_tier(self, tier: str) -> set[int]:
        return {key for key, where in self.place.items() if where == tier}

    def victims(self, tier: str) -> set[int]:
        return {key for key in self.in_tier(tier) if key not in self.pinned and not self.moving[key]}

    def n_empty(self) -> int:
        """Device slots that hold no key and are not the target of a move."""
        targets = sum(move.victim < 0 for move, _ in self.saving) + len(self.filling)
        return self.device - len(self.in_tier("device")) - targets

    def victim_of(self, ticket: Ticket) -> int | None:
        """The key that a reserved ticket will push out."""
        code = HOST_SLOT_BIT | ticket.slot if ticket.to_host else ticket.slot
        found = self.cache.key_of(code)
        return None if found is None else found[0] * N_EXPERTS + found[1]

    # ---- calls

    def begin_epoch(self) -> None:
        self.pinned.clear()
        self.cache.begin_epoch()

    def use(self, keys: list[int]) -> None:
        for key in keys:
            if self.moving[key]:
                if self.place[key] == "device":
                    self.touched.add(key)
            else:
                self.pinned.add(key)
                if self.place[key] == "host" and key not in self.used_in_host:
                    self.used_in_host.append(key)

    def fetch(self, layer: int, experts: list[int], fail_share: float) -> None:
        cache, rng = self.cache, self.rng
        keys = [layer * N_EXPERTS + e for e in experts]
        found = [k for k in keys if k in self.place]
        missing = list(dict.fromkeys(k for k in keys if k not in self.place))
        for key in found:
            self.counts["hits" if self.place[key] == "device" else "host_hits"] += 1
        self.counts["misses"] += len(keys) - len(found)
        n_empty, room = self.n_empty(), max(0, self.host - len(self.in_tier("host")))
        in_host = self.victims("host") - set(found)
        free = n_empty + room + len(in_host) + len(self.victims("device") - set(found))
        before = dict(self.place)
        if len(missing) > free:
            with pytest.raises(CacheError, match=f"only {free} of {self.device + self.host} slots can be given up"):
                cache.plan_fetch(layer, experts)
            return
        plan = cache.plan_fetch(layer, experts)
        self.use(found)
        assert [t.layer * N_EXPERTS + t.expert for t in plan.tickets] == missing
        victims = [self.victim_of(ticket) for ticket in plan.tickets]
        kinds = ["empty"] * n_empty + ["room"] * room + ["host victim"] * len(in_host) + ["device victim"] * 99
        for ticket, victim, kind in zip(plan.tickets, victims, kinds, strict=False):
            assert ticket.to_host == (kind in ("room", "host victim"))
            assert (victim is not None) == ("victim" in kind)
        taken = {v for v in victims if v is not None}
        assert len(taken) == len([v for v in victims if v is not None])
        assert not taken & self.pinned
        assert not any(self.moving[v] for v in taken)
        for ticket, victim in zip(plan.tickets, victims, strict=True):
            if rng.random() < fail_share:
                continue  # the read failed
            left = cache.evict(ticket)
            assert bool(left) == (ticket.to_host and victim is not None)
            if victim is not None:
                del self.place[victim]
                self.table[victim] = -1
            if ticket.to_host:
                cache.commit(ticket, self.spare.pop(0))
                self.spare += [left] if left else []
            elif rng.random() < fail_share:
                continue  # the copy failed: an empty slot
            else:
                cache.commit(ticket)
            key = ticket.layer * N_EXPERTS + ticket.expert
            self.place[key] = "host" if ticket.to_host else "device"
            self.pinned.add(key)
            self.table[key] = cache.slot_of(*divmod(key, N_EXPERTS))
        cache.abort(plan)
        cache.abort(plan)
        if fail_share == 0:
            assert all(key in self.place for key in keys)
        elif fail_share == 1:
            assert self.place == before, "a call that failed changed the residency"

    def hit(self) -> None:
        """What the header check does for a layer whose picks are where the device found them."""
        keys = self.rng.sample(sorted(self.place), min(len(self.place), 3))
        self.cache.hit([self.cache.codes[key] for key in keys])
        for key in keys:
            self.counts["hits" if self.place[key] == "device" else "host_hits"] += 1
        self.use(keys)

    def move(self) -> None:
        """A new move, or one step of a move, right after an epoch has begun."""
        self.begin_epoch()
        if slot := self.cache.trim_host():
            (gone,) = [k for k in self.in_tier("host") if not self.cache.codes[k]]
            assert not self.moving[gone]
            del self.place[gone]
            self.table[gone] = -1
            self.spare.append(slot)
            self.n_over -= 1
        choice = self.rng.randrange(4)
        if choice == 0:
            assert self.cache.take_used_in_host() == self.used_in_host
            self.used_in_host.clear()
            key = self.rng.randrange(N_LAYERS * N_EXPERTS)
            movable = self.place.get(key) == "host" and not self.moving[key]
            if movable and not self.spare:
                return
            room = self.n_empty() > 0 or bool(self.victims("device"))
            move = self.cache.begin_move(key)
            assert (move is not None) == (movable and room)
            if move is not None:
                self.saving.append((move, self.spare.pop(0) if move.victim >= 0 else 0))
                self.moving.update(self.keys_of(move))
                self.touched.discard(move.victim)
        elif choice == 1 and self.saving:
            move, spare = self.saving.pop(0)
            assert move.touched == (move.victim in self.touched)
            if move.touched:
                self.cancel(move, spare)
                return
            if spare:
                self.cache.demote(move, spare)
                self.place[move.victim] = "host"
                self.table[move.victim] = HOST_SLOT_BIT | spare
                self.moving[move.victim] -= 1
                self.pinned.add(move.victim)
            self.filling.append(move)
        elif choice == 2 and self.filling:
            move = self.filling.pop(0)
            self.spare.append(self.cache.promote(move))
            self.place[move.key] = "device"
            self.table[move.key] = move.slot
            self.moving[move.key] -= 1
            self.pinned.add(move.key)
            self.cache.cancel(move)  # it is over: nothing happens
        elif choice == 3 and self.rng.random() < 0.3:
            if self.saving:
                self.cancel(*self.saving.pop())
            elif self.filling:
                move = self.filling.pop()
                self.n_over += move.victim >= 0
                self.moving[move.key] -= 1
                self.pinned.add(move.key)
                self.cache.cancel(move)

    @staticmethod
    def keys_of(move: Move) -> list[int]:
        return [key for key in (move.key, move.victim) if key >= 0]

    def cancel(self, move: Move, spare: int) -> None:
        """Before the victim has gone anywhere."""
        self.spare += [spare] if spare else []
        self.moving.subtract(self.keys_of(move))
        self.pinned.update(self.keys_of(move))
        self.cache.cancel(move)

    # ---- what must hold

    def check(self) -> None:
        cache = self.cache
        codes = {key: code for key, code in enumerate(cache.codes) if code}
        assert {key: "host" if code & HOST_SLOT_BIT else "device" for key, code in codes.items()} == self.place
        every = [*range(-1, cache.n_slots + 2), *(HOST_SLOT_BIT | i for i in range(cache.pool_slots + 2))]
        held = {code: layer_expert for code in every if (layer_expert := cache.key_of(code)) is not None}
        assert held == {code: divmod(key, N_EXPERTS) for key, code in codes.items()}
        assert all(cache.is_code(code) for code in held)
        in_host = {code ^ HOST_SLOT_BIT for code in held if code & HOST_SLOT_BIT}
        assert not in_host & set(self.spare)
        assert len(in_host) <= self.host + self.n_over + sum(move.victim >= 0 for move in self.filling)
        counted = {"hits": cache.hits, "host_hits": cache.host_hits, "misses": cache.misses}
        assert counted == {name: self.counts[name] for name in counted}
        assert cache.n_moving == 2 * (len(self.saving) + len(self.filling))
        assert cache._n_in_transit == sum(move.victim >= 0 for move in self.filling)
        assert {i * N_EXPERTS + e: code for i, e, code in cache.changes().triples} == self.table


def drive(rng: random.Random, n_steps: int, device: int, host: int, policy: str) -> Model:
    model = Model(rng, device, host, policy)
    for _ in range(n_steps):
        what = rng.random()
        if what < 0.3 and device and host:
            model.move()
        elif what < 0.4:
            model.hit()
        else:
            if rng.random() < 0.7:
                model.begin_epoch()
            experts = [int(N_EXPERTS * rng.random() ** 2) for _ in range(rng.randrange(0, 6))]
            model.fetch(rng.randrange(N_LAYERS), experts, rng.choice((0.0, 0.0, 0.3, 1.0)))
        model.check()
    return model


@pytest.mark.parametrize("policy", ["oldest", "least-used"])
@pytest.mark.parametrize(("device", "host"), [(0, 3), (0, 12), (1, 1), (3, 4), (8, 2), (2, 8), (10, 10), (6, 0)])
def test_agrees_with_a_sequential_model(device: int, host: int, policy: str) -> None:
    model = drive(random.Random(f"{device} {host} {policy}"), 600, device, host, policy)
    if device and host:
        assert model.counts["host_hits"] > 0


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.randoms(use_true_random=False), st.integers(0, 8), st.integers(0, 8))
def test_agrees_with_a_sequential_model_shrinkable(rng: random.Random, device: int, host: int) -> None:
    if device + host:
        drive(rng, 40, device, host, "oldest")


def filled(device: int, host: int) -> ExpertCache:
    """Expert i of layer 0 in device slot i + 1, the next ones in pool slots 1, 2, ..."""
    cache = ExpertCache(1, 20, device, host_slots=host, pool_slots=host + 4, evict_random_pct=0.0)
    for expert in range(device + host):
        cache.begin_epoch()
        (ticket,) = cache.plan_fetch(0, [expert]).tickets
        cache.evict(ticket)
        cache.commit(ticket, expert - device + 1)
    cache.begin_epoch()
    return cache


def test_the_smallest_cache_of_two_tiers() -> None:
    """One slot each and two picks: every slot is given up, whichever tier it is in; a third pick is too many."""
    cache = filled(1, 1)
    spare = 2
    for first in range(2, 18, 2):
        cache.begin_epoch()
        for ticket in cache.plan_fetch(0, [first, first + 1]).tickets:
            left = cache.evict(ticket)
            cache.commit(ticket, spare)
            spare = left or spare
        assert all(cache.slot_of(0, expert) for expert in (first, first + 1))
    with pytest.raises(CacheError, match=r"3 experts are missing and only 0 of 2 slots .* at least 5 slots"):
        cache.plan_fetch(0, [0, 1, 2])


def test_slots_of_a_move_are_no_victims_and_may_be_used() -> None:
    cache = filled(2, 2)  # experts 0 and 1 on the device, 2 and 3 in the host tier
    cache.hit([cache.slot_of(0, 2)])
    cache.begin_epoch()
    (key,) = cache.take_used_in_host()
    move = cache.begin_move(key)
    assert move is not None
    assert (move.key, move.home, move.slot, move.victim) == (2, 1, 1, 0)  # the oldest of the device
    assert cache.begin_move(key) is None
    with pytest.raises(CacheError, match=r"only 2 of 4 slots can be given up \(0 hold experts"):
        cache.plan_fetch(0, [10, 11, 12])
    cache.hit([cache.slot_of(0, 0), cache.slot_of(0, 2)])
    assert move.touched
    assert cache.take_used_in_host() == []  # it is on its way
    cache.cancel(move)
    assert [cache.slot_of(0, e) for e in range(4)] == [1, 2, HOST_SLOT_BIT | 1, HOST_SLOT_BIT | 2]
    assert cache.changes().triples == [(0, 0, 1), (0, 1, 2), (0, 2, HOST_SLOT_BIT | 1), (0, 3, HOST_SLOT_BIT | 2)]
    cache.begin_epoch()
    assert len(cache.plan_fetch(0, [10, 11, 12, 13]).tickets) == 4  # all four slots can be given up again


def test_a_move_that_ends_after_the_demotion_leaves_an_empty_device_slot() -> None:
    cache = filled(2, 2)
    move = cache.begin_move(2)
    assert move is not None
    cache.demote(move, 3)
    assert [cache.slot_of(0, e) for e in range(4)] == [HOST_SLOT_BIT | 3, 2, HOST_SLOT_BIT | 1, HOST_SLOT_BIT | 2]
    cache.cancel(move)
    cache.begin_epoch()
    (ticket,) = cache.plan_fetch(0, [10]).tickets
    assert (ticket.to_host, ticket.slot, ticket.place) == (False, move.slot, None)
    cache.evict(ticket)
    cache.commit(ticket)
    assert cache.slot_of(0, 10) == move.slot


def test_codes_out_of_range_are_refused() -> None:
    cache = filled(2, 2)  # pool slots 1..6
    for code in (0, 3, -1, HOST_SLOT_BIT, HOST_SLOT_BIT | 7, 1 << 31):
        assert not cache.is_code(code)
        assert cache.key_of(code) is None
        with pytest.raises(InputError, match="is outside"):
            cache.touch(code)
    with pytest.raises(InputError, match="holds no expert"):
        cache.touch(HOST_SLOT_BIT | 5)
    assert cache.first_wrong(0, [0, 2, 3], [1, HOST_SLOT_BIT | 1, 2]) == 2
    assert cache.first_wrong(0, [0, 2, 3], [1, HOST_SLOT_BIT | 1, -1]) is None
    assert cache.first_wrong(0, [2], [HOST_SLOT_BIT | 5]) == 0


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"n_slots": -1, "host_slots": 4, "pool_slots": 4}, "n_slots must be at least 0, is -1"),
        ({"n_slots": 0, "host_slots": 0}, "n_slots must be at least 1, is 0"),
        ({"n_slots": 4, "host_slots": -1}, "host_slots must be at least 0, is -1"),
        ({"n_slots": 4, "host_slots": 4, "pool_slots": 3}, "pool_slots must be at least 4, is 3"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ExpertCache(1, 8, **sizes)  # type: ignore[arg-type] # sizes alone
