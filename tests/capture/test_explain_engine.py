"""Explain, for an engine's own captures: whichever call fails, its line in ds41rt, its layer, and the code."""

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ds41rt
from ds41rt.capture.explain import Explanation
from ds41rt.capture.explain.rules import RULES
from ds41rt.cu.backend import CaptureStatus, GpuBackend, Stream
from ds41rt.cu.host import HostBackend
from ds41rt.cu.host.faults import CALLS
from ds41rt.cu.result import Status
from ds41rt.errors import Ds41Error, UnsupportedError
from ds41rt.step.machine import StepMachine
from ds41rt.tools.capture_explain import explain_engine

ROOT = str(Path(ds41rt.__file__).parent)
# Calls that make or fill a capture.
METHODS = ("begin_capture", "launch", "copy_d2d", "record", "wait", "end_capture", "instantiate")


@pytest.fixture(autouse=True)
def _quick_collections() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()


@dataclass(frozen=True)
class Call:
    """The n-th call of a method of the backend, from where in ds41rt and for which layer it was made."""

    method: str
    n: int
    file: str
    line: int
    layer: int


class Spy:
    """Passes calls on and notes those on the recording stream, by looking at the frames of the step machine."""

    def __init__(self) -> None:
        self.raw = HostBackend(race_detection=False)
        self.calls: list[Call] = []
        self._counts: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        target = getattr(self.raw, name)
        if name not in METHODS:
            return target

        def call(*args: Any) -> Any:
            n = self._counts[name] = self._counts.get(name, 0) + 1
            found = self._where(name, n, args)
            if found is not None:
                self.calls.append(found)
            return target(*args)

        return call

    def _where(self, method: str, n: int, args: tuple[Any, ...]) -> Call | None:
        captures = method in ("begin_capture", "instantiate") or any(
            isinstance(a, int)
            and a in self.raw._streams
            and self.raw.capture_status(Stream(a)) is not CaptureStatus.NONE
            for a in args
        )
        site, layer = None, None
        frame = sys._getframe(2)
        while frame.f_back is not None:
            name = frame.f_globals["__name__"]
            if site is None and name.startswith("ds41rt.") and not name.startswith("ds41rt.cu."):
                site = (frame.f_code.co_filename, frame.f_lineno)
            if frame.f_code.co_name == "step_seg":
                layer = frame.f_locals["idx"]
            frame = frame.f_back
        return Call(method, n, *site, layer) if captures and site is not None and layer is not None else None


def explain(backend: Any, path: Path) -> Explanation:
    return explain_engine(backend, path, expert_slots=64)


def recorded(path: Path) -> dict[str, list[Call]]:
    """The calls that make or fill a capture, by method, of an engine that is well."""
    spy = Spy()
    assert explain(spy, path).ok
    calls = {method: [call for call in spy.calls if call.method == method] for method in METHODS}
    assert all(calls.values())
    return calls


def test_captures_that_succeed(checkpoint: Callable[[str], Path]) -> None:
    spy = Spy()
    found = explain(spy, checkpoint("micro"))
    assert found.ok
    assert found.captures == sum(call.method == "end_capture" for call in spy.calls)
    # Every captured launch and copy is a node.
    assert found.n_nodes == sum(call.method in ("launch", "copy_d2d") for call in spy.calls)
    assert not any(spy.raw.live().values())


def check_fault(path: Path, call: Call, status: Status) -> None:
    """The call fails with the status: function, line, layer and code of exactly that call are named."""
    backend = HostBackend(race_detection=False)
    backend.faults.fail(call.n, status, call.method)
    found = explain(backend, path)
    first = found.first
    assert first is not None, call
    assert first.site is not None
    assert (first.site.file, first.site.line) == (call.file, call.line), found.to_text()
    assert first.site.file.startswith(ROOT)
    assert first.site.text
    assert (first.call, first.code, first.layer) == (CALLS[call.method], status, call.layer), found.to_text()
    assert first.rule == RULES[status].rule
    assert any("goes on without graphs" in note for note in found.notes)
    assert [site.function for site in first.stack][-1] == "Engine.decode_step"
    assert not any(backend.live().values())


