"""`DS41RT_TRACE`: hashes of the parts of a step, the same ones wherever two modes both have them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from structlog.testing import capture_logs

from ds41rt.cu.backend import Graph, GraphExec, Stream
from ds41rt.cu.host import HostBackend
from ds41rt.engine import Engine, Mode
from ds41rt.step.hash_log import HashLog

TOKENS = [5, 9, 130, 7, 7, 200, 33, 9, 5, 12]


def hashes(path: Path, mode: Mode, slots: int) -> dict[tuple[int, int, str], str]:
    with capture_logs() as logs, Engine.open(path, mode=mode, expert_slots=slots, trace=True) as engine:
        seq = engine.new_sequence()
        for token in TOKENS:
            engine.decode_step(seq, token)
        clean = engine.stats().clean_replays
    events: list[Any] = [e for e in logs if e["event"] == "trace" and "pos" in e]
    assert (clean > 0) == any(e["part"] == "segment_streams" for e in events)
    return {(e["pos"], e["layer"], e["part"]): e["hash"] for e in events}


@pytest.mark.parametrize("slots", [5, 64])
def test_modes_agree_on_every_common_part(checkpoint: Callable[[str], Path], slots: int) -> None:
    eager = hashes(checkpoint("micro"), "eager", slots)
    graph = hashes(checkpoint("micro"), "step-graph", slots)
    everywhere = {"streams_in", "mix_in", "streams", "attn_out", "mixes"}
    assert {part for _, _, part in eager} == {*everywhere, "normed", "moe_in", "streams_out"}
    places = {(pos, layer, part) for pos in range(len(TOKENS)) for layer in range(4) for part in everywhere}
    common = eager.keys() & graph.keys()
    assert common >= places
    assert [k for k in common if eager[k] != graph[k]] == []
    assert len({eager[k] for k in common}) > len(common) // 2


@pytest.mark.parametrize("slots", [5, 64])
def test_every_mode_shows_a_half_once(checkpoint: Callable[[str], Path], slots: int) -> None:
    """Whatever fell: what enters a layer and what its attention half leaves, in this order, before the next layer."""
    seen: list[tuple[int, int, str]] = []

    class Observer:
        def selection(self, layer: int, rows: NDArray[np.int32]) -> None: ...

        def point(self, position: int, layer: int, part: str, addr: int, nbytes: int, stream: Stream) -> None:
            if part in ("streams_in", "mix_in", "streams", "attn_out", "mixes"):
                seen.append((position, layer, part))

    with Engine.open(checkpoint("micro"), mode="step-graph", expert_slots=slots) as engine:
        engine.observe(Observer())
        seq = engine.new_sequence()
        for token in TOKENS:
            engine.decode_step(seq, token)
        assert engine.stats().clean_replays + sum(engine.stats().falls.values()) > 0
    parts = ("streams_in", "mix_in", "streams", "attn_out", "mixes")
    assert seen == [(pos, layer, part) for pos in range(len(TOKENS)) for layer in range(4) for part in parts]


def test_observers_cost_nothing_when_they_are_gone(checkpoint: Callable[[str], Path]) -> None:
    """The copies for observers are in the graphs while somebody observes, and not before or after."""
    backend = HostBackend()
    copies: list[int] = []
    with Engine.open(checkpoint("micro"), mode="step-graph", backend=backend) as engine:
        seq = engine.new_sequence()
        instantiate = backend.instantiate

        def count(graph: Graph) -> GraphExec:
            copies.append(sum(".entry." in (node.label or "") for node in backend.describe_graph(graph).nodes))
            return instantiate(graph)

        backend.instantiate = count  # type: ignore[method-assign]
        log = HashLog(backend, engine.buffers)
        for observed in (False, True, False):
            if observed:
                engine.observe(log)
            copies.clear()
            for token in TOKENS[:3]:
                engine.decode_step(seq, token)
            # streams and mix of two layers: a graph ends with the attention input of its successor
            assert copies == ([4, 4, 0] if observed else [0, 0, 0]), copies
            engine.stop_observing(log)
        log.close()
        assert engine.stats().recaptures == 6
    backend.close()
