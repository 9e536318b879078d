"""Memory, streams, events, errors and the end of the driver backend, on the fake driver."""

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_driver import FakeDriver, open_fake, write_ptx
from tiny_kernels import random_i32

from ds41rt.cu.backend import DeviceBuffer, Event, HostBuffer, Stream
from ds41rt.cu.driver import DriverBackend
from ds41rt.cu.result import CudaError, OutOfDeviceMemory, Status
from ds41rt.errors import UnsupportedError

Opened = tuple[DriverBackend, FakeDriver]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    backend, cu = open_fake(tmp_path, memory_nbytes=1 << 20, pinned_nbytes=1 << 20)
    yield backend, cu
    backend.close()


def _fails(status: Status, call: Callable[[], object], *parts: str) -> CudaError:
    with pytest.raises(CudaError) as info:
        call()
    assert info.value.status == status
    for part in parts:
        assert part in str(info.value)
    return info.value


def test_bytes_go_there_and_back(opened: Opened) -> None:
    backend, _ = opened
    stream = backend.create_stream("main")
    data = random_i32(np.random.default_rng(0), 64)
    buf, other = backend.alloc("a", 256), backend.alloc("b", 256)
    host = backend.alloc_pinned("h", 512)
    host.array[:256] = data.view(np.uint8)
    host.array[256:] = 0xAB
    backend.copy_h2d(buf.ptr, host, 192, stream, src_off=64, label="up")
    backend.copy_d2d(other.ptr, buf.ptr, 192, stream, "across")
    backend.fill(other.ptr + 188, 0x5C, 4, stream, "tail")
    backend.copy_d2h(host, other.ptr, 192, stream, dst_off=256, label="down")
    backend.synchronize(stream)
    assert np.array_equal(host.array[256:444], data.view(np.uint8)[64:252])
    assert host.array[444:448].tolist() == [0x5C] * 4
    assert host.array[448:].tolist() == [0xAB] * 64
    out = np.full_like(data, 77)
    backend.copy_d2h(HostBuffer.pageable("out", out), buf.ptr, 192, stream)
    backend.synchronize(stream)
    assert np.array_equal(out[:48], data[16:])
    assert np.all(out[48:] == 77)


def test_allocations_are_named_and_listed(opened: Opened) -> None:
    backend, cu = opened
    buf, host = backend.alloc("kv", 100), backend.alloc_pinned("ring", 200)
    assert ("cuMemAlloc", 100) in cu.calls
    assert ("cuMemHostAlloc", 200, 3) in cu.calls  # portable, mapped
    assert (host.pinned, host.nbytes, host.array.nbytes, host.ptr) == (True, 200, 200, host.array.ctypes.data)
    assert host.device_ptr == cu._buffers[host.ptr].device_ptr
    assert backend.ledger() == (buf, host)
    assert backend.memory_info() == ((1 << 20) - 100, 1 << 20)
    backend.free(buf)
    backend.free_pinned(host)
    assert backend.ledger() == ()
    assert cu.host.live()["buffers"] == 0
    for again in (lambda: backend.free(buf), lambda: backend.free_pinned(host)):
        _fails(Status.INVALID_VALUE, again, "was freed already")
    live = backend.alloc("live", 64)
    for wrong in (DeviceBuffer("live", live.ptr, 63), DeviceBuffer("other", live.ptr, 64)):
        _fails(Status.INVALID_VALUE, lambda wrong=wrong: backend.free(wrong), "not allocated by this backend")  # type: ignore[misc]  # a loop variable bound early
    assert backend.ledger() == (live,)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_sizes_below_one_are_refused(opened: Opened, nbytes: int) -> None:
    backend, cu = opened
    for call in (backend.alloc, backend.alloc_pinned):
        with pytest.raises(CudaError, match=f"'ring' of {nbytes} bytes") as info:
            call("ring", nbytes)
        assert info.value.status == Status.INVALID_VALUE
    assert not {"cuMemAlloc", "cuMemHostAlloc"} & set(cu.names())


