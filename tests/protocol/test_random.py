"""Random scenarios: anything that the language can say, in any order.

A failing example of the first test is shrunk, and what it prints is a scenario to be pasted into test_scenarios.py.
The others draw a scenario from each seed; `random_scenario(seed)` is the one that a failure names.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scenario import PRESET, Runner, Scenario

SEQUENCES = "abcd"
LAYERS, TOP_K, N_CALLS = 4, 3, 150
LONG_SEEDS, LONG_WORDS, SESSION = range(1000, 1140), 1000, 125
GPU_SEEDS, GPU_WORDS = range(200), 24

# Disturbances of a step, and what may happen between steps; {p} a pick, {n} a call, {i} a small number, {s} a sequence.
STEPS = (
    ("", 8),
    ("/miss=", 3),
    ("/miss={p}", 5),
    ("/miss={p}+{p}", 3),
    ("/miss=all", 1),
    ("/wrong={p}+{p}", 2),
    ("/lost={p}", 2),
    ("/miss={p}/wrong={p}", 2),
    ("/miss=/move={i}@{i}", 2),
    ("/move={i}@{i}", 2),
    ("/bake={i}", 1),
    ("/other={i}.end", 1),
    ("/other={i}.rows_b", 1),
    ("/fail={n}", 2),
    ("/miss={p}/stop={n}", 2),
    ("/miss={p}/late={n}", 2),
    ("/bake={i}/late={n}", 1),
    ("/read={i}", 2),
    ("/miss=all/reads={i}", 1),
)
ACTS = (
    (":reset", 3),
    (":close", 2),
    (":truncate=-1", 4),
    (":truncate={i}", 2),
    (":fork={s}", 3),
    (":fork={s}/fail={i}", 1),
    (":text={i}", 2),
)
ONCE = ("/bake={i}/record={n}", "reopen")  # the engine is eager after the first, and on again after the second


@pytest.fixture(scope="module")
def run(checkpoint: Callable[[str], Path], backend_name: str) -> Iterator[Runner]:
    runner = Runner(checkpoint(PRESET), backend_name)
    yield runner
    runner.close()


def word(rng: Random) -> str:
    """One word; failed recordings are rare, because they end all replays until the engine is opened again."""
    if rng.random() < 0.01:
        return " ".join((rng.choice(SEQUENCES) + fill(ONCE[0], rng), rng.choice(SEQUENCES) + "*2", ONCE[1]))
    table = STEPS if rng.random() < 0.8 else ACTS
    (pattern,) = rng.choices([p for p, _ in table], [weight for _, weight in table])
    return rng.choice(SEQUENCES) + fill(pattern, rng)


def fill(pattern: str, rng: Random) -> str:
    while "{" in pattern:
        pattern = pattern.replace("{p}", f"{rng.randrange(LAYERS)}.{rng.randrange(TOP_K)}", 1)
        pattern = pattern.replace("{n}", str(rng.randrange(N_CALLS)), 1)
        pattern = pattern.replace("{i}", str(rng.randrange(9)), 1)
        pattern = pattern.replace("{s}", rng.choice(SEQUENCES), 1)
    return pattern


def random_scenario(n: int, n_words: int) -> Scenario:
    rng = Random(n)
    return Scenario(
        " ".join(word(rng) for _ in range(n_words)),
        slots=rng.choice((5, 14, 16, 17, 20, 28, 40, 64)),
        schedule=rng.choice(("lazy", "eager", f"random:{n}", f"random:{n}")),
        mode="eager" if rng.random() < 0.1 else "step-graph",
        watch=rng.random() < 0.3,
    )


# ---- shrinkable: each word is built of strategies of its own


@st.composite
def words(draw: st.DrawFn) -> str:
    pattern = draw(st.sampled_from([p for p, _ in STEPS] + [p for p, _ in ACTS]))
    out = draw(st.sampled_from(SEQUENCES)) + pattern
    while "{" in out:
        out = out.replace("{p}", f"{draw(st.integers(0, LAYERS - 1))}.{draw(st.integers(0, TOP_K - 1))}", 1)
        out = out.replace("{n}", str(draw(st.integers(0, N_CALLS))), 1)
        out = out.replace("{i}", str(draw(st.integers(0, 8))), 1)
        out = out.replace("{s}", draw(st.sampled_from(SEQUENCES)), 1)
    return out


scenarios = st.builds(
    Scenario,
    words=st.lists(words(), min_size=1, max_size=25).map(lambda w: " ".join(["a*3", *w])),
    slots=st.sampled_from((16, 20, 40, 5, 64)),
    schedule=st.sampled_from(("lazy", "eager", "random:1", "random:2")),
    watch=st.booleans(),
)


@settings(max_examples=30, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(scenario=scenarios)
def test_shrinkable_scenarios(run: Runner, scenario: Scenario) -> None:
    run(scenario)


@pytest.mark.parametrize("n", range(6))
def test_random_scenarios(run: Runner, n: int) -> None:
    run(random_scenario(n, 40))


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, len(GPU_SEEDS), 20))
def test_two_hundred_scenarios(run: Runner, first: int) -> None:
    """The ones to be run on a device: `pytest -m long --backend cuda tests/protocol -k two_hundred`."""
    for n in GPU_SEEDS[first : first + 20]:
        run(random_scenario(n, GPU_WORDS))


@pytest.mark.long
@pytest.mark.parametrize("n", LONG_SEEDS)
def test_a_hundred_thousand_random_steps(run: Runner, n: int) -> None:
    """A thousand words a seed, 125 an engine; about three of four complete a step, and 140 seeds are enough."""
    steps = sum(run(random_scenario(1000 * n + i, SESSION)).steps for i in range(LONG_WORDS // SESSION))
    assert steps > LONG_WORDS // 2
