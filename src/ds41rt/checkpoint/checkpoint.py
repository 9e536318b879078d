"""A checkpoint directory, checked as a whole at open, then read by position: one tensor, one expert, a few rows.

Nothing is ever loaded whole. Knows the file layout; knows neither devices nor caches.
"""

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from ds41rt.checkpoint.direct import DirectReader, DirectReads
from ds41rt.checkpoint.engram_table import engram_constants
from ds41rt.checkpoint.json_file import load_json
from ds41rt.checkpoint.layout import ExpertLayout, expert_tensor, resident_tensors, text_tensors
from ds41rt.checkpoint.safetensors import Shard, TensorInfo
from ds41rt.checkpoint.token_map import load_token_map
from ds41rt.config import ModelConfig
from ds41rt.errors import CheckpointError, ConfigError, InputError

INDEX_FILE = "model.safetensors.index.json"
E8M0_NAN = 0xFF
# Element types of `read`; formats without a NumPy type stay bytes.
_READ_DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
    "I8": np.dtype(np.uint8),
}


class _Index(BaseModel):
    model_config = ConfigDict(strict=True)

    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class Extent:
    """A contiguous byte range of a file; `fd` stays valid until the checkpoint is closed."""

    path: Path
    fd: int
    off: int
    nbytes: int


