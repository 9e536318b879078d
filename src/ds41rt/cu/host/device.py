"""The host backend: `GpuBackend` on a simulated device, where kernels are their NumPy references.

This file maps handles to objects, checks arguments and turns faults into status codes; the rules themselves live beside
it. One thread owns a backend: nothing here takes a lock. Nothing here knows layers, experts or settings.
"""

from collections.abc import Callable, Mapping
from types import CodeType

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
from ds41rt.cu.capture_probe import CaptureProbe
from ds41rt.cu.graphinfo import GraphInfo
from ds41rt.cu.host.capture import Capture
from ds41rt.cu.host.command import Command, Copy, Fill, Stamp
from ds41rt.cu.host.faults import Faults
from ds41rt.cu.host.footprint import call_site
from ds41rt.cu.host.graph import GraphLaunch, Node, describe
from ds41rt.cu.host.kernels import HostLaunch
from ds41rt.cu.host.memory import AccessFault, Memory
from ds41rt.cu.host.pinned import Watcher, watched
from ds41rt.cu.host.probe import HostProbe
from ds41rt.cu.host.race import Clock, RaceDetector, StreamClock
from ds41rt.cu.host.race_report import Race, RaceError
from ds41rt.cu.host.stream import EventState, Op, Randomized, StreamState, make_schedule
from ds41rt.cu.kernel import KernelLaunch, KernelSpec
from ds41rt.cu.result import CudaError, Status


class _Exec:
    """An executable graph and its last launch, which the next one has to come after."""

    __slots__ = ("clock", "last", "launch")

    def __init__(self, launch: GraphLaunch) -> None:
        self.launch = launch
        self.last: Op | None = None
        self.clock: Clock = {}


