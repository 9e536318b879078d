"""Falls that are forced: absent experts at every layer, lies and gaps in the device slot table, noise behind a fall."""

from itertools import combinations
from pathlib import Path

import pytest
from engine_harness import SCHEDULES, Checkpoints, Pick, Reference, Run, check_counters, check_trace, reference

from ds41rt.checkpoint.synth import synthesize
from ds41rt.checkpoint.synth_presets import PRESETS
from ds41rt.config import ModelConfig
from ds41rt.moe.plan import FetchPlan
from ds41rt.trace.record import TraceRecorder

ABSENT = -1


def starved_run(ref: Reference, schedule: str = "lazy") -> Run:
    """All graphs captured, and a cache that `Run.starve` can steer: strict LRU, a few slots beyond a token's picks."""
    n_layers, top_k = len(ref.picks[0]), len(ref.picks[0][0])
    run = Run(ref, slots=n_layers * top_k + 4, schedule=schedule, evict_random_pct=0.0)
    run.steps(3)
    return run


def step_and_compare_falls(run: Run, absent: list[Pick], kind: str = "miss") -> None:
    """One token that lacks exactly `absent` must fall once in each segment concerned, at its first such layer."""
    before = run.stats()
    run.step()
    after = run.stats()
    falls = [now - then for now, then in zip(after.falls_by_layer, before.falls_by_layer, strict=True)]
    want = run.first_of_segments([layer for layer, _ in absent])
    assert [layer for layer, n in enumerate(falls) for _ in range(n)] == want
    assert after.falls[kind] - before.falls[kind] == len(want)
    n_segments = len(run.engine.machine.owners)
    assert after.clean_replays - before.clean_replays == n_segments - len(want)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_miss_at_every_set_of_layers(checkpoint: Checkpoints, schedule: str) -> None:
    """Each layer alone, the owners, the last layer, two in one segment, all: one pick absent, then all of them."""
    with starved_run(reference(checkpoint("micro")), schedule) as run:
        n = run.engine.config.n_layers
        for which in range(4):
            for size in range(n + 1):
                for layers in combinations(range(n), size):
                    picks = run.picks()
                    some = slice(which, which + 1) if which < 3 else slice(None)
                    absent = [(layer, expert) for layer in layers for expert in picks[layer][some]]
                    run.starve(absent)
                    step_and_compare_falls(run, absent)
        run.check_table()
        check_counters(run)