class Checkpoint:
    """An open checkpoint: `with Checkpoint.open(directory) as ckpt`. Any number of threads may read at once.

    `config` is the model's geometry, `expert_layout` the byte layout of one routed expert. Tensors that the text model
    does not have (draft layers, vision) are allowed and never read.
    """

    def __init__(
        self, directory: Path, config: ModelConfig, shards: dict[str, Shard], direct_reads: DirectReads = "auto"
    ) -> None:
        self.directory = directory
        self.config = config
        self.expert_layout = ExpertLayout.of(config)
        self._shards = list(shards.values())
        self._where = {name: (shard, info) for shard in self._shards for name, info in shard.tensors.items()}
        self._check_tensors()
        self._check_engram_sizes()
        # Per (layer, expert), row-major: shard and file offset of the weights, shard and file offset of the scales.
        self._experts = [
            self._find_expert(layer, expert) for layer in range(config.n_layers) for expert in range(config.n_experts)
        ]
        self._engram = {
            layer: tuple(self._where[f"layers.{layer}.engram.embed.{part}"] for part in ("weight", "scale"))
            for layer in config.engram_layers
        }
        with_experts = dict.fromkeys(shard for entry in self._experts for shard in (entry[0], entry[2]))
        self._expert_reader = DirectReader(with_experts, direct_reads)  # last: it opens files

    @classmethod
    def open(cls, directory: str | Path, *, direct_reads: DirectReads = "auto") -> "Checkpoint":
        """Open and check configuration, index, every shard, and every tensor of the text model.

        `direct_reads`: whether `read_expert` goes past the page cache. "auto" does where the file system allows it,
        "on" raises `UnsupportedError` naming the file where it does not, "off" does not; see `direct.DirectReader`.
        Raises `ConfigError` for a geometry that ds41rt does not implement and `CheckpointError` for everything wrong
        with the files; no file stays open then.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: no such checkpoint directory")
        config = ModelConfig.from_checkpoint(directory)
        weight_map = _read_index(directory / INDEX_FILE)
        shards: dict[str, Shard] = {}
        try:
            for file in sorted(set(weight_map.values())):
                shards[file] = Shard.open(directory / file)
            _check_index(directory / INDEX_FILE, weight_map, shards)
            return cls(directory, config, shards, direct_reads)
        except BaseException:
            for shard in shards.values():
                shard.close()
            raise

    def close(self) -> None:
        """Close the files; a second call does nothing. The caller ends its reader threads first."""
        self._expert_reader.close()
        for shard in self._shards:
            shard.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def info(self, name: str) -> TensorInfo:
        """dtype, shape and place of a tensor; `InputError` for a name that the checkpoint does not have."""
        return self._lookup(name)[1]

    def read(self, name: str) -> NDArray[Any]:
        """A whole tensor in its own shape: bfloat16, float32, or uint8 for FP8 and E8M0 codes and packed FP4 bytes."""
        info = self.info(name)
        if info.dtype not in _READ_DTYPES:
            raise CheckpointError(f"tensor {name!r}: dtype {info.dtype} is not one that the text model uses")
        out = np.empty(info.nbytes, np.uint8)
        self.read_into(name, out)
        return out.view(_READ_DTYPES[info.dtype]).reshape(info.shape)

    def read_into(self, name: str, out: NDArray[np.uint8], offset: int = 0) -> None:
        """A tensor's bytes from `offset` on into `out`, a contiguous uint8 array; E8M0 scales are checked."""
        shard, info = self._lookup(name)
        if not 0 <= offset <= offset + out.size <= info.nbytes:
            raise InputError(f"read_into({name!r}): {out.size} bytes from {offset} on, the tensor has {info.nbytes}")
        _require_bytes(out, (out.size,), f"read_into({name!r}): out")
        shard.read_at(info.off + offset, out, f"tensor {name!r}")
        if info.dtype == "F8_E8M0":
            check_scales(out, f"{shard.path}: tensor {name!r}", offset)

    def token_map(self) -> NDArray[np.int64]:
        """Compressed id of every token, int64[vocab]; see `token_map.load_token_map`."""
        return load_token_map(self.directory, self.config)

    def resident_tensors(self) -> list[tuple[str, int]]:
        """(name, nbytes) of what a run keeps on the device: all text tensors but routed experts and engram tables."""
        return [(spec.name, self.info(spec.name).nbytes) for spec in resident_tensors(self.config)]

    def expert_extents(self, layer: int, expert: int) -> tuple[Extent, Extent]:
        """File ranges of a routed expert: [w1|w2|w3] and [s1|s2|s3].

        Who reads them without `read_expert` hands the bytes to `check_expert_scales`.
        """
        weights, weights_off, scales, scales_off = self._expert(layer, expert)
        return (
            Extent(weights.path, weights.fd, weights_off, self.expert_layout.weights_nbytes),
            Extent(scales.path, scales.fd, scales_off, self.expert_layout.scales_nbytes),
        )

    def read_expert(self, layer: int, expert: int, out: NDArray[np.uint8], offset: int = 0) -> None:
        """A routed expert's bytes [w1|w2|w3|s1|s2|s3] from `offset` on into `out`, a contiguous uint8 array.

        They are in two places of the files. Raises `CheckpointError`; its subtype `CheckpointReadError` (also an
        `OSError`) if trying again may help.
        """
        weights, weights_off, scales, scales_off = self._expert(layer, expert)
        layout = self.expert_layout
        if not 0 <= offset <= offset + out.size <= layout.nbytes:
            raise InputError(
                f"read_expert({layer}, {expert}): {out.size} bytes from {offset} on, an expert has {layout.nbytes}"
            )
        _require_bytes(out, (out.size,), "read_expert: out")
        split = layout.weights_among(offset, out.size)
        read, which = self._expert_reader.read, f"of layer {layer}, expert {expert}"
        if split:
            read(weights, weights_off + offset, out[:split], f"weights {which}")
        if split < out.size:
            read(scales, scales_off + offset + split - layout.weights_nbytes, out[split:], f"scales {which}")
            self.check_expert_scales(layer, expert, out, offset)

    def check_expert_scales(self, layer: int, expert: int, data: NDArray[np.uint8], offset: int = 0) -> None:
        """Refuse a NaN scale among an expert's bytes from `offset` on, naming its tensor and index."""
        split = self.expert_layout.weights_among(offset, data.size)
        scales = data[split:]
        if scales.size and int(scales.max()) == E8M0_NAN:
            at, layout = int(scales.argmax()), self.expert_layout
            which, index = divmod(offset + split + at - layout.weights_nbytes, layout.scale_nbytes)
            name = f"{expert_tensor(layer, expert, f'w{which + 1}')}.scale"
            check_scales(scales[at:], f"{self.directory}: tensor {name!r}", index)

    def read_engram_rows(
        self, layer: int, rows: NDArray[np.int64], codes_out: NDArray[np.uint8], scales_out: NDArray[np.uint8]
    ) -> None:
        """Rows int64[n] of a layer's engram table: E4M3 codes uint8[n, head_dim], E8M0 scales uint8[n, head_dim/32]."""
        if layer not in self._engram:
            raise InputError(f"layer {layer} has no engram table; layers {self.config.engram_layers} have one")
        n_rows = self._engram[layer][0][1].shape[0]
        numbers = rows.tolist()
        for row in numbers:
            if not 0 <= row < n_rows:
                raise InputError(f"engram row {row} of layer {layer} is outside 0..{n_rows - 1}")
        for (shard, info), out, part in zip(
            self._engram[layer], (codes_out, scales_out), ("row", "scales of row"), strict=True
        ):
            width = info.shape[1]
            _require_bytes(out, (len(numbers), width), f"read_engram_rows: {part} output")
            for i, row in enumerate(numbers):
                shard.read_at(info.off + row * width, out[i], f"engram {part} {row} of layer {layer}")
        if scales_out.size and int(scales_out.max()) == E8M0_NAN:
            i, column = divmod(int(scales_out.argmax()), scales_out.shape[1])
            name = f"layers.{layer}.engram.embed.scale"
            raise CheckpointError(f"{self.directory}: tensor {name!r}: scale [{numbers[i]}, {column}] is 0xFF (NaN)")

    def _lookup(self, name: str) -> tuple[Shard, TensorInfo]:
        try:
            return self._where[name]
        except KeyError:
            raise InputError(f"{self.directory}: the checkpoint has no tensor {name!r}") from None

    def _expert(self, layer: int, expert: int) -> tuple[Shard, int, Shard, int]:
        if not (0 <= layer < self.config.n_layers and 0 <= expert < self.config.n_experts):
            raise InputError(
                f"layer {layer}, expert {expert} does not exist: "
                f"{self.config.n_layers} layers, {self.config.n_experts} experts"
            )
        return self._experts[layer * self.config.n_experts + expert]

    def _check_tensors(self) -> None:
        for name, dtype, shape in text_tensors(self.config):
            if name not in self._where:
                raise CheckpointError(f"{self.directory}: tensor {name!r} ({dtype} {list(shape)}) is missing")
            shard, info = self._where[name]
            if (info.dtype, info.shape) != (dtype, shape):
                raise CheckpointError(
                    f"{shard.path}: tensor {name!r} is {info.dtype} {list(info.shape)}; "
                    f"the configuration asks for {dtype} {list(shape)}"
                )

    def _check_engram_sizes(self) -> None:
        """The tables' row counts, known to agree with the files by now, must be what the hash can address."""
        cfg = self.config
        for layer, rows in zip(cfg.engram_layers, cfg.engram_num_embeddings, strict=True):
            if rows < cfg.engram_cols * cfg.engram_vocab_size:  # keeps the search for primes short
                raise ConfigError(
                    f"engram_num_embeddings of layer {layer} is {rows}: too few for {cfg.engram_cols} columns"
                )
        for constants, rows in zip(engram_constants(cfg), cfg.engram_num_embeddings, strict=True):
            if constants.n_rows != rows:
                raise ConfigError(
                    f"engram_num_embeddings of layer {constants.layer} is {rows}; "
                    f"its buckets have {constants.n_rows} rows"
                )

    def _find_expert(self, layer: int, expert: int) -> tuple[Shard, int, Shard, int]:
        weights, weights_off = self._run(layer, expert, "weight")
        scales, scales_off = self._run(layer, expert, "scale")
        return weights, weights_off, scales, scales_off

    def _run(self, layer: int, expert: int, part: str) -> tuple[Shard, int]:
        """Shard and offset of w1|w2|w3, which must lie side by side: an expert is read as two ranges."""
        w1, w2, w3 = (self._where[f"{expert_tensor(layer, expert, w)}.{part}"] for w in ("w1", "w2", "w3"))
        n = w1[1].nbytes
        if not (w1[0] is w2[0] is w3[0] and w2[1].off == w1[1].off + n and w3[1].off == w2[1].off + n):
            raise CheckpointError(
                f"{w1[0].path}: the {part} tensors of {expert_tensor(layer, expert, 'w1')}, w2 and w3 are not "
                "contiguous in this order; rewrite the checkpoint in the published layout"
            )
        return w1[0], w1[1].off


