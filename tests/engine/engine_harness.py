"""An engine held against a reference: the all-eager run of the same text with every expert resident.

`Run.step` compares logits and sequence state after every token; leaving a `Run` checks that nothing leaked. The probe
between engine and host backend lets a test see, fail or drop any backend call.
"""

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ds41rt.cu.backend import GpuBackend, Stream
from ds41rt.cu.host import HostBackend
from ds41rt.cu.result import CudaError, Status
from ds41rt.engine import DecodeSequence, Engine, Stats
from ds41rt.testing.conformance.kernels import AFFINE
from ds41rt.trace.compare import first_difference
from ds41rt.trace.file import Trace
from ds41rt.trace.record import TraceRecorder

Checkpoints = Callable[[str], Path]
Call = Callable[[], Any]
Hook = Callable[[str, tuple[Any, ...], Call], Any]
Pick = tuple[int, int]
"""(layer, expert)"""

SOURCE = str(Path(sys.modules[Engine.__module__].__file__ or "").parent)
SCHEDULES = ("lazy", "eager", "random:1")


class ProbeBackend:
    """A host backend whose every call passes `hook(name, args, call)`, which makes the call, replaces it or raises."""

    def __init__(self, schedule: str = "lazy", hook: Hook | None = None) -> None:
        self.inner = HostBackend(schedule)
        self.hook = hook

    def __getattr__(self, name: str) -> Any:
        target = getattr(self.inner, name)
        if not callable(target) or name == "ledger":  # bookkeeping, no driver call
            return target

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.hook is None:
                return target(*args, **kwargs)
            return self.hook(name, (*args, *kwargs.values()), lambda: target(*args, **kwargs))

        setattr(self, name, call)
        return call


def call_site() -> str:
    """file:line, below the package, of the innermost call into the backend."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not frame.f_code.co_filename.startswith(SOURCE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.removeprefix(SOURCE + '/')}:{frame.f_lineno}"


class FailAt:
    """A hook that raises from the n-th call (of those that `counts` accepts), before or after it took effect."""

    def __init__(
        self,
        n: int,
        error: BaseException,
        *,
        after: bool = False,
        counts: Callable[[str, tuple[Any, ...]], bool] = lambda name, args: True,
    ) -> None:
        self.n = n
        self.error = error
        self.after = after
        self.counts = counts
        self.seen = 0
        self.failed = ""

    def __call__(self, name: str, args: tuple[Any, ...], call: Call) -> Any:
        if not self.counts(name, args):
            return call()
        hit = self.seen == self.n
        self.seen += 1
        if hit:
            self.failed = f"{name} at {call_site()}"
            if self.after:
                call()
            raise self.error
        return call()


class Lost:
    """A hook that loses the device at the n-th call: it and all later ones raise a sticky error."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.seen = 0

    def __call__(self, name: str, args: tuple[Any, ...], call: Call) -> Any:
        self.seen += 1
        if self.seen <= self.n:
            return call()
        why = "" if self.seen == self.n + 1 else "an earlier error: "
        raise CudaError(Status.ILLEGAL_ADDRESS, "planted", f"{why}call {self.n}")


def plant_fault(backend: HostBackend, stream: Stream) -> None:
    """Enqueue a kernel over memory that nobody allocated: it fails when it runs."""
    backend.launch(backend.prepare(AFFINE, {"x": 0x1230, "a": 3, "b": 5, "n": 1}, "planted"), stream)


def out_of_memory() -> CudaError:
    return CudaError(Status.OUT_OF_MEMORY, "planted", "planted by a test")


@dataclass(frozen=True)
class Reference:
    """The eager run: per token the logits, every layer's picks, a hash of the sequence's state, and the whole trace."""

    path: Path
    max_context: int
    tokens: list[int]
    logits: NDArray[np.float32]
    picks: list[list[list[int]]]
    states: list[bytes]
    trace: Trace

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)


def check_trace(trace: TraceRecorder, ref: Reference, start: int) -> None:
    """Everything that the trace saw, from position `start` on, is what the reference's trace saw."""
    seen = trace.trace("run")
    whole = ("version", "model", "about")
    arrays = {k: v if k in whole else v[start : start + seen.n_positions] for k, v in ref.trace.arrays.items()}
    assert first_difference(Trace("reference", ref.trace.config, arrays), seen) is None


