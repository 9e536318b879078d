"""Looking at anybody's capture from outside, on any stream of the device, without disturbing it.

For tools that explain why a capture failed. Both backends make one; streams are handles as ints, also those of other
libraries. Knows no Python frames, files or users.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ds41rt.cu.backend import CaptureStatus, Graph

CaptureMode = Literal["global", "thread_local", "relaxed"]


@dataclass(frozen=True, slots=True)
class CaptureInfo:
    """A stream's place in a capture.

    `ident` tells captures apart, 0 where there is none. `frontier` are the nodes that the stream's next work comes
    after, by handles that mean something within this capture alone; known while the capture is active.
    """

    status: CaptureStatus
    ident: int = 0
    frontier: tuple[int, ...] = ()


class CaptureProbe(Protocol):
    """No question here invalidates a capture. Every method but `name`, `knows` and `log` raises `CudaError`."""

    # What `begin` is asked for by default: the mode that breaks what would break under PyTorch, where there are modes.
    default_mode: CaptureMode

    def name(self, stream: int) -> str:
        """The stream's name, or its handle if nobody named it."""

    def knows(self, stream: int) -> bool:
        """True for a stream that was created through this backend and not destroyed."""

    def info(self, stream: int) -> CaptureInfo:
        """Of any stream there is. A driver takes any handle on trust: one that was destroyed may crash the process."""

    def unjoined(self, origin: int, streams: Sequence[int]) -> list[int]:
        """Those of `streams`, of the same active capture as `origin`, that have work which nothing on `origin` waits
        for yet."""

    def begin(self, stream: int, mode: CaptureMode) -> None:
        """Raises `UnsupportedError` for a mode that this backend does not have."""

    def end(self, stream: int) -> int:
        """End the capture, drop its graph, and return how many nodes it had."""

    def abort(self, stream: int) -> None:
        """End the capture that the stream began and drop what there is of it; raises no 900s."""

    def n_nodes(self, graph: Graph) -> int: ...

    def log(self) -> str:
        """The driver's own log lines since the last look, "" where it writes none."""
