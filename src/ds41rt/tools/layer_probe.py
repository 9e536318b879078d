"""Drives single layers and steps of an engine from given state: what `verify` needs and a decode step does not.

It enqueues the engine's own launches, so what it measures is what decodes.
"""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ds41rt.checkpoint.engram_table import engram_constants, engram_rows
from ds41rt.cu.backend import Stream
from ds41rt.engine import Engine

Arrays = dict[str, NDArray[Any]]


class LayerProbe:
    """One sequence whose history holds `tokens`, with golden state written under it at will."""

    def __init__(self, engine: Engine, tokens: NDArray[np.int32]) -> None:
        self._engine = engine
        self._backend = engine.backend
        self._stream = engine.stream
        self._rows: NDArray[np.int32] = np.empty(0, np.int32)
        self.sequence = engine.new_sequence()
        self._step = self.sequence.step
        if engine.engram is not None:
            self._step.history[: len(tokens)] = [engine.engram.compressed(t) for t in tokens.tolist()]
        cfg = engine.config
        rows = engine.max_context
        nbytes = max(4 * cfg.vocab, 4 * cfg.head_dim * max(rows, 4), 4 * cfg.hc_mult * cfg.dim, 4 * cfg.n_experts)
        self._host = self._backend.alloc_pinned("probe", nbytes)
        engine.observe(self)

    def __enter__(self) -> "LayerProbe":
        return self

    def __exit__(self, *exc: object) -> None:
        self._engine.stop_observing(self)
        self.sequence.close()
        self._backend.free_pinned(self._host)

    # the engine's observer

    def selection(self, layer: int, rows: NDArray[np.int32]) -> None:
        self._rows = rows

    def point(self, position: int, layer: int, part: str, addr: int, nbytes: int, stream: Stream) -> None:
        pass

    # device memory

    def _write(self, ptr: int, values: NDArray[Any], dtype: Any = np.float32) -> None:
        raw = np.ascontiguousarray(values.astype(dtype)).reshape(-1).view(np.uint8)
        if raw.size:
            self._host.array[: raw.size] = raw
            self._backend.copy_h2d(ptr, self._host, raw.size, self._stream, 0, "probe.write")
            self._backend.synchronize(self._stream)

    def _read(self, ptr: int, shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if nbytes:
            self._backend.copy_d2h(self._host, ptr, nbytes, self._stream, 0, "probe.read")
            self._backend.synchronize(self._stream)
        raw = self._host.array[:nbytes].view(dtype).reshape(shape)
        values: NDArray[Any] = raw.astype(np.float32) if dtype is ml_dtypes.bfloat16 else raw.copy()
        return values

    def _read_bf16(self, ptr: int, *shape: int) -> NDArray[Any]:
        return self._read(ptr, shape, ml_dtypes.bfloat16)

    def _load_state(self, trace: Arrays, run: Arrays | None) -> None:
        """The state before the step; with `run`, compressed rows and keys as they are *after* it, for layers that read
        what an earlier source wrote in the same step."""
        bf16 = ml_dtypes.bfloat16
        buffers = self._step.buffers
        for layer, ptr in enumerate(buffers.ring):
            self._write(ptr, trace["state.ring"][layer], bf16)
        n = int(trace["state.pos"]) + 1
        for source, ptr in buffers.comp.items():
            rows = n // self._engine.config.compress_ratios[source]
            for name, base in ((f"comp.L{source:02d}", ptr), (f"ikey.L{source:02d}", buffers.ikey[source])):
                self._write(base, trace[f"state.{name}"] if run is None else run[name][:rows], bf16)
        for source, ptr in buffers.pool.items():
            self._write(ptr, trace[f"state.pool.L{source:02d}"])

    def step(self, token: int, position: int, trace: Arrays) -> NDArray[np.float32]:
        """A whole decode step from golden state; returns the logits."""
        self._load_state(trace, None)
        self.sequence.position = position
        return self._engine.decode_step(self.sequence, token)

    def layer(self, layer: int, position: int, trace: Arrays, golden: Arrays, run: Arrays) -> Arrays:
        """One layer at `position` from golden inputs; returns what it computed under the golden names."""
        engine, backend, stream = self._engine, self._backend, self._stream
        cfg, buf, bodies, launches = engine.config, engine.buffers, engine.bodies, engine.layers[layer]
        self._load_state(trace, run)
        bodies.bind(self._step, int(trace["token"]), position)
        bodies.upload_sequence(stream)
        bodies.start_token(position, stream)
        bodies.load_engram(stream)
        self._write(buf.streams, golden["X_in"], ml_dtypes.bfloat16)
        self._write(buf.pre_prev, golden["pre_in"])
        out: Arrays = {}
        for launch in launches.engram:
            backend.launch(launch, stream)
        if launches.engram and engine.engram is not None:
            constants = dict(zip(cfg.engram_layers, engram_constants(cfg), strict=True))
            out["engram_rows"] = engram_rows(engine.engram.lookback(self._step.history, position), constants[layer])
            out["engram_gate"] = self._read(buf.engram_gate, (cfg.hc_mult,))
            out["X_engram"] = self._streams()
        backend.launch(launches.attn_in, stream)
        out["attn_in"] = self._read_bf16(buf.normed, cfg.dim)
        out["hc_attn"] = self._mixes(buf.pre_a)
        source, candidates = cfg.index_source_of(layer), cfg.candidate_source_layer
        if source == layer:
            if candidates is not None and layer > candidates:
                mask = trace[f"L{candidates:02d}.cand_mask"].astype(bool)
                bodies.mask = None if mask.all() else mask
            bodies.source_attention(layer, stream)
            out["index_topk"] = self._rows
            out["index_scores"] = self._scores(layer, position)
            if "cand_mask" in golden:
                out["cand_mask"] = np.ones(len(golden["cand_mask"]), bool) if bodies.mask is None else bodies.mask
        else:
            if source is not None:
                engine.block.upload_selection(source, golden["idx_used"], stream)
            for launch in (*launches.qkv, *launches.attn_core):
                backend.launch(launch, stream)
        out["attn_out"] = self._read_bf16(buf.attn_out, cfg.dim)
        bodies.ffn_head(launches, stream, engine.fork)
        out["X_attn"] = self._streams()
        out["moe_in"] = self._read_bf16(buf.normed, cfg.dim)
        out["hc_ffn"] = self._mixes(buf.pre_prev)
        out["router_logits"] = self._read(buf.logits, (cfg.n_experts,))
        bodies.route(layer, stream)
        row = engine.router.picks[layer]
        if row is not None:
            out["expert_ids"] = np.array(row.picks, np.int32)
            out["expert_weights"] = row.weights
        bodies.ffn_tail(launches, stream, engine.fork)
        out["moe_out"] = self._read_bf16(buf.moe_out, cfg.dim)
        out["X_out"] = self._streams()
        out["pre_out"] = self._read(buf.pre_prev, (cfg.hc_mult,))
        return out

    def _scores(self, layer: int, position: int) -> NDArray[Any]:
        """Index scores of every row, computed here because a step that selects everything skips them."""
        launches, n = self._engine.layers[layer], (position + 1) // self._engine.config.compress_ratios[layer]
        for launch in (launches.index_q, launches.index_score):
            if launch is not None:
                self._backend.launch(launch, self._stream)
        return self._read(self._engine.buffers.index_scores.ptr, (n,))

    def _streams(self) -> NDArray[Any]:
        cfg = self._engine.config
        return self._read_bf16(self._engine.buffers.streams, cfg.hc_mult, cfg.dim)

    def _mixes(self, pre: int) -> NDArray[Any]:
        hc, buf = self._engine.config.hc_mult, self._engine.buffers
        parts = [self._read(pre, (hc,)), self._read(buf.post, (hc,)), self._read(buf.comb, (hc * hc,))]
        return np.concatenate(parts)

    def state(self) -> Arrays:
        """Compressed rows and index keys of the sequence under the names of a run file."""
        cfg, n = self._engine.config, self.sequence.position
        out: Arrays = {}
        for source, ptr in self._step.buffers.comp.items():
            rows = n // cfg.compress_ratios[source]
            out[f"comp.L{source:02d}"] = self._read_bf16(ptr, rows, cfg.head_dim)
            out[f"ikey.L{source:02d}"] = self._read_bf16(self._step.buffers.ikey[source], rows, cfg.index_head_dim)
        return out
