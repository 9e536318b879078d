"""Records a run token by token: what it decided, and a hash (or the values) of every part that reaches the next half.

Together the parts are everything that a half of a layer takes over from what ran before: the streams and the mix that
enter a layer, what its attention half leaves, and the rows written for later positions. So the first part that differs
between two runs names the half that made it (see `trace.compare`). They exist in every mode; rows, final streams and
logits are read after the step, the others where a step shows them to observers.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41rt import __version__
from ds41rt.cu.backend import Stream
from ds41rt.engine import Engine, Mode
from ds41rt.step.hash_log import PartReader, hash64
from ds41rt.trace.file import PARTS, VERSION, Arrays, Trace, layout, selection_name


@dataclass(slots=True)
class _Token:
    """What is known of one step; keys are (part, row)."""

    position: int = 0
    token: int = 0
    ids: list[list[int]] = field(default_factory=list)
    weights: list[NDArray[np.float32]] = field(default_factory=list)
    replayed: set[int] = field(default_factory=set)
    rows: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    hashes: dict[tuple[str, int], int] = field(default_factory=dict)
    values: dict[tuple[str, int], NDArray[Any]] = field(default_factory=dict)


def mode_of(engine: Engine) -> Mode:
    """The mode that an engine steps in, which may not be the one asked for: not every engine captures."""
    if not engine.machine.step_graph:
        return "eager"
    return "adaptive" if engine.settings.adaptive else "step-graph"


class TraceRecorder:
    """Attach to an engine, call `end_token` after every step, then take the `trace`.

    With `values` every part itself is kept, not its hash alone: megabytes a token for the released model.
    """

    def __init__(self, engine: Engine, *, values: bool = False) -> None:
        self._engine = engine
        self._values = values
        self._reader = PartReader(engine.backend, max(part.nbytes(engine.config) for part in PARTS.values()))
        self._tokens: list[_Token] = []
        self._now = _Token()
        engine.observe(self)

    # The engine's observer.

    def selection(self, layer: int, rows: NDArray[np.int32]) -> None:
        self._now.rows[layer] = rows

    def point(self, position: int, layer: int, part: str, addr: int, nbytes: int, stream: Stream) -> None:
        if part in PARTS:
            self._take(part, layer, addr)
        if part == "streams":
            # A step that failed may have shown the layer from a replay, and the next try eagerly.
            replayed = addr != self._engine.buffers.streams
            (self._now.replayed.add if replayed else self._now.replayed.discard)(layer)

    # For whoever steps the engine.

    def end_token(self) -> None:
        """Close the record of the token just stepped."""
        engine, token = self._engine, self._now
        token.position, token.token = engine.bodies.bound
        self._take_rows(token.position)
        picked = [row for row in engine.router.picks if row is not None]
        token.ids = [row.picks for row in picked]
        token.weights = [row.weights for row in picked]
        self._tokens.append(token)
        self._now = _Token()

    def trace(self, where: str) -> Trace:
        """All tokens so far, under the name `where`."""
        cfg, tokens = self._engine.config, self._tokens
        texts = {"model": cfg.model_dump_json(), "about": json.dumps(self._about())}
        out: Arrays = {"version": np.array(VERSION, np.int32), **{k: np.array(v) for k, v in texts.items()}}
        out |= {name: np.zeros(shape, dtype) for name, (dtype, shape) in layout(cfg, len(tokens)).items()}
        if self._values:
            out |= {
                f"values.{p.name}": np.zeros((len(tokens), p.rows(cfg), p.count(cfg)), p.dtype) for p in PARTS.values()
            }
        for layer in cfg.index_source_layers:
            out[selection_name(layer)].fill(-1)
        for i, token in enumerate(tokens):
            out["positions"][i], out["tokens"][i] = token.position, token.token
            out["replayed"][i, list(token.replayed)] = True
            out["expert_ids"][i], out["expert_weights"][i] = token.ids, token.weights
            for layer, rows in token.rows.items():
                out[selection_name(layer)][i, : rows.size] = rows
            for (part, row), value in token.hashes.items():
                out[f"{part}_hash"][i, row] = value
            for (part, row), values in token.values.items():
                out[f"values.{part}"][i, row] = values
        return Trace(where, cfg, out)

    def clear(self) -> None:
        """Forget the tokens so far."""
        self._tokens.clear()

    def close(self) -> None:
        self._engine.stop_observing(self)
        self._reader.close()

    def _about(self) -> dict[str, str]:
        engine = self._engine
        return {
            "ds41rt": __version__,
            "backend": engine.backend.name,
            "device": engine.backend.device_name,
            "mode": mode_of(engine),
            "expert_slots": str(engine.cache.n_slots),
            "index_keys": engine.settings.index_keys,
            "engram": "off" if engine.settings.no_engram else "on",
        }

    def _take(self, name: str, row: int, addr: int) -> None:
        part, cfg = PARTS[name], self._engine.config
        raw = self._reader.read(addr, part.nbytes(cfg), self._engine.stream)
        self._now.hashes[name, row] = hash64(raw)
        if self._values:
            self._now.values[name, row] = np.array(raw).view(part.dtype)

    def _take_rows(self, position: int) -> None:
        """What the step left: rows for later positions, what came out of the last layer, logits."""
        engine, cfg = self._engine, self._engine.config
        buffers, seq = engine.buffers, engine.bodies.sequence.buffers
        self._take("streams_in", cfg.n_layers, buffers.streams)
        self._take("mix_in", cfg.n_layers, buffers.pre_prev)
        self._take("hidden", 0, buffers.hidden)
        self._take("logits", 0, buffers.vocab_logits.ptr)
        for layer, ring in enumerate(seq.ring):
            self._take("ring", layer, ring + position % cfg.window * PARTS["ring"].nbytes(cfg))
        for source, pool in seq.pool.items():
            self._take("pool", source, pool + position % 2 * PARTS["pool"].nbytes(cfg))
        for source in cfg.kv_source_layers:
            row, rest = divmod(position + 1, cfg.compress_ratios[source])
            if not rest:  # this position completed a row
                self._take("comp", source, seq.comp[source] + (row - 1) * PARTS["comp"].nbytes(cfg))
                self._take("key", source, seq.ikey[source] + (row - 1) * PARTS["key"].nbytes(cfg))
        if engine.engram is not None:
            for layer, codes in engine.engram.codes_ptr.items():
                self._take("engram_rows", layer, codes)
