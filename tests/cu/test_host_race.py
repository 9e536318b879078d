"""Race detection of the host backend: what is reported, in which words, when, and what is left alone."""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from tiny_kernels import GATHER, OFFSET, SCALE, SCATTER, random_i32, upload

from ds41rt.cu.backend import Event, HostBuffer, Stream
from ds41rt.cu.host import HostBackend
from ds41rt.cu.host import race as race_module
from ds41rt.cu.host.race_report import Race, RaceError
from ds41rt.cu.result import CudaError, Status

SCHEDULES = ["lazy", "eager", *(f"random:{seed}" for seed in range(4))]


class Rig:
    """Two streams, a device buffer, a pinned one, an event."""

    def __init__(self, schedule: str = "lazy", **options: Any) -> None:
        self.backend = HostBackend(schedule, race_detection=True, **options)
        self.main, self.side = self.backend.create_stream("main"), self.backend.create_stream("side")
        self.event = self.backend.create_event("done")
        self.buf, self.other = self.backend.alloc("slot 3", 64), self.backend.alloc("out", 64)
        self.pinned = self.backend.alloc_pinned("ring", 64)
        rng = np.random.default_rng(3)
        self.pinned.array[:] = rng.integers(0, 256, 64, dtype=np.uint8)
        for buf in (self.buf, self.other):
            self.backend.copy_h2d(buf.ptr, self.pinned, 64, self.main)
        self.backend.synchronize(self.main)

    def kernel(self, stream: Stream, lo: int = 0, hi: int = 64, label: str = "L03.scale") -> None:
        args = {"x": self.buf.ptr + lo, "a": 3, "n": (hi - lo) // 4}
        self.backend.launch(self.backend.prepare(SCALE, args, label), stream)

    def up(self, stream: Stream) -> None:
        self.backend.copy_h2d(self.buf.ptr, self.pinned, 64, stream, label="fetch")

    def down(self, stream: Stream) -> None:
        self.backend.copy_d2h(self.pinned, self.buf.ptr, 32, stream, 16, label="header")

    def order(self, a: Stream, b: Stream, event: Event | None = None) -> None:
        self.backend.record(event or self.event, a)
        self.backend.wait(b, event or self.event)

    def races(self) -> list[Race]:
        """The races after everything was waited for."""
        for stream in (self.main, self.side):
            try:
                self.backend.synchronize(stream)
            except RaceError:
                self.backend.synchronize(stream)
        return list(self.backend.races)


@pytest.fixture(params=SCHEDULES)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param)
    yield rig
    rig.backend.close()


def line() -> int:
    return sys._getframe(1).f_lineno


# What a report says, and when


def test_a_report_names_both_sides(rig: Rig) -> None:
    backend = rig.backend
    backend.copy_d2d(rig.buf.ptr + 8, rig.other.ptr, 16, rig.side, label="expert.copy")
    first = line() - 1
    launch = backend.prepare(OFFSET, {"x": rig.buf.ptr + 16, "b": 1, "n": 12}, "L07.offset")
    backend.launch(launch, rig.main)
    second = line() - 1
    with pytest.raises(RaceError) as info:
        backend.synchronize(rig.main)
    (race,) = info.value.races
    assert (race.first.kind, race.first.label, race.first.stream, race.first.buffer) == (
        "d2d",
        "expert.copy",
        "side",
        "slot 3",
    )
    assert (race.first.lo, race.first.hi, race.first.write, race.first.role) == (8, 24, True, "dst")
    assert (race.second.kind, race.second.label, race.second.stream) == ("kernel", "L07.offset", "main")
    assert (race.second.lo, race.second.hi, race.second.role) == (16, 64, "x")
    assert (race.lo, race.hi) == (16, 24)
    assert race.first.site == f"{__file__}:{first}"
    assert race.second.site == f"{__file__}:{second}"
    text = str(info.value)
    for part in ("cuStreamSynchronize", "'expert.copy'", "'L07.offset'", "'side'", "'main'", "'slot 3'", "16..24"):
        assert part in text


def test_an_error_is_raised_once_and_nothing_is_lost(rig: Rig) -> None:
    before = rig.backend.memory.bytes(rig.buf.ptr, 64).view(np.int32).copy()
    rig.kernel(rig.main)
    rig.kernel(rig.side)
    with pytest.raises(RaceError):
        rig.backend.synchronize_event(rig.event)
    assert len(rig.backend.races) == 1
    for stream in (rig.main, rig.side):
        rig.backend.synchronize(stream)
    assert np.array_equal(rig.backend.memory.bytes(rig.buf.ptr, 64).view(np.int32), before * 9)
    assert len(rig.backend.races) == 1
    rig.kernel(rig.main)
    rig.kernel(rig.side)
    with pytest.raises(RaceError) as info:
        rig.backend.query_event(rig.event)
    assert len(info.value.races) == 1
    assert len(rig.backend.races) == 2


