"""What an engine needs of a model's weights, wherever they are: a checkpoint directory, or something made up."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ds41rt.checkpoint.layout import ExpertLayout
from ds41rt.config import ModelConfig


class ModelSource(Protocol):
    """Reads by name or position into the caller's memory. Errors are `CheckpointError`s that name what was read."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def expert_layout(self) -> ExpertLayout: ...

    def token_map(self) -> NDArray[np.int64]:
        """Compressed id of every token for the engram hash, int64[vocab]."""

    def resident_tensors(self) -> list[tuple[str, int]]:
        """(name, nbytes) of every tensor that stays on the device."""

    def read(self, name: str) -> NDArray[Any]:
        """A whole tensor in its own shape and type."""

    def read_into(self, name: str, out: NDArray[np.uint8], offset: int = 0) -> None:
        """Fill `out` with the tensor's bytes from byte `offset` on."""

    def read_expert(self, layer: int, expert: int, out: NDArray[np.uint8], offset: int = 0) -> None:
        """Fill `out` with a routed expert's bytes [w1|w2|w3|s1|s2|s3] from byte `offset` on."""

    def read_engram_rows(
        self, layer: int, rows: NDArray[np.int64], codes_out: NDArray[np.uint8], scales_out: NDArray[np.uint8]
    ) -> None:
        """Table rows: codes uint8[n, head_dim] and scale bytes uint8[n, head_dim / 32]."""
