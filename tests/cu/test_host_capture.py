"""Capture, graphs and replay on the host backend: status codes, forks and joins, lifetimes."""

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
from tiny_kernels import GATHER, OFFSET, SCALE, SCHEDULES, download, random_i32, upload

from ds41rt.cu.backend import CaptureStatus, Event, Graph, GraphExec, HostBuffer, Stream
from ds41rt.cu.graphinfo import CopyNode, FillNode, GraphInfo, KernelNode, Param
from ds41rt.cu.host import HostBackend
from ds41rt.cu.result import CudaError, Status


class Rig:
    """A backend with two streams, two events, and an int32 buffer `x` to work on."""

    def __init__(self, schedule: str = "lazy", race_detection: bool = True) -> None:
        self.backend = HostBackend(schedule, race_detection=race_detection)
        self.main, self.side = self.backend.create_stream("main"), self.backend.create_stream("side")
        self.fork, self.join = self.backend.create_event("fork"), self.backend.create_event("join")
        self.x0 = random_i32(np.random.default_rng(8), 8)
        self.x = upload(self.backend, self.main, "x", self.x0)

    def scale(self, stream: Stream, a: int = 3, label: str = "scale") -> None:
        self.backend.launch(self.backend.prepare(SCALE, {"x": self.x, "a": a, "n": 8}, label), stream)

    def offset(self, stream: Stream, b: int = 5, label: str = "offset") -> None:
        self.backend.launch(self.backend.prepare(OFFSET, {"x": self.x, "b": b, "n": 8}, label), stream)

    def begin_forked(self) -> None:
        """A capture on `main` that `side` has joined, with one node."""
        self.backend.begin_capture(self.main)
        self.scale(self.main)
        self.backend.record(self.fork, self.main)
        self.backend.wait(self.side, self.fork)

    def read(self) -> list[int]:
        values: list[int] = download(self.backend, self.main, self.x, self.x0).tolist()
        return values

    def works(self) -> bool:
        """Both streams are usable and a fresh capture succeeds."""
        assert self.backend.live()["captures"] == 0
        before = np.array(self.read(), np.int32)
        self.backend.synchronize(self.side)
        self.backend.begin_capture(self.side)
        self.scale(self.side)
        graph = self.backend.end_capture(self.side)
        graph_exec = self.backend.instantiate(graph)
        self.backend.launch_graph(graph_exec, self.main)
        self.backend.destroy_graph(graph)
        self.backend.destroy_exec(graph_exec)
        return bool(self.read() == (before * 3).tolist())


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.backend.close()


@pytest.fixture
def racing_rig() -> Iterator[Rig]:
    """For tests that see when bytes are read by changing them too early."""
    rig = Rig(race_detection=False)
    yield rig
    rig.backend.close()


def _fails(status: Status, call: Callable[[], object], *parts: str) -> None:
    with pytest.raises(CudaError) as info:
        call()
    assert info.value.status == status
    for part in parts:
        assert part in str(info.value)


def test_captured_work_runs_at_each_launch_only(rig: Rig) -> None:
    backend = rig.backend
    assert backend.capture_status(rig.main) is CaptureStatus.NONE
    backend.begin_capture(rig.main)
    assert backend.capture_status(rig.main) is CaptureStatus.ACTIVE
    rig.scale(rig.main)
    rig.offset(rig.main)
    graph = backend.end_capture(rig.main)
    assert backend.capture_status(rig.main) is CaptureStatus.NONE
    want = rig.x0.copy()
    assert rig.read() == want.tolist()
    graph_exec = backend.instantiate(graph)
    backend.destroy_graph(graph)  # an executable does not need its graph
    for _ in range(3):
        backend.launch_graph(graph_exec, rig.main)
        want = want * 3 + 5
    assert rig.read() == want.tolist()
    backend.launch_graph(graph_exec, rig.main)
    backend.destroy_exec(graph_exec)  # in flight: still completes
    assert rig.read() == (want * 3 + 5).tolist()
    _fails(Status.INVALID_HANDLE, lambda: backend.launch_graph(graph_exec, rig.main), f"executable graph {graph_exec}")
    _fails(Status.INVALID_HANDLE, lambda: backend.destroy_exec(graph_exec))
    _fails(Status.INVALID_HANDLE, lambda: backend.instantiate(graph), f"graph {graph}")
    _fails(Status.INVALID_HANDLE, lambda: backend.destroy_graph(Graph(10_000)), "was never created")


