"""Moves between the tiers: each expert has one valid place at every moment, whatever fails, and nobody waits."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs
from tier_rig import EXPERTS, LAYERS, NBYTES, SCHEDULES, TOP_K, FailAt, Probe, Rig, raised_by

from ds41rt.cu.host.race_report import RaceError
from ds41rt.cu.result import CudaError, Status
from ds41rt.moe.cache import ExpertCache
from ds41rt.moe.header import HOST_SLOT_BIT
from ds41rt.moe.mover import MOVES_PER_TOKEN, Mover

SIZES = ((1, 2), (4, 4), (2, 12), (12, 3), (9, 20))


def mover_of(rig: Rig) -> Mover:
    assert rig.mover is not None
    return rig.mover


def advance(rig: Rig) -> None:
    """A token starts: no key may be lost by it, save where a cancelled move has left the host tier too full."""
    before, trimmed = set(rig.mapped()), rig.cache.evictions
    rig.token_starts()
    trimmed = rig.cache.evictions - trimmed
    assert len(before - set(rig.mapped())) == trimmed
    assert set(rig.mapped()) <= before


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sizes", SIZES)
def test_tokens_with_moves(sizes: tuple[int, int], schedule: str) -> None:
    """Bits, map and table; some tokens end without a drain, so that moves begin under kernels that still run."""
    rig = Rig(*sizes, spare=9, schedule=schedule)
    rng = random.Random(str(sizes))
    for i in range(40):
        advance(rig)
        rig.token(rng, drain=i % 3 > 0)
        if i % 4 == 0:
            rig.check()
    assert rig.cache.evictions + rig.cache.n_slots + rig.cache.host_slots >= rig.cache.misses > 0
    mover = mover_of(rig)
    assert mover.nbytes_moved == NBYTES * (mover.n_promoted + mover.n_demoted)
    if sum(sizes) > LAYERS * TOP_K + 4:  # else nothing stays for a token
        assert mover.n_promoted > 5
    rig.check()
    rig.close()


def full(device: int, host: int, **settings: Any) -> Rig:
    """All slots hold experts: the first `device` ones of layers 0, 1, ... on the device, the next in the host tier."""
    rig = Rig(device, host, **settings)
    keys = [divmod(i, EXPERTS) for i in range(device + host)]
    for layer, expert in keys:
        rig.drain()
        rig.fetch(layer, [expert])
    rig.drain()
    assert len(rig.mapped()) == device + host
    return rig


def next_token(rig: Rig) -> None:
    """A token starts when the copies of the one before are complete."""
    mover_of(rig).drain()
    rig.token_starts()


def use_in_host(rig: Rig, n: int) -> list[tuple[int, int]]:
    """Use the first n experts of the host tier; returns them."""
    keys = [key for key, code in rig.mapped().items() if code & HOST_SLOT_BIT][:n]
    for layer, expert in keys:
        rig.fetch(layer, [expert])
    return keys


def test_a_move_takes_three_tokens() -> None:
    """At each of them both experts have a valid place."""
    rig = full(6, 6)
    mover = mover_of(rig)
    (key,) = use_in_host(rig, 1)
    home = rig.cache.slot_of(*key)
    before = rig.mapped()
    rig.token_starts()  # the victim is being saved
    assert rig.mapped() == before
    assert rig.cache.n_moving == 2
    rig.check()
    rig.token_starts()  # it is in the host tier
    (victim,) = [k for k, code in rig.mapped().items() if before[k] != code]
    assert before[victim] <= 6
    assert rig.cache.slot_of(*victim) & HOST_SLOT_BIT
    assert (mover.n_demoted, mover.n_promoted) == (1, 0)
    assert rig.cache.slot_of(*key) == home
    rig.check()
    rig.token_starts()
    assert rig.cache.slot_of(*key) == before[victim]
    assert (mover.n_demoted, mover.n_promoted, mover.nbytes_moved) == (1, 1, 2 * NBYTES)
    assert rig.cache.n_moving == 0
    assert set(rig.mapped()) == set(before)
    rig.check()
    rig.close()


def test_a_victim_that_is_used_stays() -> None:
    """A move that is cancelled makes no call."""
    probe = Probe()
    rig = full(6, 6, backend=probe)
    use_in_host(rig, 1)
    before, n_spare = rig.mapped(), rig.pool.n_spare
    rig.token_starts()
    (slot,) = [code for code in rig.cache._moving if not code & HOST_SLOT_BIT]
    victim = rig.cache.key_of(slot)
    assert victim is not None
    rig.fetch(victim[0], [victim[1]])
    mover_of(rig).drain()
    calls: list[str] = []

    def hook(name: str, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        calls.append(name)
        return call()

    probe.hook = hook
    rig.token_starts()
    probe.hook = None
    assert calls == ["query_event"]
    assert rig.mapped() == before
    assert (mover_of(rig).n_demoted, rig.cache.n_moving, rig.pool.n_spare) == (0, 0, n_spare)
    rig.check()
    rig.close()


def test_an_empty_device_slot_needs_no_victim() -> None:
    rig = full(6, 6)
    plan = rig.cache.plan_fetch(3, [9, 10, 11])  # three device slots become empty, as after copies that failed
    for ticket in plan.tickets:
        assert ticket.to_host
    rig.cache.abort(plan)
    rig.cache.begin_epoch()
    for key in list(rig.mapped())[:2]:
        code = rig.cache.slot_of(*key)
        rig.cache._device.policy.remove(code)
        rig.cache._unmap(rig.cache._device.drop(code))
        rig.cache._empty.append(code)
    use_in_host(rig, 1)
    before = set(rig.mapped())
    for _ in range(3):
        rig.token_starts()
        rig.check()
    assert (mover_of(rig).n_promoted, mover_of(rig).n_demoted) == (1, 0)
    assert set(rig.mapped()) == before
    assert len(rig.cache._empty) == 1
    rig.close()


@pytest.mark.parametrize("spare", [TOP_K, TOP_K + 1, TOP_K + 2, TOP_K + 6])
@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (3, 4), (20, 20)])
def test_what_one_layer_needs_is_left_to_it(sizes: tuple[int, int], spare: int) -> None:
    rig = full(*sizes, spare=spare)
    use_in_host(rig, 12)
    rig.token_starts()
    n_moves = rig.cache.n_moving // 2
    n_slots = sum(sizes)
    assert n_moves <= min(MOVES_PER_TOKEN, spare - TOP_K, (n_slots - TOP_K) // 2)
    assert n_moves == min(MOVES_PER_TOKEN, spare - TOP_K, (n_slots - TOP_K) // 2, sizes[1])
    rig.fetch(3, [13, 14, 15])
    rig.use(3, [13, 14, 15])
    rig.drain()
    rig.check()
    rig.close()


def test_a_copy_that_is_slow_is_not_waited_for() -> None:
    """Events say no for ever: tokens go on, moves stand, and no call of the mover waits for anything."""
    probe = Probe()
    rig = full(9, 20, backend=probe)
    calls: list[str] = []
    slow = noting = True

    def hook(name: str, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        if noting:
            calls.append(name)
        return False if name == "query_event" and slow else call()

    probe.hook = hook
    rng = random.Random(4)
    use_in_host(rig, 3)
    for _ in range(10):
        noting = True
        advance(rig)
        noting = False
        rig.token(rng)
    assert mover_of(rig).n_demoted == 0
    assert rig.cache.n_moving > 0
    rig.check()
    slow = False
    for _ in range(3):
        mover_of(rig).drain()
        noting = True
        advance(rig)
        noting = False
    assert mover_of(rig).n_promoted > 0
    # the slot table waits for the event of a half that was copied long ago
    assert set(calls) <= {"query_event", "record", "wait", "copy_d2h", "copy_h2d", "launch", "synchronize_event"}
    rig.check()
    rig.close()


@pytest.mark.parametrize("schedule", ["lazy", "random:3"])
def test_a_slow_copy_stream(schedule: str) -> None:
    probe = Probe(schedule)
    probe.inner.faults.slow_stream("expert moves")
    rig = Rig(9, 20, spare=9, backend=probe)
    rng = random.Random(6)
    for i in range(40):
        advance(rig)
        rig.token(rng, drain=i % 2 == 0)
    rig.check()
    rig.close()


PLANTED = "planted by a test"


@pytest.mark.parametrize("phase", range(3))
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("interrupt", [False, True])
def test_every_call_of_a_move_fails(phase: int, interrupt: bool, after: bool) -> None:
    """Whatever the move had come to: a legal state, one warning, no key lost, and later moves work."""
    n = 0
    names = []
    while True:
        probe = Probe()
        rig = full(6, 6, backend=probe)
        use_in_host(rig, 2)
        for _ in range(phase):
            next_token(rig)
        mover_of(rig).drain()
        error = KeyboardInterrupt() if interrupt else CudaError(Status.OUT_OF_MEMORY, PLANTED, "")
        before = set(rig.mapped())
        probe.hook = failing = FailAt(n, error, after=after)
        with capture_logs() as logs:
            raised = raised_by(rig.token_starts)
        assert raised is (failing.error if interrupt and failing.fired else None)
        probe.hook = None
        warnings = [entry for entry in logs if entry["log_level"] == "warning"]
        assert len(warnings) == (bool(failing.fired) and not interrupt)
        assert all(PLANTED in entry["error"] for entry in warnings)
        assert set(rig.mapped()) == before
        rig.check()
        rng = random.Random(n)
        for _ in range(8):
            advance(rig)
            rig.check()
            rig.token(rng)
            rig.check()
        n_promoted = mover_of(rig).n_promoted
        use_in_host(rig, 2)
        for _ in range(5):
            next_token(rig)
        assert mover_of(rig).n_promoted > n_promoted
        assert (rig.cache.n_moving, rig.cache.trim_host()) == (0, 0)
        rig.check()
        rig.close()
        if not failing.fired:
            break
        names.append(failing.fired)
        n += 1
    wanted = {
        0: {"record", "wait", "copy_d2h"},
        1: {"query_event", "record", "wait", "copy_h2d", "launch"},
        2: {"query_event"},
    }
    assert wanted[phase] <= set(names)


def test_clearing_up_may_fail_as_well() -> None:
    """The copy stream cannot be drained the first time: the slots stay out of use until it can."""
    probe = Probe()
    rig = full(6, 6, backend=probe)
    use_in_host(rig, 2)
    rig.token_starts()

    def hook(name: str, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        if name in ("synchronize", "copy_h2d") and "expert.copy" not in args:
            raise CudaError(Status.OUT_OF_MEMORY, PLANTED, "")
        return call()

    probe.hook = hook
    for _ in range(3):
        rig.token_starts()
    probe.hook = None
    assert rig.cache.n_moving == 4
    rig.check()
    rig.token_starts()
    assert rig.cache.n_moving == 0
    rig.check()
    rig.close()


def test_a_constructor_that_fails_leaves_nothing() -> None:
    probe = Probe()
    rig = full(6, 6, backend=probe)
    live = rig.inner.live()
    for n in range(5):  # a stream and four events
        probe.hook = FailAt(n, CudaError(Status.OUT_OF_MEMORY, PLANTED, ""))
        with pytest.raises(CudaError, match=PLANTED):
            Mover(rig.backend, rig.cache, rig.arena, rig.pool, rig.table, keep=TOP_K)
        assert rig.inner.live() == live
    probe.hook = None
    rig.close()


def test_a_lost_device_is_raised() -> None:
    probe = Probe()
    rig = full(6, 6, backend=probe)
    use_in_host(rig, 1)
    probe.hook = FailAt(0, CudaError(Status.ILLEGAL_ADDRESS, PLANTED, ""))
    with pytest.raises(CudaError, match=PLANTED):
        rig.token_starts()
    probe.hook = None
    rig.inner.close()


# ---- order


def moves_under_kernels(rig: Rig) -> None:
    """Tokens of which some end without a drain."""
    rng = random.Random(9)
    for i in range(60):
        rig.token(rng, drain=i % 5 == 4)
    rig.check()


def save_what_is_being_copied(rig: Rig) -> None:
    """The victim's own copy into its device slot may still be on its way."""
    for layer in range(2):
        rig.fetch(layer, [1, 2, 3])
    use_in_host(rig, 3)
    rig.token_starts()
    rig.check()