def test_a_miss_where_the_last_segment_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer is no owner, as in the released model: what fell before it has to run again up to the end."""
    shape = PRESETS["micro"].model_dump() | {
        "n_layers": 6,
        "compress_ratios": (0, 0, 2, 2, 2, 2),
        "kv_source_layers": (2,),
        "index_source_layers": (2,),
        "candidate_source_layer": 2,
    }
    monkeypatch.setitem(PRESETS, "long-tail", ModelConfig(**shape))
    synthesize(tmp_path / "model", "long-tail", 1)
    with starved_run(reference(tmp_path / "model")) as run:
        assert sorted(run.engine.machine.owners) == [0, 2]
        for layers in [*((i,) for i in range(6)), *combinations(range(6), 2)]:
            absent = [(layer, run.picks()[layer][0]) for layer in layers]
            run.starve(absent)
            step_and_compare_falls(run, absent)
        run.check_table()
        check_counters(run)


@pytest.mark.parametrize("schedule", ["lazy", pytest.param("random:5", marks=pytest.mark.long)])
def test_a_miss_at_every_pair_of_layers_of_a_larger_model(golden: Path, schedule: str) -> None:
    with starved_run(reference(golden / "checkpoint", 200), schedule) as run:
        n = run.engine.config.n_layers
        for layers in [*((i,) for i in range(n)), *combinations(range(n), 2)]:
            absent = [(layer, run.picks()[layer][len(layers)]) for layer in layers]
            run.starve(absent)
            step_and_compare_falls(run, absent)
        check_counters(run)


def test_the_trace_of_every_layer_equals_the_eager_run(checkpoint: Checkpoints) -> None:
    """Hashes of all that each half takes over, with a miss forced at each layer in turn."""
    ref = reference(checkpoint("micro"))
    with starved_run(ref) as run:
        start = run.seq.position
        trace = TraceRecorder(run.engine)
        n = run.engine.config.n_layers
        for layer in range(n):
            run.starve([(layer, run.picks()[layer][0])])
            run.step()
            trace.end_token()
        assert sum(run.stats().falls.values()) >= n
        check_trace(trace, ref, start)
        trace.close()


def test_layers_behind_a_fall_are_noise(checkpoint: Checkpoints) -> None:
    """Slot 0 holds not-a-number instead of zeros: what runs on it poisons all later layers, and none of that counts."""
    with starved_run(reference(checkpoint("micro"))) as run:
        arena, n = run.engine.arena, run.engine.config.n_layers
        run.backend.memory.bytes(arena.slot_ptr(0), arena.slot_nbytes)[:] = 0xFF
        for layer in range(n):
            for which in range(run.engine.config.top_k):
                absent = [(layer, run.picks()[layer][which])]
                run.starve(absent)
                step_and_compare_falls(run, absent)
        check_counters(run)


def test_only_the_picks_of_the_real_run_are_fetched(checkpoint: Checkpoints) -> None:
    """Picks of layers behind a fall are noise and reach neither the cache nor its counters."""
    with Run(reference(checkpoint("micro")), slots=20) as run:
        asked: list[tuple[int, tuple[int, ...]]] = []
        cache = run.engine.cache
        plan_fetch, hit = cache.plan_fetch, cache.hit

        def spy(layer: int, experts: list[int], *, count: bool) -> FetchPlan:
            asked.append((layer, tuple(sorted(experts))))
            return plan_fetch(layer, experts, count=count)

        def spy_hit(codes: list[int], *, count: bool) -> None:
            keys = [key for code in codes if (key := cache.key_of(code)) is not None]
            asked.append((keys[0][0], tuple(expert for _, expert in keys)))
            hit(codes, count=count)

        cache.plan_fetch = spy  # type: ignore[method-assign,assignment] # a spy
        cache.hit = spy_hit  # type: ignore[method-assign,assignment] # a spy
        for _ in range(60):
            picks = {(layer, tuple(sorted(experts))) for layer, experts in enumerate(run.picks())}
            asked.clear()
            run.step()
            assert set(asked) == picks
        assert sum(run.stats().falls.values()) > 20


def test_an_undisturbed_run_never_rewrites_the_table(checkpoint: Checkpoints) -> None:
    """The cure for a wrong table is for wrong tables: an ordinary miss updates the entries that changed, once."""
    with Run(reference(checkpoint("micro")), slots=20) as run:
        run.engine.table.rewrite_layer = None  # type: ignore[method-assign,assignment] # any call fails
        run.steps(60)
        assert run.stats().falls["miss"] > 20


# ---- faults in the device slot table


def another_slot(run: Run, layer: int, expert: int) -> int:
    """A slot that holds some other expert."""
    cache = run.engine.cache
    mine = cache.slot_of(layer, expert)
    return next(slot for slot in range(1, cache.n_slots + 1) if slot != mine and cache.key_of(slot) is not None)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("fault", ["wrong slot", "lost entry"])
@pytest.mark.parametrize("mode", ["step-graph", "eager"])
def test_a_wrong_table_entry_of_a_resident_expert(
    checkpoint: Checkpoints, mode: str, fault: str, schedule: str
) -> None:
    """At every layer and pick: counted as a stale table, cured, and never back."""
    ref = reference(checkpoint("micro"))
    with Run(ref, slots=None, mode=mode, schedule=schedule) as run:
        run.steps(3)
        n = run.engine.config.n_layers
        for layer in range(n):
            for which in range(run.engine.config.top_k):
                run.load()
                run.engine.table.update()
                expert = run.picks()[layer][which]
                slot = another_slot(run, layer, expert) if fault == "wrong slot" else ABSENT
                run.engine.table.apply([(layer, expert, slot)])
                before = run.stats().falls["stale_table"]
                run.step()
                assert run.stats().falls["stale_table"] - before == (mode == "step-graph")
                run.check_table()
        check_counters(run, undisturbed=False)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", ["step-graph", "eager"])
def test_a_lost_eviction(checkpoint: Checkpoints, mode: str, schedule: str) -> None:
    """The table still names a slot for an expert that was evicted: the device sees no miss, the host does."""
    ref = reference(checkpoint("micro"))
    with Run(ref, slots=16, mode=mode, schedule=schedule, evict_random_pct=0.0) as run:
        run.steps(3)
        for layer in range(run.engine.config.n_layers):
            for which in range(run.engine.config.top_k):
                pick = layer, run.picks()[layer][which]
                run.starve([pick])
                run.engine.table.update()
                run.engine.table.apply([(*pick, another_slot(run, *pick))])
                if mode == "eager":
                    run.step()
                else:
                    step_and_compare_falls(run, [pick], "no_flag")
                run.check_table()
        check_counters(run, undisturbed=False)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_faults_at_every_pair_of_layers(checkpoint: Checkpoints, schedule: str) -> None:
    """Two wrong entries in one token: the first of a segment falls, the other is found by the eager rerun."""
    with Run(reference(checkpoint("micro")), slots=None, schedule=schedule) as run:
        run.steps(3)
        for layers in combinations(range(run.engine.config.n_layers), 2):
            picks = run.picks()
            run.load()
            run.engine.table.update()
            lies = [(layer, picks[layer][1]) for layer in layers]
            run.engine.table.apply([(*pick, another_slot(run, *pick)) for pick in lies])
            step_and_compare_falls(run, lies, "stale_table")
            run.check_table()


@pytest.mark.parametrize("byte", [0x00, 0xFF])
def test_a_table_that_was_overwritten(checkpoint: Checkpoints, byte: int) -> None:
    """All entries zero (no slot either) or absent: every layer that is used is cured, others when they are used."""
    with Run(reference(checkpoint("micro")), slots=None) as run:
        run.steps(40)
        table = run.engine.table.table
        run.backend.memory.bytes(table.ptr, table.nbytes)[:] = byte
        run.steps(60)
        stats = check_counters(run, undisturbed=False)
        assert stats.falls["stale_table"] > 0
        assert stats.clean_replays > 40
