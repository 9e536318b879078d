"""A watched backend refuses to replay a graph over memory that is gone, says whose, and lets all else through."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from small_graphs import NBYTES, N, Rig, page

from ds41rt.capture import StaleGraphError, WatchedBackend
from ds41rt.capture.keeper import GraphKeeper
from ds41rt.cu.backend import DeviceBuffer, GpuBackend, GraphExec, HostBuffer
from ds41rt.cu.graphinfo import CopyNode, GraphInfo, GraphNode, KernelNode, Param
from ds41rt.cu.result import CudaError, Status


@dataclass
class Watched:
    rig: Rig
    backend: GpuBackend

    def executable(self, work: Callable[[], object]) -> GraphExec:
        """Made through the watched backend, its template destroyed."""
        graph = self.rig.capture(work)
        graph_exec = self.backend.instantiate(graph)
        self.backend.destroy_graph(graph)
        return graph_exec

    def launch(self, graph_exec: GraphExec) -> None:
        self.backend.launch_graph(graph_exec, self.rig.main)
        self.backend.synchronize(self.rig.main)

    def refused(self, graph_exec: GraphExec, *said: str) -> str:
        """The launch raises with all of `said`, and nothing was enqueued."""
        before = self.rig.backend.memory.bytes(self.rig.c.ptr, NBYTES).copy()
        with pytest.raises(StaleGraphError) as info:
            self.launch(graph_exec)
        for part in said:
            assert part in str(info.value)
        self.backend.synchronize(self.rig.main)  # no replay is on its way that would fault
        assert np.array_equal(self.rig.backend.memory.bytes(self.rig.c.ptr, NBYTES), before)
        return str(info.value)


@pytest.fixture
def watched() -> Iterator[Watched]:
    rig = Rig()
    wrapped = WatchedBackend(rig.backend)
    rng = np.random.default_rng(6)
    for buf in (rig.a, rig.b, rig.c):
        rig.backend.memory.bytes(buf.ptr, NBYTES)[:] = rng.integers(0, 256, NBYTES, np.uint8)
    yield Watched(rig, wrapped.as_backend)
    wrapped.close()


def test_a_launch_over_live_memory_replays(watched: Watched) -> None:
    r = watched.rig
    graph_exec = watched.executable(lambda: r.add(r.a.ptr, r.b.ptr))
    for _ in range(2):
        watched.launch(graph_exec)
    a, b = (r.backend.memory.bytes(buf.ptr, NBYTES).view(np.int32) for buf in (r.a, r.b))
    assert np.array_equal(b, a + 5)


def test_a_freed_buffer_is_named_with_node_and_parameter(watched: Watched) -> None:
    r = watched.rig

    def work() -> None:
        r.add(r.a.ptr, r.c.ptr, label="L03.first")
        r.add(r.c.ptr, r.b.ptr + 8, label="L04.last", n=4)

    graph_exec = watched.executable(work)
    watched.backend.free(r.b)
    watched.refused(
        graph_exec, "2 nodes (L03.first to L04.last)", "was not launched", "node 'L04.last' bakes 'y'", "'b'",
        f"{r.b.ptr + 8:#x}", "was freed", "capture the graph again",
    )  # fmt: skip
    watched.refused(graph_exec)  # every time


def test_several_stale_pointers_are_counted(watched: Watched) -> None:
    r = watched.rig

    def work() -> None:
        r.add(r.a.ptr, r.b.ptr)
        r.add(r.b.ptr, r.c.ptr)

    graph_exec = watched.executable(work)
    watched.backend.free(r.b)
    assert "and 1 more stale pointers" in watched.refused(graph_exec, "'y'")
    watched.backend.free(r.a)
    assert "and 2 more stale pointers" in watched.refused(graph_exec, "'x'", "'a'")


class Reusing:
    """A ledger in which buffers get the name, place and size of others, as on a device."""

    def __init__(self, backend: GpuBackend) -> None:
        self.backend = backend
        self.instead: dict[int, DeviceBuffer] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self.backend, name)

    def ledger(self) -> list[DeviceBuffer | HostBuffer]:
        return [self.instead.get(buf.ptr, buf) for buf in self.backend.ledger()]


@pytest.mark.parametrize("name", ["b", "other"])
def test_a_buffer_that_was_replaced_in_its_place(name: str) -> None:
    """The address is alive and may even have the same name: it is another buffer's all the same."""
    rig = Rig()
    reusing = Reusing(rig.backend)
    watched = Watched(rig, WatchedBackend(reusing).as_backend)  # type: ignore[arg-type] # passes everything else on
    graph_exec = watched.executable(lambda: rig.add(rig.a.ptr, rig.b.ptr))
    watched.launch(graph_exec)
    reusing.instead[rig.b.ptr] = DeviceBuffer(name, rig.b.ptr, rig.b.nbytes)
    watched.refused(graph_exec, f"'b', which was replaced by '{name}'")
    rig.backend.close()


