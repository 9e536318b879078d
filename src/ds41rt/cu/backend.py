"""The GPU as ds41rt sees it: one protocol over ints, implemented by the host backend and by the CUDA driver.

Streams are explicit and non-blocking; there is no default stream. Every allocation carries a name. Nothing here knows
layers, experts or settings, and nobody but `open_backend` chooses a backend.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NewType, Protocol

import numpy as np
from numpy.typing import NDArray

from ds41rt.cu.graphinfo import GraphInfo, Space
from ds41rt.cu.kernel import KernelLaunch, KernelSpec
from ds41rt.cu.probe import Probe
from ds41rt.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from ds41rt.cu.capture_probe import CaptureProbe

Stream = NewType("Stream", int)
Event = NewType("Event", int)
Graph = NewType("Graph", int)
GraphExec = NewType("GraphExec", int)


class CaptureStatus(IntEnum):
    """`CUstreamCaptureStatus`."""

    NONE = 0
    ACTIVE = 1
    INVALIDATED = 2


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    """A named device allocation: address and size in bytes."""

    name: str
    ptr: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class HostBuffer:
    """Host memory that takes part in copies. `array` is its uint8 view; `pinned` says if the driver page-locked it.

    Pinned bytes are read when a copy *executes*, and again at every replay of a captured copy. `device_ptr` is the
    address under which kernels can read a pinned buffer in place; 0 for pageable memory.
    """

    name: str
    ptr: int
    nbytes: int
    array: NDArray[np.uint8]
    pinned: bool
    device_ptr: int = 0

    @classmethod
    def pageable(cls, name: str, array: NDArray[Any]) -> "HostBuffer":
        """Ordinary memory as a copy operand; `array` must be C-contiguous and is kept alive by the result."""
        flat = array.reshape(-1).view(np.uint8)
        if flat.size and not np.shares_memory(flat, array):
            raise InputError(f"host buffer {name!r}: the array must be C-contiguous")
        return cls(name, int(flat.ctypes.data), flat.nbytes, flat, False)


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """An allocation as a driver sees it: no name, whoever made it."""

    addr: int
    nbytes: int
    space: Space


class GpuBackend(Protocol):
    """About the driver API's own verbs. Every method raises `CudaError` with the failing call's name and code.

    Asynchronous calls append to a stream and return. `label` names the operation in errors, race reports and graphs.
    """

    name: str
    device_name: str
    unified_memory: bool
    """True where device memory and host memory are the same."""

    def alloc(self, name: str, nbytes: int) -> DeviceBuffer:
        """Plain device memory, 256-byte aligned, contents undefined. Raises `OutOfDeviceMemory`."""

    def free(self, buf: DeviceBuffer) -> None: ...

    def alloc_pinned(self, name: str, nbytes: int) -> HostBuffer:
        """Page-locked, mapped host memory. Raises `OutOfDeviceMemory`."""

    def free_pinned(self, buf: HostBuffer) -> None: ...

    def memory_info(self) -> tuple[int, int]:
        """(free, total) device memory in bytes."""

    def ledger(self) -> Iterable[DeviceBuffer | HostBuffer]:
        """Everything allocated through this backend and not freed yet."""

    def freed(self) -> Iterable[DeviceBuffer]:
        """What was freed, as far as the backend remembers; host buffers too, by the address that the device saw.
        Somebody else may own the memory by now."""

    def find_allocation(self, addr: int) -> MemoryRange | None:
        """The allocation, of whomever in this process, that holds `addr`; None if none does.

        Raises `UnsupportedError` where the driver cannot be asked.
        """

    def create_stream(self, name: str) -> Stream: ...

    def destroy_stream(self, stream: Stream) -> None:
        """Work in flight completes. Also ends and drops a capture that the stream began."""

    def synchronize(self, stream: Stream) -> None:
        """Block until the stream is empty; a deferred error of its work is raised here."""

    def create_event(self, name: str, *, timing: bool = False) -> Event:
        """`timing`: records of the event note their time, for `elapsed_us`; that makes them slower."""

    def destroy_event(self, event: Event) -> None: ...

    def record(self, event: Event, stream: Stream) -> None: ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Work enqueued on `stream` from here on runs after what `event` recorded last."""

    def query_event(self, event: Event) -> bool:
        """True when what the event recorded has completed."""

    def synchronize_event(self, event: Event) -> None: ...

    def elapsed_us(self, start: Event, end: Event) -> float:
        """Microseconds between the last records of two timing events, by the device's clock.

        Raises NOT_READY before both have completed, INVALID_HANDLE for an event that has no timing or was never
        recorded, CAPTURED_EVENT for one that was last recorded in a capture, `UnsupportedError` on a driver that
        cannot tell.
        """

    def copy_h2d(
        self, dst: int, src: HostBuffer, nbytes: int, stream: Stream, src_off: int = 0, label: str = ""
    ) -> None: ...

    def copy_d2h(
        self, dst: HostBuffer, src: int, nbytes: int, stream: Stream, dst_off: int = 0, label: str = ""
    ) -> None:
        """The bytes are in `dst` once the stream was synchronised, not before."""

    def copy_d2d(self, dst: int, src: int, nbytes: int, stream: Stream, label: str = "") -> None: ...

    def fill(self, dst: int, byte: int, nbytes: int, stream: Stream, label: str = "") -> None: ...

    def prepare(self, spec: KernelSpec, args: Mapping[str, int | float], label: str) -> KernelLaunch:
        """Check and pack the arguments of a launch once; loads the kernel if needed (never inside a capture)."""

    def launch(self, launch: KernelLaunch, stream: Stream) -> None: ...

    def begin_capture(self, stream: Stream) -> None:
        """Relaxed mode: only this stream, and streams that wait for its events, are recorded."""

    def capture_status(self, stream: Stream) -> CaptureStatus: ...

    def end_capture(self, stream: Stream) -> Graph: ...

    def abort_capture(self, stream: Stream) -> None:
        """End and drop the capture that the stream takes part in, if any; raises no 900s."""

    def instantiate(self, graph: Graph) -> GraphExec: ...

    def launch_graph(self, graph_exec: GraphExec, stream: Stream) -> None:
        """Never into a capture, which it would invalidate."""

    def describe_graph(self, graph: Graph) -> GraphInfo:
        """Nodes, edges and everything that the graph bakes. For tools and checks: it makes several calls a node."""

    def capture_probe(self) -> "CaptureProbe":
        """A look at the captures of any stream on this device, also of other libraries. For tools."""

    def destroy_graph(self, graph: Graph) -> None: ...

    def destroy_exec(self, graph_exec: GraphExec) -> None: ...

    def close(self) -> None:
        """Release everything. Idempotent; reports nothing that was not already reported."""


