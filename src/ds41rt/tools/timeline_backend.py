"""A backend that notes every call made through it, and times the work behind the calls on the device.

Device times come from timing events around each graph launch and around each run of like work on a stream; a span of
the device therefore includes the gaps in it. Recorded work (in a capture) gets none: it does not execute. Must not know
engines or layers.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from ds41rt.cu.backend import CaptureStatus, Event, GpuBackend, Graph, GraphExec, HostBuffer, Stream
from ds41rt.cu.kernel import KernelLaunch

Work = Literal["kernels", "graph", "copy in", "copy out", "copy", "fill"]


@dataclass(slots=True)
class HostSpan:
    """Something that took time on the host: `track` is "step", "driver", or the name of another thread."""

    track: str
    category: str
    name: str
    start_ns: int
    end_ns: int = 0  # until it ends
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class DeviceSpan:
    """A graph launch, or a run of like work, on one stream. `cause` is the call that enqueued the first of it.

    Times are set when the token is over, on the host's clock.
    """

    stream: str
    kind: Work
    name: str
    start: Event
    end: Event
    cause: HostSpan
    last: str = ""
    count: int = 0
    start_ns: float = 0.0
    end_ns: float = 0.0


@dataclass(slots=True)
class Token:
    """One recorded step: everything on the host and on the device, and what the engine counted."""

    position: int
    token: int
    host: list[HostSpan] = field(default_factory=list)
    device: list[DeviceSpan] = field(default_factory=list)
    counted: dict[str, Any] = field(default_factory=dict)
    # Half of what passed between asking for the time on the device and having it.
    clock_error_us: float = 0.0

    def calls(self, *categories: str) -> int:
        """How many calls into the backend are of these categories."""
        return sum(span.track == "driver" and span.category in categories for span in self.host)

    @property
    def start_ns(self) -> int:
        return self.host[0].start_ns

    @property
    def host_us(self) -> float:
        return (self.host[0].end_ns - self.host[0].start_ns) / 1000

    @property
    def busy_us(self) -> float:
        """Time during which something was on the device, whatever stream it was on."""
        busy, reached = 0.0, float("-inf")
        for span in sorted(self.device, key=lambda s: s.start_ns):
            busy += max(span.end_ns - max(span.start_ns, reached), 0.0)
            reached = max(reached, span.end_ns)
        return busy / 1000


class TimelineBackend:
    """Passes everything on. While a token is being recorded, also notes each call and times the work behind it."""

    def __init__(self, inner: GpuBackend) -> None:
        self._inner = inner
        self.token: Token | None = None
        self.graph_names: dict[int, str] = {}
        self._stream_names: dict[int, str] = {}
        self._origins: set[int] = set()  # streams with an open capture of their own
        self._open: dict[int, DeviceSpan] = {}
        self._made: list[Event] = []
        self._spare: list[Event] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    # What an engine calls in a step.

    def launch(self, launch: KernelLaunch, stream: Stream) -> None:
        with self._work("launch", "kernels", launch.label, stream):
            self._inner.launch(launch, stream)

    def launch_graph(self, graph_exec: GraphExec, stream: Stream) -> None:
        name = self.graph_names.get(graph_exec, "graph")
        with self._work("graph launch", "graph", name, stream):
            self._inner.launch_graph(graph_exec, stream)

    def copy_h2d(
        self, dst: int, src: HostBuffer, nbytes: int, stream: Stream, src_off: int = 0, label: str = ""
    ) -> None:
        with self._work("copy", "copy in", label, stream, nbytes):
            self._inner.copy_h2d(dst, src, nbytes, stream, src_off, label)

    def copy_d2h(
        self, dst: HostBuffer, src: int, nbytes: int, stream: Stream, dst_off: int = 0, label: str = ""
    ) -> None:
        with self._work("read-back", "copy out", label, stream, nbytes):
            self._inner.copy_d2h(dst, src, nbytes, stream, dst_off, label)

    def copy_d2d(self, dst: int, src: int, nbytes: int, stream: Stream, label: str = "") -> None:
        with self._work("copy", "copy", label, stream, nbytes):
            self._inner.copy_d2d(dst, src, nbytes, stream, label)

    def fill(self, dst: int, byte: int, nbytes: int, stream: Stream, label: str = "") -> None:
        with self._work("fill", "fill", label, stream, nbytes):
            self._inner.fill(dst, byte, nbytes, stream, label)

    def synchronize(self, stream: Stream) -> None:
        self._end_run(stream)
        with self._call("synchronisation", f"synchronize {self._name(stream)}"):
            self._inner.synchronize(stream)

    def synchronize_event(self, event: Event) -> None:
        with self._call("synchronisation", "synchronize event"):
            self._inner.synchronize_event(event)

    def record(self, event: Event, stream: Stream) -> None:
        with self._call("event", "record event"):
            self._inner.record(event, stream)

    def wait(self, stream: Stream, event: Event) -> None:
        self._end_run(stream)  # a run that waits in its middle would count the time of others
        with self._call("event", "wait for event"):
            self._inner.wait(stream, event)

    # Captures.

    def begin_capture(self, stream: Stream) -> None:
        self._end_run(stream)
        with self._call("capture", "begin capture"):
            self._inner.begin_capture(stream)
        self._origins.add(stream)

    def end_capture(self, stream: Stream) -> Graph:
        with self._call("capture", "end capture"):
            self._origins.discard(stream)
            return self._inner.end_capture(stream)

    def abort_capture(self, stream: Stream) -> None:
        self._inner.abort_capture(stream)
        self._origins.discard(stream)

    def instantiate(self, graph: Graph) -> GraphExec:
        with self._call("capture", "instantiate"):
            return self._inner.instantiate(graph)

    def create_stream(self, name: str) -> Stream:
        stream = self._inner.create_stream(name)
        self._stream_names[stream] = name
        return stream

    def destroy_stream(self, stream: Stream) -> None:
        self._inner.destroy_stream(stream)
        self._origins.discard(stream)

    def close_events(self) -> None:
        """Give back the events that the timeline itself made; more are made if recording goes on. Idempotent."""
        self._spare.clear()
        while self._made:
            self._inner.destroy_event(self._made[-1])
            self._made.pop()

    # Recording.

    @contextmanager
    def recording(self, token: Token, stream: Stream) -> Iterator[None]:
        """Record into `token` what happens in the block. The device's work has completed afterwards."""
        inner, anchor = self._inner, self._event()
        inner.synchronize(stream)
        before = time.perf_counter_ns()
        inner.record(anchor, stream)
        inner.synchronize_event(anchor)
        after = time.perf_counter_ns()
        token.clock_error_us = (after - before) / 2000
        self.token = token
        try:
            yield
            for open_stream in list(self._open):
                self._end_run(Stream(open_stream))
        finally:
            self.token = None
            self._open.clear()
        for span in token.device:
            inner.synchronize_event(span.end)
            span.start_ns = (before + after) / 2 + 1000 * inner.elapsed_us(anchor, span.start)
            span.end_ns = (before + after) / 2 + 1000 * inner.elapsed_us(anchor, span.end)
            self._spare += (span.start, span.end)
        self._spare.append(anchor)

    def _name(self, stream: Stream) -> str:
        return self._stream_names.get(stream, f"stream {stream}")

    @contextmanager
    def _call(self, category: str, name: str, **args: Any) -> Iterator[HostSpan | None]:
        token = self.token
        if token is None:
            yield None
            return
        span = HostSpan("driver", category, name, time.perf_counter_ns(), args=args)
        token.host.append(span)
        try:
            yield span
        finally:
            span.end_ns = time.perf_counter_ns()

    @contextmanager
    def _work(self, category: str, kind: Work, label: str, stream: Stream, nbytes: int | None = None) -> Iterator[None]:
        """A call that gives the device something to do, or that is recorded."""
        if self.token is None:
            yield
            return
        captured = self._captures(stream)
        args: dict[str, Any] = {"stream": self._name(stream)} | ({} if nbytes is None else {"nbytes": nbytes})
        run = None if captured else self._run(kind, label, stream)
        with self._call("recorded work" if captured else category, label, **args) as span:
            if run is not None and span is not None and run.count == 1:
                run.cause = span
            yield

    def _captures(self, stream: Stream) -> bool:
        """Whether the stream takes part in a capture: asked only while there is one."""
        return bool(self._origins) and self._inner.capture_status(stream) is not CaptureStatus.NONE

    def _run(self, kind: Work, label: str, stream: Stream) -> DeviceSpan:
        """The run that this work belongs to: the open one of its stream, or a new one."""
        run = self._open.get(stream)
        if run is None or run.kind != kind or kind == "graph":
            self._end_run(stream)
            start, end = self._event(), self._event()
            run = DeviceSpan(self._name(stream), kind, label, start, end, HostSpan("driver", "", "", 0))
            self._inner.record(start, stream)
            self._open[stream] = run
        run.last = label
        run.count += 1
        return run

    def _end_run(self, stream: Stream) -> None:
        run = self._open.pop(stream, None)
        if run is not None and self.token is not None:
            self._inner.record(run.end, stream)
            self.token.device.append(run)

    def _event(self) -> Event:
        if self._spare:
            return self._spare.pop()
        event = self._inner.create_event("timeline", timing=True)
        self._made.append(event)
        return event
