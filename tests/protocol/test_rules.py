"""Rules that cost nothing but time or words when they are broken, so that no scenario's bits show it."""

import gc
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from scenario import PRESET, Runner, Scenario, World
from structlog.testing import capture_logs
from twin import MAX_CONTEXT, Twin

from ds41rt.checkpoint.synth_presets import PRESETS
from ds41rt.cu.backend import Stream, open_backend
from ds41rt.cu.host import HostBackend
from ds41rt.cu.host.stream import Op
from ds41rt.cu.result import CudaError, Status
from ds41rt.engine import Engine
from ds41rt.errors import CacheError
from ds41rt.moe.cache import ExpertCache
from ds41rt.moe.header import Fall
from ds41rt.moe.recency import Recency
from ds41rt.step.entries import Entries
from ds41rt.step.snapshot import Snapshots


@pytest.fixture(scope="module")
def twin(checkpoint: Callable[[str], Path], backend_name: str) -> Iterator[Twin]:
    made = Twin(checkpoint(PRESET), backend_name)
    yield made
    made.close()


@pytest.fixture
def world(checkpoint: Callable[[str], Path], backend_name: str, twin: Twin) -> Iterator[World]:
    """A world to step word by word, with all graphs captured."""
    made = World(Scenario("", slots=16), checkpoint(PRESET), backend_name, twin)
    made.do("a*3")
    yield made
    made.close()


