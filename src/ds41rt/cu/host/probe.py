"""`CaptureProbe` over the simulated device. Looking is no call of the backend: it runs no work and meets no fault."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ds41rt.cu.backend import CaptureStatus, Graph, Stream
from ds41rt.cu.capture_probe import CaptureInfo, CaptureMode
from ds41rt.cu.host.graph import Node, unreached
from ds41rt.cu.host.stream import StreamState
from ds41rt.cu.result import CudaError, Status
from ds41rt.errors import UnsupportedError

if TYPE_CHECKING:
    from ds41rt.cu.host.device import HostBackend


class HostProbe:
    """`streams` and `graphs` are the backend's own."""

    default_mode: CaptureMode = "relaxed"

    def __init__(
        self, backend: "HostBackend", streams: Mapping[int, StreamState], graphs: Mapping[int, tuple[Node, ...]]
    ) -> None:
        self._backend = backend
        self._streams = streams
        self._graphs = graphs

    def name(self, stream: int) -> str:
        state = self._streams.get(stream)
        return hex(stream) if state is None else state.name

    def knows(self, stream: int) -> bool:
        return stream in self._streams

    def info(self, stream: int) -> CaptureInfo:
        state = self._state(stream)
        if state.capture is None:
            return CaptureInfo(CaptureStatus.NONE)
        return CaptureInfo(state.capture.status, state.capture.ident, state.frontier)

    def unjoined(self, origin: int, streams: Sequence[int]) -> list[int]:
        state = self._state(origin)
        if state.capture is None:
            return []
        loose = set(unreached(state.capture.nodes, state.frontier))
        return [s for s in streams if not loose.isdisjoint(self._state(s).frontier)]

    def _state(self, stream: int) -> StreamState:
        state = self._streams.get(stream)
        if state is None:
            raise CudaError(Status.INVALID_HANDLE, "cuStreamGetCaptureInfo", f"stream {stream} does not exist")
        return state

    def begin(self, stream: int, mode: CaptureMode) -> None:
        if mode != "relaxed":
            raise UnsupportedError(
                f"capture mode {mode!r}: the host backend captures in relaxed mode alone, which allows allocations and "
                "other streams' waits; use the backend cuda for the other modes"
            )
        self._backend.begin_capture(Stream(stream))

    def end(self, stream: int) -> int:
        graph = self._backend.end_capture(Stream(stream))
        n_nodes = self.n_nodes(graph)
        self._backend.destroy_graph(graph)
        return n_nodes

    def abort(self, stream: int) -> None:
        self._backend.abort_capture(Stream(stream))

    def n_nodes(self, graph: Graph) -> int:
        return len(self._graphs[graph])

    def log(self) -> str:
        return ""
