"""How a kernel is declared: once, as an ordered list of typed parameters beside a NumPy reference.

The declaration says what every pointer reads and writes. The host backend builds the arrays that the reference
gets from exactly that (so a reference cannot touch undeclared memory), and the PTX entry is checked against it.
This file knows no kernel and no backend.
"""

import inspect
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

BF16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
F32: np.dtype[Any] = np.dtype(np.float32)
I32: np.dtype[Any] = np.dtype(np.int32)
U64: np.dtype[Any] = np.dtype(np.uint64)
U8: np.dtype[Any] = np.dtype(np.uint8)

Access = Literal["r", "w", "rw"]
ScalarType = Literal["u32", "i32", "u64", "f32"]
Array = NDArray[Any]
# A launch's scalar parameters by attribute (`s.n`); values are int or float.
Scalars = SimpleNamespace
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pointer:
    """A device pointer parameter: element type, shape from the scalars, access.

    A shape with a zero in it means "not used by this launch": the pointer may then be 0.
    """

    name: str
    dtype: np.dtype[Any]
    shape: Callable[[Scalars], Shape]
    access: Access


@dataclass(frozen=True, slots=True)
class Scalar:
    """A by-value parameter. It is baked into a captured graph: nothing that changes per token may be one."""

    name: str
    ctype: ScalarType


class Span(NamedTuple):
    """Memory reached through a pointer that lies in device memory, resolved when the kernel executes."""

    addr: int
    dtype: np.dtype[Any]
    shape: Shape
    access: Access


class Geometry(NamedTuple):
    """How a launch fills the device: blocks, threads a block, dynamic shared memory a block in bytes."""

    grid: tuple[int, int, int]
    block: int
    shared_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel: entry name, parameters in order, NumPy reference, and the indirect memory it reaches.

    `reference` takes one argument per parameter, under the same names and in the same order: an array for a pointer
    (read-only for access "r", None for an unused pointer), an int or float for a scalar. With `indirect` it takes one
    more, `spans`: the arrays of the spans that `indirect` (called with the same arguments) returned, in order.

    `geometry(scalars, n_multiprocessors)` is the launch shape on a GPU; a result must not depend on it. A spec without
    one has no device version.

    `indirect_nbytes(scalars)` is how many bytes a launch has to move through `indirect`, where that is a good part of
    its work: its weight in a profile, not a bound.

    `ptx` is the PTX text of a kernel that does not come with ds41rt; its entry is called `name`.
    """

    name: str
    params: tuple[Pointer | Scalar, ...]
    reference: Callable[..., None]
    indirect: Callable[..., Sequence[Span]] | None = None
    geometry: Callable[[Scalars, int], Geometry] | None = None
    indirect_nbytes: Callable[[Scalars], int] | None = None
    ptx: str | None = None
    scalar_names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        names = [p.name for p in self.params]
        for fn, want in ((self.reference, names + (["spans"] if self.indirect else [])), (self.indirect, names)):
            if fn is not None and list(inspect.signature(fn).parameters) != want:
                got = list(inspect.signature(fn).parameters)
                raise TypeError(f"kernel {self.name}: {fn.__name__} takes {got}, the parameters are {want}")
        object.__setattr__(self, "scalar_names", tuple(p.name for p in self.params if isinstance(p, Scalar)))

    def scalars(self, args: Mapping[str, int | float]) -> Scalars:
        """The scalar arguments as a namespace, the form that `Pointer.shape` takes."""
        return SimpleNamespace(**{n: args[n] for n in self.scalar_names})


class KernelLaunch:
    """A launch prepared once by `GpuBackend.prepare` and enqueued any number of times: nothing is parsed per token."""

    __slots__ = ("args", "label", "spec")

    def __init__(self, spec: KernelSpec, args: tuple[int | float, ...], label: str) -> None:
        self.spec = spec
        self.args = args
        self.label = label

    def __repr__(self) -> str:
        return f"<{self.label}: {self.spec.name}>"


def launch_nbytes(launch: KernelLaunch) -> int:
    """Bytes that a launch must move: its arrays once each, and what it is declared to move through tables."""
    spec = launch.spec
    scalars = spec.scalars({p.name: value for p, value in zip(spec.params, launch.args, strict=True)})
    total = sum(prod(p.shape(scalars)) * p.dtype.itemsize for p in spec.params if isinstance(p, Pointer))
    return total + (0 if spec.indirect_nbytes is None else spec.indirect_nbytes(scalars))


# How a value of each scalar type is packed; a pointer is a "u64".
SCALAR_FORMATS: dict[str, str] = {"u32": "<I", "i32": "<i", "u64": "<Q", "f32": "<f"}


def parameter_block(launch: KernelLaunch) -> tuple[tuple[int, bytes], ...]:
    """(offset, bytes) of each parameter as a device lays them out: in order, each at a multiple of its size."""
    block = []
    off = 0
    for param, value in zip(launch.spec.params, launch.args, strict=True):
        raw = struct.pack(SCALAR_FORMATS[param.ctype if isinstance(param, Scalar) else "u64"], value)
        off = -(-off // len(raw)) * len(raw)
        block.append((off, raw))
        off += len(raw)
    return tuple(block)


_LIMITS: dict[str, tuple[int, int]] = {"u32": (0, 2**32 - 1), "i32": (-(2**31), 2**31 - 1), "u64": (0, 2**64 - 1)}


def ordered_args(spec: KernelSpec, args: Mapping[str, int | float]) -> tuple[int | float, ...]:
    """`args` in parameter order, checked for names and ranges; TypeError or ValueError names kernel and parameter."""
    names = [p.name for p in spec.params]
    if set(args) != set(names):
        missing, extra = sorted(set(names) - set(args)), sorted(set(args) - set(names))
        raise TypeError(f"kernel {spec.name}: missing arguments {missing}, unknown arguments {extra}")
    for p in spec.params:
        value = args[p.name]
        if isinstance(p, Scalar) and p.ctype == "f32":
            if not isinstance(value, int | float):
                raise TypeError(f"kernel {spec.name}: {p.name} must be a number, is {value!r}")
            continue
        lo, hi = _LIMITS[p.ctype if isinstance(p, Scalar) else "u64"]
        if not isinstance(value, int) or not lo <= value <= hi:
            raise ValueError(f"kernel {spec.name}: {p.name} must be an integer in {lo}..{hi}, is {value!r}")
    return tuple(args[n] for n in names)
