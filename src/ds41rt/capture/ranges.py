"""Whose memory an address is: a backend's ledger, ranges that a caller registers, and what the driver says of the rest.

Of several ranges around an address the most telling one gives the name: a part that somebody named before the
allocation it lies in, live memory before freed. This file knows addresses; it must not know graphs.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ds41rt.capture.dump import Access, Inside, Place, Range, Space
from ds41rt.cu.backend import DeviceBuffer, GpuBackend, MemoryRange
from ds41rt.errors import InputError, UnsupportedError

# Smaller and larger words are no addresses of any device; asking the driver about every count and size would be slow.
_LOWEST, _HIGHEST = 1 << 16, 1 << 57

_HOST_SIDE = " (host address)"

Ask = Callable[[int], MemoryRange | None]
"""The allocation around an address. Raises `UnsupportedError` where nobody can say."""


def ledger_ranges(backend: GpuBackend) -> list[Range]:
    """What a backend has allocated, and what it has freed as far as it remembers.

    Pinned memory stands there by the address that the device sees, and by the host's if that is another one.
    """
    found = []
    for buf in backend.ledger():
        if isinstance(buf, DeviceBuffer):
            found.append(Range(name=buf.name, addr=buf.ptr, nbytes=buf.nbytes, space="device", source="ledger"))
            continue
        places = {buf.ptr: buf.name + _HOST_SIDE, buf.device_ptr: buf.name}
        for addr, name in places.items():
            found.append(Range(name=name, addr=addr, nbytes=buf.nbytes, space="pinned", source="ledger"))
    # An address is given out again and again: who had it last counts.
    for gone in {buf.ptr: buf for buf in backend.freed()}.values():
        found.append(
            Range(name=gone.name, addr=gone.ptr, nbytes=gone.nbytes, space="unknown", source="ledger", freed=True)
        )
    return found


def caller_ranges(ranges: Mapping[str, Any], ask: Ask | None = None) -> list[Range]:
    """Ranges by name: (address, bytes), or a tensor with `data_ptr()` and `nbytes`. `ask` knows what memory it is.

    Raises `InputError` naming the range that is neither.
    """
    found = []
    for name, given in ranges.items():
        if hasattr(given, "data_ptr"):
            addr, nbytes = given.data_ptr(), given.nbytes
        elif isinstance(given, tuple) and len(given) == 2:
            addr, nbytes = given
        else:
            raise InputError(f"range {name!r}: {given!r} is neither (address, bytes) nor a tensor")
        if not isinstance(addr, int) or not isinstance(nbytes, int) or addr < 0 or nbytes < 0:
            raise InputError(f"range {name!r}: address {addr!r} and size {nbytes!r} must be integers from 0 on")
        found.append(Range(name=name, addr=addr, nbytes=nbytes, space=_space(addr, ask), source="caller"))
    return found


def _space(addr: int, ask: Ask | None) -> Space:
    try:
        found = None if ask is None else ask(addr)
    except UnsupportedError:
        return "unknown"
    return "unknown" if found is None else found.space


class Names:
    """Names addresses, and remembers which ranges it used.

    `ask` finds allocations that no range covers; it raises `UnsupportedError` where nobody can be asked. Without it
    `ranges` are taken for all the memory there is.
    """

    def __init__(self, ranges: Iterable[Range], ask: Ask | None = None) -> None:
        self._ranges = _unique(ranges)
        self._ask = ask
        self._found: Counter[Space] = Counter()
        self._nothing: set[int] = set()
        self._used: set[str] = set()
        # False once an address had to be left open because nobody could be asked.
        self.complete = True
        self._index()

    def place(self, addr: int, nbytes: int | None, access: Access | None, space: Space = "unknown") -> Place:
        """A range that is used for certain, with its owner if it has one."""
        owner = None if space == "pageable" or addr == 0 else self._owner(addr, nbytes or 1)
        if owner is None:
            return Place(addr=addr, nbytes=nbytes, space=space, access=access)
        self._used.add(owner.name)
        return Place(
            addr=addr, nbytes=nbytes, space=owner.space if space == "unknown" else space,
            owner=owner.name, owner_off=addr - owner.addr, access=access,
        )  # fmt: skip

    def guess(self, word: int) -> Place | None:
        """A word that may be an address: its place if it lies in a range, None if it is just a number."""
        if not _LOWEST <= word < _HIGHEST:
            return None
        place = self.place(word, None, None)
        return None if place.owner is None else place

    def inside(self, raw: bytes, off: int) -> tuple[Inside, ...]:
        """The addresses in a structure whose first byte lies at `off` of the parameter block."""
        found = []
        for at in range(-off % 8, len(raw) - 7, 8):
            place = self.guess(int.from_bytes(raw[at : at + 8], "little"))
            if place is not None:
                found.append(Inside(off=at, place=place))
        return tuple(found)

    def ranges(self) -> tuple[Range, ...]:
        """For a dump: all live memory, and of freed memory and second addresses what is used, by address."""
        kept = [r for r in self._ranges if r.name in self._used or not (r.freed or r.name.endswith(_HOST_SIDE))]
        return tuple(sorted(kept, key=lambda r: (r.addr, -r.nbytes, r.name)))

    def _owner(self, addr: int, nbytes: int) -> Range | None:
        around = self._around(addr)
        if not around:
            self._learn(addr)
            around = self._around(addr)
        holding = [r for r in around if addr + nbytes <= r.addr + r.nbytes]
        if holding:
            return min(holding, key=_telling)
        # It reaches beyond: the largest says best beyond what.
        return min(around, key=lambda r: (r.freed, -r.nbytes), default=None)

    def _around(self, addr: int) -> tuple[Range, ...]:
        at = bisect_right(self._bounds, addr) - 1
        return self._pieces[at] if at >= 0 else ()

    def _learn(self, addr: int) -> None:
        if self._ask is None or addr in self._nothing:
            return
        try:
            found = self._ask(addr)
        except UnsupportedError:
            self.complete = False
            return
        if found is None:
            self._nothing.add(addr)
            return
        # Numbered in the order of their use, so that equal graphs have equal names wherever they run.
        self._found[found.space] += 1
        name = f"{found.space} allocation {self._found[found.space]}"
        known = Range(name=name, addr=found.addr, nbytes=found.nbytes, space=found.space, source="driver")
        self._ranges = _unique([*self._ranges, known])
        self._index()

    def _index(self) -> None:
        """Cut the address space at every beginning and end; each piece has the ranges around it."""
        ends = sorted((at, i, r) for i, r in enumerate(self._ranges) for at in {r.addr, r.addr + r.nbytes})
        self._bounds: list[int] = []
        self._pieces: list[tuple[Range, ...]] = []
        open_now: dict[int, Range] = {}
        for at, i, r in ends:
            if at == r.addr and r.nbytes:
                open_now[i] = r
            else:
                open_now.pop(i, None)
            if self._bounds and self._bounds[-1] == at:
                self._pieces[-1] = tuple(open_now.values())
            else:
                self._bounds.append(at)
                self._pieces.append(tuple(open_now.values()))


def _telling(r: Range) -> tuple[bool, int, int]:
    return r.freed, ("caller", "ledger", "driver").index(r.source), r.nbytes


def _unique(ranges: Iterable[Range]) -> list[Range]:
    """Several ranges of one name get numbers."""
    seen: set[str] = set()
    unique = []
    for r in ranges:
        name, n = r.name, 1
        while name in seen:
            n += 1
            name = f"{r.name} #{n}"
        seen.add(name)
        unique.append(r if name == r.name else r.model_copy(update={"name": name}))
    return unique
