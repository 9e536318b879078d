"""Device memory for a guess: what the next layer's router would choose if it ran on this layer's MoE input.

Buffers of its own, so that a guess leaves no trace in what the step uses.
"""

from ds41rt.cu.backend import GpuBackend
from ds41rt.moe.header import header_words

_ALIGN = 256


class GuessBuffers:
    """Addresses of logits f32[n_experts], plan block (pointers u64[3, k], weights f32[k], rows i32[k]), header row."""

    def __init__(self, backend: GpuBackend, n_experts: int, top_k: int) -> None:
        self._backend = backend
        plan_off = -(-4 * n_experts // _ALIGN) * _ALIGN
        header_off = plan_off + -(-32 * top_k // _ALIGN) * _ALIGN
        self._device = backend.alloc("guess of the next layer", header_off + 4 * header_words(top_k))
        self.logits = self._device.ptr
        self.ptrs_dev = self._device.ptr + plan_off
        self.weight_dev = self.ptrs_dev + 24 * top_k
        self.rows_dev = self.ptrs_dev + 28 * top_k
        self.header = self._device.ptr + header_off

    def close(self) -> None:
        self._backend.free(self._device)
