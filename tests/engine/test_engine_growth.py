"""Thousands of tokens: nothing grows, neither on the simulated device nor in the process."""

import gc
import tracemalloc

import pytest
from engine_harness import Checkpoints, Run, check_counters, reference

LAP = 100


def lap(run: Run) -> tuple[dict[str, int], int, int]:
    """The same text once more; what exists on the backend and is allocated by name."""
    run.steps(LAP)
    run.seq.reset()
    gc.collect()
    stats = run.stats()
    return run.live(), stats.device_nbytes, stats.pinned_nbytes


def check(run: Run) -> None:
    stats = check_counters(run, undisturbed=False)
    graphs = len(run.engine.machine.owners) * run.engine.machine.step_graph
    assert (stats.recaptures, stats.captures) == (0, graphs)


@pytest.mark.parametrize("mode", ["step-graph", "eager"])
def test_objects_stay_as_many_as_they_are(checkpoint: Checkpoints, mode: str) -> None:
    with Run(reference(checkpoint("micro")), mode=mode, slots=20) as run:
        before = lap(run)  # fills caches: views of every position's rows
        objects = len(gc.get_objects())
        assert lap(run) == before
        # a retained object a token would be a hundred; the cache's logs vary by a few
        assert len(gc.get_objects()) - objects < LAP // 4
        check(run)


@pytest.mark.long
@pytest.mark.parametrize(("mode", "schedule"), [("step-graph", "lazy"), ("step-graph", "random:1"), ("eager", "lazy")])
def test_two_thousand_tokens(checkpoint: Checkpoints, mode: str, schedule: str) -> None:
    """Constant bytes on the device, and bytes of the process that the last laps do not change."""
    with Run(reference(checkpoint("micro")), mode=mode, slots=20, schedule=schedule) as run:
        before = lap(run)
        for _ in range(15):
            assert lap(run) == before
        tracemalloc.start()
        try:
            traced = []
            for _ in range(4):
                assert lap(run) == before
                traced.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert run.stats().tokens == 2000
        assert traced[-1] - traced[0] < 3 * 16 * LAP, traced  # less than an object a token
        check(run)
