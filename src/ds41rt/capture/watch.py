"""A backend that refuses to replay a graph whose baked pointers went stale: for debugging, setting `capture_watch`.

A replay writes to the addresses that were captured, whoever has that memory by then. Here every launch first compares
them with the ledger. What is behind pointers in device memory is not baked and not looked at. This file must not know
layers, segments or sequences.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ds41rt.capture.keeper import GraphKeeper
from ds41rt.cu.backend import DeviceBuffer, GpuBackend, Graph, GraphExec, HostBuffer, Stream
from ds41rt.cu.graphinfo import CopyNode, FillNode, GraphInfo, GraphNode, KernelNode
from ds41rt.errors import Ds41Error


class StaleGraphError(Ds41Error):
    """A graph would be replayed over memory that was freed or replaced since its capture. It was not launched."""


@dataclass(frozen=True, slots=True)
class _Baked:
    """One address in a graph: who uses it, and the allocation that held it when the graph was made executable."""

    node: str
    role: str
    addr: int
    buf: DeviceBuffer | HostBuffer


class WatchedBackend(GraphKeeper):
    """Passes every call on to `backend`, except launches of graphs that bake a pointer into memory that is gone.

    Pointers that lay in no allocation of `backend` when the graph was made executable are others', and not watched.
    """

    def __init__(self, backend: GpuBackend) -> None:
        super().__init__(backend)
        self._baked: dict[GraphExec, tuple[_Baked, ...]] = {}

    def instantiate(self, graph: Graph) -> GraphExec:
        graph_exec = super().instantiate(graph)
        self._baked[graph_exec] = tuple(_owned(self.infos[graph_exec], _Ledger(self._backend.ledger())))
        return graph_exec

    def destroy_exec(self, graph_exec: GraphExec) -> None:
        super().destroy_exec(graph_exec)
        self._baked.pop(graph_exec, None)

    def launch_graph(self, graph_exec: GraphExec, stream: Stream) -> None:
        """Raises `StaleGraphError` naming graph, node, parameter and buffer; nothing is enqueued then."""
        # By identity: another buffer may have got the same name, place and size.
        live = {id(buf) for buf in self._backend.ledger()}
        stale = [baked for baked in self._baked.get(graph_exec, ()) if id(baked.buf) not in live]
        if stale:
            raise StaleGraphError(self._sentence(graph_exec, stale))
        self._backend.launch_graph(graph_exec, stream)

    def close(self) -> None:
        self._baked.clear()
        super().close()

    def _sentence(self, graph_exec: GraphExec, stale: list[_Baked]) -> str:
        nodes = self.infos[graph_exec].nodes
        graph = f"graph {graph_exec:#x} of {len(nodes)} nodes ({_name(nodes[0])} to {_name(nodes[-1])})"
        first = stale[0]
        now = _Ledger(self._backend.ledger()).holder(first.addr)
        gone = "was freed" if now is None else f"was replaced by {now.name!r}"
        more = f", and {len(stale) - 1} more stale pointers" if len(stale) > 1 else ""
        return (
            f"{graph} was not launched: node {first.node!r} bakes {first.role!r} as {first.addr:#x} in "
            f"{first.buf.name!r}, which {gone}{more}; capture the graph again, or keep the buffer until the graph is "
            "destroyed"
        )


class _Ledger:
    """Live allocations by address; a pinned buffer has two, the device's and the host's, which may be the same."""

    def __init__(self, buffers: Iterable[DeviceBuffer | HostBuffer]) -> None:
        found = []
        for buf in buffers:
            starts = {buf.ptr} if isinstance(buf, DeviceBuffer) else {buf.ptr, buf.device_ptr}
            found += [(start, buf) for start in starts]
        found.sort(key=lambda entry: entry[0])
        self._starts = [start for start, _ in found]
        self._buffers = [buf for _, buf in found]

    def holder(self, addr: int) -> DeviceBuffer | HostBuffer | None:
        at = bisect_right(self._starts, addr) - 1
        if at < 0 or addr >= self._starts[at] + self._buffers[at].nbytes:
            return None
        return self._buffers[at]


def _owned(info: GraphInfo, ledger: _Ledger) -> Iterator[_Baked]:
    """The graph's addresses that lie in the ledger."""
    for node in info.nodes:
        if isinstance(node.content, GraphInfo):
            yield from _owned(node.content, ledger)
            continue
        for role, addr in _addresses(node):
            buf = ledger.holder(addr)
            if buf is not None:
                yield _Baked(_name(node), role, addr, buf)


def _addresses(node: GraphNode) -> Iterator[tuple[str, int]]:
    """(role, word) of everything in a node that may be an address."""
    content = node.content
    if isinstance(content, CopyNode):
        # Ordinary host memory is in no ledger, and its addresses are a space of their own.
        for role, addr, space in (("dst", content.dst, content.dst_space), ("src", content.src, content.src_space)):
            if space != "pageable":
                yield role, addr
    elif isinstance(content, FillNode):
        yield "dst", content.dst
    elif isinstance(content, KernelNode) and node.launch is not None:
        # As prepared: the driver of an older machine may not show parameters.
        for param, value in zip(node.launch.spec.params, node.launch.args, strict=True):
            if isinstance(value, int):
                yield param.name, value
    elif isinstance(content, KernelNode):
        for p in content.params or ():
            for at in range(-p.off % 8, len(p.value) - 7, 8):
                yield f"parameter at {p.off + at}", int.from_bytes(p.value[at : at + 8], "little")


def _name(node: GraphNode) -> str:
    if node.label:
        return node.label
    return (isinstance(node.content, KernelNode) and node.content.name) or f"{node.kind} {node.index}"
