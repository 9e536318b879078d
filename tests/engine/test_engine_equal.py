"""Eager step and step graph give the same bits: every slot count, every schedule, and counters that add up."""

from pathlib import Path

import pytest
from engine_harness import Checkpoints, Run, check_counters, reference

from ds41rt.engine import Engine, Mode

N_MICRO = 4 * 16
# Below this a micro token's working set of 12 experts evicts itself, and hardly a replay is clean.
ROOMY = 20


def run_micro(checkpoint: Checkpoints, slots: int, schedule: str, n_tokens: int = 200) -> int:
    with Run(reference(checkpoint("micro")), slots=slots, schedule=schedule) as run:
        run.steps(n_tokens)
        stats = check_counters(run)
        run.check_table()
        assert stats.expert_nbytes_read == stats.misses * run.engine.arena.layout.nbytes
        assert sum(stats.falls.values()) > 0
        assert stats.clean_replays > 0 or slots < ROOMY
        return stats.clean_replays


@pytest.mark.parametrize("slots", [4, 7, 20, 63, N_MICRO])
def test_micro_from_top_k_plus_one_slot_to_all(checkpoint: Checkpoints, slots: int) -> None:
    run_micro(checkpoint, slots, "lazy")


@pytest.mark.parametrize(
    ("schedule", "slots"),
    [("eager", 30), *((f"random:{seed}", 20 + 2 * seed) for seed in range(20))],
)
def test_micro_under_schedules(checkpoint: Checkpoints, schedule: str, slots: int) -> None:
    run_micro(checkpoint, slots, schedule)


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["lazy", "eager", "random:100"])
def test_micro_with_every_slot_count(checkpoint: Checkpoints, schedule: str) -> None:
    assert sum(run_micro(checkpoint, slots, schedule) for slots in range(4, N_MICRO + 1)) > 0


def test_as_many_slots_as_one_layer_picks(checkpoint: Checkpoints) -> None:
    """The smallest legal cache: each layer's picks push the ones of the layer before out."""
    with Run(reference(checkpoint("micro")), slots=3) as run:
        run.steps(40)
        stats = check_counters(run)
        assert stats.device_hits == 0
        assert stats.clean_replays == 0


@pytest.mark.parametrize("slots", [4, 20, N_MICRO])
def test_eager_does_not_depend_on_the_slots(checkpoint: Checkpoints, slots: int) -> None:
    with Run(reference(checkpoint("micro")), mode="eager", slots=slots) as run:
        run.steps(100)
        assert run.stats().replays == run.stats().captures == 0
        check_counters(run, undisturbed=False)


def test_without_engram_rows(checkpoint: Checkpoints) -> None:
    """The modes agree, on other logits than with the rows."""

    def logits(mode: Mode, no_engram: bool) -> list[bytes]:
        engine = Engine.open(checkpoint("micro"), mode=mode, backend="host", expert_slots=40, no_engram=no_engram)
        with engine, engine.new_sequence() as seq:
            out = [engine.decode_step(seq, token).tobytes() for token in range(30)]
            assert (engine.stats().clean_replays > 0) == (mode == "step-graph")
        return out

    eager = logits("eager", no_engram=True)
    assert logits("step-graph", no_engram=True) == eager
    assert logits("eager", no_engram=False) != eager


def run_larger(path: Path, slots: int, schedule: str, n_tokens: int) -> None:
    with Run(reference(path, 200), slots=slots, schedule=schedule) as run:
        run.steps(n_tokens)
        stats = check_counters(run)
        assert sum(stats.falls.values()) > 0
        assert stats.clean_replays > 0 or slots < 500


def test_golden_checkpoint(golden: Path) -> None:
    run_larger(golden / "checkpoint", 1500, "lazy", 200)


@pytest.mark.long
@pytest.mark.parametrize(
    ("slots", "schedule"),
    [
        *((slots, "lazy") for slots in (7, 100, 600, 2200, 3071, 3072)),
        (1500, "eager"),
        *((700 + 100 * seed, f"random:{seed}") for seed in range(20)),
    ],
)
@pytest.mark.parametrize("preset", ["tiny", "golden"])
def test_tiny(checkpoint: Checkpoints, golden: Path, preset: str, slots: int, schedule: str) -> None:
    run_larger(golden / "checkpoint" if preset == "golden" else checkpoint(preset), slots, schedule, 200)


def test_small_for_some_tokens(checkpoint: Checkpoints) -> None:
    with Run(reference(checkpoint("small"), 16), slots=600, schedule="random:2") as run:
        run.steps(16)
        stats = check_counters(run)
        assert stats.clean_replays > 0
        assert sum(stats.falls.values()) > 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("slots", "schedule"),
    [
        *((slots, "lazy") for slots in (7, 200, 900, 1536)),
        (700, "eager"),
        *((500 + 50 * seed, f"random:{seed}") for seed in range(20)),
    ],
)
def test_small(checkpoint: Checkpoints, slots: int, schedule: str) -> None:
    run_larger(checkpoint("small"), slots, schedule, 200)