def test_relaxed_mode_leaves_other_streams_and_memory_alone(rig: Rig) -> None:
    backend = rig.backend
    backend.begin_capture(rig.main)
    rig.scale(rig.side)
    backend.free(backend.alloc("inside", 64))
    backend.free_pinned(backend.alloc_pinned("inside", 64))
    backend.synchronize(rig.side)
    backend.record(rig.join, rig.side)
    assert backend.query_event(rig.join)
    assert backend.capture_status(rig.side) is CaptureStatus.NONE
    assert backend.describe_graph(backend.end_capture(rig.main)) == GraphInfo(())
    assert rig.read() == (rig.x0 * 3).tolist()


def test_fork_and_join_become_edges(rig: Rig) -> None:
    backend = rig.backend
    rig.begin_forked()
    rig.scale(rig.side, label="branch")
    backend.fill(rig.x, 1, 4, rig.main, label="clear")
    backend.record(rig.join, rig.side)
    backend.wait(rig.main, rig.join)
    host = backend.alloc_pinned("out", 32)
    backend.copy_d2h(host, rig.x, 16, rig.main, dst_off=16, label="read back")
    backend.copy_h2d(rig.x, HostBuffer.pageable("page", rig.x0), 32, rig.main, label="write")
    info = backend.describe_graph(backend.end_capture(rig.main))
    assert [(n.index, n.kind, n.label, n.stream, n.deps) for n in info.nodes] == [
        (0, "kernel", "scale", "main", ()),
        (1, "kernel", "branch", "side", (0,)),
        (2, "fill", "clear", "main", (0,)),
        (3, "copy", "read back", "main", (1, 2)),
        (4, "copy", "write", "main", (3,)),
    ]
    _, branch, clear, read_back, write = (n.content for n in info.nodes)
    assert isinstance(branch, KernelNode)
    assert (branch.name, branch.grid, branch.block, branch.shared_nbytes) == ("scale", None, None, 0)
    assert branch.params == (
        Param(0, rig.x.to_bytes(8, "little")), Param(8, b"\x03\0\0\0"), Param(12, b"\x08\0\0\0")
    )  # fmt: skip
    assert info.nodes[1].launch is not None
    assert clear == FillNode(rig.x, 1, 1, 4)
    assert read_back == CopyNode(host.device_ptr + 16, "pinned", rig.x, "device", 16)
    assert write == CopyNode(rig.x, "device", rig.x0.ctypes.data, "pageable", 32)
    assert backend.capture_status(rig.side) is CaptureStatus.NONE
    assert rig.works()


def test_begin_and_end_out_of_place(rig: Rig) -> None:
    backend = rig.backend
    _fails(Status.ILLEGAL_STATE, lambda: backend.end_capture(rig.main), "'main' is not capturing")
    backend.begin_capture(rig.main)
    _fails(Status.ILLEGAL_STATE, lambda: backend.begin_capture(rig.main), "'main' already takes part")
    backend.end_capture(rig.main)
    _fails(Status.ILLEGAL_STATE, lambda: backend.end_capture(rig.main))
    assert rig.works()


def test_synchronise_of_a_capturing_stream_invalidates(rig: Rig) -> None:
    backend = rig.backend
    rig.begin_forked()
    _fails(Status.STREAM_CAPTURE_UNSUPPORTED, lambda: backend.synchronize(rig.side), "'side'")
    assert backend.capture_status(rig.main) is CaptureStatus.INVALIDATED
    assert backend.capture_status(rig.side) is CaptureStatus.INVALIDATED
    blame = ("cuStreamSynchronize: STREAM_CAPTURE_UNSUPPORTED (900)", "'side'", "test_host_capture.py:")
    third = backend.create_stream("third")
    again: list[Callable[[], object]] = [
        lambda: rig.scale(rig.main),
        lambda: backend.fill(rig.x, 0, 4, rig.side),
        lambda: backend.record(rig.join, rig.main),
        lambda: backend.wait(rig.main, rig.fork),
        lambda: backend.end_capture(rig.main),
    ]
    _fails(Status.STREAM_CAPTURE_UNSUPPORTED, lambda: backend.synchronize(rig.main), "'main' is capturing", *blame)
    for ask in (backend.query_event, backend.synchronize_event, partial(backend.wait, third)):
        _fails(Status.INVALID_VALUE, partial(ask, rig.fork), "'fork'", "is invalid", *blame)
    for call in again:
        _fails(Status.STREAM_CAPTURE_INVALIDATED, call, *blame)
    assert backend.live()["graphs"] == 0
    assert rig.read() == rig.x0.tolist()
    assert rig.works()


