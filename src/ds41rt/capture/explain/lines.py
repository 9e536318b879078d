"""Runs a callable and finds the line of the user's code that broke a capture: after every line the streams are asked.

For captures whose calls do not pass through a backend of ours. `sys.settrace` reports lines; between two reports only
one line of the user's code can have run, the deepest one on the stack, so a status that changed was changed there.
Library functions report when they are called and when they return, which tells the innermost one that was inside.

Sees the thread that runs the callable, no other. Must not know which backend answers.
"""

import gc
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

from ds41rt.capture.explain.foreign_errors import code_of
from ds41rt.capture.explain.sources import Owner
from ds41rt.capture.explain.stream_objects import StreamObjects
from ds41rt.cu.backend import CaptureStatus
from ds41rt.cu.call_site import Frame
from ds41rt.cu.capture_probe import CaptureInfo, CaptureProbe
from ds41rt.cu.result import CudaError, Status

_NONE, _ACTIVE, _INVALID = CaptureStatus.NONE, CaptureStatus.ACTIVE, CaptureStatus.INVALIDATED
_OUTSIDE = CaptureInfo(_NONE)
_Trace = Callable[[FrameType, str, Any], Any]
_Raised = tuple[type[BaseException], BaseException, TracebackType]


@dataclass(slots=True)
class Moment:
    """Something that happened during one line of the user's code.

    `stack` begins with the innermost frame: library functions that were seen inside, then the line itself, which is
    `stack[users]`, then its callers; `users` is None where no line of the user's ran. `before` and `after` are the
    status of the stream's capture, `error` is an exception that was raised there, `log` what the driver wrote.
    `collected`: Python's garbage collector ran just then.
    """

    stream: int | None
    before: CaptureStatus
    after: CaptureStatus
    stack: tuple[Frame, ...]
    users: int | None
    error: BaseException | None = None
    log: str = ""
    collected: bool = False

    @property
    def line(self) -> Frame | None:
        return None if self.users is None else self.stack[self.users]

    @property
    def broke_capture(self) -> bool:
        return self.after is _INVALID and self.before is not _INVALID


@dataclass(slots=True)
class Joined:
    """A stream that joined the capture `ident` of another one: when, and when it got its last work."""

    ident: int
    at: Moment
    last_work: Moment | None = None


@dataclass(slots=True)
class Seen:
    """What the watch saw.

    `troubles`, in the order of time, are lines that broke a capture, and exceptions with a CUDA status code, caught or
    not. `begun` and `ended` are captures that began and ended. `joined` are the streams that were forked into one,
    `loose` those of them that were not joined back at the last line seen. `left` is the exception that left the
    callable, at the innermost line of the user's that it came through.
    """

    troubles: list[Moment] = field(default_factory=list)
    begun: list[Moment] = field(default_factory=list)
    ended: list[Moment] = field(default_factory=list)
    joined: dict[int, Joined] = field(default_factory=dict)
    loose: list[int] = field(default_factory=list)
    left: Moment | None = None


