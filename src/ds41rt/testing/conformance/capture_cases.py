"""Conformance: what may happen in a capture, what breaks it, and with which code."""

from collections.abc import Callable
from functools import partial

import numpy as np

from ds41rt.cu.backend import GraphExec, HostBuffer
from ds41rt.testing.conformance.case import NBYTES, NOWHERE, N, Outcome, Rig, affine, case, code


@case(
    "The status of a stream is ACTIVE from begin, or from a wait that joins it, to the end; INVALIDATED after a fault."
)
def capture_status_stages(rig: Rig) -> Outcome:
    backend, seen = rig.backend, []

    def look() -> None:
        seen.append(f"{rig.status(rig.main)} {rig.status(rig.side)}")

    look()
    backend.begin_capture(rig.main)
    look()
    backend.record(rig.fork, rig.main)
    look()
    backend.wait(rig.side, rig.fork)
    look()
    rig.work(rig.side)
    backend.record(rig.join, rig.side)
    backend.wait(rig.main, rig.join)
    backend.end_capture(rig.main)
    look()
    rig.begin_forked()
    rig.invalidate()
    look()
    code(lambda: backend.end_capture(rig.main))
    look()
    return {"main and side": seen, "usable": rig.usable()}


@case("Captured work does not run; each launch of the executable graph runs it once.")
def capture_records_and_replays(rig: Rig) -> Outcome:
    rig.backend.begin_capture(rig.main)
    rig.work(rig.main)
    graph_exec = rig.end_exec()
    outcome: Outcome = {"untouched by the capture": rig.holds(rig.words)}
    want = rig.words
    for _ in range(3):
        rig.backend.launch_graph(graph_exec, rig.main)
        want = affine(want)
    outcome["three launches"] = rig.holds(want)
    return outcome


@case("Waiting for a capturing stream is refused and invalidates the capture; ending it says so and frees the stream.")
def synchronize_capturing_stream(rig: Rig) -> Outcome:
    rig.backend.begin_capture(rig.main)
    rig.work(rig.main)
    outcome: Outcome = {"synchronize": code(lambda: rig.backend.synchronize(rig.main)), "after": rig.status(rig.main)}
    outcome["end"] = code(lambda: rig.backend.end_capture(rig.main))
    outcome["after the end"] = rig.status(rig.main)
    outcome["not run"] = rig.holds(rig.words)
    outcome["usable"] = rig.usable()
    return outcome


@case("Waiting for a stream that has joined a capture is the same fault, for all streams of the capture.")
def synchronize_joined_stream(rig: Rig) -> Outcome:
    rig.begin_forked()
    outcome: Outcome = {"synchronize": code(lambda: rig.backend.synchronize(rig.side))}
    outcome["main"], outcome["side"] = rig.status(rig.main), rig.status(rig.side)
    outcome["end"] = code(lambda: rig.backend.end_capture(rig.main))
    outcome["usable"] = rig.usable()
    return outcome


@case("Every kind of work on an invalidated capture is refused.")
def work_on_invalidated_capture(rig: Rig) -> Outcome:
    backend = rig.backend
    source, third = rig.pinned("source", rig.words), backend.create_stream("third")
    graph_exec = _one_node(rig)
    rig.begin_forked()
    rig.invalidate()
    calls: dict[str, Callable[[], object]] = {
        "launch": lambda: rig.work(rig.main),
        "launch on the joined stream": lambda: rig.work(rig.side),
        "fill": lambda: backend.fill(rig.x, 0, NBYTES, rig.main),
        "copy_h2d": lambda: backend.copy_h2d(rig.x, source, NBYTES, rig.main),
        "copy_d2h": lambda: backend.copy_d2h(source, rig.x, NBYTES, rig.main),
        "copy_d2d": lambda: backend.copy_d2d(rig.x, source.device_ptr, NBYTES, rig.main),
        "launch_graph": lambda: backend.launch_graph(graph_exec, rig.main),
        "record": lambda: backend.record(rig.join, rig.main),
        "wait": lambda: backend.wait(rig.main, rig.fork),
        "wait of a third stream": lambda: backend.wait(third, rig.fork),
        "synchronize": lambda: backend.synchronize(rig.main),
        "capture_status": lambda: backend.capture_status(rig.main),
        "end": lambda: backend.end_capture(rig.main),
    }
    outcome: Outcome = {name: code(call) for name, call in calls.items()}
    outcome["third"] = rig.status(third)
    outcome["not run"] = rig.holds(rig.words)
    outcome["usable"] = rig.usable()
    return outcome