def test_a_wait_that_joins_two_captures(rig: Rig) -> None:
    backend = rig.backend
    backend.begin_capture(rig.main)
    backend.begin_capture(rig.side)
    backend.record(rig.join, rig.side)
    _fails(Status.STREAM_CAPTURE_MERGE, lambda: backend.wait(rig.main, rig.join), "'main'", "'join'", "'side'")
    for stream in (rig.main, rig.side):
        _fails(Status.STREAM_CAPTURE_INVALIDATED, partial(backend.end_capture, stream), "(902)")
    assert rig.works()


def test_end_on_a_stream_that_is_not_the_origin(rig: Rig) -> None:
    backend = rig.backend
    rig.begin_forked()
    _fails(Status.STREAM_CAPTURE_UNMATCHED, lambda: backend.end_capture(rig.side), "'side'", "'main'")
    _fails(Status.STREAM_CAPTURE_INVALIDATED, lambda: backend.end_capture(rig.main), "(903)")
    assert rig.works()


def test_an_unjoined_fork(rig: Rig) -> None:
    backend = rig.backend
    rig.begin_forked()
    rig.scale(rig.side, label="first")
    backend.record(rig.join, rig.side)
    backend.wait(rig.main, rig.join)
    rig.scale(rig.side, label="late")  # after the event that main waits for
    _fails(Status.STREAM_CAPTURE_UNJOINED, lambda: backend.end_capture(rig.main), "'side'", "'late'", "1 nodes")
    assert backend.live()["graphs"] == 0
    assert rig.works()


def test_captured_work_that_waits_for_an_event_from_outside(rig: Rig) -> None:
    backend = rig.backend
    backend.record(rig.join, rig.side)  # an empty stream: recorded all the same
    backend.begin_capture(rig.main)
    backend.wait(rig.main, backend.create_event("never recorded"))
    _fails(Status.STREAM_CAPTURE_ISOLATION, lambda: backend.wait(rig.main, rig.join), "'main'", "'join'", "outside")
    backend.abort_capture(rig.main)
    assert rig.works()


def test_events_of_an_earlier_capture(rig: Rig) -> None:
    backend = rig.backend
    backend.begin_capture(rig.main)
    backend.record(rig.fork, rig.main)
    backend.end_capture(rig.main)
    _fails(Status.INVALID_VALUE, lambda: backend.wait(rig.side, rig.fork), "'side'", "'fork'", "has ended")
    backend.begin_capture(rig.main)
    _fails(Status.INVALID_VALUE, lambda: backend.wait(rig.main, rig.fork), "'main'", "'fork'", "has ended")
    _fails(Status.STREAM_CAPTURE_INVALIDATED, lambda: backend.end_capture(rig.main), "'fork'", "has ended")
    backend.record(rig.fork, rig.main)
    backend.wait(rig.side, rig.fork)
    backend.synchronize_event(rig.fork)
    assert rig.works()


def test_asking_about_a_captured_event(rig: Rig) -> None:
    backend = rig.backend
    for ask in (backend.query_event, backend.synchronize_event):
        backend.begin_capture(rig.main)
        backend.record(rig.fork, rig.main)
        _fails(Status.CAPTURED_EVENT, partial(ask, rig.fork), "'fork'")
        _fails(Status.STREAM_CAPTURE_INVALIDATED, lambda: backend.end_capture(rig.main), "(907)")
        _fails(Status.INVALID_VALUE, partial(ask, rig.fork), "'fork'", "has ended", "record it again")
    backend.record(rig.fork, rig.main)
    assert rig.works()
    backend.synchronize_event(rig.fork)
    assert backend.query_event(rig.fork)


@pytest.mark.parametrize("invalid", [False, True])
@pytest.mark.parametrize("through", ["main", "side"])
def test_abort_releases_every_stream_and_never_ends_twice(rig: Rig, invalid: bool, through: str) -> None:
    backend = rig.backend
    backend.abort_capture(rig.main)  # nothing to end
    rig.begin_forked()
    rig.scale(rig.side)
    if invalid:
        _fails(Status.STREAM_CAPTURE_UNSUPPORTED, lambda: backend.synchronize(rig.main))
    backend.abort_capture(rig.main if through == "main" else rig.side)
    for stream in (rig.main, rig.side):
        assert backend.capture_status(stream) is CaptureStatus.NONE
        backend.abort_capture(stream)
    assert rig.read() == rig.x0.tolist()
    assert rig.works()


def test_a_capturing_stream_is_destroyed(rig: Rig) -> None:
    backend = rig.backend
    rig.begin_forked()
    rig.scale(rig.side)
    backend.destroy_stream(rig.main)
    assert backend.capture_status(rig.side) is CaptureStatus.NONE
    rig.main = backend.create_stream("new main")
    assert rig.read() == rig.x0.tolist()  # what was captured is gone
    backend.begin_capture(rig.main)
    backend.destroy_stream(rig.main)
    rig.main = backend.create_stream("newer main")
    assert rig.works()


