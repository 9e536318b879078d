"""The seeded bugs that break a capture, explained: the right first call, through the backend and line by line.

Of the twelve these are 5, 6, 10 and 11. The others break no capture: 4 fails when the graph is launched (lint sees its
dead source), 9 when the kernel runs, and 1, 2, 3, 7, 8 and 12 are races.
"""

import gc
import inspect
from collections.abc import Callable, Iterator

import pytest
from test_seeded_bugs import Step

from ds41rt.capture.explain import Explanation, Failure, explain
from ds41rt.cu.backend import GpuBackend, Stream
from ds41rt.cu.result import Status

Bug = Callable[[Step], object]


@pytest.fixture(params=["lazy", "random:1"])
def step(request: pytest.FixtureRequest) -> Iterator[Step]:
    step = Step(request.param)
    gc.freeze()  # explain collects garbage: not all of this process's
    yield step
    gc.unfreeze()
    step.backend.close()


def bug_5_an_unjoined_fork(step: Step) -> None:
    step.backend.launch(step.scale, step.main)
    step.backend.record(step.computed, step.main)
    step.backend.wait(step.fetch, step.computed)  # HERE
    step.fetch_expert()


def bug_6_an_event_recorded_outside_of_the_capture(step: Step) -> None:
    step.backend.launch(step.scale, step.main)
    step.backend.wait(step.main, step.fetched)  # HERE


def bug_10_a_double_end(step: Step) -> None:
    step.backend.end_capture(step.main)
    step.backend.end_capture(step.main)  # HERE


def bug_11_a_stream_is_waited_for(step: Step) -> None:
    step.backend.launch(step.scale, step.main)
    step.backend.synchronize(step.main)  # HERE


def bug_11_an_event_is_queried(step: Step) -> None:
    step.backend.record(step.computed, step.main)
    step.backend.query_event(step.computed)  # HERE


def bug_11_an_event_is_waited_for(step: Step) -> None:
    step.backend.record(step.computed, step.main)
    step.backend.synchronize_event(step.computed)  # HERE


BUGS: dict[Bug, tuple[Status, str]] = {
    bug_5_an_unjoined_fork: (Status.STREAM_CAPTURE_UNJOINED, "cuStreamEndCapture"),
    bug_6_an_event_recorded_outside_of_the_capture: (Status.STREAM_CAPTURE_ISOLATION, "cuStreamWaitEvent"),
    bug_10_a_double_end: (Status.ILLEGAL_STATE, "cuStreamEndCapture"),
    bug_11_a_stream_is_waited_for: (Status.STREAM_CAPTURE_UNSUPPORTED, "cuStreamSynchronize"),
    bug_11_an_event_is_queried: (Status.CAPTURED_EVENT, "cuEventQuery"),
    bug_11_an_event_is_waited_for: (Status.CAPTURED_EVENT, "cuEventSynchronize"),
}


def through_the_backend(step: Step, bug: Bug) -> Explanation:
    raw = step.backend

    def captured(backend: GpuBackend, stream: Stream) -> None:
        step.backend = backend  # type: ignore[assignment]
        bug(step)

    try:
        return explain(captured, backend=raw, stream=step.main)
    finally:
        step.backend = raw


def line_by_line(step: Step, bug: Bug) -> Explanation:
    return explain(lambda stream: bug(step), backend=step.backend, stream=step.main, streams=(step.fetch,))


def captured_by_itself(step: Step, bug: Bug) -> Explanation:
    def captures() -> None:
        step.backend.begin_capture(step.main)
        bug(step)
        step.backend.end_capture(step.main)

    return explain(captures, backend=step.backend, self_capture=True, streams=(step.main, step.fetch))


@pytest.mark.parametrize("how", [through_the_backend, line_by_line, captured_by_itself], ids=lambda f: f.__name__)
@pytest.mark.parametrize("bug", BUGS, ids=lambda f: f.__name__)
def test_the_first_call_is_named(step: Step, bug: Bug, how: Callable[[Step, Bug], Explanation]) -> None:
    step.fetch_expert()
    step.backend.record(step.fetched, step.fetch)
    found = how(step, bug)
    first = found.first
    assert isinstance(first, Failure)
    lines, start = inspect.getsourcelines(bug)
    want = start + next(i for i, line in enumerate(lines) if line.endswith("# HERE\n"))
    assert first.site is not None
    assert (first.site.file, first.site.line) == (__file__, want), found.to_text()
    assert (first.code, first.call) == BUGS[bug]
    # Whatever was tried, the step works afterwards.
    step.backend.synchronize(step.fetch)
    step.correct()


@pytest.mark.parametrize("how", [through_the_backend, line_by_line, captured_by_itself], ids=lambda f: f.__name__)
def test_the_step_without_a_bug(step: Step, how: Callable[[Step, Bug], Explanation]) -> None:
    def joined(step: Step) -> None:
        step.order(step.main, step.fetch)
        step.fetch_expert()
        step.order(step.fetch, step.main)
        step.backend.launch(step.ffn, step.main)

    assert how(step, joined).ok
    step.correct()
