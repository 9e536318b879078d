"""Streams, events and schedules of the host backend."""

import gc
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from tiny_kernels import AXPY, OFFSET, SCALE, SCHEDULES, download, random_i32, upload

from ds41rt.cu.backend import Event, HostBuffer, Stream
from ds41rt.cu.host import HostBackend
from ds41rt.cu.kernel import KernelSpec
from ds41rt.cu.result import CudaError, Status
from ds41rt.errors import InputError


@pytest.mark.parametrize("text", ["", "Lazy", "random", "random:", "random:-1", "random:x", "eager:1"])
def test_unknown_schedules_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="use lazy, eager or random:SEED"):
        HostBackend(text)


def test_lazy_runs_only_what_a_wait_depends_on() -> None:
    backend = HostBackend(race_detection=False)
    a, b = backend.create_stream("a"), backend.create_stream("b")
    pinned = backend.alloc_pinned("flags", 4)
    pinned.array[:] = 0
    done = backend.create_event("done")
    backend.fill(pinned.device_ptr, 1, 1, a)
    backend.record(done, a)
    backend.fill(pinned.device_ptr + 1, 1, 1, a)
    backend.fill(pinned.device_ptr + 2, 1, 1, b)
    backend.wait(b, done)
    backend.fill(pinned.device_ptr + 3, 1, 1, b)
    assert pinned.array.tolist() == [0, 0, 0, 0]
    backend.synchronize_event(done)
    assert pinned.array.tolist() == [1, 0, 0, 0]
    backend.synchronize(b)
    assert pinned.array.tolist() == [1, 0, 1, 1]
    backend.synchronize(a)
    assert pinned.array.tolist() == [1, 1, 1, 1]


def test_eager_runs_at_the_enqueue() -> None:
    backend = HostBackend("eager", race_detection=False)
    stream = backend.create_stream("a")
    pinned = backend.alloc_pinned("flags", 4)
    backend.fill(pinned.device_ptr, 9, 4, stream)
    assert pinned.array.tolist() == [9] * 4
    event = backend.create_event("e")
    backend.record(event, stream)
    assert backend.query_event(event)


@pytest.mark.parametrize("pinned", [True, False])
def test_copies_read_their_source_when_they_execute(pinned: bool) -> None:
    backend = HostBackend(race_detection=False)
    stream = backend.create_stream("a")
    rng = np.random.default_rng(2)
    source = backend.alloc_pinned("src", 64) if pinned else HostBuffer.pageable("src", np.ones(64, np.uint8))
    buf = backend.alloc("dst", 64)
    backend.copy_h2d(buf.ptr, source, 32, stream, src_off=16, label="up")
    data = rng.integers(0, 256, 64, dtype=np.uint8)
    source.array[:] = data
    got = download(backend, stream, buf.ptr, data[:32])
    assert np.array_equal(got, data[16:48])


@pytest.mark.parametrize("pinned", [True, False])
def test_device_to_host_bytes_appear_at_the_synchronise(pinned: bool) -> None:
    backend = HostBackend(race_detection=False)
    stream = backend.create_stream("a")
    data = np.random.default_rng(3).integers(0, 255, 32, dtype=np.uint8)
    src, tmp = upload(backend, stream, "src", data), backend.alloc("tmp", 32)
    dst = backend.alloc_pinned("dst", 64) if pinned else HostBuffer.pageable("dst", np.empty(64, np.uint8))
    dst.array[:] = 255
    backend.copy_d2d(tmp.ptr, src, 32, stream)
    backend.copy_d2h(dst, tmp.ptr, 32, stream, dst_off=8)
    assert np.all(dst.array == 255)
    backend.synchronize(stream)
    assert np.array_equal(dst.array[8:40], data)
    assert np.all(dst.array[:8] == 255)
    assert np.all(dst.array[40:] == 255)


def test_bad_copy_arguments_are_refused_at_the_call() -> None:
    backend = HostBackend()
    stream = backend.create_stream("a")
    buf, host = backend.alloc("d", 64), HostBuffer.pageable("h", np.arange(16, dtype=np.uint8))
    frozen = np.arange(16, dtype=np.uint8)
    frozen.flags.writeable = False
    calls: list[Callable[[], None]] = [
        lambda: backend.copy_h2d(buf.ptr, host, 17, stream, label="c"),
        lambda: backend.copy_h2d(buf.ptr, host, 8, stream, src_off=9, label="c"),
        lambda: backend.copy_h2d(buf.ptr, host, 8, stream, src_off=-1, label="c"),
        lambda: backend.copy_d2h(host, buf.ptr, -1, stream, label="c"),
        lambda: backend.copy_d2h(HostBuffer.pageable("frozen", frozen), buf.ptr, 8, stream, label="c"),
        lambda: backend.copy_d2d(buf.ptr, buf.ptr, -1, stream, label="c"),
        lambda: backend.fill(buf.ptr, 256, 4, stream, label="c"),
        lambda: backend.fill(buf.ptr, 0, -4, stream, label="c"),
    ]
    for call in calls:
        with pytest.raises(CudaError, match="'c'") as info:
            call()
        assert info.value.status == Status.INVALID_VALUE
    backend.copy_h2d(buf.ptr, host, 0, stream)
    backend.synchronize(stream)