def test_out_of_memory_names_buffer_size_and_what_is_free(opened: Opened) -> None:
    backend, cu = opened
    backend.alloc("first", 1000)
    cu.log.append("older line")
    with pytest.raises(OutOfDeviceMemory) as info:
        backend.alloc("arena", 1 << 20)
    error: CudaError = info.value
    for part in ("cuMemAlloc", "device buffer 'arena' needs 1048576 bytes", "1047576 bytes", "free of 1048576"):
        assert part in str(error)
    assert "driver log: older line" in str(error)
    with pytest.raises(MemoryError, match="pinned buffer 'ring' needs 2000000 bytes") as second:
        backend.alloc_pinned("ring", 2_000_000)
    assert "older line" not in str(second.value)
    backend.free_pinned(backend.alloc_pinned("ring", 1000))  # the next call is clean
    assert backend.live()["buffers"] == 1


def test_a_pinned_buffer_that_cannot_be_mapped_is_freed(opened: Opened) -> None:
    backend, cu = opened
    cu.fail["cuMemHostGetDevicePointer"] = [801]
    _fails(Status.NOT_SUPPORTED, lambda: backend.alloc_pinned("ring", 64), "'ring'")
    assert (cu.host.live()["buffers"], backend.live()["buffers"]) == (0, 0)


def test_copies_that_leave_their_host_buffer_are_refused(opened: Opened) -> None:
    backend, cu = opened
    stream = backend.create_stream("main")
    buf, host = backend.alloc("d", 64), backend.alloc_pinned("ring", 64)
    for nbytes, off in ((65, 0), (64, 1), (-1, 0), (1, -1)):
        up = lambda n=nbytes, o=off: backend.copy_h2d(buf.ptr, host, n, stream, o, "up")  # noqa: E731
        down = lambda n=nbytes, o=off: backend.copy_d2h(host, buf.ptr, n, stream, o, "down")  # noqa: E731
        _fails(Status.INVALID_VALUE, up, "copy 'up'", "'ring' of 64")
        _fails(Status.INVALID_VALUE, down, "copy 'down'", "'ring' of 64")
    _fails(Status.INVALID_VALUE, lambda: backend.copy_d2d(buf.ptr, buf.ptr, -1, stream, "x"), "copy 'x'")
    _fails(Status.INVALID_VALUE, lambda: backend.fill(buf.ptr, 256, 1, stream, "x"), "0..255, is 256")
    _fails(Status.INVALID_VALUE, lambda: backend.fill(buf.ptr, 0, -1, stream, "x"), "-1 bytes")
    fixed = np.arange(4)
    fixed.flags.writeable = False
    read_only = HostBuffer.pageable("fixed", fixed)
    _fails(Status.INVALID_VALUE, lambda: backend.copy_d2h(read_only, buf.ptr, 8, stream), "'fixed' is read-only")
    backend.free_pinned(host)
    _fails(Status.INVALID_VALUE, lambda: backend.copy_h2d(buf.ptr, host, 8, stream), "'ring'", "was freed")
    assert not [n for n in cu.names() if n.startswith(("cuMemcpy", "cuMemset"))]


def test_pageable_memory_lives_until_its_copy_is_done(opened: Opened) -> None:
    backend, _ = opened
    stream = backend.create_stream("main")
    buf = backend.alloc("d", 4096)
    data = np.random.default_rng(1).integers(0, 256, 4096, dtype=np.uint8)
    want = data.copy()
    source = HostBuffer.pageable("page", data)
    backend.copy_h2d(buf.ptr, source, 4096, stream)  # the fake defers it
    del source, data
    gc.collect()
    filler = [np.full(4096, i, np.uint8) for i in range(64)]
    out = np.zeros(4096, np.uint8)
    backend.copy_d2h(HostBuffer.pageable("out", out), buf.ptr, 4096, stream)
    backend.synchronize(stream)
    assert np.array_equal(out, want)
    assert backend._streams[stream].pageable == []
    assert len(filler) == 64


