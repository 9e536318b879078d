"""`ds41rt trace diff CHECKPOINT`: two engines side by side, up to the first difference."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from ds41rt.cu.host import HostBackend
from ds41rt.cu.host.kernels import HostLaunch
from ds41rt.engine import Engine, Mode
from ds41rt.errors import Ds41Error
from ds41rt.tools.trace_diff import lockstep

PROMPT = [5, 9, 130, 7]


@pytest.fixture
def engines(checkpoint: Callable[[str], Path]) -> Iterator[tuple[Engine, Engine]]:
    """Eager with all experts, and a step graph whose cache is too small for a token's."""
    backends = [HostBackend(race_detection=False) for _ in range(2)]
    opened = [
        Engine.open(checkpoint("micro"), mode=cast(Mode, mode), backend=backend, expert_slots=slots, max_context=32)
        for mode, slots, backend in zip(("eager", "step-graph"), (64, 8), backends, strict=True)
    ]
    yield opened[0], opened[1]
    for engine in opened:
        engine.close()
    for backend in backends:
        assert not any(backend.live().values())
        backend.close()


def spoil(engine: Engine, launch: Any, position: int, name: str, change: Callable[[Any], None]) -> None:
    """From now on `change` gets what the launch wrote to the parameter `name`, at `position`."""
    assert isinstance(launch, HostLaunch)
    real, index = launch._reference, [p.name for p in launch.spec.params].index(name)

    def wrong(*args: Any) -> None:
        real(*args)
        if engine.bodies.bound[0] == position:
            change(args[index].reshape(-1))

    launch._reference = wrong


def flip(at: int) -> Callable[[Any], None]:
    def change(flat: Any) -> None:
        flat.view(np.uint16)[at] ^= 1

    return change


def fill(at: int, value: float) -> Callable[[Any], None]:
    return lambda flat: flat.__setitem__(at, value)


def test_equal_runs(engines: tuple[Engine, Engine]) -> None:
    outcome = lockstep(*engines, PROMPT, 6)
    assert (outcome.difference, outcome.n_positions) == (None, 9)
    assert outcome.as_dict()["equal"] is True
    assert outcome.as_dict()["difference"] is None
    assert engines[1].stats().tokens == 9
    assert sum(engines[1].stats().falls.values()) > 0
    assert engines[0].bodies.observers == engines[1].bodies.observers == ()


def test_the_run_stops_at_the_first_difference_and_shows_it(engines: tuple[Engine, Engine]) -> None:
    spoil(engines[1], engines[1].layers[2].attn_core[-1], 5, "y", flip(9))
    outcome = lockstep(*engines, PROMPT, 20)
    assert outcome.n_positions == 6
    assert engines[0].stats().tokens == 6
    said = outcome.as_dict()
    assert (said["equal"], said["positions"]) == (False, 6)
    assert (said["a"]["mode"], said["b"]["mode"]) == ("eager", "step-graph")
    found = said["difference"]
    assert {k: found[k] for k in ("position", "layer", "half", "part")} == {
        "position": 5, "layer": 2, "half": "attention", "part": "attn_out",
    }  # fmt: skip
    assert found["ran"] == {"a": "eagerly", "b": "eagerly"}  # behind a fall
    assert found["experts"]["a"] == engines[0].router.picks[2].picks  # type: ignore[union-attr]
    assert len(found["weights"]["b"]) == 3
    assert found["selected_rows"] == {"a": [0, 1, 2], "b": [0, 1, 2]}
    assert len(found["a"]) == 16
    assert found["a"] != found["b"]
    inside = found["values"]
    assert (inside["n_values"], inside["n_differ"], inside["first"]) == (64, 1, [9])
    assert [line["at"] for line in inside["around"]] == [[i] for i in range(6, 13)]
    a, b = (np.float32(inside["around"][3][side]) for side in "ab")
    assert abs(int(a.view(np.uint32) >> 16) - int(b.view(np.uint32) >> 16)) == 1
    assert inside["largest"] == abs(float(a) - float(b))


def test_a_choice_of_experts_is_shown_as_it_is(engines: tuple[Engine, Engine]) -> None:
    spoil(engines[0], engines[0].layers[3].router, 4, "logits", fill(11, 1e4))
    found = lockstep(*engines, PROMPT, 20).as_dict()["difference"]
    assert (found["position"], found["layer"], found["half"], found["part"]) == (4, 3, "ffn", "expert_ids")
    assert (found["a"], found["b"]) == (found["experts"]["a"], found["experts"]["b"])
    assert 11 in set(found["a"]) ^ set(found["b"])
    assert found["values"] is None


def test_a_run_that_fails_is_named(engines: tuple[Engine, Engine]) -> None:
    spoil(engines[1], engines[1].layers[0].router, 3, "logits", fill(0, np.nan))
    with pytest.raises(Ds41Error, match=r"run b failed at position 3, up to which both agree: layer 0, position 3"):
        lockstep(*engines, PROMPT, 20)
    assert engines[0].bodies.observers == engines[1].bodies.observers == ()
    assert not engines[0]._sequences
