"""Fetching into both tiers, with reader threads: what is mapped has its bytes, whatever fails or interrupts."""

import random
import threading
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs
from tier_rig import (
    BYTES,
    EXPERTS,
    LAYERS,
    NBYTES,
    SCHEDULES,
    SIZES,
    SLOT_NBYTES,
    FailAt,
    Probe,
    Rig,
    fail_some,
    raised_by,
)

from ds41rt.cu.host import HostBackend
from ds41rt.cu.host.race_report import RaceError
from ds41rt.cu.result import CudaError, OutOfDeviceMemory, Status
from ds41rt.errors import CacheError, CheckpointError
from ds41rt.kernels.router import HOST_SLOT_BIT
from ds41rt.moe import fetch
from ds41rt.moe.pool import PinnedPool, open_pool

LIMIT = 60


@pytest.mark.parametrize(("schedule", "threads"), [*((s, 0) for s in SCHEDULES), ("random:3", 4)])
@pytest.mark.parametrize("sizes", SIZES)
def test_tokens(sizes: tuple[int, int], schedule: str, threads: int) -> None:
    """Random picks; what every kernel saw, and what map, table and slots say after every token."""
    rig = Rig(*sizes, schedule=schedule, threads=threads)
    rng = random.Random(str(sizes))
    for _ in range(12):
        rig.token(rng)
        rig.check()
    cache = rig.cache
    assert cache.hits + cache.host_hits + cache.misses == 12 * LAYERS * 3
    assert len(rig.source.reads) == cache.misses
    rig.close()