def check_scales(scales: NDArray[np.uint8], what: str, first: int = 0) -> None:
    """Refuse E8M0 bytes with a NaN (0xFF) among them.

    `what` names the tensor in the error and `first` is the flat index of `scales[0]` in it.
    """
    if scales.size and int(scales.max()) == E8M0_NAN:
        raise CheckpointError(f"{what}: scale at index {first + int(scales.argmax())} is 0xFF (NaN)")


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = _Index.model_validate(load_json(path)).weight_map
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        raise CheckpointError(f"{path}: {'.'.join(map(str, first['loc'])) or 'content'}: {first['msg']}") from e
    for file in set(weight_map.values()):
        if Path(file).name != file or "\0" in file:
            raise CheckpointError(f"{path}: {file!r} is not a plain file name")
    return weight_map


def _check_index(path: Path, weight_map: dict[str, str], shards: dict[str, Shard]) -> None:
    """Index and shards must list the same tensors in the same files."""
    for name, file in weight_map.items():
        if name not in shards[file].tensors:
            raise CheckpointError(f"{path}: tensor {name!r} should be in {file!r}, which does not have it")
    for file, shard in shards.items():
        for name in shard.tensors:
            if weight_map.get(name) != file:
                raise CheckpointError(f"{shard.path}: tensor {name!r} is not listed under this file in {path.name}")


def _require_bytes(out: NDArray[np.uint8], shape: tuple[int, ...], what: str) -> None:
    if out.dtype != np.uint8 or out.shape != shape or not out.flags.c_contiguous or not out.flags.writeable:
        raise InputError(f"{what} must be a writable C-contiguous uint8{list(shape)}, is {out.dtype}{list(out.shape)}")
