"""Scenarios of the protocol that are few enough to be run one by one; see `scenario` for the language.

What is proved elsewhere is not repeated here: every subset of layers missing, noise behind a fall, lies and gaps at
every pair of layers (tests/engine/test_engine_falls.py); every call of an eager, capture and replay token and of a fall
failing, interrupted before and after, and of a recording failing (test_engine_failures.py); every wait removed
(test_engine_waits.py); every buffer moving before every layer (test_engine_sequences.py).
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from pathlib import Path

import pytest
from scenario import PRESET, Runner, Scenario, World

LAYERS, TOP_K = 4, 3
SCHEDULES = ("lazy", "random:1")


@pytest.fixture(scope="module")
def run(checkpoint: Callable[[str], Path], backend_name: str) -> Iterator[Runner]:
    runner = Runner(checkpoint(PRESET), backend_name)
    yield runner
    runner.close()


def run_all(run: Runner, words: list[str], **settings: object) -> World:
    return run(Scenario(" ".join(words), **settings))  # type: ignore[arg-type] # fields of a scenario


def test_a_run_without_disturbance(run: Runner) -> None:
    world = run(Scenario("a/captures=0 a/captures=3 a*40/miss=/clean", watch=True))
    assert world.last is not None
    assert (world.last.captures, world.last.recaptures, world.last.replays) == (3, 0, 3 * 40)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_miss_at_every_layer_and_every_pair(run: Runner, schedule: str) -> None:
    """Segments are 0, 1..2 and 3: of two layers in one segment the first falls, and the other is not looked at."""
    words = ["a*3"]
    for layers in [*((i,) for i in range(LAYERS)), *combinations(range(LAYERS), 2)]:
        fall = "+".join(str(i) for i in layers if not (i == 2 and 1 in layers))
        for which in range(TOP_K):
            missing = "+".join(f"{i}.{which}" for i in layers)
            words.append(f"a/miss={missing}/falls={fall}")
    run_all(run, words, slots=16, schedule=schedule, watch=True)


def run_with(run: Runner, slot_counts: Iterable[int], n_tokens: int) -> list[int]:
    return [run(Scenario(f"a*{n_tokens}", slots=slots)).falls["miss"] for slots in slot_counts]


def test_slot_counts_from_top_k_to_all(run: Runner) -> None:
    """Nothing depends on what happens to be resident."""
    fell = run_with(run, [TOP_K, *range(TOP_K + 1, 64, 6), 64], 8)
    assert fell[0] == 6 * 3  # one layer fits, and every replay falls
    assert fell[-1] < fell[0]


@pytest.mark.long
def test_every_slot_count(run: Runner) -> None:
    run_with(run, range(TOP_K, 64 + 1), 40)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_sequences_alternate(run: Runner, schedule: str) -> None:
    """Each is its solo run, and no graph is captured again."""
    world = run_all(run, ["a", "b", "c", "d"] * 30, slots=30, schedule=schedule)
    assert world.last is not None
    assert (world.last.captures, world.last.recaptures) == (3, 0)


@pytest.mark.long
def test_four_sequences_alternate_for_a_thousand_tokens(run: Runner) -> None:
    """Full sequences start over."""
    world = run_all(run, ["a", "b", "c", "d"] * 250, slots=40)
    assert world.last is not None
    assert (world.last.tokens, world.last.captures, world.last.recaptures) == (1000, 3, 0)


@pytest.mark.parametrize("what", ["end", "classes", "rows_b"])
def test_each_graph_was_captured_for_something_else(run: Runner, what: str) -> None:
    """That one is dropped and recorded again, the others are replayed."""
    words = ["a*6"]
    for owner in range(3):
        words += ["a/miss=/clean", f"a/miss=/other={owner}.{what}/captures=1", "a/miss=/clean"]
    run_all(run, words, slots=30, watch=True)


def test_each_baked_address_changes(run: Runner) -> None:
    """All graphs are dropped and recorded again, whether the token then misses or not."""
    words = ["a*6"]
    for i in range(8):
        words += [
            f"a/miss=/bake={i}/captures=3",
            "a/miss=/clean",
            f"a/miss=2.1/bake={i}/captures=3",
            "a/miss=1.0/falls=1",
        ]
    run_all(run, words, slots=16)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_table_that_lies_or_lost_an_entry_at_every_layer(run: Runner, schedule: str) -> None:
    """With the expert resident (a stale table) and absent (no flag): it falls, is cured, and does not fall again."""
    words = ["a*3"]
    for layer in range(LAYERS):
        for which in range(TOP_K):
            pick = f"{layer}.{which}"
            words += [
                f"a/miss=/wrong={pick}/falls={layer}/stale_table=1",
                f"a/miss=/lost={pick}/falls={layer}/stale_table=1",
                f"a/miss={pick}/wrong={pick}/falls={layer}/no_flag=1",
                "a/miss=/clean",
            ]
    run_all(run, words, slots=16, schedule=schedule, watch=True)


@pytest.mark.parametrize("kind", ["read", "reads"])
@pytest.mark.parametrize("mode", ["step-graph", "eager"])
def test_a_read_fails_at_each_fetch(run: Runner, mode: str, kind: str) -> None:
    """Engram rows (two reads), then every expert of a token of which all are absent; then the token again."""
    words = ["a*3"]
    for n in range(2 + LAYERS * TOP_K):
        words += [f"a/miss=all/{kind}={n}", "a"]
    world = run_all(run, words, slots=16, mode=mode)
    assert world.last is not None
    assert world.last.tokens == 3 + 14


def test_a_recording_fails_at_each_of_its_calls(run: Runner) -> None:
    """The token is right and the mode is off: no replay, no capture, no graph from there on."""
    words = []
    for n in range(0, 85, 6):
        words += [f"a*2/record={n}", "a/captures=0/falls=", "b/captures=0", "reopen"]
    run_all(run, words, slots=20)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_calls_fail_while_other_sequences_go_on(run: Runner, schedule: str) -> None:
    """A failed token of one sequence leaves the others alone, and may be repeated, forked, truncated or given up."""
    after = ["a", "b a", "a:fork=c c a", "a:truncate=-1 a", "a:reset a*2", "a:close a", "b:fork=a a b", "a:text=3 a"]
    words = ["a*5", "b*2"]
    for n in range(0, 96, 2):
        kind = ("fail", "stop", "late")[n // 2 % 3]
        words += [f"a/miss=1.0/{kind}={n}", *after[n // 2 % len(after)].split()]
    run_all(run, words, slots=16, schedule=schedule)


def test_a_step_abandoned_between_a_fall_and_the_rerun(run: Runner) -> None:
    """The call that fails may be the upload behind a buffer's move; what was marked for the rerun is forgotten then."""
    words = ["a*3"]
    for n in range(20, 70):
        words += [f"a/miss=2.0/move=4@2/fail={n}", "a/miss=1.0/falls=1"]
        words += ["a:reset a*3"] if n % 12 == 0 else []
    run_all(run, words, slots=16, watch=True)


