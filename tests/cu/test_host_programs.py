"""Random programs: race-free ones give equal bits under every schedule; of the others every racing pair is reported."""

from random import Random

import pytest
from race_programs import Oracle, Program, Runner, programs

from ds41rt.cu.host import race

SCHEDULES = ("lazy", "eager", "random:1", "random:2", "random:3", "random:4")
N, N_LONG = 120, 12_000


@pytest.fixture(autouse=True, params=[1, 64])
def prune_every(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs are too short for the history to be pruned as rarely as it is."""
    monkeypatch.setattr(race, "_PRUNE_EVERY", request.param)


def _check_race_free(seed: int, n: int) -> None:
    for program in programs(seed, n, race_free=True):
        assert not Oracle(program).pairs
        results = {schedule: Runner(schedule).run(program) for schedule in SCHEDULES}
        bits, _ = results["lazy"]
        for schedule, (got, races) in results.items():
            assert not races, (schedule, program)
            assert got == bits, (schedule, program)


def _check_reports(seed: int, n: int) -> int:
    n_racy = 0
    for program in programs(seed, n, race_free=False):
        want = Oracle(program).pairs
        n_racy += bool(want)
        for schedule in SCHEDULES:
            got = Runner(schedule).run(program)[1]
            assert got == want, (schedule, program, "missed", want - got, "invented", got - want)
    return n_racy


def test_race_free_programs_give_equal_bits_under_every_schedule() -> None:
    _check_race_free(0, N)


def test_exactly_the_racing_pairs_are_reported() -> None:
    assert N // 2 < _check_reports(0, N) < N


@pytest.mark.long
def test_many_race_free_programs() -> None:
    _check_race_free(1, N_LONG)


@pytest.mark.long
def test_many_racing_programs() -> None:
    _check_reports(1, N_LONG)


def test_the_race_free_programs_are_not_trivial() -> None:
    """Many are concurrent: without one of their waits they would race."""
    n_concurrent = n_graphs = 0
    for program in programs(0, N, race_free=True):
        kinds = [action[0] for action in program.actions]
        n_graphs += "launch" in kinds
        for i, kind in enumerate(kinds):
            rest = Program([*program.actions[:i], *program.actions[i + 1 :]])
            if kind in ("wait", "sync", "sync_event") and Oracle(rest).pairs:
                n_concurrent += 1
                break
    assert n_concurrent > N // 3
    assert n_graphs > N // 3


def test_without_detection_programs_leave_the_same_bits() -> None:
    for program in programs(2, 20, race_free=True):
        schedule = f"random:{Random(5).randrange(1000)}"
        assert Runner(schedule).run(program)[0] == Runner(schedule, race_detection=False).run(program)[0]
