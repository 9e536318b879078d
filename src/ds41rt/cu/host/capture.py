"""Stream capture in relaxed mode: which streams take part, what was recorded, and what made it invalid.

The status codes are those of a real driver, as recorded. This file must not know schedules or handles.
"""

from itertools import count
from types import CodeType

from ds41rt.cu.backend import CaptureStatus
from ds41rt.cu.call_site import caller
from ds41rt.cu.host.command import Command
from ds41rt.cu.host.graph import Node, unreached
from ds41rt.cu.host.stream import EventState, StreamState
from ds41rt.cu.result import CudaError, Status

_idents = count(1)


class Capture:
    """One capture from begin to end: the origin stream, and streams that joined it by waiting for its events."""

    def __init__(self, origin: StreamState) -> None:
        self.ident = next(_idents)
        self.origin = origin
        self.status = CaptureStatus.ACTIVE
        self.nodes: list[Node] = []
        self._streams: list[StreamState] = []
        self._first_failure = ""
        self._join(origin, ())

    def add(self, stream: StreamState, command: Command, call: str, site: tuple[CodeType, int] | None = None) -> None:
        """Record a command that was issued on a stream of this capture, at `site`."""
        self.require_valid(stream, call)
        self.nodes.append(Node(command, stream.name, stream.frontier, site))
        stream.frontier = (len(self.nodes) - 1,)

    def require_valid(self, stream: StreamState, call: str) -> None:
        """Raise 901, with the call that made the capture invalid, unless it is still good."""
        if self.status is not CaptureStatus.ACTIVE:
            raise CudaError(Status.STREAM_CAPTURE_INVALIDATED, call, f"stream {stream.name!r}; {self._blame()}")

    def invalidate(self, status: Status, call: str, detail: str) -> CudaError:
        """Make the capture invalid and return the error for the caller to raise; the first call to do so is kept."""
        if self.status is CaptureStatus.INVALIDATED:
            return CudaError(status, call, f"{detail}; {self._blame()}")
        error = CudaError(status, call, detail)
        if self.status is CaptureStatus.ACTIVE:
            self.status = CaptureStatus.INVALIDATED
            self._first_failure = f"{error} (called at {caller()})"
        return error

    def _blame(self) -> str:
        return f"the capture was invalidated by {self._first_failure}"

    def end(self, stream: StreamState) -> tuple[Node, ...]:
        """Close the capture and release its streams, unless `stream` is not its origin (903: it stays open, invalid).

        Raises 901 when it was invalid and 904 when forked work was not joined; the streams are free then as well.
        """
        call = "cuStreamEndCapture"
        if stream is not self.origin:
            detail = f"stream {stream.name!r} joined the capture that stream {self.origin.name!r} began; end it there"
            raise self.invalidate(Status.STREAM_CAPTURE_UNMATCHED, call, detail)
        frontier = stream.frontier
        try:
            self.require_valid(stream, call)
        finally:
            self.release()
        unjoined = unreached(self.nodes, frontier)
        if unjoined:
            node = self.nodes[unjoined[0]]
            detail = (
                f"stream {node.stream!r} was not joined back into {stream.name!r}: {len(unjoined)} nodes, "
                f"the first is {node.command.label!r}; wait for an event recorded after them"
            )
            raise CudaError(Status.STREAM_CAPTURE_UNJOINED, call, detail)
        return tuple(self.nodes)

    def release(self) -> None:
        """Let go of every stream that takes part; events recorded in this capture can no longer be joined."""
        for stream in self._streams:
            stream.capture = None
            stream.frontier = ()
        self._streams.clear()
        self.status = CaptureStatus.NONE

    def drop_stream(self, stream: StreamState) -> None:
        """A stream that takes part was destroyed. With its origin the capture ends; of another one, only what it
        recorded since the last event can no longer be joined."""
        if stream is self.origin:
            self.release()
        else:
            self._streams.remove(stream)

    def void(self) -> str:
        """Why an event that was recorded in this capture, which is not active, is of no use."""
        if self.status is CaptureStatus.INVALIDATED:
            return f"last recorded in a capture that is invalid; {self._blame()}"
        return "last recorded in a capture that has ended; record it again first"

    def _join(self, stream: StreamState, frontier: tuple[int, ...]) -> None:
        stream.capture = self
        stream.frontier = frontier
        self._streams.append(stream)

    @staticmethod
    def wait(stream: StreamState, event: EventState, call: str) -> bool:
        """Apply a wait that has a capture on either side; False when there is none: the wait is an ordinary one.

        Raises 902 (two captures), 905 (the event was recorded outside), 901, and 1 for an event of another capture
        that has ended or is invalid: such an event means nothing until it is recorded again.
        """
        own, other = stream.capture, event.capture
        if own is None and other is None:
            return False
        names = f"stream {stream.name!r} waits for event {event.name!r}"
        if own is None:
            assert other is not None
            if other.status is not CaptureStatus.ACTIVE:
                raise CudaError(Status.INVALID_VALUE, call, f"{names}, {other.void()}")
            other._join(stream, event.frontier)
            return True
        own.require_valid(stream, call)
        if other is own:
            stream.frontier = tuple(sorted({*stream.frontier, *event.frontier}))
            return True
        if not event.recorded:
            return True
        if other is not None and other.status is not CaptureStatus.ACTIVE:
            raise own.invalidate(Status.INVALID_VALUE, call, f"{names}, {other.void()}")
        if other is None:
            detail = f"{names}, which was recorded outside of this capture; record it inside, or wait before it begins"
            raise own.invalidate(Status.STREAM_CAPTURE_ISOLATION, call, detail)
        detail = f"{names}, which belongs to the capture that stream {other.origin.name!r} began"
        other.invalidate(Status.STREAM_CAPTURE_MERGE, call, detail)
        raise own.invalidate(Status.STREAM_CAPTURE_MERGE, call, detail)