def test_a_joined_stream_is_destroyed(rig: Rig) -> None:
    backend = rig.backend
    rig.begin_forked()
    backend.destroy_stream(rig.side)
    assert backend.capture_status(rig.main) is CaptureStatus.ACTIVE
    backend.end_capture(rig.main)  # it had done no work
    rig.side = backend.create_stream("new side")
    rig.begin_forked()
    rig.scale(rig.side, label="branch")
    backend.destroy_stream(rig.side)
    _fails(Status.STREAM_CAPTURE_UNJOINED, lambda: backend.end_capture(rig.main), "'new side'", "'branch'")
    rig.side = backend.create_stream("newest side")
    assert rig.works()


def test_replay_reads_pinned_memory_and_pointer_tables_again(racing_rig: Rig) -> None:
    rig = racing_rig
    backend = rig.backend
    rng = np.random.default_rng(4)
    rows = [random_i32(rng, 4) for _ in range(5)]
    addrs = [upload(backend, rig.main, f"row{i}", row) for i, row in enumerate(rows)]
    picks, table, out = backend.alloc_pinned("picks", 16), backend.alloc("table", 16), backend.alloc("out", 32)
    result = backend.alloc_pinned("result", 32)
    backend.begin_capture(rig.main)
    backend.copy_h2d(table.ptr, picks, 16, rig.main, label="table")
    args = {"table": table.ptr, "out": out.ptr, "n": 2, "width": 4}
    backend.launch(backend.prepare(GATHER, args, "gather"), rig.main)
    backend.copy_d2h(result, out.ptr, 32, rig.main, label="result")
    graph_exec = backend.instantiate(backend.end_capture(rig.main))
    for i, j in ((0, 1), (4, 2), (3, 3)):
        result.array[:] = 77
        backend.launch_graph(graph_exec, rig.main)
        picks.array.view(np.uint64)[:] = [addrs[i], addrs[j]]
        assert np.all(result.array == 77)
        backend.synchronize(rig.main)
        assert np.array_equal(result.array.view(np.int32).reshape(2, 4), np.stack([rows[i], rows[j]]))


def test_a_graph_keeps_its_arguments_alive(rig: Rig) -> None:
    backend = rig.backend
    data = random_i32(np.random.default_rng(6), 8)
    page = HostBuffer.pageable("page", data.copy())
    gone = weakref.ref(page.array)
    launch = backend.prepare(OFFSET, {"x": rig.x, "b": 5, "n": 8}, "offset")
    backend.begin_capture(rig.main)
    backend.copy_h2d(rig.x, page, 32, rig.main)
    backend.launch(launch, rig.main)
    graph = backend.end_capture(rig.main)
    graph_exec = backend.instantiate(graph)
    backend.destroy_graph(graph)
    del page, launch
    gc.collect()
    _churn = [np.full(8, 12345, np.int32) for _ in range(100)]
    backend.launch_graph(graph_exec, rig.main)
    assert rig.read() == (data + 5).tolist()
    assert gone() is not None
    backend.destroy_exec(graph_exec)
    gc.collect()
    assert gone() is None


def test_a_graph_over_a_freed_buffer_faults_at_the_launch(rig: Rig) -> None:
    backend = rig.backend
    buf = backend.alloc("slot 9", 32)
    backend.begin_capture(rig.main)
    backend.fill(buf.ptr, 1, 32, rig.main, label="baked")
    graph_exec = backend.instantiate(backend.end_capture(rig.main))
    backend.launch_graph(graph_exec, rig.main)
    backend.synchronize(rig.main)
    backend.free(buf)
    backend.launch_graph(graph_exec, rig.main)
    _fails(Status.ILLEGAL_ADDRESS, lambda: backend.synchronize(rig.main), "'baked'", "'slot 9'", "which was freed")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_launches_of_one_executable_do_not_overlap(schedule: str) -> None:
    rig = Rig(schedule)
    backend = rig.backend
    backend.begin_capture(rig.main)
    rig.scale(rig.main, 3)
    rig.offset(rig.main, 5)
    graph_exec = backend.instantiate(backend.end_capture(rig.main))
    want = rig.x0
    for stream in (rig.main, rig.side, rig.side, rig.main, rig.side):
        backend.launch_graph(graph_exec, stream)
        want = want * 3 + 5
    backend.synchronize(rig.side)
    assert rig.read() == want.tolist()


