"""Capture, abort and graphs on the fake driver: call order, first failures, lifetimes, garbage collection."""

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fake_driver import open_fake
from tiny_kernels import AXPY, OFFSET, SCALE, download, random_i32, upload

from ds41rt.cu.backend import CaptureStatus, HostBuffer
from ds41rt.cu.graphinfo import CopyNode, FillNode, GraphInfo, KernelNode
from ds41rt.cu.kernel import Geometry
from ds41rt.cu.result import CudaError, Status

GPU_SCALE = replace(SCALE, geometry=lambda s, n_sms: Geometry((1, 1, 1), 32))
GPU_OFFSET = replace(OFFSET, geometry=lambda s, n_sms: Geometry((n_sms, 1, 1), 64, 256))

GPU_AXPY = replace(AXPY, geometry=lambda s, n_sms: Geometry((1, 1, 1), 32))


class Rig:
    """A driver backend with two streams, two events and an int32 buffer `x`; kernels are loaded already."""

    def __init__(self, folder: Path) -> None:
        self.backend, self.cu = open_fake(folder, [GPU_SCALE, GPU_OFFSET, GPU_AXPY])
        backend = self.backend
        self.main, self.side = backend.create_stream("main"), backend.create_stream("side")
        self.fork, self.join = backend.create_event("fork"), backend.create_event("join")
        self.x0 = random_i32(np.random.default_rng(8), 8)
        self.x = upload(backend, self.main, "x", self.x0)
        self.scale = backend.prepare(GPU_SCALE, {"x": self.x, "a": 3, "n": 8}, "scale")
        self.offset = backend.prepare(GPU_OFFSET, {"x": self.x, "b": -5, "n": 8}, "offset")
        self.start = len(self.cu.calls)

    def names(self) -> list[str]:
        """Calls since the last look."""
        found = self.cu.names()[self.start :]
        self.start = len(self.cu.calls)
        return found

    def read(self) -> list[int]:
        values: list[int] = download(self.backend, self.main, self.x, self.x0).tolist()
        return values

    def works(self) -> bool:
        """Both streams are usable and a fresh capture succeeds."""
        assert self.backend.live()["captures"] == 0
        assert gc.isenabled()
        before = np.array(self.read(), np.int32)
        self.backend.synchronize(self.side)
        self.backend.begin_capture(self.side)
        self.backend.launch(self.scale, self.side)
        graph = self.backend.end_capture(self.side)
        graph_exec = self.backend.instantiate(graph)
        self.backend.launch_graph(graph_exec, self.main)
        self.backend.destroy_graph(graph)
        self.backend.destroy_exec(graph_exec)
        return bool(self.read() == (before * 3).tolist())


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.backend.close()
    assert gc.isenabled()
    assert not any(rig.cu.host.live().values())
    assert rig.cu.modules == 0


def _fails(status: Status, call: Callable[[], object], *parts: str) -> str:
    with pytest.raises(CudaError) as info:
        call()
    assert info.value.status == status
    for part in parts:
        assert part in str(info.value)
    return str(info.value)


def test_a_graph_replays_what_was_captured(rig: Rig) -> None:
    backend = rig.backend
    assert backend.capture_status(rig.main) is CaptureStatus.NONE
    rig.names()
    backend.begin_capture(rig.main)
    assert backend.capture_status(rig.main) is CaptureStatus.ACTIVE
    backend.launch(rig.scale, rig.main)
    backend.launch(rig.offset, rig.main)
    graph = backend.end_capture(rig.main)
    graph_exec = backend.instantiate(graph)
    backend.destroy_graph(graph)
    for _ in range(3):
        backend.launch_graph(graph_exec, rig.main)
    backend.destroy_exec(graph_exec)
    assert rig.names() == [
        "cuStreamBeginCapture", "cuStreamIsCapturing", "cuLaunchKernel", "cuStreamGetCaptureInfo", "cuLaunchKernel",
        "cuStreamGetCaptureInfo", "cuStreamEndCapture", "cuGraphInstantiate", "cuGraphDestroy", "cuGraphLaunch",
        "cuGraphLaunch", "cuGraphLaunch", "cuGraphExecDestroy",
    ]  # fmt: skip
    want = rig.x0
    for _ in range(3):
        want = want * 3 - 5
    assert rig.read() == want.tolist()
    _fails(Status.INVALID_HANDLE, lambda: backend.launch_graph(graph_exec, rig.main), "executable graph")
    _fails(Status.INVALID_HANDLE, lambda: backend.destroy_exec(graph_exec), "executable graph")
    _fails(Status.INVALID_HANDLE, lambda: backend.destroy_graph(graph))
    _fails(Status.INVALID_HANDLE, lambda: backend.instantiate(graph))
    _fails(Status.INVALID_HANDLE, lambda: backend.describe_graph(graph))
    assert rig.works()


