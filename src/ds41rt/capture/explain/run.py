"""Why did this capture fail? Runs it, and names the first failing call instead of the errors that follow from it.

Two ways to look: a capture whose calls go through a `GpuBackend` is run on one that notes its calls; a capture of
another library is run line by line (`lines`). An engine's own captures are run by the command line, which knows
engines.
"""

import gc
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from ds41rt.capture.explain.answer import Explanation
from ds41rt.capture.explain.blame import (
    IsPlace,
    Suspect,
    explained,
    from_early_end,
    from_end,
    from_exception,
    from_fork,
    from_moment,
    from_open_end,
    from_trouble,
    nothing_captured,
    verdict,
)
from ds41rt.capture.explain.lines import LineWatch, Moment
from ds41rt.capture.explain.sources import Owner
from ds41rt.cu.backend import CaptureStatus, GpuBackend, Stream, open_backend
from ds41rt.cu.capture_probe import CaptureMode, CaptureProbe
from ds41rt.cu.recording import RecordingBackend
from ds41rt.cu.result import CudaError, Status
from ds41rt.errors import InputError

# What a call may make instead of running the body.
_UNRUN: tuple[tuple[str, Callable[[object], bool]], ...] = (
    ("a coroutine", inspect.iscoroutinefunction),
    ("a generator", inspect.isgeneratorfunction),
    ("an asynchronous generator", inspect.isasyncgenfunction),
)


def explain(
    call: Callable[..., object],
    *,
    backend: GpuBackend | None = None,
    stream: int | None = None,
    mode: CaptureMode | None = None,
    self_capture: bool = False,
    streams: Sequence[int] = (),
) -> Explanation:
    """Run a capture of `call` and say whether it succeeded, or what broke it first.

    `call(backend, stream)` is run inside a capture on a backend of ours, and has to use that backend. `call(stream)`
    gets a raw stream handle that captures in `mode` (default: "global" as PyTorch's where there are modes): for other
    libraries, whose calls nobody sees; their streams are watched line by line. With `self_capture`, `call()` begins and
    ends captures itself; watched are PyTorch's current stream, stream objects in the names that the running code can
    see, and `streams` (raw handles, also for `call(stream)`).

    `backend` is opened and closed here if it is None. `stream` is the stream to capture on (default: a new one).
    Whatever happens, no capture is left open. Python's garbage is collected first, so that an old object's finaliser
    does not break the capture. What other threads do inside the capture is not seen.

    Raises `InputError` for a callable of another form, and with `self_capture` if it began no capture that could be
    seen; `UnsupportedError` where there is no such backend or mode; `CudaError` where no stream can be made. What
    `call` raises is part of the answer, interrupts excepted.
    """
    n_arguments = takes(call, self_capture)
    if n_arguments == 2 and mode not in (None, "relaxed"):
        raise InputError(f"capture mode {mode!r}: captures through a backend are relaxed; leave the mode out")
    if self_capture and (mode is not None or stream is not None):
        raise InputError("a callable that makes its own capture chooses mode and stream itself: leave them out")
    opened = None
    if backend is None:
        backend = opened = open_backend("auto" if n_arguments == 2 else "cuda")[0]
    gc.collect()
    try:
        backend.capture_probe().log()  # older lines are not about this capture
        if n_arguments == 2:
            return _through_backend(call, backend, stream)
        if n_arguments == 1:
            return _on_stream(call, backend, stream, mode, tuple(streams))
        return _self_captured(call, backend, tuple(streams))
    finally:
        if opened is not None:
            opened.close()


def takes(call: Callable[..., object], self_capture: bool) -> int:
    """How many arguments the callable has to be given: 2, 1, or with `self_capture` 0.

    Raises `InputError`, also for a callable whose body a call does not run.
    """
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError) as e:
        raise InputError(f"{call!r}: its parameters cannot be seen; wrap it in a function of your own") from e
    made = next((what for what, is_such in _UNRUN if is_such(call) or is_such(type(call).__call__)), None)
    if made is not None:
        raise InputError(
            f"{_name(call)}: a call of it only makes {made}, and runs nothing of its body; give a plain function that "
            "runs it to its end"
        )
    wanted = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    n = -1 if any(p.kind is p.KEYWORD_ONLY for p in wanted) else len(wanted)
    said = ", ".join(p.name for p in wanted) or "nothing"
    if self_capture and n != 0:
        raise InputError(f"{_name(call)} makes its own capture and so must take no arguments; it takes {said}")
    if not self_capture and n not in (1, 2):
        raise InputError(
            f"{_name(call)} must take the stream, or the backend and the stream, to be run in a capture; it takes "
            f"{said}. One that begins and ends its own capture takes nothing and needs --self-capture (self_capture)"
        )
    return n