def test_polling_an_event_reports_first_and_comes_to_an_end() -> None:
    for schedule in ("lazy", "random:4"):
        backend = HostBackend(schedule)
        stream = backend.create_stream("a")
        pinned = backend.alloc_pinned("flag", 1)
        pinned.array[0] = 0
        event = backend.create_event("e")
        assert backend.query_event(event)  # nothing recorded yet
        for i in range(10):
            backend.fill(pinned.device_ptr, i + 1, 1, stream)
        backend.record(event, stream)
        polls = 0
        while not backend.query_event(event):
            polls += 1
            assert polls <= 10
        assert pinned.array[0] == 10
        if schedule == "lazy":
            assert polls == 10


def _diamond(backend: HostBackend, waits: tuple[bool, bool, bool]) -> list[int]:
    """Fork, two branches, join, and a copy back; each of the three waits can be left out."""
    main, side = backend.create_stream("main"), backend.create_stream("side")
    rng = np.random.default_rng(11)
    x, y = random_i32(rng, 8), random_i32(rng, 8)
    px, py = upload(backend, main, "x", x), upload(backend, main, "y", y)
    fork, join, back = (backend.create_event(n) for n in ("fork", "join", "back"))

    def run(ptr: int, stream: Stream, scale: int, offset: int) -> None:
        backend.launch(backend.prepare(SCALE, {"x": ptr, "a": scale, "n": 8}, "scale"), stream)
        backend.launch(backend.prepare(OFFSET, {"x": ptr, "b": offset, "n": 8}, "offset"), stream)

    def wait(index: int, stream: Stream, event: Event) -> None:
        if waits[index]:
            backend.wait(stream, event)

    run(px, main, 3, 7)
    backend.record(fork, main)
    wait(0, side, fork)
    backend.copy_d2d(py, px, 16, side, label="x to y")
    run(py, side, 5, -2)
    backend.record(join, side)
    wait(1, main, join)
    backend.copy_d2d(px, py, 32, main, label="y to x")
    run(px, main, -7, 11)
    backend.record(back, main)
    wait(2, side, back)
    return [*download(backend, side, px, x).tolist(), *download(backend, side, py, y).tolist()]


def test_schedules_agree_when_every_wait_is_there() -> None:
    rng = np.random.default_rng(11)
    x, y = random_i32(rng, 8), random_i32(rng, 8)
    x = x * 3 + 7
    y[:4] = x[:4]
    y = y * 5 - 2
    want = [*(y * -7 + 11).tolist(), *y.tolist()]
    for schedule in SCHEDULES:
        assert _diamond(HostBackend(schedule), (True, True, True)) == want, schedule


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_removed_wait_shows_in_some_schedule(missing: int) -> None:
    waits = (missing != 0, missing != 1, missing != 2)
    results = {tuple(_diamond(HostBackend(schedule, race_detection=False), waits)) for schedule in SCHEDULES}
    assert len(results) > 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_wait_without_later_work_still_orders(schedule: str) -> None:
    """A wait counts for a record, and for a synchronise, that follow it with no work in between."""
    backend = HostBackend(schedule)
    a, b, c = (backend.create_stream(n) for n in "abc")
    pinned = backend.alloc_pinned("p", 1)
    pinned.array[0] = 0
    first, second = backend.create_event("first"), backend.create_event("second")
    backend.fill(pinned.device_ptr, 1, 1, a)
    backend.record(first, a)
    backend.wait(b, first)
    backend.record(second, b)
    backend.wait(c, second)
    backend.synchronize(c)
    assert pinned.array[0] == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_second_record_moves_the_event(schedule: str) -> None:
    backend = HostBackend(schedule)
    a, b = backend.create_stream("a"), backend.create_stream("b")
    pinned = backend.alloc_pinned("p", 1)
    event = backend.create_event("e")
    for value in (1, 2):
        backend.fill(pinned.device_ptr, value, 1, a)
        backend.record(event, a)
    backend.wait(b, event)
    backend.synchronize(b)
    assert pinned.array[0] == 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_destroyed_streams_and_events_complete_their_work(schedule: str) -> None:
    backend = HostBackend(schedule)
    a, b = backend.create_stream("a"), backend.create_stream("b")
    pinned = backend.alloc_pinned("p", 2)
    pinned.array[:] = 0
    event = backend.create_event("e")
    backend.fill(pinned.device_ptr, 1, 1, a)
    backend.record(event, a)
    backend.wait(b, event)
    backend.destroy_stream(a)
    backend.destroy_event(event)
    backend.fill(pinned.device_ptr + 1, 2, 1, b)
    backend.synchronize(b)
    assert pinned.array.tolist() == [1, 2]
    for call in (lambda: backend.synchronize(a), lambda: backend.query_event(event)):
        with pytest.raises(CudaError, match="was destroyed") as info:
            call()
        assert info.value.status == Status.INVALID_HANDLE


