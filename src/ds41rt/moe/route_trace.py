"""Route traces: which experts every layer picked, token by token, in a file that needs no model to be understood.

That, and the few facts beside it, is all that decides how a cache of experts fares (see `ds41rt cache-sim`). Must not
know an engine or a cache: the recorder is handed the picks of each token when it is complete.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ds41rt.checkpoint.npz_file import load_npz
from ds41rt.errors import InputError
from ds41rt.moe.header import HeaderRow

SCHEMA = "ds41rt.routes"
VERSION = 1
_WHAT = "a route trace, as written by `ds41rt decode --route-trace-out`"


@dataclass(frozen=True, slots=True)
class RouteFacts:
    """Of the model. `segment_starts`: the layers that own a graph segment, ascending from 0; a segment's MoE layers
    are those from its start up to the next. `expert_nbytes`: what a miss reads; `slot_nbytes`: what a slot takes."""

    n_layers: int
    n_experts: int
    top_k: int
    expert_nbytes: int
    slot_nbytes: int
    segment_starts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RouteTrace:
    """`expert_ids`: int16 or int32 [tokens, n_layers, top_k], distinct in a layer, best first."""

    facts: RouteFacts
    expert_ids: NDArray[np.signedinteger[Any]]

    @property
    def n_tokens(self) -> int:
        return len(self.expert_ids)

    def save(self, file: BinaryIO) -> None:
        """Write the npz format: one array a field, and `schema` and `version`."""
        facts = self.facts
        np.savez_compressed(
            file,
            allow_pickle=False,
            schema=np.array(SCHEMA),
            version=np.array(VERSION, np.int32),
            expert_ids=self.expert_ids,
            n_experts=np.array(facts.n_experts, np.int32),
            expert_nbytes=np.array(facts.expert_nbytes, np.int64),
            slot_nbytes=np.array(facts.slot_nbytes, np.int64),
            segment_starts=np.array(facts.segment_starts, np.int32),
        )


class RouteRecorder:
    """Keeps the picks of completed tokens. Nothing is synchronised: they are on the host when a step has returned."""

    def __init__(self, facts: RouteFacts) -> None:
        self._facts = facts
        self._dtype: type[np.signedinteger[Any]] = np.int16 if facts.n_experts <= np.iinfo(np.int16).max else np.int32
        self._tokens: list[NDArray[Any]] = []

    def end_token(self, rows: Sequence[HeaderRow | None]) -> None:
        """The token whose picks these are, one row a layer, is complete."""
        picks = [row.picks for row in rows if row is not None]
        shape = (self._facts.n_layers, self._facts.top_k)
        ids = np.array(picks, self._dtype)
        if ids.shape != shape:
            raise InputError(f"the picks of a completed token have shape {ids.shape}, not (layers, top-k) = {shape}")
        self._tokens.append(ids)

    def trace(self) -> RouteTrace:
        facts = self._facts
        ids = np.array(self._tokens, self._dtype).reshape(-1, facts.n_layers, facts.top_k)
        return RouteTrace(facts, ids)


def load_route_trace(path: Path) -> RouteTrace:
    """The trace in `path`. Raises `InputError` naming the file, and the field that is missing or wrong."""
    arrays = load_npz(path, _WHAT)

    def refuse(why: str) -> InputError:
        return InputError(f"{path}: {why}; give {_WHAT}")

    def number(name: str) -> int:
        value = arrays.get(name)
        if value is None or value.shape != () or value.dtype.kind != "i":
            raise refuse(f"{name} is missing or is not one integer")
        return int(value)

    schema = arrays.get("schema")
    if schema is None or schema.shape != () or str(schema) != SCHEMA:
        raise refuse(f"there is no field schema = {SCHEMA!r}")
    version = number("version")
    if version != VERSION:
        raise refuse(f"has version {version} of the format, this build reads version {VERSION}")
    ids, starts = arrays.get("expert_ids"), arrays.get("segment_starts")
    if ids is None or ids.dtype not in (np.int16, np.int32) or ids.ndim != 3 or 0 in ids.shape:
        raise refuse("expert_ids is missing, empty, or not int16 or int32 [tokens, layers, top-k]")
    if starts is None or starts.dtype != np.int32 or starts.ndim != 1:
        raise refuse("segment_starts is missing or is not int32 [segments]")
    n_experts, expert_nbytes, slot_nbytes = (number(n) for n in ("n_experts", "expert_nbytes", "slot_nbytes"))
    if not 1 <= expert_nbytes <= slot_nbytes:
        raise refuse(f"expert_nbytes is {expert_nbytes}, must be at least 1 and at most slot_nbytes, {slot_nbytes}")
    wrong = np.argwhere((ids < 0) | (ids >= n_experts))
    if len(wrong):
        token, layer, i = wrong[0].tolist()
        raise refuse(f"token {token}, layer {layer}: expert {ids[token, layer, i]} is outside 0..{n_experts - 1}")
    ordered = np.sort(ids, axis=2)
    twice = np.argwhere(ordered[:, :, 1:] == ordered[:, :, :-1])
    if len(twice):
        token, layer, i = twice[0].tolist()
        raise refuse(f"token {token}, layer {layer}: expert {ordered[token, layer, i]} is picked twice")
    _, n_layers, top_k = ids.shape
    first = starts.tolist()
    if first != sorted(set(first)) or not first or first[0] != 0 or first[-1] >= n_layers:
        raise refuse(f"segment_starts {first} must ascend from 0 and stay below the {n_layers} layers")
    return RouteTrace(RouteFacts(n_layers, n_experts, top_k, expert_nbytes, slot_nbytes, tuple(first)), ids)
