"""The address space of the host backend: allocation rules, poison, quarantine, bounds and sticky faults."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from tiny_kernels import SCALE, download, random_i32, upload

from ds41rt.cu.backend import DeviceBuffer, GpuBackend, HostBuffer
from ds41rt.cu.host import HostBackend
from ds41rt.cu.kernel import F32, U8
from ds41rt.cu.result import CudaError, OutOfDeviceMemory, Status


def test_is_a_gpu_backend() -> None:
    backend: GpuBackend = HostBackend()
    assert backend.name == "host"


def test_allocations_are_aligned_apart_and_never_reused() -> None:
    backend = HostBackend()
    seen: list[DeviceBuffer] = []
    for i in range(50):
        buf = backend.alloc(f"b{i}", 1 + 37 * i)
        assert buf.ptr % 256 == 0
        assert all(buf.ptr > old.ptr + 2 * old.nbytes for old in seen)
        seen.append(buf)
        view = backend.memory.view(buf.ptr, U8, (buf.nbytes,), False)
        assert view.ctypes.data % 256 == 0
        if i % 2:
            backend.free(buf)
    assert [b.name for b in backend.ledger()] == [f"b{i}" for i in range(0, 50, 2)]


@pytest.mark.parametrize("nbytes", [1, 2, 3, 64, 4097])
def test_fresh_and_freed_bytes_are_poison(nbytes: int) -> None:
    backend = HostBackend()
    host = backend.alloc_pinned("h", nbytes)
    fresh = host.array.copy()
    backend.free_pinned(host)
    assert not np.any(fresh[1::2] == host.array[1::2])
    for data in (fresh, host.array):
        assert np.all(np.isnan(data[: nbytes // 2 * 2].view(ml_dtypes.bfloat16).astype(np.float32)))
        words = data[: nbytes // 4 * 4]
        assert np.all(np.isnan(words.view(np.float32)))
        assert np.all(np.abs(words.view(np.int32).astype(np.int64)) > 1 << 16)
        # A quiet NaN: arithmetic on it raises no floating-point warning.
        assert np.all(np.isnan(words.view(np.float32) * np.float32(2)))


def test_zero_and_negative_sizes_are_refused() -> None:
    backend = HostBackend()
    for nbytes in (0, -1):
        for call in (backend.alloc, backend.alloc_pinned):
            with pytest.raises(CudaError, match=f"'ring' of {nbytes} bytes") as info:
                call("ring", nbytes)
            assert info.value.status == Status.INVALID_VALUE
    assert backend.live()["buffers"] == 0


def test_out_of_memory_names_the_buffer_and_leaves_the_backend_usable() -> None:
    backend = HostBackend(memory_nbytes=1000, pinned_nbytes=500)
    first = backend.alloc("first", 600)
    assert backend.memory_info() == (400, 1000)
    with pytest.raises(OutOfDeviceMemory, match="'second' needs 401 bytes, 400 are free"):
        backend.alloc("second", 401)
    backend.alloc("second", 400)
    backend.free(first)
    assert backend.memory_info() == (600, 1000)
    with pytest.raises(MemoryError, match="pinned buffer 'ring' needs 501 bytes, 500 are free"):
        backend.alloc_pinned("ring", 501)
    backend.free_pinned(backend.alloc_pinned("ring", 500))
    backend.alloc_pinned("ring", 500)


def test_freeing_what_is_not_there_is_refused_by_name() -> None:
    backend, other = HostBackend(), HostBackend()
    buf, host = backend.alloc("kv", 64), backend.alloc_pinned("ring", 64)
    backend.free(buf)
    backend.free_pinned(host)
    with pytest.raises(CudaError, match=r"'kv' .* was freed already") as info:
        backend.free(buf)
    assert info.value.status == Status.INVALID_VALUE
    with pytest.raises(CudaError, match=r"'ring' .* was freed already"):
        backend.free_pinned(host)
    foreign = other.alloc("foreign", 96)
    live = backend.alloc("live", 64)
    for wrong in (foreign, DeviceBuffer("live", live.ptr + 1, 63), DeviceBuffer("live", live.ptr, 63)):
        with pytest.raises(CudaError, match="was not allocated by this backend"):
            backend.free(wrong)
    with pytest.raises(CudaError, match="was not allocated by this backend"):
        backend.free_pinned(HostBuffer.pageable("mine", np.ones(4, np.uint8)))
    backend.free(live)


def test_views_are_cached_until_a_free_and_respect_access() -> None:
    backend = HostBackend()
    a, b = backend.alloc("a", 64), backend.alloc("b", 64)
    view = backend.memory.view(a.ptr + 16, F32, (3, 4), False)
    assert view.shape == (3, 4)
    assert view.dtype == F32
    assert not view.flags.writeable
    assert backend.memory.view(a.ptr + 16, F32, (3, 4), False) is view
    assert backend.memory.view(a.ptr + 16, F32, (3, 4), True).flags.writeable
    backend.alloc("c", 64)
    assert backend.memory.view(a.ptr + 16, F32, (3, 4), False) is view
    epoch = backend.memory.epoch
    backend.free(b)
    assert backend.memory.epoch != epoch
    assert backend.memory.view(a.ptr + 16, F32, (3, 4), False) is not view
    assert backend.memory.view(0, F32, (0, 4), True).shape == (0, 4)
    with pytest.raises(ValueError, match="negative dimension"):
        backend.memory.view(a.ptr, F32, (-1, -4), True)


def test_one_element_too_far_fails_when_it_executes_and_sticks() -> None:
    backend = HostBackend()
    stream = backend.create_stream("main")
    data = random_i32(np.random.default_rng(0), 16)
    ptr = upload(backend, stream, "weights", data)
    backend.alloc("neighbour", 64)
    launch = backend.prepare(SCALE, {"x": ptr + 4, "a": 3, "n": 16}, "L07.scale")
    backend.launch(launch, stream)
    event = backend.create_event("e")
    with pytest.raises(CudaError) as first:
        backend.synchronize(stream)
    assert (first.value.status, first.value.call, first.value.sticky) == (700, "cuStreamSynchronize", True)
    for part in ("'L07.scale'", "(scale)", "'x'", hex(ptr + 4), "64 bytes", "'weights'", "offset 4"):
        assert part in str(first.value)
    for call in (
        lambda: backend.alloc("more", 1),
        lambda: backend.synchronize(stream),
        lambda: backend.launch(launch, stream),
        lambda: backend.destroy_event(event),
        lambda: backend.abort_capture(stream),
        backend.memory_info,
    ):
        with pytest.raises(CudaError, match=r"L07.scale") as later:
            call()
        assert later.value.status == Status.ILLEGAL_ADDRESS
    assert backend.live()["buffers"] == 2
    backend.close()
    assert not any(backend.live().values())


@pytest.mark.parametrize(
    ("delta", "place"), [(-4, "4 bytes before the start of 'w'"), (64, "offset 64 of 'w'"), (60, "offset 60 of 'w'")]
)
def test_the_fault_places_the_address(delta: int, place: str) -> None:
    backend = HostBackend()
    stream = backend.create_stream("main")
    buf = backend.alloc("w", 64)
    launch = backend.prepare(SCALE, {"x": buf.ptr + delta, "a": 3, "n": 2}, "late")
    calls: list[tuple[Callable[[], None], str]] = [
        (lambda: backend.fill(buf.ptr + delta, 1, 8, stream, label="clear"), "fill 'clear' destination"),
        (lambda: backend.copy_d2d(buf.ptr, buf.ptr + delta, 8, stream, "move"), r"copy 'move' \(d2d\) source"),
        (lambda: backend.copy_d2d(buf.ptr + delta, buf.ptr, 8, stream, "move"), r"copy 'move' \(d2d\) destination"),
    ]
    for call, what in calls:
        with pytest.raises(CudaError, match=f"{what}: 8 bytes at .*{place}") as refused:
            call()
        assert refused.value.status == Status.INVALID_VALUE
    backend.synchronize(stream)  # nothing was enqueued, nothing is lost
    backend.launch(launch, stream)
    with pytest.raises(CudaError, match=f"'late'.*8 bytes at .*{place}") as info:
        backend.synchronize(stream)
    assert info.value.status == Status.ILLEGAL_ADDRESS


def test_null_and_misaligned_pointers() -> None:
    for addr_of, status, text in (
        (lambda ptr: 0, Status.ILLEGAL_ADDRESS, "null pointer"),
        (lambda ptr: ptr + 2, Status.MISALIGNED_ADDRESS, "needs a multiple of 4"),
    ):
        backend = HostBackend()
        stream = backend.create_stream("main")
        ptr = backend.alloc("w", 64).ptr
        backend.launch(backend.prepare(SCALE, {"x": addr_of(ptr), "a": 3, "n": 2}, "k"), stream)
        with pytest.raises(CudaError, match=text) as info:
            backend.synchronize(stream)
        assert info.value.status == status
        assert info.value.sticky


def test_a_queued_kernel_over_a_freed_buffer_faults() -> None:
    backend = HostBackend(race_detection=False)
    stream = backend.create_stream("main")
    buf = backend.alloc("expert 3", 64)
    launch = backend.prepare(SCALE, {"x": buf.ptr, "a": 3, "n": 16}, "ffn")
    backend.launch(launch, stream)
    backend.synchronize(stream)  # the launch now holds a view of the buffer
    backend.launch(launch, stream)
    backend.free(buf)
    with pytest.raises(CudaError, match=r"'ffn'.*'expert 3'.*which was freed"):
        backend.synchronize(stream)


def test_a_queued_copy_from_a_freed_pinned_buffer_faults() -> None:
    backend = HostBackend(race_detection=False)
    stream = backend.create_stream("main")
    buf, host = backend.alloc("d", 64), backend.alloc_pinned("ring", 64)
    backend.copy_h2d(buf.ptr, host, 64, stream, label="fetch")
    backend.free_pinned(host)
    with pytest.raises(CudaError, match=r"copy 'fetch' .* source: .*'ring'.*which was freed"):
        backend.synchronize(stream)
    second = HostBackend()
    stream = second.create_stream("main")
    with pytest.raises(CudaError, match="'ring' is not allocated by this backend") as info:
        second.copy_h2d(0, host, 64, stream)
    assert info.value.status == Status.INVALID_VALUE


def test_kernels_read_pinned_memory_in_place() -> None:
    backend = HostBackend()
    stream = backend.create_stream("main")
    host = backend.alloc_pinned("h", 64)
    data = random_i32(np.random.default_rng(1), 16)
    host.array.view(np.int32)[:] = data
    assert host.ptr == host.array.ctypes.data
    backend.launch(backend.prepare(SCALE, {"x": host.device_ptr, "a": 3, "n": 16}, "k"), stream)
    backend.synchronize(stream)
    assert np.array_equal(host.array.view(np.int32), data * 3)
    assert np.array_equal(download(backend, stream, host.device_ptr, data), data * 3)


def test_close_frees_everything_and_is_idempotent() -> None:
    backend = HostBackend()
    stream, event = backend.create_stream("s"), backend.create_event("e")
    backend.alloc("a", 64)
    host = backend.alloc_pinned("p", 64)
    backend.fill(host.device_ptr, 5, 64, stream)
    backend.begin_capture(stream)
    assert backend.live() == {"buffers": 2, "streams": 1, "events": 1, "graphs": 0, "graph_execs": 0, "captures": 1}
    backend.close()
    backend.close()
    assert not any(backend.live().values())
    assert not list(backend.ledger())
    assert not np.any(host.array == 5)
    for call in (
        lambda: backend.alloc("a", 1),
        lambda: backend.synchronize(stream),
        lambda: backend.query_event(event),
    ):
        with pytest.raises(CudaError, match="the backend was closed") as info:
            call()
        assert info.value.status == Status.DEINITIALIZED
