"""Explain on the driver backend, over the fake driver: capture modes, log lines, raw calls that return their codes."""

import gc
import threading
from collections.abc import Callable, Iterator
from inspect import getsourcelines
from pathlib import Path
from typing import Any

import pytest
from fake_driver import FakeDriver, open_fake

from ds41rt.capture.explain import Explanation, explain, sources
from ds41rt.cu.backend import CaptureStatus, GpuBackend, Stream
from ds41rt.cu.capture_probe import CaptureMode
from ds41rt.cu.driver import DriverBackend
from ds41rt.cu.result import Status


class Rig:
    """A driver backend, two streams and an event by their raw handles, and 64 bytes at `x`."""

    def __init__(self, backend: DriverBackend, cu: FakeDriver) -> None:
        self.backend, self.cu = backend, cu
        self.main, self.side = backend.create_stream("main"), backend.create_stream("side")
        self.event, self.join = backend.create_event("event"), backend.create_event("join")
        self.x = backend.alloc("x", 64).ptr

    def works(self) -> bool:
        """Nothing captures, and a fresh capture succeeds."""
        probe = self.backend.capture_probe()
        if any(probe.info(s).status is not CaptureStatus.NONE for s in (self.main, self.side)):
            return False
        self.backend.begin_capture(self.main)
        self.backend.fill(self.x, 1, 64, self.main)
        self.backend.destroy_graph(self.backend.end_capture(self.main))
        return gc.isenabled()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    # The fake stands for the bindings, which are a library.
    monkeypatch.setattr(sources, "_LIBRARY_PARTS", (*sources._LIBRARY_PARTS, "/fake_driver.py"))
    rig = Rig(*open_fake(tmp_path))
    rig.cu.untraced = True  # the real ones are C code
    gc.freeze()  # explain collects garbage: not all of this process's
    yield rig
    gc.unfreeze()
    rig.backend.close()
    assert not any(rig.cu.host.live().values())


def line_of(program: Callable[..., object]) -> int:
    lines, start = getsourcelines(program)
    return start + next(i for i, line in enumerate(lines) if line.endswith("# HERE\n"))


def raw(rig: Rig, program: Callable[[], object], mode: CaptureMode | None = None) -> Explanation:
    """A capture whose calls go to the bindings directly; `main` captures."""
    found = explain(lambda stream: program(), backend=rig.backend, stream=rig.main, mode=mode, streams=(rig.side,))
    assert rig.works()
    return found


def assert_at(found: Explanation, program: Callable[..., object], code: int | None, call: str | None) -> None:
    first = found.first
    assert first is not None
    assert first.site is not None
    assert (first.site.file, first.site.line) == (__file__, line_of(program)), found.to_text()
    assert (first.code, first.call) == (code, call)


BARRED: dict[str, Callable[[Rig], Any]] = {
    "cuMemAlloc": lambda rig: rig.cu.cuMemAlloc(4096),
    "cuMemFree": lambda rig: rig.cu.cuMemFree(rig.x),
    "cuEventQuery": lambda rig: rig.cu.cuEventQuery(rig.join),
    "cuStreamSynchronize": lambda rig: rig.cu.cuStreamSynchronize(rig.side),
}


@pytest.mark.parametrize("mode", [None, "global", "thread_local"])
@pytest.mark.parametrize("call", BARRED)
def test_what_the_strict_modes_bar(rig: Rig, call: str, mode: CaptureMode | None) -> None:
    """A raw call returns its code and raises nothing: the line is found by the status alone."""
    barred = BARRED[call]

    def program() -> None:
        rig.cu.cuMemsetD8Async(rig.x, 7, 64, rig.main)
        barred(rig)  # HERE
        rig.cu.cuMemsetD8Async(rig.x, 7, 64, rig.main)

    found = raw(rig, program, mode)
    first = found.first
    assert first is not None
    assert first.code is None
    assert (first.before, first.after) == ("ACTIVE", "INVALIDATED")
    assert any(site.line == line_of(program) and site.file == __file__ for site in first.stack)
    assert first.call == call
    assert [f.code for f in found.later] == [901]
    modes = [int(args[2]) for args in rig.cu.calls if args[0] == "cuStreamBeginCapture"]
    assert modes == [{"global": 0, "thread_local": 1}[mode or "global"], 2]  # `works` looked last, through the backend


def test_what_the_relaxed_mode_allows(rig: Rig) -> None:
    def program() -> None:
        code, addr = rig.cu.cuMemAlloc(4096)
        assert not code
        rig.cu.cuMemsetD8Async(addr, 7, 64, rig.main)
        rig.cu.cuStreamSynchronize(rig.side)
        rig.cu.cuMemFree(addr)

    assert raw(rig, program, "relaxed").n_nodes == 1


