"""What a driver's status code means to `DriverBackend`: its `Status`, its words, whether the context survives it.

The bindings come in as an argument. This file must not know streams or buffers.
"""

from collections.abc import Callable
from typing import Any

from ds41rt.cu.result import STICKY, Status

_LOG_NBYTES = 25600  # the most that the driver keeps

# call(name, *args): a driver call that raises CudaError and returns everything after the status.
Call = Callable[..., tuple[Any, ...]]

# Codes after which the context is lost; those that `Status` does not list: hardware and illegal-instruction faults.
LOST = frozenset(int(s) for s in STICKY - {Status.UNKNOWN}) | {214, 710, 714, 715, 717, 718, 999}
CAPTURE_CODES = frozenset(range(900, 909))
HINTS = {
    Status.STREAM_CAPTURE_UNSUPPORTED: (
        "a capturing stream cannot be waited for or asked, nor can an executable graph be launched into a capture"
    ),
    Status.STREAM_CAPTURE_MERGE: "the event belongs to another capture",
    Status.STREAM_CAPTURE_UNMATCHED: "the capture has to be ended on the stream that began it",
    Status.STREAM_CAPTURE_UNJOINED: "a stream was not joined back; wait for an event recorded after its last work",
    Status.STREAM_CAPTURE_ISOLATION: (
        "the event was recorded outside of this capture; record it inside, or wait before it begins"
    ),
    Status.CAPTURED_EVENT: "the event was last recorded in a capture; use another event for work outside of it",
}


def to_status(code: Any) -> Status:
    """A driver's code as a `Status`; a code that `Status` does not list becomes UNKNOWN."""
    try:
        return Status(int(code))
    except ValueError:
        return Status.UNKNOWN


def driver_text(cu: Any, code: Any) -> str:
    """Number, name and description of a status in the driver's own words."""
    words = []
    for function in (cu.cuGetErrorName, cu.cuGetErrorString):
        status, text = function(code)
        if not status and text:
            words.append(text.decode(errors="replace") if isinstance(text, bytes) else str(text))
    return f"{int(code)} " + ": ".join(words)


def call_optional(cu: Any, name: str, *args: Any) -> tuple[int, tuple[Any, ...]] | None:
    """A call that this driver or these bindings may not have: its status and results, or None if it is missing.

    That a function exists in the bindings says nothing about the driver: only the call tells.
    """
    function = getattr(cu, name, None)
    if function is None:
        return None
    try:
        code, *values = function(*args)
    except RuntimeError as e:
        if not is_missing(e):
            raise
        return None
    return int(code), tuple(values)


def is_missing(error: RuntimeError) -> bool:
    """True for what the bindings raise when the driver lacks the symbol of a call."""
    return "not found" in str(error).lower()


def try_optional(cu: Any, name: str, *args: Any) -> tuple[Any, ...] | None:
    """The results of an optional call, None if it is missing or refuses."""
    found = call_optional(cu, name, *args)
    return None if found is None or found[0] else found[1]


class DriverLog:
    """The driver's own log lines since the last look (drivers from CUDA 12.9 on; nothing on older ones)."""

    def __init__(self, cu: Any) -> None:
        self._cu = cu
        found = try_optional(cu, "cuLogsCurrent", 0)
        self._at = None if found is None else found[0]

    def news(self) -> str:
        if self._at is None:
            return ""
        text = bytearray(_LOG_NBYTES)
        found = try_optional(self._cu, "cuLogsDumpToMemory", self._at, text, len(text), 0)
        if found is None:
            return ""
        self._at, nbytes = found
        lines = bytes(text[:nbytes]).decode(errors="replace").strip("\0\n ").splitlines()
        return " | ".join(line.strip() for line in lines[-4:])
