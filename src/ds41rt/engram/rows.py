"""Reads the engram rows of one token from the checkpoint and uploads those of all engram layers in one copy.

Row addresses depend on token ids alone, so the rows of every engram layer are on the device before the first layer
runs; whether a layer then runs eagerly or inside a graph makes no difference to them. Must not know segments or streams
other than the one it is given.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ds41rt.checkpoint.engram_table import EngramConstants, engram_rows
from ds41rt.checkpoint.source import ModelSource
from ds41rt.config import ModelConfig
from ds41rt.cu.backend import DeviceBuffer, GpuBackend, Stream


class EngramUpload:
    """Device buffers of the current token's rows, one part per engram layer: all codes, then all scale bytes."""

    def __init__(
        self,
        backend: GpuBackend,
        cfg: ModelConfig,
        constants: Sequence[EngramConstants],
        token_map: NDArray[np.int64],
        source: ModelSource,
    ) -> None:
        self._backend = backend
        self._source = source
        self._constants = dict(zip(cfg.engram_layers, constants, strict=True))
        self._map = token_map
        self._pad = int(token_map[cfg.engram_pad_token])
        self._max_ngram = cfg.engram_max_ngram
        n_cols = (cfg.engram_max_ngram - 1) * cfg.engram_heads
        codes_nbytes, scales_nbytes = n_cols * cfg.engram_head_dim, n_cols * cfg.engram_head_dim // 32
        part = -(-(codes_nbytes + scales_nbytes) // 256) * 256
        nbytes = max(part * len(cfg.engram_layers), 256)
        self._device: DeviceBuffer = backend.alloc("engram rows", nbytes)
        try:
            self._host = backend.alloc_pinned("engram rows image", nbytes)
        except BaseException:
            backend.free(self._device)
            raise
        self.codes_ptr: dict[int, int] = {}
        self.scales_ptr: dict[int, int] = {}
        self._images: dict[int, tuple[NDArray[np.uint8], NDArray[np.uint8]]] = {}
        for i, layer in enumerate(cfg.engram_layers):
            off = i * part
            self.codes_ptr[layer] = self._device.ptr + off
            self.scales_ptr[layer] = self._device.ptr + off + codes_nbytes
            raw = self._host.array[off : off + codes_nbytes + scales_nbytes]
            self._images[layer] = (
                raw[:codes_nbytes].reshape(n_cols, cfg.engram_head_dim),
                raw[codes_nbytes:].reshape(n_cols, cfg.engram_head_dim // 32),
            )
        self._nbytes = nbytes

    def compressed(self, token: int) -> int:
        """The token's id in the compressed vocabulary of the hash."""
        return int(self._map[token])

    def lookback(self, history: NDArray[np.int64], position: int) -> NDArray[np.int64]:
        """Compressed ids [current, one back, ...] int64[max_ngram]; before the text starts, the mapped pad token."""
        t = np.full(self._max_ngram, self._pad, np.int64)
        n = min(self._max_ngram, position + 1)
        t[:n] = history[position - n + 1 : position + 1][::-1]
        return t

    def preload(self, history: NDArray[np.int64], position: int, stream: Stream) -> None:
        """Read and upload the rows of every engram layer for the token at `position`.

        `history` int64[>= position + 1] holds the compressed ids of the sequence by position. Raises `CheckpointError`.
        """
        if not self._constants:
            return
        t = self.lookback(history, position)
        for layer, constants in self._constants.items():
            codes, scales = self._images[layer]
            self._source.read_engram_rows(layer, engram_rows(t, constants), codes, scales)
        self._backend.copy_h2d(self._device.ptr, self._host, self._nbytes, stream, 0, "engram.rows")

    def close(self) -> None:
        self._backend.free_pinned(self._host)
        self._backend.free(self._device)
