"""A small language for what may happen to an engine, and the runner that holds every token against the eager twin.

A scenario is a line of words. A word is a sequence's name, a to d, and what happens to it:

    a               step one token of sequence a, which is made on first use; a*5 steps five
    a/miss=1.0+3.2  step with picks absent: of layer 1 the best, of layer 3 the third; all others resident. `miss=all`,
                    `miss=` (none)
    a/host=1.0+3.2  step with picks in the host tier, the others as `miss` says. `host=all`
    a/wrong=2.1     step with a lie in the device slot table: the entry of that pick names another expert's slot
    a/lost=2.1      step with a gap in it: the entry says absent
    a/bake=3        step after address 3 that graphs bake has changed
    a/other=1.end   step after what graph 1 was captured for (end, classes or rows_b) is something else
    a/move=2@1      step; part 2 of the sequence (rings first, then rows, keys, pools) moves before layer 1
    a/fail=7        the 7th backend call of the step raises; `stop` interrupts before it, `late` after it
    a/record=7      the 7th call of a recording fails, if the step records so many
    a/read=1        the 2nd checkpoint read of the step fails; `reads=1` all from then on
    a/falls=1+3     expect: the step's replays fall at layers 1 and 3, and nowhere else
    a/clean         expect: every segment is replayed and none falls
    a/captures=2    expect: the step captures 2 segments
    a:reset  a:close  a:truncate=5  a:truncate=-1  a:fork=b  a:text=2     (fork takes `/fail=n`)
    reopen          close the engine, look for leaks, open a new one

Every word is legal at any time. A step that fails is not repeated: the next word decides what comes. After every word:
logits and sequence state are the twin's bits, each layer took effect once, counters obey their equations, no capture is
open, nothing leaked, and cache, slot table and arena agree.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
from twin import MAX_CONTEXT, Expected, Reader, StreamsSeen, Twin, read_state

from ds41rt.cu.backend import CaptureStatus, DeviceBuffer, GpuBackend, open_backend
from ds41rt.cu.result import CudaError, Status
from ds41rt.engine import DecodeSequence, Engine, Stats
from ds41rt.errors import CacheError, CheckpointError, ContextFullError, InputError
from ds41rt.moe.header import HOST_SLOT_BIT

Pick = tuple[int, int]
"""(layer, expert)"""

PRESET = "micro"


@dataclass(frozen=True)
class Scenario:
    """`words` on an engine with `slots` expert slots (None: all) and `host` more in the host tier. Its repr can be
    pasted into a test.

    `watch`: compare every layer's streams too, which waits for the device once a layer.
    """

    words: str
    slots: int | None = None
    host: int = 0
    prefetch: bool = False
    threads: int = 0
    schedule: str = "lazy"
    mode: Literal["eager", "step-graph"] = "step-graph"
    watch: bool = False


@dataclass
class Text:
    """One sequence and what the test knows of it: its tokens, and which prefix last wrote each place of its state."""

    seq: DecodeSequence
    text: int
    tokens: tuple[int, ...] = ()
    ring: dict[int, tuple[int, ...]] = field(default_factory=dict)
    pool: dict[int, tuple[int, ...]] = field(default_factory=dict)
    whole_pool: bool = True

    def begin(self, prefix: tuple[int, ...], window: int) -> None:
        self.ring[(len(prefix) - 1) % window] = prefix
        self.pool[(len(prefix) - 1) % 2] = prefix

    def may_truncate(self, position: int, window: int) -> bool:
        """What a step at `position` reads was written by this text's own prefixes, and not replaced since."""
        needed = range(max(0, position - window + 1), position)
        rows = all(self.ring.get(p % window) == self.tokens[: p + 1] for p in needed)
        return rows and (position % 2 == 0 or self.pool.get(0) == self.tokens[:position])


class Probe:
    """A backend whose calls pass `hook(name, args, call)`, if there is one."""

    def __init__(self, inner: GpuBackend) -> None:
        self.inner = inner
        self.hook: Callable[[str, tuple[Any, ...], Callable[[], Any]], Any] | None = None

    def __getattr__(self, name: str) -> Any:
        target = getattr(self.inner, name)
        if not callable(target) or name in ("ledger", "live"):
            return target

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.hook is None:
                return target(*args, **kwargs)
            return self.hook(name, (*args, *kwargs.values()), lambda: target(*args, **kwargs))

        setattr(self, name, call)
        return call


