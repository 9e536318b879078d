"""A backend that passes every call on and notes what goes wrong around captures: which call, from where, what became.

For tools that explain a failed capture. Nothing here knows layers, or whose code is at fault.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from ds41rt.cu.backend import CaptureStatus, GpuBackend, Stream
from ds41rt.cu.call_site import Frame, call_stack
from ds41rt.cu.capture_probe import CaptureInfo
from ds41rt.cu.kernel import KernelLaunch
from ds41rt.cu.result import CudaError, Status

_VERBS = {
    name: inspect.signature(function)
    for name, function in vars(GpuBackend).items()
    if inspect.isfunction(function) and name[0] != "_" and name not in ("capture_probe", "close", "freed", "ledger")
}
_WORK = frozenset({"copy_h2d", "copy_d2h", "copy_d2d", "fill", "launch"})
# Their errors are of interest even when no capture is open.
_ABOUT_CAPTURES = frozenset({"begin_capture", "end_capture", "instantiate"})


@dataclass(slots=True)
class Fork:
    """A stream that joined a capture: where, and where it got its last work. Stacks begin with the innermost frame."""

    stream: str
    ident: int
    stack: tuple[Frame, ...]
    last_work: tuple[Frame, ...] | None = None


@dataclass(slots=True)
class Trouble:
    """One call that failed, or that left a capture invalid without saying so (`error` is None then).

    `before` and `after` are the status of the capture it concerns. `label` is the call's own, `near` that of the
    nearest labelled call: the last one before it in the capture, else the next one. `loose` are the forks that an end
    found unjoined.
    """

    method: str
    error: Exception | None
    stream: str | None
    label: str
    near: str
    before: CaptureStatus
    after: CaptureStatus
    stack: tuple[Frame, ...]
    loose: tuple[Fork, ...] = ()

    @property
    def broke_capture(self) -> bool:
        return self.before is not self.after and self.after is CaptureStatus.INVALIDATED


@dataclass(slots=True)
class _Open:
    origin: Stream
    status: CaptureStatus


class RecordingBackend:
    """Has every method of the backend it wraps. Single-threaded, as any backend.

    `troubles` in the order they happened; `captures` and `n_nodes` count what ended well; `last_end` is where a capture
    was last ended through here.
    """

    def __init__(self, backend: GpuBackend) -> None:
        self._raw = backend
        self._probe = backend.capture_probe()
        self._open: dict[int, _Open] = {}
        self._forks: dict[int, Fork] = {}
        self._last_label = ""
        self.troubles: list[Trouble] = []
        self.captures = 0
        self.n_nodes = 0
        self.last_end: tuple[Frame, ...] | None = None

    @property
    def as_backend(self) -> GpuBackend:
        """This, where a `GpuBackend` is asked for."""
        return cast(GpuBackend, self)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._raw, name)
        if name not in _VERBS:
            return attribute
        passing = partial(self._pass, name, attribute)
        setattr(self, name, passing)
        return passing

    def open_captures(self) -> list[Stream]:
        """The streams that began a capture which is still open."""
        return [capture.origin for capture in self._open.values()]

    def _pass(self, method: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        named = _VERBS[method].bind(self, *args, **kwargs).arguments
        launch, stream = named.get("launch"), named.get("stream")
        label: str = launch.label if isinstance(launch, KernelLaunch) else named.get("label", "")
        if label:
            self._place(label)
        if not self._open and method not in _ABOUT_CAPTURES:
            return call(*args, **kwargs)
        if method == "begin_capture":
            self._last_label = ""
        info = self._info(stream)
        loose = self._loose(stream, info) if method == "end_capture" else ()
        # An invalid capture has no ident on a driver: then its origin tells.
        own = [i for i, capture in self._open.items() if i == info.ident or capture.origin == stream]
        before = self._look()
        error = None
        try:
            result = call(*args, **kwargs)
        except Exception as e:
            error = e
            raise
        finally:
            # An interrupt comes through here as well; it is nobody's trouble.
            after = self._look()
            broken = [i for i, status in after.items() if before[i] is not status is CaptureStatus.INVALIDATED]
            if error is not None or broken:
                concerned = [*own, *broken, *before, 0][0]
                outside = CaptureStatus.NONE
                statuses = before.get(concerned, outside), after.get(concerned, outside)
                self._note(method, error, stream, label, statuses, loose)
        self._passed(method, stream, info, result)
        return result

    def _note(
        self,
        method: str,
        error: Exception | None,
        stream: Stream | None,
        label: str,
        statuses: tuple[CaptureStatus, CaptureStatus],
        loose: tuple[Fork, ...],
    ) -> None:
        unjoined = isinstance(error, CudaError) and error.status is Status.STREAM_CAPTURE_UNJOINED
        self.troubles.append(
            Trouble(
                method,
                error,
                None if stream is None else self._probe.name(stream),
                label,
                label or self._last_label,
                *statuses,
                call_stack(),
                loose if unjoined else (),
            )
        )

    def _passed(self, method: str, stream: Stream | None, before: CaptureInfo, result: Any) -> None:
        """Bookkeeping after a call that succeeded."""
        if stream is None:
            return
        if method == "begin_capture":
            self._open[self._info(stream).ident] = _Open(stream, CaptureStatus.ACTIVE)
        elif method == "end_capture":
            self.captures += 1
            self.n_nodes += self._probe.n_nodes(result)
            self.last_end = call_stack()
        elif method == "wait" and before.status is CaptureStatus.NONE:
            now = self._info(stream)
            if now.status is CaptureStatus.ACTIVE:
                self._forks[stream] = Fork(self._probe.name(stream), now.ident, call_stack())
        elif method in _WORK and stream in self._forks:
            self._forks[stream].last_work = call_stack()

    def _place(self, label: str) -> None:
        self._last_label = label
        for trouble in reversed(self.troubles):
            if trouble.near:
                break
            trouble.near = label

    def _info(self, stream: Stream | None) -> CaptureInfo:
        """What the stream takes part in; nothing, if it is gone or the context is lost."""
        if stream is not None and self._probe.knows(stream):
            try:
                return self._probe.info(stream)
            except CudaError:
                pass
        return CaptureInfo(CaptureStatus.NONE)

    def _look(self) -> dict[int, CaptureStatus]:
        """The status of every capture that was open, by ident; those that have ended are forgotten."""
        found = {}
        for ident, capture in list(self._open.items()):
            info = self._info(capture.origin)
            found[ident] = capture.status = info.status
            if info.status is CaptureStatus.NONE:
                del self._open[ident]
        return found

    def _loose(self, stream: Stream | None, info: CaptureInfo) -> tuple[Fork, ...]:
        """Forks of the capture that are not joined back into `stream`. A stream that was destroyed can no longer be
        asked: it counts if it had work."""
        if stream is None or info.status is not CaptureStatus.ACTIVE:
            return ()
        forks = {s: fork for s, fork in self._forks.items() if fork.ident == info.ident}
        alive = [s for s in forks if self._probe.knows(s)]
        try:
            loose = self._probe.unjoined(stream, alive)
        except CudaError:
            loose = []
        loose += [s for s in forks if s not in alive and forks[s].last_work is not None]
        return tuple(forks[s] for s in loose)
