"""Reads that were begun ahead: used when asked for, otherwise nobody notices them, and the counters add up."""

import random
import threading

import pytest
from tier_rig import BYTES, EXPERTS, LAYERS, TOP_K, Rig

from ds41rt.errors import CheckpointError
from ds41rt.moe.header import HOST_SLOT_BIT

LIMIT = 60


def counts(rig: Rig) -> tuple[int, int, int, int]:
    ahead = rig.fetcher.ahead
    return ahead.n_issued, ahead.n_useful, ahead.n_wasted, ahead.n_failed


@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("sizes", [(6, 0), (0, 6), (2, 4)])
def test_what_is_asked_for_is_read_once(sizes: tuple[int, int], threads: int) -> None:
    """Two of three were read ahead, one in vain; they land like any other, wherever that is."""
    rig = Rig(*sizes, spare=9, threads=threads)
    rig.fetcher.ahead.issue(1, [4, 5, 9], TOP_K)
    assert rig.mapped() == {}
    assert rig.fetch(1, [4, 5, 6]) == 3
    rig.use(1, [4, 5, 6])
    rig.drain()
    assert len(rig.source.reads) == 4
    assert counts(rig) == (3, 2, 1, 0)
    assert (rig.cache.misses, rig.cache.hits + rig.cache.host_hits) == (3, 0)
    rig.check()
    rig.close()


def running_read() -> tuple[Rig, threading.Event]:
    """A rig that reads expert 4 of layer 1 ahead: a reader is in the middle of it until the event is set."""
    rig = Rig(0, 6, spare=9, threads=2)
    begun, go = threading.Semaphore(0), threading.Event()

    def slow(layer: int, expert: int) -> None:
        begun.release()
        assert go.wait(LIMIT)

    rig.source.before = slow
    rig.fetcher.ahead.issue(1, [4], TOP_K)
    assert begun.acquire(timeout=LIMIT)
    return rig, go


def test_the_running_read_is_waited_for_and_not_begun_again() -> None:
    rig, go = running_read()
    wait = rig.fetcher.readers.wait

    def opens(jobs: object) -> None:
        go.set()
        wait(jobs)  # type: ignore[arg-type] # passed on

    rig.fetcher.readers.wait = opens  # type: ignore[method-assign] # a spy
    rig.fetch(1, [4])
    assert len(rig.source.reads) == 1
    assert counts(rig) == (1, 1, 0, 0)
    rig.check()
    rig.close()


@pytest.mark.parametrize("threads", [0, 3])
def test_one_that_fails_is_read_again_and_fails_nobody(threads: int) -> None:
    rig = Rig(0, 6, spare=9, threads=threads)

    def refuse(layer: int, expert: int) -> None:
        raise CheckpointError("planted")

    rig.source.before = refuse
    rig.fetcher.ahead.issue(1, [4, 5], TOP_K)
    rig.fetcher.readers.drain()
    rig.source.before = lambda layer, expert: None
    assert rig.fetch(1, [4, 6]) == 2
    assert counts(rig) == (2, 0, 0, 2)
    assert len(rig.source.reads) == 4
    rig.check()
    rig.close()


def test_a_wasted_read_keeps_its_slot_until_it_is_done() -> None:
    """It runs while the layer's own experts come and go; what it writes at last harms nobody."""
    rig = Rig(0, 3, spare=4 + TOP_K, threads=5)
    go = threading.Event()
    rig.source.before = lambda layer, expert: None if expert < 12 else assert_waits(go)
    rig.fetcher.ahead.issue(1, [12, 13, 14, 15], TOP_K)
    held = {slot for slot, _ in rig.fetcher.ahead._pending.values()}
    assert len(held) == 4
    for _ in range(3):
        for layer in range(LAYERS):
            rig.drain()
            rig.fetch(layer, [1, 2, 3])
            rig.use(layer, [1, 2, 3])
            assert not held & {code ^ HOST_SLOT_BIT for code in rig.mapped().values()}
    rig.drain()
    assert counts(rig) == (4, 0, 4, 0)
    rig.check()
    go.set()
    rig.fetcher.readers.drain()
    rig.check()
    rig.fetch(1, [4, 5, 6])
    assert rig.pool._quarantined == []
    rig.close()


