"""Device memory for copies of a layer's picks that lie in the host tier: kernels multiply by the copies.

Rewritten by every layer. Knows neither slots nor residency.
"""

from ds41rt.cu.backend import GpuBackend
from ds41rt.moe.pool import PinnedPool


class GatherBuffers:
    """Addresses of the copies uint8[top_k, slot bytes] and of the pointer table u64[3, top_k] that leads to them."""

    def __init__(self, backend: GpuBackend, pool: PinnedPool, top_k: int) -> None:
        self._backend = backend
        self.slot_nbytes = pool.slot_nbytes
        self.pool_base = pool.base
        self.pool_nbytes = pool.host.nbytes
        self._device = backend.alloc("gathered experts", top_k * (self.slot_nbytes + 24))
        self.slots = self._device.ptr
        self.ptrs_dev = self.slots + top_k * self.slot_nbytes

    def close(self) -> None:
        self._backend.free(self._device)