def fill_what_is_being_read(rig: Rig) -> None:
    """A kernel reads the victims, the token is abandoned without a drain, and so is the next one."""
    for layer in range(LAYERS):
        rig.fetch(layer, [1, 2, 3])
    use_in_host(rig, 3)
    rig.drain()
    rig.use(0, [1, 2, 3])
    for _ in range(3):
        next_token(rig)
    rig.drain()
    rig.check()


def reuse_the_home(rig: Rig) -> None:
    """A kernel reads the promoted expert in its pool slot; fetches upon fetches take every slot that they can get."""
    for layer in range(LAYERS):
        rig.fetch(layer, [1, 2, 3])
    use_in_host(rig, 1)
    rig.drain()
    next_token(rig)
    next_token(rig)
    rig.use(1, [1, 2, 3])
    next_token(rig)
    for layer in range(LAYERS):
        rig.fetch(layer, [4, 5, 6])
        rig.fetch(layer, [7, 8, 9])
    rig.drain()
    rig.check()


def without_waits(patch: pytest.MonkeyPatch) -> None:
    """The copies of a move do not wait for the compute stream."""
    patch.setattr(Mover, "_fork_from", lambda self, stream: None)


def no_save(patch: pytest.MonkeyPatch) -> None:
    """The victim's place changes although its bytes were not copied."""
    patch.setattr(Mover, "_begin", skip_label(Mover._begin, "copy_d2h"))


