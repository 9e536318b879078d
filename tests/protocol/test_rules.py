"""Rules that cost nothing but time or words when they are broken, so that no scenario's bits show it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scenario import PRESET, Runner, Scenario, World
from structlog.testing import capture_logs
from twin import Twin

from ds41rt.moe.header import Fall


@pytest.fixture(scope="module")
def twin(checkpoint: Callable[[str], Path], backend_name: str) -> Iterator[Twin]:
    made = Twin(checkpoint(PRESET), backend_name)
    yield made
    made.close()


@pytest.fixture
def world(checkpoint: Callable[[str], Path], backend_name: str, twin: Twin) -> Iterator[World]:
    """A world to step word by word, with all graphs captured."""
    made = World(Scenario("", slots=16), checkpoint(PRESET), backend_name, twin)
    made.do("a*3")
    yield made
    made.close()


def test_a_fetch_of_resident_experts_makes_no_call(world: World) -> None:
    """Not even a wait for staging memory that it does not need."""
    world.do("a/miss=")
    cache, fetcher = world.engine.cache, world.engine._fetcher
    layer, expert = next(key for slot in range(1, 17) if (key := cache.key_of(slot)) is not None)
    calls: list[str] = []

    def hook(name: str, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        calls.append(name)
        return call()

    world.probe.hook = hook
    cache.begin_epoch()
    assert fetcher.fetch(layer, [expert], world.engine.stream, count=False) == 0
    world.probe.hook = None
    assert calls == []


def test_a_fall_says_how_many_experts_were_fetched(world: World) -> None:
    falls: list[Fall | None] = []
    router = world.engine.router
    read_headers = router.read_headers

    def spy(*args: Any) -> Fall | None:
        falls.append(read_headers(*args))
        return falls[-1]

    router.read_headers = spy  # type: ignore[method-assign,assignment] # a spy
    for word in ("a/miss=0.0+0.2", "a/miss=/wrong=2.1", "a/miss=3.1/wrong=3.1"):
        world.do(word)
    assert [fall for fall in falls if fall is not None] == [
        Fall(0, "miss", 2),
        Fall(2, "stale_table", 0),
        Fall(3, "no_flag", 1),
    ]


def test_a_handle_whose_destruction_was_interrupted_hides_no_other(world: World) -> None:
    """It is gone already, which is no failure: no warning, and the ones behind it are destroyed in the same go."""
    destroyed = 0

    def hook(name: str, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        nonlocal destroyed
        call()
        destroyed += name == "destroy_exec"
        if name == "destroy_exec" and destroyed == 1:
            raise KeyboardInterrupt

    machine = world.engine.machine
    world.probe.hook = hook
    with capture_logs() as logs:
        with pytest.raises(KeyboardInterrupt):
            machine.drop_graphs(world.owners, "test")
        assert destroyed == 1
        world.probe.hook = None
        machine.destroy_doomed()
    assert logs == [entry for entry in logs if entry["log_level"] != "warning"]
    assert machine.seg.doomed == []
    assert world.backend.live()["graph_execs"] == 0


def test_a_failing_scenario_prints_what_can_be_pasted(checkpoint: Callable[[str], Path], backend_name: str) -> None:
    """The scenario up to the word that failed, as an expression of the language."""
    runner = Runner(checkpoint(PRESET), backend_name)
    scenario = Scenario("a*3 b a/miss=1.0/falls=2 a a", slots=16)
    with pytest.raises(AssertionError, match=r"at .a/miss=1\.0/falls=2. of") as info:
        runner(scenario)
    shown = str(info.value).splitlines()[1].strip()
    assert eval(shown) == Scenario("a*3 b a/miss=1.0/falls=2", slots=16)
    runner.close()
