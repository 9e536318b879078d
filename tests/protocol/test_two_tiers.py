"""The protocol with a host tier: hits there are no falls, moves change nothing, and every token is the twin's.

The language is that of `scenario`; a slot count and a host count make the two tiers.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from scenario import PRESET, Runner, Scenario
from test_random import word

LAYERS, TOP_K = 4, 3
ALL = 64


@pytest.fixture(scope="module")
def run(checkpoint: Callable[[str], Path], backend_name: str) -> Iterator[Runner]:
    runner = Runner(checkpoint(PRESET), backend_name)
    yield runner
    runner.close()


@pytest.mark.parametrize("schedule", ["lazy", "random:1"])
@pytest.mark.parametrize("slots", [0, 20])
def test_hits_in_the_host_tier_are_no_falls(run: Runner, slots: int, schedule: str) -> None:
    """Everything is somewhere. Any picks in the host tier, also all of them: every segment is clean."""
    words = ["a*3"]
    for layer in range(LAYERS):
        words += [f"a/host={layer}.0/clean", f"a/host={layer}.0+{layer}.1+{layer}.2/clean"]
    words += ["a/host=all/clean", "a/host=0.0+1.1+2.2+3.0/clean", "a*20/host=all/clean"]
    world = run(Scenario(" ".join(words), slots=slots, host=ALL - slots, schedule=schedule, watch=True))
    assert world.last is not None
    assert world.last.host_hits > 0
    assert world.falls["stale_table"] == world.falls["no_flag"] == 0
    assert (world.last.promotions > 0) == (slots > 0)


def test_a_miss_beside_hits_in_the_host_tier(run: Runner) -> None:
    words = ["a*3"]
    for layer in range(LAYERS):
        for which in range(TOP_K):
            others = "+".join(f"{layer}.{i}" for i in range(TOP_K) if i != which)
            words.append(f"a/miss={layer}.{which}/host={others}/falls={layer}")
    run(Scenario(" ".join(words), slots=16, host=24, watch=True))


@pytest.mark.parametrize("schedule", ["lazy", "random:2"])
def test_a_table_that_lies_about_the_host_tier(run: Runner, schedule: str) -> None:
    words = ["a*3"]
    for layer in range(LAYERS):
        pick = f"{layer}.1"
        words += [
            f"a/host={pick}/wrong={pick}/falls={layer}/stale_table=1",
            f"a/host={pick}/lost={pick}/falls={layer}/stale_table=1",
            f"a/miss={pick}/wrong={pick}/falls={layer}/no_flag=1",
            f"a/host={pick}/clean",
        ]
    run(Scenario(" ".join(words), slots=16, host=24, schedule=schedule, watch=True))


SIZES = [(0, 3), (1, 2), (3, 1), (0, 20), (4, 4), (6, 20), (14, 6), (30, 34), (3, 61)]


@pytest.mark.parametrize(("slots", "host"), SIZES)
def test_any_sizes_of_the_tiers(run: Runner, slots: int, host: int) -> None:
    """From the least that is legal to all; two sequences alternate while experts move."""
    words = "a*6 b*6 " + "a b " * 10
    world = run(Scenario(words, slots=slots, host=host))
    assert world.last is not None
    if slots >= 6 and host >= 20:
        assert world.last.promotions > 0


@pytest.mark.parametrize("threads", [0, 4])
@pytest.mark.parametrize(("slots", "host"), [(0, 12), (6, 0), (6, 14)])
def test_reading_ahead_changes_nothing(run: Runner, slots: int, host: int, threads: int) -> None:
    """In eager mode, and in the reruns of falls."""
    for mode in ("eager", "step-graph"):
        world = run(Scenario("a*8 b*4 a*4", slots=slots, host=host, prefetch=True, threads=threads, mode=mode))
        assert world.last is not None
        assert world.last.prefetch_issued > 0


def test_calls_fail_inside_of_moves(run: Runner) -> None:
    """Any call of a token with moves in flight, also of the moves themselves: the token fails or it does not, and the
    next one is right."""
    words = ["a*6", "b*2"]
    for n in range(0, 40, 2):
        words += [f"a/host=all/fail={n}", "b/host=1.0+3.2", f"a/{('stop', 'late')[n // 2 % 2]}={n}", "a"]
    world = run(Scenario(" ".join(words), slots=14, host=24))
    assert world.last is not None
    assert world.last.promotions > 0


def random_tiers(n: int, n_words: int) -> Scenario:
    """Any words, with picks put into the host tier now and then."""
    rng = Random(n)

    def one() -> str:
        text = word(rng)
        if ":" not in text and "reopen" not in text and "miss" not in text and rng.random() < 0.4:
            picks = "+".join(f"{rng.randrange(LAYERS)}.{rng.randrange(TOP_K)}" for _ in range(rng.randrange(1, 5)))
            text = f"{text.split(' ')[0]}/host={rng.choice((picks, 'all'))} {' '.join(text.split(' ')[1:])}".strip()
        return text

    slots = rng.choice((0, 3, 5, 14, 20, 40))
    return Scenario(
        " ".join(one() for _ in range(n_words)),
        slots=slots,
        host=rng.choice((3, 8, 20, 60)),
        prefetch=rng.random() < 0.3,
        threads=rng.choice((0, 0, 2)),
        schedule=rng.choice(("lazy", "eager", f"random:{n}", f"random:{n}")),
        mode="eager" if rng.random() < 0.2 else "step-graph",
        watch=rng.random() < 0.2,
    )


@pytest.mark.parametrize("n", range(8))
def test_random_scenarios(run: Runner, n: int) -> None:
    run(random_tiers(n, 40))


@pytest.mark.long
@pytest.mark.parametrize("n", range(100, 150))
def test_many_random_scenarios(run: Runner, n: int) -> None:
    for i in range(8):
        run(random_tiers(1000 * n + i, 125))