def no_fill(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Mover, "_fill", skip_label(Mover._fill, "copy_h2d"))


def skip_label(method: Callable[..., None], name: str) -> Callable[..., None]:
    def call(self: Mover, *args: Any) -> None:
        backend = self._backend

        class Less:
            def __getattr__(self, attribute: str) -> Any:
                return (lambda *a: None) if attribute == name else getattr(backend, attribute)

        self._backend = Less()
        try:
            method(self, *args)
        finally:
            self._backend = backend

    return call


def fill_before_saved(patch: pytest.MonkeyPatch) -> None:
    """The event of a phase is not asked for."""
    patch.setattr(Mover, "_bring_forward", lambda self, batch, stream: forward(self, batch, stream))


def forward(mover: Any, batch: Any, stream: Any) -> None:
    if batch.filling:
        mover._land(batch)
    else:
        mover._fill(batch, stream)


def home_is_spare_at_once(patch: pytest.MonkeyPatch) -> None:
    """The promoted expert's pool slot is handed to a reader while kernels may still read it."""
    init = Rig.__init__

    def start(self: Rig, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        mover_of(self)._pool.leave = mover_of(self)._pool.give  # type: ignore[method-assign] # a seeded bug

    patch.setattr(Rig, "__init__", start)


def victim_is_unmapped(patch: pytest.MonkeyPatch) -> None:
    """A move makes a key absent."""
    demote = ExpertCache.demote

    def lose(self: ExpertCache, move: Any, pool_slot: int) -> None:
        demote(self, move, pool_slot)
        self.codes[move.victim] = 0

    patch.setattr(ExpertCache, "demote", lose)


MUTATIONS: dict[str, tuple[Callable[[Rig], None], tuple[int, int], Callable[[pytest.MonkeyPatch], None]]] = {
    "not saved": (moves_under_kernels, (9, 20), no_save),
    "not filled": (moves_under_kernels, (9, 20), no_fill),
    "filled before it is saved": (moves_under_kernels, (9, 20), fill_before_saved),
    "victim unmapped": (moves_under_kernels, (9, 20), victim_is_unmapped),
    "saved without waiting": (save_what_is_being_copied, (3, 9), without_waits),
    "filled without waiting": (fill_what_is_being_read, (3, 9), without_waits),
    "home spare at once": (reuse_the_home, (3, 9), home_is_spare_at_once),
}


def passes(scenario: Callable[[Rig], None], sizes: tuple[int, int], schedule: str) -> bool:
    rig = Rig(*sizes, spare=5, schedule=schedule)
    try:
        scenario(rig)
    except (RaceError, AssertionError):
        return False
    finally:
        rig.inner.close()
    return True


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_noticed(name: str) -> None:
    """And nothing is noticed where nothing is broken."""
    scenario, sizes, mutate = MUTATIONS[name]
    assert all(passes(scenario, sizes, schedule) for schedule in SCHEDULES)
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        assert not all(passes(scenario, sizes, schedule) for schedule in SCHEDULES)


def test_bytes_are_compared() -> None:
    """`check` and `drain` look at bytes: one flipped in a slot is seen by both."""
    rig = full(4, 4)
    key, code = next(iter(rig.mapped().items()))
    rig.bytes_of(code)[3] ^= 1
    with pytest.raises(AssertionError, match="lost"):
        rig.check()
    rig.use(key[0], [key[1], 1, 2])
    with pytest.raises(AssertionError, match="used other bytes"):
        rig.drain()
    rig.bytes_of(code)[3] ^= 1
    rig.pending.clear()
    np.testing.assert_equal(len(rig.mapped()), 8)
    assert LAYERS * EXPERTS > 8
    rig.close()