@case("A wait that would join two captures is refused and invalidates both.")
def wait_joins_two_captures(rig: Rig) -> Outcome:
    backend = rig.backend
    backend.begin_capture(rig.main)
    backend.begin_capture(rig.side)
    rig.work(rig.side)
    backend.record(rig.join, rig.side)
    outcome: Outcome = {"wait": code(lambda: backend.wait(rig.main, rig.join))}
    outcome["main"], outcome["side"] = rig.status(rig.main), rig.status(rig.side)
    outcome["end of main"] = code(lambda: backend.end_capture(rig.main))
    outcome["end of side"] = code(lambda: backend.end_capture(rig.side))
    outcome["usable"] = rig.usable()
    return outcome


@case("Two captures on two streams do not know of each other.")
def two_separate_captures(rig: Rig) -> Outcome:
    backend = rig.backend
    backend.begin_capture(rig.main)
    backend.begin_capture(rig.side)
    rig.work(rig.main)
    rig.work(rig.side)
    rig.work(rig.side)
    first, second = rig.end_exec(rig.main), rig.end_exec(rig.side)
    backend.launch_graph(first, rig.main)
    outcome: Outcome = {"one node": rig.holds(affine(rig.words))}
    backend.launch_graph(second, rig.main)
    outcome["two nodes"] = rig.holds(affine(affine(affine(rig.words))))
    return outcome


@case("A capture is ended on the stream that began it; on another one the end is refused.")
def end_on_joined_stream(rig: Rig) -> Outcome:
    rig.begin_forked()
    outcome: Outcome = {"end on side": code(lambda: rig.backend.end_capture(rig.side))}
    outcome["main"], outcome["side"] = rig.status(rig.main), rig.status(rig.side)
    outcome["end on main"] = code(lambda: rig.backend.end_capture(rig.main))
    outcome["main after"], outcome["side after"] = rig.status(rig.main), rig.status(rig.side)
    rig.backend.abort_capture(rig.main)
    outcome["usable"] = rig.usable()
    return outcome


@case("Work forked to another stream has to be joined before the end.")
def unjoined_fork(rig: Rig) -> Outcome:
    rig.begin_forked()
    rig.work(rig.side)
    return _end(rig)


@case("A join that comes before the last forked work does not count for it.")
def join_before_the_last_work(rig: Rig) -> Outcome:
    rig.begin_forked()
    rig.work(rig.side)
    rig.backend.record(rig.join, rig.side)
    rig.backend.wait(rig.main, rig.join)
    rig.work(rig.side)
    return _end(rig)


@case("A stream that joined and did nothing need not be joined back.")
def unjoined_fork_without_work(rig: Rig) -> Outcome:
    rig.begin_forked()
    return _end(rig)


@case("Nor one that joined an empty capture and did nothing.")
def unjoined_fork_of_nothing(rig: Rig) -> Outcome:
    rig.backend.begin_capture(rig.main)
    rig.backend.record(rig.fork, rig.main)
    rig.backend.wait(rig.side, rig.fork)
    return _end(rig)


@case("A stream that captures, or takes part in a capture, cannot begin another; the open one goes on.")
def begin_while_capturing(rig: Rig) -> Outcome:
    backend = rig.backend
    rig.begin_forked()
    outcome: Outcome = {"begin on main": code(lambda: backend.begin_capture(rig.main))}
    outcome["begin on side"] = code(lambda: backend.begin_capture(rig.side))
    outcome["main"] = rig.status(rig.main)
    rig.work(rig.side)
    backend.record(rig.join, rig.side)
    backend.wait(rig.main, rig.join)
    outcome["end"] = code(lambda: backend.end_capture(rig.main))
    outcome["usable"] = rig.usable()
    return outcome


@case("A capture that is not open cannot be ended, nor one ended twice.")
def end_while_not_capturing(rig: Rig) -> Outcome:
    backend = rig.backend
    outcome: Outcome = {"end": code(lambda: backend.end_capture(rig.main))}
    backend.begin_capture(rig.main)
    rig.work(rig.main)
    outcome["first"] = code(lambda: backend.end_capture(rig.main))
    outcome["second"] = code(lambda: backend.end_capture(rig.main))
    outcome["usable"] = rig.usable()
    return outcome


