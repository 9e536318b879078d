"""Engines with two tiers, reader threads, reading ahead: whatever the sizes, a token is the all-resident eager one."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from engine_harness import Checkpoints, ProbeBackend, Run, check_counters, reference
from numpy.typing import NDArray
from structlog.testing import capture_logs

from ds41rt.checkpoint.direct import PART_NBYTES
from ds41rt.cu.host import HostBackend
from ds41rt.cu.result import OutOfDeviceMemory
from ds41rt.engine import Engine
from ds41rt.errors import CacheError, CheckpointError, ConfigError
from ds41rt.moe import fetch
from ds41rt.moe.arena import slot_nbytes
from ds41rt.moe.mover import MOVES_PER_TOKEN
from ds41rt.step import adaptive

ALL, TOP_K = 64, 3
LIMIT = 60


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize(("policy", "schedule"), [("oldest", "random:3"), ("least-used", "lazy")])
@pytest.mark.parametrize(("device", "host"), [(0, 3), (2, 1), (5, 9), (12, 24), (24, 8), (0, 30)])
def test_small_tiers(checkpoint: Checkpoints, device: int, host: int, policy: str, schedule: str) -> None:
    with Run(
        reference(checkpoint("micro")), slots=device, host_slots=host, evict_policy=policy, schedule=schedule
    ) as run:
        run.steps(14)
        stats = check_counters(run)
        assert stats.host_hits > 0 or host <= TOP_K
        assert (stats.expert_slots, stats.host_slots) == (device, host)
        assert stats.promotions > 0 or device * host == 0 or device + host < 20
        run.check_table()


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random:5"])
@pytest.mark.parametrize("device", [0, 16])
def test_a_decode_out_of_the_host_tier_never_falls(checkpoint: Checkpoints, device: int, schedule: str) -> None:
    """All experts are in one of the tiers before the first token. Moves go on all the time, and cost no fall either."""
    with Run(reference(checkpoint("micro")), slots=device, host_slots=ALL - device, schedule=schedule) as run:
        cfg = run.engine.config
        for layer in range(cfg.n_layers):
            run.engine.preload(layer, range(cfg.n_experts))
        run.steps(40)
        stats = check_counters(run)
        assert (stats.misses, sum(stats.falls.values())) == (0, 0)
        assert stats.clean_replays == stats.replays > 0
        assert stats.host_hits > 0
        assert (stats.promotions > 20) == (device > 0)
        run.check_table()


@pytest.mark.parametrize("mode", ["eager", "step-graph"])
def test_threads_change_neither_bits_nor_map(
    checkpoint: Checkpoints, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it matter into how many parts an expert is cut."""
    maps: list[list[Any]] = []
    for threads, part_nbytes in ((0, PART_NBYTES), (8, PART_NBYTES), (0, 999), (8, 300)):
        monkeypatch.setattr(fetch, "PART_NBYTES", part_nbytes)
        seen = []
        with Run(reference(checkpoint("micro")), mode=mode, slots=10, host_slots=16, reader_threads=threads) as run:
            assert (run.engine.arena.layout.nbytes > part_nbytes) == (len(maps) > 1)
            for _ in range(24):
                run.step()
                seen.append(list(run.engine.cache.codes))
            stats = run.stats()
            assert stats.expert_nbytes_read == stats.misses * run.engine.arena.layout.nbytes
        maps.append(seen)
    assert maps[0] == maps[1] == maps[2] == maps[3]


@pytest.mark.parametrize("threads", [0, 4])
@pytest.mark.parametrize("mode", ["eager", "step-graph"])
def test_reading_ahead(checkpoint: Checkpoints, mode: str, threads: int) -> None:
    """Useful, wasted and failed reads add up, and a read ahead that fails never fails a token."""

    class Unlucky:
        """Every fifth expert is refused the first time it is read."""

        def __init__(self, source: Any) -> None:
            self.source = source
            self.refused: set[tuple[int, int]] = set()

        def read_expert(self, layer: int, expert: int, out: NDArray[np.uint8], offset: int) -> None:
            if (layer + expert) % 5 == 0 and (layer, expert) not in self.refused:
                self.refused.add((layer, expert))
                raise CheckpointError("planted")
            self.source.read_expert(layer, expert, out, offset)

    with Run(
        reference(checkpoint("micro")), mode=mode, slots=8, host_slots=9, prefetch=True, reader_threads=threads
    ) as run:
        run.steps(10)
        run.engine._fetcher._source = cast(Any, Unlucky(run.engine._fetcher._source))
        while run.seq.position < 36:
            try:
                run.step()
            except CacheError:
                run.step()  # refused to a layer that asked for it itself
        stats = check_counters(run, undisturbed=False)
        assert stats.prefetch_issued > 20
        assert stats.prefetch_useful > 0
        assert stats.prefetch_useful + stats.prefetch_wasted + stats.prefetch_failed == stats.prefetch_issued
        if threads == 0:
            assert stats.prefetch_failed > 0
        nbytes = run.engine.arena.layout.nbytes
        assert stats.expert_nbytes_read >= stats.misses * nbytes


