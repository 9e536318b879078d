"""The simulated device's address space: named allocations, bounds, poison, quarantine, and cached array views.

Device memory and pinned host memory share one space, as under unified addressing. Addresses never repeat, so a view
that was once legal stays legal until its allocation is freed. This file must not know streams, kernels or captures.
"""

import dataclasses
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ds41rt.cu.backend import DeviceBuffer, HostBuffer, MemoryRange
from ds41rt.cu.kernel import Span
from ds41rt.cu.result import CudaError, OutOfDeviceMemory, Status

if TYPE_CHECKING:
    from ds41rt.cu.host.race import Work

_BASE = 0x7F00_0000_0000
_ALIGN = 256
# The gap after an allocation is at least this, and at least its own size: being one whole array too far is caught too.
_MIN_GAP = 1 << 20
# Spans may have shapes that grow with the position; the cache is emptied rather than allowed to grow for ever.
_MAX_VIEWS = 1 << 16

# Poison is a quiet NaN as bf16 and as f32 and no address as u64. As i32 it is an index far out of range, because -1
# (all ones) is a likely "nothing here" value that a kernel would accept. Freed bytes differ from fresh ones in sign.
FRESH = np.uint16(0x7FED)
FREED = np.uint16(0xFFED)


class AccessFault(Exception):
    """An operation touched memory that it may not touch; the backend turns it into a sticky `CudaError`."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text

    def inside(self, where: str) -> "AccessFault":
        """The same fault with the operation (and parameter) that committed it in front."""
        return AccessFault(self.status, f"{where}: {self.text}")

    def __str__(self) -> str:
        return self.text


@dataclass(slots=True, eq=False)
class Allocation:
    """A live range of the address space; `data` is its uint8 storage."""

    buffer: DeviceBuffer | HostBuffer
    addr: int
    nbytes: int
    data: NDArray[np.uint8]


def _aligned_storage(nbytes: int) -> NDArray[np.uint8]:
    """Fresh poisoned bytes whose real address has the alignment that the simulated one has."""
    raw = np.empty(nbytes + _ALIGN, np.uint8)
    start = -raw.ctypes.data % _ALIGN
    data = raw[start : start + nbytes]
    _poison(data, FRESH)
    return data


def _poison(data: NDArray[np.uint8], word: np.uint16) -> None:
    even = data.nbytes & ~1
    data[:even].view(np.uint16)[:] = word
    data[even:] = word & 0xFF


class Memory:
    """All allocations of one backend.

    `epoch` changes whenever a view may have become illegal (at a free): whoever keeps views compares it.

    For race detection: `running` is the operation that is being run, `leaf` the index of its node if it is a
    graph, and `on_spans` is told what a kernel found in its pointer tables.
    """

    def __init__(self, device_nbytes: int, pinned_nbytes: int) -> None:
        self.epoch = 0
        self.running: Work | None = None
        self.leaf = 0
        self.on_spans: Callable[[Sequence[Span]], None] | None = None
        self.device_nbytes = device_nbytes
        self.device_used = 0
        self._pinned_nbytes = pinned_nbytes
        self._pinned_used = 0
        self._next = _BASE
        # Ascending by address: new addresses are always higher than all earlier ones.
        self._starts: list[int] = []
        self._live: list[Allocation] = []
        self._quarantine: list[tuple[int, int, str]] = []
        self._views: dict[tuple[int, np.dtype[Any], tuple[int, ...], bool], NDArray[Any]] = {}

    def alloc_device(self, name: str, nbytes: int) -> DeviceBuffer:
        """Poisoned device memory. Raises `OutOfDeviceMemory` and INVALID_VALUE for fewer than one byte."""
        data = self._reserve("cuMemAlloc", name, nbytes, self.device_nbytes - self.device_used, "device")
        buf = DeviceBuffer(name, self._next, nbytes)
        self.device_used += nbytes
        self._insert(Allocation(buf, buf.ptr, nbytes, data))
        return buf

    def alloc_pinned(self, name: str, nbytes: int) -> HostBuffer:
        """Poisoned host memory that is mapped: `device_ptr` lies in this address space, `ptr` is the real address."""
        data = self._reserve("cuMemHostAlloc", name, nbytes, self._pinned_nbytes - self._pinned_used, "pinned")
        buf = HostBuffer(name, int(data.ctypes.data), nbytes, data, True, self._next)
        self._pinned_used += nbytes
        self._insert(Allocation(buf, buf.device_ptr, nbytes, data))
        return buf

    def replace_array(self, buf: HostBuffer, array: NDArray[np.uint8]) -> HostBuffer:
        """The newest allocation, pinned, with another array over the same bytes for the host."""
        newest = self._live[-1]
        assert newest.buffer is buf
        newest.buffer = dataclasses.replace(buf, array=array)
        return newest.buffer

    def free(self, call: str, buf: DeviceBuffer | HostBuffer) -> None:
        """Poison and quarantine; INVALID_VALUE for a buffer that is unknown or was freed already."""
        addr = buf.ptr if isinstance(buf, DeviceBuffer) else buf.device_ptr
        if not self.owns(buf):
            again = any(start == addr and name == buf.name for start, _, name in self._quarantine)
            why = "was freed already" if again else "was not allocated by this backend"
            raise CudaError(Status.INVALID_VALUE, call, f"buffer {buf.name!r} ({addr:#x}) {why}")
        index = bisect_right(self._starts, addr) - 1
        alloc = self._live.pop(index)
        del self._starts[index]
        insort(self._quarantine, (alloc.addr, alloc.nbytes, buf.name))
        _poison(alloc.data, FREED)
        if isinstance(buf, DeviceBuffer):
            self.device_used -= alloc.nbytes
        else:
            self._pinned_used -= alloc.nbytes
        self._views.clear()
        self.epoch += 1

    def free_all(self) -> None:
        """Free everything that is left, the newest first."""
        for alloc in reversed(self._live[:]):
            self.free("cuCtxDestroy", alloc.buffer)

    def owns(self, buf: DeviceBuffer | HostBuffer) -> bool:
        """True for a live buffer of this address space."""
        addr = buf.ptr if isinstance(buf, DeviceBuffer) else buf.device_ptr
        index = bisect_right(self._starts, addr) - 1
        return index >= 0 and self._live[index].buffer == buf

    def buffers(self) -> tuple[DeviceBuffer | HostBuffer, ...]:
        """Live allocations in the order in which they were made."""
        return tuple(a.buffer for a in self._live)

    def freed(self) -> tuple[DeviceBuffer, ...]:
        """Everything that was freed: addresses never repeat, so that nothing is forgotten."""
        return tuple(DeviceBuffer(name, addr, nbytes) for addr, nbytes, name in self._quarantine)

    def find(self, addr: int) -> MemoryRange | None:
        """The live allocation that holds `addr`."""
        index = bisect_right(self._starts, addr) - 1
        if index < 0 or addr >= self._live[index].addr + self._live[index].nbytes:
            return None
        found = self._live[index]
        return MemoryRange(found.addr, found.nbytes, "pinned" if isinstance(found.buffer, HostBuffer) else "device")

    def view(self, addr: int, dtype: np.dtype[Any], shape: tuple[int, ...], writable: bool) -> NDArray[Any]:
        """C-contiguous array over device bytes. Raises `AccessFault` (700 out of range, 716 misaligned)."""
        try:
            return self._views[addr, dtype, shape, writable]
        except KeyError:
            return self._make_view(addr, dtype, shape, writable)

    def bytes(self, addr: int, nbytes: int) -> NDArray[np.uint8]:
        """Writable uint8 view of exactly one range inside one allocation. Raises `AccessFault`."""
        index = bisect_right(self._starts, addr) - 1
        if index >= 0:
            alloc = self._live[index]
            off = addr - alloc.addr
            if off + nbytes <= alloc.nbytes:
                return alloc.data[off : off + nbytes]
        if nbytes == 0:
            return np.empty(0, np.uint8)
        raise AccessFault(Status.ILLEGAL_ADDRESS, f"{nbytes} bytes at {addr:#x}; {self._nearest(addr)}")

    def _make_view(self, addr: int, dtype: np.dtype[Any], shape: tuple[int, ...], writable: bool) -> NDArray[Any]:
        addr = int(addr)
        if any(n < 0 for n in shape):
            raise ValueError(f"a view at {addr:#x} has a negative dimension: {shape}")
        nbytes = prod(shape) * dtype.itemsize
        if nbytes and addr % dtype.itemsize:
            text = f"{dtype} needs a multiple of {dtype.itemsize}, got {addr:#x}; {self._nearest(addr)}"
            raise AccessFault(Status.MISALIGNED_ADDRESS, text)
        array = self.bytes(addr, nbytes).view(dtype).reshape(shape)
        array.flags.writeable = writable
        if len(self._views) >= _MAX_VIEWS:
            self._views.clear()
        self._views[addr, dtype, shape, writable] = array
        return array

    def _reserve(self, call: str, name: str, nbytes: int, free: int, kind: str) -> NDArray[np.uint8]:
        if nbytes < 1:
            raise CudaError(Status.INVALID_VALUE, call, f"buffer {name!r} of {nbytes} bytes; ask for at least 1")
        if nbytes > free:
            raise OutOfDeviceMemory(call, f"{kind} buffer {name!r} needs {nbytes} bytes, {free} are free")
        try:
            return _aligned_storage(nbytes)
        except MemoryError:
            text = f"{kind} buffer {name!r} needs {nbytes} bytes, which this machine cannot give the host backend"
            raise OutOfDeviceMemory(call, text) from None

    def _insert(self, alloc: Allocation) -> None:
        self._starts.append(alloc.addr)
        self._live.append(alloc)
        self._next = -(-(alloc.addr + alloc.nbytes + max(_MIN_GAP, alloc.nbytes)) // _ALIGN) * _ALIGN

    def _nearest(self, addr: int) -> str:
        """A phrase that places an address relative to the closest allocation, freed ones included."""
        ranges = [(a.addr, a.nbytes, a.buffer.name, "") for a in self._live]
        ranges += [(start, nbytes, name, ", which was freed") for start, nbytes, name in self._quarantine]
        if addr == 0 or not ranges:
            return "a null pointer" if addr == 0 else "nothing is allocated"

        def distance(r: tuple[int, int, str, str]) -> int:
            return max(r[0] - addr, addr - (r[0] + r[1]) + 1, 0)

        start, nbytes, name, freed = min(ranges, key=distance)
        place = f"offset {addr - start}" if addr >= start else f"{start - addr} bytes before the start"
        return f"nearest allocation: {place} of {name!r} ({nbytes} bytes at {start:#x}{freed})"
