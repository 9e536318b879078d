"""The embedder's door: open a checkpoint, make sequences, step tokens, read counters, close.

One thread at a time uses an engine; another gets a clear error, not a race. An exception inside a step leaves the
sequence where it was: the same token can be stepped again with equal bits, and no other. Only a sticky device error
closes the engine; every later call then says so.
"""

import platform
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from os import PathLike, environ
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from ds41rt.attn.sequence import SequenceBlock, SequenceBuffers, sequence_nbytes, why_not_truncate
from ds41rt.capture.watch import WatchedBackend
from ds41rt.checkpoint.checkpoint import Checkpoint
from ds41rt.checkpoint.engram_table import engram_constants
from ds41rt.checkpoint.source import ModelSource
from ds41rt.config import ModelConfig
from ds41rt.cu.backend import GpuBackend, open_backend
from ds41rt.cu.result import CudaError
from ds41rt.engram.rows import EngramUpload
from ds41rt.errors import (
    CheckpointError,
    ConfigError,
    ContextFullError,
    EngineBusyError,
    EngineClosedError,
    InputError,
    NotFiniteError,
    UnsupportedError,
)
from ds41rt.interrupts import interrupts_wait
from ds41rt.log import Logger
from ds41rt.moe.arena import ExpertArena, slot_nbytes
from ds41rt.moe.budget import Asked, Memory, plan_budget
from ds41rt.moe.cache import ExpertCache
from ds41rt.moe.fetch import ExpertFetcher
from ds41rt.moe.gather import GatherBuffers
from ds41rt.moe.guess import GuessBuffers
from ds41rt.moe.header import SLOT_TABLE_LAYERS
from ds41rt.moe.host_memory import available_nbytes
from ds41rt.moe.mover import MOVES_PER_TOKEN, Mover
from ds41rt.moe.pool import PinnedPool, open_pool
from ds41rt.moe.route import MoeRouter, PlanBuffers, RouteConfig
from ds41rt.moe.slots import SlotTable
from ds41rt.settings import Settings
from ds41rt.step.adaptive import Adaptive
from ds41rt.step.bodies import DecodeBodies, StepObserver, StepSequence
from ds41rt.step.buffers import StepBuffers
from ds41rt.step.entries import Entries
from ds41rt.step.hash_log import HashLog
from ds41rt.step.launches import LaunchBuilder
from ds41rt.step.machine import StepMachine
from ds41rt.step.snapshot import Snapshots
from ds41rt.step.state import Fork
from ds41rt.step.weights import DeviceWeights

log = Logger("ds41rt.engine")
Mode = Literal["eager", "step-graph", "adaptive"]
Progress = Callable[[int, int], None]
_T = TypeVar("_T")

