"""Fault injection of the host backend: failing calls, memory that runs out, streams that lag."""

from collections.abc import Callable

import numpy as np
import pytest
from tiny_kernels import SCALE

from ds41rt.cu.backend import CaptureStatus, HostBuffer
from ds41rt.cu.host import HostBackend
from ds41rt.cu.host.faults import CALLS
from ds41rt.cu.result import CudaError, OutOfDeviceMemory, Status
from ds41rt.errors import InputError


def test_the_nth_call_fails_once_and_has_no_effect() -> None:
    backend = HostBackend()
    backend.faults.fail(3, Status.NOT_SUPPORTED)
    stream = backend.create_stream("s")
    buf = backend.alloc("b", 4)
    with pytest.raises(CudaError, match=r"cuMemAlloc: NOT_SUPPORTED \(801\): planted") as info:
        backend.alloc("c", 4)
    assert not info.value.sticky
    assert backend.faults.fired == ["cuMemAlloc"]
    assert [b.name for b in backend.ledger()] == ["b"]
    backend.fill(buf.ptr, 1, 4, stream)
    backend.synchronize(stream)
    for _ in range(5):
        backend.memory_info()
    assert backend.faults.fired == ["cuMemAlloc"]


def test_calls_of_one_method_are_counted_alone() -> None:
    backend = HostBackend()
    stream, pinned = backend.create_stream("s"), backend.alloc_pinned("p", 4)
    pinned.array[:] = 0
    backend.faults.fail(2, Status.LAUNCH_OUT_OF_RESOURCES, "fill")
    backend.faults.fail(1, Status.INVALID_VALUE, "record")
    backend.fill(pinned.device_ptr, 1, 1, stream)
    with pytest.raises(CudaError, match="cuMemsetD8Async: LAUNCH_OUT_OF_RESOURCES"):
        backend.fill(pinned.device_ptr + 1, 1, 1, stream)
    backend.fill(pinned.device_ptr + 2, 1, 1, stream)
    with pytest.raises(CudaError, match="cuEventRecord"):
        backend.record(backend.create_event("e"), stream)
    backend.synchronize(stream)
    assert pinned.array.tolist() == [1, 0, 1, 0]
    assert backend.faults.fired == ["cuMemsetD8Async", "cuEventRecord"]


def _everything(backend: HostBackend) -> dict[str, Callable[[], object]]:
    """One call of every method that makes a driver call, each of them legal."""
    stream, other, event = backend.create_stream("s"), backend.create_stream("t"), backend.create_event("e")
    buf, pinned = backend.alloc("b", 64), backend.alloc_pinned("p", 64)
    pinned.array[:] = 3
    spare, spare_pinned = backend.alloc("spare", 64), backend.alloc_pinned("spare pinned", 64)
    launch = backend.prepare(SCALE, {"x": buf.ptr, "a": 3, "n": 16}, "k")
    backend.begin_capture(other)
    graph = backend.end_capture(other)
    graph_exec = backend.instantiate(graph)
    backend.begin_capture(other)
    dead_stream, dead_event = backend.create_stream("dead"), backend.create_event("dead")
    timed = backend.create_event("timed", timing=True)
    backend.record(timed, stream)
    backend.synchronize_event(timed)
    return {
        "alloc": lambda: backend.alloc("x", 1),
        "free": lambda: backend.free(spare),
        "alloc_pinned": lambda: backend.alloc_pinned("x", 1),
        "free_pinned": lambda: backend.free_pinned(spare_pinned),
        "memory_info": backend.memory_info,
        "create_stream": lambda: backend.create_stream("x"),
        "destroy_stream": lambda: backend.destroy_stream(dead_stream),
        "synchronize": lambda: backend.synchronize(stream),
        "create_event": lambda: backend.create_event("x"),
        "destroy_event": lambda: backend.destroy_event(dead_event),
        "record": lambda: backend.record(event, stream),
        "wait": lambda: backend.wait(stream, event),
        "query_event": lambda: backend.query_event(event),
        "synchronize_event": lambda: backend.synchronize_event(event),
        "elapsed_us": lambda: backend.elapsed_us(timed, timed),
        "copy_h2d": lambda: backend.copy_h2d(buf.ptr, pinned, 4, stream),
        "copy_d2h": lambda: backend.copy_d2h(pinned, buf.ptr, 4, stream),
        "copy_d2d": lambda: backend.copy_d2d(buf.ptr, buf.ptr + 32, 4, stream),
        "fill": lambda: backend.fill(buf.ptr, 1, 4, stream),
        "prepare": lambda: backend.prepare(SCALE, {"x": buf.ptr, "a": 3, "n": 16}, "k"),
        "launch": lambda: backend.launch(launch, stream),
        "begin_capture": lambda: backend.begin_capture(stream),
        "capture_status": lambda: backend.capture_status(stream),
        "end_capture": lambda: backend.end_capture(other),
        "instantiate": lambda: backend.instantiate(graph),
        "launch_graph": lambda: backend.launch_graph(graph_exec, stream),
        "destroy_graph": lambda: backend.destroy_graph(graph),
        "destroy_exec": lambda: backend.destroy_exec(graph_exec),
    }