def test_close_raises_nothing(rig: Rig) -> None:
    rig.kernel(rig.main)
    rig.kernel(rig.side)
    rig.backend.close()
    assert len(rig.backend.races) == 1


def test_the_switch() -> None:
    backend = HostBackend(race_detection=False)
    main, side = backend.create_stream("main"), backend.create_stream("side")
    buf, pinned = backend.alloc("b", 64), backend.alloc_pinned("p", 64)
    backend.fill(buf.ptr, 1, 64, main)
    backend.fill(buf.ptr, 2, 64, side)
    backend.free(buf)
    assert type(pinned.array) is np.ndarray
    assert backend.races == ()


# What orders


def _record_and_wait(rig: Rig) -> None:
    rig.backend.record(rig.event, rig.main)
    rig.backend.synchronize_event(rig.event)


ORDERED: list[Callable[[Rig], None]] = [
    lambda rig: rig.order(rig.main, rig.side),
    lambda rig: rig.backend.synchronize(rig.main),
    _record_and_wait,
]


@pytest.mark.parametrize("way", range(len(ORDERED)))
def test_ordered_work_is_silent(rig: Rig, way: int) -> None:
    rig.kernel(rig.main)
    ORDERED[way](rig)
    rig.kernel(rig.side)
    assert not rig.races()


def test_polling_orders_once_it_says_so(rig: Rig) -> None:
    rig.kernel(rig.main)
    rig.backend.record(rig.event, rig.main)
    while not rig.backend.query_event(rig.event):
        pass
    rig.kernel(rig.side)
    assert not rig.races()


def test_an_event_orders_what_came_before_its_record_only(rig: Rig) -> None:
    rig.kernel(rig.main, 0, 32)
    rig.order(rig.main, rig.side)
    rig.kernel(rig.main, 32, 64, "late")
    rig.kernel(rig.side, label="side")
    (race,) = rig.races()
    assert {race.first.label, race.second.label} == {"late", "side"}
    assert (race.lo, race.hi) == (32, 64)


def test_order_passes_through_a_third_stream(rig: Rig) -> None:
    third, second = rig.backend.create_stream("third"), rig.backend.create_event("second")
    rig.kernel(rig.main)
    rig.order(rig.main, third)
    rig.order(third, rig.side, second)
    rig.kernel(rig.side)
    assert not rig.races()


def test_a_synchronise_of_one_stream_says_nothing_of_another(rig: Rig) -> None:
    rig.kernel(rig.main)
    rig.backend.synchronize(rig.side)
    rig.kernel(rig.side)
    assert len(rig.races()) == 1


def test_reads_and_neighbours_do_not_race(rig: Rig) -> None:
    rig.backend.copy_d2d(rig.other.ptr, rig.buf.ptr, 32, rig.main)
    rig.backend.copy_d2d(rig.other.ptr + 32, rig.buf.ptr, 32, rig.side)
    rig.kernel(rig.main, 32, 64)
    assert not rig.races()


def test_launches_of_one_executable_are_ordered_and_their_order_is_inherited(rig: Rig) -> None:
    rig.backend.begin_capture(rig.main)
    rig.kernel(rig.main)
    graph_exec = rig.backend.instantiate(rig.backend.end_capture(rig.main))
    rig.backend.launch_graph(graph_exec, rig.main)
    rig.backend.launch_graph(graph_exec, rig.side)
    rig.kernel(rig.side)
    assert not rig.races()


def test_old_records_are_dropped(rig: Rig) -> None:
    for _ in range(3):
        for _ in range(300):
            rig.kernel(rig.main)
        rig.backend.synchronize(rig.main)
    table = _table(rig, rig.other.ptr)
    for i in range(300):
        rig.backend.launch(_scatter(rig, table, "experts"), rig.side)
        rig.pinned.array[i % 64] = i % 251
        rig.backend.synchronize(rig.side)
    detector = rig.backend._detector
    assert detector is not None
    for bucket in detector._buckets:
        assert len(bucket.records.get(rig.main, ())) <= 300 + race_module._PRUNE_EVERY
        assert len(bucket.records.get(rig.side, ())) <= race_module._PRUNE_EVERY
        assert len(bucket.records.get(race_module.HOST, ())) <= race_module._PRUNE_EVERY


# Graphs and tables