def test_reading_ahead_needs_the_device_route(checkpoint: Checkpoints) -> None:
    with capture_logs() as logs:
        run = Run(reference(checkpoint("micro")), mode="eager", slots=8, device_route=False, prefetch=True)
    with run:
        run.steps(3)
        assert run.stats().prefetch_issued == 0
    assert [(e["event"], e["log_level"]) for e in logs if "prefetch" in e["event"]] == [
        ("prefetch not usable", "warning")
    ]


@pytest.mark.parametrize("mode", ["eager", "step-graph"])
def test_misses_into_the_host_tier_wait_for_nothing(checkpoint: Checkpoints, mode: str) -> None:
    """Slots that keys have left are spare again after the read-back that every layer waits for anyway."""
    with Run(reference(checkpoint("micro")), mode=mode, slots=0, host_slots=12, staging_slots=4) as run:
        run.steps(4)
        fetcher = run.engine._fetcher
        fetcher._wait_for_a_slot = None  # type: ignore[method-assign,assignment] # any call fails
        run.steps(10)
        assert run.stats().misses > 40


def test_every_layer_is_an_epoch_of_its_own(checkpoint: Checkpoints) -> None:
    """In a clean replay as in the eager step: what the layer before has used may make room."""
    for mode in ("step-graph", "eager"):
        with Run(reference(checkpoint("micro")), mode=mode) as run:
            run.steps(20)
            cache, epochs = run.engine.cache, 0
            begin_epoch = cache.begin_epoch

            def count() -> None:
                nonlocal epochs
                epochs += 1
                begin_epoch()  # noqa: B023 # called before the loop goes on

            cache.begin_epoch = count  # type: ignore[method-assign] # a spy
            run.step()
            assert epochs == run.engine.config.n_layers


# ---- interrupts


class Interrupting:
    """A model source; from its n-th expert read on reads wait for `go`, and the n-th sends Ctrl-C to the main thread
    once that waits for reads."""

    def __init__(self, source: Any, n: int) -> None:
        self.source = source
        self.left = n
        self.lock = threading.Lock()
        self.main_waits = threading.Event()
        self.go = threading.Event()

    def read_expert(self, layer: int, expert: int, out: NDArray[np.uint8], offset: int) -> None:
        with self.lock:
            self.left -= 1
            left = self.left
        if left < 0:
            if left == -1:
                assert self.main_waits.wait(LIMIT)
                signal.pthread_kill(cast(int, threading.main_thread().ident), signal.SIGINT)
            assert self.go.wait(LIMIT)
        self.source.read_expert(layer, expert, out, offset)


@pytest.mark.parametrize("n", range(10))
def test_an_interrupted_decode(checkpoint: Checkpoints, n: int) -> None:
    """Ctrl-C while reads run, at ten points: it ends the step at once, nothing is lost, the token can be repeated."""
    sizes = ((16, 0), (0, 16), (6, 10))[n % 3]
    ref = reference(checkpoint("micro"))
    with Run(ref, slots=sizes[0], host_slots=sizes[1], reader_threads=3) as run:
        run.steps(2)
        fetcher = run.engine._fetcher
        source, wait = fetcher._source, fetcher.readers.wait
        interrupting = Interrupting(source, n)

        def waits(jobs: Any) -> None:
            interrupting.main_waits.set()
            wait(jobs)

        fetcher._source = cast(Any, interrupting)
        fetcher.readers.wait = waits  # type: ignore[method-assign] # a spy
        with pytest.raises(KeyboardInterrupt):
            run.steps(40)
        assert not interrupting.go.is_set()
        fetcher.readers.wait = wait  # type: ignore[method-assign]
        fetcher._source = source
        interrupting.go.set()
        run.steps(10)
        run.check_table()
        check_counters(run, undisturbed=False)


