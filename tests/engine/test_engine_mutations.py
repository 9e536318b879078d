"""The checks of this folder can fail: each mutation breaks one rule of the protocol, and its scenario must notice.

Every scenario passes without a mutation (the first test), so that what it notices is the mutation.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from engine_harness import Checkpoints, Reference, Run, check_counters, reference

from ds41rt.cu.backend import Stream
from ds41rt.errors import Ds41Error
from ds41rt.moe import route
from ds41rt.moe.cache import ExpertCache
from ds41rt.moe.changes import Triple
from ds41rt.moe.header import Fall
from ds41rt.moe.route import MoeRouter
from ds41rt.moe.slots import SlotTable
from ds41rt.step.bodies import DecodeBodies
from ds41rt.step.buffers import SavedLayout
from ds41rt.step.machine import StepMachine
from ds41rt.step.snapshot import Snapshots
from ds41rt.step.state import Fork

Patch = pytest.MonkeyPatch
Scenario = Callable[[Reference], None]


# ---- scenarios


def misses(ref: Reference) -> None:
    """A miss at every layer in turn, then an ordinary run with falls in it; nothing but the real picks is fetched."""
    with Run(ref, slots=16, evict_random_pct=0.0) as run:
        run.steps(3)
        fetcher = run.engine._fetcher
        fetch, asked = fetcher.fetch, set[tuple[int, int]]()

        def spy(layer: int, experts: list[int], stream: Stream, *, count: bool) -> int:
            asked.update((layer, expert) for expert in experts)
            return fetch(layer, experts, stream, count=count)

        for n in range(60):
            layer = n % run.engine.config.n_layers
            real = {(i, e) for i, picks in enumerate(run.picks()) for e in picks}
            if n < 12:
                run.starve([(layer, run.picks()[layer][n % 3])])
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(fetcher, "fetch", spy)
                run.step()
            assert asked <= real
            asked.clear()
        run.check_table()
        check_counters(run)
        arena = run.engine.arena
        assert not run.backend.memory.bytes(arena.slot_ptr(0), arena.slot_nbytes).any()


def moved_ring(ref: Reference) -> None:
    """A window ring in a new place, garbage in the old one, between two tokens."""
    with Run(ref, slots=40) as run:
        run.steps(10)
        buf, cfg = run.seq.step.buffers, run.engine.config
        nbytes = cfg.window * 2 * cfg.head_dim
        new = run.backend.alloc("moved", nbytes)
        old = run.backend.memory.bytes(buf.ring[0], nbytes)
        run.backend.memory.bytes(new.ptr, nbytes)[:] = old
        old[:] = 0x3F
        buf.ring = (new.ptr, *buf.ring[1:])
        run.steps(5)
        run.backend.free(new)


def moved_cache(ref: Reference) -> None:
    """The same with a cache of compressed rows."""
    with Run(ref, slots=40) as run:
        run.steps(10)
        buf, cfg = run.seq.step.buffers, run.engine.config
        source = cfg.kv_source_layers[0]
        nbytes = ref.max_context // cfg.compress_ratios[source] * 2 * cfg.head_dim
        new = run.backend.alloc("moved", nbytes)
        old = run.backend.memory.bytes(buf.comp[source], nbytes)
        run.backend.memory.bytes(new.ptr, nbytes)[:] = old
        old[:] = 0x3F
        buf.comp[source] = new.ptr
        buf.moves += 1
        run.steps(5)
        run.backend.free(new)


def wrong_slots(ref: Reference) -> None:
    """Table entries that name other experts' slots."""
    with Run(ref, slots=None) as run:
        run.steps(3)
        for layer in range(run.engine.config.n_layers):
            run.load()
            run.engine.table.update()
            expert = run.picks()[layer][0]
            other = run.engine.cache.slot_of(layer, run.picks()[layer][1])
            run.engine.table.apply([(layer, expert, other)])
            run.step()
        run.check_table()