@case("Aborting leaves every stream usable, whatever state the capture was in, and the captured work never runs.")
def abort_leaves_streams_usable(rig: Rig) -> Outcome:
    backend = rig.backend
    outcome: Outcome = {"nothing to abort": code(lambda: backend.abort_capture(rig.main))}
    for name, spoil in (("active", False), ("invalid", True)):
        for through in (rig.main, rig.side):
            rig.begin_forked()
            rig.work(rig.side)
            if spoil:
                rig.invalidate()
            key = f"{name}, through {'main' if through == rig.main else 'side'}"
            outcome[key] = code(partial(backend.abort_capture, through))
            outcome[f"{key}: streams"] = [rig.status(rig.main), rig.status(rig.side)]
    outcome["not run"] = rig.holds(rig.words)
    outcome["usable"] = rig.usable()
    return outcome


@case("In relaxed mode memory, streams and events come and go while a capture is open.")
def memory_in_relaxed_capture(rig: Rig) -> Outcome:
    backend = rig.backend
    device, pinned = backend.alloc("before", 4096), backend.alloc_pinned("before", 4096)
    stream, event = backend.create_stream("before"), backend.create_event("before")
    backend.begin_capture(rig.main)
    rig.work(rig.main)
    calls: dict[str, Callable[[], object]] = {
        "alloc": lambda: backend.alloc("inside", 1 << 20),
        "free": lambda: backend.free(device),
        "alloc_pinned": lambda: backend.alloc_pinned("inside", 1 << 20),
        "free_pinned": lambda: backend.free_pinned(pinned),
        "memory_info": backend.memory_info,
        "prepare": lambda: rig.affine(rig.x, 7, 9),
        "create_stream": lambda: backend.create_stream("inside"),
        "destroy_stream": lambda: backend.destroy_stream(stream),
        "create_event": lambda: backend.create_event("inside"),
        "destroy_event": lambda: backend.destroy_event(event),
    }
    outcome: Outcome = {name: code(call) for name, call in calls.items()}
    outcome["status"] = rig.status(rig.main)
    graph_exec = rig.end_exec()
    backend.launch_graph(graph_exec, rig.main)
    outcome["replay is right"] = rig.holds(affine(rig.words))
    return outcome


@case("In relaxed mode other streams work and are waited for while a capture is open.")
def other_streams_in_relaxed_capture(rig: Rig) -> Outcome:
    backend = rig.backend
    y = rig.upload("y", rig.words)
    other, out = rig.affine(y, 7, 9), rig.pinned("out", ~rig.words)
    backend.begin_capture(rig.main)
    rig.work(rig.main)
    rig.work(rig.side, other)
    backend.copy_d2h(out, y, NBYTES, rig.side)
    outcome: Outcome = {"synchronize": code(lambda: backend.synchronize(rig.side))}
    outcome["right"] = bool(np.array_equal(out.array.view(np.int32), affine(rig.words, 7, 9)))
    backend.record(rig.join, rig.side)
    outcome["synchronize_event"] = code(lambda: backend.synchronize_event(rig.join))
    outcome["status"] = [rig.status(rig.main), rig.status(rig.side)]
    outcome["end"] = code(lambda: backend.end_capture(rig.main))
    return outcome


@case("Destroying the stream that began a capture ends the capture and drops what it recorded.")
def destroy_capturing_stream(rig: Rig) -> Outcome:
    backend = rig.backend
    rig.begin_forked()
    outcome: Outcome = {"destroy": code(lambda: backend.destroy_stream(rig.main)), "side": rig.status(rig.side)}
    outcome["work on side"] = code(lambda: rig.work(rig.side))
    backend.abort_capture(rig.side)
    backend.synchronize(rig.side)
    rig.main = backend.create_stream("new main")
    outcome["usable"] = rig.usable()
    return outcome


@case("Destroying a joined stream leaves the capture open, and its work can no longer be joined.")
def destroy_joined_stream(rig: Rig) -> Outcome:
    backend = rig.backend
    rig.begin_forked()
    rig.work(rig.side)
    outcome: Outcome = {"destroy": code(lambda: backend.destroy_stream(rig.side)), "main": rig.status(rig.main)}
    outcome["end"] = code(lambda: backend.end_capture(rig.main))
    rig.side = backend.create_stream("new side")
    outcome["usable"] = rig.usable()
    return outcome


