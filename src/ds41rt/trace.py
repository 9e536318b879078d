"""Records what a run decided, token by token, and a hash of the streams per layer: where two runs part is found by
comparing two of these files.

`streams_hash` is blake2b-64 over the bytes of a layer's streams between its attention and its ffn half, before the
attention's expand: the one point that every mode passes (inside a replay it exists as the layer's snapshot).
"""

from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from ds41rt.cu.backend import Stream
from ds41rt.engine import Engine
from ds41rt.step.hash_log import PartHash


class TraceRecorder:
    """Attach to an engine, call `end_token` after every step, then `save`. Synchronises once a layer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        cfg = engine.config
        self._hash = PartHash(engine.backend, engine.buffers)
        self._hashes: list[int] = [0] * cfg.n_layers
        self._rows: dict[int, NDArray[np.int32]] = {}
        self._tokens: list[tuple[NDArray[np.int32], NDArray[np.float32], list[int], dict[int, NDArray[np.int32]]]] = []
        engine.observe(self)

    def selection(self, layer: int, rows: NDArray[np.int32]) -> None:
        self._rows[layer] = rows

    def point(self, position: int, layer: int, part: str, addr: int, nbytes: int, stream: Stream) -> None:
        if part == "streams":
            self._hashes[layer] = self._hash(addr, nbytes, stream)

    def end_token(self) -> None:
        """Close the record of the token just stepped."""
        rows = [row for row in self._engine.router.picks if row is not None]
        ids = np.array([row.picks for row in rows], np.int32)
        weights = np.array([row.weights for row in rows], np.float32)
        self._tokens.append((ids, weights, list(self._hashes), dict(self._rows)))

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """expert_ids i32 and expert_weights f32 [positions, layers, k], best first; streams_hash u64 [positions,
        layers]; index_topk.LXX i32 [positions, index top-k], ascending and padded with -1."""
        cfg = self._engine.config
        out: dict[str, NDArray[np.generic]] = {
            "expert_ids": np.array([t[0] for t in self._tokens], np.int32),
            "expert_weights": np.array([t[1] for t in self._tokens], np.float32),
            "streams_hash": np.array([t[2] for t in self._tokens], np.uint64),
        }
        for layer in cfg.index_source_layers:
            table = np.full((len(self._tokens), cfg.index_topk), -1, np.int32)
            for i, token in enumerate(self._tokens):
                table[i, : token[3][layer].size] = token[3][layer]
            out[f"index_topk.L{layer:02d}"] = table
        return out

    def save(self, file: BinaryIO) -> None:
        """Write `arrays` in the npz format."""
        np.savez(file, allow_pickle=False, **self.arrays())

    def close(self) -> None:
        self._engine.stop_observing(self)
        self._hash.close()