def text(engine: Engine, n_tokens: int, seed: int) -> list[int]:
    """Random legal token ids with repeats, so that n-grams and experts come back."""
    cfg = engine.config
    legal = np.setdiff1d(np.arange(cfg.vocab), [cfg.image_token])
    rng = np.random.default_rng(seed)
    tokens: list[int] = rng.choice(legal, n_tokens).tolist()
    for at in range(20, n_tokens - 6, 20):
        tokens[at : at + 6] = tokens[at - 15 : at - 9]
    return tokens


@cache
def reference(path: Path, n_tokens: int = 220, *, seed: int = 7, max_context: int = 256) -> Reference:
    backend = HostBackend()
    with Engine.open(path, mode="eager", backend=backend, max_context=max_context, device_route=True) as engine:
        tokens = text(engine, n_tokens, seed)
        seq = engine.new_sequence()
        trace = TraceRecorder(engine)
        logits, picks, states = [], [], []
        for token in tokens:
            logits.append(engine.decode_step(seq, token))
            trace.end_token()
            picks.append([row.picks for row in engine.router.picks if row is not None])
            states.append(state_of(engine, backend, seq))
        recorded = trace.trace("reference")
        trace.close()
    return Reference(path, max_context, tokens, np.stack(logits), picks, states, recorded)


def state_of(engine: Engine, backend: HostBackend, seq: DecodeSequence) -> bytes:
    """A hash of all that the sequence keeps on the device, less what was never written for this text."""
    cfg, buf, n = engine.config, seq.step.buffers, seq.position
    digest = hashlib.blake2b(digest_size=16)
    row = 2 * cfg.head_dim
    for ring in buf.ring:
        digest.update(backend.memory.bytes(ring, min(n, cfg.window) * row).tobytes())
    for source in cfg.kv_source_layers:
        rows = n // cfg.compress_ratios[source]
        digest.update(backend.memory.bytes(buf.comp[source], rows * row).tobytes())
        digest.update(backend.memory.bytes(buf.ikey[source], rows * 2 * cfg.index_head_dim).tobytes())
        if source in buf.pool:
            digest.update(backend.memory.bytes(buf.pool[source], min(n, 2) * 8 * cfg.head_dim).tobytes())
    return digest.digest()