def test_an_allocation_in_a_strict_capture_through_the_backend(rig: Rig) -> None:
    """Case 3: function, file and line of ours, stream, code, the driver's own line, and not the cascade."""

    def program() -> None:
        rig.cu.log.append("allocating while a stream captures is not permitted")
        rig.backend.alloc("scratch", 4096)  # HERE

    found = raw(rig, program, "global")
    assert_at(found, program, 900, "cuMemAlloc")
    assert found.first is not None
    assert found.first.stream == "main"
    assert "device buffer 'scratch' needs 4096 bytes" in found.first.what
    assert found.first.driver_log == "allocating while a stream captures is not permitted"
    assert "driver log: allocating while" in found.to_text()
    assert "901" not in found.to_text()


def test_an_end_in_another_thread(rig: Rig) -> None:
    answers: list[int] = []

    def end() -> None:
        rig.cu.cuCtxSetCurrent(0xC0)
        answers.append(rig.cu.cuStreamEndCapture(rig.main)[0])

    def program() -> None:
        thread = threading.Thread(target=end)
        thread.start()
        thread.join()  # HERE
        raise RuntimeError(f"cuStreamEndCapture: CUDA_ERROR_{Status(answers[0]).name}")

    found = raw(rig, program, "thread_local")
    assert answers == [908]
    assert found.first is not None
    assert (found.first.code, found.first.call) == (908, "cuStreamEndCapture")
    assert "in the thread that began it" in found.first.rule


def test_an_unjoined_fork(rig: Rig) -> None:
    """Case 5. The driver does not say which stream it was: nodes and edges of the open capture do."""

    def program() -> None:
        rig.cu.cuMemsetD8Async(rig.x, 1, 64, rig.main)
        rig.cu.cuEventRecord(rig.event, rig.main)
        rig.cu.cuStreamWaitEvent(rig.side, rig.event, 0)  # HERE
        rig.cu.cuMemsetD8Async(rig.x, 2, 32, rig.side)
        rig.cu.cuMemsetD8Async(rig.x, 3, 64, rig.main)

    found = raw(rig, program)
    assert_at(found, program, 904, "cuStreamEndCapture")
    assert found.first is not None
    assert found.first.stream == "side"

    def joined() -> None:
        program()
        rig.cu.cuEventRecord(rig.join, rig.side)
        rig.cu.cuStreamWaitEvent(rig.main, rig.join, 0)

    assert raw(rig, joined).n_nodes == 3


def test_a_fork_that_was_joined_is_not_blamed(rig: Rig) -> None:
    """Its work lies before the last work of the capturing stream, further back than one edge."""
    third = rig.backend.create_stream("third")

    def program() -> None:
        rig.cu.cuMemsetD8Async(rig.x, 1, 64, rig.main)
        rig.cu.cuEventRecord(rig.event, rig.main)
        rig.cu.cuStreamWaitEvent(rig.side, rig.event, 0)
        rig.cu.cuMemsetD8Async(rig.x, 2, 32, rig.side)
        rig.cu.cuStreamWaitEvent(third, rig.event, 0)  # HERE
        rig.cu.cuMemsetD8Async(rig.x, 2, 32, third)
        rig.cu.cuEventRecord(rig.join, rig.side)
        rig.cu.cuStreamWaitEvent(rig.main, rig.join, 0)
        rig.cu.cuMemsetD8Async(rig.x, 3, 64, rig.main)
        rig.cu.cuMemsetD8Async(rig.x, 4, 64, rig.main)

    found = explain(lambda stream: program(), backend=rig.backend, stream=rig.main, streams=(rig.side, third))
    assert_at(found, program, 904, "cuStreamEndCapture")
    assert found.first is not None
    assert [f.stream for f in (found.first, *found.later)] == ["third", "main"]
    assert rig.works()


def test_an_event_from_outside(rig: Rig) -> None:
    """Case 1, through the backend: stream and event by name."""
    rig.backend.record(rig.event, rig.side)

    def program(backend: GpuBackend, stream: Stream) -> None:
        backend.fill(rig.x, 1, 64, stream, "L06.router")
        backend.wait(stream, rig.event)  # HERE

    found = explain(program, backend=rig.backend, stream=rig.main)
    assert_at(found, program, 905, "cuStreamWaitEvent")
    assert found.first is not None
    assert (found.first.stream, found.first.layer) == ("main", 6)
    assert "'event'" in found.first.what
    assert rig.works()