def test_streams_and_events(opened: Opened) -> None:
    backend, cu = opened
    main, side = backend.create_stream("main"), backend.create_stream("side")
    event = backend.create_event("done")
    assert cu.calls[-1] == ("cuEventCreate", 2)  # no timing
    buf, host = backend.alloc("d", 64), backend.alloc_pinned("h", 64)
    backend.fill(buf.ptr, 9, 64, main)
    backend.record(event, main)
    backend.wait(side, event)
    backend.copy_d2h(host, buf.ptr, 64, side)
    assert not backend.query_event(event)
    backend.synchronize_event(event)
    assert backend.query_event(event)
    backend.synchronize(side)
    assert host.array.tolist() == [9] * 64
    first, last = backend.create_event("t0", timing=True), backend.create_event("t1", timing=True)
    assert cu.calls[-1] == ("cuEventCreate", 0)
    for e in (first, last):
        backend.record(e, main)
    with pytest.raises(CudaError, match=r"cuEventElapsedTime: NOT_READY \(600\): events 't0' and 't1'"):
        backend.elapsed_us(first, last)
    backend.synchronize(main)
    assert backend.elapsed_us(first, last) == pytest.approx(cu.host.elapsed_us(first, last))
    assert backend.elapsed_us(last, first) == -backend.elapsed_us(first, last) <= 0
    cu.unloadable.add("cuEventElapsedTime")
    with pytest.raises(UnsupportedError, match=r"CUDA 12\.8"):
        backend.elapsed_us(first, last)
    for e in (event, first, last):
        backend.destroy_event(e)
    for s in (main, side):
        backend.destroy_stream(s)
    assert backend.live() == {"buffers": 2, "streams": 0, "events": 0, "graphs": 0, "graph_execs": 0, "captures": 0}
    for call in (
        lambda: backend.synchronize(main),
        lambda: backend.destroy_stream(Stream(12345)),
        lambda: backend.query_event(event),
        lambda: backend.record(event, side),
        lambda: backend.destroy_event(Event(99)),
    ):
        _fails(Status.INVALID_HANDLE, call, "was destroyed, or never created here")


def test_failed_destroys_keep_the_handle(opened: Opened) -> None:
    backend, cu = opened
    stream, event, buf = backend.create_stream("main"), backend.create_event("e"), backend.alloc("a", 8)
    destroys: tuple[tuple[str, Callable[[], None]], ...] = (
        ("cuStreamDestroy", lambda: backend.destroy_stream(stream)),
        ("cuEventDestroy", lambda: backend.destroy_event(event)),
        ("cuMemFree", lambda: backend.free(buf)),
    )
    for call, destroy in destroys:
        cu.fail[call] = [400]
        _fails(Status.INVALID_HANDLE, destroy, call)
        destroy()
    assert not any(backend.live().values())


@pytest.mark.parametrize("code", [700, 716, 719, 715, 999])
def test_the_first_error_that_loses_the_context_is_reported_by_every_later_call(opened: Opened, code: int) -> None:
    backend, cu = opened
    stream, event = backend.create_stream("main"), backend.create_event("e")
    buf, host = backend.alloc("a", 64), backend.alloc_pinned("h", 64)
    cu.fail["cuStreamSynchronize"] = [code]
    cu.log.append("[CUDA] thread 7 read address 0")
    with pytest.raises(CudaError, match=r"stream 'main'.*driver log: .*thread 7 read address 0") as first:
        backend.synchronize(stream)
    assert first.value.sticky
    before = len(cu.calls)
    later: list[Callable[[], object]] = [
        lambda: backend.synchronize(stream),
        lambda: backend.alloc("more", 64),
        lambda: backend.free(buf),
        lambda: backend.copy_h2d(buf.ptr, host, 8, stream),
        lambda: backend.record(event, stream),
        lambda: backend.begin_capture(stream),
        lambda: backend.abort_capture(stream),
        lambda: backend.create_stream("other"),
        backend.memory_info,
    ]
    for call in later:
        error = _fails(first.value.status, call, "an earlier error lost the context", "thread 7")
        assert error.call != "cuStreamSynchronize" or call is later[0]
    assert len(cu.calls) == before  # the driver is not asked again
    backend.close()
    assert not any(backend.live().values())
    assert (cu.host.live()["buffers"], cu.retained) == (0, 0)