class Run:
    """A context: an engine on a probed host backend with one sequence, compared with `ref` token by token."""

    def __init__(
        self,
        ref: Reference,
        *,
        mode: str = "step-graph",
        schedule: str = "lazy",
        slots: int | None = None,
        backend: ProbeBackend | None = None,
        hook: Hook | None = None,
        **settings: Any,
    ) -> None:
        self.ref = ref
        settings.setdefault("reader_threads", 0)  # threads have tests of their own, and these should be fast
        settings.setdefault("evict_policy", "oldest")  # which `starve` can steer
        self._owns = backend is None
        self.probe = backend or ProbeBackend(schedule, hook)
        self.engine = Engine.open(
            ref.path,
            mode=cast(Any, mode),
            backend=cast(GpuBackend, self.probe),
            expert_slots=slots,
            max_context=ref.max_context,
            **settings,
        )
        self.seq = self.engine.new_sequence()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.probe.hook = None
        if kind is not None:
            self.probe.close()
            return
        self.engine.close()
        if self._owns:
            assert not any(self.live().values()), self.live()
            self.probe.close()

    @property
    def backend(self) -> HostBackend:
        return self.probe.inner

    def live(self) -> dict[str, int]:
        return self.backend.live()

    def stats(self) -> Stats:
        return self.engine.stats()

    def step(self, seq: DecodeSequence | None = None, ref: Reference | None = None) -> None:
        """One token; logits and sequence state must be those of the reference."""
        seq, ref = seq or self.seq, ref or self.ref
        at = seq.position
        logits = self.engine.decode_step(seq, ref.tokens[at])
        self.check(seq, ref, at, logits)

    def check(self, seq: DecodeSequence, ref: Reference, at: int, logits: NDArray[np.float32]) -> None:
        assert seq.position == at + 1
        wrong = int(np.count_nonzero(logits.view(np.uint32) != ref.logits[at].view(np.uint32)))
        assert not wrong, f"position {at}: {wrong} of {logits.size} logits differ from the eager run"
        assert state_of(self.engine, self.backend, seq) == ref.states[at], f"position {at}: sequence state differs"

    def steps(self, n: int) -> None:
        for _ in range(n):
            self.step()

    @contextmanager
    def hooked(self, hook: Hook) -> Iterator[None]:
        self.probe.hook = hook
        try:
            yield
        finally:
            self.probe.hook = None

    def try_step(self, hook: Hook) -> BaseException | None:
        """One token under `hook`; returns what it raised, if that was a backend's error or an interrupt."""
        try:
            with self.hooked(hook):
                self.step()
        except (CudaError, KeyboardInterrupt) as error:
            return error
        return None

    # ---- what the next token needs

    def picks(self) -> list[list[int]]:
        """Every layer's picks of the next token."""
        return self.ref.picks[self.seq.position]

    def starve(self, absent: Sequence[Pick]) -> None:
        """Make exactly `absent` of the next token's picks absent: fetch the others, then push `absent` out.

        The same calls that a prefetcher would make. Wants strict LRU and a few more slots than the token has picks.
        """
        engine = self.engine
        assert (engine.settings.evict_policy, engine.settings.evict_random_pct) == ("oldest", 0.0)
        fetch, stream, gone = engine._fetcher.fetch, engine.stream, set(absent)
        self.load(absent)
        for layer, expert in self.strangers():
            if not any(engine.cache.slot_of(*pick) for pick in gone):
                break
            fetch(layer, [expert], stream, count=False)
        assert not any(engine.cache.slot_of(*pick) for pick in gone)
        self.load(absent)  # now the strangers are the oldest, and make room when the step fetches

    def load(self, but: Sequence[Pick] = ()) -> None:
        """Make the next token's picks resident, `but` these."""
        self.engine.cache.begin_epoch()
        for layer, picks in enumerate(self.picks()):
            wanted = [expert for expert in picks if (layer, expert) not in but]
            self.engine._fetcher.fetch(layer, wanted, self.engine.stream, count=False)

    def strangers(self) -> Iterator[Pick]:
        """Experts that the next token does not pick."""
        for layer, picks in enumerate(self.picks()):
            for expert in range(self.engine.config.n_experts):
                if expert not in picks:
                    yield layer, expert

    def first_of_segments(self, layers: Sequence[int]) -> list[int]:
        """Of these layers the first in each segment: where replays fall when all of them lack an expert."""
        ends = [(owner, end) for owner, (end, _) in sorted(self.engine.machine.geometry.items())]
        return [min(hit) for owner, end in ends if (hit := [i for i in layers if owner <= i < end])]

    # ---- the device slot table

    def table(self) -> NDArray[np.int32]:
        """The device's table int32 [layers, experts]; work that is still enqueued is let run first."""
        self.backend.synchronize(self.engine.stream)
        cfg, buf = self.engine.config, self.engine.table.table
        whole = self.backend.memory.bytes(buf.ptr, buf.nbytes).view(np.int32).reshape(-1, cfg.n_experts)
        return whole[: cfg.n_layers]

    def check_table(self) -> None:
        """The device's table says what the cache says, once pending changes are in."""
        self.engine.table.update()
        cfg, cache = self.engine.config, self.engine.cache
        want = [[cache.slot_of(i, e) or -1 for e in range(cfg.n_experts)] for i in range(cfg.n_layers)]
        np.testing.assert_array_equal(self.table(), np.array(want, np.int32))


def check_counters(run: Run, *, undisturbed: bool = True) -> Stats:
    """The equations between the counters. `undisturbed`: no failed step and no planted fault in this run."""
    s, cfg = run.stats(), run.engine.config
    assert s.replays == s.clean_replays + sum(s.falls.values())
    assert sum(s.falls.values()) == sum(s.falls_by_layer)
    assert s.device_hits + s.host_hits + s.misses == cfg.n_layers * cfg.top_k * s.tokens
    if undisturbed:
        n_segments = len(run.engine.machine.owners)
        assert (s.captures, s.recaptures) == (n_segments, 0)
        # every token but position 0 and the one that recorded
        assert s.replays == n_segments * (s.tokens - 2)
        assert s.falls["stale_table"] == s.falls["no_flag"] == 0
    return s