def test_every_kind_of_call_that_fails_in_a_capture(checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint("micro")
    chosen = [same[i * len(same) // len(METHODS)] for i, same in enumerate(recorded(path).values())]
    assert len({call.layer for call in chosen}) > 3
    for call, code in zip(chosen, range(902, 909), strict=True):
        check_fault(path, call, Status(code))


def test_the_first_error_counts_and_not_the_loudest(checkpoint: Callable[[str], Path]) -> None:
    """A launch is refused, which does not break the capture; then the capture cannot even be aborted."""
    path = checkpoint("micro")
    call = recorded(path)["launch"][2]
    backend = HostBackend(race_detection=False)
    backend.faults.fail(call.n, Status.LAUNCH_OUT_OF_RESOURCES, "launch")
    backend.faults.fail(1, Status.STREAM_CAPTURE_WRONG_THREAD, "end_capture")
    found = explain(backend, path)
    assert found.first is not None
    assert found.first.site is not None
    assert (found.first.code, found.first.site.line, found.first.layer) == (701, call.line, call.layer)
    assert [failure.code for failure in found.later] == [908]


def test_a_backend_in_between_is_not_blamed(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS41RT_CAPTURE_WATCH", "1")
    backend = HostBackend(race_detection=False)
    backend.faults.fail(1, Status.OUT_OF_MEMORY, "instantiate")
    found = explain(backend, checkpoint("micro"))
    assert found.first is not None
    assert found.first.site is not None
    assert found.first.site.file.endswith("step/machine.py")
    assert found.first.call == "cuGraphInstantiate"


@pytest.mark.long
def test_every_call_that_fails_in_a_capture(checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint("micro")
    calls = [call for same in recorded(path).values() for call in same]
    for i, call in enumerate(calls):
        check_fault(path, call, Status(900 + i % 9))


def test_a_call_that_breaks_the_capture_is_named_and_not_the_cascade(checkpoint: Callable[[str], Path]) -> None:
    """The engine's capture is broken from outside; what it records next only gets 901."""
    path = checkpoint("micro")

    class Breaking(Spy):
        broken = False

        def __getattr__(self, name: str) -> Any:
            target = super().__getattr__(name)
            if name != "copy_d2d":
                return target

            def call(dst: int, src: int, nbytes: int, stream: Stream, label: str) -> None:
                capture = self.raw._streams[stream].capture
                if capture is not None and not self.broken:
                    self.broken = True
                    capture.invalidate(Status.STREAM_CAPTURE_IMPLICIT, "cuThing", "from outside")
                target(dst, src, nbytes, stream, label)

            return call

    found = explain(Breaking(), path)
    assert found.first is not None
    assert found.first.site is not None
    assert found.first.site.file.endswith("step/snapshot.py")
    assert found.first.layer == 0
    assert (found.first.before, found.first.after) == ("ACTIVE", "INVALIDATED")


def test_an_engine_that_fails_altogether(checkpoint: Callable[[str], Path]) -> None:
    """A sticky error in the middle of a capture loses the device: the step raises, and the call is named."""
    path = checkpoint("micro")
    call = recorded(path)["launch"][7]
    backend = HostBackend(race_detection=False)
    backend.faults.fail(call.n, Status.ILLEGAL_ADDRESS, "launch")
    found = explain(backend, path)
    assert found.first is not None
    assert found.first.site is not None
    assert (found.first.site.file, found.first.site.line, found.first.layer) == (call.file, call.line, call.layer)
    assert (found.first.code, found.first.call) == (700, "cuLaunchKernel")


def test_an_allocation_that_fails_in_a_capture(checkpoint: Callable[[str], Path]) -> None:
    """Case 3, for an engine: layer and label of the work that asked for the memory."""

    class Allocating(Spy):
        def __getattr__(self, name: str) -> Any:
            target = super().__getattr__(name)
            if name != "launch":
                return target

            def call(launch: Any, stream: Any) -> Any:
                if launch.label == "L03.ffn_in" and self.raw.capture_status(stream) is CaptureStatus.ACTIVE:
                    self.raw.faults.out_of_memory(1)
                    self.raw.alloc("scratch", 64)
                return target(launch, stream)

            return call

    found = explain(Allocating(), checkpoint("micro"))
    assert found.first is not None
    assert (found.first.call, found.first.code, found.first.layer) == ("cuMemAlloc", 2, 3)
    assert found.first.label == "L03.ffn_in"
    assert found.first.site is not None
    assert found.first.site.file.endswith("step/bodies.py")


def test_an_engine_that_captures_nothing(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS41RT_DEVICE_ROUTE", "0")
    with pytest.raises(UnsupportedError, match="routed on the host"):
        explain(Spy(), checkpoint("micro"))


def test_a_capture_that_fails_without_a_call_that_fails(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepMachine, "record_attn_in", lambda *args: Ds41Error("made up"))
    backend = HostBackend(race_detection=False)
    with pytest.raises(Ds41Error, match="no call to the backend did"):
        explain(backend, checkpoint("micro"))
    assert not any(backend.live().values())


def test_the_backend_protocol_is_covered() -> None:
    """A spy on fewer methods than the engine captures with would make these tests blind."""
    assert {name for name in vars(GpuBackend) if name.startswith(("copy", "launch", "record", "wait", "fill"))} == {
        "copy_h2d", "copy_d2h", "copy_d2d", "launch", "launch_graph", "record", "wait", "fill",
    }  # fmt: skip
