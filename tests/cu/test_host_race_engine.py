"""Race detection on the engine's own decode: silent as it is, loud when a wait of its protocol is left out."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from ds41rt.cu.backend import Event, Stream
from ds41rt.cu.host import HostBackend
from ds41rt.cu.host.race_report import RaceError
from ds41rt.engine import Engine, Mode
from ds41rt.errors import Ds41Error

Checkpoints = Callable[[str], Path]
TOKENS = [0, 17, 42, 99, 256, 301, 7, 8, 100, 3]


@pytest.mark.parametrize("mode", ["eager", "step-graph"])
@pytest.mark.parametrize("schedule", ["lazy", "eager", "random:1", "random:2"])
def test_no_false_alarm(checkpoint: Checkpoints, mode: Mode, schedule: str) -> None:
    backend = HostBackend(schedule, race_detection=True)
    # few slots: fetches, falls and slot table updates between the replays
    with Engine.open(checkpoint("tiny"), mode=mode, backend=backend, expert_slots=16) as engine:
        seq = engine.new_sequence()
        for token in TOKENS:
            engine.decode_step(seq, token)
        assert engine.stats().misses > 5
        assert not backend.races
    assert not backend.races
    backend.close()


class _Leaky(HostBackend):
    """Once `armed`, the host goes on without waiting, as if the engine had forgotten to."""

    armed = False

    def synchronize(self, stream: Stream) -> None:
        if not self.armed:
            super().synchronize(stream)

    def synchronize_event(self, event: Event) -> None:
        if not self.armed:
            super().synchronize_event(event)


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random:1"])
@pytest.mark.parametrize("mode", ["eager", "step-graph"])
def test_forgotten_waits_are_found(checkpoint: Checkpoints, mode: Mode, schedule: str) -> None:
    backend = _Leaky(schedule, race_detection=True)
    with Engine.open(checkpoint("tiny"), mode=mode, backend=backend, expert_slots=16) as engine:
        seq = engine.new_sequence()
        engine.decode_step(seq, TOKENS[0])
        backend.armed = True
        with suppress(Ds41Error):  # what came of headers that had not arrived
            engine.decode_step(seq, TOKENS[1])
        backend.armed = False
        with pytest.raises(RaceError):
            backend.synchronize(engine.stream)
        with suppress(RaceError):  # bytes that were rewritten behind the backend's back show after the wait
            backend.synchronize(engine.stream)
        early = [race for race in backend.races if race.second.label == "read" and race.second.buffer == "route image"]
        assert early
        assert all("header" in race.first.label or "logits" in race.first.label for race in early)
        assert all("/moe/" in race.second.site for race in early)
        if (mode, schedule) == ("eager", "eager"):  # the values were right, so the decode went on and reused staging
            assert {"pinned experts", "slot table staging 0"} <= {race.first.buffer for race in backend.races}
