"""Questions to a real driver that `GpuBackend` cannot put: it asks in one mode only, or answers before the driver does.

Each function takes the bindings and a rig whose backend is a `DriverBackend`, and returns an outcome as the conformance
cases do. The answers back rows of docs/cuda-semantics.md.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from ds41rt.cu.backend import CaptureStatus
from ds41rt.cu.result import Status
from ds41rt.testing.conformance.case import Outcome, Rig
from ds41rt.testing.conformance.kernels import AFFINE_PTX

_MAPPED = 3  # portable and mapped, as DriverBackend allocates
_BLOCKING, _LEGACY = 0, 1  # a stream that the legacy stream waits for; the legacy stream's handle


class Raw:
    """Driver calls by name, with status names for answers."""

    def __init__(self, cu: Any, rig: Rig) -> None:
        self.cu = cu
        self.rig = rig
        self.main = cu.CUstream(int(rig.main))
        modes = cu.CUstreamCaptureMode
        self.modes = {
            "global": modes.CU_STREAM_CAPTURE_MODE_GLOBAL,
            "thread local": modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            "relaxed": modes.CU_STREAM_CAPTURE_MODE_RELAXED,
        }

    def code(self, call: str, *args: Any) -> str:
        status, *_ = getattr(self.cu, call)(*args)
        return _name(status)

    def status(self, stream: Any = None) -> str:
        code, status = self.cu.cuStreamIsCapturing(self.main if stream is None else stream)
        return _name(code) if code else CaptureStatus(int(status)).name

    def make(self, call: str, *args: Any) -> Any:
        """A call that has to succeed; what it returned after its status."""
        code, value = getattr(self.cu, call)(*args)
        if code:
            raise RuntimeError(f"{call}: {_name(code)}")
        return value


def _name(code: Any) -> str:
    known = {int(s): s.name for s in Status}
    return known.get(int(code), str(int(code)))


def zero_byte_allocation(raw: Raw) -> Outcome:
    return {"device": raw.code("cuMemAlloc", 0), "pinned": raw.code("cuMemHostAlloc", 0, _MAPPED)}


def freed_twice(raw: Raw) -> Outcome:
    device, pinned = raw.make("cuMemAlloc", 4096), raw.make("cuMemHostAlloc", 4096, _MAPPED)
    return {
        "device": [raw.code("cuMemFree", device), raw.code("cuMemFree", device)],
        "pinned": [raw.code("cuMemFreeHost", pinned), raw.code("cuMemFreeHost", pinned)],
    }


def begin_while_capturing(raw: Raw) -> Outcome:
    outcome: Outcome = {"first": raw.code("cuStreamBeginCapture", raw.main, raw.modes["relaxed"])}
    outcome["second"] = raw.code("cuStreamBeginCapture", raw.main, raw.modes["relaxed"])
    outcome["status"] = raw.status()
    outcome["end"] = raw.code("cuStreamEndCapture", raw.main)
    outcome["after"] = raw.status()
    return outcome


def begin_on_invalidated_capture(raw: Raw) -> Outcome:
    raw.code("cuStreamBeginCapture", raw.main, raw.modes["relaxed"])
    outcome: Outcome = {"spoil": raw.code("cuStreamSynchronize", raw.main)}
    outcome["begin"] = raw.code("cuStreamBeginCapture", raw.main, raw.modes["relaxed"])
    outcome["end"] = raw.code("cuStreamEndCapture", raw.main)
    return outcome


def end_while_not_capturing(raw: Raw) -> Outcome:
    return {"end": raw.code("cuStreamEndCapture", raw.main), "status": raw.status()}


def query_capturing_stream(raw: Raw) -> Outcome:
    return _while_capturing(raw, "relaxed", lambda: raw.code("cuStreamQuery", raw.main))


def synchronize_context(raw: Raw) -> Outcome:
    """While a stream of it captures in relaxed mode."""
    return _while_capturing(raw, "relaxed", lambda: raw.code("cuCtxSynchronize"))


def legacy_stream_beside_a_non_blocking_capture(raw: Raw) -> Outcome:
    return _while_capturing(
        raw, "relaxed", lambda: raw.code("cuMemsetD8Async", raw.rig.x, 7, 4, raw.cu.CUstream(_LEGACY))
    )


def legacy_stream_beside_a_blocking_capture(raw: Raw) -> Outcome:
    stream = raw.make("cuStreamCreate", _BLOCKING)
    raw.code("cuStreamBeginCapture", stream, raw.modes["relaxed"])
    outcome: Outcome = {"asked": raw.code("cuMemsetD8Async", raw.rig.x, 7, 4, raw.cu.CUstream(_LEGACY))}
    outcome["status"] = raw.status(stream)
    outcome["end"] = raw.code("cuStreamEndCapture", stream)
    outcome["destroy"] = raw.code("cuStreamDestroy", stream)
    return outcome


def in_every_mode(raw: Raw) -> Outcome:
    """Calls that only relaxed mode allows, each in a capture of its own."""
    device = [raw.make("cuMemAlloc", 4096) for _ in raw.modes]
    event = raw.make("cuEventCreate", 0)
    raw.code("cuEventRecord", event, raw.cu.CUstream(int(raw.rig.side)))
    raw.code("cuStreamSynchronize", raw.cu.CUstream(int(raw.rig.side)))
    text = AFFINE_PTX.encode() + b"\0"
    outcome: Outcome = {}
    for i, mode in enumerate(raw.modes):
        calls: dict[str, Callable[[], str]] = {
            "alloc": lambda: raw.code("cuMemAlloc", 4096),
            "alloc_pinned": lambda: raw.code("cuMemHostAlloc", 4096, _MAPPED),
            "free": partial(raw.code, "cuMemFree", device[i]),
            "module load": lambda: raw.code("cuModuleLoadData", text),
            "query of another event": lambda: raw.code("cuEventQuery", event),
            "synchronise of another stream": lambda: raw.code(
                "cuStreamSynchronize", raw.cu.CUstream(int(raw.rig.side))
            ),
            "end from another thread": lambda: _in_thread(raw, lambda: raw.code("cuStreamEndCapture", raw.main)),
        }
        for name, call in calls.items():
            answer = _while_capturing(raw, mode, call)
            outcome[f"{name}, {mode}"] = [str(answer[key]) for key in ("asked", "status", "end")]
    return outcome


def elapsed_time_of_captured_events(raw: Raw) -> Outcome:
    first, last = raw.make("cuEventCreate", 0), raw.make("cuEventCreate", 0)
    raw.code("cuStreamBeginCapture", raw.main, raw.modes["relaxed"])
    raw.code("cuEventRecord", first, raw.main)
    raw.code("cuEventRecord", last, raw.main)
    outcome: Outcome = {"inside": raw.code("cuEventElapsedTime", first, last), "status": raw.status()}
    outcome["end"] = raw.code("cuStreamEndCapture", raw.main)
    outcome["after"] = raw.code("cuEventElapsedTime", first, last)
    return outcome


QUESTIONS: dict[str, Callable[[Raw], Outcome]] = {
    question.__name__: question
    for question in (
        zero_byte_allocation,
        freed_twice,
        begin_while_capturing,
        begin_on_invalidated_capture,
        end_while_not_capturing,
        query_capturing_stream,
        synchronize_context,
        legacy_stream_beside_a_non_blocking_capture,
        legacy_stream_beside_a_blocking_capture,
        in_every_mode,
        elapsed_time_of_captured_events,
    )
}


def _while_capturing(raw: Raw, mode: str, ask: Callable[[], str]) -> Outcome:
    """Ask while the main stream captures in `mode`; then its status, and what its end says."""
    raw.code("cuStreamBeginCapture", raw.main, raw.modes[mode])
    outcome: Outcome = {"asked": ask(), "status": raw.status()}
    outcome["end"] = raw.code("cuStreamEndCapture", raw.main)
    outcome["after"] = raw.status()
    return outcome


def _in_thread(raw: Raw, ask: Callable[[], str]) -> str:
    """Ask in another thread of the same context."""
    context = raw.make("cuCtxGetCurrent")
    answers: list[str] = []

    def run() -> None:
        raw.code("cuCtxSetCurrent", context)
        answers.append(ask())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return answers[0]