class HostBackend:
    """A simulated CUDA device with deferred execution.

    `schedule` decides when enqueued work runs: "lazy" (nothing before something waits, and then only what that wait
    depends on), "eager" (at once) or "random:SEED" (any legal order). Device and pinned memory are limited to
    `memory_nbytes` and `pinned_nbytes`. Raises `InputError` for an unknown schedule.

    An access outside of an allocation fails when it executes, with a sticky code: every later call fails with that
    first error until `close`. An exception in a kernel's reference comes through as it is, and loses the context too
    (LAUNCH_FAILED), because the kernel has done half of its work. A destroyed stream, event or graph that is in flight
    still completes where something waits for it; `close` drops work that nobody waited for.

    With `race_detection`, two unordered accesses to the same bytes, one of them a write, are put on `races` under
    every schedule alike, and raised as a `RaceError` by the next `synchronize`, `synchronize_event` or `query_event`:
    on entry, before anything is waited for, or, if running the work brought them up, once it was waited for. The error
    is raised once and costs nothing but the call, which can be made again; `close` raises none. Order comes from
    streams, events, the edges of a graph, launches of one executable, and from what the host has waited for.

    Accesses are those of copies, fills and kernels (as declared, and through pointer tables as found at the execution)
    and the host's: a free, and uses of a pinned buffer's `array` and its views. Past NumPy (`readinto`, `memoryview`)
    a host write is seen only if it changes bytes that an enqueued copy, or a kernel's parameter, still reads, and only
    when that is waited for; the same holds for all pageable memory, where reads by the host are not seen at all.
    Threads of the host are taken for one.

    `stage_pageable` reads the pageable source of a copy at the call, as a driver may. `faults` plants failures.
    """

    name = "host"
    device_name = "simulated device"
    unified_memory = True

    def __init__(
        self,
        schedule: str = "lazy",
        *,
        memory_nbytes: int = 1 << 36,
        pinned_nbytes: int = 1 << 36,
        race_detection: bool = True,
        stage_pageable: bool = False,
    ) -> None:
        self.memory = Memory(memory_nbytes, pinned_nbytes)
        self._detector = RaceDetector(self.memory) if race_detection else None
        if self._detector is not None:
            self.memory.on_spans = self._detector.spans
        self._stage_pageable = stage_pageable
        self._schedule = make_schedule(schedule, self.memory)
        self._breathe = self._schedule.breathe if isinstance(self._schedule, Randomized) else None
        # Why no further call is possible: the first sticky error, or that the backend was closed.
        self._down: CudaError | None = None
        self._closed = False
        self._last_handle = 0
        self._streams: dict[int, StreamState] = {}
        self._events: dict[int, EventState] = {}
        self._graphs: dict[int, tuple[Node, ...]] = {}
        self._execs: dict[int, _Exec] = {}
        self.faults = Faults(self._streams, self._schedule.slow)

    # Memory

    def alloc(self, name: str, nbytes: int) -> DeviceBuffer:
        self._enter("cuMemAlloc")
        buf = self.memory.alloc_device(name, nbytes)
        if self._detector is not None:
            self._detector.allocated(buf, None)
        return buf

    def free(self, buf: DeviceBuffer) -> None:
        self._free("cuMemFree", buf)

    def alloc_pinned(self, name: str, nbytes: int) -> HostBuffer:
        self._enter("cuMemHostAlloc")
        buf = self.memory.alloc_pinned(name, nbytes)
        if self._detector is None:
            return buf
        bucket = self._detector.allocated(buf, buf.array)
        return self.memory.replace_array(buf, watched(buf.array, Watcher(self._detector, bucket, buf.ptr)))

    def free_pinned(self, buf: HostBuffer) -> None:
        self._free("cuMemFreeHost", buf)

    def _free(self, call: str, buf: DeviceBuffer | HostBuffer) -> None:
        self._enter(call)
        if self._detector is not None and self.memory.owns(buf):
            self._detector.freed(buf)
        self.memory.free(call, buf)

    def memory_info(self) -> tuple[int, int]:
        self._enter("cuMemGetInfo")
        return self.memory.device_nbytes - self.memory.device_used, self.memory.device_nbytes

    def ledger(self) -> tuple[DeviceBuffer | HostBuffer, ...]:
        return self.memory.buffers()

    def freed(self) -> tuple[DeviceBuffer, ...]:
        return self.memory.freed()

    def find_allocation(self, addr: int) -> MemoryRange | None:
        return self.memory.find(addr)

    def live(self) -> dict[str, int]:
        """How many objects of each kind exist; all zero after `close`. For leak checks."""
        return {
            "buffers": len(self.memory.buffers()),
            "streams": len(self._streams),
            "events": len(self._events),
            "graphs": len(self._graphs),
            "graph_execs": len(self._execs),
            "captures": len({id(s.capture) for s in self._streams.values() if s.capture is not None}),
        }

    @property
    def races(self) -> tuple[Race, ...]:
        """Every race found so far, raised already or not; empty without race detection."""
        return () if self._detector is None else tuple(self._detector.races)

    # Streams and events

    def create_stream(self, name: str) -> Stream:
        self._enter("cuStreamCreate")
        handle = self._new_handle()
        state = self._streams[handle] = StreamState(name, handle)
        if self._detector is not None:
            state.clock = StreamClock(name, handle)
        self.faults.stream_created(handle, name)
        return Stream(handle)

    def destroy_stream(self, stream: Stream) -> None:
        state = self._stream("cuStreamDestroy", stream)
        if state.capture is not None:
            state.capture.drop_stream(state)
        del self._streams[stream]

    def synchronize(self, stream: Stream) -> None:
        call = "cuStreamSynchronize"
        state = self._stream(call, stream)
        if state.capture is not None:
            detail = f"stream {state.name!r} is capturing and cannot be waited for"
            raise state.capture.invalidate(Status.STREAM_CAPTURE_UNSUPPORTED, call, detail)
        self._raise_races(call)
        if state.waits:
            self._drive(call, self._schedule.submit, state.append(None))
        if state.tail is not None:
            self._drive(call, self._schedule.finish, state.tail)
        if state.clock is not None:
            self._waited(call, state.clock.now())

    def create_event(self, name: str, *, timing: bool = False) -> Event:
        self._enter("cuEventCreate")
        handle = self._new_handle()
        self._events[handle] = EventState(name, timing)
        return Event(handle)

    def destroy_event(self, event: Event) -> None:
        self._event("cuEventDestroy", event)
        del self._events[event]

    def record(self, event: Event, stream: Stream) -> None:
        call = "cuEventRecord"
        state = self._stream(call, stream)
        point = self._find_event(call, event)
        if state.capture is not None:
            state.capture.require_valid(state, call)
            point.record(None, state.capture, state.frontier, {})
            return
        if point.timing:
            point.stamp = Stamp(point.name)
            self._drive(call, self._schedule.submit, state.append(point.stamp))
        elif state.waits:
            self._drive(call, self._schedule.submit, state.append(None))
        point.record(state.tail, None, (), {} if state.clock is None else state.clock.now())

    def wait(self, stream: Stream, event: Event) -> None:
        call = "cuStreamWaitEvent"
        state = self._stream(call, stream)
        point = self._find_event(call, event)
        if Capture.wait(state, point, call):
            return
        if point.op is not None and not point.op.done:
            state.waits.append(point.op)
        if state.clock is not None:
            state.clock.join(point.clock)

    def query_event(self, event: Event) -> bool:
        """As the protocol says. An event that is still out gets one step nearer by being asked, so polling ends."""
        point = self._waitable("cuEventQuery", event)
        self._raise_races("cuEventQuery")
        if point.op is None or point.op.done:
            self._waited("cuEventQuery", point.clock)
            return True
        self._drive("cuEventQuery", self._schedule.advance, point.op)
        return False

    def synchronize_event(self, event: Event) -> None:
        point = self._waitable("cuEventSynchronize", event)
        self._raise_races("cuEventSynchronize")
        if point.op is not None:
            self._drive("cuEventSynchronize", self._schedule.finish, point.op)
        self._waited("cuEventSynchronize", point.clock)

    def elapsed_us(self, start: Event, end: Event) -> float:
        first, last = self._stamp(start), self._stamp(end)
        return (last.time_ns - first.time_ns) / 1000

    def _stamp(self, event: Event) -> Stamp:
        """The time of the event's last record, which must be one that has a time."""
        call = "cuEventElapsedTime"
        state = self._event(call, event)
        if state.capture is not None:
            if state.capture.status is CaptureStatus.ACTIVE:
                detail = f"event {state.name!r} was last recorded in a capture, where no time passes"
                raise CudaError(Status.CAPTURED_EVENT, call, detail)
            raise CudaError(Status.INVALID_VALUE, call, f"event {state.name!r} was {state.capture.void()}")
        if state.stamp is None or state.op is None:
            why = "was never recorded" if state.timing else "was made without timing"
            raise CudaError(Status.INVALID_HANDLE, call, f"event {state.name!r} {why}")
        if not state.op.done:
            raise CudaError(Status.NOT_READY, call, f"event {state.name!r} has not completed yet; wait for it first")
        return state.stamp

    # Work

    def copy_h2d(
        self, dst: int, src: HostBuffer, nbytes: int, stream: Stream, src_off: int = 0, label: str = ""
    ) -> None:
        call = "cuMemcpyHtoDAsync"
        state = self._stream(call, stream)
        self._check_host(call, label, src, src_off, nbytes)
        if self._stage_pageable and not src.pinned and state.capture is None:
            src = HostBuffer.pageable(src.name, src.array[src_off : src_off + nbytes].copy())
            src_off = 0
        self._check_device(call, f"copy {label!r} (h2d) destination", dst, nbytes)
        self._append(call, state, Copy("h2d", label, dst, src, nbytes, src_off))

    def copy_d2h(
        self, dst: HostBuffer, src: int, nbytes: int, stream: Stream, dst_off: int = 0, label: str = ""
    ) -> None:
        call = "cuMemcpyDtoHAsync"
        state = self._stream(call, stream)
        self._check_host(call, label, dst, dst_off, nbytes)
        if not dst.array.flags.writeable:
            raise CudaError(Status.INVALID_VALUE, call, f"copy {label!r}: host buffer {dst.name!r} is read-only")
        self._check_device(call, f"copy {label!r} (d2h) source", src, nbytes)
        self._append(call, state, Copy("d2h", label, dst, src, nbytes, dst_off))

    def copy_d2d(self, dst: int, src: int, nbytes: int, stream: Stream, label: str = "") -> None:
        call = "cuMemcpyDtoDAsync"
        state = self._stream(call, stream)
        self._check_nbytes(call, f"copy {label!r}", nbytes)
        self._check_device(call, f"copy {label!r} (d2d) source", src, nbytes)
        self._check_device(call, f"copy {label!r} (d2d) destination", dst, nbytes)
        self._append(call, state, Copy("d2d", label, dst, src, nbytes))

    def fill(self, dst: int, byte: int, nbytes: int, stream: Stream, label: str = "") -> None:
        call = "cuMemsetD8Async"
        state = self._stream(call, stream)
        self._check_nbytes(call, f"fill {label!r}", nbytes)
        if not 0 <= byte <= 255:
            raise CudaError(Status.INVALID_VALUE, call, f"fill {label!r}: byte must be in 0..255, is {byte}")
        if state.capture is None:  # a captured fill is taken as it comes
            self._check_device(call, f"fill {label!r} destination", dst, nbytes)
        self._append(call, state, Fill(label, dst, byte, nbytes))

    def prepare(self, spec: KernelSpec, args: Mapping[str, int | float], label: str) -> KernelLaunch:
        """As the protocol says. Raises TypeError or ValueError for wrong arguments; pointers are checked when they
        are used."""
        self._enter("cuModuleGetFunction")
        return HostLaunch(self.memory, spec, args, label)

    def launch(self, launch: KernelLaunch, stream: Stream) -> None:
        call = "cuLaunchKernel"
        state = self._stream(call, stream)
        if not isinstance(launch, HostLaunch) or launch.memory is not self.memory:
            raise CudaError(Status.INVALID_VALUE, call, f"{launch!r} was not prepared by this backend")
        self._append(call, state, launch)

    # Capture and graphs

    def begin_capture(self, stream: Stream) -> None:
        call = "cuStreamBeginCapture"
        state = self._stream(call, stream)
        if state.capture is not None:
            origin = state.capture.origin.name
            detail = f"stream {state.name!r} already takes part in the capture that stream {origin!r} began"
            raise CudaError(Status.ILLEGAL_STATE, call, detail)
        Capture(state)

    def capture_status(self, stream: Stream) -> CaptureStatus:
        state = self._stream("cuStreamIsCapturing", stream)
        return CaptureStatus.NONE if state.capture is None else state.capture.status

    def end_capture(self, stream: Stream) -> Graph:
        state = self._stream("cuStreamEndCapture", stream)
        if state.capture is None:
            raise CudaError(Status.ILLEGAL_STATE, "cuStreamEndCapture", f"stream {state.name!r} is not capturing")
        nodes = state.capture.end(state)
        handle = self._new_handle()
        self._graphs[handle] = nodes
        return Graph(handle)

    def abort_capture(self, stream: Stream) -> None:
        state = self._stream("cuStreamEndCapture", stream)
        if state.capture is not None:
            state.capture.release()

    def instantiate(self, graph: Graph) -> GraphExec:
        nodes = self._find_graph("cuGraphInstantiate", graph)
        handle = self._new_handle()
        self._execs[handle] = _Exec(GraphLaunch(nodes, f"graph {handle}"))
        return GraphExec(handle)

    def launch_graph(self, graph_exec: GraphExec, stream: Stream) -> None:
        call = "cuGraphLaunch"
        state = self._stream(call, stream)
        found = self._find_exec(call, graph_exec)
        if state.capture is not None:
            detail = f"stream {state.name!r} is capturing; an executable graph cannot be recorded into another graph"
            raise state.capture.invalidate(Status.STREAM_CAPTURE_UNSUPPORTED, call, detail)
        if found.last is not None and not found.last.done:
            state.waits.append(found.last)
        if state.clock is not None:
            state.clock.join(found.clock)
        found.last = self._append(call, state, found.launch)
        if state.clock is not None:
            found.clock = state.clock.now()

    def destroy_graph(self, graph: Graph) -> None:
        self._find_graph("cuGraphDestroy", graph)
        del self._graphs[graph]

    def destroy_exec(self, graph_exec: GraphExec) -> None:
        self._enter("cuGraphExecDestroy")
        self._find_exec("cuGraphExecDestroy", graph_exec)
        del self._execs[graph_exec]

    def describe_graph(self, graph: Graph) -> GraphInfo:
        return describe(self._find_graph("cuGraphGetNodes", graph))

    def capture_probe(self) -> CaptureProbe:
        return HostProbe(self, self._streams, self._graphs)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._down = CudaError(Status.DEINITIALIZED, "cuCtxDestroy", "the backend was closed")
        for state in self._streams.values():
            if state.capture is not None:
                state.capture.release()
        self._streams.clear()
        self._events.clear()
        self._graphs.clear()
        self._execs.clear()
        self.memory.free_all()

    # Common to all calls

    def _enter(self, call: str) -> None:
        """Every call but `close` and the leak helpers passes here first."""
        if self._down is not None:
            if self._closed:
                raise CudaError(Status.DEINITIALIZED, call, "the backend was closed")
            raise CudaError(self._down.status, call, f"an earlier error lost the context: {self._down}")
        planted = self.faults.strike(call)
        if planted is not None:
            if planted.sticky:
                self._down = planted
            raise planted
        # With races to report nothing runs by itself: what they break must not hide them.
        if self._breathe is not None and not (self._detector is not None and self._detector.fresh):
            self._drive(call, self._breathe)

    def _append(self, call: str, state: StreamState, command: Command) -> Op | None:
        """Enqueue on the stream, or record in its capture (None)."""
        if state.capture is not None:
            state.capture.add(state, command, call, self._site())
            return None
        op = state.append(command)
        if self._detector is not None and state.clock is not None:
            op.work = self._detector.enqueue(state.clock, command)
        self._drive(call, self._schedule.submit, op)
        return op

    def _site(self) -> tuple[CodeType, int] | None:
        return None if self._detector is None else call_site()

    def _waited(self, call: str, clock: Clock) -> None:
        """The host has waited for what `clock` says."""
        if self._detector is not None:
            self._detector.wait_host(clock)
            self._raise_races(call)

    def _raise_races(self, call: str) -> None:
        if self._detector is not None and self._detector.fresh:
            raise RaceError(call, tuple(self._detector.take()))

    def _drive(self, call: str, work: Callable[..., None], *args: Op) -> None:
        """Let the schedule run operations; an error in one loses the context.

        An interrupt does not: no device loses its context to Ctrl-C. The operation it hit stays queued and runs again
        with the next wait, so that what was enqueued still happens (a copy whose bytes never arrived would be worse).
        """
        try:
            work(*args)
        except AccessFault as fault:
            self._down = CudaError(fault.status, call, fault.text)
            raise self._down from None
        except Exception as exc:
            notes = "; ".join(getattr(exc, "__notes__", ()))
            self._down = CudaError(Status.LAUNCH_FAILED, call, f"{type(exc).__name__}: {exc} {notes}".rstrip())
            raise

    def _new_handle(self) -> int:
        self._last_handle += 1
        return self._last_handle

    def _stream(self, call: str, stream: Stream) -> StreamState:
        self._enter(call)
        state = self._streams.get(stream)
        if state is None:
            raise self._bad_handle(call, "stream", stream)
        return state

    def _event(self, call: str, event: Event) -> EventState:
        self._enter(call)
        return self._find_event(call, event)

    def _find_event(self, call: str, event: Event) -> EventState:
        state = self._events.get(event)
        if state is None:
            raise self._bad_handle(call, "event", event)
        return state

    def _waitable(self, call: str, event: Event) -> EventState:
        """An event that the host may ask about; 907 if it was last recorded in an open capture, 1 if that has ended or
        is invalid."""
        state = self._event(call, event)
        if state.capture is None:
            return state
        if state.capture.status is not CaptureStatus.ACTIVE:
            raise CudaError(Status.INVALID_VALUE, call, f"event {state.name!r} was {state.capture.void()}")
        detail = f"event {state.name!r} was last recorded in a capture; use another event for work outside of it"
        raise state.capture.invalidate(Status.CAPTURED_EVENT, call, detail)

    def _find_graph(self, call: str, graph: Graph) -> tuple[Node, ...]:
        self._enter(call)
        nodes = self._graphs.get(graph)
        if nodes is None:
            raise self._bad_handle(call, "graph", graph)
        return nodes

    def _find_exec(self, call: str, graph_exec: GraphExec) -> _Exec:
        found = self._execs.get(graph_exec)
        if found is None:
            raise self._bad_handle(call, "executable graph", graph_exec)
        return found

    def _bad_handle(self, call: str, kind: str, handle: int) -> CudaError:
        why = "was destroyed or is of another kind" if 0 < handle <= self._last_handle else "was never created"
        return CudaError(Status.INVALID_HANDLE, call, f"{kind} {handle} {why}")

    def _check_host(self, call: str, label: str, buf: HostBuffer, off: int, nbytes: int) -> None:
        if nbytes < 0 or off < 0 or off + nbytes > buf.nbytes:
            detail = f"copy {label!r}: {nbytes} bytes at {off} do not fit host buffer {buf.name!r} of {buf.nbytes}"
            raise CudaError(Status.INVALID_VALUE, call, detail)
        if buf.pinned and not self.memory.owns(buf):
            detail = f"copy {label!r}: pinned buffer {buf.name!r} is not allocated by this backend (or was freed)"
            raise CudaError(Status.INVALID_VALUE, call, detail)

    def _check_device(self, call: str, what: str, addr: int, nbytes: int) -> None:
        """A driver checks the range of a copy or fill at the call, to the byte, and refuses it without harm."""
        try:
            self.memory.bytes(addr, nbytes)
        except AccessFault as fault:
            raise CudaError(Status.INVALID_VALUE, call, fault.inside(what).text) from None

    @staticmethod
    def _check_nbytes(call: str, what: str, nbytes: int) -> None:
        if nbytes < 0:
            raise CudaError(Status.INVALID_VALUE, call, f"{what}: {nbytes} bytes")
