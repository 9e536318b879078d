"""One 64-bit hash for each of the 4,096 blocks of 2^20 float32 inputs of `sqrt_softplus`, all 2^32 in all.

A block's hash is the sum modulo 2^64 of mix64(output bits ^ (input bits << 32)): it depends on which output stands
where but not on the order of summation, so that a device can compute it too. NaN outputs count as 0x7FC00000.
Run this file to write the committed table anew (a few minutes).
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds41rt.kernels.softplus import sqrt_softplus

TABLE = Path(__file__).parents[1] / "goldens_own" / "sqrt_softplus_hashes.npy"
BLOCK = 1 << 20
BLOCKS = 1 << 12
# Small enough to stay in the processor's cache.
CHUNK = 1 << 14


def mix64(h: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64; every operation modulo 2^64. Works in place."""
    h ^= h >> np.uint64(30)
    h *= np.uint64(0xBF58476D1CE4E5B9)
    h ^= h >> np.uint64(27)
    h *= np.uint64(0x94D049BB133111EB)
    h ^= h >> np.uint64(31)
    return h


def canonical(y: NDArray[np.float32]) -> NDArray[np.uint32]:
    """The bits of y, every NaN as 0x7FC00000."""
    bits = y.view(np.uint32).copy()
    bits[np.isnan(y)] = 0x7FC00000
    return bits


def outputs(block: int) -> Iterator[tuple[NDArray[np.uint32], NDArray[np.uint32]]]:
    """(input bits, canonical output bits) of a block, chunk by chunk."""
    for first in range(block * BLOCK, (block + 1) * BLOCK, CHUNK):
        x = np.arange(first, first + CHUNK, dtype=np.uint64).astype(np.uint32)
        with np.errstate(all="ignore"):
            yield x, canonical(sqrt_softplus(x.view(np.float32)))


def chunk_hash(x: NDArray[np.uint32], y: NDArray[np.uint32]) -> int:
    """The part of a block's hash that these inputs and outputs make up."""
    return int(np.add.reduce(mix64(y.astype(np.uint64) ^ (x.astype(np.uint64) << np.uint64(32)))))


def block_hash(block: int) -> int:
    """The hash of one block of our `sqrt_softplus`."""
    return sum(chunk_hash(x, y) for x, y in outputs(block)) % 2**64


if __name__ == "__main__":
    TABLE.parent.mkdir(exist_ok=True)
    np.save(TABLE, np.array([block_hash(b) for b in range(BLOCKS)], np.uint64))