def assert_waits(go: threading.Event) -> None:
    assert go.wait(LIMIT)


def test_nothing_is_evicted_and_a_layers_slots_are_left() -> None:
    rig = Rig(2, 2, spare=TOP_K + 5)
    rig.fetch(0, [0, 1, 2])
    rig.drain()
    rig.fetch(0, [3])
    before = rig.mapped()
    n_spare = rig.pool.n_spare
    rig.fetcher.ahead.issue(1, list(range(EXPERTS)), TOP_K)
    assert rig.pool.n_spare == TOP_K
    assert counts(rig)[0] == n_spare - TOP_K > 0
    rig.fetcher.ahead.issue(1, list(range(EXPERTS)), TOP_K)
    rig.fetcher.ahead.issue(0, [0, 1, 2], 0)  # resident: nothing to read
    assert rig.pool.n_spare == TOP_K
    assert rig.mapped() == before
    rig.fetcher.ahead.settle()
    assert rig.pool.n_spare == n_spare
    issued, useful, wasted, failed = counts(rig)
    assert useful + wasted + failed == issued
    rig.close()


@pytest.mark.parametrize("threads", [0, 4])
@pytest.mark.parametrize("sizes", [(6, 0), (0, 6), (4, 8), (9, 3)])
def test_random_guesses(sizes: tuple[int, int], threads: int) -> None:
    rig = Rig(*sizes, spare=12, threads=threads)
    rng = random.Random(4)
    for i in range(60):
        if i % LAYERS == 0:
            rig.token_starts()
        rig.drain()
        layer = i % LAYERS
        picks = rng.sample(range(EXPERTS), TOP_K)
        rig.fetcher.ahead.issue(layer, [*picks[: rng.randrange(4)], *rng.sample(range(EXPERTS), 2)], TOP_K)
        rig.fetch(layer, picks)
        rig.use(layer, picks)
        issued, useful, wasted, failed = counts(rig)
        assert useful + wasted + failed == issued
    rig.drain()
    rig.check()
    assert min(useful, wasted) > 10
    assert BYTES.shape[0] == LAYERS
    rig.close()


def test_an_interrupted_submission_keeps_its_slot_until_the_read_is_over() -> None:
    rig = Rig(0, 6, spare=9, threads=2)
    submit = rig.fetcher.readers.submit

    def interrupted(*args: object) -> None:
        submit(*args)  # type: ignore[arg-type] # passed on
        raise KeyboardInterrupt

    rig.fetcher.readers.submit = interrupted  # type: ignore[method-assign, assignment] # an accident
    with pytest.raises(KeyboardInterrupt):
        rig.fetcher.ahead.issue(1, [4], TOP_K)
    rig.fetcher.readers.submit = submit  # type: ignore[method-assign]
    assert rig.pool.n_spare == 8 + 6
    rig.fetch(1, [4])
    assert len(rig.source.reads) == 2
    assert not rig.fetcher._unknown
    assert counts(rig) == (0, 0, 0, 0)
    rig.check()
    rig.close()


def test_what_is_forgotten_was_for_nothing() -> None:
    rig = Rig(0, 6, spare=9, threads=2)
    rig.fetcher.ahead.issue(1, [4, 5], TOP_K)
    rig.fetcher.recover()
    rig.pool.recover(rig.cache.recover())
    assert counts(rig) == (2, 0, 2, 0)
    assert rig.pool.n_spare == 9 + 6
    assert rig.fetch(1, [4, 5, 6]) == 3
    assert counts(rig) == (2, 0, 2, 0)
    rig.check()
    rig.close()


def test_a_recovery_waits_for_the_reads_that_it_forgets() -> None:
    rig, go = running_read()
    ((_, job),) = rig.fetcher.ahead._pending.values()
    drain = rig.fetcher.readers.drain

    def opens() -> None:
        go.set()
        drain()

    rig.fetcher.readers.drain = opens  # type: ignore[method-assign] # a spy
    rig.fetcher.recover()
    was_done = job.done
    go.set()
    assert was_done
    rig.pool.recover(rig.cache.recover())
    rig.check()
    rig.close()