def _forked_graph(rig: Rig, joined: bool, y: int) -> GraphExec:
    """Scale x; copy it to y on the side stream; offset x, after the copy when `joined`."""
    backend = rig.backend
    late = backend.create_event("late")
    rig.begin_forked()
    backend.copy_d2d(y, rig.x, 32, rig.side, label="x to y")
    backend.record(rig.join, rig.side)
    if joined:
        backend.wait(rig.main, rig.join)
    rig.offset(rig.main)
    backend.record(late, rig.side)
    backend.wait(rig.main, late)
    return backend.instantiate(backend.end_capture(rig.main))


@pytest.mark.parametrize("joined", [True, False])
def test_random_schedules_reorder_inside_a_graph(joined: bool) -> None:
    results = set()
    for schedule in [*SCHEDULES, *(f"random:{seed}" for seed in range(100, 120))]:
        rig = Rig(schedule, race_detection=joined)
        y = rig.backend.alloc("y", 32).ptr
        graph_exec = _forked_graph(rig, joined, y)
        for _ in range(3):
            rig.backend.launch_graph(graph_exec, rig.main)
        results.add((*rig.read(), *download(rig.backend, rig.main, y, rig.x0).tolist()))
    assert (len(results) == 1) == joined


def test_random_schedules_interleave_graphs_with_other_streams() -> None:
    """The two nodes scale and offset; a copy on another stream can see x before, between and after them."""
    seen = set()
    for seed in range(60):
        rig = Rig(f"random:{seed}", race_detection=False)
        y = rig.backend.alloc("y", 32).ptr
        rig.backend.begin_capture(rig.main)
        rig.scale(rig.main)
        rig.offset(rig.main)
        graph_exec = rig.backend.instantiate(rig.backend.end_capture(rig.main))
        rig.backend.launch_graph(graph_exec, rig.main)
        rig.backend.copy_d2d(y, rig.x, 32, rig.side)
        rig.backend.synchronize(rig.side)
        seen.add(tuple(download(rig.backend, rig.side, y, rig.x0).tolist()))
    x = rig.x0
    assert seen == {tuple(v.tolist()) for v in (x, x * 3, x * 3 + 5)}


def test_a_graph_cannot_be_launched_into_a_capture(rig: Rig) -> None:
    backend = rig.backend
    backend.begin_capture(rig.main)
    rig.scale(rig.main)
    graph_exec = backend.instantiate(backend.end_capture(rig.main))
    rig.begin_forked()
    launch = partial(backend.launch_graph, graph_exec, rig.side)
    _fails(Status.STREAM_CAPTURE_UNSUPPORTED, launch, "cuGraphLaunch", "'side'", "cannot be recorded")
    blame = ("cuGraphLaunch", "(900)", "test_host_capture.py:")
    _fails(Status.STREAM_CAPTURE_UNSUPPORTED, launch, *blame)
    _fails(Status.STREAM_CAPTURE_INVALIDATED, lambda: backend.end_capture(rig.main), *blame)
    assert rig.read() == rig.x0.tolist()
    assert rig.works()


def test_copies_from_nowhere_are_refused_and_the_capture_goes_on(rig: Rig) -> None:
    backend = rig.backend
    backend.begin_capture(rig.main)
    _fails(Status.INVALID_VALUE, lambda: backend.copy_d2d(rig.x, rig.x + 4, 32, rig.main, "late"), "'late'", "offset 4")
    backend.fill(rig.x, 7, 33, rig.main, label="clear")  # a captured fill is not looked at before it runs
    graph_exec = backend.instantiate(backend.end_capture(rig.main))
    backend.launch_graph(graph_exec, rig.main)
    _fails(Status.ILLEGAL_ADDRESS, lambda: backend.synchronize(rig.main), "'clear'", "33 bytes", "offset 0 of 'x'")


def test_nothing_is_left_after_everything_was_destroyed(rig: Rig) -> None:
    backend = rig.backend
    backend.begin_capture(rig.main)
    rig.scale(rig.main)
    graph = backend.end_capture(rig.main)
    graph_exec = backend.instantiate(graph)
    backend.launch_graph(graph_exec, rig.main)
    backend.destroy_exec(graph_exec)
    backend.destroy_graph(graph)
    for event in (rig.fork, rig.join):
        backend.destroy_event(event)
    for stream in (rig.main, rig.side):
        backend.destroy_stream(stream)
    assert backend.live() == {"buffers": 1, "streams": 0, "events": 0, "graphs": 0, "graph_execs": 0, "captures": 0}
    _fails(Status.INVALID_HANDLE, lambda: backend.record(Event(rig.fork), rig.main))
