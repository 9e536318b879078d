"""A model source without files: any geometry, the synthetic generator's statistics, bytes made once, used often.

For benchmarks and true-shape tests. Layers share their bytes (each still has its own device memory) and experts come
from a pool of a few, because making 300 GB of random weights takes longer than anything measured with them.
"""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ds41rt.checkpoint.layout import ExpertLayout, TensorSpec, resident_tensors
from ds41rt.checkpoint.synth import expert_bytes, tensor_bytes
from ds41rt.config import ModelConfig

_DTYPES: dict[str, np.dtype[Any]] = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32)}
# Key of a bias that no score can make up for.
_MASKED = np.float32(-1e30)


class FilledSource:
    """`experts_per_layer` limits the router: the bias of the experts from there on is far below any score."""

    def __init__(
        self, config: ModelConfig, *, experts_per_layer: int | None = None, pool: int = 8, seed: int = 0
    ) -> None:
        self.config = config
        self.expert_layout = ExpertLayout.of(config)
        self._limit = config.n_experts if experts_per_layer is None else experts_per_layer
        self._seed = seed
        self._specs = {spec.name: spec for spec in resident_tensors(config)}
        self._made: dict[tuple[str, tuple[int, ...]], NDArray[np.uint8]] = {}
        self._pool = expert_bytes(config, pool, seed)
        rng = np.random.default_rng(seed)
        self._codes = rng.integers(0, 0x70, config.engram_head_dim, np.uint8)

    def token_map(self) -> NDArray[np.int64]:
        return np.arange(self.config.vocab, dtype=np.int64) % self.config.engram_compressed_vocab

    def resident_tensors(self) -> list[tuple[str, int]]:
        return [(spec.name, spec.nbytes) for spec in self._specs.values()]

    def read(self, name: str) -> NDArray[Any]:
        spec = self._specs[name]
        raw = self._bytes(spec)
        return raw.view(_DTYPES.get(spec.dtype, np.dtype(np.uint8))).reshape(spec.shape)

    def read_into(self, name: str, out: NDArray[np.uint8], offset: int = 0) -> None:
        out[:] = self._bytes(self._specs[name])[offset : offset + out.size]

    def read_expert(self, layer: int, expert: int, out: NDArray[np.uint8], offset: int = 0) -> None:
        whole = self._pool[(layer * self.config.n_experts + expert) % len(self._pool)]
        out[:] = whole[offset : offset + out.size]

    def read_engram_rows(
        self, layer: int, rows: NDArray[np.int64], codes_out: NDArray[np.uint8], scales_out: NDArray[np.uint8]
    ) -> None:
        codes_out[:] = self._codes[(rows[:, None] + np.arange(codes_out.shape[1])) % self._codes.size]
        scales_out[:] = 118

    def _bytes(self, spec: TensorSpec) -> NDArray[np.uint8]:
        """The tensor's bytes; tensors of the same name and shape in other layers share them."""
        stem = spec.name.split(".", 2)[2] if spec.name.startswith("layers.") else spec.name
        key = (stem, spec.shape)
        if key not in self._made:
            raw = tensor_bytes(spec, self.config, self._seed)
            if stem == "ffn.gate.bias":
                raw.view(np.float32)[self._limit :] = _MASKED
            self._made[key] = raw
        return self._made[key]
