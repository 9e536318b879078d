"""What a conformance case is: a rule in one sentence, and a small program whose outcome two backends can be asked for.

An outcome is plain JSON: status names, truth values, counts. It never holds an address, a time or a handle, so that the
outcomes of a simulated device and of a real one can be compared as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds41rt.cu.backend import CaptureStatus, GraphExec, HostBuffer, Stream
from ds41rt.cu.kernel import KernelLaunch
from ds41rt.cu.result import CudaError
from ds41rt.testing.checks import CountingBackend
from ds41rt.testing.conformance.kernels import AFFINE, DELAY

Outcome = dict[str, "str | bool | int | list[str]"]
N = 64
NBYTES = 4 * N
DELAY_US = 20_000
# Nobody maps anything here: low addresses are a driver's own, its allocations lie far higher.
NOWHERE = 0x1234_5678_0000


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the rule book.

    `pending` marks an outcome that depends on work which has not run yet (a fault included): only "lazy" promises that.
    `observed` marks one that CUDA leaves open: it is recorded and not compared. `differs` is the reason why the
    simulated device answers differently on purpose. `loses_context` asks for a process of its own on a real device.
    """

    name: str
    rule: str
    run: "Callable[[Rig], Outcome]"
    pending: bool = False
    observed: bool = False
    differs: str = ""
    loses_context: bool = False


CASES: dict[str, Case] = {}


def case(
    rule: str, *, pending: bool = False, observed: bool = False, differs: str = "", loses_context: bool = False
) -> "Callable[[Callable[[Rig], Outcome]], Callable[[Rig], Outcome]]":
    """Enter the decorated function into `CASES` under its own name."""

    def enter(run: "Callable[[Rig], Outcome]") -> "Callable[[Rig], Outcome]":
        name = run.__name__
        assert name not in CASES, name
        CASES[name] = Case(name, rule, run, pending or loses_context, observed, differs, loses_context)
        return run

    return enter


def code(call: Callable[[], object]) -> str:
    """The name of the status that a call ends with."""
    try:
        call()
    except CudaError as error:
        return error.status.name
    return "SUCCESS"


class Rig:
    """A backend with two streams, two events and an int32 buffer of `N` random words to work on."""

    def __init__(self, backend: CountingBackend) -> None:
        self.backend = backend
        self.main, self.side = backend.create_stream("main"), backend.create_stream("side")
        self.fork, self.join = backend.create_event("fork"), backend.create_event("join")
        self.words = np.random.default_rng(41).integers(-(2**31), 2**31, N, dtype=np.int32)
        self.x = self.upload("x", self.words)
        # Loaded before any case begins a capture.
        self._delay = backend.prepare(DELAY, {"us": DELAY_US}, "delay")
        self.step = self.affine(self.x, 3, 5)

    def upload(self, name: str, words: NDArray[np.int32]) -> int:
        """A new device buffer with these words; its address."""
        buf = self.backend.alloc(name, words.nbytes)
        self.backend.copy_h2d(
            buf.ptr, HostBuffer.pageable(name, words), words.nbytes, self.main, label=f"upload {name}"
        )
        self.backend.synchronize(self.main)
        return buf.ptr

    def pinned(self, name: str, words: NDArray[np.int32]) -> HostBuffer:
        """A new pinned buffer with these words."""
        buf = self.backend.alloc_pinned(name, words.nbytes)
        buf.array[:] = words.view(np.uint8)
        return buf

    def read(self, addr: int = 0) -> NDArray[np.int32]:
        """The words at `addr` (default: the buffer `x`), after everything on the main stream."""
        out = np.full(N, 0x5A5A5A5A, np.int32)
        self.backend.copy_d2h(HostBuffer.pageable("out", out), addr or self.x, NBYTES, self.main, label="read")
        self.backend.synchronize(self.main)
        return out

    def holds(self, words: NDArray[np.int32], addr: int = 0) -> bool:
        return bool(np.array_equal(self.read(addr), words))

    def affine(self, addr: int, a: int, b: int) -> KernelLaunch:
        return self.backend.prepare(AFFINE, {"x": addr, "a": a, "b": b, "n": N}, f"affine {a} {b}")

    def work(self, stream: Stream, launch: KernelLaunch | None = None) -> None:
        """Enqueue x = 3 x + 5, or another launch."""
        self.backend.launch(self.step if launch is None else launch, stream)

    def delay(self, stream: Stream) -> None:
        """Keep a stream busy for a while."""
        self.backend.launch(self._delay, stream)

    def status(self, stream: Stream) -> str:
        return self.backend.capture_status(stream).name

    def begin_forked(self) -> None:
        """A capture on `main` that `side` has joined, with one node."""
        self.backend.begin_capture(self.main)
        self.work(self.main)
        self.backend.record(self.fork, self.main)
        self.backend.wait(self.side, self.fork)

    def invalidate(self) -> None:
        """Spoil the capture on `main`."""
        code(lambda: self.backend.synchronize(self.main))

    def end_exec(self, stream: Stream | None = None) -> GraphExec:
        """End the capture, instantiate it, and drop the graph."""
        graph = self.backend.end_capture(self.main if stream is None else stream)
        graph_exec = self.backend.instantiate(graph)
        self.backend.destroy_graph(graph)
        return graph_exec

    def usable(self) -> bool:
        """Nothing captures; eager work, a fork, a fresh capture and its replay on both streams are right."""
        backend = self.backend
        if backend.live()["captures"] or any(
            backend.capture_status(stream) is not CaptureStatus.NONE for stream in (self.main, self.side)
        ):
            return False
        backend.synchronize(self.side)
        want = self.read()
        again = backend.create_event("again")
        for stream, other in ((self.main, self.side), (self.side, self.main)):
            self.work(stream)
            backend.record(again, stream)
            backend.wait(other, again)
            backend.begin_capture(other)
            self.work(other)
            graph_exec = self.end_exec(other)
            backend.launch_graph(graph_exec, other)
            backend.record(again, other)
            backend.wait(self.main, again)
            backend.destroy_exec(graph_exec)
            want = affine(affine(want))
        return self.holds(want)


def affine(words: NDArray[np.int32], a: int = 3, b: int = 5) -> NDArray[np.int32]:
    """What the kernel computes."""
    return words * np.int32(a) + np.int32(b)
