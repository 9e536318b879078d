"""The layers of one engine behind the state machine: enqueue the prepared launches, and do the host half if any.

Eager step and captured bodies share every launch and the order they are enqueued in; they differ in who makes experts
resident (eagerly: before the experts run; in a graph: after the replay, from the headers).

The invariant that makes a rerun safe: nothing a captured body writes is read by a second run of it, except through the
snapshot. Ring rows go to the slot of the position, sources (compressed rows, keys, pool state, selections) run outside
graphs, each source has its own selection buffer. Keep it when more work moves into graphs.

Must not know which backend runs, nor the marks of the machine.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ds41rt.attn.select import candidate_mask, select_rows
from ds41rt.attn.sequence import SequenceBlock, SequenceBuffers
from ds41rt.config import ModelConfig
from ds41rt.cu.backend import GpuBackend, Stream
from ds41rt.cu.kernel import KernelLaunch
from ds41rt.engram.rows import EngramUpload
from ds41rt.moe.header import Fall
from ds41rt.moe.route import MoeRouter
from ds41rt.step.buffers import SavedLayout, StepBuffers
from ds41rt.step.entries import Entries
from ds41rt.step.launches import LayerLaunches
from ds41rt.step.snapshot import Snapshots
from ds41rt.step.state import Classes, Fork


@dataclass(frozen=True, slots=True)
class Role:
    """What the machine asks of a layer: its compression ratio (0 = window only) and whether it is a source."""

    ratio: int
    is_kv_source: bool
    is_index_source: bool


@dataclass(slots=True)
class StepSequence:
    """What a step needs of a sequence: identity, device buffers and the compressed token ids by position."""

    ident: int
    buffers: SequenceBuffers
    history: NDArray[np.int64]


class StepObserver(Protocol):
    """Sees a step's insides. Every call may synchronise the stream: only for traces and tools."""

    def selection(self, layer: int, rows: NDArray[np.int32]) -> None: ...

    def point(self, position: int, layer: int, part: str, addr: int, nbytes: int, stream: Stream) -> None:
        """`nbytes` at device address `addr` are now layer `layer`'s `part`.

        Every mode passes five parts of every layer, once a token. What enters it: "streams_in" (for layer 0 the
        embedding; before the layer's engram rows) and "mix_in" (f32[hc], what collapses them). And what its attention
        half leaves for its ffn half: "streams" (before the attention's expand), "attn_out" and "mixes" (f32: the ffn's
        collapse [hc], then the expand's factors of the attention [hc] and of the streams [hc, hc]).

        Eager layers also pass "normed" (the attention's input), "moe_in" and "streams_out". After a clean replay
        "segment_streams" and "segment_hidden" are those behind its last layer, the attention input that closes the
        segment included.
        """


