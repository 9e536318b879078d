"""What a trace holds, and its file: an npz archive that says which version of these rules it follows.

A trace is a dict of arrays with one row a position. Hashes are blake2b-64 over the bytes of a part, 0 where a position
has no such part. Must not know how a trace came about; `trace.record` makes them, `trace.compare` reads them.

    version          i32: 2 (files without it are older and lack most parts)
    model, about     JSON text: the model's configuration; how the trace was made (backend, mode, ...), for reports
    positions, tokens  i32 [positions]
    replayed         bool [positions, layers]: the layer ran inside a graph, and counted
    expert_ids, expert_weights  i32 and f32 [positions, layers, k], best first
    index_topk.LXX   i32 [positions, index top-k], ascending and padded with -1, one array an index source
    PART_hash        u64 [positions, rows] for every part of `PARTS`
    values.PART      optional: the part itself [positions, rows, values], bf16 as its 16 bits
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from ds41rt.checkpoint.npz_file import load_npz
from ds41rt.config import ModelConfig
from ds41rt.errors import ConfigError, InputError
from ds41rt.moe.route_trace import SCHEMA as ROUTES

VERSION = 2
Arrays = dict[str, NDArray[Any]]
Shape = Callable[[ModelConfig], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Part:
    """One observed part of a step: what it is, how its values are stored, and how many rows a position has of it.

    `per` "entry" has a row for what enters each layer and one for what leaves the last; "layer" one a layer.
    """

    name: str
    what: str
    kind: Literal["bf16", "f32", "u8"]
    per: Literal["entry", "layer", "token"]
    shape: Shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """As stored: bf16 has no type that every reader of npz files knows."""
        return np.dtype({"bf16": np.uint16, "f32": np.float32, "u8": np.uint8}[self.kind])

    def count(self, cfg: ModelConfig) -> int:
        return prod(self.shape(cfg))

    def nbytes(self, cfg: ModelConfig) -> int:
        return self.count(cfg) * self.dtype.itemsize

    def rows(self, cfg: ModelConfig) -> int:
        return {"entry": cfg.n_layers + 1, "layer": cfg.n_layers, "token": 1}[self.per]


def _engram_row(cfg: ModelConfig) -> tuple[int, ...]:
    """Codes, then a scale byte for every 32 of them."""
    n_codes = cfg.engram_cols * cfg.engram_head_dim
    return (n_codes + n_codes // 32,)


PARTS = {
    part.name: part
    for part in (
        Part("streams_in", "the residual streams", "bf16", "entry", lambda c: (c.hc_mult, c.dim)),
        Part("mix_in", "the mix that collapses the streams", "f32", "entry", lambda c: (c.hc_mult,)),
        Part("engram_rows", "the engram rows read for the token", "u8", "layer", _engram_row),
        Part("streams", "the streams after engram", "bf16", "layer", lambda c: (c.hc_mult, c.dim)),
        Part("mixes", "the mixes of the attention input", "f32", "layer", lambda c: (c.hc_mult * (2 + c.hc_mult),)),
        Part("ring", "the row written to the window ring", "bf16", "layer", lambda c: (c.head_dim,)),
        Part("pool", "the row written to the ratio-2 pool", "f32", "layer", lambda c: (2, c.head_dim)),
        Part("comp", "the compressed row", "bf16", "layer", lambda c: (c.head_dim,)),
        Part("key", "the index key", "bf16", "layer", lambda c: (c.index_head_dim,)),
        Part("attn_out", "the attention's output", "bf16", "layer", lambda c: (c.dim,)),
        Part("hidden", "the collapsed streams", "bf16", "token", lambda c: (c.dim,)),
        Part("logits", "the logits", "f32", "token", lambda c: (c.vocab,)),
    )
}


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A trace in memory. `where` names it in reports and errors: a file, or a run."""

    where: str
    config: ModelConfig
    arrays: Arrays

    @property
    def about(self) -> dict[str, str]:
        about: dict[str, str] = json.loads(str(self.arrays["about"]))
        return about

    @property
    def n_positions(self) -> int:
        return len(self.arrays["positions"])

    def save(self, file: BinaryIO) -> None:
        np.savez(file, allow_pickle=False, **self.arrays)


def selection_name(layer: int) -> str:
    return f"index_topk.L{layer:02d}"


def layout(cfg: ModelConfig, n: int) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """Type and shape of every array that a trace of `n` positions must have, less the texts and the version."""
    picks = (n, cfg.n_layers, cfg.top_k)
    found: dict[str, tuple[Any, tuple[int, ...]]] = {
        "positions": (np.int32, (n,)),
        "tokens": (np.int32, (n,)),
        "replayed": (np.bool_, (n, cfg.n_layers)),
        "expert_ids": (np.int32, picks),
        "expert_weights": (np.float32, picks),
        **{selection_name(layer): (np.int32, (n, cfg.index_topk)) for layer in cfg.index_source_layers},
        **{f"{name}_hash": (np.uint64, (n, part.rows(cfg))) for name, part in PARTS.items()},
    }
    return {name: (np.dtype(dtype), shape) for name, (dtype, shape) in found.items()}


def load_trace(path: Path) -> Trace:
    """A trace from its file. Raises `InputError` for anything else, another version, or arrays that do not fit."""
    arrays = load_npz(path, "a trace of `ds41rt decode --trace-out`")
    if str(arrays.get("schema")) == ROUTES:
        raise InputError(
            f"{path}: is a route trace, as decode --route-trace-out writes it, for ds41rt cache-sim --trace; to "
            "compare runs make a trace with decode --trace-out"
        )
    if "expert_ids" not in arrays:
        raise InputError(f"{path}: is not a trace: it has no array 'expert_ids'; make one with decode --trace-out")
    if "version" not in arrays:
        raise InputError(
            f"{path}: is a trace of an older ds41rt, which did not say where in a layer two runs part; record it again"
        )
    version = int(arrays["version"]) if arrays["version"].shape == () else -1
    if version != VERSION:
        raise InputError(f"{path}: is a trace of version {version}, this build reads version {VERSION}")
    cfg = _config(path, arrays)
    n = arrays["positions"].size if "positions" in arrays else 0
    for name, (dtype, shape) in layout(cfg, n).items():
        if name not in arrays:
            raise InputError(f"{path}: is a damaged trace: array {name!r} is missing")
        found = arrays[name]
        if (found.dtype, found.shape) != (dtype, shape):
            raise InputError(
                f"{path}: is a damaged trace: array {name!r} is {found.dtype} {found.shape}, must be {dtype} {shape}"
            )
    for name, part in PARTS.items():
        values = arrays.get(f"values.{name}")
        want = (n, part.rows(cfg), part.count(cfg))
        if values is not None and (values.dtype, values.shape) != (part.dtype, want):
            raise InputError(
                f"{path}: is a damaged trace: values of {name!r} are {values.dtype} {values.shape}, "
                f"must be {part.dtype} {want}"
            )
    return Trace(str(path), cfg, arrays)


def _config(path: Path, arrays: Mapping[str, NDArray[Any]]) -> ModelConfig:
    try:
        texts = {name: json.loads(str(arrays[name])) for name in ("model", "about")}
        if not all(isinstance(text, dict) for text in texts.values()):
            raise ValueError("is not a JSON object")
        return ModelConfig.model_validate_json(str(arrays["model"]))
    except KeyError as e:
        raise InputError(f"{path}: is a damaged trace: array {e} is missing") from e
    except (ValueError, ConfigError) as e:
        raise InputError(f"{path}: is a damaged trace: its description cannot be read: {e}") from e