@pytest.mark.parametrize("method", CALLS)
def test_every_method_can_fail_and_works_the_second_time(method: str) -> None:
    backend = HostBackend()
    calls = _everything(backend)
    assert calls.keys() == CALLS.keys()
    before = backend.live()
    backend.faults.fail(1, Status.NOT_PERMITTED, method)
    for other in ("memory_info", "capture_status"):
        if other != method:
            calls[other]()
    with pytest.raises(CudaError) as info:
        calls[method]()
    assert (info.value.status, info.value.call) == (Status.NOT_PERMITTED, CALLS[method])
    assert backend.live() == before
    calls[method]()
    backend.close()


def test_a_sticky_status_loses_the_context() -> None:
    backend = HostBackend()
    stream = backend.create_stream("s")
    backend.faults.fail(1, Status.ILLEGAL_ADDRESS, "synchronize")
    with pytest.raises(CudaError, match="planted"):
        backend.synchronize(stream)
    with pytest.raises(CudaError, match="an earlier error lost the context: cuStreamSynchronize") as info:
        backend.memory_info()
    assert info.value.sticky
    backend.close()
    assert not any(backend.live().values())


def test_memory_runs_out_at_the_kth_allocation() -> None:
    backend = HostBackend()
    backend.faults.out_of_memory(3)
    backend.alloc("a", 4)
    backend.memory_info()
    backend.alloc_pinned("b", 4)
    with pytest.raises(OutOfDeviceMemory, match="cuMemHostAlloc"):
        backend.alloc_pinned("c", 4)
    backend.alloc("d", 4)
    assert [b.name for b in backend.ledger()] == ["a", "b", "d"]


def test_bad_plans_are_refused_and_clear_drops_the_rest() -> None:
    backend = HostBackend()
    plans: list[tuple[Callable[[], None], str]] = [
        (lambda: backend.faults.fail(0, Status.UNKNOWN), "call 1 or later, not at 0"),
        (lambda: backend.faults.out_of_memory(-1), "not at -1"),
        (lambda: backend.faults.fail(1, Status.SUCCESS), "no fault"),
        (lambda: backend.faults.fail(1, Status.UNKNOWN, "lauch"), "'lauch' makes no driver call"),
    ]
    for plan, match in plans:
        with pytest.raises(InputError, match=match):
            plan()
    backend.faults.fail(1, Status.UNKNOWN)
    backend.faults.clear()
    backend.memory_info()


def test_a_failed_end_leaves_the_capture_open() -> None:
    backend = HostBackend()
    stream = backend.create_stream("s")
    backend.begin_capture(stream)
    backend.faults.fail(1, Status.OUT_OF_MEMORY, "end_capture")
    with pytest.raises(OutOfDeviceMemory):
        backend.end_capture(stream)
    assert backend.capture_status(stream) is CaptureStatus.ACTIVE
    backend.abort_capture(stream)


@pytest.mark.parametrize("schedule", ["lazy", "eager", *(f"random:{seed}" for seed in range(6))])
@pytest.mark.parametrize("early", [True, False])
def test_a_slow_stream_runs_only_for_a_wait(schedule: str, early: bool) -> None:
    backend = HostBackend(schedule)
    if early:
        backend.faults.slow_stream("slow")
    slow, quick = backend.create_stream("slow"), backend.create_stream("quick")
    backend.faults.slow_stream("slow")
    flags = np.zeros(4, np.uint8)
    page = HostBuffer.pageable("flags", flags)
    one = backend.alloc("one", 1)
    backend.fill(one.ptr, 1, 1, quick)
    backend.synchronize(quick)
    event = backend.create_event("e")
    backend.copy_d2h(page, one.ptr, 1, slow, 0)
    backend.record(event, slow)
    for i in range(20):
        backend.copy_d2h(page, one.ptr, 1, quick, 1)
        if i % 5 == 0:
            backend.synchronize(quick)
    assert flags.tolist() == [0, 1, 0, 0]
    backend.copy_d2h(page, one.ptr, 1, slow, 2)
    backend.wait(quick, event)
    backend.copy_d2h(page, one.ptr, 1, quick, 3)
    backend.synchronize(quick)
    assert flags.tolist()[:2] == [1, 1]
    assert flags[3] == 1
    assert flags[2] == 0
    backend.synchronize(slow)
    assert flags[2] == 1


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random:1"])
def test_polling_a_slow_stream_comes_to_an_end(schedule: str) -> None:
    """To be asked for is to be waited for."""
    backend = HostBackend(schedule)
    slow = backend.create_stream("slow")
    backend.faults.slow_stream("slow")
    one = backend.alloc("one", 1)
    event = backend.create_event("e")
    for _ in range(3):
        backend.fill(one.ptr, 1, 1, slow)
    backend.record(event, slow)
    assert [backend.query_event(event) for _ in range(4)] == [False, False, False, True]


def test_slow_streams_recover() -> None:
    backend = HostBackend("eager")
    slow = backend.create_stream("slow")
    backend.faults.slow_stream("slow")
    pinned = backend.alloc_pinned("p", 1)
    backend.faults.clear()
    backend.fill(pinned.device_ptr, 9, 1, slow)
    assert np.asarray(pinned.array)[0] == 9
