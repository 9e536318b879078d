"""`CaptureProbe` over the CUDA driver. The bindings come in as an argument; only raw handles go to the driver.

A stream here may be anybody's, so nothing is looked up in the backend's own tables but names.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ds41rt.cu.backend import CaptureStatus, Graph
from ds41rt.cu.capture_probe import CaptureInfo, CaptureMode
from ds41rt.cu.driver_errors import CAPTURE_CODES, Call, DriverLog
from ds41rt.cu.driver_state import StreamState
from ds41rt.cu.result import CudaError


class DriverProbe:
    """`call` enters the context, makes a driver call and raises `CudaError`; `streams` are those that have names."""

    default_mode: CaptureMode = "global"

    def __init__(self, cu: Any, call: Call, log: DriverLog, streams: Mapping[int, StreamState]) -> None:
        self._call = call
        self._log = log
        self._streams = streams
        modes = cu.CUstreamCaptureMode
        self._modes = {
            "global": modes.CU_STREAM_CAPTURE_MODE_GLOBAL,
            "thread_local": modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            "relaxed": modes.CU_STREAM_CAPTURE_MODE_RELAXED,
        }
        # The oldest forms refuse graphs whose edges carry data; 12.9 has the newest under these suffixes.
        self._get_info = _newest(cu, "cuStreamGetCaptureInfo", "_v3")
        self._get_edges = _newest(cu, "cuGraphGetEdges", "_v2")

    def name(self, stream: int) -> str:
        state = self._streams.get(stream)
        return hex(stream) if state is None else state.name

    def knows(self, stream: int) -> bool:
        return stream in self._streams

    def info(self, stream: int) -> CaptureInfo:
        status, ident, _, nodes = self._info(stream)
        if status is not CaptureStatus.ACTIVE:  # the driver says nothing else of another one
            return CaptureInfo(status)
        return CaptureInfo(status, int(ident), tuple(int(node) for node in nodes or ()))

    def unjoined(self, origin: int, streams: Sequence[int]) -> list[int]:
        status, _, graph, nodes = self._info(origin)
        if status is not CaptureStatus.ACTIVE:
            return []
        before: dict[int, list[int]] = {}
        for first, second in self._edges(graph):
            before.setdefault(second, []).append(first)
        reached: set[int] = set()
        todo = [int(node) for node in nodes or ()]
        while todo:
            node = todo.pop()
            if node not in reached:
                reached.add(node)
                todo += before.get(node, ())
        return [s for s in streams if not reached.issuperset(self.info(s).frontier)]

    def _info(self, stream: int) -> tuple[CaptureStatus, int, Any, Any]:
        status, ident, graph, nodes, *_ = self._call(self._get_info, stream)
        return CaptureStatus(int(status)), ident, graph, nodes

    def _edges(self, graph: Any) -> list[tuple[int, int]]:
        count = self._call(self._get_edges, graph, 0)[-1]
        if not count:
            return []
        first, second, *_ = self._call(self._get_edges, graph, count)
        return [(int(a), int(b)) for a, b in zip(first[:count], second[:count], strict=True)]

    def begin(self, stream: int, mode: CaptureMode) -> None:
        self._call("cuStreamBeginCapture", stream, self._modes[mode])

    def end(self, stream: int) -> int:
        (graph,) = self._call("cuStreamEndCapture", stream)
        try:
            return self.n_nodes(graph)
        finally:
            self._call("cuGraphDestroy", graph)

    def abort(self, stream: int) -> None:
        if self._info(stream)[0] is CaptureStatus.NONE:
            return
        try:
            (graph,) = self._call("cuStreamEndCapture", stream)
        except CudaError as error:
            if int(error.status) not in CAPTURE_CODES:
                raise
        else:
            self._call("cuGraphDestroy", graph)

    def n_nodes(self, graph: Graph) -> int:
        return int(self._call("cuGraphGetNodes", graph, 0)[-1])

    def log(self) -> str:
        return self._log.news()


def _newest(cu: Any, name: str, suffix: str) -> str:
    return name + suffix if hasattr(cu, name + suffix) else name