def repeated_keys(ref: Reference) -> None:
    """One batch assigns an expert, evicts it and assigns it again."""
    with Run(ref, slots=20) as run:
        run.steps(3)
        run.engine.table.apply([(1, 5, 3), (2, 6, 4), (1, 5, -1), (2, 6, -1), (1, 5, 7)])
        assert (run.table()[1, 5], run.table()[2, 6]) == (7, -1)


# ---- mutations


def drop_saved(name: str) -> Callable[[Patch], None]:
    """One of the five buffers is not restored."""

    def mutate(patch: Patch) -> None:
        def restore(self: Snapshots, layer: int, stream: Stream) -> None:
            lay = LAYOUTS[-1]
            bounds = [0, lay.attn_out_off, lay.pre_a_off, lay.post_off, lay.comb_off, lay.nbytes]
            for part, start, end in zip(SAVED, bounds, bounds[1:], strict=False):
                if part != name:
                    at = self._saved.ptr + start
                    self._backend.copy_d2d(at, self.ptr(layer) + start, end - start, stream, "part")

        patch.setattr(Snapshots, "restore", restore)

    return mutate


SAVED = ("streams", "attn_out", "pre_a", "post", "comb")
LAYOUTS: list[SavedLayout] = []


def snapshot_after_the_expand(patch: Patch) -> None:
    """The snapshot is taken behind the kernel that expands the attention's output into the streams."""
    save_nodes, ffn_head = DecodeBodies.save_nodes, DecodeBodies.ffn_head
    late: list[tuple[int, Stream]] = []

    def later(self: DecodeBodies, idx: int, stream: Stream) -> None:
        late.append((idx, stream))

    def head(self: DecodeBodies, layer: Any, stream: Stream, fork: Fork) -> None:
        ffn_head(self, layer, stream, fork)
        while late and late[-1][1] == stream:
            save_nodes(self, *late.pop())

    patch.setattr(DecodeBodies, "save_nodes", later)
    patch.setattr(DecodeBodies, "ffn_head", head)


def no_dedupe(patch: Patch) -> None:
    """All triples of a batch reach the kernel, several for one key included."""

    def apply(self: SlotTable, triples: list[Triple]) -> None:
        self._enqueue([word for triple in triples for word in triple])

    patch.setattr(SlotTable, "apply", apply)


def no_join(patch: Patch) -> None:
    """The routed and the shared expert are added without waiting for the shared one."""
    ffn_tail = DecodeBodies.ffn_tail

    def tail(self: DecodeBodies, layer: Any, stream: Stream, fork: Fork) -> None:
        ffn_tail(self, layer, stream, fork._replace(ev_join=fork.ev_fork))

    patch.setattr(DecodeBodies, "ffn_tail", tail)


def fetch_past_the_first_fall(patch: Patch) -> None:
    """Layers behind the one that fell are looked at as well."""

    def read_headers(self: MoeRouter, layers: tuple[int, ...], position: int, stream: Stream) -> Fall | None:
        falls = [one_layer(self, (layer,), position, stream) for layer in layers]
        return next((fall for fall in falls if fall is not None), None)

    one_layer = MoeRouter.read_headers
    patch.setattr(MoeRouter, "read_headers", read_headers)


def engram_twice(patch: Patch) -> None:
    """The layer that runs again adds its engram rows again."""
    restore = DecodeBodies.restore

    def restore_and_add(self: DecodeBodies, idx: int, stream: Stream) -> None:
        restore(self, idx, stream)
        self._run(self._layers[idx].engram, stream)

    patch.setattr(DecodeBodies, "restore", restore_and_add)