def probe_gpu() -> Probe:
    """Whether this machine has a GPU, as a typed answer; nothing stays open.

    Raises `UnsupportedError` in a forked child of a process that used CUDA, and `CudaError` when the driver starts but
    cannot describe its devices.
    """
    from ds41rt.cu.driver import probe

    return probe()


def optional_calls() -> dict[str, bool]:
    """Of the driver's calls that tools use and older drivers lack, which there are: by name (`cu.probe`).

    To be asked after `probe_gpu` has found a GPU.
    """
    from ds41rt.cu.driver import optional_calls as ask

    return ask()


class ForeignGraphs(Protocol):
    """Looks at graphs and memory that no backend here made, in the context that is current in this thread."""

    def describe(self, handle: int) -> GraphInfo:
        """The graph behind a raw `CUgraph`. Raises `CudaError`; a handle that is none may crash the process."""

    def find_allocation(self, addr: int) -> MemoryRange | None:
        """As `GpuBackend.find_allocation`."""


def foreign_graphs() -> AbstractContextManager[ForeignGraphs]:
    """For a `with` block: looks through the driver at what others captured.

    Uses the context that is current in this thread; without one it attaches to the one primary context that is in use,
    for the length of the block. Raises `UnsupportedError` where there is no driver, `InputError` where there is no
    context to look at.
    """
    from ds41rt.cu.driver import foreign_driver

    return foreign_driver()


def open_backend(name: str = "auto", *, schedule: str = "lazy") -> tuple[GpuBackend, str]:
    """Open "host", "cuda" or "auto"; returns the backend and one sentence that says why it was chosen.

    `schedule` ("lazy", "eager" or "random:SEED") is how the host backend orders deferred work. Raises `InputError` for
    an unknown name or schedule and `UnsupportedError` for a backend that this machine or build cannot run.
    """
    from ds41rt.cu.host import HostBackend

    def host() -> GpuBackend:
        # Detecting races costs up to 1.7 times the time; who wants it makes a HostBackend of their own.
        return HostBackend(schedule, race_detection=False)

    if name not in ("auto", "host", "cuda"):
        raise InputError(f"backend {name!r} is unknown; use auto, host or cuda")
    if name == "host":
        return host(), "asked for"
    if schedule != "lazy":
        if name == "cuda":
            raise InputError(f"schedule {schedule!r} is for the host backend; a GPU orders its work itself")
        return host(), f"schedule {schedule!r} was asked for, which a GPU does not have"
    # imported here, so that the host backend needs no CUDA package
    from ds41rt.cu.driver import DriverBackend, why_not

    refusal = why_not()
    if refusal is None:
        backend = DriverBackend()
        return backend, f"device 0, {backend.device.name}, can be used"
    if name == "cuda":
        raise UnsupportedError(f"backend 'cuda' cannot be used: {refusal}; `ds41rt doctor` says more")
    return host(), f"no GPU can be used: {refusal}"