def test_the_drivers_own_lines(rig: Rig) -> None:
    def program(backend: GpuBackend, stream: Stream) -> None:
        rig.cu.log += ["first line", "second line"]
        backend.synchronize(stream)  # HERE

    rig.cu.log.append("of an earlier call")
    found = explain(program, backend=rig.backend, stream=rig.main)
    assert_at(found, program, 900, "cuStreamSynchronize")
    assert found.first is not None
    assert found.first.driver_log == "first line | second line"
    assert "driver log: " in found.first.what
    assert [f.driver_log for f in found.later] == [""] * len(found.later)


def test_garbage_is_not_collected_in_a_capture_of_ours(rig: Rig) -> None:
    """Case 7: a cycle that owns a buffer becomes garbage while a capture is open."""
    freed: list[str] = []

    class Owner:
        def __init__(self) -> None:
            self.me = self
            self.buf = rig.backend.alloc("owned", 64)

        def __del__(self) -> None:
            freed.append("in the capture" if rig.backend.live()["captures"] else "outside")
            rig.backend.free(self.buf)

    x = rig.backend.alloc("x", 64)

    def program(backend: GpuBackend, stream: Stream) -> None:
        Owner()
        _ = [[n] for n in range(3000)]  # enough new containers to start a collection
        backend.fill(x.ptr, 1, 64, stream)

    assert explain(program, backend=rig.backend, stream=rig.main).ok
    gc.collect()
    assert freed == ["outside"]


def test_garbage_that_is_collected_in_a_foreign_capture_is_named(rig: Rig) -> None:
    class Owner:
        def __init__(self) -> None:
            self.me = self
            self.buf = rig.cu.cuMemAlloc(64)[1]
            buffers.append(self.buf)

        def __del__(self) -> None:
            rig.cu.cuMemFree(self.buf)  # HERE

    buffers: list[int] = []

    def program() -> None:
        rig.cu.cuMemsetD8Async(rig.x, 1, 64, rig.main)
        gc.collect()

    Owner()
    before = gc.isenabled()
    gc.disable()
    try:
        # It became garbage before: explain collects it first, and the capture is fine.
        assert raw_without_works(rig, program).ok
        kept: list[Any] = [Owner()]

        def drops() -> None:
            kept.clear()
            gc.collect()

        found = raw_without_works(rig, drops)
    finally:
        if before:
            gc.enable()
    assert_at(found, Owner, None, "cuMemFree")
    assert rig.cu.cuMemFree(buffers[1]) == (0,)  # it was refused in the capture
    assert rig.works()


def raw_without_works(rig: Rig, program: Callable[[], object]) -> Explanation:
    return explain(lambda stream: program(), backend=rig.backend, stream=rig.main)


def test_a_driver_that_stops_answering(rig: Rig) -> None:
    """A kernel of before has failed: the first line that was told of it is named, as such."""

    def program() -> None:
        rig.cu.cuMemsetD8Async(rig.x, 1, 64, rig.main)
        rig.cu.fail["cuStreamGetCaptureInfo"] = [700]  # HERE
        rig.cu.cuMemsetD8Async(rig.x, 1, 64, rig.main)
        raise RuntimeError("CUDA error: an illegal memory access was encountered (cudaErrorIllegalAddress)")

    found = explain(lambda stream: program(), backend=rig.backend, stream=rig.main)
    assert_at(found, program, 700, "cuStreamGetCaptureInfo")
    assert found.first is not None
    assert "ran earlier broke the device context" in found.first.rule
    assert any("not cleaned up" in note for note in found.notes)


def test_a_stream_of_its_own(rig: Rig) -> None:
    before = rig.cu.host.live()
    seen: list[int] = []

    def program(stream: int) -> None:
        seen.append(stream)
        rig.cu.cuMemsetD8Async(rig.x, 1, 64, stream)

    found = explain(program, backend=rig.backend)
    assert (found.ok, found.n_nodes) == (True, 1)
    assert rig.cu.host.live() == before
    assert seen[0] not in (rig.main, rig.side)


def test_the_names_of_older_bindings(rig: Rig) -> None:
    """12.9 has the newest forms under suffixes; the plain names there return less."""

    class Older:
        CUstreamCaptureMode = rig.cu.CUstreamCaptureMode
        cuStreamGetCaptureInfo_v3 = cuGraphGetEdges_v2 = None

    from ds41rt.cu.driver_probe import DriverProbe

    asked: list[str] = []

    def call(name: str, *args: Any) -> tuple[Any, ...]:
        asked.append(name)
        return {"cuStreamGetCaptureInfo_v3": (1, 9, 5, [3], None, 1), "cuGraphGetEdges_v2": ([], [], [], 0)}[name]

    probe = DriverProbe(Older, call, rig.backend._log, {})
    assert probe.info(5).frontier == (3,)
    assert probe.unjoined(5, [6]) == []
    assert set(asked) == {"cuStreamGetCaptureInfo_v3", "cuGraphGetEdges_v2"}
