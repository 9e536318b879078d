"""Graphs and memory of others in this process, through the driver alone.

Nothing is created, moved or kept: the context that the others use is looked at and left as it was. The bindings come in
as an argument.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ds41rt.cu.backend import MemoryRange
from ds41rt.cu.driver_errors import call_optional, driver_text, to_status
from ds41rt.cu.driver_graph import GraphReader
from ds41rt.cu.graphinfo import GraphInfo
from ds41rt.cu.probe import GpuState, probe_driver
from ds41rt.cu.result import CudaError
from ds41rt.errors import InputError, UnsupportedError


class ForeignDriver:
    """See `cu.backend.ForeignGraphs`."""

    def __init__(self, cu: Any) -> None:
        self._cu = cu

    def describe(self, handle: int) -> GraphInfo:
        # An object of the bindings' own keeps an address that is too large for a C int from being cut.
        return GraphReader(self._cu, self._call, {}).read(self._cu.CUgraph(handle))

    def find_allocation(self, addr: int) -> MemoryRange | None:
        return find_allocation(self._cu, addr)

    def _call(self, call: str, *args: Any) -> tuple[Any, ...]:
        code, *values = getattr(self._cu, call)(*args)
        if code:
            raise CudaError(to_status(code), call, driver_text(self._cu, code))
        return tuple(values)


def find_allocation(cu: Any, addr: int) -> MemoryRange | None:
    """The allocation around `addr`. Raises `UnsupportedError` where pointers cannot be asked for their attributes."""
    attributes = cu.CUpointer_attribute
    values = []
    for name in ("MEMORY_TYPE", "RANGE_START_ADDR", "RANGE_SIZE"):
        found = call_optional(cu, "cuPointerGetAttribute", getattr(attributes, f"CU_POINTER_ATTRIBUTE_{name}"), addr)
        if found is None:
            raise UnsupportedError("this driver cannot say what a pointer points to: it lacks cuPointerGetAttribute")
        code, got = found
        if code:  # not an address that the driver handed out
            return None
        values.append(int(got[0]))
    on_host = values[0] == int(cu.CUmemorytype.CU_MEMORYTYPE_HOST)
    return MemoryRange(values[1], values[2], "pinned" if on_host else "device")


@contextmanager
def attached(cu: Any) -> Iterator[ForeignDriver]:
    """A `ForeignDriver` in this thread's current context, else in the one primary context that is in use."""
    found = probe_driver(cu)
    if found.state is not GpuState.READY:
        raise UnsupportedError(f"no graph can be looked at: {found}")
    driver = ForeignDriver(cu)
    if int(driver._call("cuCtxGetCurrent")[0] or 0):
        yield driver
        return
    used = [d for d in (driver._call("cuDeviceGet", i.ordinal)[0] for i in found.devices) if _in_use(driver, d)]
    if len(used) != 1:
        raise InputError(
            f"no CUDA context is current in this thread, and {len(used)} devices are in use: look at the graph from "
            "the thread that captured it, or select its device first (torch.cuda.set_device)"
        )
    (context,) = driver._call("cuDevicePrimaryCtxRetain", used[0])
    try:
        driver._call("cuCtxSetCurrent", context)
        yield driver
    finally:
        cu.cuCtxSetCurrent(None)
        cu.cuDevicePrimaryCtxRelease(used[0])


def _in_use(driver: ForeignDriver, device: Any) -> bool:
    _, active = driver._call("cuDevicePrimaryCtxGetState", device)
    return bool(active)