def test_unjoined_branches_of_a_graph_race_at_every_launch(rig: Rig) -> None:
    backend, join = rig.backend, rig.backend.create_event("join")
    backend.begin_capture(rig.main)
    rig.order(rig.main, rig.side)
    rig.kernel(rig.side, 0, 32, "branch")
    rig.kernel(rig.main, 16, 64, "trunk")
    rig.order(rig.side, rig.main, join)
    graph_exec = backend.instantiate(backend.end_capture(rig.main))
    assert not backend.races
    for n in (1, 2):
        backend.launch_graph(graph_exec, rig.main)
        with pytest.raises(RaceError) as info:
            backend.synchronize(rig.main)
        (race,) = info.value.races
        assert (race.first.label, race.second.label, race.lo, race.hi) == ("branch", "trunk", 16, 32)
        assert (race.first.node, race.second.node) == (0, 1)
        assert "side in graph" in race.first.stream
        assert f"captured at {__file__}:" in race.first.site
        assert len(backend.races) == n


def _table(rig: Rig, *addrs: int) -> int:
    return upload(rig.backend, rig.main, "table", np.array(addrs, np.uint64))


def _scatter(rig: Rig, table: int, label: str) -> Any:
    return rig.backend.prepare(SCATTER, {"table": table, "n": 1, "width": 2}, label)


def test_branches_of_a_graph_that_meet_behind_tables(rig: Rig) -> None:
    backend, join = rig.backend, rig.backend.create_event("join")
    one = _scatter(rig, _table(rig, rig.buf.ptr + 8), "one")
    two = _scatter(rig, _table(rig, rig.buf.ptr + 12), "two")
    backend.begin_capture(rig.main)
    rig.order(rig.main, rig.side)
    backend.launch(one, rig.side)
    backend.launch(two, rig.main)
    rig.order(rig.side, rig.main, join)
    graph_exec = backend.instantiate(backend.end_capture(rig.main))
    backend.launch_graph(graph_exec, rig.main)
    (race,) = rig.races()
    assert ({race.first.label, race.second.label}, race.lo, race.hi) == ({"one", "two"}, 12, 16)


def test_ranges_behind_tables_are_those_of_the_execution(rig: Rig) -> None:
    backend = rig.backend
    table = backend.alloc_pinned("table", 8)
    words = table.array.view(np.uint64)
    launch = _scatter(rig, table.device_ptr, "experts")
    for row, n in ((rig.buf.ptr, 1), (rig.other.ptr, 1), (rig.buf.ptr + 60, 2)):
        if n == 2:
            row -= 4
        words[0] = row
        backend.launch(launch, rig.main)
        backend.fill(rig.buf.ptr + 56, 7, 4, rig.side, label="overwrite")
        assert len(rig.races()) == n - 1
    race = backend.races[0]
    assert (race.first.role, race.lo, race.hi, race.first.buffer) == ("span 0", 56, 60, "slot 3")


