"""Runs a kernel's reference on plain arrays, with the memory rules of the host backend in miniature.

Every write-only array starts poisoned, every read-only one is locked, and indirect memory is found by address in
`Memory`, which knows nothing but what a test put there.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41rt.cu.kernel import BF16, KernelSpec, Pointer, Scalar, Span

POISON = 0xFF


def bf16(values: Any) -> NDArray[Any]:
    """bf16 array of numbers, or of uint16 bit patterns."""
    array = np.asarray(values)
    return array.view(BF16) if array.dtype == np.uint16 else array.astype(BF16)


def poisoned(shape: Any, dtype: Any) -> NDArray[Any]:
    """0xFF bytes: NaN in every float type, -1 in the signed integers."""
    out = np.empty(shape, dtype)
    out.reshape(-1).view(np.uint8).fill(POISON)
    return out


class Memory:
    """Named arrays at made-up addresses, far enough apart that an overrun finds nothing."""

    def __init__(self) -> None:
        self._regions: dict[int, NDArray[np.uint8]] = {}
        self._next = 0x7000_0000_0000
        self.touched: list[Span] = []

    def put(self, array: NDArray[Any]) -> int:
        """The array's bytes become memory (not a copy); returns the address."""
        addr = self._next
        flat = array.reshape(-1).view(np.uint8)
        assert np.shares_memory(flat, array)
        self._regions[addr] = flat
        self._next += (flat.nbytes + 0x10000) & ~0xFF
        return addr

    def cell(self, array: NDArray[Any]) -> NDArray[np.uint64]:
        """A pointer cell that holds the address of `array`."""
        return np.array([self.put(array)], np.uint64)

    def resolve(self, span: Span) -> NDArray[Any]:
        self.touched.append(span)
        nbytes = int(np.prod(span.shape)) * span.dtype.itemsize
        for base, region in self._regions.items():
            if base <= span.addr and span.addr + nbytes <= base + region.nbytes:
                view = region[span.addr - base : span.addr - base + nbytes].view(span.dtype).reshape(span.shape)
                if span.access == "r":
                    view.flags.writeable = False
                return view
        raise AssertionError(f"{span} is outside every region")


def run(
    spec: KernelSpec, args: Mapping[str, Any], memory: Memory | None = None, out: Mapping[str, Any] | None = None
) -> dict[str, NDArray[Any]]:
    """Run `spec` on arrays and scalars by name; returns the written arrays by name.

    Write-only parameters are left out of `args` (they are made here, poisoned) unless given in `out`. "rw" arrays are
    updated in place. A parameter whose shape has a zero in it must be left out and reaches the reference as None.
    """
    scalars = spec.scalars({p.name: args[p.name] for p in spec.params if isinstance(p, Scalar)})
    values: list[Any] = []
    written: dict[str, NDArray[Any]] = {}
    used = set()
    for p in spec.params:
        if isinstance(p, Scalar):
            values.append(args[p.name])
            used.add(p.name)
            continue
        value = _pointer(p, p.shape(scalars), args, out or {}, used)
        if value is not None and p.access != "r":
            written[p.name] = value
        values.append(value)
    unknown = set(args) - used
    assert not unknown, f"{spec.name}: {unknown} are no parameters, or are unused by this launch"
    extra = []
    if spec.indirect is not None:
        spans = spec.indirect(*values)
        assert memory is not None
        extra = [[memory.resolve(span) for span in spans]]
    with np.errstate(all="ignore"):
        spec.reference(*values, *extra)
    return written


def _pointer(
    p: Pointer, shape: tuple[int, ...], args: Mapping[str, Any], out: Mapping[str, Any], used: set[str]
) -> NDArray[Any] | None:
    if 0 in shape:
        return None
    if p.access == "w":
        return out[p.name] if p.name in out else poisoned(shape, p.dtype)
    used.add(p.name)
    array: NDArray[Any] = args[p.name]
    assert array.dtype == p.dtype, f"{p.name}: {array.dtype}, declared {p.dtype}"
    assert array.shape == shape, f"{p.name}: {array.shape}, declared {shape}"
    if p.access == "r":
        array = array.view()
        array.flags.writeable = False
    return array