def slot_0_handed_out(patch: Patch) -> None:
    init = ExpertCache.__init__

    def start(self: ExpertCache, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._empty.append(0)

    patch.setattr(ExpertCache, "__init__", start)


def skip_until_off_by(delta: int) -> Callable[[Patch], None]:
    def mutate(patch: Patch) -> None:
        step_seg = StepMachine.step_seg

        def step(self: StepMachine, idx: int) -> None:
            before = self.seg.skip_until
            step_seg(self, idx)
            if self.seg.skip_until > max(before, idx):
                self.seg.skip_until += delta

        patch.setattr(StepMachine, "step_seg", step)

    return mutate


def generation_ignored(patch: Patch) -> None:
    patch.setattr(StepMachine, "note_window", lambda self, layer, window: None)


def moves_ignored(patch: Patch) -> None:
    patch.setattr(DecodeBodies, "sequence_key", lambda self: (self.sequence.ident, 0))


def table_update_lost(patch: Patch) -> None:
    """Every fifth batch of slot changes is forgotten instead of sent."""
    apply, n = SlotTable.apply, iter(range(1, 10**9))

    def lossy(self: SlotTable, triples: list[Triple]) -> None:
        if next(n) % 5:
            apply(self, triples)

    patch.setattr(SlotTable, "apply", lossy)


def no_reverse_check(patch: Patch) -> None:
    patch.setattr(route, "slots_agree", lambda row, cache: None)


def no_restore(patch: Patch) -> None:
    patch.setattr(Snapshots, "restore", lambda self, layer, stream: None)


def miss_not_counted_as_a_fall(patch: Patch) -> None:
    """A layer that missed has its experts fetched, and is not run again."""
    read_headers = MoeRouter.read_headers

    def clean(self: MoeRouter, *args: Any) -> None:
        read_headers(self, *args)

    patch.setattr(MoeRouter, "read_headers", clean)


MUTATIONS: dict[str, tuple[Scenario, Callable[[Patch], None]]] = {
    **{f"snapshot without {name}": (misses, drop_saved(name)) for name in SAVED},
    "snapshot after the expand": (misses, snapshot_after_the_expand),
    "no restore": (misses, no_restore),
    "no dedupe of triples": (repeated_keys, no_dedupe),
    "no wait for the shared expert": (misses, no_join),
    "a miss is fetched and not rerun": (misses, miss_not_counted_as_a_fall),
    "fetching past the first flagged layer": (misses, fetch_past_the_first_fall),
    "engram applied twice after a fall": (misses, engram_twice),
    "slot 0 handed out": (misses, slot_0_handed_out),
    "skip_until one too far": (misses, skip_until_off_by(1)),
    "skip_until one too near": (misses, skip_until_off_by(-1)),
    "a generation change ignored": (moved_ring, generation_ignored),
    "a move ignored": (moved_cache, moves_ignored),
    "a table update lost": (misses, table_update_lost),
    "no reverse slot check": (wrong_slots, no_reverse_check),
}


@contextmanager
def mutated(mutate: Callable[[Patch], None], ref: Reference) -> Iterator[None]:
    with Run(ref) as run:
        LAYOUTS.append(SavedLayout.of(run.engine.config))
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        yield


@pytest.mark.parametrize("scenario", {scenario: None for scenario, _ in MUTATIONS.values()})
def test_scenario_passes_without_a_mutation(checkpoint: Checkpoints, scenario: Scenario) -> None:
    scenario(reference(checkpoint("micro")))


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_noticed(checkpoint: Checkpoints, name: str) -> None:
    scenario, mutate = MUTATIONS[name]
    ref = reference(checkpoint("micro"))
    with mutated(mutate, ref), pytest.raises((AssertionError, Ds41Error)):
        scenario(ref)


def test_restoring_the_five_buffers_one_by_one_is_enough(checkpoint: Checkpoints) -> None:
    """So that a mutation that leaves one of them out is noticed for that alone."""
    ref = reference(checkpoint("micro"))
    with mutated(drop_saved("none of them"), ref):
        misses(ref)


def test_the_layout_of_the_saved_block_has_five_parts(checkpoint: Checkpoints) -> None:
    """The mutations above cut it where the buffers are."""
    with Run(reference(checkpoint("micro"))) as run:
        buf, lay = run.engine.buffers, SavedLayout.of(run.engine.config)
        offsets = [0, lay.attn_out_off, lay.pre_a_off, lay.post_off, lay.comb_off]
        addresses = [buf.streams, buf.attn_out, buf.pre_a, buf.post, buf.comb]
        np.testing.assert_array_equal(np.array(addresses) - buf.saved.ptr, offsets)
        assert buf.saved.nbytes == lay.nbytes