def test_an_ordinary_error_loses_nothing(opened: Opened) -> None:
    backend, cu = opened
    stream, buf = backend.create_stream("main"), backend.alloc("a", 64)
    for code, status in ((1, Status.INVALID_VALUE), (304, Status.UNKNOWN)):
        cu.fail["cuMemsetD8Async"] = [code]
        error = _fails(status, lambda: backend.fill(buf.ptr, 1, 64, stream, "clear"), "'main'", "fill 'clear'")
        assert ("304 CUDA_ERROR_STRANGE: what the driver says" in str(error)) == (code == 304)
    backend.fill(buf.ptr, 1, 64, stream)
    backend.synchronize(stream)


def test_other_threads_get_the_context_too(opened: Opened) -> None:
    backend, cu = opened
    seen: list[object] = []

    def work() -> None:
        seen.append(backend.alloc("from a thread", 64).name)
        seen.append(backend.memory_info()[1])

    for _ in range(2):  # a new thread may get the ident of an old one
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == ["from a thread", 1 << 20] * 2
    assert cu.names().count("cuCtxSetCurrent") == 3


def test_two_backends_in_one_thread_take_turns(tmp_path: Path) -> None:
    cu = FakeDriver(devices=2)
    folder = write_ptx(tmp_path, [])
    a, b = DriverBackend(0, bindings=cu, ptx_folder=folder), DriverBackend(1, bindings=cu, ptx_folder=folder)
    start = cu.names().count("cuCtxSetCurrent")
    for _ in range(3):
        a.memory_info()
        a.memory_info()
        b.memory_info()
    assert cu.names().count("cuCtxSetCurrent") == start + 6
    a.close()
    assert cu.retained == 1
    assert cu.calls[-1][0] == "cuDevicePrimaryCtxGetState"  # the context lives: it stays current
    b.memory_info()
    b.close()
    assert cu.retained == 0


def test_close_gives_everything_back_in_order_and_only_once(tmp_path: Path) -> None:
    backend, cu = open_fake(tmp_path)
    stream = backend.create_stream("s")
    backend.create_event("e")
    backend.alloc("a", 64)
    backend.alloc_pinned("p", 64)
    backend.begin_capture(stream)
    graph = backend.end_capture(stream)
    backend.instantiate(graph)
    backend.begin_capture(stream)
    start = len(cu.calls)
    backend.close()
    assert cu.names()[start:] == [
        "cuCtxSetCurrent", "cuStreamEndCapture", "cuGraphDestroy", "cuCtxSynchronize", "cuGraphExecDestroy",
        "cuGraphDestroy", "cuEventDestroy", "cuStreamDestroy", "cuMemFreeHost", "cuMemFree",
        "cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxGetState", "cuCtxSetCurrent",
    ]  # fmt: skip
    assert not any(backend.live().values())
    assert not any(cu.host.live().values())
    backend.close()
    assert len(cu.calls) == start + 13
    _fails(Status.DEINITIALIZED, lambda: backend.alloc("a", 1), "the backend was closed")
    _fails(Status.DEINITIALIZED, lambda: backend.synchronize(stream), "the backend was closed")


def test_fifty_backends_leave_nothing(tmp_path: Path) -> None:
    cu = FakeDriver()
    folder = write_ptx(tmp_path, [])
    for _ in range(50):
        backend = DriverBackend(bindings=cu, ptx_folder=folder)
        backend.alloc("a", 1 << 20)
        backend.alloc_pinned("p", 1 << 10)
        backend.create_stream("s")
        backend.close()
    assert cu.retained == 0
    assert not any(cu.host.live().values())


def test_no_finaliser_calls_the_driver(tmp_path: Path) -> None:
    backend, cu = open_fake(tmp_path)
    backend.alloc("a", 64)
    backend.create_stream("s")
    start = len(cu.calls)
    del backend
    gc.collect()
    assert len(cu.calls) == start
