"""What code that drives a GPU should leave behind: nothing. Checks for the end of a test, with names in the message.

They work on any backend that counts its objects; races are seen by the host backend alone.
"""

from typing import Protocol

from ds41rt.cu.backend import GpuBackend
from ds41rt.cu.host import HostBackend


class CountingBackend(GpuBackend, Protocol):
    """`GpuBackend`, and the count of live objects that both backends keep."""

    def live(self) -> dict[str, int]:
        """How many objects of each kind exist."""


def assert_no_leaks(backend: CountingBackend) -> None:
    """Everything that was made through the backend was given back. Raises AssertionError naming what is left."""
    left = {kind: count for kind, count in backend.live().items() if count}
    if left:
        names = [f"{buf.name!r} ({buf.nbytes} bytes)" for buf in backend.ledger()]
        counts = ", ".join(f"{count} {kind}" for kind, count in left.items())
        raise AssertionError(f"left on the {backend.name} backend: {counts}" + "".join(f"; {name}" for name in names))


def assert_no_open_capture(backend: CountingBackend) -> None:
    """No stream captures. Raises AssertionError."""
    count = backend.live()["captures"]
    if count:
        raise AssertionError(f"{count} captures are still open on the {backend.name} backend: end or abort them")


def assert_no_races(backend: GpuBackend) -> None:
    """No two operations touched the same bytes without an order between them. Raises AssertionError naming them.

    Only the host backend sees races; on another one this cannot fail.
    """
    if isinstance(backend, HostBackend) and backend.races:
        raise AssertionError("unordered accesses:\n" + "\n".join(map(str, backend.races)))
