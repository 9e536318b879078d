"""`DS41RT_TRACE`: hashes of the parts of a step, the same ones wherever two modes both have them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from ds41rt.engine import Engine, Mode

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
    assert {part for _, _, part in eager} == {"streams_in", "normed", "attn_out", "streams", "moe_in", "streams_out"}
    assert {(pos, layer) for pos, layer, part in graph if part == "streams"} == {
        (pos, layer) for pos in range(len(TOKENS)) for layer in range(4)
    }
    common = eager.keys() & graph.keys()
    assert len(common) >= 4 * len(TOKENS)
    assert [k for k in common if eager[k] != graph[k]] == []
    assert len({eager[k] for k in common}) > len(common) // 2