def test_begin_and_end_out_of_place(rig: Rig) -> None:
    backend = rig.backend
    _fails(Status.ILLEGAL_STATE, lambda: backend.end_capture(rig.main), "'main' is not capturing")
    backend.begin_capture(rig.main)
    _fails(Status.ILLEGAL_STATE, lambda: backend.begin_capture(rig.main), "'main' already takes part")
    backend.destroy_graph(backend.end_capture(rig.main))
    assert rig.works()


def test_a_begin_that_fails_leaves_collection_as_it_was(rig: Rig) -> None:
    for was in (True, False):
        (gc.enable if was else gc.disable)()
        rig.cu.fail["cuStreamBeginCapture"] = [900]
        _fails(Status.STREAM_CAPTURE_UNSUPPORTED, lambda: rig.backend.begin_capture(rig.main), "'main'")
        assert gc.isenabled() is was
    gc.enable()
    assert rig.works()


@pytest.mark.parametrize("invalid", [False, True])
@pytest.mark.parametrize("through", ["main", "side"])
def test_abort_asks_first_and_never_ends_twice(rig: Rig, invalid: bool, through: str) -> None:
    backend = rig.backend
    rig.names()
    backend.abort_capture(rig.main)
    assert rig.names() == ["cuStreamIsCapturing"]
    backend.begin_capture(rig.main)
    backend.launch(rig.scale, rig.main)
    backend.record(rig.fork, rig.main)
    backend.wait(rig.side, rig.fork)
    backend.launch(rig.scale, rig.side)
    if invalid:
        _fails(Status.STREAM_CAPTURE_UNSUPPORTED, lambda: backend.synchronize(rig.main))
    rig.names()
    backend.abort_capture(rig.main if through == "main" else rig.side)
    # An unjoined or invalid capture ends without a graph.
    assert rig.names() == ["cuStreamIsCapturing", "cuStreamEndCapture"]
    for stream in (rig.main, rig.side):
        backend.abort_capture(stream)
    assert rig.names() == ["cuStreamIsCapturing"] * 2
    assert rig.read() == rig.x0.tolist()
    assert rig.works()


def test_abort_of_a_good_capture_destroys_its_graph(rig: Rig) -> None:
    rig.backend.begin_capture(rig.main)
    rig.backend.launch(rig.scale, rig.main)
    rig.names()
    rig.backend.abort_capture(rig.main)
    assert rig.names() == ["cuStreamIsCapturing", "cuStreamEndCapture", "cuGraphDestroy"]
    assert rig.cu.host.live()["graphs"] == 0
    assert rig.works()


def test_abort_raises_what_is_not_about_captures(rig: Rig) -> None:
    rig.backend.begin_capture(rig.main)
    rig.cu.fail["cuStreamEndCapture"] = [719]
    _fails(Status.LAUNCH_FAILED, lambda: rig.backend.abort_capture(rig.main), "'main'")
    _fails(Status.LAUNCH_FAILED, lambda: rig.backend.abort_capture(rig.main), "an earlier error")
    rig.backend.close()


def test_a_capture_that_somebody_else_ended_is_forgotten(rig: Rig) -> None:
    rig.backend.begin_capture(rig.main)
    assert not gc.isenabled()
    rig.cu.cuGraphDestroy(rig.cu.cuStreamEndCapture(rig.main)[1])
    rig.backend.abort_capture(rig.main)
    assert rig.works()