def test_a_fetch_of_resident_experts_makes_no_call(world: World) -> None:
    """Not even a wait for staging memory that it does not need."""
    cache, fetcher = world.engine.cache, world.engine._fetcher
    layer, expert = 0, next(e for e in range(16) if not cache.slot_of(0, e))
    assert fetcher.fetch(layer, [expert], world.engine.stream, count=False) == 1
    calls: list[str] = []

    def hook(name: str, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        calls.append(name)
        return call()

    world.probe.hook = hook
    cache.begin_epoch()
    assert fetcher.fetch(layer, [expert], world.engine.stream, count=False) == 0
    world.probe.hook = None
    assert calls == []


def test_staging_is_not_rewritten_under_a_copy_that_no_event_follows(world: World) -> None:
    """The call between the copy and the next fetch failed, and nothing has drained the stream since."""
    absent = [e for e in range(16) if not world.engine.cache.slot_of(0, e)]

    def hook(name: str, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        if name == "record":
            raise CudaError(Status.OUT_OF_MEMORY, "planted", "by a test")
        return call()

    world.probe.hook = hook
    with pytest.raises(CudaError, match="planted"):
        world.engine.preload(0, absent[:3])
    world.probe.hook = None
    world.engine.preload(0, absent[3:6])
    world.check_cache()


def test_the_engram_rows_of_a_token_are_read_once(world: World) -> None:
    """Whichever way it is stepped: captured, replayed, or with layers that run again."""
    engram = world.engine.engram
    assert engram is not None
    source = engram._source
    read: list[int] = []

    class Counted:
        def read_engram_rows(self, layer: int, *args: Any) -> None:
            read.append(layer)
            source.read_engram_rows(layer, *args)

    engram._source = cast(Any, Counted())
    captures = world.engine.stats().captures
    for word in ("a/bake=0", "a/miss=", "a/miss=0.0+2.1"):
        world.do(word)
        assert read == list(world.engine.config.engram_layers), word
        read.clear()
    assert world.engine.stats().captures > captures


def test_a_fall_says_how_many_experts_were_fetched(world: World) -> None:
    falls: list[Fall | None] = []
    router = world.engine.router
    read_headers = router.read_headers

    def spy(*args: Any) -> Fall | None:
        falls.append(read_headers(*args))
        return falls[-1]

    router.read_headers = spy  # type: ignore[method-assign,assignment] # a spy
    for word in ("a/miss=0.0+0.2", "a/miss=/wrong=2.1", "a/miss=3.1/wrong=3.1"):
        world.do(word)
    assert [fall for fall in falls if fall is not None] == [
        Fall(0, "miss", 2),
        Fall(2, "stale_table", 0),
        Fall(3, "no_flag", 1),
    ]


def test_a_handle_whose_destruction_was_interrupted_hides_no_other(world: World) -> None:
    """It is gone already, which is no failure: no warning, and the ones behind it are destroyed in the same go."""
    destroyed = 0

    def hook(name: str, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        nonlocal destroyed
        call()
        destroyed += name == "destroy_exec"
        if name == "destroy_exec" and destroyed == 1:
            raise KeyboardInterrupt

    machine = world.engine.machine
    world.probe.hook = hook
    with capture_logs() as logs:
        with pytest.raises(KeyboardInterrupt):
            machine.drop_graphs(world.owners, "test")
        assert destroyed == 1
        world.probe.hook = None
        machine.destroy_doomed()
    assert logs == [entry for entry in logs if entry["log_level"] != "warning"]
    assert machine.seg.doomed == []
    assert world.backend.live()["graph_execs"] == 0


def test_a_handle_that_cannot_be_destroyed_hides_no_other(world: World) -> None:
    """It alone is kept for another try."""
    asked = 0

    def hook(name: str, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        nonlocal asked
        asked += name == "destroy_exec"
        if name == "destroy_exec" and asked == 1:
            raise CudaError(Status.OUT_OF_MEMORY, "planted", "by a test")
        return call()

    machine = world.engine.machine
    world.probe.hook = hook
    machine.drop_graphs(world.owners, "test")
    world.probe.hook = None
    assert asked == len(world.owners) > 1
    assert [what for what, _ in machine.seg.doomed] == [f"graph of segment {world.owners[0]}"]
    machine.destroy_doomed()
    assert machine.seg.doomed == []


def test_a_trace_names_every_part_and_leaves_nothing(checkpoint: Callable[[str], Path], backend_name: str) -> None:
    backend: Any = open_backend(backend_name)[0]
    with Engine.open(
        checkpoint(PRESET), mode="step-graph", backend=backend, max_context=MAX_CONTEXT, trace=True
    ) as engine:
        seq = engine.new_sequence()
        with capture_logs() as logs:
            for token in (5, 17, 33):
                engine.decode_step(seq, token)
    traced = [entry for entry in logs if entry["event"] == "trace"]
    assert {"selection", "streams", "normed", "attn_out", "moe_in", "streams_out"} <= {
        entry["part"] for entry in traced
    }
    by_token = [{e["hash"] for e in traced if e.get("pos") == pos and e["part"] == "streams"} for pos in range(3)]
    assert [len(hashes) for hashes in by_token] == [engine.config.n_layers] * 3
    assert not any(backend.live().values())
    backend.close()


def test_an_observer_is_told_the_size_of_every_part(world: World) -> None:
    sizes: dict[str, int] = {}
    ends: set[tuple[str, int]] = set()

    class Observer:
        def selection(self, layer: int, rows: NDArray[np.int32]) -> None: ...

        def point(self, position: int, layer: int, part: str, addr: int, nbytes: int, stream: Stream) -> None:
            sizes[part] = nbytes
            if part.startswith("segment"):
                ends.add((part, layer))

    world.engine.observe(Observer())
    world.do("a/miss=1.0")
    world.do("a/miss=")
    cfg = world.engine.config
    row, streams = 2 * cfg.dim, 2 * cfg.dim * cfg.hc_mult
    assert sizes == {
        **dict.fromkeys(("streams_in", "streams", "streams_out", "segment_streams"), streams),
        **dict.fromkeys(("normed", "attn_out", "moe_in", "segment_hidden"), row),
        "mix_in": 4 * cfg.hc_mult,
        "mixes": 4 * cfg.hc_mult * (2 + cfg.hc_mult),
    }
    assert ends == {(part, layer) for part in ("segment_streams", "segment_hidden") for layer in (0, 2, 3)}


def test_snapshots_are_aligned_and_do_not_overlap() -> None:
    backend = HostBackend()
    for nbytes in (1, 255, 256, 257, 512, 736, 51_296):
        saved = backend.alloc("saved", nbytes)
        snapshots = Snapshots(backend, saved, 3)
        addresses = [snapshots.ptr(layer) for layer in range(3)]
        assert all(b - a >= nbytes for a, b in pairwise(addresses))
        assert all(address % 256 == 0 for address in addresses)
        assert addresses[-1] + nbytes <= addresses[0] + snapshots._store.nbytes
        assert snapshots._store.nbytes < 3 * (nbytes + 256)
        snapshots.close()
    backend.close()


@pytest.mark.parametrize("dim", [64, 4096])
def test_the_entries_of_layers_are_aligned_and_do_not_overlap(dim: int) -> None:
    """At a true model's width too, where the streams fill a row but for the mix."""
    backend = HostBackend()
    cfg = PRESETS[PRESET].model_copy(update={"dim": dim})
    entries = Entries(backend, cfg, cast(Any, None))
    begins = [entries.streams(layer) for layer in range(cfg.n_layers)]
    ends = [entries.mix(layer) + entries.mix_nbytes for layer in range(cfg.n_layers)]
    assert all(begin % 256 == 0 for begin in begins)
    assert all(entries.mix(i) == begin + entries.streams_nbytes for i, begin in enumerate(begins))
    assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False))
    assert begins[0] == entries.ptr
    assert ends[-1] <= entries.ptr + entries._store.nbytes
    entries.close()
    backend.close()


def test_the_host_route_leaves_the_picks_of_the_device_route(
    checkpoint: Callable[[str], Path], backend_name: str
) -> None:
    """What traces record of a token: picks, weights, and no flag."""
    rows = []
    for device_route in (True, False):
        backend, _ = open_backend(backend_name)
        path = checkpoint(PRESET)
        with Engine.open(path, mode="eager", backend=backend, max_context=8, device_route=device_route) as engine:
            seq = engine.new_sequence()
            engine.decode_step(seq, 5)
            engine.decode_step(seq, 17)
            found = [row for row in engine.router.picks if row is not None]
            rows.append([(row.layer, row.picks, row.weight_bits) for row in found])
            assert device_route or [row.flag for row in found] == [0] * engine.config.n_layers
        backend.close()
    assert len(rows[0]) == engine.config.n_layers
    assert rows[0] == rows[1]


def test_completed_work_of_the_host_backend_does_not_hold_what_came_before() -> None:
    backend = HostBackend()
    stream = backend.create_stream("long")
    buf = backend.alloc("bytes", 256)
    for _ in range(300):
        backend.fill(buf.ptr, 1, 256, stream)
    backend.synchronize(stream)
    gc.collect()
    assert sum(isinstance(x, Op) and x.stream == stream for x in gc.get_objects()) < 10
    backend.close()


def test_an_event_of_a_capture_whose_streams_are_gone() -> None:
    """The capture has ended with its last stream, and its events say so."""
    backend = HostBackend()
    origin, other = backend.create_stream("origin"), backend.create_stream("other")
    event = backend.create_event("recorded")
    backend.begin_capture(origin)
    backend.record(event, origin)
    backend.destroy_stream(origin)
    with pytest.raises(CudaError, match="a capture that has ended"):
        backend.wait(other, event)
    backend.close()


def test_an_old_share_of_two_slots_has_two_victims() -> None:
    victims = set()
    for seed in range(30):
        ages = Recency(25, 8.0, seed)
        for slot in range(1, 26):
            ages.add(slot)
        ages.begin_epoch()
        victims.add(ages.take_victim()[0])
    assert victims == {1, 2}


def test_the_error_of_a_full_cache_counts_right() -> None:
    """Two slots hold experts of the request, one is pinned by an earlier call of the epoch, one can be given up."""
    cache = ExpertCache(1, 8, 4)
    for expert in range(4):
        plan = cache.plan_fetch(0, [expert])
        cache.evict(plan.tickets[0])
        cache.commit(plan.tickets[0])
    cache.begin_epoch()
    cache.plan_fetch(0, [2])
    with pytest.raises(CacheError) as info:
        cache.plan_fetch(0, [0, 1, 5, 6])
    assert "2 experts are missing and only 1 of 4 slots can be given up" in str(info.value)
    assert "(2 hold experts of this request, 1 others are pinned)" in str(info.value)
    assert "at least 5 slots" in str(info.value)


def test_a_failing_scenario_prints_what_can_be_pasted(checkpoint: Callable[[str], Path], backend_name: str) -> None:
    """The scenario up to the word that failed, as an expression of the language."""
    runner = Runner(checkpoint(PRESET), backend_name)
    scenario = Scenario("a*3 b a/miss=1.0/falls=2 a a", slots=16)
    with pytest.raises(AssertionError, match=r"at .a/miss=1\.0/falls=2. of") as info:
        runner(scenario)
    shown = str(info.value).splitlines()[1].strip()
    assert eval(shown) == Scenario("a*3 b a/miss=1.0/falls=2", slots=16)
    runner.close()