@pytest.mark.parametrize("prune_every", [1, 64])
def test_work_that_waits_to_run_is_held_against_what_the_host_has_seen(
    rig: Rig, prune_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other access is complete, and its record pruned if nobody remembers, before the table is read."""
    monkeypatch.setattr(race_module, "_PRUNE_EVERY", prune_every)
    third = rig.backend.create_stream("third")
    rig.backend.launch(_scatter(rig, _table(rig, rig.buf.ptr), "late"), rig.side)
    rig.kernel(rig.main, label="early")
    with suppress(RaceError):
        rig.backend.synchronize(third)
    with suppress(RaceError):
        rig.backend.synchronize(rig.main)
    for _ in range(3):
        rig.backend.copy_d2d(rig.other.ptr, rig.buf.ptr + 32, 4, rig.main)
    (race,) = rig.races()
    assert {race.first.label, race.second.label} == {"late", "early"}


def test_a_free_under_a_table_that_was_not_read_yet() -> None:
    rig = Rig("lazy")
    rig.backend.launch(_scatter(rig, _table(rig, rig.buf.ptr), "late"), rig.side)
    rig.backend.free(rig.buf)
    with pytest.raises(CudaError, match=r"'late'.*'slot 3'.*which was freed") as info:
        rig.backend.synchronize(rig.side)
    assert info.value.status == Status.ILLEGAL_ADDRESS
    (race,) = rig.backend.races
    assert (race.first.label, race.second.label, race.second.kind) == ("late", "free", "host")


def test_freed_buffers_are_forgotten(rig: Rig) -> None:
    detector = rig.backend._detector
    assert detector is not None
    n = len(detector._buckets)
    extra = rig.backend.alloc("extra", 64)
    table = _table(rig, rig.other.ptr)
    rig.backend.launch(_scatter(rig, table, "experts"), rig.side)
    rig.backend.free(extra)
    assert not rig.races()
    assert len(detector._buckets) == len(detector._starts) == n + 1


def test_a_gather_reads(rig: Rig) -> None:
    table = _table(rig, rig.buf.ptr, rig.buf.ptr + 8)
    args = {"table": table, "out": rig.other.ptr, "n": 2, "width": 2}
    rig.backend.launch(rig.backend.prepare(GATHER, args, "gather"), rig.main)
    rig.backend.copy_d2d(rig.other.ptr + 32, rig.buf.ptr, 32, rig.side)
    assert not rig.races()
    rig.backend.launch(rig.backend.prepare(GATHER, args, "gather"), rig.main)
    rig.backend.fill(rig.buf.ptr + 12, 1, 4, rig.side)
    assert [(r.lo, r.hi) for r in rig.races()] == [(12, 16)]


# One copy with itself; frees


def test_a_copy_that_overlaps_itself(rig: Rig) -> None:
    rig.backend.copy_d2d(rig.buf.ptr + 8, rig.buf.ptr, 16, rig.main, label="shift")
    (race,) = rig.races()
    assert race.first.op == race.second.op
    assert ({race.first.role, race.second.role}, race.lo, race.hi) == ({"dst", "src"}, 8, 16)
    rig.backend.copy_d2d(rig.buf.ptr + 16, rig.buf.ptr, 16, rig.main, label="move")
    assert len(rig.races()) == 1


def test_a_free_before_the_wait(rig: Rig) -> None:
    rig.kernel(rig.main)
    rig.backend.free(rig.buf)
    with pytest.raises(RaceError, match=r"'L03.scale' on stream 'main'.*the host \(free, at .*bytes 0..64 of 'slot 3'"):
        rig.backend.synchronize(rig.main)


def test_a_free_after_the_wait(rig: Rig) -> None:
    rig.kernel(rig.main)
    rig.backend.synchronize(rig.main)
    rig.backend.free(rig.buf)
    rig.backend.free_pinned(rig.pinned)
    assert not rig.races()


# The host's own accesses


WRITES: dict[str, Callable[[Any], None]] = {
    "item": lambda a: a.__setitem__(20, 1),
    "slice": lambda a: a.__setitem__(slice(20, 24), 1),
    "same value": lambda a: a.__setitem__(slice(20, 24), np.asarray(a)[20:24].copy()),
    "view": lambda a: a.view(np.int32)[5:6].__setitem__(slice(None), 4),
    "mask": lambda a: a.__setitem__(np.arange(64) == 21, 4),
    "list": lambda a: a.__setitem__([21, 22], 4),
    "2d": lambda a: a.reshape(8, 8)[:, 4].__setitem__(2, 9),
    "out": lambda a: np.add(a[16:24], 1, out=a[16:24]),
    "in place": lambda a: a[16:24].__iadd__(1),
    "copyto": lambda a: np.copyto(a[20:21], 3),
    "fill": lambda a: a[20:21].fill(3),
    "buffer": lambda a: memoryview(a).__setitem__(20, (int(np.asarray(a)[20]) + 1) % 256),
    "plain": lambda a: np.asarray(a).__setitem__(20, (int(np.asarray(a)[20]) + 1) % 256),
}
READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda a: a[20],
    "view": lambda a: int(a.view(np.int32)[5]),
    "tolist": lambda a: a[16:18].tolist(),
    "tobytes": lambda a: a[16:18].tobytes(),
    "copy": lambda a: a[16:].copy(),
    "astype": lambda a: a.astype(np.int32),
    "sum": lambda a: a.sum(),
    "any": lambda a: a[40:].any(),
    "ufunc": lambda a: a + 1,
    "compare": lambda a: a[20:24] == 3,
    "array_equal": lambda a: np.array_equal(a, a),
    "concatenate": lambda a: np.concatenate([a[:8], a[40:]]),
    "list": lambda a: a[[20, 47]],
    "iterate": lambda a: list(a[20:22]),
}


@pytest.mark.parametrize("how", WRITES)
def test_a_pinned_source_that_is_rewritten_too_early(rig: Rig, how: str) -> None:
    rig.up(rig.main)
    WRITES[how](rig.pinned.array)
    races = rig.races()
    assert races
    for race in races:
        assert (race.first.label, race.second.kind, race.first.buffer) == ("fetch", "host", "ring")
        assert 16 <= race.lo < race.hi <= 24
    rig.up(rig.main)
    rig.backend.synchronize(rig.main)
    WRITES[how](rig.pinned.array)
    rig.up(rig.main)
    assert len(rig.races()) == len(races)


@pytest.mark.parametrize("how", READS)
def test_a_result_that_is_read_too_early(rig: Rig, how: str) -> None:
    rig.down(rig.main)
    READS[how](rig.pinned.array)
    races = rig.races()
    assert races
    for race in races:
        assert (race.first.label, race.second.kind, race.second.label) == ("header", "host", "read")
        assert race.second.site.startswith(__file__)
        assert 16 <= race.lo < race.hi <= 48
    READS[how](rig.pinned.array)
    assert len(rig.races()) == len(races)


def test_exact_elements_count(rig: Rig) -> None:
    """Bytes 16..48 are on their way; everything here is beside them, or only looks at shapes."""
    a = rig.pinned.array
    rig.down(rig.main)
    a[:16] = 1
    a[[3, 50]] = a[[2, 49]]
    a.reshape(8, 8)[:2, 3] += 1
    a[np.arange(64) > 48] = 9
    a.view(np.int32)[12:].sum()
    _ = a[16:48], a.shape, a.reshape(8, 8).T, len(a), a.view(np.float32), np.shares_memory(a, a), a[::2]
    assert not rig.races()
    rig.down(rig.main)
    a.reshape(8, 8)[:, 0] = 1
    assert [(r.lo, r.hi) for r in rig.races()] == [(i, i + 1) for i in (16, 24, 32, 40)]


def test_reading_what_a_copy_reads_is_fine(rig: Rig) -> None:
    rig.up(rig.main)
    assert rig.pinned.array.sum() > 0
    assert not rig.races()


def test_results_are_plain_arrays(rig: Rig) -> None:
    a = rig.pinned.array
    want = np.asarray(a).copy()
    for got in (a + 1, a.copy(), a.astype(np.int32), np.add(a, 1, dtype=np.int32), np.concatenate([a, a])):
        assert type(got) is np.ndarray
    assert np.array_equal(a + np.uint8(1), want + np.uint8(1))
    out = np.add(a, 1, out=a)
    assert out is a
    np.add.at(a, [1, 1], 1)
    assert np.asarray(a)[1] == (int(want[1]) + 3) % 256
    assert a[5].shape == ()
    assert a[2:4].tolist() == np.asarray(a)[2:4].tolist()


def test_a_device_write_to_pinned_memory_is_not_the_hosts(rig: Rig) -> None:
    rig.up(rig.main)
    rig.down(rig.main)
    rig.up(rig.main)
    assert not rig.races()


def test_a_pageable_source_that_is_rewritten_too_early(rig: Rig) -> None:
    page = np.arange(64, dtype=np.uint8)
    rig.backend.copy_h2d(rig.buf.ptr, HostBuffer.pageable("page", page), 32, rig.main, 16, label="up")
    page[20] = 99
    (race,) = rig.races()
    assert (race.first.label, race.first.buffer, race.lo, race.hi) == ("up", "page", 4 + 16, 5 + 16)


def test_two_copies_to_one_pageable_array(rig: Rig) -> None:
    page = np.ones(64, np.uint8)
    rig.backend.copy_d2h(HostBuffer.pageable("page", page), rig.buf.ptr, 32, rig.main, label="one")
    rig.backend.copy_d2h(HostBuffer.pageable("half", page[16:]), rig.other.ptr, 32, rig.side, label="two")
    (race,) = rig.races()
    assert (race.first.buffer, race.lo, race.hi, race.second.buffer, race.second.lo) == ("page", 16, 32, "half", 0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_staged_pageable_sources_may_be_rewritten(schedule: str) -> None:
    rig = Rig(schedule, stage_pageable=True)
    page = random_i32(np.random.default_rng(4), 16)
    want = page.copy()
    rig.backend.copy_h2d(rig.buf.ptr, HostBuffer.pageable("page", page), 32, rig.main, 16)
    page[:] = 0
    assert not rig.races()
    assert np.array_equal(rig.backend.memory.bytes(rig.buf.ptr, 32).view(np.int32), want[4:12])
    rig.backend.begin_capture(rig.main)
    rig.backend.copy_h2d(rig.buf.ptr, HostBuffer.pageable("page", page), 64, rig.main)
    graph_exec = rig.backend.instantiate(rig.backend.end_capture(rig.main))
    page[:] = want
    rig.backend.launch_graph(graph_exec, rig.main)
    assert not rig.races()
    assert np.array_equal(rig.backend.memory.bytes(rig.buf.ptr, 64).view(np.int32), want)