def test_the_first_failure_is_named_by_all_later_ones(rig: Rig) -> None:
    backend = rig.backend
    backend.begin_capture(rig.main)
    backend.launch(rig.scale, rig.main)
    rig.cu.log.append("[CUDA] stream is capturing")
    first = _fails(Status.STREAM_CAPTURE_UNSUPPORTED, lambda: backend.synchronize(rig.main), "'main'", "(900)")
    assert "driver log: [CUDA] stream is capturing" in first
    rig.cu.log.append("[CUDA] another line")
    blame = ("cuStreamSynchronize: STREAM_CAPTURE_UNSUPPORTED (900)", "test_driver_capture.py:", "stream is capturing")
    later: list[Callable[[], object]] = [
        lambda: backend.launch(rig.offset, rig.main),
        lambda: backend.fill(rig.x, 0, 4, rig.main, "clear"),
        lambda: backend.record(rig.join, rig.main),
        lambda: backend.wait(rig.main, rig.fork),
        lambda: backend.end_capture(rig.main),
    ]
    _fails(Status.STREAM_CAPTURE_UNSUPPORTED, lambda: backend.synchronize(rig.main), *blame)
    for call in later:
        _fails(Status.STREAM_CAPTURE_INVALIDATED, call, *blame)
    assert "another line" not in first
    assert rig.works()


def test_captured_work_that_waits_for_an_event_from_outside(rig: Rig) -> None:
    backend = rig.backend
    backend.record(rig.join, rig.side)
    backend.begin_capture(rig.main)
    wait = "'main' waits for event 'join'"
    _fails(Status.STREAM_CAPTURE_ISOLATION, lambda: backend.wait(rig.main, rig.join), wait, "recorded outside")
    _fails(Status.STREAM_CAPTURE_INVALIDATED, lambda: backend.launch(rig.scale, rig.main), "(905)", wait)
    backend.abort_capture(rig.main)
    assert rig.read() == rig.x0.tolist()
    assert rig.works()


def test_an_unjoined_fork(rig: Rig) -> None:
    backend = rig.backend
    backend.begin_capture(rig.main)
    backend.record(rig.fork, rig.main)
    backend.wait(rig.side, rig.fork)
    backend.launch(rig.scale, rig.side)
    _fails(Status.STREAM_CAPTURE_UNJOINED, lambda: backend.end_capture(rig.main), "'main'", "was not joined back")
    for stream in (rig.main, rig.side):
        assert backend.capture_status(stream) is CaptureStatus.NONE
    assert rig.works()


def test_end_on_the_wrong_stream_keeps_the_capture_to_be_aborted(rig: Rig) -> None:
    backend = rig.backend
    backend.begin_capture(rig.main)
    backend.record(rig.fork, rig.main)
    backend.wait(rig.side, rig.fork)
    _fails(Status.STREAM_CAPTURE_UNMATCHED, lambda: backend.end_capture(rig.side), "'side'", "the stream that began it")
    assert backend.live()["captures"] == 1
    backend.abort_capture(rig.side)
    assert rig.works()


def test_events_of_a_capture(rig: Rig) -> None:
    backend = rig.backend
    for ask in (backend.query_event, backend.synchronize_event):
        backend.begin_capture(rig.main)
        backend.record(rig.fork, rig.main)
        _fails(Status.CAPTURED_EVENT, partial(ask, rig.fork), "'fork'", "use another event")
        again = ("'fork'", "a capture that has ended or is invalid", "record it again")
        _fails(Status.INVALID_VALUE, partial(ask, rig.fork), *again)
        backend.abort_capture(rig.main)
        _fails(Status.INVALID_VALUE, partial(ask, rig.fork), *again)
        _fails(Status.INVALID_VALUE, lambda: backend.wait(rig.side, rig.fork), *again)
    backend.begin_capture(rig.main)
    _fails(Status.INVALID_VALUE, lambda: backend.wait(rig.main, rig.fork), *again)
    _fails(Status.STREAM_CAPTURE_INVALIDATED, lambda: backend.end_capture(rig.main), *again)
    backend.record(rig.fork, rig.main)
    backend.synchronize_event(rig.fork)
    assert backend.query_event(rig.fork)
    assert rig.works()


def test_a_graph_launched_in_a_capture_is_refused(rig: Rig) -> None:
    backend = rig.backend
    backend.begin_capture(rig.main)
    backend.launch(rig.scale, rig.main)
    graph_exec = backend.instantiate(backend.end_capture(rig.main))
    backend.begin_capture(rig.main)
    hint = "nor can an executable graph be launched into a capture"
    _fails(Status.STREAM_CAPTURE_UNSUPPORTED, lambda: backend.launch_graph(graph_exec, rig.main), "'main'", hint)
    _fails(Status.STREAM_CAPTURE_INVALIDATED, lambda: backend.end_capture(rig.main), "cuGraphLaunch", hint)
    assert rig.works()


