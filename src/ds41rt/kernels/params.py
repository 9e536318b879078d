"""Short forms for declaring kernel parameters, so that a declaration reads like a table."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ds41rt.cu.kernel import Pointer, Scalar, Scalars, ScalarType, Shape

ShapeOf = Callable[[Scalars], Shape]


def r(name: str, dtype: np.dtype[Any], shape: ShapeOf) -> Pointer:
    """A pointer that the kernel only reads."""
    return Pointer(name, dtype, shape, "r")


def w(name: str, dtype: np.dtype[Any], shape: ShapeOf) -> Pointer:
    """A pointer whose whole extent the kernel writes, whatever it held before."""
    return Pointer(name, dtype, shape, "w")


def rw(name: str, dtype: np.dtype[Any], shape: ShapeOf) -> Pointer:
    """A pointer that the kernel updates in place."""
    return Pointer(name, dtype, shape, "rw")


def scalars(ctype: ScalarType, *names: str) -> tuple[Scalar, ...]:
    """By-value parameters of one type."""
    return tuple(Scalar(name, ctype) for name in names)


def tiles(n: int) -> int:
    """Number of 32-wide scale tiles that cover `n` values."""
    return -(-n // 32)


def cell(_: Scalars) -> Shape:
    """Shape of a device cell that holds one pointer."""
    return (1,)


def step_shape(_: Scalars) -> Shape:
    """Shape of `step`: [position, token]."""
    return (2,)
