"""A kernel that only reads: it measures what the memory gives, the yardstick of every other kernel's time."""

import numpy as np

from ds41rt.cu.kernel import U8, Array, Geometry, KernelSpec
from ds41rt.kernels.params import r, scalars, w


def _read_sum(data: Array, sums: Array, chunks: int, chunk_nbytes: int) -> None:
    words = data.reshape(chunks, chunk_nbytes).view(np.uint32)
    sums.view(np.uint32)[:] = words.sum(axis=1, dtype=np.uint32)


# Sum of the 32-bit words of each chunk, modulo 2^32; a chunk is a multiple of 16 bytes.
READ_SUM = KernelSpec(
    "read_sum",
    (
        r("data", U8, lambda s: (s.chunks * s.chunk_nbytes,)),
        w("sums", U8, lambda s: (4 * s.chunks,)),
        *scalars("u32", "chunks", "chunk_nbytes"),
    ),
    _read_sum,
    geometry=lambda s, n_sms: Geometry((s.chunks, 1, 1), 512),
)
