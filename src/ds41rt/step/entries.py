"""What enters each layer, kept for those who watch a step: the streams before the layer's engram rows, and the mix.

In a replay these values exist for a moment in the middle of a graph. So as long as somebody observes, every attention
input begins by copying them aside, in the eager step and in the graphs alike; graphs are captured anew when the first
observer comes and when the last one leaves. Nothing reads the copies but observers. Must not know who they are.
"""

from ds41rt.config import ModelConfig
from ds41rt.cu.backend import GpuBackend, Stream
from ds41rt.step.buffers import StepBuffers


class Entries:
    """One row a layer: the streams bf16[hc, dim], then the mix f32[hc] that collapses them."""

    def __init__(self, backend: GpuBackend, cfg: ModelConfig, buffers: StepBuffers) -> None:
        self._backend = backend
        self._buf = buffers
        self.streams_nbytes = 2 * cfg.hc_mult * cfg.dim
        self.mix_nbytes = 4 * cfg.hc_mult
        self._stride = -(-(self.streams_nbytes + self.mix_nbytes) // 256) * 256
        self._store = backend.alloc("layer entries", cfg.n_layers * self._stride)

    @property
    def ptr(self) -> int:
        return self._store.ptr

    def streams(self, layer: int) -> int:
        return self._store.ptr + layer * self._stride

    def mix(self, layer: int) -> int:
        return self.streams(layer) + self.streams_nbytes

    def keep(self, layer: int, stream: Stream) -> None:
        """Copy what is about to enter the layer; may be recorded."""
        self._backend.copy_d2d(
            self.streams(layer), self._buf.streams, self.streams_nbytes, stream, f"L{layer:02d}.entry.streams"
        )
        self._backend.copy_d2d(self.mix(layer), self._buf.pre_prev, self.mix_nbytes, stream, f"L{layer:02d}.entry.mix")

    def close(self) -> None:
        self._backend.free(self._store)
