"""From what was seen of a capture to its explanation: which of the errors counts, whose line it was, what to do.

Knows no backend and runs nothing.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ds41rt.capture.explain.answer import Explanation, Failure, Related, Site
from ds41rt.capture.explain.foreign_errors import code_name, code_of, function_of
from ds41rt.capture.explain.lines import Joined, Moment
from ds41rt.capture.explain.rules import COLLECTED, EMPTY, ENDED, NOT_CUDA, Rule, hints, rule_of
from ds41rt.capture.explain.sources import line_text, statement
from ds41rt.cu.backend import CaptureStatus
from ds41rt.cu.call_site import Frame
from ds41rt.cu.recording import Fork, Trouble
from ds41rt.cu.result import STICKY, CudaError, Status

# Frames from here outwards are explain's own.
_OUTWARDS = ("ds41rt.capture.explain", "ds41rt.tools.capture_explain")
# Codes that say of themselves that a capture was at fault, or that the context is lost.
_DECISIVE = frozenset({Status.ILLEGAL_STATE, *range(900, 909), *STICKY})
_LAYER = re.compile(r"L(\d+)\.")
_INVALID = CaptureStatus.INVALIDATED

_ENDED_WHAT = "the captured code ended the capture that explain began"

# Says of a frame if a failure can be blamed on it; of a stack the innermost such frame is.
IsPlace = Callable[[Frame], bool]


@dataclass(slots=True)
class Suspect:
    """A failure, the exception it came with, and whether it is one that fails a capture by itself."""

    failure: Failure
    error: BaseException | None
    decisive: bool


def verdict(
    subject: str, suspects: Sequence[Suspect], left: BaseException | None, notes: Sequence[str], *, first_counts: bool
) -> Explanation:
    """The explanation of a capture that failed; `suspects` in the order of time, at least one.

    The first one counts that is decisive or that led to `left`, the exception that left the captured code: before it
    there may be errors that the code expected. With `first_counts` there are none of those.
    """
    chain = _chain(left)
    at = 0
    if not first_counts:
        counting = (i for i, s in enumerate(suspects) if s.decisive or any(s.error is error for error in chain))
        at = next(counting, 0)
    failures = [suspect.failure for suspect in suspects]
    return Explanation(subject, False, 0, None, failures[at], tuple(failures[at + 1 :]), tuple(notes))


def explained(left: BaseException, suspects: Sequence[Suspect]) -> bool:
    """Whether the exception, or one that led to it, is among the suspects already."""
    return any(suspect.error is error for suspect in suspects for error in _chain(left))


def _chain(error: BaseException | None) -> list[BaseException]:
    """The exception and those behind it."""
    found: list[BaseException] = []
    while error is not None and all(error is not known for known in found):
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


# ---- from a recording


def from_trouble(trouble: Trouble, is_place: IsPlace, last_end: tuple[Frame, ...] | None) -> list[Suspect]:
    """A call that failed on a `RecordingBackend`; for an end that found unjoined forks, those come first.

    `last_end` is where a capture was ended before.
    """
    stack = _own_part(trouble.stack)
    line = _place(stack, is_place)
    layer = _LAYER.match(trouble.near)
    failure = failure_of(
        trouble.error,
        stack,
        line,
        stream=trouble.stream,
        label=trouble.near or None,
        layer=None if layer is None else int(layer[1]),
        before=trouble.before,
        after=trouble.after,
        log=trouble.error.driver_log if isinstance(trouble.error, CudaError) else "",
    )
    if line is None and failure.code == Status.ILLEGAL_STATE and last_end is not None:
        # Explain's own end of a capture that the captured code had ended: its line counts, and what it met there.
        at = _own_part(last_end)
        failure = replace(
            failure,
            what=f"{_ENDED_WHAT}; explain's own end of it then got {failure.code_name} ({failure.code})",
            site=_site(_place(at, is_place)),
            stack=tuple(map(_known_site, at)),
            label=None,
            layer=None,
            before=CaptureStatus.ACTIVE.name,
            after=CaptureStatus.NONE.name,
            rule=ENDED.rule,
            fix=ENDED.fix,
        )
    decisive = trouble.broke_capture or failure.code in _DECISIVE or trouble.method == "instantiate"
    forks = [_recorded_fork(failure, fork, is_place) for fork in trouble.loose]
    return [*(Suspect(fork, trouble.error, True) for fork in forks), Suspect(failure, trouble.error, decisive)]


def _recorded_fork(end: Failure, fork: Fork, is_place: IsPlace) -> Failure:
    stack = _own_part(fork.stack)
    work = None if fork.last_work is None else _place(_own_part(fork.last_work), is_place)
    return _unjoined(end, fork.stream, stack, _place(stack, is_place), work)


def from_exception(left: BaseException, is_place: IsPlace, before: CaptureStatus) -> Suspect:
    """An exception that no backend raised, by its traceback."""
    stack = []
    step = left.__traceback__
    while step is not None:
        stack.append(Frame.of(step.tb_frame)._replace(line=step.tb_lineno))
        step = step.tb_next
    stack.reverse()
    own = _own_part(tuple(stack))
    failure = failure_of(left, own, _place(own, is_place), before=before, after=before)
    return Suspect(failure, left, False)


def _own_part(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The stack without the frames from explain outwards."""
    ours = (i for i, frame in enumerate(stack) if frame.module.startswith(_OUTWARDS))
    return stack[: next(ours, len(stack))]