def test_two_captures_end_each_on_its_own(rig: Rig) -> None:
    backend = rig.backend
    backend.begin_capture(rig.main)
    backend.begin_capture(rig.side)
    backend.record(rig.join, rig.side)
    _fails(Status.STREAM_CAPTURE_MERGE, lambda: backend.wait(rig.main, rig.join), "'main'", "'join'")
    backend.abort_capture(rig.main)
    assert not gc.isenabled()
    backend.abort_capture(rig.side)
    assert rig.works()


def test_a_capturing_stream_that_is_destroyed_leaves_the_rest_usable(rig: Rig) -> None:
    backend = rig.backend
    backend.begin_capture(rig.main)
    backend.record(rig.fork, rig.main)
    backend.wait(rig.side, rig.fork)
    backend.destroy_stream(rig.main)
    backend.abort_capture(rig.side)
    assert backend.live()["captures"] == 0
    rig.main = backend.create_stream("new main")
    assert rig.works()


def test_nothing_is_collected_while_a_capture_is_open(rig: Rig) -> None:
    """A cycle that owns a device buffer and frees it when it dies, and allocations enough for several passes."""
    backend = rig.backend

    class Cycle:
        def __init__(self) -> None:
            self.me = self

    freed: list[CaptureStatus] = []
    buf = backend.alloc("owned", 64)

    def free() -> None:
        freed.append(backend.capture_status(rig.main))
        backend.free(buf)

    cycle = Cycle()
    weakref.finalize(cycle, free)
    backend.begin_capture(rig.main)
    del cycle
    rubbish: list[object] = [[] for _ in range(20_000)]
    backend.launch(rig.scale, rig.main)
    assert not freed
    backend.destroy_graph(backend.end_capture(rig.main))
    gc.collect()
    assert freed == [CaptureStatus.NONE]
    assert len(rubbish) == 20_000


def test_nothing_is_loaded_while_a_capture_is_open(rig: Rig) -> None:
    backend = rig.backend
    args = {"x": rig.x, "y": rig.x, "a": 1.0, "n": 4}
    backend.begin_capture(rig.main)
    assert backend.prepare(GPU_SCALE, {"x": rig.x, "a": 1, "n": 8}, "loaded before")
    rig.names()
    text = "kernel axpy is not loaded yet and a capture is open"
    _fails(Status.STREAM_CAPTURE_UNSUPPORTED, lambda: backend.prepare(GPU_AXPY, args, "late"), text)
    assert rig.names() == []
    backend.destroy_graph(backend.end_capture(rig.main))
    assert backend.prepare(GPU_AXPY, args, "later")


def test_collection_that_was_off_stays_off(rig: Rig) -> None:
    gc.disable()
    rig.backend.begin_capture(rig.main)
    rig.backend.destroy_graph(rig.backend.end_capture(rig.main))
    assert not gc.isenabled()
    gc.enable()


def test_an_exception_in_the_middle_of_a_capture(rig: Rig) -> None:
    before = rig.backend.live()

    def interrupted() -> None:
        try:
            rig.backend.begin_capture(rig.main)
            rig.backend.launch(rig.scale, rig.main)
            raise ZeroDivisionError
        finally:
            rig.backend.abort_capture(rig.main)

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert rig.backend.live() == before
    assert rig.read() == rig.x0.tolist()
    assert rig.works()


def test_captured_host_buffers_live_as_long_as_the_executable(rig: Rig) -> None:
    backend = rig.backend
    data = random_i32(np.random.default_rng(3), 8)
    array = data.copy()
    source = HostBuffer.pageable("page", array)
    alive = weakref.ref(array)
    del array
    backend.begin_capture(rig.main)
    backend.copy_h2d(rig.x, source, 32, rig.main, label="write")
    graph = backend.end_capture(rig.main)
    graph_exec = backend.instantiate(graph)
    backend.destroy_graph(graph)
    del source
    gc.collect()
    assert alive() is not None
    backend.launch_graph(graph_exec, rig.main)
    assert rig.read() == data.tolist()
    backend.destroy_exec(graph_exec)
    gc.collect()
    assert alive() is None


def test_launches_may_be_dropped_before_the_replay(rig: Rig) -> None:
    backend = rig.backend
    launch = backend.prepare(GPU_SCALE, {"x": rig.x, "a": 7, "n": 8}, "short-lived")
    backend.begin_capture(rig.main)
    backend.launch(launch, rig.main)
    graph_exec = backend.instantiate(backend.end_capture(rig.main))
    del launch
    gc.collect()
    backend.launch_graph(graph_exec, rig.main)
    assert rig.read() == (rig.x0 * 7).tolist()