def test_handles_are_checked_and_never_reused() -> None:
    backend = HostBackend()
    stream, event = backend.create_stream("s"), backend.create_event("e")
    backend.destroy_stream(stream)
    assert backend.create_stream("s") > event > stream
    calls: list[Callable[[], object]] = [
        lambda: backend.destroy_stream(stream),
        lambda: backend.synchronize(Stream(int(event))),
        lambda: backend.record(event, stream),
        lambda: backend.begin_capture(stream),
        lambda: backend.abort_capture(stream),
        lambda: backend.fill(0, 0, 0, Stream(999)),
        lambda: backend.destroy_event(Event(999)),
    ]
    for call in calls:
        with pytest.raises(CudaError, match=r"(stream|event) \d+ was (destroyed|never created)") as info:
            call()
        assert info.value.status == Status.INVALID_HANDLE


def test_a_long_queue_needs_no_recursion_and_is_let_go() -> None:
    backend = HostBackend()
    stream, other = backend.create_stream("s"), backend.create_stream("t")
    x = np.full(4, 0.25, np.float32)
    y = upload(backend, stream, "y", np.zeros(4, np.float32))
    px = upload(backend, stream, "x", x)
    launch = backend.prepare(AXPY, {"x": px, "y": y, "a": 1.0, "n": 4}, "add")
    event = backend.create_event("e")
    for i in range(20_000):
        backend.launch(launch, stream if i % 2 else other)
        backend.record(event, stream if i % 2 else other)
        backend.wait(other if i % 2 else stream, event)
    assert np.array_equal(download(backend, other, y, x), np.full(4, 5000, np.float32))


def test_random_work_runs_without_being_waited_for() -> None:
    unwaited = 0
    for seed in range(10):
        backend = HostBackend(f"random:{seed}")
        pinned = backend.alloc_pinned("p", 1)
        pinned.array[0] = 0
        backend.fill(pinned.device_ptr, 1, 1, backend.create_stream("a"))
        for _ in range(10):
            backend.memory_info()
        unwaited += int(pinned.array[0])
    assert unwaited >= 8


def test_completed_work_lets_go_of_its_operands() -> None:
    backend = HostBackend()
    stream, event = backend.create_stream("a"), backend.create_event("e")
    page = HostBuffer.pageable("page", np.arange(16, dtype=np.uint8))
    gone = weakref.ref(page.array)
    backend.copy_h2d(backend.alloc("d", 16).ptr, page, 16, stream)
    backend.record(event, stream)
    del page
    gc.collect()
    assert gone() is not None
    backend.synchronize_event(event)
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_timing_event_notes_when_its_record_runs(schedule: str) -> None:
    """Between two records every kernel of the stream runs; when that is, the schedule decides."""
    backend = HostBackend(schedule)
    ran: list[int] = []
    launch = backend.prepare(KernelSpec("now", (), lambda: ran.append(time.perf_counter_ns())), {}, "now")
    a, b = backend.create_stream("a"), backend.create_stream("b")
    first, last = (backend.create_event(name, timing=True) for name in ("first", "last"))
    for _ in range(2):  # recorded again, an event has the new time
        ran.clear()
        backend.record(first, a)
        backend.launch(launch, a)
        backend.wait(b, first)
        backend.launch(launch, b)
        backend.record(last, b)
        backend.wait(a, last)
        backend.record(last, a)
        backend.synchronize_event(last)
        times = [backend._stamp(event).time_ns for event in (first, last)]
        assert len(ran) == 2
        assert times[0] <= min(ran) <= max(ran) <= times[1]
        assert backend.elapsed_us(first, last) == (times[1] - times[0]) / 1000 >= 0
        assert backend.elapsed_us(last, first) == -backend.elapsed_us(first, last)
    backend.close()


def test_an_event_that_has_no_time_is_refused() -> None:
    backend = HostBackend()
    stream = backend.create_stream("a")
    plain, timed, fresh = backend.create_event("plain"), *(backend.create_event(n, timing=True) for n in ("t", "fresh"))

    def refused(status: Status, start: Event, end: Event, *words: str) -> None:
        with pytest.raises(CudaError) as info:
            backend.elapsed_us(start, end)
        assert (info.value.status, info.value.call) == (status, "cuEventElapsedTime")
        for word in words:
            assert word in str(info.value)

    for event in (plain, timed):
        backend.record(event, stream)
    refused(Status.NOT_READY, timed, timed, "'t'", "not completed")
    backend.synchronize(stream)
    assert backend.elapsed_us(timed, timed) == 0
    refused(Status.INVALID_HANDLE, timed, plain, "'plain'", "without timing")
    refused(Status.INVALID_HANDLE, fresh, timed, "'fresh'", "never recorded")
    refused(Status.INVALID_HANDLE, timed, Event(12345), "12345")
    backend.begin_capture(stream)
    backend.record(timed, stream)
    refused(Status.CAPTURED_EVENT, timed, timed, "'t'", "capture")
    assert backend.capture_status(stream).name == "ACTIVE"
    backend.end_capture(stream)
    refused(Status.INVALID_VALUE, timed, timed, "'t'", "record it again")
    backend.record(timed, stream)
    backend.synchronize(stream)
    assert backend.elapsed_us(timed, timed) == 0
    backend.close()