class DecodeBodies:
    """Implements the machine's `LayerBodies` for DeepSeek-V4.1. Bound to one sequence and token by `bind`."""

    def __init__(
        self,
        backend: GpuBackend,
        cfg: ModelConfig,
        layers: list[LayerLaunches],
        buffers: StepBuffers,
        block: SequenceBlock,
        engram: EngramUpload | None,
        router: MoeRouter,
        snapshots: Snapshots | None,
        entries: Entries,
        baked: tuple[int, ...],
        fork: Fork,
        *,
        device_route: bool,
        stale_keys: bool,
    ) -> None:
        self._backend = backend
        self._cfg = cfg
        self._layers = layers
        self._buf = buffers
        self._block = block
        self._engram = engram
        self._router = router
        self._snapshots = snapshots
        self._entries = entries
        self._baked = baked
        self._fork = fork
        self._device_route = device_route
        self._stale_keys = stale_keys
        self._roles = [
            Role(cfg.compress_ratios[i], i in cfg.kv_source_layers, i in cfg.index_source_layers)
            for i in range(cfg.n_layers)
        ]
        streams, row = (buffers.streams, 2 * cfg.hc_mult * cfg.dim), 2 * cfg.dim
        self._parts = {
            **dict.fromkeys(("streams_out", "segment_streams"), streams),
            **dict.fromkeys(("normed", "moe_in"), (buffers.normed, row)),
            "segment_hidden": (buffers.hidden, row),
        }
        self._saved = SavedLayout.of(cfg)
        self._score_host = backend.alloc_pinned("index score image", buffers.index_scores.nbytes)
        self._score_image = self._score_host.array.view(np.float32)
        # candidate rows of the current token, built by the candidate source and applied by the index layers after it
        self.mask: NDArray[np.bool_] | None = None
        self._seq: StepSequence | None = None
        self._token = 0
        self._position = 0
        self._engram_loaded = False
        self.observers: tuple[StepObserver, ...] = ()

    # ---- binding and what the machine asks about

    @property
    def n_layers(self) -> int:
        return self._cfg.n_layers

    @property
    def sequence(self) -> StepSequence:
        if self._seq is None:
            raise RuntimeError("no sequence is bound")
        return self._seq

    @property
    def bound(self) -> tuple[int, int]:
        """(position, token) of the last `bind`."""
        return self._position, self._token

    def bind(self, seq: StepSequence, token: int, position: int) -> None:
        """The token that the next `run_token` of the machine steps."""
        self._seq = seq
        self._token = token
        self._position = position

    def role(self, idx: int) -> Role:
        return self._roles[idx]

    def baked(self) -> tuple[int, ...]:
        return (*self._baked, self._entries.ptr) if self.observers else self._baked

    def window(self, idx: int) -> int:
        return self.sequence.buffers.ring[idx]

    def sequence_key(self) -> tuple[int, int]:
        return self.sequence.ident, self.sequence.buffers.moves

    def upload_sequence(self, stream: Stream) -> None:
        self._block.upload_cells(self.sequence.buffers, stream)

    def start_token(self, position: int, stream: Stream) -> None:
        """Position and token to the sequence block, the embedding into the streams; marks of the last token dropped."""
        self.mask = None
        self._engram_loaded = False
        self._router.begin_token(self.n_layers, stream)
        self._block.upload_step(position, self._token, stream)

    # ---- pieces that eager step and captured bodies share

    def _run(self, launches: tuple[KernelLaunch, ...], stream: Stream) -> None:
        for launch in launches:
            self._backend.launch(launch, stream)

    def attn_in(self, idx: int, stream: Stream) -> None:
        """Engram rows into the streams (in place: once a token), then mixes, collapse and norm."""
        layer = self._layers[idx]
        self._run(layer.embed, stream)
        if self.observers:
            self._entries.keep(idx, stream)
        self._run(layer.engram, stream)
        self._backend.launch(layer.attn_in, stream)

    def body_attn(self, idx: int, rows_b: int | None, stream: Stream) -> None:
        self.attn_in(idx, stream)
        self._attention(idx, stream)

    def _attention(self, idx: int, stream: Stream) -> None:
        """Attention of a layer that is no source: nothing in it needs the host."""
        layer = self._layers[idx]
        self._run(layer.qkv, stream)
        self._run(layer.attn_core, stream)

    def body_ffn(self, idx: int, stream: Stream, fork: Fork) -> None:
        layer = self._layers[idx]
        self.ffn_head(layer, stream, fork)
        self._backend.launch(layer.route_select, stream)
        self.ffn_tail(layer, stream, fork)

    def ffn_head(self, layer: LayerLaunches, stream: Stream, fork: Fork) -> None:
        backend = self._backend
        backend.launch(layer.ffn_in, stream)
        backend.record(fork.ev_fork, stream)
        backend.wait(fork.side, fork.ev_fork)
        self._run(layer.shared, fork.side)
        backend.record(fork.ev_join, fork.side)
        backend.launch(layer.router, stream)

    def ffn_tail(self, layer: LayerLaunches, stream: Stream, fork: Fork) -> None:
        self._run(layer.experts, stream)
        self._backend.wait(stream, fork.ev_join)
        self._backend.launch(layer.combine, stream)
        self._run(layer.final, stream)

    def save_nodes(self, idx: int, stream: Stream) -> None:
        self._require_snapshots().save(idx, stream)

    def restore(self, idx: int, stream: Stream) -> None:
        self._require_snapshots().restore(idx, stream)

    def _require_snapshots(self) -> Snapshots:
        if self._snapshots is None:
            raise RuntimeError("this engine was opened without snapshots")
        return self._snapshots

    # ---- the eager step

    def eager_layer(self, idx: int, stream: Stream) -> None:
        if idx == 0:
            self.load_engram(stream)
        self.attn_in(idx, stream)
        self._see_entry(idx, stream)
        self._see(idx, "normed", stream)
        if self._roles[idx].is_index_source:
            self.source_attention(idx, stream)
        else:
            self._attention(idx, stream)
        self.ffn_eager(idx, stream)

    def ffn_eager(self, idx: int, stream: Stream) -> None:
        layer = self._layers[idx]
        self._see_middle(idx, self._buf.streams, stream)
        self.ffn_head(layer, stream, self._fork)
        self._see(idx, "moe_in", stream)
        self.route(idx, stream)
        self.ffn_tail(layer, stream, self._fork)
        self._see(idx, "streams_out", stream)

    def _see(self, idx: int, part: str, stream: Stream) -> None:
        if self.observers:
            self._show(idx, part, *self._parts[part], stream)

    def _see_entry(self, idx: int, stream: Stream) -> None:
        if self.observers:
            entries = self._entries
            self._show(idx, "streams_in", entries.streams(idx), entries.streams_nbytes, stream)
            self._show(idx, "mix_in", entries.mix(idx), entries.mix_nbytes, stream)

    def _see_middle(self, idx: int, saved: int, stream: Stream) -> None:
        """The layer's saved block, or its snapshot, at device address `saved`."""
        if self.observers:
            lay = self._saved
            self._show(idx, "streams", saved, lay.attn_out_off, stream)
            self._show(idx, "attn_out", saved + lay.attn_out_off, lay.pre_a_off - lay.attn_out_off, stream)
            self._show(idx, "mixes", saved + lay.pre_a_off, lay.nbytes - lay.pre_a_off, stream)

    def _show(self, idx: int, part: str, addr: int, nbytes: int, stream: Stream) -> None:
        for observer in self.observers:
            observer.point(self._position, idx, part, addr, nbytes, stream)

    def route(self, idx: int, stream: Stream) -> None:
        """From the router's logits to resident experts and a plan block that points at them."""
        if self._device_route:
            guess = self._layers[idx + 1].guess if idx + 1 < self.n_layers else ()
            self._router.route_device(idx, self._position, self._layers[idx].route_select, stream, guess)
        else:
            self._router.route_host(idx, self._position, stream)

    def load_engram(self, stream: Stream) -> None:
        if self._engram is not None and not self._engram_loaded:
            self._engram.preload(self.sequence.history, self._position, stream)
            self._engram_loaded = True

    # ---- the host's half of a segment

    def prepare(self, idx: int, classes: Classes, end: int, stream: Stream) -> int | None:
        if idx == 0:
            self.load_engram(stream)
        else:
            self._see_entry(idx, stream)
            self.source_attention(idx, stream)
        self._router.update_table()
        return self._block.rows_cell(self._cfg.kv_source_of(end - 1)) if classes[0] else None

    def source_attention(self, idx: int, stream: Stream) -> None:
        """Attention of an index source: compressor, index scores, top-k on the host, then the attention itself."""
        layer = self._layers[idx]
        self._run(layer.qkv, stream)
        self._run(layer.compress, stream)
        rows = self._select(idx, layer, stream)
        for observer in self.observers:
            observer.selection(idx, rows)
        self._block.upload_selection(idx, rows, stream)
        self._run(layer.attn_core, stream)

    def _select(self, idx: int, layer: LayerLaunches, stream: Stream) -> NDArray[np.int32]:
        cfg = self._cfg
        n = (self._position + 1) // cfg.compress_ratios[idx]
        builds_mask = idx == cfg.candidate_source_layer and n > cfg.candidate_block_size * cfg.candidate_topk_blocks
        follows = cfg.candidate_source_layer is not None and idx > cfg.candidate_source_layer
        mask = self.mask if follows else None
        if n <= cfg.index_topk and mask is None and not builds_mask:
            # everything is selected: no score can change that
            return np.arange(n, dtype=np.int32)
        stale = self._stale_keys and cfg.compress_ratios[idx] == 2 and self._position % 2 == 0
        score = layer.index_score_stale if stale else layer.index_score
        assert layer.index_q is not None
        assert score is not None
        self._backend.launch(layer.index_q, stream)
        self._backend.launch(score, stream)
        self._backend.copy_d2h(self._score_host, self._buf.index_scores.ptr, 4 * n, stream, 0, "index.scores")
        self._backend.synchronize(stream)
        scores = self._score_image[:n]
        if builds_mask:
            self.mask = candidate_mask(
                scores, block_size=cfg.candidate_block_size, top_blocks=cfg.candidate_topk_blocks
            )
        return select_rows(scores, cfg.index_topk, mask)

    def nodes_per_layer(self) -> float:
        """Graph nodes of an average capturable layer: its launches and the snapshot."""
        counts = [
            1 + len(x.embed) + len(x.engram) + len(x.qkv) + len(x.attn_core) + len(x.shared) + len(x.experts) + 5
            for x, role in zip(self._layers, self._roles, strict=True)
            if not role.is_index_source
        ]
        return sum(counts) / len(counts)

    def read_headers(self, layers: tuple[int, ...], stream: Stream) -> Fall | None:
        fall = self._router.read_headers(layers, self._position, stream)
        if self.observers:
            self._see_replay(layers, fall, stream)
        return fall

    def _see_replay(self, layers: tuple[int, ...], fall: Fall | None, stream: Stream) -> None:
        snapshots = self._require_snapshots()
        for idx in layers:
            if idx == 0 or idx != layers[0]:  # any other owner's was seen in `prepare`
                self._see_entry(idx, stream)
            if fall is not None and idx == fall.layer:
                return  # its ffn half runs again from its snapshot, and the layer is seen then
            self._see_middle(idx, snapshots.ptr(idx), stream)
        for part in ("segment_streams", "segment_hidden"):
            self._see(layers[-1], part, stream)

    def close(self) -> None:
        self._backend.free_pinned(self._score_host)
