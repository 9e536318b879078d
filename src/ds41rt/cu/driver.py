"""`GpuBackend` on a real GPU, through the CUDA driver API. The only file that imports `cuda.bindings`.

Handles outside of this file are the driver's own, as ints. One thread at a time uses a backend; the device's primary
context is made current in whichever thread calls. Nothing here knows layers, experts or settings, and nothing calls the
driver from a finaliser: `close` does the work.
"""

import itertools
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from ds41rt.cu import ptx
from ds41rt.cu.backend import (
    CaptureStatus,
    DeviceBuffer,
    Event,
    Graph,
    GraphExec,
    HostBuffer,
    MemoryRange,
    Stream,
)
from ds41rt.cu.call_site import caller
from ds41rt.cu.capture_probe import CaptureProbe
from ds41rt.cu.driver_errors import (
    CAPTURE_CODES,
    HINTS,
    LOST,
    DriverLog,
    call_optional,
    driver_text,
    is_missing,
    to_status,
)
from ds41rt.cu.driver_foreign import ForeignDriver, attached, find_allocation
from ds41rt.cu.driver_graph import Captured, GraphReader
from ds41rt.cu.driver_kernels import DriverLaunch, Kernels
from ds41rt.cu.driver_probe import DriverProbe
from ds41rt.cu.driver_state import CaptureState, EventState, GraphState, PinnedMemory, StreamState, gc_pause
from ds41rt.cu.graphinfo import GraphInfo
from ds41rt.cu.kernel import KernelLaunch, KernelSpec
from ds41rt.cu.probe import DeviceInfo, GpuState, Probe, check_fork, probe_driver
from ds41rt.cu.probe import optional_calls as ask_optional_calls
from ds41rt.cu.result import CudaError, OutOfDeviceMemory, Status
from ds41rt.errors import InputError, UnsupportedError

_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2
_HOST_ALLOC_PORTABLE_MAPPED = 1 | 2
_FREED_KEPT = 4096


class _Bound(threading.local):
    """Which backend's context is current in this thread, by its key."""

    key = 0


_bound = _Bound()
_keys = itertools.count(1)


def _unbind_child() -> None:
    _bound.key = 0


# So that a forked child fails at its first call with our sentence instead of anything else.
os.register_at_fork(after_in_child=_unbind_child)


def probe() -> Probe:
    """Whether there is a GPU, as a typed answer. Raises `UnsupportedError` in a forked child (use 'spawn')."""
    try:
        cu = _bindings()
    except ImportError as e:
        return Probe(GpuState.NO_BINDINGS, str(e))
    return probe_driver(cu)


def optional_calls() -> dict[str, bool]:
    """Of the calls that older drivers lack, which there are here; only after `probe` has found a GPU."""
    return ask_optional_calls(_bindings())


def why_not(ordinal: int = 0) -> str | None:
    """One sentence that says why device `ordinal` cannot be used with the PTX files we have; None if it can."""
    found = probe()
    if found.state is not GpuState.READY:
        return str(found)
    try:
        _preflight(found, ordinal, None)
    except (InputError, UnsupportedError) as e:
        return str(e)
    return None


def foreign_driver() -> AbstractContextManager[ForeignDriver]:
    """Others' graphs and memory, see `cu.backend.foreign_graphs`."""
    try:
        cu = _bindings()
    except ImportError as e:
        raise UnsupportedError(f"{GpuState.NO_BINDINGS.value}: {e}; pip install cuda-bindings") from e
    return attached(cu)


def _bindings() -> Any:
    from cuda.bindings import driver

    return driver


def _preflight(found: Probe, ordinal: int, ptx_folder: Path | None) -> tuple[DeviceInfo, ptx.Selection]:
    """The device and the PTX modules for it, before anything is loaded."""
    if found.state is not GpuState.READY:
        raise UnsupportedError(f"no GPU can be used: {found}; `ds41rt doctor` says more, --backend host needs none")
    if not 0 <= ordinal < len(found.devices):
        raise InputError(f"device {ordinal} does not exist; the driver lists {len(found.devices)}, counted from 0")
    device = found.devices[ordinal]
    return device, ptx.choose(ptx.load_manifest(ptx_folder), found.driver_version, device.capability)


