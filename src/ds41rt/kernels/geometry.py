"""Launch shapes of the matrix kernels: how many blocks, and the shared memory that ptx/include/product.cuh lays out.

The constants and `units` repeat what the device code does for itself; the grid only decides how the work is spread.
"""

import math
from typing import NamedTuple

from ds41rt.cu.kernel import Geometry

_WARPS = 8
_RING = 4
_NOMINAL_BLOCKS = 128
_SLOT_NBYTES = 2048
# Two blocks keep 128 KB of loads in flight on a multiprocessor and hide each other's prologue.
_BLOCKS_PER_SM = 2


class WeightFormat(NamedTuple):
    """What one step of 2 KB holds: matrix rows, K values and scales of one row (each of 32 values); and the bytes of a
    warp's ring of scales, which for FP4 is twice as long as its ring of weights."""

    rows: int
    k_step: int
    scales: int
    scale_ring_nbytes: int


FP8 = WeightFormat(16, 128, 4, 4 * _RING)
FP4 = WeightFormat(16, 256, 8, 128 * 2 * _RING)
BF16_PLAIN = WeightFormat(8, 128, 0, 0)


def _steps(fmt: WeightFormat, k: int) -> int:
    return -(-k // fmt.k_step)


def shared_nbytes(fmt: WeightFormat, k: int) -> int:
    """Dynamic shared memory of a block for a product over K values."""
    rings = _WARPS * (_RING * _SLOT_NBYTES + fmt.scale_ring_nbytes)
    partial = 2 * _WARPS * fmt.rows * 4
    return rings + partial + _steps(fmt, k) * (2 * fmt.k_step + 4 * fmt.scales)


def units(fmt: WeightFormat, k: int, tiles: int, *, matrices: int = 1, sets: int = 1) -> int:
    """Pieces of work that blocks share: a block does some tiles (of `matrices` matrices each) at a time.

    `tiles` are those of one set; a set is a matrix with activations of its own. Several warps may share the K range of
    a tile; how many is decided by the shape alone.
    """
    steps = _steps(fmt, k)
    best, best_steps = 0, math.inf
    parts = 1
    while matrices * parts <= _WARPS and parts <= steps:
        n_units = sets * -(-tiles // (_WARPS // matrices // parts))
        longest = -(-n_units // _NOMINAL_BLOCKS) * -(-steps // parts)
        if longest <= best_steps:
            best, best_steps = n_units, longest
        parts *= 2
    return best


def tiles_of(fmt: WeightFormat, *rows: int) -> int:
    """Tiles of matrices one after another, each of a number of rows."""
    return sum(-(-n // fmt.rows) for n in rows)


def matrix_geometry(n_sms: int, n_units: int, nbytes: int, *, extra: int = 0) -> Geometry:
    """Persistent blocks for `n_units` pieces of work, and `extra` blocks for work of another kind."""
    blocks = min(n_units, max(n_sms * _BLOCKS_PER_SM - extra, 1))
    return Geometry((blocks + extra, 1, 1), 32 * _WARPS, nbytes)