def _name(call: Callable[..., object]) -> str:
    if not hasattr(call, "__qualname__"):
        return f"an object of {_name(type(call))}"
    return f"{getattr(call, '__module__', '?')}:{call.__qualname__}"


def _owner(call: Callable[..., object]) -> Owner:
    """The user's files: all but libraries, and the callable's own package even if it is installed like one."""
    module = sys.modules.get(getattr(call, "__module__", ""))
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        return Owner()
    package = sys.modules.get(module.__name__.partition(".")[0])
    folder = next(iter(getattr(package, "__path__", ())), None)
    return Owner(str(Path(file).resolve()) if folder is None else f"{Path(folder).resolve()}/")


def _clean_up(notes: list[str], *steps: Callable[[], object]) -> None:
    """Do all steps; what the driver refuses (after a lost context, all of it) is noted."""
    for step in steps:
        try:
            step()
        except CudaError as error:
            notes.append(f"not cleaned up: {error}")


# ---- through a backend of ours


def _through_backend(call: Callable[..., object], backend: GpuBackend, stream: int | None) -> Explanation:
    recorder = RecordingBackend(backend)
    owner = _owner(call)
    left: BaseException | None = None
    notes: list[str] = []
    origin = backend.create_stream("explained capture") if stream is None else Stream(stream)
    try:
        recorder.begin_capture(origin)
        call(recorder.as_backend, origin)
        others = recorder.n_nodes
        backend.destroy_graph(recorder.end_capture(origin))
        if others and recorder.n_nodes == others:
            notes.append("the capture on the given stream stayed empty; the nodes are of captures that it made itself")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - what the user's code raises is the answer
        left = error
    finally:
        own = [] if stream is not None else [partial(backend.destroy_stream, origin)]
        _clean_up(notes, *(partial(backend.abort_capture, s) for s in recorder.open_captures()), *own)
    return from_recording(_name(call), recorder, left, lambda f: owner.is_users(f.file), notes, failed=left is not None)


def from_recording(
    subject: str,
    recorder: RecordingBackend,
    left: BaseException | None,
    is_place: IsPlace,
    notes: Sequence[str],
    *,
    failed: bool,
    first_counts: bool = False,
) -> Explanation:
    """What a run on a `RecordingBackend` says.

    `failed`: a capture failed in it; `left` is the exception that left the captured code, if any. `first_counts`: that
    code expects no errors, so the first one counts, whatever it is.
    """
    suspects: list[Suspect] = []
    for trouble in recorder.troubles:
        suspects += from_trouble(trouble, is_place, recorder.last_end)
    if not failed:
        return _fine(subject, suspects, recorder.captures, recorder.n_nodes, notes)
    if left is not None and not explained(left, suspects):
        suspects.append(from_exception(left, is_place, CaptureStatus.ACTIVE))
    found = verdict(subject, suspects, left, notes, first_counts=first_counts)
    return replace(found, captures=recorder.captures, n_nodes=recorder.n_nodes)


def _fine(
    subject: str, suspects: Sequence[Suspect], captures: int, n_nodes: int | None, notes: Sequence[str]
) -> Explanation:
    """No capture failed. `n_nodes` is None where they could not be counted; without a node it failed all the same."""
    harmless = (f"an error that broke nothing: {suspect.failure.what}" for suspect in suspects)
    said = (*notes, *harmless)
    if n_nodes == 0:
        return Explanation(subject, False, 0, 0, nothing_captured(), notes=said)
    return Explanation(subject, True, captures, n_nodes, notes=said)


# ---- on raw streams, watched line by line