def _place(stack: tuple[Frame, ...], is_place: IsPlace) -> Frame | None:
    return next((frame for frame in stack if is_place(frame)), None)


# ---- from a watched run


def from_moment(moment: Moment, stream: str | None) -> Suspect:
    """A line that broke a capture, or an exception that was raised there."""
    failure = failure_of(
        moment.error,
        moment.stack,
        moment.line or next(iter(moment.stack), None),
        stream=stream,
        before=moment.before,
        after=moment.after,
        log=moment.log,
        collected=moment.collected,
    )
    return Suspect(failure, moment.error, moment.broke_capture or failure.code in _DECISIVE)


def from_early_end(moment: Moment, stream: str | None) -> Suspect:
    """A line that ended the capture that explain began; no call failed there."""
    return _odd(moment, stream, _ENDED_WHAT, ENDED)


def from_open_end(moment: Moment, stream: str | None) -> Suspect:
    """A line that began a capture which nobody ended; no call failed there."""
    return _odd(moment, stream, "the capture that began here was never ended", rule_of(Status.ILLEGAL_STATE))


def _odd(moment: Moment, stream: str | None, what: str, rule: Rule) -> Suspect:
    failure = from_moment(moment, stream).failure
    return Suspect(replace(failure, what=what, rule=rule.rule, fix=rule.fix), moment.error, True)


def nothing_captured() -> Failure:
    """The end of the capture went well, and left a graph without nodes."""
    end = failure_of(None, (), None, before=CaptureStatus.ACTIVE, after=CaptureStatus.NONE)
    return replace(end, what="nothing was captured: the graph has no nodes", rule=EMPTY.rule, fix=EMPTY.fix)


def from_end(end: CudaError, stream: str) -> Suspect:
    """The end of the capture, made by explain, failed."""
    outcome = failure_of(
        end, (), None, stream=stream, before=CaptureStatus.ACTIVE, after=CaptureStatus.NONE, log=end.driver_log
    )
    return Suspect(outcome, end, True)


def from_fork(end: Suspect, joined: Joined, stream: str) -> Suspect:
    """A stream that was forked into the capture at a known line, and that its `end` found unjoined."""
    work = joined.last_work
    worked = None if work is None else work.line
    return Suspect(_unjoined(end.failure, stream, joined.at.stack, joined.at.line, worked), end.error, True)


# ---- one failure


def failure_of(
    error: BaseException | None,
    stack: tuple[Frame, ...],
    line: Frame | None,
    *,
    stream: str | None = None,
    label: str | None = None,
    layer: int | None = None,
    before: CaptureStatus,
    after: CaptureStatus,
    log: str = "",
    collected: bool = False,
) -> Failure:
    """`error` is None where a capture became invalid and nobody said so. `line` is the frame to blame."""
    site = _site(line)
    text = "" if site is None else site.text
    texts = () if line is None else (line_text(line.file, line.line), text)
    code = None if error is None else code_of(error)
    broke = after is _INVALID and before is not _INVALID
    about_cuda = error is None or code is not None or broke
    rule: Rule = rule_of(code) if about_cuda else NOT_CUDA
    if error is None:
        what = "the capture became invalid in this line, and no error was raised"
    elif isinstance(error, CudaError):
        what = str(error)
    else:
        what = f"{type(error).__name__}: {error}"
    hinted = hints(text) if about_cuda and code != Status.STREAM_CAPTURE_INVALIDATED else ()
    return Failure(
        what=what,
        call=function_of(error, log, *texts) if about_cuda else None,
        code=code,
        code_name=None if code is None else code_name(code),
        site=site,
        stack=tuple(map(_known_site, stack)),
        stream=stream,
        label=label,
        layer=layer,
        before=before.name,
        after=after.name,
        driver_log=log,
        rule=rule.rule,
        fix=rule.fix,
        hints=(*hinted, COLLECTED) if collected else hinted,
    )


def _unjoined(
    end: Failure, stream: str, stack: tuple[Frame, ...], line: Frame | None, last_work: Frame | None
) -> Failure:
    """The line of the fork, for an end that failed because of it."""
    code = f"{end.code_name} ({end.code})" if end.call is None else f"{end.call}: {end.code_name} ({end.code})"
    related = [] if end.site is None else [Related("the capture was ended", end.site)]
    worked = _site(last_work)
    if worked is not None:
        related.append(Related(f"the last work on stream {stream!r}, which nothing waits for", worked))
    return replace(
        end,
        what=f"{code}: stream {stream!r} was forked into the capture here and not joined back",
        site=_site(line),
        stack=tuple(map(_known_site, stack)),
        stream=stream,
        related=tuple(related),
    )


def _site(frame: Frame | None) -> Site | None:
    return None if frame is None else _known_site(frame)


def _known_site(frame: Frame) -> Site:
    return Site(frame.file, frame.line, frame.function, statement(frame.file, frame.line))