@pytest.mark.parametrize("n", range(10))
def test_an_interrupt_and_then_close(checkpoint: Checkpoints, n: int) -> None:
    """Closing waits for the reads that still run; no thread and no pinned memory is left."""
    with Run(reference(checkpoint("micro")), slots=6, host_slots=10, reader_threads=3) as run:
        fetcher = run.engine._fetcher
        interrupting = Interrupting(fetcher._source, n)
        wait, close = fetcher.readers.wait, fetcher.readers.close

        def waits(jobs: Any) -> None:
            interrupting.main_waits.set()
            wait(jobs)

        def closes() -> None:
            interrupting.go.set()
            close()

        fetcher._source = cast(Any, interrupting)
        fetcher.readers.wait = waits  # type: ignore[method-assign] # a spy
        fetcher.readers.close = closes  # type: ignore[method-assign] # a spy
        with pytest.raises(KeyboardInterrupt):
            run.steps(40)


@pytest.mark.parametrize("n", range(10))
def test_an_interrupted_load(checkpoint: Checkpoints, n: int) -> None:
    """At ten points of a load, from the first call to the last."""
    backend = ProbeBackend()
    calls, stop_at = 0, -1

    def hook(name: str, args: tuple[Any, ...], call: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise KeyboardInterrupt
        return call()

    def load() -> Engine:
        return Engine.open(
            checkpoint("micro"), backend=cast(Any, backend), expert_slots=6, host_slots=10, reader_threads=4
        )

    backend.hook = hook
    engine = load()
    stop_at, calls = 1 + n * (calls - 1) // 9, 0
    backend.hook = None
    engine.close()
    backend.hook = hook
    with pytest.raises(KeyboardInterrupt):
        load()
    backend.hook = None
    assert not any(backend.inner.live().values())
    backend.close()


def test_every_allocation_fails_once(checkpoint: Checkpoints) -> None:
    """The engine is not opened and nothing is left, save where the pinned tier can shrink."""
    n = 0
    while True:
        backend = HostBackend()
        backend.faults.out_of_memory(n + 1)
        try:
            engine = Engine.open(checkpoint("micro"), backend=backend, expert_slots=6, host_slots=10, prefetch=True)
        except OutOfDeviceMemory:
            pass
        else:
            engine.close()
            if not backend.faults.fired:
                break
            assert engine.stats().host_slots < 10  # the only failure that is made up for
        assert not any(backend.live().values())
        n += 3
    assert n > 60


# ---- memory


def short_of_pinned(nbytes: int) -> ProbeBackend:
    """A backend that refuses larger pinned buffers of experts."""

    def hook(name: str, args: tuple[Any, ...], call: Any) -> Any:
        if name == "alloc_pinned" and args[0] == "pinned experts" and args[1] > nbytes:
            raise OutOfDeviceMemory("cuMemHostAlloc", f"{nbytes} bytes are free")
        return call()

    return ProbeBackend("lazy", hook)


@pytest.mark.parametrize("n_slots", [6, 13, 16, 20, 30, 47])
def test_pinned_memory_that_is_short(checkpoint: Checkpoints, n_slots: int) -> None:
    """Case 17: a smaller host tier with one warning, and tokens as ever."""
    with Run(reference(checkpoint("micro"))) as run:
        size = slot_nbytes(run.engine.arena.layout)
    with capture_logs() as logs:
        backend = short_of_pinned((n_slots + 1) * size)  # slot 0 is one more
        run = Run(reference(checkpoint("micro")), slots=8, host_slots=24, staging_slots=16, backend=backend)
    with run:
        stats = run.stats()
        host, n_pool = stats.host_slots, run.engine._pool.n_slots
        assert n_pool <= n_slots
        assert n_pool == host + 16 + min(host, 2 * MOVES_PER_TOKEN) or host == 0
        assert (host == 0) == (n_slots <= 16)
        warnings = [entry for entry in logs if entry["log_level"] == "warning"]
        assert [entry["event"] for entry in warnings] == ["pinned memory is short"]
        run.steps(12)
        check_counters(run)
    assert not any(backend.inner.live().values())
    backend.close()


def test_budgets_of_an_engine(checkpoint: Checkpoints) -> None:
    """In GiB, by setting and by argument; arguments count for more."""
    path = checkpoint("micro")
    with Engine.open(path) as engine:
        size = slot_nbytes(engine.arena.layout)
        stats = engine.stats()
        assert (stats.expert_slots, stats.host_slots) == (ALL, 0)  # all of them fit on the device

    def gib(n: int) -> float:
        return n * size / 2**30 + 1e-12

    for given, want in (
        ({"expert_cache_gib": gib(11), "host_cache_gib": gib(7)}, (10, 7)),
        ({"expert_cache_gib": 0.0, "host_cache_gib": gib(7)}, (0, 7)),
        ({"expert_cache_gib": gib(11), "host_cache_gib": 0.0}, (10, 0)),
        ({"expert_cache_gib": gib(11)}, (10, 0)),  # the simulated device shares the host's memory
        ({"expert_slots": 9}, (9, 0)),
        ({"expert_slots": 9, "host_slots": 4}, (9, 4)),
        ({"expert_slots": 9, "host_slots": 400}, (9, ALL - 9)),
        ({"expert_slots": 9, "host_cache_gib": gib(5)}, (9, 5)),
        ({"expert_slots": 400, "host_slots": 5}, (ALL, 0)),
    ):
        with capture_logs() as logs, Engine.open(path, **cast(Any, given)) as engine:
            stats = engine.stats()
            assert (stats.expert_slots, stats.host_slots) == want, given
        (entry,) = [entry for entry in logs if entry["event"] == "expert budget"]
        assert (entry["device_slots"], entry["host_slots"], entry["of"]) == (*want, ALL)
    with pytest.raises(ConfigError, match=r"1 expert slots and 1 host slots are fewer than .* of 3"):
        Engine.open(path, expert_slots=1, host_slots=1)


def test_the_map_of_a_preload(checkpoint: Checkpoints) -> None:
    """First the device, then the host tier, then the oldest of that make room."""
    with Run(reference(checkpoint("micro")), slots=5, host_slots=7) as run:
        run.engine.preload(0, range(16))
        codes = [run.engine.cache.slot_of(0, e) for e in range(16)]
        assert codes[:5] == [1, 2, 3, 4, 5]
        assert [code > 5 for code in codes[5:]].count(True) == 7
        assert all(code > 5 for code in codes[9:])
        run.steps(5)


# ---- the adaptive mode


def test_the_adaptive_mode_changes_no_bit(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which segments always lose, then win: both kinds of token run, and all are the eager ones."""
    for name, n in (("WINDOW", 2), ("FIRST_HOLD", 6), ("LONGEST_HOLD", 12), ("COMPARE_EVERY", 10)):
        monkeypatch.setattr(adaptive, name, n)
    with Run(reference(checkpoint("micro")), mode="adaptive", slots=16) as run:
        machine, mode = run.engine.machine, run.engine._adaptive
        assert mode is not None
        now, segments_are_slow = 0.0, True

        def clock() -> float:
            nonlocal now
            now += 5.0 if machine.seg.segment_mode == segments_are_slow else 1.0
            return now

        mode._clock = clock
        kinds: list[bool] = []
        for _ in range(80):
            segments_are_slow = len(kinds) < 40
            run.step()
            kinds.append(machine.seg.segment_mode)
        check_counters(run, undisturbed=False)
        assert run.stats().recaptures == 0
        assert kinds[:40].count(False) > 20
        assert kinds[40:].count(True) > 20


def test_the_modes_and_their_switches(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    path: Path = checkpoint("micro")
    for mode, wanted in (("eager", (False, False)), ("step-graph", (True, False)), ("adaptive", (True, True))):
        monkeypatch.setenv("DS41RT_ADAPTIVE", "1" if mode != "adaptive" else "0")
        with Engine.open(path, mode=cast(Any, mode)) as engine:
            assert (engine.machine.step_graph, engine._adaptive is not None) == wanted
    monkeypatch.setenv("DS41RT_ADAPTIVE", "1")
    with Engine.open(path) as engine:
        assert engine._adaptive is not None
    with Engine.open(path, device_route=False) as engine:
        assert engine._adaptive is None
