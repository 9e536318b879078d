"""The objects behind the handles of `DriverBackend`: streams, events, captures, graphs, pinned memory.

They remember what error messages need, and they keep alive what the driver still reads. Nothing here calls the driver.
"""

import gc
from typing import Any

from ds41rt.cu.backend import HostBuffer
from ds41rt.cu.driver_graph import Captured


class GcPause:
    """No cyclic garbage collection while a capture is open.

    The collector may run finalisers of anybody's objects, and one that unloads a module or frees memory kills a
    capture that has nothing to do with it.
    """

    def __init__(self) -> None:
        self._open = 0
        self._was_enabled = False

    def begin(self) -> None:
        if self._open == 0:
            self._was_enabled = gc.isenabled()
            gc.disable()
        self._open += 1

    def end(self) -> None:
        self._open -= 1
        if self._open == 0 and self._was_enabled:
            gc.enable()


gc_pause = GcPause()


class StreamState:
    """A stream, the capture it takes part in, and pageable buffers whose copies may still be in flight."""

    __slots__ = ("capture", "name", "pageable", "raw")

    def __init__(self, name: str, raw: Any) -> None:
        self.name = name
        self.raw = raw
        self.capture: CaptureState | None = None
        self.pageable: list[HostBuffer] = []


class EventState:
    __slots__ = ("capture", "name", "raw")

    def __init__(self, name: str, raw: Any) -> None:
        self.name = name
        self.raw = raw
        self.capture: CaptureState | None = None


class CaptureState:
    """An open capture: its streams (the origin first), the host buffers it copies, what its nodes were captured from by
    node handle, which calls were missing to learn that, and what went wrong first."""

    __slots__ = ("captured", "failure", "keep", "missing", "streams")

    def __init__(self, origin: StreamState) -> None:
        self.streams = [origin]
        self.keep: list[HostBuffer] = []
        self.captured: dict[int, Captured] = {}
        self.missing: set[str] = set()
        self.failure = ""


class GraphState:
    """A graph or an executable one, the host buffers that its copies read or write, and for a graph what the capture
    knew of its nodes."""

    __slots__ = ("captured", "keep", "missing", "raw")

    def __init__(self, raw: Any, keep: tuple[HostBuffer, ...] = ()) -> None:
        self.raw = raw
        self.keep = keep
        self.captured: dict[int, Captured] = {}
        self.missing: set[str] = set()


class PinnedMemory:
    """What NumPy needs to see driver memory as an array; the array keeps this alive, not the memory."""

    def __init__(self, ptr: int, nbytes: int) -> None:
        self.__array_interface__ = {"data": (ptr, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
