"""Conformance: memory, copies, and accesses that lose the context."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np

from ds41rt.cu.backend import DeviceBuffer, HostBuffer
from ds41rt.testing.conformance.case import NBYTES, NOWHERE, N, Outcome, Rig, affine, case, code


@case("Fewer than one byte cannot be allocated.")
def allocate_nothing(rig: Rig) -> Outcome:
    return {
        "device": code(lambda: rig.backend.alloc("nothing", 0)),
        "pinned": code(lambda: rig.backend.alloc_pinned("nothing", 0)),
        "usable": rig.usable(),
    }


@case("Every size is aligned to 256 bytes and lies apart from the others.")
def alignment(rig: Rig) -> Outcome:
    buffers = [rig.backend.alloc(f"buffer {n}", n) for n in (1, 3, 255, 256, 257, 4097)]
    starts = sorted((buf.ptr, buf.nbytes) for buf in buffers)
    apart = all(a + n <= b for (a, n), (b, _) in pairwise(starts))
    return {"aligned": all(buf.ptr % 256 == 0 for buf in buffers), "apart": apart}


@case("What was freed, or was never allocated, cannot be freed.")
def free_twice(rig: Rig) -> Outcome:
    backend = rig.backend
    device, pinned = backend.alloc("device", 4096), backend.alloc_pinned("pinned", 4096)
    backend.free(device)
    backend.free_pinned(pinned)
    return {
        "device": code(lambda: backend.free(device)),
        "pinned": code(lambda: backend.free_pinned(pinned)),
        "foreign": code(lambda: backend.free(DeviceBuffer("foreign", NOWHERE, 64))),
        "pageable": code(lambda: backend.free_pinned(HostBuffer.pageable("page", rig.words))),
        "inside": code(lambda: backend.free(DeviceBuffer("inside", rig.x + 4, 4))),
        "usable": rig.usable(),
    }


@case("More memory than there is: the code, and the next call is clean.")
def out_of_memory(rig: Rig) -> Outcome:
    backend = rig.backend
    _, total = backend.memory_info()
    return {
        "device": code(lambda: backend.alloc("too much", 2 * total)),
        "next": code(lambda: backend.free(backend.alloc("small", 1 << 20))),
        "pinned": code(lambda: backend.alloc_pinned("too much", 1 << 62)),
        "next pinned": code(lambda: backend.free_pinned(backend.alloc_pinned("small", 1 << 20))),
        "usable": rig.usable(),
    }


@case("Copies and fills of zero bytes are legal.")
def zero_bytes(rig: Rig) -> Outcome:
    backend, pinned = rig.backend, rig.pinned("pinned", rig.words)
    return {
        "copy_h2d": code(lambda: backend.copy_h2d(rig.x, pinned, 0, rig.main)),
        "copy_d2h": code(lambda: backend.copy_d2h(pinned, rig.x, 0, rig.main)),
        "copy_d2d": code(lambda: backend.copy_d2d(rig.x, pinned.device_ptr, 0, rig.main)),
        "fill": code(lambda: backend.fill(rig.x, 7, 0, rig.main)),
        "untouched": rig.holds(rig.words),
    }


@case("A copy that does not fit its host buffer, or whose pinned buffer was freed, is refused at the call.")
def copies_outside_of_host_buffers(rig: Rig) -> Outcome:
    backend = rig.backend
    pinned, gone = rig.pinned("pinned", rig.words), rig.pinned("gone", rig.words)
    backend.free_pinned(gone)
    return {
        "too long": code(lambda: backend.copy_h2d(rig.x, pinned, NBYTES + 1, rig.main)),
        "beyond": code(lambda: backend.copy_d2h(pinned, rig.x, NBYTES, rig.main, dst_off=1)),
        "negative": code(lambda: backend.copy_h2d(rig.x, pinned, 4, rig.main, src_off=-1)),
        "freed": code(lambda: backend.copy_h2d(rig.x, gone, NBYTES, rig.main)),
        "untouched": rig.holds(rig.words),
    }


@case(
    "Bytes are in the host buffer after the synchronise, and not before the work ahead of the copy has run.",
    pending=True,
)
def d2h_is_visible_after_the_synchronise(rig: Rig) -> Outcome:
    backend, target = rig.backend, rig.pinned("target", ~rig.words)
    rig.delay(rig.main)
    rig.work(rig.main)
    backend.copy_d2h(target, rig.x, NBYTES, rig.main)
    outcome: Outcome = {"before": bool(np.array_equal(target.array.view(np.int32), affine(rig.words)))}
    backend.synchronize(rig.main)
    outcome["after"] = bool(np.array_equal(target.array.view(np.int32), affine(rig.words)))
    return outcome


@case("A pinned source is read when the copy runs, not when it is enqueued.", pending=True)
def pinned_source_is_read_at_execution(rig: Rig) -> Outcome:
    backend, source = rig.backend, rig.pinned("source", rig.words)
    rig.delay(rig.main)
    backend.copy_h2d(rig.x, source, NBYTES, rig.main)
    source.array[:] = (~rig.words).view(np.uint8)
    return {"later bytes": rig.holds(~rig.words)}


@case("A kernel reads and writes pinned memory in place, under its device address.")
def kernels_use_pinned_memory(rig: Rig) -> Outcome:
    host = rig.pinned("host", rig.words)
    rig.work(rig.main, rig.affine(host.device_ptr, 3, 5))
    rig.backend.synchronize(rig.main)
    outcome: Outcome = {"in place": bool(np.array_equal(host.array.view(np.int32), affine(rig.words)))}
    outcome["copied"] = rig.holds(affine(rig.words), host.device_ptr)
    return outcome


@case("Copies and fills move exactly the bytes that they name.")
def copies_are_exact(rig: Rig) -> Outcome:
    backend = rig.backend
    source = rig.pinned("source", np.roll(rig.words, 1))
    want = rig.words.view(np.uint8).copy()
    y = rig.upload("y", ~rig.words)
    backend.copy_h2d(rig.x + 3, source, 17, rig.main, src_off=5)
    want[3:20] = source.array[5:22]
    backend.fill(rig.x + 21, 0xA5, 7, rig.main)
    want[21:28] = 0xA5
    backend.copy_d2d(rig.x + 29, y + 30, 11, rig.main)
    want[29:40] = (~rig.words).view(np.uint8)[30:41]
    return {"right": rig.holds(want.view(np.int32))}


def _lost(rig: Rig, enqueue: Callable[[], object]) -> Outcome:
    """What a fault does: at the call, at the wait, to everything after it, and to a fresh backend of the process."""
    backend = rig.backend
    outcome: Outcome = {"enqueue": code(enqueue)}
    outcome["synchronize"] = code(lambda: backend.synchronize(rig.main))
    outcome["alloc"] = code(lambda: backend.alloc("later", 64))
    outcome["launch"] = code(lambda: rig.work(rig.side))
    outcome["create_event"] = code(lambda: backend.create_event("later"))
    outcome["synchronize again"] = code(lambda: backend.synchronize(rig.side))
    backend.close()
    outcome["nothing left"] = not any(backend.live().values())
    return outcome


@case(
    "A kernel that accesses memory nobody allocated fails when it runs; every later call fails likewise.",
    loses_context=True,
)
def wild_kernel(rig: Rig) -> Outcome:
    return _lost(rig, lambda: rig.work(rig.main, rig.affine(NOWHERE, 3, 5)))


@case("So does one with a null pointer.", loses_context=True)
def null_kernel(rig: Rig) -> Outcome:
    return _lost(rig, lambda: rig.work(rig.main, rig.affine(0, 3, 5)))


@case("A misaligned access is a fault of its own.", loses_context=True)
def misaligned_kernel(rig: Rig) -> Outcome:
    launch = rig.backend.prepare(rig.step.spec, {"x": rig.x + 2, "a": 3, "b": 5, "n": N - 1}, "misaligned")
    return _lost(rig, lambda: rig.work(rig.main, launch))


@case("A fault inside a graph shows when the graph has run.", loses_context=True)
def wild_kernel_in_a_graph(rig: Rig) -> Outcome:
    wild = rig.affine(NOWHERE, 3, 5)
    rig.backend.begin_capture(rig.main)
    rig.work(rig.main)
    rig.work(rig.main, wild)
    graph_exec = rig.end_exec()
    return _lost(rig, lambda: rig.backend.launch_graph(graph_exec, rig.main))


@case("Waiting for an event behind a fault reports the fault.", loses_context=True)
def wild_kernel_before_an_event(rig: Rig) -> Outcome:
    backend = rig.backend
    rig.work(rig.main, rig.affine(NOWHERE, 3, 5))
    code(lambda: backend.record(rig.join, rig.main))  # a quick device may have failed by now
    outcome: Outcome = {"synchronize_event": code(lambda: backend.synchronize_event(rig.join))}
    outcome["query_event"] = code(lambda: backend.query_event(rig.join))
    outcome["abort_capture"] = code(lambda: backend.abort_capture(rig.main))
    return outcome


@case("A copy to memory nobody allocated is refused at the call, and harms nothing.")
def wild_copy(rig: Rig) -> Outcome:
    return _lost(rig, lambda: rig.backend.copy_d2d(NOWHERE, rig.x, NBYTES, rig.main))


@case("So is a fill.")
def wild_fill(rig: Rig) -> Outcome:
    return _lost(rig, lambda: rig.backend.fill(NOWHERE, 7, NBYTES, rig.main))


@case("A copy or fill of memory nobody allocated, or that was freed, is refused at the call, whatever its kind.")
def wild_copies_of_every_kind(rig: Rig) -> Outcome:
    backend, host, gone = rig.backend, rig.pinned("host", rig.words), rig.backend.alloc("gone", NBYTES)
    backend.free(gone)
    outcome: Outcome = {}
    for name, addr in (("nowhere", NOWHERE), ("null", 0), ("freed", gone.ptr)):
        calls: dict[str, Callable[[], object]] = {
            "copy_h2d": partial(backend.copy_h2d, addr, host, NBYTES, rig.main),
            "copy_d2h": partial(backend.copy_d2h, host, addr, NBYTES, rig.main),
            "copy_d2d from": partial(backend.copy_d2d, rig.x, addr, NBYTES, rig.main),
            "copy_d2d to": partial(backend.copy_d2d, addr, rig.x, NBYTES, rig.main),
            "fill": partial(backend.fill, addr, 7, NBYTES, rig.main),
        }
        outcome.update({f"{key}, {name}": code(call) for key, call in calls.items()})
    outcome["untouched"] = rig.holds(rig.words)
    outcome["usable"] = rig.usable()
    return outcome


@case("A copy or fill that begins in an allocation and ends far behind it is refused at the call.")
def copies_far_beyond_an_allocation(rig: Rig) -> Outcome:
    backend, nbytes = rig.backend, 64 << 20
    host = backend.alloc_pinned("host", nbytes)
    outcome: Outcome = {
        "copy_h2d": code(lambda: backend.copy_h2d(rig.x, host, nbytes, rig.main)),
        "copy_d2h": code(lambda: backend.copy_d2h(host, rig.x, nbytes, rig.main)),
        "fill": code(lambda: backend.fill(rig.x, 7, nbytes, rig.main)),
    }
    outcome["synchronize"] = code(lambda: backend.synchronize(rig.main))
    return outcome


@case("A copy or fill that goes one byte beyond its buffer is refused too.")
def copies_one_byte_beyond_an_allocation(rig: Rig) -> Outcome:
    backend, host = rig.backend, rig.backend.alloc_pinned("host", NBYTES + 1)
    short, other = backend.alloc("short", NBYTES), backend.alloc("other", 2 * NBYTES)
    outcome: Outcome = {
        "copy_h2d": code(lambda: backend.copy_h2d(short.ptr, host, NBYTES + 1, rig.main)),
        "copy_d2h": code(lambda: backend.copy_d2h(host, short.ptr, NBYTES + 1, rig.main)),
        "copy_d2d": code(lambda: backend.copy_d2d(other.ptr, short.ptr, NBYTES + 1, rig.main)),
        "fill": code(lambda: backend.fill(short.ptr, 7, NBYTES + 1, rig.main)),
    }
    outcome["synchronize"] = code(lambda: backend.synchronize(rig.main))
    return outcome


@case(
    "A kernel that goes one element beyond its buffer.",
    loses_context=True,
    differs="a device checks whole pages; the simulated one checks every byte, so that the overrun is found",
)
def overrun_by_one_element(rig: Rig) -> Outcome:
    buf = rig.backend.alloc("short", NBYTES)
    return _lost(rig, lambda: rig.work(rig.main, rig.affine(buf.ptr + 4, 3, 5)))
