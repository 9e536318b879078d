"""Run in a process of its own on the stub driver: one round through `DriverBackend` with the real bindings."""

from collections.abc import Callable
from functools import partial

import numpy as np

from ds41rt.cu.backend import CaptureStatus, HostBuffer, MemoryRange, foreign_graphs
from ds41rt.cu.capture_probe import CaptureInfo
from ds41rt.cu.driver import DriverBackend, probe
from ds41rt.cu.graphinfo import CopyNode, FillNode, KernelNode
from ds41rt.cu.result import CudaError, Status
from ds41rt.kernels.slots import SLOT_TABLE_SET


def refused(status: Status, call: Callable[[], object], *parts: str) -> None:
    try:
        call()
    except CudaError as e:
        if e.status is not status or any(part not in str(e) for part in parts):
            raise
    else:
        raise AssertionError(f"not refused with {status}")


def main() -> None:
    found = probe()
    assert (found.driver_version, found.devices[0].name) == (13000, "Stub GPU"), found
    assert found.devices[0].capability == (9, 0)
    backend = DriverBackend()
    rng = np.random.default_rng(3)
    main_stream, side = backend.create_stream("main"), backend.create_stream("side")
    start, end = backend.create_event("start", timing=True), backend.create_event("end", timing=True)
    table0 = rng.integers(-1, 100, (64, 384), dtype=np.int32)
    table, scratch = backend.alloc("table", table0.nbytes), backend.alloc("scratch", 64)
    pinned = backend.alloc_pinned("triples", 4 * 31)
    words = pinned.array.view(np.int32)
    words[:] = rng.integers(0, 64, 31)
    words[0] = 5
    triples = backend.alloc("triples", pinned.nbytes)
    backend.copy_h2d(table.ptr, HostBuffer.pageable("table", table0), table0.nbytes, main_stream, label="table")
    args = {"table": table.ptr, "triples": triples.ptr, "n_layers": 64, "n_experts": 384, "capacity": 10}
    launch = backend.prepare(SLOT_TABLE_SET, args, "set")

    def step() -> None:
        backend.copy_h2d(triples.ptr, pinned, pinned.nbytes, main_stream, label="triples")
        backend.launch(launch, main_stream)
        backend.fill(scratch.ptr, 7, 64, main_stream, label="scratch")

    def read() -> "np.ndarray[tuple[int, ...], np.dtype[np.int32]]":
        out = np.full_like(table0, 77)
        backend.copy_d2h(HostBuffer.pageable("out", out), table.ptr, out.nbytes, main_stream)
        backend.synchronize(main_stream)
        return out

    want = table0.copy()

    def expect() -> None:
        for layer, expert, slot in words[1:16].reshape(5, 3).tolist():
            want[layer, expert] = slot
        assert np.array_equal(read(), want)

    backend.record(start, main_stream)
    step()
    backend.record(end, main_stream)
    backend.wait(side, end)
    assert backend.query_event(end)
    backend.synchronize_event(end)
    assert backend.elapsed_us(start, end) == 2500
    expect()

    backend.begin_capture(main_stream)
    step()
    refused(Status.STREAM_CAPTURE_UNSUPPORTED, lambda: backend.synchronize(main_stream), "'main'")
    graph = backend.end_capture(main_stream)
    info = backend.describe_graph(graph)
    copy, kernel, fill = (node.content for node in info.nodes)
    assert [node.label for node in info.nodes] == ["triples", "set", "scratch"], info
    assert info.unavailable == (), info
    with foreign_graphs() as driver:
        assert [node.content for node in driver.describe(graph).nodes] == [copy, kernel, fill]
        assert driver.find_allocation(pinned.ptr + 5) == MemoryRange(pinned.ptr, pinned.nbytes, "pinned")
        assert driver.find_allocation(table.ptr) == MemoryRange(table.ptr, table.nbytes, "device")
        assert driver.find_allocation(12345678) is None
    assert copy == CopyNode(triples.ptr, "device", pinned.ptr, "pinned", pinned.nbytes), copy
    assert fill == FillNode(scratch.ptr, 7, 1, 64), fill
    assert isinstance(kernel, KernelNode)
    assert (kernel.name, kernel.grid, kernel.block) == ("ds41_slot_table_set", (1, 1, 1), (128, 1, 1)), kernel
    assert kernel.params is not None
    assert [(p.off, int.from_bytes(p.value, "little")) for p in kernel.params] == [
        (0, table.ptr),
        (8, triples.ptr),
        (16, 64),
        (20, 384),
        (24, 10),
    ], kernel.params
    assert backend.describe_graph(graph).edges == ((0, 1), (1, 2))
    assert backend.capture_probe().n_nodes(graph) == 3
    graph_exec = backend.instantiate(graph)
    backend.destroy_graph(graph)
    words[1:] = rng.integers(0, 64, 30)
    backend.launch_graph(graph_exec, main_stream)
    expect()
    look = backend.capture_probe()
    assert look.info(side) == CaptureInfo(CaptureStatus.NONE)
    look.begin(side, "relaxed")
    backend.fill(scratch.ptr, 1, 64, side)
    backend.fill(scratch.ptr, 2, 64, side)
    seen = look.info(side)
    assert (seen.status, seen.ident, len(seen.frontier)) == (CaptureStatus.ACTIVE, 7, 1), seen
    assert look.unjoined(side, [side]) == []
    assert look.end(side) == 2
    look.begin(side, "relaxed")
    look.abort(side)
    look.abort(side)
    assert look.info(side).status is CaptureStatus.NONE
    backend.begin_capture(side)
    backend.abort_capture(side)
    backend.abort_capture(side)
    free = "1000 bytes of device memory are free of 2000"
    huge = partial(backend.alloc, "huge", 1 << 50)
    refused(Status.OUT_OF_MEMORY, huge, "'huge'", str(1 << 50), free, "that is a lot of memory")
    backend.close()
    assert not any(backend.live().values())
    print("every call was understood")


if __name__ == "__main__":
    main()