Work = Callable[[Rig], None]


@pytest.mark.parametrize(
    ("work", "role"),
    [
        (lambda r: r.backend.copy_d2d(r.b.ptr, r.a.ptr, 8, r.main, label="node"), "dst"),
        (lambda r: r.backend.copy_d2d(r.a.ptr, r.b.ptr, 8, r.main, label="node"), "src"),
        (lambda r: r.backend.fill(r.b.ptr, 1, 8, r.main, label="node"), "dst"),
    ],
)
def test_copies_and_fills_are_watched(watched: Watched, work: Work, role: str) -> None:
    r = watched.rig
    graph_exec = watched.executable(lambda: work(r))
    watched.launch(graph_exec)
    watched.backend.free(r.b)
    watched.refused(graph_exec, "node 'node'", f"bakes '{role}'", "'b'")


def test_pinned_memory_is_watched(watched: Watched) -> None:
    r = watched.rig
    copy = watched.executable(lambda: r.backend.copy_h2d(r.a.ptr, r.pinned, 8, r.main, label="node"))
    in_place = watched.executable(lambda: r.add(r.pinned.device_ptr, r.b.ptr))
    for graph_exec in (copy, in_place):
        watched.launch(graph_exec)
    watched.backend.free_pinned(r.pinned)
    for graph_exec in (copy, in_place):
        watched.refused(graph_exec, "'staging'", "was freed")


def test_memory_of_others_and_numbers_are_let_through(watched: Watched) -> None:
    r = watched.rig
    pageable = watched.executable(lambda: r.backend.copy_h2d(r.a.ptr, page(), 8, r.main, label="in"))
    empty = watched.executable(lambda: None)
    unused = watched.executable(lambda: r.add(0, 0, n=0))
    watched.backend.free(r.ring)
    watched.backend.free(r.b)
    for graph_exec in (pageable, empty, unused):
        watched.launch(graph_exec)


def test_other_graphs_are_not_held_up(watched: Watched) -> None:
    r = watched.rig
    stale = watched.executable(lambda: r.add(r.a.ptr, r.b.ptr))
    fine = watched.executable(lambda: r.add(r.a.ptr, r.c.ptr))
    watched.backend.free(r.b)
    watched.refused(stale)
    watched.launch(fine)
    watched.backend.destroy_exec(stale)
    with pytest.raises(CudaError) as info:
        watched.launch(stale)
    assert info.value.status is Status.INVALID_HANDLE


def test_foreign_kernels_are_watched_by_the_words_in_their_parameters() -> None:
    rig = Rig()

    class Foreign(Reusing):
        def describe_graph(self, graph: int) -> GraphInfo:
            word = rig.b.ptr.to_bytes(8, "little")
            params = (Param(0, b"\0\0\0\0"), Param(4, b"\1\2\3\4" + word))
            inner = GraphInfo((GraphNode(0, "kernel", (), KernelNode("_Z3foo", None, None, 0, params)),))
            return GraphInfo((GraphNode(0, "graph", (), inner),))

    watched = Watched(rig, WatchedBackend(Foreign(rig.backend)).as_backend)  # type: ignore[arg-type] # see above
    graph_exec = watched.executable(lambda: rig.add(rig.a.ptr, rig.c.ptr))
    watched.launch(graph_exec)
    rig.backend.free(rig.b)
    watched.refused(graph_exec, "node '_Z3foo'", "'parameter at 8'", "'b'")
    rig.backend.close()


def test_ordinary_memory_with_the_number_of_a_buffer_is_not_that_buffer() -> None:
    rig = Rig()

    class Pageable(Reusing):
        def describe_graph(self, graph: int) -> GraphInfo:
            copy = CopyNode(rig.a.ptr, "device", rig.b.ptr, "pageable", 8)
            return GraphInfo((GraphNode(0, "copy", (), copy, "in"),))

    watched = Watched(rig, WatchedBackend(Pageable(rig.backend)).as_backend)  # type: ignore[arg-type] # see above
    graph_exec = watched.executable(lambda: rig.backend.copy_h2d(rig.a.ptr, page(), 8, rig.main, label="in"))
    rig.backend.free(rig.b)
    watched.launch(graph_exec)
    rig.backend.close()


def test_a_keeper_keeps_what_executable_graphs_contain() -> None:
    rig = Rig()
    keeper = GraphKeeper(rig.backend)
    graph = rig.capture(rig.clean)
    graph_exec = keeper.as_backend.instantiate(graph)
    info = rig.backend.describe_graph(graph)
    rig.backend.destroy_graph(graph)
    assert keeper.infos == {graph_exec: info}
    with pytest.raises(CudaError):
        keeper.instantiate(graph)  # destroyed
    keeper.destroy_exec(graph_exec)
    assert keeper.infos == {}
    with pytest.raises(CudaError):
        keeper.destroy_exec(graph_exec)
    keeper.close()
    assert not any(rig.backend.live().values())
    assert N == NBYTES // 4