# What the selection kernel takes in one block.
_ROUTE_MAX_EXPERTS, _ROUTE_MAX_TOP_K = 1024, 8
_DEFAULT_CONTEXT = 4096
# Sequences at the maximum context that the default budget leaves room for.
_N_SEQUENCES = 2


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since the engine was opened.

    device_hits + host_hits + misses == layers * top-k * tokens, all of completed tokens. Replays, falls, captures and
    bytes read include what tokens did that failed; replays == clean_replays + sum(falls.values()) all the same.
    Promotions and demotions are experts that have arrived, `expert_nbytes_moved` what that copied in both directions.
    prefetch_useful + prefetch_wasted + prefetch_failed == prefetch_issued, in experts.
    """

    tokens: int
    captures: int
    recaptures: int
    replays: int
    clean_replays: int
    falls: dict[str, int]
    falls_by_layer: list[int]
    device_hits: int
    host_hits: int
    misses: int
    promotions: int
    demotions: int
    prefetch_issued: int
    prefetch_useful: int
    prefetch_wasted: int
    prefetch_failed: int
    expert_nbytes_read: int
    expert_nbytes_moved: int
    expert_slots: int
    host_slots: int
    device_nbytes: int
    pinned_nbytes: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class DecodeSequence:
    """One text being decoded. `position` is the number of tokens processed. Made by `Engine.new_sequence`."""

    def __init__(self, engine: "Engine", step: StepSequence) -> None:
        self._engine = engine
        self.step = step
        self.position = 0
        # One past the position whose step was begun last, completed or not: tells what rings and pools have lost.
        self.started = 0
        self.closed = False

    def reset(self) -> None:
        """Start over with an empty text; buffers are kept, so no graph is captured again."""
        self.truncate(0)

    def truncate(self, position: int) -> None:
        """Go back to `position` (at most the current one): the next token is stepped there, and may be another one.

        Raises `InputError` with the reason where the state of `position` is gone. What is always there: the current
        position, 0, and one step back; further back only while no window ring has wrapped, and with ratio-2
        compression only to even positions (see `attn.sequence.why_not_truncate`). A step that failed counts: it may
        have written its state, so that from there one step back is two.
        """
        self._engine.truncate_sequence(self, position)

    def fork(self) -> "DecodeSequence":
        """A new sequence with the same text so far, in buffers of its own; both go on independently.

        Costs one copy of the sequence's device memory. Raises `OutOfDeviceMemory` naming the buffer.
        """
        return self._engine.fork_sequence(self)

    def close(self) -> None:
        """Free the sequence's device memory. Idempotent."""
        self._engine.close_sequence(self)

    def __repr__(self) -> str:
        return f"<DecodeSequence {self.step.ident} {'closed' if self.closed else f'at position {self.position}'}>"

    def __enter__(self) -> "DecodeSequence":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Engine:
    """Decodes one model on one backend. Use `Engine.open` for a checkpoint, and `close` it (or a `with` block).

    The constructor takes any `ModelSource`, which stays open and the caller's own.
    """

    def __init__(
        self,
        source: ModelSource,
        settings: Settings,
        *,
        schedule: str = "lazy",
        expert_slots: int | None = None,
        host_slots: int | None = None,
        backend: GpuBackend | None = None,
        progress: Progress | None = None,
    ) -> None:
        _check_platform()
        for name, slots in (("expert_slots", expert_slots), ("host_slots", host_slots)):
            if slots is not None and (isinstance(slots, bool) or not isinstance(slots, int)):
                raise ConfigError(f"{name}={slots!r}: give a whole number of experts, for example 600")
        if not isinstance(schedule, str):
            raise InputError(f"schedule={schedule!r}: give 'lazy', 'eager' or 'random:SEED'")
        if backend is not None and not hasattr(backend, "create_stream"):
            raise InputError(f"backend={backend!r}: give 'auto', 'host', 'cuda' or an open backend")
        self.settings = settings
        self._busy = threading.RLock()
        self._stepping = False
        # Set while a call runs, and left so by one that an interrupt ended: nothing has to notice the interrupt.
        self._unsettled = False
        self._closed_because: str | None = None
        self._sequences: set[DecodeSequence] = set()
        self._next_ident = 1
        self._seen = _Counts()
        with ExitStack() as stack:
            self._source = source
            self._name = str(getattr(source, "directory", type(source).__name__))
            self.config: ModelConfig = source.config
            limit = self.config.max_positions
            self.max_context = settings.max_context or min(_DEFAULT_CONTEXT, limit)
            if self.max_context > limit:
                raise ConfigError(f"max_context {self.max_context} is above the model's {limit} positions")
            if backend is None:
                backend, why = open_backend(settings.backend, schedule=schedule)
                stack.callback(backend.close)
                log.info("backend chosen", backend=backend.name, why=why)
            if settings.capture_watch:
                backend = WatchedBackend(backend).as_backend
            self.backend = backend
            asked = Asked(expert_slots, settings.expert_cache_gib, host_slots, settings.host_cache_gib)
            self._build(stack, asked, progress)
            self._stack = stack.pop_all()

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        mode: Mode | None = None,
        schedule: str = "lazy",
        expert_slots: int | None = None,
        host_slots: int | None = None,
        backend: GpuBackend | str | None = None,
        progress: Progress | None = None,
        **overrides: Any,
    ) -> "Engine":
        """Open the checkpoint directory `path`.

        `overrides` are fields of `Settings` and go before the environment's `DS41RT_*`. `mode` "step-graph" asks for
        graph segments, "adaptive" for graph segments while they pay (see `step.adaptive`). `expert_slots` is the number
        of experts held on the device, `host_slots` that of pinned host memory (defaults: see
        `moe.budget.plan_budget`); they go before a budget in GiB of the environment, and not with one given here.
        `backend` is "auto", "host" or "cuda", or an open backend, which the engine then does not close.
        `progress(done, total)` is called in bytes while weights load. Raises `Ds41Error` subtypes; nothing is left
        behind then.
        """
        if mode is not None:
            for switch in ("step_graph", "adaptive"):
                if switch in overrides:
                    raise InputError(f"give mode or {switch}, not both: they are the same switch")
            if mode not in get_args(Mode):
                raise InputError(f"mode {mode!r} is unknown; use {', '.join(get_args(Mode))}")
            overrides["step_graph"] = mode != "eager"
            overrides["adaptive"] = mode == "adaptive"
        for slots, gib, given in (
            ("expert_slots", "expert_cache_gib", expert_slots),
            ("host_slots", "host_cache_gib", host_slots),
        ):
            if given is not None and overrides.get(gib) is not None:
                raise InputError(f"give {slots} or {gib}, not both: they are the same budget")
        if not isinstance(path, str | PathLike):
            raise InputError(f"path={path!r}: give the directory of a checkpoint")
        if isinstance(backend, str):
            overrides["backend"] = backend
            backend = None
        settings = Settings.from_env(environ, **overrides)
        with ExitStack() as stack:
            checkpoint = stack.enter_context(Checkpoint.open(path, direct_reads=settings.direct_reads))
            engine = cls(
                checkpoint,
                settings,
                schedule=schedule,
                expert_slots=expert_slots,
                host_slots=host_slots,
                backend=backend,
                progress=progress,
            )
            # the engine's parts close first: they read from the checkpoint
            stack.push(engine._stack)
            engine._stack = stack.pop_all()
        return engine

    # ---- building

    def _build(self, stack: ExitStack, asked: Asked, progress: Progress | None) -> None:
        cfg, settings, backend = self.config, self.settings, self.backend

        def own(resource: _T, close: Callable[[_T], None]) -> _T:
            stack.callback(self._release, close, resource)
            return resource

        self.stream = own(backend.create_stream("compute"), backend.destroy_stream)
        side = own(backend.create_stream("shared expert"), backend.destroy_stream)
        self.fork = Fork(
            side,
            own(backend.create_event("shared fork"), backend.destroy_event),
            own(backend.create_event("shared join"), backend.destroy_event),
        )
        self._side = side
        # Closed in this order, also when a later part cannot be made: drain, parts, streams and events.
        parts = stack.enter_context(ExitStack())
        own(None, lambda _: self._drain())
        stack = parts
        engram = None
        if cfg.engram_layers and not settings.no_engram:
            engram = EngramUpload(backend, cfg, engram_constants(cfg), self._source.token_map(), self._source)
            own(engram, EngramUpload.close)
        self.engram = engram
        self._weights = own(DeviceWeights(backend, self._source, self.stream, progress), DeviceWeights.close)
        self.buffers = own(StepBuffers(backend, cfg, self.max_context), StepBuffers.close)
        work = self.buffers.mix_work
        backend.fill(work.ptr, 0, work.nbytes, self.stream, work.name)
        self.block = own(SequenceBlock(backend, cfg), SequenceBlock.close)
        layout = self._source.expert_layout
        n_slots, self._pool, host_slots = self._open_tiers(asked)
        own(self._pool, PinnedPool.close)
        self.cache = ExpertCache(
            cfg.n_layers,
            cfg.n_experts,
            n_slots,
            host_slots=host_slots,
            pool_slots=self._pool.n_slots if host_slots else 0,
            policy=settings.evict_policy,
            evict_random_pct=settings.evict_random_pct,
        )
        self.arena = own(
            ExpertArena(backend, layout, n_slots, self._pool.base, cfg.top_k, self.stream), ExpertArena.close
        )
        self.table = own(SlotTable(backend, self.cache, self.stream), SlotTable.close)
        self._fetcher = own(
            ExpertFetcher(backend, self.cache, self.arena, self._pool, self._source, settings.reader_threads),
            ExpertFetcher.close,
        )
        self._mover = None
        if n_slots and host_slots:
            self._mover = own(
                Mover(backend, self.cache, self.arena, self._pool, self.table, keep=cfg.top_k), Mover.close
            )
            own(self._mover, Mover.drain)
        self.device_route = self._device_route_usable()
        gathered = None
        if host_slots:
            gathered = own(GatherBuffers(backend, self._pool, cfg.top_k), GatherBuffers.close)
        guess = None
        if settings.prefetch and self._prefetch_usable():
            guess = own(GuessBuffers(backend, cfg.n_experts, cfg.top_k), GuessBuffers.close)
        self.router = own(
            MoeRouter(
                backend,
                RouteConfig(cfg.n_experts, cfg.top_k, cfg.gate_temperature, cfg.route_scale, cfg.norm_topk_prob),
                PlanBuffers(self.buffers.logits, self.buffers.ptrs_dev, guess.header if guess is not None else 0),
                self.arena,
                self.cache,
                self.table,
                self._pool,
                self._fetcher,
                self._mover,
                [self._router_bias(i) for i in range(cfg.n_layers)],
                diag=settings.device_route_diag,
            ),
            MoeRouter.close,
        )
        step_graph = self._step_graph_usable()
        snapshots = None
        if step_graph:
            snapshots = own(Snapshots(backend, self.buffers.saved, cfg.n_layers), Snapshots.close)
        entries = own(Entries(backend, cfg, self.buffers), Entries.close)
        builder = LaunchBuilder(
            backend,
            cfg,
            self._weights,
            self.buffers,
            self.block.ptr,
            engram,
            self.arena,
            self.table,
            gathered,
            guess,
            self.max_context,
        )
        self.layers = [builder.layer(i) for i in range(cfg.n_layers)]
        self.head_launch = builder.head()
        buf = self.buffers
        baked: tuple[int, ...] = (
            buf.hidden,
            buf.streams,
            buf.normed,
            self.arena.base,
            self.arena.host_base,
            self.table.table.ptr,
            self.arena.headers_ptr,
        )
        if snapshots is not None:
            baked += (snapshots.ptr(0), self.block.ptr)
        self.bodies = DecodeBodies(
            backend,
            cfg,
            self.layers,
            self.buffers,
            self.block,
            engram,
            self.router,
            snapshots,
            entries,
            baked,
            self.fork,
            device_route=self.device_route,
            stale_keys=settings.index_keys == "reference",
        )
        own(self.bodies, DecodeBodies.close)
        if settings.trace:
            self.observe(own(HashLog(backend, buf), HashLog.close))
        self._logits_host = own(backend.alloc_pinned("logits image", 4 * cfg.vocab), backend.free_pinned)
        self._logits = self._logits_host.array.view(np.float32)
        self.machine = StepMachine(
            backend, self.bodies, self.stream, step_graph=step_graph, log=settings.step_graph_log
        )
        own(self.machine, StepMachine.close)
        self._adaptive = Adaptive(self.machine.seg) if settings.adaptive and self.machine.step_graph else None
        backend.synchronize(self.stream)  # what failed in loading is raised here, not by the first token

    def _router_bias(self, layer: int) -> NDArray[np.float32]:
        """A layer's selection bias, refused if not finite: NaN would rank its experts last without a word."""
        name = f"layers.{layer}.ffn.gate.bias"
        bias: NDArray[np.float32] = self._source.read(name)
        if not np.isfinite(bias).all():
            at = int(np.flatnonzero(~np.isfinite(bias))[0])
            raise CheckpointError(f"tensor {name!r}: value {at} is {bias[at]}; a router bias must be finite")
        return bias

    def _open_tiers(self, asked: Asked) -> tuple[int, PinnedPool, int]:
        """(Device slots, the pinned pool, host slots): as asked, or what there is room for."""
        cfg, settings, backend = self.config, self.settings, self.backend
        everything, size = cfg.n_layers * cfg.n_experts, slot_nbytes(self._source.expert_layout)
        memory = Memory(
            backend.memory_info()[0],
            _N_SEQUENCES * sequence_nbytes(cfg, self.max_context),
            available_nbytes(),
            backend.unified_memory,
        )
        budget = plan_budget(asked, memory, n_experts=everything, top_k=cfg.top_k, slot_nbytes=size)
        pool, host_slots = open_pool(
            backend,
            size,
            self._source.expert_layout.nbytes,
            host_slots=budget.host_slots,
            spare_slots=settings.staging_slots,
            move_slots=2 * MOVES_PER_TOKEN if budget.device_slots else 0,  # one a move, for two tokens
            least_host=max(0, cfg.top_k - budget.device_slots),
            least_spare=min(settings.staging_slots, cfg.top_k),
        )
        log.info(
            "expert budget",
            of=everything,
            device_slots=budget.device_slots,
            device=budget.device_reason,
            host_slots=host_slots,
            host=budget.host_reason,
            spare_slots=pool.n_slots - host_slots,
        )
        return budget.device_slots, pool, host_slots

    def _device_route_usable(self) -> bool:
        if not self.settings.device_route:
            return False
        cfg = self.config
        fits = (
            cfg.n_experts <= _ROUTE_MAX_EXPERTS and cfg.top_k <= _ROUTE_MAX_TOP_K and cfg.n_layers <= SLOT_TABLE_LAYERS
        )
        if not fits:
            log.warning(
                "device route not usable, routing on the host",
                n_experts=cfg.n_experts,
                top_k=cfg.top_k,
                n_layers=cfg.n_layers,
                limits=(_ROUTE_MAX_EXPERTS, _ROUTE_MAX_TOP_K, SLOT_TABLE_LAYERS),
                step_graph="off" if self._segments_wanted else "not asked for",
            )
        return fits

    def _prefetch_usable(self) -> bool:
        if not self.device_route:
            log.warning("prefetch not usable", reason="experts are routed on the host")
        return self.device_route

    @property
    def _segments_wanted(self) -> bool:
        return self.settings.step_graph or self.settings.adaptive

    def _step_graph_usable(self) -> bool:
        if not self._segments_wanted:
            return False
        if not self.settings.device_route:
            log.warning("step graph not usable, the step runs eagerly", reason="the device route is off")
        return self.device_route

    # ---- use

    def new_sequence(self) -> DecodeSequence:
        """An empty sequence with buffers for `max_context` tokens. Raises `OutOfDeviceMemory` naming the buffer."""
        with self._exclusive():
            return self._new_sequence()

    def _new_sequence(self) -> DecodeSequence:
        ident = self._next_ident
        self._next_ident += 1
        max_context = self.max_context
        buffers = SequenceBuffers(self.backend, self.config, max_context, f"sequence {ident}")
        seq = DecodeSequence(self, StepSequence(ident, buffers, np.zeros(max_context, np.int64)))
        self._sequences.add(seq)
        return seq

    def fork_sequence(self, seq: DecodeSequence) -> DecodeSequence:
        """See `DecodeSequence.fork`."""
        with self._exclusive():
            self._check_sequence(seq)
            fork = self._new_sequence()
            try:
                fork.step.buffers.copy_from(seq.step.buffers, self.stream)
                self.backend.synchronize(self.stream)
            except BaseException:
                self._close_sequence(fork)
                raise
            fork.step.history[:] = seq.step.history
            fork.position, fork.started = seq.position, seq.started
            return fork

    def truncate_sequence(self, seq: DecodeSequence, position: int) -> None:
        """See `DecodeSequence.truncate`."""
        with self._exclusive():
            self._check_sequence(seq)
            if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position <= seq.position:
                raise InputError(f"cannot truncate to {position!r}: give an integer in 0..{seq.position}")
            reason = why_not_truncate(self.config, seq.started, position)
            if reason is not None:
                raise InputError(
                    f"cannot truncate from position {seq.position} to {position}: {reason}; fork the sequence before "
                    "its text branches, or reset it and step the text again"
                )
            seq.position = position

    def preload(self, layer: int, experts: Sequence[int]) -> None:
        """Make experts of `layer` resident ahead of use, top-k at a time: on the device while it has empty slots, then
        in the host tier. Raises `InputError`, `CacheError`, `CheckpointError`."""
        _check_listed(experts, "experts")
        for what, n in (("layer", layer), *(("expert", e) for e in experts)):
            if not _is_whole(n):
                raise InputError(f"cannot preload {what} {n!r}: give an integer")
        layer, experts = int(layer), [int(e) for e in experts]  # NumPy's would spread into tables and arguments
        with self._exclusive():
            for i in range(0, len(experts), self.config.top_k):
                self.cache.begin_epoch()
                self._fetcher.fetch(layer, experts[i : i + self.config.top_k], self.stream, count=False)
            self.backend.synchronize(self.stream)

    def decode_step(self, seq: DecodeSequence, token: int) -> NDArray[np.float32]:
        """Process one token; returns the logits float32[vocab] for the next.

        Raises `InputError` for a bad token or sequence, `ContextFullError` at the maximum context, `NotFiniteError`,
        `CacheError`, `CheckpointError` and `CudaError` from the step; the sequence then stands where it stood.
        """
        with self._exclusive():
            self._check_sequence(seq)
            self._check_step(seq, token)
            position = seq.position
            step = seq.step
            if self.engram is not None:
                step.history[position] = self.engram.compressed(token)
            seq.started = position + 1
            self.bodies.bind(step, token, position)
            try:
                self._stepping = True
                if self._adaptive is not None:
                    self._adaptive.token_starts()
                self.machine.run_token(position)
                self.backend.launch(self.head_launch, self.stream)
                self.backend.copy_d2h(
                    self._logits_host, self.buffers.vocab_logits.ptr, 4 * self.config.vocab, self.stream, 0, "logits"
                )
                self.backend.synchronize(self.stream)
                logits = self._logits.copy()
                if not np.isfinite(logits).all():
                    raise NotFiniteError(
                        f"position {position}: a logit is not finite; check the weights of head and last layers"
                    )
            except BaseException as e:
                self._after_failed_step(e)
                raise
            finally:
                self._stepping = False
            self._seen.take(self)
            self.router.end_token()
            if self._adaptive is not None:
                self._adaptive.token_ended()
            seq.position = position + 1  # last: an interrupt before it leaves the token to be stepped again
            return logits

    def prefill(self, seq: DecodeSequence, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Process a prompt token by token; returns the logits after the last one. All ids are checked first."""
        with self._exclusive():
            self._check_sequence(seq)
        _check_listed(tokens, "tokens")
        if not len(tokens):
            raise InputError("the prompt is empty; give at least one token id")
        self.check_tokens(tokens)
        if seq.position + len(tokens) > self.max_context:
            raise ContextFullError(
                f"position {seq.position} plus a prompt of {len(tokens)} tokens is above the maximum context of "
                f"{self.max_context}; raise DS41RT_MAX_CONTEXT or shorten the prompt"
            )
        logits = np.empty(0, np.float32)
        for token in tokens:
            logits = self.decode_step(seq, token)
        return logits

    def stats(self) -> Stats:
        """Counters of completed tokens, and what is allocated now."""
        seg = self.machine.seg
        seen, ahead, mover = self._seen, self._fetcher.ahead, self._mover
        device = pinned = 0
        for buf in self.backend.ledger():
            if hasattr(buf, "pinned"):
                pinned += buf.nbytes
            else:
                device += buf.nbytes
        return Stats(
            tokens=seen.tokens,
            captures=seg.captures,
            recaptures=seg.recaptures,
            replays=seg.launches,
            clean_replays=seg.clean_replays,
            falls=dict(seg.falls.items()),
            falls_by_layer=list(seg.falls_by_layer),
            device_hits=seen.hits,
            host_hits=seen.host_hits,
            misses=seen.misses,
            promotions=0 if mover is None else mover.n_promoted,
            demotions=0 if mover is None else mover.n_demoted,
            prefetch_issued=ahead.n_issued,
            prefetch_useful=ahead.n_useful,
            prefetch_wasted=ahead.n_wasted,
            prefetch_failed=ahead.n_failed,
            expert_nbytes_read=self._fetcher.readers.nbytes_read,
            expert_nbytes_moved=0 if mover is None else mover.nbytes_moved,
            expert_slots=self.cache.n_slots,
            host_slots=self.cache.host_slots,
            device_nbytes=device,
            pinned_nbytes=pinned,
        )

    def observe(self, observer: StepObserver) -> None:
        """Attach a trace or tool to every step. It may synchronise the stream: steps get slower.

        The first observer makes the graphs be captured again, with copies of what enters each layer.
        """
        self.bodies.observers += (observer,)

    def stop_observing(self, observer: StepObserver) -> None:
        """Detach `observer`, if it is attached. When the last one leaves, graphs are captured again without copies."""
        self.bodies.observers = tuple(o for o in self.bodies.observers if o is not observer)

    def close(self) -> None:
        """Free everything. Idempotent. Raises `EngineBusyError` while another thread, or a step, is inside."""
        with interrupts_wait():
            self._enter()
            try:
                if self._closed_because is None:
                    self._closed_because = "close() was called"
                for seq in list(self._sequences):
                    self._close_sequence(seq)
                self._stack.close()
            finally:
                self._busy.release()

    def __repr__(self) -> str:
        mode = "adaptive" if self.settings.adaptive else "step-graph" if self.settings.step_graph else "eager"
        return f"<Engine {self._name}, {mode}, {self.backend.name}, {'closed' if self._closed_because else 'open'}>"

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- checks and failures

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        self._enter()
        try:
            if self._closed_because is not None:
                raise EngineClosedError(f"the engine is closed: {self._closed_because}")
            if self._unsettled:
                self._recover()
            self._unsettled = True
            try:
                yield
            except Exception as e:
                self._unsettled = _follows_an_interrupt(e)
                raise
            self._unsettled = False
        except CudaError as e:
            self._close_if_lost(e)
            raise
        finally:
            self._busy.release()

    def _recover(self) -> None:
        """Put in order what a call left that did not come to an end by itself: KeyboardInterrupt may come between any
        two statements, and leave one half of a change. Nothing is on its way afterwards."""
        self._drain()
        self._fetcher.recover()
        if self._mover is not None:
            self._mover.recover()
        held = self.cache.recover()
        self._pool.recover(held)
        self.table.update()
        kept = sum(map(bool, self.cache.codes))
        log.warning("an interrupted call: experts were looked through, and their ages forgotten", kept=kept)

    def _close_if_lost(self, error: CudaError) -> None:
        if error.sticky:
            self._closed_because = f"the device failed: {error}"

    def _enter(self) -> None:
        """Take the engine for this thread, for as long as `_busy` is held; never waits.

        The lock is re-entrant, so that an interrupt between taking and releasing it cannot lock out its own thread.
        """
        if not self._busy.acquire(blocking=False):
            raise EngineBusyError("the engine is in use by another thread; one thread at a time may use an engine")
        if self._stepping:
            self._busy.release()
            raise EngineBusyError("the engine is in the middle of a step; call it again when the step has returned")

    def _check_sequence(self, seq: DecodeSequence) -> None:
        if not isinstance(seq, DecodeSequence):
            raise InputError(f"{seq!r} is no sequence; make one with new_sequence()")
        if seq not in self._sequences:
            what = "is closed" if seq.closed else "belongs to another engine"
            raise InputError(f"sequence {seq.step.ident} {what}; make one with new_sequence()")

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raise `InputError` naming the first id that cannot be decoded."""
        for token in tokens:
            self._check_token(token)

    def _check_token(self, token: int) -> None:
        cfg = self.config
        if not _is_whole(token) or not 0 <= token < cfg.vocab:
            raise InputError(f"token id {token!r} is not an integer in 0..{cfg.vocab - 1}")
        if token == cfg.image_token:
            raise InputError(f"token id {token} stands for an image; this runtime decodes text only")

    def _check_step(self, seq: DecodeSequence, token: int) -> None:
        self._check_token(token)
        if seq.position >= self.max_context:
            raise ContextFullError(
                f"the sequence is full: position {seq.position} of at most {self.max_context}; "
                "raise DS41RT_MAX_CONTEXT or start a new sequence"
            )

    def _after_failed_step(self, error: BaseException) -> None:
        """Drain what the step left on the streams; a sticky error closes the engine for good."""
        self._seen.drop(self)
        self.router.end_token()
        if isinstance(error, CudaError) and error.sticky:
            return  # nothing to drain; `_exclusive` closes the engine
        try:
            self._drain()
        except CudaError as e:
            self._close_if_lost(e)

    def _release(self, close: Callable[[_T], None], resource: _T) -> None:
        """Close one resource. A lost device refuses every call, and takes its memory with it: that is no news then."""
        try:
            close(resource)
        except CudaError as e:
            if not e.sticky:
                raise
        except KeyboardInterrupt:
            close(resource)  # what the interrupt left; the ones after it follow on their own
            raise

    def _drain(self) -> None:
        """Before buffers are freed nothing may be in flight."""
        self.backend.synchronize(self.stream)
        self.backend.synchronize(self._side)

    def close_sequence(self, seq: DecodeSequence) -> None:
        """Free a sequence's memory; of a failed or closed engine too. Raises `InputError` for another engine's."""
        if seq.closed:
            return
        with interrupts_wait():
            self._enter()
            try:
                self._check_sequence(seq)
                self._close_sequence(seq)
            finally:
                self._busy.release()

    def _close_sequence(self, seq: DecodeSequence) -> None:
        self._release(Engine._drain, self)  # a step whose clean-up was interrupted may still use the buffers
        self._release(SequenceBuffers.close, seq.step.buffers)
        seq.closed = True
        self._sequences.discard(seq)


def configured_backend(asked: str | None = None) -> str:
    """The backend that `Engine.open` would ask for: `asked`, else DS41RT_BACKEND, else auto. Raises `ConfigError`."""
    return Settings.from_env(environ, backend=asked).backend


class _Counts:
    """Cache demand of completed tokens: a step that failed takes its counts with it."""

    def __init__(self) -> None:
        self.tokens = 0
        self.hits = 0
        self.host_hits = 0
        self.misses = 0

    def take(self, engine: Engine) -> None:
        self.tokens += 1
        self.hits = engine.cache.hits
        self.host_hits = engine.cache.host_hits
        self.misses = engine.cache.misses

    def drop(self, engine: Engine) -> None:
        engine.cache.hits = self.hits
        engine.cache.host_hits = self.host_hits
        engine.cache.misses = self.misses


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _check_listed(values: object, what: str) -> None:
    """Raise `InputError` unless `values` has a length and can be sliced: a generator has neither."""
    if not hasattr(values, "__len__") or not hasattr(values, "__getitem__"):
        raise InputError(f"{what} {values!r}: give a list, or another sequence of integers")


def _follows_an_interrupt(error: BaseException | None) -> bool:
    """True for KeyboardInterrupt and its like, and for what was raised while one was on its way."""
    while error is not None:
        if not isinstance(error, Exception):
            return True
        error = error.__context__
    return False


def _check_platform() -> None:
    system, machine = sys.platform, platform.machine().lower()
    if system == "linux" and machine in ("x86_64", "amd64", "aarch64", "arm64"):
        return
    if system == "darwin":
        return  # host backend only: the CUDA backend finds no driver there
    raise UnsupportedError(
        "ds41rt runs on Linux (x86-64, aarch64) and, with the host backend only, on macOS; "
        f"this is {system} on {machine}"
    )