def _on_stream(
    call: Callable[..., object],
    backend: GpuBackend,
    stream: int | None,
    mode: CaptureMode | None,
    streams: tuple[int, ...],
) -> Explanation:
    probe = backend.capture_probe()
    notes: list[str] = []
    end: CudaError | None = None
    n_nodes = 0
    still_open: list[int] = []
    origin = backend.create_stream("explained capture") if stream is None else stream
    try:
        probe.begin(origin, mode or probe.default_mode)
        watch = LineWatch(probe, _owner(call), (origin, *streams), origin=origin)
        try:
            watch.run(call, origin)
        finally:
            with suppress(CudaError):  # a lost context is among the troubles already
                still_open = [s for s in watch.open_captures() if s != origin]
        seen = watch.seen
        if seen.left is None and not seen.ended:
            try:
                watch.look_for_loose()
                n_nodes = probe.end(origin)
            except CudaError as error:
                end = error
        suspects = _watched(watch, probe)
        name = probe.name(origin)
        if not any(suspect.decisive for suspect in suspects):
            suspects += [from_early_end(m, name) for m in seen.ended]
        if end is not None:
            suspect = from_end(end, name)
            suspects += [*_forks(suspect, watch, probe), suspect]
        failed = seen.left is not None or any(suspect.decisive for suspect in suspects)
    finally:
        own = [] if stream is not None else [partial(backend.destroy_stream, Stream(origin))]
        _clean_up(notes, *(partial(probe.abort, s) for s in (*still_open, origin)), *own)
    if not failed:
        return _fine(_name(call), suspects, 1, n_nodes, notes)
    return verdict(_name(call), suspects, _left(watch), notes, first_counts=False)


def _self_captured(call: Callable[..., object], backend: GpuBackend, streams: tuple[int, ...]) -> Explanation:
    probe = backend.capture_probe()
    notes: list[str] = []
    watch = LineWatch(probe, _owner(call), streams)
    still_open: list[int] = []
    try:
        watch.run(call)
    finally:
        with suppress(CudaError):  # a lost context is among the troubles already
            still_open = watch.open_captures()
        _clean_up(notes, *(partial(probe.abort, s) for s in still_open))
    seen = watch.seen
    suspects = _watched(watch, probe)
    if seen.left is None:
        left_open = (moment for moment in seen.begun if moment.stream in still_open)
        suspects += [from_open_end(m, _stream_of(m, probe)) for m in left_open]
    if seen.left is None and not any(suspect.decisive for suspect in suspects):
        if not seen.begun:
            raise InputError(
                f"{_name(call)} began no capture on a stream that explain can see; those are PyTorch's current stream, "
                "stream objects among the names of the running code, and handles given as streams"
            )
        n_ended = sum(m.before is CaptureStatus.ACTIVE and m.error is None for m in seen.ended)
        return _fine(_name(call), suspects, n_ended, None, notes)
    return verdict(_name(call), suspects, _left(watch), notes, first_counts=False)


def _watched(watch: LineWatch, probe: CaptureProbe) -> list[Suspect]:
    """What went wrong under a watch, in the order of time."""
    suspects: list[Suspect] = []
    for moment in watch.seen.troubles:
        suspect = from_moment(moment, _stream_of(moment, probe))
        if all(earlier.failure.code != suspect.failure.code for earlier in suspects):  # a library may raise it again
            suspects += _forks(suspect, watch, probe)
        suspects.append(suspect)
    left = watch.seen.left
    if left is not None and left.error is not None and not explained(left.error, suspects):
        suspects.append(from_moment(left, _stream_of(left, probe)))
    return suspects


def _forks(suspect: Suspect, watch: LineWatch, probe: CaptureProbe) -> list[Suspect]:
    """For an end that found unjoined forks: the lines of those."""
    if suspect.failure.code != Status.STREAM_CAPTURE_UNJOINED:
        return []
    return [from_fork(suspect, watch.seen.joined[s], probe.name(s)) for s in watch.seen.loose]


def _left(watch: LineWatch) -> BaseException | None:
    return None if watch.seen.left is None else watch.seen.left.error


def _stream_of(moment: Moment, probe: CaptureProbe) -> str | None:
    return None if moment.stream is None else probe.name(moment.stream)
