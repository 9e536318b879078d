"""Who called into `ds41rt.cu`: the frames of the caller's code, for errors and reports that name a line.

Knows no backend.
"""

import sys
from types import FrameType
from typing import NamedTuple

# Frames of these modules are never the caller; NumPy calls back for arrays over pinned memory.
_INSIDE = (__name__.removesuffix("call_site"), "numpy.")


class Frame(NamedTuple):
    """One line of a call stack: file, line, function, and the module's dotted name."""

    file: str
    line: int
    function: str
    module: str

    @classmethod
    def of(cls, frame: FrameType) -> "Frame":
        code = frame.f_code
        return cls(code.co_filename, frame.f_lineno or 0, code.co_qualname, frame.f_globals.get("__name__", ""))


def calling_frame() -> FrameType:
    """The innermost frame outside of `ds41rt.cu` and NumPy."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_INSIDE):
        frame = frame.f_back
    return frame


def caller() -> str:
    """File and line of the call into `ds41rt.cu`."""
    frame = calling_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def call_stack() -> tuple[Frame, ...]:
    """The caller's frames, innermost first."""
    found = []
    frame: FrameType | None = calling_frame()
    while frame is not None:
        found.append(Frame.of(frame))
        frame = frame.f_back
    return tuple(found)