class LineWatch:
    """Watches `streams`, and those that the user's frames can see. One `run` per object.

    `origin` is one of the streams, if the caller has begun a capture on it.
    """

    def __init__(
        self, probe: CaptureProbe, owner: Owner, streams: tuple[int, ...], *, origin: int | None = None
    ) -> None:
        self.seen = Seen()
        self._probe = probe
        self._owner = owner
        self._objects = StreamObjects(owner, streams)
        self._states: dict[int, CaptureInfo] = {}
        # By capture, the stream that began it.
        self._origins: dict[int, int] = {}
        # The user's line that runs now: its frame, and the line (the frame's own may have moved on).
        self._at: tuple[FrameType, int] | None = None
        # What changed since that line began, and whether `seen.loose` is up to date.
        self._news: list[Moment] = []
        self._stale = False
        self._last_error: BaseException | None = None
        self._lost = False  # the driver does not answer any more
        self._collections = 0
        if origin is not None:
            self._states[origin] = info = probe.info(origin)
            self._origins[info.ident] = origin

    def run(self, call: Callable[..., object], *args: object) -> None:
        """Call it. An `Exception` that it raises becomes `seen.left`; an interrupt passes through."""
        before = sys.gettrace()
        gc.callbacks.append(self._collecting)
        sys.settrace(self._enter)
        try:
            call(*args)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - what the user's code raises is the answer
            sys.settrace(before)
            self.seen.left = self._leaving(error)
        finally:
            sys.settrace(before)
            gc.callbacks.remove(self._collecting)
            self._at = None

    def open_captures(self) -> list[int]:
        """The streams that began a capture which is still open. Raises `CudaError`."""
        return [s for s in self._origins.values() if self._probe.info(s).status is not _NONE]

    def look_for_loose(self) -> None:
        """Bring `seen.loose` up to date. Raises `CudaError`."""
        self._stale = False
        for ident, origin in self._origins.items():
            streams = [s for s, joined in self.seen.joined.items() if joined.ident == ident]
            if streams and self._states[origin].status is _ACTIVE:
                self.seen.loose = self._probe.unjoined(origin, streams)

    # ---- reports of the interpreter

    def _enter(self, frame: FrameType, event: str, arg: Any) -> _Trace | None:
        """A function is called, or a generator goes on. What changed was done by its caller."""
        if frame.f_globals is globals():
            return None
        if frame.f_back is not None:
            self._check(frame.f_back)
        if self._owner.is_users(frame.f_code.co_filename):
            self._begin_line(frame)
            return self._in_users
        frame.f_trace_lines = False
        return self._in_library

    def _in_users(self, frame: FrameType, event: str, arg: Any) -> _Trace:
        """A line begins, an exception is there, or the function returns (a generator: yields)."""
        self._objects.look(frame)
        self._check(frame, arg if event == "exception" else None)
        if self._stale:
            with suppress(CudaError):  # the next look at the streams will tell
                self.look_for_loose()
        if event == "line":
            self._begin_line(frame)
        elif event == "return":
            up = frame.f_back
            while up is not None and not _is_base(up) and not self._owner.is_users(up.f_code.co_filename):
                up = up.f_back
            self._begin_line(None if up is None or _is_base(up) else up)
        return self._in_users

    def _in_library(self, frame: FrameType, event: str, arg: Any) -> _Trace:
        self._check(frame, arg if event == "exception" else None)
        return self._in_library

    def _begin_line(self, frame: FrameType | None) -> None:
        self._at = None if frame is None else (frame, _line(frame))
        self._news.clear()

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        self._collections += phase == "start"

    # ---- what changed

    def _check(self, frame: FrameType, raised: _Raised | None = None) -> None:
        """Compare every stream with what it was; what changed was done by the line that ran up to now, in `frame` or
        below it."""
        if self._lost:
            return
        error = None if raised is None else raised[1]
        self._objects.look_at_torch()
        try:
            for stream in self._objects.handles():
                before, now = self._states.get(stream, _OUTSIDE), self._probe.info(stream)
                if now.status is _INVALID:
                    now = CaptureInfo(_INVALID, before.ident or now.ident)  # a driver does not say which one it was
                if now != before:
                    self._states[stream] = now
                    moment = self._moment(frame, stream, before.status, now.status, None)
                    self._news.append(moment)
                    self._note(moment, stream, before, now)
                    self._stale = True
        except CudaError as lost:
            self._lost = True
            error = error or lost
        # The same exception passes through many frames: it is news in the first.
        if error is not None and error is not self._last_error and (code := code_of(error)) is not None:
            self._last_error = error
            self._raised(frame, error, code)
        self._collections = 0

    def _raised(self, frame: FrameType, error: BaseException, code: int) -> None:
        """An exception with a status code is there. What changed in this line without a word, it was about; but code
        901 only says that something had happened before."""
        silent = [moment for moment in self._news if moment.error is None]
        broke = [moment for moment in silent if moment.broke_capture]
        if code == Status.STREAM_CAPTURE_INVALIDATED:
            silent = [moment for moment in silent if not moment.broke_capture]
        for moment in silent:
            moment.error = error
            moment.log = moment.log or self._probe.log()
        if not broke or broke[0].error is not error:
            about = (silent[-1].stream, silent[-1].before, silent[-1].after) if silent else self._open()
            self._trouble(self._moment(frame, *about, error))

    def _note(self, moment: Moment, stream: int, before: CaptureInfo, now: CaptureInfo) -> None:
        """A stream's place in a capture has changed."""
        joined = self.seen.joined.get(stream)
        if before.status is not _NONE and before.ident != now.ident:
            if self._origins.get(before.ident) == stream:
                del self._origins[before.ident]
                self.seen.ended.append(moment)
        elif now.status is _ACTIVE and joined is not None:
            joined.last_work = moment
        if now.status is _ACTIVE and before.ident != now.ident:
            if now.ident in self._origins:
                self.seen.joined[stream] = Joined(now.ident, moment)
            else:
                self._origins[now.ident] = stream
                self.seen.begun.append(moment)
        # Of the streams of one capture the first tells.
        if moment.broke_capture and not any(
            trouble.broke_capture and trouble.stream != stream and self._ident(trouble) == now.ident
            for trouble in self.seen.troubles
        ):
            self._trouble(moment)

    def _ident(self, moment: Moment) -> int:
        return 0 if moment.stream is None else self._states[moment.stream].ident

    def _trouble(self, moment: Moment) -> None:
        moment.log = self._probe.log()
        self.seen.troubles.append(moment)

    def _open(self) -> tuple[int | None, CaptureStatus, CaptureStatus]:
        """A stream that captures, and its status, twice: nothing changed it."""
        found = ((s, state.status, state.status) for s, state in self._states.items() if state.status is not _NONE)
        return next(found, (None, _NONE, _NONE))

    # ---- where it was

    def _moment(
        self,
        frame: FrameType,
        stream: int | None,
        before: CaptureStatus,
        after: CaptureStatus,
        error: BaseException | None,
    ) -> Moment:
        stack: list[Frame] = []
        users = None
        up: FrameType | None = frame
        while up is not None and not _is_base(up):
            found = Frame.of(up)
            if self._at is not None and up is self._at[0]:
                found = found._replace(line=self._at[1])
                users = len(stack)
            stack.append(found)
            up = up.f_back
        return Moment(stream, before, after, tuple(stack), users, error, collected=self._collections > 0)

    def _leaving(self, error: BaseException) -> Moment:
        """The exception that left the callable; its traceback has the lines."""
        stack: list[Frame] = []
        step = error.__traceback__
        while step is not None:
            if not _is_base(step.tb_frame):
                stack.append(Frame.of(step.tb_frame)._replace(line=step.tb_lineno))
            step = step.tb_next
        stack.reverse()
        users = next((i for i, frame in enumerate(stack) if self._owner.is_users(frame.file)), None)
        return Moment(*self._open(), tuple(stack), users, error)


def _line(frame: FrameType) -> int:
    return frame.f_lineno or frame.f_code.co_firstlineno


def _is_base(frame: FrameType) -> bool:
    """True for the frame of `LineWatch.run`: what is above it is not the user's capture."""
    return frame.f_code is LineWatch.run.__code__
