"""Kernel launches on the host backend: arrays from the declaration, spans, unused pointers, bugs in references."""

import numpy as np
import pytest
from tiny_kernels import (
    AXPY,
    BROKEN,
    GATHER,
    OFFSET,
    OPTIONAL,
    SCALE,
    SCATTER,
    WRITES_INPUT,
    download,
    random_i32,
    upload,
)

from ds41rt.cu.backend import Stream
from ds41rt.cu.host import HostBackend
from ds41rt.cu.kernel import KernelLaunch
from ds41rt.cu.result import CudaError, Status


@pytest.fixture
def backend() -> HostBackend:
    return HostBackend()


@pytest.fixture
def stream(backend: HostBackend) -> Stream:
    return backend.create_stream("main")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def test_arguments_arrive_in_order(backend: HostBackend, stream: Stream, rng: np.random.Generator) -> None:
    x, y = rng.standard_normal(33, np.float32), rng.standard_normal(33, np.float32)
    px, py = upload(backend, stream, "x", x), upload(backend, stream, "y", y)
    launch = backend.prepare(AXPY, {"n": 33, "a": 0.5, "y": py, "x": px}, "axpy")
    assert launch.args == (px, py, 0.5, 33)
    for _ in range(2):
        backend.launch(launch, stream)
    want = np.float32(0.5) * (np.float32(0.5) * y + x) + x
    assert np.array_equal(download(backend, stream, py, y), want)


def test_wrong_arguments_are_refused(backend: HostBackend) -> None:
    with pytest.raises(TypeError, match="axpy: missing arguments"):
        backend.prepare(AXPY, {"n": 33, "a": 0.5}, "axpy")
    with pytest.raises(ValueError, match="scale: a must be an integer"):
        backend.prepare(SCALE, {"n": 33, "a": 1 << 40, "x": 0}, "scale")


def test_a_launch_of_another_backend_is_refused(backend: HostBackend, stream: Stream) -> None:
    other = HostBackend()
    for launch in (other.prepare(SCALE, {"x": 256, "a": 1, "n": 1}, "theirs"), KernelLaunch(SCALE, (0, 1, 1), "bare")):
        with pytest.raises(CudaError, match="was not prepared by this backend") as info:
            backend.launch(launch, stream)
        assert info.value.status == Status.INVALID_VALUE


def test_an_unused_pointer_is_none(backend: HostBackend, stream: Stream, rng: np.random.Generator) -> None:
    x, extra = random_i32(rng, 5), random_i32(rng, 3)
    px, pextra = upload(backend, stream, "x", x), upload(backend, stream, "extra", extra)
    backend.launch(backend.prepare(OPTIONAL, {"x": px, "extra": 0, "n": 5, "m": 0}, "without"), stream)
    assert np.array_equal(download(backend, stream, px, x), x + 1)
    backend.launch(backend.prepare(OPTIONAL, {"x": px, "extra": pextra, "n": 5, "m": 3}, "with"), stream)
    assert np.array_equal(download(backend, stream, px, x), x + 1 + extra.sum())


def test_spans_are_resolved_when_the_kernel_executes(
    rng: np.random.Generator,
) -> None:
    backend = HostBackend(race_detection=False)  # the table is rewritten after the enqueue, to see when it is read
    stream = backend.create_stream("main")
    rows = [random_i32(rng, 4) for _ in range(6)]
    addrs = [upload(backend, stream, f"row{i}", row) for i, row in enumerate(rows)]
    table = backend.alloc_pinned("table", 3 * 8)
    out = backend.alloc("out", 3 * 4 * 4)
    launch = backend.prepare(GATHER, {"table": table.device_ptr, "out": out.ptr, "n": 3, "width": 4}, "gather")
    for picks in ([0, 1, 2], [5, 3, 3], [2, 4, 1]):
        backend.launch(launch, stream)
        table.array.view(np.uint64)[:] = [addrs[i] for i in picks]  # after the enqueue
        got = download(backend, stream, out.ptr, np.zeros((3, 4), np.int32))
        assert np.array_equal(got, np.stack([rows[i] for i in picks]))
    backend.launch(backend.prepare(SCATTER, {"table": table.device_ptr, "n": 3, "width": 4}, "scatter"), stream)
    for i, pick in enumerate([2, 4, 1]):
        assert np.array_equal(download(backend, stream, addrs[pick], rows[0]), np.full(4, 100 + i))


def test_a_wild_table_entry_faults_by_name(backend: HostBackend, stream: Stream, rng: np.random.Generator) -> None:
    row = upload(backend, stream, "slot 2", random_i32(rng, 4))
    table = upload(backend, stream, "table", np.array([row, row + 4], np.uint64))
    out = backend.alloc("out", 2 * 4 * 4)
    backend.launch(backend.prepare(GATHER, {"table": table, "out": out.ptr, "n": 2, "width": 4}, "L03.gather"), stream)
    with pytest.raises(CudaError, match=r"'L03.gather' .*indirect span: 16 bytes at .*offset 4 of 'slot 2'") as info:
        backend.synchronize(stream)
    assert info.value.status == Status.ILLEGAL_ADDRESS


def test_a_poisoned_table_is_no_address(backend: HostBackend, stream: Stream) -> None:
    table, out = backend.alloc("table", 8), backend.alloc("out", 16)
    backend.launch(backend.prepare(GATHER, {"table": table.ptr, "out": out.ptr, "n": 1, "width": 4}, "g"), stream)
    with pytest.raises(CudaError, match="indirect span") as info:
        backend.synchronize(stream)
    assert info.value.sticky


def test_inputs_are_read_only(backend: HostBackend, stream: Stream, rng: np.random.Generator) -> None:
    x = upload(backend, stream, "x", random_i32(rng, 4))
    backend.launch(backend.prepare(WRITES_INPUT, {"x": x, "n": 4}, "bad"), stream)
    with pytest.raises(ValueError, match="read-only"):
        backend.synchronize(stream)


def test_a_bug_in_a_reference_comes_through_and_loses_the_context(
    backend: HostBackend, stream: Stream, rng: np.random.Generator
) -> None:
    x = upload(backend, stream, "x", random_i32(rng, 4))
    backend.launch(backend.prepare(BROKEN, {"x": x, "n": 4}, "L01.broken"), stream)
    with pytest.raises(ZeroDivisionError, match="the reference has a bug") as info:
        backend.synchronize(stream)
    assert any("'L01.broken' (broken)" in note for note in info.value.__notes__)
    with pytest.raises(CudaError, match=r"ZeroDivisionError.*L01.broken") as later:
        backend.launch(backend.prepare(OFFSET, {"x": x, "b": 1, "n": 4}, "next"), stream)
    assert later.value.status == Status.LAUNCH_FAILED