@case("Destroying an event that a capture has recorded does not harm the capture.")
def destroy_event_in_capture(rig: Rig) -> Outcome:
    backend = rig.backend
    rig.begin_forked()
    outcome: Outcome = {"destroy": code(lambda: backend.destroy_event(rig.fork))}
    rig.work(rig.side)
    backend.record(rig.join, rig.side)
    backend.wait(rig.main, rig.join)
    graph_exec = rig.end_exec()
    backend.launch_graph(graph_exec, rig.main)
    outcome["right"] = rig.holds(affine(affine(rig.words)))
    return outcome


@case("Copies and fills of zero bytes are legal in a capture.")
def zero_bytes_in_capture(rig: Rig) -> Outcome:
    backend, source = rig.backend, rig.pinned("source", rig.words)
    backend.begin_capture(rig.main)
    outcome: Outcome = {"fill": code(lambda: backend.fill(rig.x, 0, 0, rig.main))}
    outcome["copy_h2d"] = code(lambda: backend.copy_h2d(rig.x, source, 0, rig.main))
    outcome["copy_d2d"] = code(lambda: backend.copy_d2d(rig.x, source.device_ptr, 0, rig.main))
    outcome["status"] = rig.status(rig.main)
    backend.abort_capture(rig.main)
    outcome["usable"] = rig.usable()
    return outcome


@case("While the stream captures, a copy of memory nobody allocated is refused and harms nothing; a fill is taken.")
def wild_work_in_a_capture(rig: Rig) -> Outcome:
    backend, outcome = rig.backend, Outcome()
    source = rig.pinned("source", rig.words)
    calls: dict[str, Callable[[], object]] = {
        "fill": lambda: backend.fill(NOWHERE, 7, NBYTES, rig.main),
        "copy_d2d": lambda: backend.copy_d2d(NOWHERE, rig.x, NBYTES, rig.main),
        "copy_h2d": lambda: backend.copy_h2d(NOWHERE, source, NBYTES, rig.main),
    }
    for name, call in calls.items():
        backend.begin_capture(rig.main)
        outcome[name] = code(call)
        outcome[f"{name}: status"] = rig.status(rig.main)
        outcome[f"{name}: end"] = code(lambda: backend.end_capture(rig.main))
    outcome["usable"] = rig.usable()
    return outcome


@case("Destroying a joined stream that did no work does not harm the capture.")
def destroy_joined_stream_without_work(rig: Rig) -> Outcome:
    rig.begin_forked()
    outcome: Outcome = {"destroy": code(lambda: rig.backend.destroy_stream(rig.side)), "main": rig.status(rig.main)}
    outcome["end"] = code(lambda: rig.backend.end_capture(rig.main))
    rig.side = rig.backend.create_stream("new side")
    outcome["usable"] = rig.usable()
    return outcome


def _one_node(rig: Rig) -> GraphExec:
    rig.backend.begin_capture(rig.side)
    rig.work(rig.side)
    return rig.end_exec(rig.side)


def _end(rig: Rig) -> Outcome:
    """End on `main` what may be unjoined."""
    outcome: Outcome = {"end": code(lambda: rig.backend.end_capture(rig.main))}
    outcome["main"], outcome["side"] = rig.status(rig.main), rig.status(rig.side)
    outcome["usable"] = rig.usable()
    return outcome


@case("A captured copy from pageable memory reads it when the graph is launched.")
def captured_pageable_source(rig: Rig) -> Outcome:
    backend, page = rig.backend, rig.words.copy()
    backend.begin_capture(rig.main)
    outcome: Outcome = {
        "copy": code(lambda: backend.copy_h2d(rig.x, HostBuffer.pageable("page", page), NBYTES, rig.main))
    }
    graph_exec = rig.end_exec()
    for turn in ("first", "second"):
        page[:] = np.random.default_rng(len(turn)).integers(-(2**31), 2**31, N, dtype=np.int32)
        backend.launch_graph(graph_exec, rig.main)
        backend.synchronize(rig.main)
        outcome[f"{turn} launch reads it"] = rig.holds(page)
    return outcome