class DriverBackend:
    """Device `ordinal` through its primary context.

    `bindings` takes the place of `cuda.bindings.driver`, `ptx_folder` that of the installed PTX files. Raises
    `UnsupportedError` when there is no usable GPU, driver or PTX (the message says what to do), `InputError` for a
    device that does not exist and `CudaError` when the context cannot be made.

    After an error that loses the context every call fails with that first error until `close`. Memory views of pinned
    buffers are dead after `free_pinned` or `close`: do not touch them then.
    """

    name = "cuda"

    def __init__(self, ordinal: int = 0, *, bindings: Any = None, ptx_folder: Path | None = None) -> None:
        if bindings is None:
            try:
                bindings = _bindings()
            except ImportError as e:
                raise UnsupportedError(f"{GpuState.NO_BINDINGS.value}: {e}; pip install cuda-bindings") from e
        self._cu = cu = bindings
        self._pid = os.getpid()
        found = probe_driver(cu)
        self.driver_version = found.driver_version
        self.device, self.ptx = _preflight(found, ordinal, ptx_folder)
        self.device_name = self.device.name
        self.unified_memory = self.device.integrated
        self._log = DriverLog(cu)
        # The first error that lost the context. `_key` is 0 from then on, so that every call takes the slow path.
        self._down: CudaError | None = None
        self._closed = False
        self._key = 0
        self._buffers: dict[int, DeviceBuffer | HostBuffer] = {}
        self._freed: deque[DeviceBuffer] = deque(maxlen=_FREED_KEPT)
        self._streams: dict[int, StreamState] = {}
        self._events: dict[int, EventState] = {}
        self._graphs: dict[int, GraphState] = {}
        self._execs: dict[int, GraphState] = {}
        self._captures: list[CaptureState] = []
        self._kernels = Kernels(cu, self._call, self.device, self.driver_version, self.ptx)
        self._relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._raw_device = self._setup("cuDeviceGet", ordinal)
        self._context = self._setup("cuDevicePrimaryCtxRetain", self._raw_device)
        (code,) = cu.cuCtxSetCurrent(self._context)
        if code:
            cu.cuDevicePrimaryCtxRelease(self._raw_device)
            raise self._setup_error("cuCtxSetCurrent", code)
        self._key = _bound.key = next(_keys)

    def _setup(self, call: str, *args: Any) -> Any:
        code, value = getattr(self._cu, call)(*args)
        if code:
            raise self._setup_error(call, code)
        return value

    def _setup_error(self, call: str, code: Any) -> CudaError:
        text = f"device {self.device.ordinal} ({self.device.name}): {driver_text(self._cu, code)}"
        return CudaError(to_status(code), call, self._with_log(text))

    # Memory

    def alloc(self, name: str, nbytes: int) -> DeviceBuffer:
        ptr = self._allocate("cuMemAlloc", "device", name, nbytes)
        buf = DeviceBuffer(name, int(ptr), nbytes)
        self._buffers[buf.ptr] = buf
        return buf

    def free(self, buf: DeviceBuffer) -> None:
        self._free("cuMemFree", buf)

    def alloc_pinned(self, name: str, nbytes: int) -> HostBuffer:
        ptr = int(self._allocate("cuMemHostAlloc", "pinned", name, nbytes, _HOST_ALLOC_PORTABLE_MAPPED))
        code, device_ptr = self._cu.cuMemHostGetDevicePointer(ptr, 0)
        if code:
            self._cu.cuMemFreeHost(ptr)
            raise self._fail("cuMemHostGetDevicePointer", code, f"pinned buffer {name!r}")
        buf = HostBuffer(name, ptr, nbytes, np.asarray(PinnedMemory(ptr, nbytes)), True, int(device_ptr))
        self._buffers[ptr] = buf
        return buf

    def free_pinned(self, buf: HostBuffer) -> None:
        self._free("cuMemFreeHost", buf)

    def memory_info(self) -> tuple[int, int]:
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def ledger(self) -> tuple[DeviceBuffer | HostBuffer, ...]:
        return tuple(self._buffers.values())

    def freed(self) -> tuple[DeviceBuffer, ...]:
        return tuple(self._freed)

    def find_allocation(self, addr: int) -> MemoryRange | None:
        self._enter("cuPointerGetAttribute")
        found = find_allocation(self._cu, addr)
        if found is None:
            self._log.news()  # of its refusal
        return found

    def live(self) -> dict[str, int]:
        """How many objects of each kind exist; all zero after `close`. For leak checks."""
        return {
            "buffers": len(self._buffers),
            "streams": len(self._streams),
            "events": len(self._events),
            "graphs": len(self._graphs),
            "graph_execs": len(self._execs),
            "captures": len(self._captures),
        }

    # Streams and events

    def create_stream(self, name: str) -> Stream:
        (raw,) = self._call("cuStreamCreate", _STREAM_NON_BLOCKING, detail=f"stream {name!r}")
        self._streams[int(raw)] = StreamState(name, raw)
        return Stream(int(raw))

    def destroy_stream(self, stream: Stream) -> None:
        state = self._stream("cuStreamDestroy", stream)
        if state.capture is not None and state is state.capture.streams[0]:
            self._abort(state)  # nobody could end it afterwards
        self._call("cuStreamDestroy", state.raw, stream=state)
        del self._streams[stream]
        if state.capture is not None:
            state.capture.streams.remove(state)

    def synchronize(self, stream: Stream) -> None:
        state = self._stream("cuStreamSynchronize", stream)
        (code,) = self._cu.cuStreamSynchronize(state.raw)
        if code:
            raise self._fail("cuStreamSynchronize", code, "", state)
        if state.pageable:
            state.pageable.clear()

    def create_event(self, name: str, *, timing: bool = False) -> Event:
        (raw,) = self._call("cuEventCreate", 0 if timing else _EVENT_DISABLE_TIMING, detail=f"event {name!r}")
        self._events[int(raw)] = EventState(name, raw)
        return Event(int(raw))

    def destroy_event(self, event: Event) -> None:
        state = self._event("cuEventDestroy", event)
        self._call("cuEventDestroy", state.raw, detail=f"event {state.name!r}")
        del self._events[event]

    def record(self, event: Event, stream: Stream) -> None:
        state = self._stream("cuEventRecord", stream)
        point = self._event("cuEventRecord", event)
        (code,) = self._cu.cuEventRecord(point.raw, state.raw)
        if code:
            raise self._fail("cuEventRecord", code, f"event {point.name!r}", state)
        point.capture = state.capture

    def wait(self, stream: Stream, event: Event) -> None:
        state = self._stream("cuStreamWaitEvent", stream)
        point = self._event("cuStreamWaitEvent", event)
        (code,) = self._cu.cuStreamWaitEvent(state.raw, point.raw, 0)
        if code:
            raise self._fail("cuStreamWaitEvent", code, f"waits for {self._about(point, code)}", state)
        if point.capture is not None and state.capture is None and point.capture in self._captures:
            state.capture = point.capture
            point.capture.streams.append(state)

    def query_event(self, event: Event) -> bool:
        point = self._event("cuEventQuery", event)
        (code,) = self._cu.cuEventQuery(point.raw)
        if code and int(code) != Status.NOT_READY:
            raise self._fail("cuEventQuery", code, self._about(point, code))
        return not code

    def synchronize_event(self, event: Event) -> None:
        point = self._event("cuEventSynchronize", event)
        (code,) = self._cu.cuEventSynchronize(point.raw)
        if code:
            raise self._fail("cuEventSynchronize", code, self._about(point, code))

    def elapsed_us(self, start: Event, end: Event) -> float:
        call = "cuEventElapsedTime"
        first, last = self._event(call, start), self._event(call, end)
        try:
            (milliseconds,) = self._call(call, first.raw, last.raw, detail=f"events {first.name!r} and {last.name!r}")
        except RuntimeError as e:
            # Bindings 13 call a form that drivers before CUDA 12.8 do not have; of 12.9 the name is the old form.
            if not is_missing(e):
                raise
            raise UnsupportedError(f"device times need a driver of CUDA 12.8 or newer with these bindings: {e}") from e
        return 1000.0 * float(milliseconds)

    # Work

    def copy_h2d(
        self, dst: int, src: HostBuffer, nbytes: int, stream: Stream, src_off: int = 0, label: str = ""
    ) -> None:
        call = "cuMemcpyHtoDAsync"
        state = self._stream(call, stream)
        self._check_host(call, label, src, src_off, nbytes, state)
        (code,) = self._cu.cuMemcpyHtoDAsync(dst, src.ptr + src_off, nbytes, state.raw)
        if code:
            raise self._fail(call, code, f"copy {label!r} from {src.name!r}", state)
        if state.capture is not None:
            self._note(state, label)

    def copy_d2h(
        self, dst: HostBuffer, src: int, nbytes: int, stream: Stream, dst_off: int = 0, label: str = ""
    ) -> None:
        call = "cuMemcpyDtoHAsync"
        state = self._stream(call, stream)
        self._check_host(call, label, dst, dst_off, nbytes, state)
        if not dst.array.flags.writeable:
            raise CudaError(Status.INVALID_VALUE, call, f"copy {label!r}: host buffer {dst.name!r} is read-only")
        (code,) = self._cu.cuMemcpyDtoHAsync(dst.ptr + dst_off, src, nbytes, state.raw)
        if code:
            raise self._fail(call, code, f"copy {label!r} to {dst.name!r}", state)
        if state.capture is not None:
            self._note(state, label)

    def copy_d2d(self, dst: int, src: int, nbytes: int, stream: Stream, label: str = "") -> None:
        call = "cuMemcpyDtoDAsync"
        state = self._stream(call, stream)
        if nbytes < 0:
            raise CudaError(Status.INVALID_VALUE, call, f"copy {label!r}: {nbytes} bytes")
        (code,) = self._cu.cuMemcpyDtoDAsync(dst, src, nbytes, state.raw)
        if code:
            raise self._fail(call, code, f"copy {label!r}", state)
        if state.capture is not None:
            self._note(state, label)

    def fill(self, dst: int, byte: int, nbytes: int, stream: Stream, label: str = "") -> None:
        call = "cuMemsetD8Async"
        state = self._stream(call, stream)
        if nbytes < 0:
            raise CudaError(Status.INVALID_VALUE, call, f"fill {label!r}: {nbytes} bytes")
        if not 0 <= byte <= 255:
            raise CudaError(Status.INVALID_VALUE, call, f"fill {label!r}: byte must be in 0..255, is {byte}")
        (code,) = self._cu.cuMemsetD8Async(dst, byte, nbytes, state.raw)
        if code:
            raise self._fail(call, code, f"fill {label!r}", state)
        if state.capture is not None:
            self._note(state, label)

    def prepare(self, spec: KernelSpec, args: Mapping[str, int | float], label: str) -> KernelLaunch:
        """As the protocol says. Raises TypeError or ValueError for wrong arguments, and `UnsupportedError` for a kernel
        that has no device version or whose launch does not fit this device."""
        self._enter("cuModuleGetFunction")
        return self._kernels.prepare(spec, args, label, capturing=bool(self._captures))

    def launch(self, launch: KernelLaunch, stream: Stream) -> None:
        state = self._stream("cuLaunchKernel", stream)
        if not isinstance(launch, DriverLaunch) or launch.owner is not self._kernels:
            raise CudaError(Status.INVALID_VALUE, "cuLaunchKernel", f"{launch!r} was not prepared by this backend")
        (code,) = launch.start(state.raw, launch.params, 0)
        if code:
            raise self._fail("cuLaunchKernel", code, f"kernel {launch.label!r} ({launch.spec.name})", state)
        if state.capture is not None:
            self._note(state, launch.label, launch)

    # Capture and graphs

    def begin_capture(self, stream: Stream) -> None:
        call = "cuStreamBeginCapture"
        state = self._stream(call, stream)
        if state.capture is not None:
            detail = f"already takes part in the capture that stream {state.capture.streams[0].name!r} began"
            raise CudaError(Status.ILLEGAL_STATE, call, f"stream {state.name!r} {detail}")
        gc_pause.begin()
        try:
            self._call(call, state.raw, self._relaxed, stream=state)
        except BaseException:
            gc_pause.end()
            raise
        state.capture = CaptureState(state)
        self._captures.append(state.capture)

    def capture_status(self, stream: Stream) -> CaptureStatus:
        return self._status(self._stream("cuStreamIsCapturing", stream))

    def end_capture(self, stream: Stream) -> Graph:
        call = "cuStreamEndCapture"
        state = self._stream(call, stream)
        capture = state.capture
        code, raw = self._cu.cuStreamEndCapture(state.raw)
        if code:
            error = self._fail(call, code, "is not capturing" if capture is None else "", state)
            # An end that failed has ended the capture all the same, except on the wrong stream (903): ask.
            if capture is not None and self._key and self._status(state) is CaptureStatus.NONE:
                self._forget_capture(capture)
            raise error
        made = GraphState(raw)
        if capture is not None:
            made.keep = tuple(capture.keep)
            made.captured = capture.captured
            made.missing = capture.missing
            self._forget_capture(capture)
        self._graphs[int(raw)] = made
        return Graph(int(raw))

    def abort_capture(self, stream: Stream) -> None:
        # Status first, then at most one end: ending what is not capturing, or twice, is an error of its own.
        state = self._stream("cuStreamIsCapturing", stream)
        self._abort(state)

    def instantiate(self, graph: Graph) -> GraphExec:
        self._enter("cuGraphInstantiate")
        found = self._graphs.get(graph)
        if found is None:
            raise self._bad_handle("cuGraphInstantiate", "graph", graph)
        (raw,) = self._call("cuGraphInstantiate", found.raw, 0, detail=f"graph {graph:#x}")
        self._execs[int(raw)] = GraphState(raw, found.keep)  # the driver has what is in it copied
        return GraphExec(int(raw))

    def launch_graph(self, graph_exec: GraphExec, stream: Stream) -> None:
        state = self._stream("cuGraphLaunch", stream)
        try:
            found = self._execs[graph_exec]
        except KeyError:
            raise self._bad_handle("cuGraphLaunch", "executable graph", graph_exec) from None
        (code,) = self._cu.cuGraphLaunch(found.raw, state.raw)
        if code:
            raise self._fail("cuGraphLaunch", code, f"executable graph {graph_exec:#x}", state)

    def destroy_graph(self, graph: Graph) -> None:
        self._destroy_graph("cuGraphDestroy", "graph", self._graphs, graph)

    def destroy_exec(self, graph_exec: GraphExec) -> None:
        self._destroy_graph("cuGraphExecDestroy", "executable graph", self._execs, graph_exec)

    def describe_graph(self, graph: Graph) -> GraphInfo:
        self._enter("cuGraphGetNodes")
        found = self._graphs.get(graph)
        if found is None:
            raise self._bad_handle("cuGraphGetNodes", "graph", graph)
        try:
            return GraphReader(self._cu, self._call, found.captured, found.missing).read(found.raw)
        finally:
            self._log.news()  # lines about questions that it refused: they belong to no error

    def capture_probe(self) -> CaptureProbe:
        return DriverProbe(self._cu, self._call, self._log, self._streams)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._key = 0
        cu = self._cu
        if os.getpid() == self._pid:
            cu.cuCtxSetCurrent(self._context)
            self._release_all()
            cu.cuDevicePrimaryCtxRelease(self._raw_device)
            # Somebody else may hold the same context; if nobody does, it is gone and must not stay current.
            code, _, active = cu.cuDevicePrimaryCtxGetState(self._raw_device)
            if not code and not active:
                cu.cuCtxSetCurrent(None)
        for capture in self._captures[:]:
            self._forget_capture(capture)
        for table in (self._execs, self._graphs, self._events, self._streams, self._buffers):
            table.clear()
        self._kernels.clear()

    def _release_all(self) -> None:
        """Give everything back to the driver, as far as it takes it: after a lost context it refuses all of this."""
        cu = self._cu
        for capture in self._captures:
            code, raw = cu.cuStreamEndCapture(capture.streams[0].raw)
            if not code:
                cu.cuGraphDestroy(raw)
        cu.cuCtxSynchronize()
        for graph_exec in self._execs.values():
            cu.cuGraphExecDestroy(graph_exec.raw)
        for graph in self._graphs.values():
            cu.cuGraphDestroy(graph.raw)
        for event in self._events.values():
            cu.cuEventDestroy(event.raw)
        for stream in self._streams.values():
            cu.cuStreamDestroy(stream.raw)
        for module in self._kernels.modules.values():
            cu.cuModuleUnload(module)
        for buf in reversed(list(self._buffers.values())):
            if isinstance(buf, HostBuffer):
                cu.cuMemFreeHost(buf.ptr)
            else:
                cu.cuMemFree(buf.ptr)

    # Common to all calls

    def _enter(self, call: str) -> None:
        """Every call but `close` and the leak helpers passes here first."""
        if _bound.key != self._key:
            self._bind(call)

    def _bind(self, call: str) -> None:
        """The slow path: refuse a backend that is closed, lost or in a forked child; else make its context current."""
        if self._closed:
            raise CudaError(Status.DEINITIALIZED, call, "the backend was closed")
        check_fork()
        if self._down is not None:
            raise CudaError(self._down.status, call, f"an earlier error lost the context: {self._down}")
        (code,) = self._cu.cuCtxSetCurrent(self._context)
        if code:
            raise self._fail("cuCtxSetCurrent", code, f"before {call}")
        _bound.key = self._key

    def _call(self, call: str, *args: Any, detail: str = "", stream: StreamState | None = None) -> tuple[Any, ...]:
        """Enter and make one driver call; what it returned after the status."""
        self._enter(call)
        code, *values = getattr(self._cu, call)(*args)
        if code:
            raise self._fail(call, code, detail, stream)
        return tuple(values)

    def _fail(self, call: str, code: Any, detail: str, stream: StreamState | None = None) -> CudaError:
        """The error for a status: which object, what it means, the capture's first failure, the driver's log lines."""
        status = to_status(code)
        parts = [f"stream {stream.name!r} {detail}".rstrip() if stream is not None else detail]
        if int(code) != status or status is Status.UNKNOWN:
            parts.append(f"the driver says {driver_text(self._cu, code)}")
        if status in HINTS:
            parts.append(HINTS[status])
        capture = stream.capture if stream is not None else None
        if capture is not None and capture.failure:
            parts.append(f"the capture was invalidated by {capture.failure}")
        if status is Status.OUT_OF_MEMORY:
            unknown, free, total = self._cu.cuMemGetInfo()
            parts.append("" if unknown else f"{free} bytes of device memory are free of {total}")
        news = self._log.news()
        parts.append(f"driver log: {news}" if news else "")
        text = "; ".join(p for p in parts if p)
        error = OutOfDeviceMemory(call, text) if status is Status.OUT_OF_MEMORY else CudaError(status, call, text)
        error.driver_log = news
        if int(code) in LOST:
            self._down = error
            self._key = 0
        else:
            self._blame(error)
        return error

    def _with_log(self, text: str) -> str:
        news = self._log.news()
        return f"{text}; driver log: {news}" if news else text

    def _blame(self, error: CudaError) -> None:
        """Keep the first error of every open capture that is invalid now: all later ones only say 901."""
        for capture in self._captures:
            if not capture.failure:
                code, status = self._cu.cuStreamIsCapturing(capture.streams[0].raw)
                if not code and int(status) == CaptureStatus.INVALIDATED:
                    capture.failure = f"{error} (called at {caller()})"

    def _allocate(self, call: str, kind: str, name: str, nbytes: int, *flags: int) -> Any:
        self._enter(call)
        if nbytes < 1:
            raise CudaError(Status.INVALID_VALUE, call, f"buffer {name!r} of {nbytes} bytes; ask for at least 1")
        (ptr,) = self._call(call, nbytes, *flags, detail=f"{kind} buffer {name!r} needs {nbytes} bytes")
        return ptr

    def _free(self, call: str, buf: DeviceBuffer | HostBuffer) -> None:
        self._enter(call)
        if self._buffers.get(buf.ptr) != buf:
            why = "was not allocated by this backend, or was freed already"
            raise CudaError(Status.INVALID_VALUE, call, f"buffer {buf.name!r} ({buf.ptr:#x}) {why}")
        self._call(call, buf.ptr, detail=f"buffer {buf.name!r}")
        self._freed.append(DeviceBuffer(buf.name, getattr(buf, "device_ptr", buf.ptr), buf.nbytes))
        del self._buffers[buf.ptr]

    def _stream(self, call: str, stream: Stream) -> StreamState:
        if _bound.key != self._key:
            self._bind(call)
        try:
            return self._streams[stream]
        except KeyError:
            raise self._bad_handle(call, "stream", stream) from None

    def _event(self, call: str, event: Event) -> EventState:
        if _bound.key != self._key:
            self._bind(call)
        try:
            return self._events[event]
        except KeyError:
            raise self._bad_handle(call, "event", event) from None

    @staticmethod
    def _about(point: EventState, code: Any) -> str:
        """An event in an error. A capture that has ended or failed leaves its events void: a driver says only 1."""
        void = point.capture is not None and int(code) == Status.INVALID_VALUE
        why = ", last recorded in a capture that has ended or is invalid; record it again first" if void else ""
        return f"event {point.name!r}{why}"

    @staticmethod
    def _bad_handle(call: str, kind: str, handle: int) -> CudaError:
        return CudaError(Status.INVALID_HANDLE, call, f"{kind} {handle:#x} was destroyed, or never created here")

    def _check_host(self, call: str, label: str, buf: HostBuffer, off: int, nbytes: int, stream: StreamState) -> None:
        """Refuse a copy that leaves its host buffer, and keep the buffer alive while the driver may need it."""
        if nbytes < 0 or off < 0 or off + nbytes > buf.nbytes:
            detail = f"copy {label!r}: {nbytes} bytes at {off} do not fit host buffer {buf.name!r} of {buf.nbytes}"
            raise CudaError(Status.INVALID_VALUE, call, detail)
        if buf.pinned and self._buffers.get(buf.ptr) is not buf:
            detail = f"copy {label!r}: pinned buffer {buf.name!r} is not allocated by this backend (or was freed)"
            raise CudaError(Status.INVALID_VALUE, call, detail)
        if stream.capture is not None:
            stream.capture.keep.append(buf)
        elif not buf.pinned:
            stream.pageable.append(buf)

    def _note(self, stream: StreamState, label: str, launch: KernelLaunch | None = None) -> None:
        """Remember what became of a captured call: the one node that the stream's next work would depend on."""
        capture = stream.capture
        if capture is None:
            return
        for name in ("cuStreamGetCaptureInfo_v3", "cuStreamGetCaptureInfo"):  # 12.9 has both, 13 the newer as plain
            found = call_optional(self._cu, name, stream.raw)
            if found is None:
                continue
            code, values = found
            nodes: Sequence[Any] = () if code else values[3] or ()
            if len(nodes) == 1:
                # A node that is known already: the call captured nothing, as one of no bytes does.
                capture.captured.setdefault(int(nodes[0]), Captured(label, stream.name, launch))
            return
        capture.missing.add("cuStreamGetCaptureInfo")

    def _status(self, stream: StreamState) -> CaptureStatus:
        (status,) = self._call("cuStreamIsCapturing", stream.raw, stream=stream)
        return CaptureStatus(int(status))

    def _abort(self, stream: StreamState) -> None:
        capture = stream.capture
        status = self._status(stream)
        if status is not CaptureStatus.NONE:
            origin = stream if capture is None else capture.streams[0]
            code, raw = self._cu.cuStreamEndCapture(origin.raw)
            if not code:
                self._call("cuGraphDestroy", raw, detail="of an aborted capture")
            elif int(code) not in CAPTURE_CODES:
                raise self._fail("cuStreamEndCapture", code, "aborted", origin)
        if capture is not None:
            self._forget_capture(capture)

    def _forget_capture(self, capture: CaptureState) -> None:
        """The capture has ended: its streams are free, and an event recorded in it can no longer be joined."""
        for stream in capture.streams:
            stream.capture = None
        self._captures.remove(capture)
        gc_pause.end()

    def _destroy_graph(self, call: str, kind: str, table: dict[int, GraphState], handle: int) -> None:
        self._enter(call)
        found = table.get(handle)
        if found is None:
            raise self._bad_handle(call, kind, handle)
        self._call(call, found.raw, detail=f"{kind} {handle:#x}")
        del table[handle]