@pytest.mark.parametrize("threads", [0, 1, 4])
@pytest.mark.parametrize("sizes", [(4, 4), (0, 6), (6, 0)])
def test_parts_change_nothing(sizes: tuple[int, int], threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that are read in one part or in several: the same map, bytes and counters."""
    seen = []
    for part_nbytes in (NBYTES, NBYTES - 1, 50):
        monkeypatch.setattr(fetch, "PART_NBYTES", part_nbytes)
        rig = Rig(*sizes, threads=threads)
        rng = random.Random(11)
        codes = []
        for _ in range(12):
            rig.token(rng)
            rig.check()
            codes.append(list(rig.cache.codes))
        cuts = [(at, min(part_nbytes, NBYTES - at)) for at in range(0, NBYTES, part_nbytes)]
        assert sorted(rig.source.reads) == sorted(cuts * rig.cache.misses)
        assert rig.fetcher.readers.nbytes_read == rig.cache.misses * NBYTES
        seen.append((codes, rig.cache.hits, rig.cache.host_hits, rig.cache.misses))
        rig.close()
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("sizes", [(4, 4), (0, 6), (6, 0), (20, 20)])
def test_the_map_does_not_depend_on_threads(sizes: tuple[int, int]) -> None:
    maps = []
    for threads in (0, 1, 8):
        rig = Rig(*sizes, threads=threads)
        rng = random.Random(7)
        seen = []
        for _ in range(30):
            rig.token(rng)
            seen.append(list(rig.cache.codes))
        maps.append(seen)
        rig.close()
    assert maps[0] == maps[1] == maps[2]


@pytest.mark.parametrize("part_nbytes", [NBYTES, 50])
@pytest.mark.parametrize("threads", [0, 4])
@pytest.mark.parametrize("sizes", [(6, 0), (0, 6), (4, 4), (2, 8), (9, 3)])
def test_reads_that_fail(
    sizes: tuple[int, int], threads: int, part_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What arrived is mapped, what did not is not, and nothing was given up for it."""
    monkeypatch.setattr(fetch, "PART_NBYTES", part_nbytes)
    rig = Rig(*sizes, threads=threads)
    rng = random.Random(3)
    n_failed = n_all = 0
    for _ in range(80):
        rig.token_starts()
        rig.drain()
        layer, experts = rng.randrange(LAYERS), rng.sample(range(EXPERTS), 3)
        before = rig.mapped()
        missing = [e for e in experts if (layer, e) not in before]
        counted = rig.cache.hits + rig.cache.host_hits, rig.cache.misses
        bad = set(rng.sample(missing, rng.randint(0, len(missing))))
        rig.source.before = lambda _, e, bad=bad: fail_some(random.Random(), float(e in bad))(_, e)  # type: ignore[misc]
        if bad:
            with pytest.raises(
                CacheError, match=f"layer {layer}: {len(bad)} of {len(missing)} expert reads failed; first"
            ):
                rig.fetch(layer, experts)
        else:
            assert rig.fetch(layer, experts) == len(missing)
        after = rig.mapped()
        arrived = {(layer, e) for e in missing if e not in bad}
        assert set(after) - set(before) == arrived
        assert len(set(before) - set(after)) <= len(arrived)  # each made room for one at most
        if not arrived:
            assert after == before
        assert all(after[key] == code for key, code in before.items() if key in after)
        assert rig.cache.misses == counted[1] + len(missing)
        assert rig.cache.hits + rig.cache.host_hits == counted[0] + 3 - len(missing)
        rig.check()
        n_failed += bool(bad)
        n_all += bool(bad) and not arrived
    assert n_failed > 10
    assert n_all > 2
    rig.close()


def test_duplicates_are_one_read() -> None:
    rig = Rig(0, 6)
    rig.cache.begin_epoch()
    assert rig.fetcher.fetch(1, [3, 5, 3, 3], rig.stream, count=True) == 2
    assert len(rig.source.reads) == 2
    assert (rig.cache.misses, rig.cache.host_hits) == (4, 0)
    rig.check()
    rig.close()


class Gate:
    """Makes reads wait until it is opened, and says how many have begun."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.open = threading.Event()

    def __call__(self, layer: int, expert: int) -> None:
        self.begun.release()
        assert self.open.wait(LIMIT)

    def wait_begun(self, n: int) -> None:
        for _ in range(n):
            assert self.begun.acquire(timeout=LIMIT)


def test_an_expert_is_copied_while_later_ones_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """No part of the last expert is read before the copies of the others are enqueued."""
    monkeypatch.setattr(fetch, "PART_NBYTES", 50)
    probe = Probe()
    rig = Rig(6, 0, threads=2, backend=probe)
    two_copies = threading.Event()
    copied: list[int] = []

    def hook(name: str, args: tuple[Any, ...], call: Any) -> Any:
        result = call()
        if "expert.copy" in args:
            copied.append(args[0])
            if len(copied) == 2:
                two_copies.set()
        return result

    def wait_for_copies(layer: int, expert: int) -> None:
        assert expert != 3 or two_copies.wait(LIMIT)

    rig.source.before = wait_for_copies
    probe.hook = hook
    assert rig.fetch(0, [1, 2, 3]) == 3
    probe.hook = None
    assert copied == [rig.arena.slot_ptr(rig.cache.slot_of(0, e)) for e in (1, 2, 3)]
    rig.check()
    rig.close()


def test_all_misses_of_a_layer_are_read_at_once() -> None:
    rig = Rig(2, 4, threads=3)
    gate = Gate()
    rig.source.before = gate
    waited: list[Any] = []
    wait = rig.fetcher.readers.wait

    def note(jobs: Any) -> None:
        if not waited:
            gate.wait_begun(3)  # before anything has arrived
            gate.open.set()
        waited.append(jobs)
        wait(jobs)

    rig.fetcher.readers.wait = note  # type: ignore[method-assign] # a spy
    assert rig.fetch(0, [1, 2, 3]) == 3
    assert waited
    rig.check()
    rig.close()


def interrupted(rig: Rig, gate: Gate, n: int, layer: int, experts: list[int]) -> None:
    """A fetch whose n-th wait is interrupted while the reads behind it run."""
    rig.source.before = lambda i, e: gate(i, e) if experts.index(e) >= n else None
    wait, left = rig.fetcher.readers.wait, n

    def stop(jobs: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            gate.wait_begun(len(experts) - n)
            raise KeyboardInterrupt
        wait(jobs)

    rig.fetcher.readers.wait = stop  # type: ignore[method-assign] # interrupts
    with pytest.raises(KeyboardInterrupt):
        rig.fetch(layer, experts)
    rig.fetcher.readers.wait = wait  # type: ignore[method-assign]


@pytest.mark.parametrize("n", range(3))
@pytest.mark.parametrize("sizes", [(6, 0), (0, 6), (2, 4)])
def test_an_interrupt_while_reads_run(sizes: tuple[int, int], n: int) -> None:
    """Slots that a running read may still write are not handed out before it is done; what had arrived stays."""
    rig = Rig(*sizes, threads=3, spare=9)
    rig.fetch(1, [0, 1, 2])
    rig.drain()
    gate = Gate()
    interrupted(rig, gate, n, 0, [1, 2, 3])
    assert [rig.cache.slot_of(0, e) != 0 for e in (1, 2, 3)] == [i < n for i in range(3)]
    running = {slot for slot, _ in rig.pool._quarantined}
    assert len(running) == 3 - n
    rig.check()
    # While they run, others come and go; the readers have threads for that.
    rig.source.before = lambda i, e: None
    handed_out = []
    for_reader = rig.pool.for_reader

    def note(slot: int) -> Any:
        handed_out.append(slot)
        return for_reader(slot)

    rig.pool.for_reader = note  # type: ignore[method-assign] # a spy
    if n:
        for layer in range(1, LAYERS):
            rig.drain()
            rig.fetch(layer, [4, 5, 6])
            rig.use(layer, [4, 5, 6])
        rig.drain()
        assert handed_out
    assert not running & set(handed_out)
    gate.open.set()
    rig.fetcher.readers.drain()
    rig.drain()
    assert rig.fetch(0, [1, 2, 3]) > 0
    assert rig.pool._quarantined == []
    rig.use(0, [1, 2, 3])
    rig.drain()
    rig.check()
    rig.close()


def test_all_slots_in_flight_are_waited_for() -> None:
    """Every spare slot belongs to a read that nobody wants any more: the next fetch waits, and overwrites none."""
    rig = Rig(0, 3, spare=3, threads=3)
    rig.fetch(0, [0, 1, 2])
    gate = Gate()
    rig.drain()
    interrupted(rig, gate, 0, 1, [4, 5, 6])
    assert rig.pool.n_spare == 0
    rig.source.before = lambda i, e: None
    wait = rig.fetcher.readers.wait

    def opens(jobs: Any) -> None:
        gate.open.set()
        wait(jobs)

    rig.fetcher.readers.wait = opens  # type: ignore[method-assign] # lets the reads go when somebody waits for them
    rig.drain()
    rig.fetch(2, [7, 8, 9])
    rig.use(2, [7, 8, 9])
    rig.drain()
    rig.check()
    rig.close()


def test_an_interrupted_submit_loses_no_slot() -> None:
    """Nobody has the job: its slot is not handed out before all reads are done."""
    rig = Rig(0, 6, threads=2)
    gate = Gate()
    rig.source.before = lambda i, e: gate(i, e) if e == 2 else None
    submit, drain, left = rig.fetcher.readers.submit, rig.fetcher.readers.drain, 1

    def stop(*args: Any) -> Any:
        nonlocal left
        left -= 1
        job = submit(*args)
        if left < 0:
            raise KeyboardInterrupt
        return job

    rig.fetcher.readers.submit = stop  # type: ignore[method-assign,assignment] # interrupts
    with pytest.raises(KeyboardInterrupt):
        rig.fetch(0, [1, 2, 3])
    rig.fetcher.readers.submit = submit  # type: ignore[method-assign]
    assert len(rig.fetcher._unknown) == 1
    rig.check()

    def opens() -> None:
        assert rig.fetcher._unknown
        gate.open.set()
        drain()

    rig.fetcher.readers.drain = opens  # type: ignore[method-assign] # lets the read go when somebody waits for it
    rig.source.before = lambda i, e: None
    rig.fetch(0, [1, 2, 3])
    rig.fetcher.readers.drain = drain  # type: ignore[method-assign]
    assert gate.open.is_set()
    assert rig.fetcher._unknown == []
    rig.check()
    rig.close()


@pytest.mark.parametrize("spare", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(6, 0), (0, 6), (4, 4)])
def test_fewer_slots_than_misses_are_used_in_waves(sizes: tuple[int, int], spare: int) -> None:
    rig = Rig(*sizes, spare=spare, threads=2)
    rng = random.Random(1)
    for _ in range(10):
        rig.token(rng)
        rig.check()
    rig.close()


def test_a_ring_without_a_slot_is_an_error() -> None:
    rig = Rig(4, 0, spare=1)
    rig.pool.take()
    with pytest.raises(CacheError, match=r"no pinned slot is left .* all 1 hold experts"):
        rig.fetch(0, [1])
    rig.pool.give(1)
    rig.fetch(0, [1])
    rig.check()
    rig.close()


# ---- order


def evict_under_kernels(rig: Rig) -> None:
    """Kernels that read three host slots are enqueued; then others take their places, and nobody drains the stream."""
    rig.fetch(0, [0, 1, 2])
    rig.use(0, [0, 1, 2])
    for layer in (1, 2, 3):
        rig.fetch(layer, [3, 4, 5])
        rig.use(layer, [3, 4, 5])
    rig.drain()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("spare", [3, 4, 9])
@pytest.mark.parametrize("sizes", [(0, 3), (3, 3), (3, 0)])
def test_no_slot_is_rewritten_under_a_kernel(sizes: tuple[int, int], spare: int, schedule: str) -> None:
    rig = Rig(*sizes, spare=spare, schedule=schedule)
    evict_under_kernels(rig)
    rig.check()
    rig.close()


def test_a_slot_that_is_rewritten_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: race detection sees the reader's write, though a thread makes it."""
    monkeypatch.setattr(PinnedPool, "leave", PinnedPool.give)
    rig = Rig(0, 3, spare=3)
    with pytest.raises(RaceError, match=r"L0\.use"):
        evict_under_kernels(rig)


def test_halves_of_the_ring_are_reused_behind_their_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch upon fetch without a drain: each copy still reads its slot when the host wants it back."""
    for drop in (False, True):
        probe = Probe()
        rig = Rig(12, 0, spare=6, backend=probe)
        if drop:  # the events are not waited for
            probe.hook = lambda name, args, call: None if name == "synchronize_event" else call()
        try:
            for layer in range(LAYERS):
                rig.fetch(layer, [1, 2, 3])
            rig.drain()
            for layer in range(LAYERS):
                rig.use(layer, [1, 2, 3])
            rig.drain()
        except (RaceError, AssertionError):
            assert drop
        else:
            assert not drop, "a wait was left out and nobody noticed"
            rig.close()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("make", [lambda: CudaError(Status.OUT_OF_MEMORY, "planted", ""), KeyboardInterrupt])
def test_every_call_of_a_fetch_fails(make: Any, after: bool) -> None:
    probe = Probe()
    rig = Rig(6, 0, spare=4, backend=probe)
    rng = random.Random(2)
    n = 0
    names = set()
    while True:
        rig.token(rng)
        rig.token_starts()
        layer = rng.randrange(LAYERS)
        absent = [e for e in range(EXPERTS) if not rig.cache.slot_of(layer, e)]
        before = rig.mapped()
        probe.hook = failing = FailAt(n, make(), after=after)
        rig.cache.begin_epoch()
        raised = raised_by(lambda: rig.fetcher.fetch(layer, absent[:3], rig.stream, count=False))  # noqa: B023 # at once
        assert raised is (failing.error if failing.fired else None)
        probe.hook = None
        if not failing.fired:
            break
        names.add(failing.fired)
        now = rig.mapped()
        assert all(now[key] == code for key, code in before.items() if key in now)
        rig.check()
        n += 1
    assert names == {"synchronize_event", "copy_h2d", "record"}
    rig.close()


@pytest.mark.parametrize("sizes", [(0, 6), (2, 4)])
def test_a_fetch_into_the_host_tier_makes_no_call(sizes: tuple[int, int]) -> None:
    """Nothing is copied and nothing waits, as long as slots are spare."""
    probe = Probe()
    rig = Rig(*sizes, backend=probe)
    rig.token(random.Random(2))
    layer = 1
    absent = [e for e in range(EXPERTS) if not rig.cache.slot_of(layer, e)][:3]
    probe.hook = FailAt(0, AssertionError("a call was made"))
    rig.cache.begin_epoch()
    assert rig.fetcher.fetch(layer, absent, rig.stream, count=False) == 3
    assert rig.cache.slot_of(layer, absent[0]) & HOST_SLOT_BIT
    probe.hook = None
    rig.check()
    rig.close()


# ---- pinned memory that is short


def opened(limit: int, host: int, spare: int, **least: int) -> tuple[PinnedPool, int, list[Any], HostBackend]:
    backend = HostBackend(pinned_nbytes=(limit + 1) * SLOT_NBYTES)  # slot 0 is one more
    with capture_logs() as logs:
        pool, n_host = open_pool(backend, SLOT_NBYTES, NBYTES, host_slots=host, spare_slots=spare, **least)
    return pool, n_host, logs, backend


@pytest.mark.parametrize("limit", range(6, 40, 3))
def test_a_smaller_host_tier_then_a_smaller_ring(limit: int) -> None:
    pool, n_host, logs, backend = opened(limit, 20, 16, least_spare=6)
    n_spare = pool.n_slots - n_host
    assert pool.n_slots <= limit
    assert n_spare >= 6
    assert n_spare == 16 or n_host == 0  # the ring shrinks last
    if limit >= 36:
        assert (n_host, n_spare, logs) == (20, 16, [])
    else:
        (warning,) = logs
        assert (warning["log_level"], warning["event"]) == ("warning", "pinned memory is short")
        assert warning["asked_nbytes"] == 36 * SLOT_NBYTES
        assert warning["achieved_nbytes"] == pool.n_slots * SLOT_NBYTES
        assert warning["host_slots"] == f"{n_host} of 20"
        assert warning["spare_slots"] == f"{n_spare} of 16"
        assert f"{(limit + 1) * SLOT_NBYTES} are free" in warning["error"]
    backend.free(backend.alloc("the next call", 100))
    pool.close()
    assert backend.ledger() == ()


def test_slots_for_moves_go_with_the_host_tier() -> None:
    for limit, want in ((60, (20, 16, 5)), (40, (15, 16, 5)), (20, (2, 16, 2)), (16, (0, 16, 0))):
        pool, n_host, _, _ = opened(limit, 20, 16, move_slots=5, least_spare=6)
        assert (n_host, pool.n_slots) == (want[0], sum(want))


def test_less_than_what_is_needed_is_an_error() -> None:
    with pytest.raises(OutOfDeviceMemory, match="pinned experts"):
        opened(8, 20, 16, least_spare=6, least_host=3)
    pool, n_host, _, _ = opened(9, 20, 16, least_spare=6, least_host=3)
    assert (n_host, pool.n_slots) == (3, 9)


def test_pool_slots_are_in_one_state_at_a_time() -> None:
    pool, _, _, _ = opened(10, 4, 3)
    taken = [pool.take() for _ in range(7)]
    assert sorted(taken) == list(range(1, 8))
    assert pool.take() == 0
    pool.leave(taken[0])
    pool.leave(0)
    pool.give(0)
    assert (pool.n_spare, pool.n_left) == (0, 1)
    pool.drained()
    assert (pool.n_spare, pool.n_left) == (1, 0)
    assert pool.take() == taken[0]
    assert [pool.ptr(i) - pool.host.device_ptr for i in (1, 2, 7)] == [SLOT_NBYTES, 2 * SLOT_NBYTES, 7 * SLOT_NBYTES]
    view = pool.for_reader(3)
    view[:] = BYTES[0, 0]
    assert np.array_equal(pool.host.array[3 * SLOT_NBYTES :][:NBYTES], BYTES[0, 0])
    assert type(view) is np.ndarray


def test_a_read_of_the_wrong_size_is_the_reads_error() -> None:
    """What a reader raises that is no read error reaches the caller, and nothing is mapped."""
    for threads in (0, 2):
        rig = Rig(2, 4, threads=threads)

        def wrong(layer: int, expert: int) -> None:
            raise ZeroDivisionError("a bug")

        rig.source.before = wrong
        with pytest.raises(ZeroDivisionError):
            rig.fetch(0, [1, 2, 3])
        assert rig.mapped() == {}
        rig.source.before = lambda i, e: None
        rig.check()
        rig.fetch(0, [1, 2, 3])
        assert [code & HOST_SLOT_BIT != 0 for code in rig.mapped().values()] == [False, False, True]
        rig.close()


def test_checkpoint_errors_keep_their_cause() -> None:
    rig = Rig(3, 0)
    rig.source.before = fail_some(random.Random(0), 1.0)
    with pytest.raises(CacheError, match=r"3 of 3 .*; first: expert 4: planted for 2\.4") as info:
        rig.fetch(2, [4, 1, 2])
    assert isinstance(info.value.__cause__, CheckpointError)
    rig.close()