# ---- fork and truncate


def test_a_fork_goes_on_by_itself(run: Runner) -> None:
    """Forks at every position of a text, while the rings fill and after; original and fork take different texts."""
    words = []
    for _ in range(12):
        words += ["a:fork=b", "b:text=2", "b*2", "a/miss=", "b:truncate=-1", "b", "b:fork=c", "b:close", "c*2", "a"]
    world = run_all(run, words, slots=30)
    assert world.last is not None
    assert world.last.recaptures == 0


def test_a_fork_that_fails_leaves_nothing(run: Runner) -> None:
    """At each of its calls; both sequences go on."""
    words = ["a*5"]
    for n in range(13):
        words += [f"a:fork=b/fail={n}", "a/miss=", f"a:fork=b/stop={n}", "a"]
    run_all(run, words, slots=30)


def test_every_truncation_from_every_position(run: Runner) -> None:
    """Allowed exactly where all that the next step reads is still there, by a model that tracks who wrote what.

    Where it is allowed another text continues; the window of this model is 4 tokens, and its source pools pairs.
    """
    words = []
    for length in range(1, 9):
        words.append("a")
        for position in range(length + 2):
            words += ["a:fork=b", f"b:truncate={position}", "b:text=3", "b", "b:truncate=-1", "b*2"]
    run_all(run, words, slots=40)


def test_truncation_after_a_failed_step(run: Runner) -> None:
    """The step that failed may have replaced ring rows and the pool: it counts as one that was begun."""
    words = []
    for _ in range(1, 9):
        words.append("a")
        for back in range(4):
            words += ["a:fork=b", "b/stop=50", f"b:truncate=-{back}", "b*2"]
    run_all(run, words, slots=40)


def test_sequences_in_any_interleaving(run: Runner) -> None:
    """Reset, close, fork and truncate between tokens of four sequences that share an engine with falls."""
    acts = ["a:reset", "b:fork=a", "c:truncate=-1", "d:close", "a:truncate=2", "c:fork=d", "b:reset", "a:fork=c"]
    words = []
    for i in range(64):
        words += ["abcd"[i % 4], acts[i // 8], "abcd"[(i // 2) % 4], acts[i % 8], "abcd"[(i * 7) % 4] + "/miss=2.0"]
    run_all(run, words, slots=17)