def test_describe_names_nodes_edges_and_every_baked_byte(rig: Rig) -> None:
    backend = rig.backend
    host = backend.alloc_pinned("out", 32)
    page = np.zeros(8, np.int32)
    backend.begin_capture(rig.main)
    backend.launch(rig.scale, rig.main)
    backend.record(rig.fork, rig.main)
    backend.wait(rig.side, rig.fork)
    backend.launch(rig.offset, rig.side)
    backend.fill(rig.x, 1, 4, rig.main, label="clear")
    backend.record(rig.join, rig.side)
    backend.wait(rig.main, rig.join)
    backend.copy_d2h(host, rig.x, 16, rig.main, dst_off=16, label="read back")
    backend.copy_h2d(rig.x, HostBuffer.pageable("page", page), 32, rig.main, label="write")
    graph = backend.end_capture(rig.main)
    info = backend.describe_graph(graph)
    assert [(n.index, n.kind, n.deps, n.label, n.stream) for n in info.nodes] == [
        (0, "kernel", (), "scale", "main"),
        (1, "kernel", (0,), "offset", "side"),
        (2, "fill", (0,), "clear", "main"),
        (3, "copy", (1, 2), "read back", "main"),
        (4, "copy", (3,), "write", "main"),
    ]
    assert [n.launch for n in info.nodes] == [rig.scale, rig.offset, None, None, None]
    assert info.unavailable == ()
    assert info.edges == ((0, 1), (0, 2), (1, 3), (2, 3), (3, 4))
    scale, offset, fill, read_back, write = (n.content for n in info.nodes)
    assert isinstance(scale, KernelNode)
    assert (scale.name, scale.grid, scale.block, scale.shared_nbytes) == ("ds41_scale", (1, 1, 1), (32, 1, 1), 0)
    assert scale.params is not None
    assert [(p.off, p.value) for p in scale.params] == [
        (0, rig.x.to_bytes(8, "little")), (8, b"\x03\0\0\0"), (12, b"\x08\0\0\0")
    ]  # fmt: skip
    assert isinstance(offset, KernelNode)
    assert (offset.grid, offset.block, offset.shared_nbytes) == ((132, 1, 1), (64, 1, 1), 256)
    assert offset.params is not None
    assert offset.params[1].value == (-5).to_bytes(4, "little", signed=True)
    assert fill == FillNode(rig.x, 1, 1, 4)
    assert read_back == CopyNode(host.ptr + 16, "pinned", rig.x, "device", 16)
    assert write == CopyNode(rig.x, "device", page.ctypes.data, "pageable", 32)
    backend.begin_capture(rig.side)
    assert backend.describe_graph(backend.end_capture(rig.side)) == GraphInfo(())


def test_the_older_names_of_the_bindings_work_too(rig: Rig) -> None:
    """12.9 calls the newest form cuGraphGetEdges_v2, and its plain form refuses edges with data."""
    cu = rig.cu
    rig.backend.begin_capture(rig.main)
    rig.backend.launch(rig.scale, rig.main)
    rig.backend.launch(rig.offset, rig.main)
    graph = rig.backend.end_capture(rig.main)
    object.__setattr__(cu, "cuGraphGetEdges_v2", lambda *args: cu._invoke("cuGraphGetEdges", args))
    cu.missing.add("cuGraphGetEdges")
    assert rig.backend.describe_graph(graph).edges == ((0, 1),)


def test_errors_while_a_graph_is_described_or_instantiated(rig: Rig) -> None:
    backend = rig.backend
    backend.begin_capture(rig.main)
    backend.launch(rig.scale, rig.main)
    graph = backend.end_capture(rig.main)
    for call in ("cuGraphGetNodes", "cuGraphGetEdges", "cuGraphNodeGetType", "cuGraphKernelNodeGetParams"):
        rig.cu.fail[call] = [400]
        _fails(Status.INVALID_HANDLE, lambda: backend.describe_graph(graph), call)
    rig.cu.fail["cuGraphInstantiate"] = [2]
    with pytest.raises(MemoryError, match="cuGraphInstantiate"):
        backend.instantiate(graph)
    assert backend.live()["graph_execs"] == 0
    assert rig.works()
