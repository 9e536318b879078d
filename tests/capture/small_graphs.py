"""Graphs small enough to check by hand, captured on the host backend, and their dumps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ds41rt.capture.dump import Dump, Graph, Node
from ds41rt.capture.inspect import inspect_backend_graphs
from ds41rt.cu.backend import GpuBackend, HostBuffer, Stream
from ds41rt.cu.backend import Graph as Handle
from ds41rt.cu.host import HostBackend
from ds41rt.cu.kernel import I32, U64, Array, Geometry, KernelSpec, Pointer, Scalar, Span


def _add(x: Array | None, y: Array | None, a: int, n: int) -> None:
    if x is not None and y is not None:
        y[:] = x + np.int32(a)


def _append(x: Array, ring: Array, position: int, n: int, window: int) -> None:
    ring[position % window] = x


def _gather(table: Array, out: Array, n: int, spans: list[Array]) -> None:
    out[:] = spans[0]


def _gather_spans(table: Array, out: Array, n: int) -> list[Span]:
    return [Span(int(table[0]), I32, (n,), "r")]


ADD = KernelSpec(
    "add",
    (
        Pointer("x", I32, lambda s: (s.n,), "r"),
        Pointer("y", I32, lambda s: (s.n,), "w"),
        Scalar("a", "i32"),
        Scalar("n", "u32"),
    ),
    _add,
    geometry=lambda s, n_sms: Geometry((s.n, 1, 1), 32, 128),
)
# A row goes to the ring slot of a position that is an argument: what no captured kernel should do.
APPEND = KernelSpec(
    "append",
    (
        Pointer("x", I32, lambda s: (s.n,), "r"),
        Pointer("ring", I32, lambda s: (s.window, s.n), "w"),
        Scalar("position", "u32"),
        Scalar("n", "u32"),
        Scalar("window", "u32"),
    ),
    _append,
)
GATHER = KernelSpec(
    "gather",
    (Pointer("table", U64, lambda s: (1,), "r"), Pointer("out", I32, lambda s: (s.n,), "w"), Scalar("n", "u32")),
    _gather,
    _gather_spans,
    indirect_nbytes=lambda s: 4 * int(s.n),
)
N, WINDOW = 16, 4
NBYTES = 4 * N


class Rig:
    """Two streams and three buffers of `N` int32, random; `ring` holds `WINDOW` rows."""

    def __init__(self) -> None:
        self.backend = backend = HostBackend()
        self.main, self.side = backend.create_stream("main"), backend.create_stream("side")
        self.fork, self.join = backend.create_event("fork"), backend.create_event("join")
        self.a, self.b, self.c = (backend.alloc(name, NBYTES) for name in "abc")
        self.ring = backend.alloc("window ring", WINDOW * NBYTES)
        self.pinned = backend.alloc_pinned("staging", NBYTES)
        self.pinned.array.view(np.int32)[:] = np.random.default_rng(3).integers(-1000, 1000, N, np.int32)

    def add(self, x: int, y: int, stream: Stream | None = None, *, label: str = "L00.add", n: int = N) -> None:
        launch = self.backend.prepare(ADD, {"x": x, "y": y, "a": 5, "n": n}, label)
        self.backend.launch(launch, self.main if stream is None else stream)

    def append(self, ring: int, position: int = 7, label: str = "L00.append") -> None:
        args = {"x": self.a.ptr, "ring": ring, "position": position, "n": N, "window": WINDOW}
        self.backend.launch(self.backend.prepare(APPEND, args, label), self.main)

    def forked(self) -> None:
        self.backend.record(self.fork, self.main)
        self.backend.wait(self.side, self.fork)

    def joined(self) -> None:
        self.backend.record(self.join, self.side)
        self.backend.wait(self.main, self.join)

    def clean(self) -> None:
        """Two kernels in a row and one beside the second: nothing is wrong with them."""
        self.add(self.a.ptr, self.b.ptr, label="L00.first")
        self.forked()
        self.add(self.b.ptr, self.c.ptr, self.side, label="L00.beside")
        self.add(self.b.ptr, self.ring.ptr, label="L01.second")
        self.joined()
        self.add(self.c.ptr, self.b.ptr, label="L01.last")

    def capture(self, work: Callable[[], object]) -> Handle:
        self.backend.begin_capture(self.main)
        work()
        return self.backend.end_capture(self.main)

    def dump(self, work: Callable[[], object], **ranges: tuple[int, int]) -> Dump:
        """The dump of one graph, "graph", as it is after its capture."""
        return self.dump_of(self.capture(work), **ranges)

    def dump_of(self, handle: Handle, **ranges: tuple[int, int]) -> Dump:
        return dump_of(self.backend, handle, **ranges)


def dump_of(backend: GpuBackend, handle: Handle, **ranges: tuple[int, int]) -> Dump:
    return inspect_backend_graphs(backend, {"graph": handle}, ranges=ranges, title="a small graph")


@contextmanager
def rig() -> Iterator[Rig]:
    made = Rig()
    try:
        yield made
    finally:
        made.backend.close()


def page(seed: int = 1) -> HostBuffer:
    """Ordinary host memory with random bytes."""
    return HostBuffer.pageable("page", np.random.default_rng(seed).integers(0, 256, NBYTES, np.uint8))


def changed(dump: Dump, index: int, **fields: Any) -> Dump:
    """The dump with fields of one node of its only graph replaced."""
    (graph,) = dump.graphs
    nodes = [node.model_copy(update=fields) if node.index == index else node for node in graph.nodes]
    return dump.model_copy(update={"graphs": (graph.model_copy(update={"nodes": tuple(nodes)}),)})


def nodes_of(dump: Dump) -> tuple[Node, ...]:
    (graph,) = dump.graphs
    return graph.nodes


def graph_of(dump: Dump) -> Graph:
    (graph,) = dump.graphs
    return graph
