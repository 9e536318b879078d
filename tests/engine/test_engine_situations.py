"""Situations inside a capture that have broken systems like this one, with the real backend rules instead of planted
errors: a foreign event, an allocation, a stream left open, an exception, a garbage collection before the replay.
"""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_harness import Call, Checkpoints, Run, reference
from structlog.testing import capture_logs

from ds41rt.cu.backend import CaptureStatus
from ds41rt.step.state import Recording

Act = Callable[[Run, Recording], object]


class InCapture:
    """A hook that does something once: before the n-th captured kernel, or before the end of a capture."""

    def __init__(self, run: Run, act: Act, before: str = "launch", n: int = 20) -> None:
        self.run = run
        self.act = act
        self.before = before
        self.left = n
        self.done = False

    def __call__(self, name: str, args: tuple[Any, ...], call: Call) -> Any:
        recording = self.run.engine.machine.seg.recording
        if not self.done and recording is not None and name == self.before and recording.cap_stream == args[-1]:
            self.left -= 1
            if self.left <= 0:
                self.done = True
                self.act(self.run, recording)
        return call()


def step_with(run: Run, hook: InCapture) -> list[Any]:
    """One token, compared with the reference; the warnings it logged."""
    with capture_logs() as logs, run.hooked(hook):
        run.step()
    assert hook.done
    assert run.live()["captures"] == 0
    return [entry for entry in logs if entry["log_level"] == "warning"]


def wait_for_loader(run: Run, recording: Recording) -> None:
    """Work of a loader stream, its event, and captured work that waits for that."""
    backend = run.backend
    loader, event = backend.create_stream("loader"), backend.create_event("expert 7 is here")
    buf = backend.alloc("expert 7", 64)
    backend.fill(buf.ptr, 1, 64, loader, label="expert 7")
    backend.record(event, loader)
    try:
        backend.wait(recording.cap_stream, event)
    finally:
        backend.synchronize(loader)
        backend.free(buf)
        backend.destroy_event(event)
        backend.destroy_stream(loader)


def allocate_too_much(run: Run, recording: Recording) -> None:
    run.backend.alloc("a second arena", 1 << 60)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (wait_for_loader, ["STREAM_CAPTURE_ISOLATION (905)", "'expert 7 is here'", "recorded outside"]),
        (allocate_too_much, ["cuMemAlloc", "OUT_OF_MEMORY (2)", "'a second arena'", str(1 << 60)]),
    ],
)
@pytest.mark.parametrize("schedule", ["lazy", "eager", "random:3"])
def test_the_first_failing_call_is_named_and_the_token_is_right(
    checkpoint: Checkpoints, schedule: str, act: Act, said: list[str]
) -> None:
    with Run(reference(checkpoint("micro")), schedule=schedule) as run:
        run.step()
        (warning,) = step_with(run, InCapture(run, act))
        assert warning["event"] == "capture failed, step graph off, the step runs eagerly"
        assert [text for text in said if text not in warning["error"]] == []
        assert "901" not in warning["error"]
        run.steps(10)
        assert run.stats().replays == 0
    with Run(reference(checkpoint("micro")), schedule=schedule) as run:
        run.steps(10)
        assert run.stats().clean_replays > 0


def test_an_allocation_inside_a_capture_is_allowed(checkpoint: Checkpoints) -> None:
    """Relaxed mode: the capture goes on, and its graphs are used."""
    with Run(reference(checkpoint("micro"))) as run:
        run.step()
        backend = run.backend
        hook = InCapture(run, lambda run, recording: backend.free(backend.alloc("scratch", 4097)))
        assert step_with(run, hook) == []
        run.steps(10)
        assert run.stats().clean_replays > 0


def test_a_stream_that_is_not_joined_when_the_segment_closes(checkpoint: Checkpoints) -> None:
    with Run(reference(checkpoint("micro"))) as run:
        run.step()
        backend = run.backend
        stray, event, buf = backend.create_stream("stray"), backend.create_event("stray"), backend.alloc("stray", 64)

        def leave_open(run: Run, recording: Recording) -> None:
            backend.record(event, recording.cap_stream)
            backend.wait(stray, event)
            backend.fill(buf.ptr, 1, 64, stray, label="late")

        (warning,) = step_with(run, InCapture(run, leave_open, before="end_capture", n=1))
        for text in ("STREAM_CAPTURE_UNJOINED (904)", "'stray'", "'late'"):
            assert text in warning["error"]
        assert backend.capture_status(stray) is CaptureStatus.NONE
        run.steps(3)
        backend.free(buf)
        backend.destroy_event(event)
        backend.destroy_stream(stray)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError("a bug")])
@pytest.mark.parametrize("n", [1, 17, 40])
def test_an_exception_in_the_middle_of_a_capture(checkpoint: Checkpoints, error: BaseException, n: int) -> None:
    """Memory, streams and collection are as before; the same token then captures and is right."""

    def burst(run: Run, recording: Recording) -> None:
        raise error

    with Run(reference(checkpoint("micro"))) as run:
        run.steps(6)
        undisturbed = run.live()
    with Run(reference(checkpoint("micro"))) as run:
        run.step()
        buffers = set(run.backend.ledger())
        with pytest.raises(type(error)), run.hooked(InCapture(run, burst, n=n)):
            run.step()
        assert run.live()["captures"] == 0
        assert set(run.backend.ledger()) == buffers
        assert gc.isenabled()
        run.steps(5)
        assert run.stats().clean_replays > 0
        assert run.live() == undisturbed


def test_garbage_is_collected_between_capture_and_replay(checkpoint: Checkpoints) -> None:
    """What a captured kernel was called with may be dropped: the graph keeps what it needs."""
    with Run(reference(checkpoint("micro"))) as run:
        run.steps(3)
        for _ in range(8):
            gc.collect()
            churn = [np.full(64, 0x7F, np.uint8) for _ in range(2000)]
            run.step()
            assert len(churn) == 2000
        assert run.stats().clean_replays > 0
