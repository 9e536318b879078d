"""Hashes of `sqrt_softplus` over blocks of 2^20 consecutive float32 bit patterns, 4,096 blocks for all 2^32.

A block's hash is the sum modulo 2^64 of mix64(output bits ^ (input bits << 32)): it depends on which output stands
where but not on the order of summation, so that a device can compute it too. NaN outputs count as 0x7FC00000.
No step launches the kernel declared here: it is how a device proves that its routing function is the written one.
"""

from collections.abc import Iterator

import numpy as np

from ds41rt.cu.kernel import U64, Array, Geometry, KernelSpec, Scalars
from ds41rt.kernels.params import scalars, w
from ds41rt.kernels.softplus import sqrt_softplus

BLOCK = 1 << 20
BLOCKS = 1 << 12
# Small enough to stay in the processor's cache.
CHUNK = 1 << 14


def mix64(h: Array) -> Array:
    """The finaliser of SplitMix64 on u64; every operation modulo 2^64. Works in place."""
    h ^= h >> np.uint64(30)
    h *= np.uint64(0xBF58476D1CE4E5B9)
    h ^= h >> np.uint64(27)
    h *= np.uint64(0x94D049BB133111EB)
    h ^= h >> np.uint64(31)
    return h


def canonical(y: Array) -> Array:
    """The bits of f32 y as u32, every NaN as 0x7FC00000."""
    bits: Array = y.view(np.uint32).copy()
    bits[np.isnan(y)] = 0x7FC00000
    return bits


def outputs(block: int) -> Iterator[tuple[Array, Array]]:
    """(input bits, canonical output bits) of a block, chunk by chunk."""
    for first in range(block * BLOCK, (block + 1) * BLOCK, CHUNK):
        x = np.arange(first, first + CHUNK, dtype=np.uint64).astype(np.uint32)
        with np.errstate(all="ignore"):
            yield x, canonical(sqrt_softplus(x.view(np.float32)))


def chunk_hash(x: Array, y: Array) -> int:
    """The part of a block's hash that these input and output bits (u32) make up."""
    return int(np.add.reduce(mix64(y.astype(np.uint64) ^ (x.astype(np.uint64) << np.uint64(32)))))


def block_hash(block: int) -> int:
    """The hash of one block of our `sqrt_softplus`."""
    return sum(chunk_hash(x, y) for x, y in outputs(block)) % 2**64


def _sqrt_softplus_hash(hashes: Array, first_block: int, n_blocks: int) -> None:
    hashes[...] = [block_hash(first_block + i) for i in range(n_blocks)]


def _geometry(s: Scalars, n_sms: int) -> Geometry:
    return Geometry((s.n_blocks, 1, 1), 256)


SQRT_SOFTPLUS_HASH = KernelSpec(
    "sqrt_softplus_hash",
    (
        w("hashes", U64, lambda s: (s.n_blocks,)),
        *scalars("u32", "first_block", "n_blocks"),
    ),
    _sqrt_softplus_hash,
    geometry=_geometry,
)
