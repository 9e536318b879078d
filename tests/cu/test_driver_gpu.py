"""The driver backend on a real GPU: the cases that a fake driver can only assume."""

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tiny_kernels import download, random_i32, upload

from ds41rt.cu.backend import CaptureStatus, HostBuffer, Stream
from ds41rt.cu.driver import DriverBackend
from ds41rt.cu.graphinfo import CopyNode, FillNode, KernelNode
from ds41rt.cu.result import CudaError, OutOfDeviceMemory, Status
from ds41rt.kernels.slots import SLOT_TABLE_SET

pytestmark = pytest.mark.gpu
LAYERS, EXPERTS, CAPACITY = 64, 384, 200


class Table:
    """The one kernel of these tests: a slot table, and pinned triples that go to the device first."""

    def __init__(self, backend: DriverBackend, stream: Stream, seed: int = 0) -> None:
        self.backend = backend
        self.stream = stream
        self.rng = np.random.default_rng(seed)
        self.want = self.rng.integers(-1, 1000, (LAYERS, EXPERTS), dtype=np.int32)
        self.table = upload(backend, stream, "table", self.want)
        self.pinned = backend.alloc_pinned("triples", 4 * (1 + 3 * CAPACITY))
        self.triples = backend.alloc("triples", self.pinned.nbytes)
        args = {
            "table": self.table,
            "triples": self.triples.ptr,
            "n_layers": LAYERS,
            "n_experts": EXPERTS,
            "capacity": CAPACITY,
        }
        self.launch = backend.prepare(SLOT_TABLE_SET, args, "set")

    def draw(self) -> None:
        """New triples in pinned memory, applied to the expected table."""
        words = self.pinned.array.view(np.int32)
        words[:] = -12345
        count = int(self.rng.integers(1, CAPACITY + 1))
        keys = self.rng.choice(LAYERS * EXPERTS, count, replace=False)
        slots = self.rng.integers(0, 1 << 20, count, dtype=np.int32)
        words[0] = count
        words[1 : 1 + 3 * count] = np.stack([keys // EXPERTS, keys % EXPERTS, slots], axis=1).reshape(-1)
        self.want.reshape(-1)[keys] = slots

    def enqueue(self, stream: Stream | None = None) -> None:
        stream = self.stream if stream is None else stream
        self.backend.copy_h2d(self.triples.ptr, self.pinned, self.pinned.nbytes, stream, label="triples")
        self.backend.launch(self.launch, stream)

    def right(self) -> bool:
        return bool(np.array_equal(download(self.backend, self.stream, self.table, self.want), self.want))


@pytest.fixture
def backend() -> Iterator[DriverBackend]:
    backend = DriverBackend()
    yield backend
    backend.close()
    assert gc.isenabled()


def _fails(status: Status, call: Callable[[], object], *parts: str) -> None:
    with pytest.raises(CudaError) as info:
        call()
    assert info.value.status == status, info.value
    for part in parts:
        assert part in str(info.value)


def test_eager_and_replayed_launches(backend: DriverBackend) -> None:
    stream, other = backend.create_stream("main"), backend.create_stream("other")
    table = Table(backend, stream)
    for _ in range(20):
        table.draw()
        table.enqueue()
        assert table.right()
    backend.begin_capture(other)
    table.enqueue(other)
    graph = backend.end_capture(other)
    graph_exec = backend.instantiate(graph)
    backend.destroy_graph(graph)
    for _ in range(20):
        table.draw()  # pinned bytes are read again at every replay
        backend.launch_graph(graph_exec, stream)
        assert table.right()
    backend.destroy_exec(graph_exec)


def test_copies_in_all_directions(backend: DriverBackend) -> None:
    stream = backend.create_stream("main")
    rng = np.random.default_rng(1)
    for nbytes in (1, 3, 4095, 4097, 3_000_001):
        data = rng.integers(0, 256, nbytes, dtype=np.uint8)
        host = backend.alloc_pinned("h", 2 * nbytes)
        host.array[:nbytes], host.array[nbytes:] = data, ~data
        a, b = backend.alloc("a", nbytes), backend.alloc("b", nbytes)
        assert a.ptr % 256 == 0
        backend.fill(b.ptr, 0x5C, nbytes, stream)
        backend.copy_h2d(a.ptr, host, nbytes, stream, nbytes)
        backend.copy_d2d(b.ptr, a.ptr, nbytes, stream)
        backend.copy_d2h(host, b.ptr, nbytes, stream)
        backend.synchronize(stream)
        assert np.array_equal(host.array[:nbytes], ~data)
        assert download(backend, stream, host.device_ptr, data).tolist() == (~data).tolist()
        backend.free_pinned(host)
        backend.free(a)
        backend.free(b)


def test_describe_reads_back_what_was_captured(backend: DriverBackend) -> None:
    stream = backend.create_stream("main")
    table = Table(backend, stream)
    backend.begin_capture(stream)
    table.enqueue()
    backend.fill(table.triples.ptr, 7, 64, stream)
    backend.copy_d2d(table.triples.ptr, table.table, 128, stream)
    info = backend.describe_graph(backend.end_capture(stream))
    up, kernel, fill, across = (node.content for node in info.nodes)
    assert info.edges == ((0, 1), (1, 2), (2, 3))
    assert up == CopyNode(table.triples.ptr, "device", table.pinned.ptr, "pinned", table.pinned.nbytes)
    assert isinstance(fill, FillNode)
    assert (fill.dst, fill.nbytes) == (table.triples.ptr, 64)
    assert across == CopyNode(table.triples.ptr, "device", table.table, "device", 128)
    assert isinstance(kernel, KernelNode)
    assert (kernel.name, kernel.grid, kernel.block) == ("ds41_slot_table_set", (2, 1, 1), (128, 1, 1))
    assert kernel.params is not None
    assert [(p.off, int.from_bytes(p.value, "little")) for p in kernel.params] == [
        (0, table.table), (8, table.triples.ptr), (16, LAYERS), (20, EXPERTS), (24, CAPACITY)
    ]  # fmt: skip


def test_a_captured_copy_to_pageable_memory_keeps_it_alive(backend: DriverBackend) -> None:
    stream = backend.create_stream("main")
    table = Table(backend, stream)
    page = np.zeros(16, np.uint8)
    backend.begin_capture(stream)
    backend.copy_d2h(HostBuffer.pageable("page", page), table.table, 16, stream)
    graph = backend.end_capture(stream)
    (down,) = (node.content for node in backend.describe_graph(graph).nodes)
    assert down == CopyNode(page.ctypes.data, "pageable", table.table, "device", 16)
    backend.launch_graph(backend.instantiate(graph), stream)
    backend.synchronize(stream)
    assert page.view(np.int32).tolist() == table.want[0, :4].tolist()


def test_out_of_memory_and_the_next_call(backend: DriverBackend) -> None:
    free, total = backend.memory_info()
    with pytest.raises(OutOfDeviceMemory, match="'arena'") as info:
        backend.alloc("arena", 2 * total)
    assert f"needs {2 * total} bytes" in str(info.value)
    assert str(total) in str(info.value)
    backend.free(backend.alloc("small", 1 << 20))
    assert free <= total


class Forked:
    """A capture on `main` that `side` has joined, and an event that was recorded outside of it."""

    def __init__(self, backend: DriverBackend) -> None:
        self.backend = backend
        self.main, self.side = backend.create_stream("main"), backend.create_stream("side")
        self.fork, self.outside = backend.create_event("fork"), backend.create_event("outside")
        self.table = Table(backend, self.main)
        backend.record(self.outside, self.side)
        backend.begin_capture(self.main)
        backend.record(self.fork, self.main)
        backend.wait(self.side, self.fork)
        backend.launch(self.table.launch, self.side)

    def works(self) -> bool:
        """Nothing captures any more, and eager work on the same streams is right."""
        for stream in (self.main, self.side):
            assert self.backend.capture_status(stream) is CaptureStatus.NONE
        assert self.backend.live()["captures"] == 0
        self.backend.record(self.fork, self.side)
        self.backend.wait(self.main, self.fork)
        self.table.draw()
        self.table.enqueue()
        return self.table.right()


def test_a_wait_for_an_event_from_outside(backend: DriverBackend) -> None:
    rig = Forked(backend)
    _fails(Status.STREAM_CAPTURE_ISOLATION, lambda: backend.wait(rig.main, rig.outside), "'main'", "'outside'")
    late = lambda: backend.launch(rig.table.launch, rig.main)  # noqa: E731
    _fails(Status.STREAM_CAPTURE_INVALIDATED, late, "(905)", "test_driver_gpu.py:")
    backend.abort_capture(rig.main)
    backend.abort_capture(rig.main)
    assert rig.works()


def test_a_capturing_stream_is_synchronised(backend: DriverBackend) -> None:
    rig = Forked(backend)
    _fails(Status.STREAM_CAPTURE_UNSUPPORTED, lambda: backend.synchronize(rig.main), "'main'")
    assert backend.capture_status(rig.main) is CaptureStatus.INVALIDATED
    _fails(Status.STREAM_CAPTURE_INVALIDATED, lambda: backend.end_capture(rig.main), "(900)")
    assert rig.works()


def test_a_captured_event_is_asked_for(backend: DriverBackend) -> None:
    rig = Forked(backend)
    _fails(Status.CAPTURED_EVENT, lambda: backend.query_event(rig.fork), "'fork'")
    backend.abort_capture(rig.side)
    assert rig.works()


def test_end_on_a_stream_that_joined(backend: DriverBackend) -> None:
    rig = Forked(backend)
    assert backend.capture_status(rig.side) is CaptureStatus.ACTIVE
    _fails(Status.STREAM_CAPTURE_UNMATCHED, lambda: backend.end_capture(rig.side))
    backend.abort_capture(rig.side)
    assert rig.works()


def test_a_fork_that_is_not_joined(backend: DriverBackend) -> None:
    rig = Forked(backend)
    _fails(Status.STREAM_CAPTURE_UNJOINED, lambda: backend.end_capture(rig.main), "'main'")
    assert rig.works()


def test_the_stream_that_began_a_capture_is_destroyed(backend: DriverBackend) -> None:
    rig = Forked(backend)
    backend.destroy_stream(rig.main)
    rig.main = rig.table.stream = backend.create_stream("new main")
    assert rig.works()


def test_a_hundred_captures_while_another_thread_copies(backend: DriverBackend) -> None:
    main, loader = backend.create_stream("main"), backend.create_stream("loader")
    table = Table(backend, main)
    host, buf = backend.alloc_pinned("expert", 12 << 20), backend.alloc("expert", 12 << 20)
    stop = threading.Event()
    copies: list[int] = []

    def load() -> None:
        while not stop.is_set():
            backend.copy_h2d(buf.ptr, host, host.nbytes, loader)
            backend.synchronize(loader)
            backend.free(backend.alloc("scratch", 1 << 20))
            copies.append(1)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for _ in range(100):
            backend.begin_capture(main)
            for _ in range(20):
                backend.launch(table.launch, main)
            graph = backend.end_capture(main)
            backend.destroy_exec(backend.instantiate(graph))
            backend.destroy_graph(graph)
    finally:
        stop.set()
        thread.join()
    assert copies
    table.draw()
    table.enqueue()
    assert table.right()


def test_fifty_backends_give_all_memory_back() -> None:
    def cycle() -> int:
        backend = DriverBackend()
        free, _ = backend.memory_info()
        stream = backend.create_stream("main")
        table = Table(backend, stream)
        backend.alloc("more", 100 << 20)
        table.draw()
        backend.begin_capture(stream)
        table.enqueue()
        backend.launch_graph(backend.instantiate(backend.end_capture(stream)), stream)
        assert table.right()
        backend.close()
        return free

    free = [cycle() for _ in range(50)]
    assert free[-1] >= free[1]


def test_elapsed_time(backend: DriverBackend) -> None:
    stream = backend.create_stream("main")
    start, end = backend.create_event("start", timing=True), backend.create_event("end", timing=True)
    buf = backend.alloc("a", 256 << 20)
    backend.fill(buf.ptr, 1, buf.nbytes, stream)
    backend.record(start, stream)
    backend.fill(buf.ptr, 2, buf.nbytes, stream)
    backend.record(end, stream)
    backend.synchronize_event(end)
    assert 1 < backend.elapsed_us(start, end) < 1e6
    data = random_i32(np.random.default_rng(0), 16)
    assert np.all(download(backend, stream, buf.ptr, data) == 0x02020202)


STICKY = """
import gc
import numpy as np
from ds41rt.cu.backend import HostBuffer
from ds41rt.cu.driver import DriverBackend
from ds41rt.cu.result import CudaError, Status
from ds41rt.kernels.slots import SLOT_TABLE_SET

def code(call):
    try:
        call()
    except CudaError as e:
        return e
    raise AssertionError("nothing was raised")

backend = DriverBackend()
stream = backend.create_stream("main")
triples = backend.alloc("triples", 64)
one = HostBuffer.pageable("one triple", np.array([1, 0, 0, 7], np.int32))
backend.copy_h2d(triples.ptr, one, 16, stream)
# Low addresses are the driver's own mappings; nobody maps anything here.
args = {"table": 0x1234_5678_0000, "triples": triples.ptr, "n_layers": 1, "n_experts": 1, "capacity": 5}
backend.launch(backend.prepare(SLOT_TABLE_SET, args, "wild"), stream)
first = code(lambda: backend.synchronize(stream))
later = code(lambda: backend.alloc("more", 64))
assert first.status is later.status is Status.ILLEGAL_ADDRESS, (first, later)
assert str(first) in str(later), (first, later)
backend.close()
assert not any(backend.live().values())
print("first error kept:", first)
"""


def test_a_wild_write_is_reported_once_and_for_all() -> None:
    done = subprocess.run([sys.executable, "-c", STICKY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("first error kept: cuStreamSynchronize: ILLEGAL_ADDRESS (700)")