CREATING = ("end_capture", "instantiate", "create_stream", "create_event", "alloc", "alloc_pinned")
STREAM_ARGUMENT = {"launch": 1, "record": 1, "wait": 0, "copy_d2d": 3, "begin_capture": 0, "end_capture": 0}


class Failing:
    """A hook that raises at the n-th call of those that count."""

    def __init__(self, kind: str, n: int, recorded: Callable[[str, tuple[Any, ...]], bool]) -> None:
        self.left = n
        self.kind = kind
        self.recorded = recorded
        interrupt = kind in ("stop", "late")
        self.error: BaseException = (
            KeyboardInterrupt("planted") if interrupt else CudaError(Status.OUT_OF_MEMORY, "planted", "by a test")
        )
        self.fired = False

    def __call__(self, name: str, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        # a handle whose creation is interrupted after the fact is lost whatever anybody does
        if (self.kind == "late" and name in CREATING) or (self.kind == "record" and not self.recorded(name, args)):
            return call()
        self.left -= 1
        if self.left != -1:
            return call()
        self.fired = True
        if self.kind == "late":
            call()
        raise self.error


class FailingReads:
    """A model source whose n-th read raises; with `every`, all later ones too."""

    def __init__(self, source: Any, n: int, every: bool) -> None:
        self._source = source
        self._left = n
        self._every = every
        self.error = CheckpointError("planted by a test")
        self.fired = False

    def _count(self) -> None:
        self._left -= 1
        if self._left == -1 or (self._every and self._left < 0):
            self.fired = True
            raise self.error

    def read_expert(self, *args: Any) -> None:
        self._count()
        self._source.read_expert(*args)

    def read_engram_rows(self, *args: Any) -> None:
        self._count()
        self._source.read_engram_rows(*args)


class World:
    """One engine under test on one backend, its sequences, and the twin."""

    def __init__(self, scenario: Scenario, path: Path, backend_name: str, twin: Twin) -> None:
        self.scenario = scenario
        self.path = path
        self.twin = twin
        schedule = scenario.schedule if backend_name == "host" else "lazy"
        backend, _ = open_backend(backend_name, schedule=schedule)
        self.backend: Any = backend  # `live` is no part of the protocol
        self.reader = Reader(backend, 1 << 22)
        self.probe = Probe(backend)
        self.steps = 0
        self.falls: Counter[str] = Counter()
        self.last: Stats | None = None
        self.open()

    def open(self) -> None:
        s = self.scenario
        self.at_start = self.backend.live()
        self.engine = Engine.open(
            self.path,
            mode=s.mode,
            backend=cast(GpuBackend, self.probe),
            expert_slots=s.slots,
            host_slots=s.host,
            max_context=MAX_CONTEXT,
            evict_policy="oldest",
            evict_random_pct=0.0,
            prefetch=s.prefetch,
            reader_threads=s.threads,
        )
        cfg = self.engine.config
        self.owners = sorted(self.engine.machine.owners)
        self.texts: dict[str, Text] = {}
        self.moved: list[DeviceBuffer] = []
        self.tampered: set[Pick] = set()
        self.unrest = False  # a call was made to fail, and no whole step has followed
        self.n_tokens = 0
        self.read_fails = False
        self.seen = StreamsSeen(self.reader, cfg.n_layers)
        if s.watch:
            self.engine.observe(self.seen)
        self.opened = self.backend.live()

    def close_engine(self) -> None:
        self.engine.close()
        for buf in self.moved:
            self.backend.free(buf)
        live = self.backend.live()
        assert live == self.at_start, f"leaked: {live}, was {self.at_start}"

    def close(self) -> None:
        self.close_engine()
        self.reader.close()
        assert not any(self.backend.live().values())
        self.backend.close()

    # ---- words

    def do(self, word: str) -> None:
        if word == "reopen":
            self.falls.update(self.engine.stats().falls)
            self.close_engine()
            self.open()
            return
        head, *mods = word.split("/")
        head, _, times = head.partition("*")
        name, _, verb = head.partition(":")
        given = dict.fromkeys(("",), "") | dict(mod.partition("=")[::2] for mod in mods)
        if verb:
            verb, _, arg = verb.partition("=")
            getattr(self, f"_{verb}")(name, arg, given)
            self.unrest |= bool({"fail", "stop"} & set(given))
            self.check_rest(quiet=not self.unrest)
        else:
            for _ in range(int(times or 1)):
                self._step(name, given)

    def text(self, name: str) -> Text:
        if name not in self.texts:
            self.texts[name] = Text(self.engine.new_sequence(), "abcd".index(name))
        return self.texts[name]

    def _reset(self, name: str, arg: str, given: dict[str, str]) -> None:
        text = self.text(name)
        text.seq.reset()
        assert text.seq.position == 0
        text.tokens, text.whole_pool = (), True

    def _close(self, name: str, arg: str, given: dict[str, str]) -> None:
        seq = self.text(name).seq
        del self.texts[name]
        seq.close()
        seq.close()
        for use in (seq.reset, seq.fork, lambda: self.engine.decode_step(seq, 0)):
            with pytest.raises(InputError, match="is closed"):
                use()

    def _text(self, name: str, arg: str, given: dict[str, str]) -> None:
        self.text(name).text = int(arg) % len(self.twin.texts)

    def _truncate(self, name: str, arg: str, given: dict[str, str]) -> None:
        text = self.text(name)
        seq, now = text.seq, text.seq.position
        position = max(now + int(arg), 0) if arg.startswith("-") else int(arg)
        if position > now:
            with pytest.raises(InputError, match=f"in 0..{now}"):
                seq.truncate(position)
            return
        if text.may_truncate(position, self.engine.config.window):
            seq.truncate(position)
            assert seq.position == position
            text.tokens = text.tokens[:position]
            text.whole_pool = position == 0 or (text.whole_pool and position == now)
        else:
            with pytest.raises(InputError, match="cannot truncate from position"):
                seq.truncate(position)
            assert seq.position == now

    def _fork(self, name: str, arg: str, given: dict[str, str]) -> None:
        text = self.text(name)
        if arg == name:
            return
        if arg in self.texts:
            self._close(arg, "", {})
        raised: BaseException | None = None
        with self.hooked(given, ("fail", "stop")) as failing:
            try:
                seq = text.seq.fork()
            except (CudaError, KeyboardInterrupt) as error:
                raised = error
        if raised is not None:
            assert failing is not None
            assert raised is failing.error
            return
        assert seq.position == text.seq.position
        self.texts[arg] = Text(seq, text.text, text.tokens, dict(text.ring), dict(text.pool), text.whole_pool)

    # ---- a step

    def _step(self, name: str, given: dict[str, str]) -> None:
        text = self.text(name)
        engine, seq = self.engine, text.seq
        if seq.position == MAX_CONTEXT:
            with pytest.raises(ContextFullError):
                engine.decode_step(seq, 0)
            self._reset(name, "", {})
        at = seq.position
        token = self.twin.texts[text.text][at]
        prefix = (*text.tokens, token)
        expected = self.twin.expect(prefix)
        self.prepare(text, expected, given)
        seg = engine.machine.seg
        graphs = sum(graph is not None for graph in seg.graphs)
        dropped = self.will_drop(given)
        before = engine.stats()
        text.begin(prefix, engine.config.window)
        self.seen.clear()
        raised: BaseException | None = None
        with self.hooked(given, ("fail", "stop", "late", "record")) as failing, self.reads(given) as reads:
            try:
                logits = engine.decode_step(seq, token)
            except (CudaError, CacheError, CheckpointError, KeyboardInterrupt) as error:
                raised = error
        if raised is not None:
            planted = [x.error for x in (failing, reads) if x is not None and x.fired]
            assert raised in planted or raised.__cause__ in planted, f"nobody planted {raised!r}"
            assert failing is None or failing.kind != "record", "a failed capture reached the caller"
            assert seq.position == at
            self.unrest = True
            self.check_rest(quiet=False)
            return
        self.n_tokens += 1
        self.steps += 1
        text.tokens = prefix
        assert seq.position == at + 1
        wrong = np.count_nonzero(logits.view(np.uint32) != np.frombuffer(expected.logits, np.uint32))
        assert not wrong, f"{wrong} of {logits.size} logits differ from the eager run"
        state, pool = read_state(self.reader, engine, seq)
        assert state == expected.state, "sequence state differs from the eager run"
        assert not text.whole_pool or pool == expected.pool, "pool state differs from the eager run"
        if self.scenario.watch:
            assert self.seen.times == [1] * engine.config.n_layers, f"layers took effect {self.seen.times} times"
            assert self.seen.hashes == expected.streams, "streams of a layer differ from the eager run"
        self.tampered -= {(layer, e) for layer, experts in enumerate(expected.picks) for e in experts}
        disturbed = (failing is not None and failing.fired) or (reads is not None and reads.fired)
        self.check_step(before, at, graphs, dropped, disturbed=disturbed)
        self.check_expectations(before, given)
        self.unrest = disturbed
        self.check_rest(quiet=not disturbed)

    def prepare(self, text: Text, expected: Expected, given: dict[str, str]) -> None:
        """Residency, table and buffers as the word says."""
        picks, bodies, captured = expected.picks, self.engine.bodies, self.engine.machine.seg.graphs
        if self.scenario.host and ("host" in given or "miss" in given):
            self.place(picks, self.some(picks, given.get("host", "")), self.some(picks, given.get("miss", "")))
        elif "miss" in given:
            self.starve(picks, self.some(picks, given["miss"]))
        for kind in ("wrong", "lost"):
            if kind in given:
                self.engine.table.update()
                for layer, expert in self.some(picks, given[kind]):
                    slot = -1 if kind == "lost" else self.another_slot(layer, expert)
                    self.engine.table.apply([(layer, expert, slot)])
                    self.tampered.add((layer, expert))
        if "bake" in given:
            i = int(given["bake"]) % len(bodies._baked)
            bodies._baked = (*bodies._baked[:i], bodies._baked[i] + 0x1000, *bodies._baked[i + 1 :])
        if "other" in given:
            number, _, what = given["other"].partition(".")
            owner = self.owners[int(number) % len(self.owners)]
            graph = captured[owner]
            if graph is not None:
                odd: dict[str, Any] = {
                    "end": {"end": -1},
                    "classes": {"classes": tuple(not x for x in graph.classes)},
                    "rows_b": {"rows_b": 1},
                }
                captured[owner] = replace(graph, **odd[what])
        if "move" in given:
            part, _, before = given["move"].partition("@")
            self.move_before(text, int(part), int(before or 0))

    def will_drop(self, given: dict[str, str]) -> int:
        """Graphs that the step must throw away."""
        machine = self.engine.machine
        graphs = {owner: graph for owner, graph in enumerate(machine.seg.graphs) if graph is not None}
        if machine.seg.baked != self.engine.bodies.baked():
            return len(graphs)
        return sum((g.end, g.classes) != machine.geometry[owner] or g.rows_b == 1 for owner, g in graphs.items())

    def check_step(self, before: Stats, at: int, graphs: int, dropped: int, *, disturbed: bool) -> None:
        """Each segment of the token was replayed or recorded; nothing was recaptured that need not be."""
        now, seg = self.engine.stats(), self.engine.machine.seg
        captures, replays = now.captures - before.captures, now.replays - before.replays
        if at == 0 or self.scenario.mode == "eager" or (seg.disabled and not disturbed):
            assert (captures, replays, now.recaptures) == (0, 0, before.recaptures)
        elif not seg.disabled:
            assert captures + replays == len(self.owners)
            assert now.recaptures - before.recaptures == dropped
            assert captures == len(self.owners) - graphs + dropped
            assert sum(graph is not None for graph in seg.graphs) == len(self.owners)

    def check_expectations(self, before: Stats, given: dict[str, str]) -> None:
        now = self.engine.stats()
        fell = [b - a for a, b in zip(before.falls_by_layer, now.falls_by_layer, strict=True)]
        if "falls" in given:
            assert "+".join(str(i) for i, n in enumerate(fell) for _ in range(n)) == given["falls"]
        for kind in ("stale_table", "no_flag"):
            if kind in given:
                assert now.falls[kind] - before.falls[kind] == int(given[kind])
        if "clean" in given:
            assert now.clean_replays - before.clean_replays == len(self.owners)
        if "captures" in given:
            assert now.captures - before.captures == int(given["captures"])

    # ---- after every word

    def check_rest(self, *, quiet: bool) -> None:
        """What holds at any time between two words; `quiet`: no call was made to fail since the last whole step."""
        engine = self.engine
        s, cfg, seg = engine.stats(), engine.config, engine.machine.seg
        assert s.tokens == self.n_tokens
        assert s.replays == s.clean_replays + sum(s.falls.values())
        assert sum(s.falls.values()) == sum(s.falls_by_layer)
        assert s.device_hits + s.host_hits + s.misses == cfg.n_layers * cfg.top_k * s.tokens
        assert s.expert_nbytes_read % engine.arena.layout.nbytes == 0
        assert not seg.in_step
        assert seg.capturing is None
        live = self.backend.live()
        if seg.recording is not None:
            assert self.backend.capture_status(seg.recording.cap_stream) is CaptureStatus.NONE
        assert live["captures"] == 0
        graphs, kept = sum(graph is not None for graph in seg.graphs), len(seg.doomed)
        assert graphs <= live["graphs"] + live["graph_execs"] <= graphs + kept
        assert not kept or not quiet, "something out of use was kept though nothing failed"
        assert graphs == 0 or not seg.disabled
        recording = 2 * (seg.recording is not None)
        for what in ("streams", "events"):
            assert self.opened[what] + recording <= live[what] <= self.opened[what] + recording + kept
        of_sequences = sum(len(text.seq.step.buffers.owned) for text in self.texts.values())
        assert live["buffers"] == self.opened["buffers"] + of_sequences + len(self.moved)
        self.check_cache()

    def check_cache(self) -> None:
        """Map and reverse maps, slot table, arena and pool say the same; no slot is lost; slot 0 is zero."""
        engine = self.engine
        cfg, cache, arena, table, pool = engine.config, engine.cache, engine.arena, engine.table.table, engine._pool
        self.reader.put(table.ptr, 4 * cfg.n_layers * cfg.n_experts, engine.stream)
        self.reader.put(arena.base, (cache.n_slots + 1) * arena.slot_nbytes, engine.stream)
        raw_table, raw_arena = self.reader.take(engine.stream)
        slots = raw_arena.reshape(-1, arena.slot_nbytes)[:, : arena.layout.nbytes]
        assert not slots[0].any(), "the reserved slot was written to"
        want = np.full((cfg.n_layers, cfg.n_experts), -1, np.int32)
        codes = [*range(1, cache.n_slots + 1), *(HOST_SLOT_BIT | i for i in range(1, cache.pool_slots + 1))]
        keys = [(code, key) for code in codes if (key := cache.key_of(code)) is not None]
        for code, (layer, expert) in keys:
            assert cache.slot_of(layer, expert) == code
            want[layer, expert] = code
            at = pool.offset(code ^ HOST_SLOT_BIT) if code & HOST_SLOT_BIT else 0
            got = pool.host.array[at : at + arena.layout.nbytes] if code & HOST_SLOT_BIT else slots[code]
            assert np.array_equal(got, self.twin.expert_bytes[layer * cfg.n_experts + expert]), (
                f"slot {code:#x} does not have the bytes of {layer}.{expert}"
            )
        assert sum(code != 0 for code in cache.codes) == len(keys)
        on_device = {code for code, _ in keys if not code & HOST_SLOT_BIT}
        targets = {code for code in cache._moving if not code & HOST_SLOT_BIT}
        assert len(cache._empty) + len(on_device | targets) == cache.n_slots, "a slot was lost"
        self.check_pool([code ^ HOST_SLOT_BIT for code, _ in keys if code & HOST_SLOT_BIT])
        got = raw_table.view(np.int32).reshape(want.shape)
        unknown = self.tampered | {(layer, expert) for layer, expert, _ in cache.changes().triples}
        differ = {(int(i), int(e)) for i, e in np.argwhere(got != want)} - unknown
        assert not differ, f"slot table entries that differ from the cache: {differ}"

    def check_pool(self, held: list[int]) -> None:
        """Every pool slot is in one state."""
        engine = self.engine
        pool, fetcher, cache = engine._pool, engine._fetcher, engine.cache
        batches = [] if engine._mover is None else engine._mover._batches
        moves = [transfer.spare for batch in batches for transfer in batch.transfers if transfer.spare]
        staged = [slot for half in fetcher._halves for slot in half.slots]
        ahead = [slot for slot, _ in fetcher.ahead._pending.values()]
        waiting = [*(slot for slot, _ in pool._quarantined), *fetcher._unknown]
        states = [*held, *moves, *staged, *ahead, *waiting, *pool._spare, *pool._left]
        assert sorted(states) == list(range(1, pool.n_slots + 1)), "a pool slot was lost or is in two states"
        assert len(held) <= cache.host_slots + cache._n_in_transit
        s = engine.stats()
        assert s.prefetch_useful + s.prefetch_wasted + s.prefetch_failed == s.prefetch_issued
        assert ahead == []

    # ---- disturbances

    @contextmanager
    def hooked(self, given: dict[str, str], kinds: tuple[str, ...]) -> Iterator[Failing | None]:
        kind = next((kind for kind in kinds if kind in given), None)
        if kind is None:
            yield None
            return

        def recorded(name: str, args: tuple[Any, ...]) -> bool:
            if name in ("create_stream", "create_event", "instantiate"):
                return True
            recording, at = self.engine.machine.seg.recording, STREAM_ARGUMENT.get(name)
            return recording is not None and at is not None and args[at] in (recording.cap_stream, recording.cap_side)

        self.probe.hook = failing = Failing(kind, int(given[kind]), recorded)
        try:
            yield failing
        finally:
            self.probe.hook = None

    @contextmanager
    def reads(self, given: dict[str, str]) -> Iterator[FailingReads | None]:
        kind = next((kind for kind in ("read", "reads") if kind in given), None)
        if kind is None:
            yield None
            return
        engine = self.engine
        source = engine._source
        failing = FailingReads(source, int(given[kind]), kind == "reads")
        holders: list[Any] = [engine._fetcher, *([engine.engram] if engine.engram is not None else [])]
        for holder in holders:
            holder._source = failing
        try:
            yield failing
        finally:
            for holder in holders:
                holder._source = source

    def some(self, picks: list[list[int]], text: str) -> list[Pick]:
        """'1.0+3.2' -> the picks of layer 1 and 3 in these places."""
        if text == "all":
            return [(layer, expert) for layer, experts in enumerate(picks) for expert in experts]
        pairs = [tuple(map(int, pair.split("."))) for pair in text.split("+") if pair]
        return [(layer % len(picks), picks[layer % len(picks)][which % len(picks[0])]) for layer, which in pairs]

    def another_slot(self, layer: int, expert: int) -> int:
        """A slot that does not hold this expert. Of the pool one that holds another: the others are written to."""
        cache = self.engine.cache
        mine = cache.slot_of(layer, expert)
        if cache.n_slots:
            return 1 + mine % cache.n_slots
        return next(code for code in cache.codes if code not in (0, mine))

    def starve(self, picks: list[list[int]], absent: list[Pick]) -> None:
        """Make exactly `absent` of these picks absent, as far as the number of slots allows."""
        cache, top_k = self.engine.cache, self.engine.config.top_k
        if cache.n_slots < len(picks) * top_k + 2:
            return
        self.load(picks, absent)
        for layer, experts in enumerate(picks):
            for expert in set(range(cache.n_experts)) - set(experts):
                if not any(cache.slot_of(*pick) for pick in absent):
                    break
                if not cache.slot_of(layer, expert):
                    self.engine._fetcher.fetch(layer, [expert], self.engine.stream, count=False)
                else:
                    cache.touch(cache.slot_of(layer, expert))
        self.load(picks, absent)  # now the strangers are the oldest, and make room when the step fetches

    def place(self, picks: list[list[int]], in_host: list[Pick], absent: list[Pick]) -> None:
        """Put some picks into the host tier and some nowhere, by hand, as far as there are slots; the rest anywhere."""
        engine, cache, pool = self.engine, self.engine.cache, self.engine._pool
        if cache.n_slots + cache.host_slots - cache.n_moving < len(picks) * engine.config.top_k + 2:
            return
        self.load(picks, absent)
        self.backend.synchronize(engine.stream)
        pool.drained()
        if engine._mover is not None and any(cache.slot_of(*pick) in cache._moving for pick in [*absent, *in_host]):
            for _ in range(3):
                cache.take_used_in_host()  # no new moves
                engine._mover.drain()
                engine._mover.advance(engine.stream)
            self.backend.synchronize(engine.stream)
            pool.drained()
        cache.begin_epoch()
        wanted = {layer * cache.n_experts + e for layer, experts in enumerate(picks) for e in experts}
        for layer, expert in absent:
            self.drop(layer * cache.n_experts + expert)
        for layer, expert in in_host:
            key = layer * cache.n_experts + expert
            if cache.codes[key] & HOST_SLOT_BIT or (layer, expert) in absent or not self.drop(key):
                continue
            if cache._host.n_keys >= cache.host_slots:
                strangers = [k for k in cache._host.keys if k >= 0 and k not in wanted]
                if not any(self.drop(k) for k in strangers):
                    continue
            slot = pool.take()
            if slot:
                engine._source.read_expert(layer, expert, pool.for_reader(slot))
                cache._host.put(slot, key)
                cache._place(key, HOST_SLOT_BIT | slot)
                cache.begin_epoch()

    def drop(self, key: int) -> bool:
        """Make a key absent, by hand; False if a move holds it."""
        cache, code = self.engine.cache, self.engine.cache.codes[key]
        if code in cache._moving:
            return False
        if code & HOST_SLOT_BIT:
            cache._host.policy.remove(code ^ HOST_SLOT_BIT)
            cache._unmap(cache._host.drop(code ^ HOST_SLOT_BIT))
            self.engine._pool.give(code ^ HOST_SLOT_BIT)
        elif code:
            cache._device.policy.remove(code)
            cache._unmap(cache._device.drop(code))
            cache._empty.append(code)
        return True

    def load(self, picks: list[list[int]], but: list[Pick]) -> None:
        self.engine.cache.begin_epoch()
        for layer, experts in enumerate(picks):
            wanted = [expert for expert in experts if (layer, expert) not in but]
            self.engine._fetcher.fetch(layer, wanted, self.engine.stream, count=False)

    def move_before(self, text: Text, part: int, layer: int) -> None:
        """Move a part of the sequence before a layer's step: a copy in a new place, garbage in the old one."""
        machine, buf, stream = self.engine.machine, text.seq.step.buffers, self.engine.stream
        step_seg = machine.step_seg
        part %= len(buf.pointers)

        def moving(idx: int) -> None:
            if idx == layer % machine.n:
                machine.step_seg = step_seg  # type: ignore[method-assign] # once
                old, nbytes = buf.pointers[part], buf._sizes[part]
                new = self.backend.alloc("moved", nbytes)
                self.moved.append(new)
                self.backend.copy_d2d(new.ptr, old, nbytes, stream, "test move")
                self.backend.fill(old, 0x3F, nbytes, stream, "test garbage")
                if part < len(buf.ring):
                    buf.ring = (*buf.ring[:part], new.ptr, *buf.ring[part + 1 :])
                else:
                    for cells in (buf.comp, buf.ikey, buf.pool):
                        for source, ptr in cells.items():
                            if ptr == old:
                                cells[source] = new.ptr
                    buf.moves += 1
            step_seg(idx)

        machine.step_seg = moving  # type: ignore[method-assign] # moves the part in mid-token


# ---- running


class Runner:
    """Runs scenarios on one backend; the twin is kept between them."""

    def __init__(self, path: Path, backend_name: str) -> None:
        self._path = path
        self._backend_name = backend_name
        self._twin = Twin(path, backend_name)

    def __call__(self, scenario: Scenario) -> World:
        """Run to the end; a failure names the word and prints the scenario up to it. The world comes back closed."""
        words = scenario.words.split()
        world = World(scenario, self._path, self._backend_name, self._twin)
        done = 0
        try:
            for word in words:
                done += 1
                world.do(word)
            world.falls.update(world.engine.stats().falls)
            world.last = world.engine.stats()
            done += 1
            world.close()
        except BaseException as error:
            world.probe.hook = None
            world.backend.close()
            if not isinstance(error, Exception):
                raise
            shown = replace(scenario, words=" ".join(words[:done]))
            raise AssertionError(f"at {[*words, 'the end'][done - 1]!r} of\n    {shown}\n{error!r}") from error
        return world

    def close(self) -> None:
        self._twin.close()
