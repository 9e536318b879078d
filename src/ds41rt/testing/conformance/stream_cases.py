"""Conformance: streams, events, and graphs once they are captured."""

import numpy as np

from ds41rt.cu.backend import Event, Graph, GraphExec, HostBuffer, Stream
from ds41rt.testing.conformance.case import NBYTES, Outcome, Rig, affine, case, code


@case("An event is not done before the work it recorded; it is afterwards.", pending=True)
def query_event(rig: Rig) -> Outcome:
    backend = rig.backend
    rig.delay(rig.main)
    backend.record(rig.join, rig.main)
    outcome: Outcome = {"before": backend.query_event(rig.join)}
    outcome["synchronize"] = code(lambda: backend.synchronize_event(rig.join))
    outcome["after"] = backend.query_event(rig.join)
    return outcome


@case("An event that was never recorded is done, and waiting for it waits for nothing.")
def unrecorded_event(rig: Rig) -> Outcome:
    backend = rig.backend
    outcome: Outcome = {"query": backend.query_event(rig.join)}
    outcome["synchronize"] = code(lambda: backend.synchronize_event(rig.join))
    outcome["wait"] = code(lambda: backend.wait(rig.main, rig.join))
    outcome["usable"] = rig.usable()
    return outcome


@case("A stream that waits for an event runs its work after what the event recorded.")
def wait_orders_streams(rig: Rig) -> Outcome:
    backend = rig.backend
    rig.delay(rig.side)
    rig.work(rig.side, rig.affine(rig.x, 7, 1))
    backend.record(rig.join, rig.side)
    backend.wait(rig.main, rig.join)
    rig.work(rig.main)
    return {"in order": rig.holds(affine(affine(rig.words, 7, 1)))}


@case("A wait refers to the record that came last before it; a later record does not move it.")
def wait_is_for_the_last_record(rig: Rig) -> Outcome:
    backend, flag = rig.backend, rig.pinned("flag", rig.words)
    for _ in range(2):
        rig.delay(rig.side)
        rig.work(rig.side)
        backend.record(rig.join, rig.side)
    backend.wait(rig.main, rig.join)
    backend.copy_d2h(flag, rig.x, NBYTES, rig.main)
    backend.record(rig.fork, rig.main)
    backend.wait(rig.side, rig.fork)
    rig.work(rig.side)
    backend.record(rig.join, rig.side)
    backend.synchronize(rig.main)
    outcome: Outcome = {"both records": bool(np.array_equal(flag.array.view(np.int32), affine(affine(rig.words))))}
    backend.synchronize(rig.side)
    return outcome


@case("A wait counts for a record, and for a synchronise, that follow it without work in between.")
def wait_without_work_orders(rig: Rig) -> Outcome:
    backend, third = rig.backend, rig.backend.create_stream("third")
    flag = rig.pinned("flag", rig.words)
    rig.delay(rig.side)
    rig.work(rig.side, rig.affine(flag.device_ptr, 3, 5))
    backend.record(rig.fork, rig.side)
    backend.wait(rig.main, rig.fork)
    backend.record(rig.join, rig.main)
    backend.wait(third, rig.join)
    backend.synchronize(third)
    return {"done": bool(np.array_equal(flag.array.view(np.int32), affine(rig.words)))}


@case(
    "Destroying a stream and an event with work in flight returns at once; the work completes, and so does the order."
)
def destroy_in_flight(rig: Rig) -> Outcome:
    backend = rig.backend
    rig.delay(rig.side)
    rig.work(rig.side, rig.affine(rig.x, 7, 1))
    backend.record(rig.join, rig.side)
    backend.wait(rig.main, rig.join)
    outcome: Outcome = {"destroy_stream": code(lambda: backend.destroy_stream(rig.side))}
    outcome["destroy_event"] = code(lambda: backend.destroy_event(rig.join))
    rig.work(rig.main)
    outcome["in order"] = rig.holds(affine(affine(rig.words, 7, 1)))
    return outcome


@case("Handles that were destroyed, or never handed out, are refused.")
def unknown_handles(rig: Rig) -> Outcome:
    backend = rig.backend
    backend.destroy_stream(rig.side)
    backend.destroy_event(rig.join)
    return {
        "synchronize": code(lambda: backend.synchronize(rig.side)),
        "destroy_stream": code(lambda: backend.destroy_stream(rig.side)),
        "launch": code(lambda: rig.work(rig.side)),
        "record": code(lambda: backend.record(rig.join, rig.main)),
        "query_event": code(lambda: backend.query_event(rig.join)),
        "stream 0": code(lambda: backend.synchronize(Stream(0))),
        "event 0": code(lambda: backend.query_event(Event(0))),
        "graph 0": code(lambda: backend.instantiate(Graph(0))),
        "exec 0": code(lambda: backend.launch_graph(GraphExec(0), rig.main)),
        "begin_capture": code(lambda: backend.begin_capture(rig.side)),
        "abort_capture": code(lambda: backend.abort_capture(rig.side)),
    }


@case("An executable graph does not need the graph it was made from.")
def exec_outlives_its_graph(rig: Rig) -> Outcome:
    backend = rig.backend
    backend.begin_capture(rig.main)
    rig.work(rig.main)
    graph = backend.end_capture(rig.main)
    graph_exec = backend.instantiate(graph)
    outcome: Outcome = {"destroy": code(lambda: backend.destroy_graph(graph))}
    outcome["launch"] = code(lambda: backend.launch_graph(graph_exec, rig.main))
    outcome["right"] = rig.holds(affine(rig.words))
    outcome["instantiate again"] = code(lambda: backend.instantiate(graph))
    outcome["destroy again"] = code(lambda: backend.destroy_graph(graph))
    return outcome


@case("An executable graph destroyed in flight completes; it cannot be launched or destroyed again.")
def destroy_exec_in_flight(rig: Rig) -> Outcome:
    backend = rig.backend
    backend.begin_capture(rig.main)
    rig.delay(rig.main)
    rig.work(rig.main)
    graph_exec = rig.end_exec()
    backend.launch_graph(graph_exec, rig.main)
    outcome: Outcome = {"destroy": code(lambda: backend.destroy_exec(graph_exec))}
    outcome["right"] = rig.holds(affine(rig.words))
    outcome["launch"] = code(lambda: backend.launch_graph(graph_exec, rig.main))
    outcome["destroy again"] = code(lambda: backend.destroy_exec(graph_exec))
    return outcome


@case("Two launches of one executable graph never overlap, whatever streams they are on.")
def launches_of_one_exec_are_ordered(rig: Rig) -> Outcome:
    backend, words = rig.backend, rig.words
    scratch = rig.upload("scratch", words)
    step = rig.affine(scratch, 3, 5)
    backend.begin_capture(rig.main)
    backend.copy_d2d(scratch, rig.x, NBYTES, rig.main)
    rig.delay(rig.main)
    rig.work(rig.main, step)
    backend.copy_d2d(rig.x, scratch, NBYTES, rig.main)
    graph_exec = rig.end_exec()
    third = backend.create_stream("third")
    for stream in (rig.main, rig.side, third):
        backend.launch_graph(graph_exec, stream)
        words = affine(words)
    for stream in (rig.side, third):
        backend.synchronize(stream)
    return {"no update lost": rig.holds(words)}


@case("A launch keeps its place in its stream: after the work before it, before the work behind it.")
def graph_launch_in_stream_order(rig: Rig) -> Outcome:
    backend = rig.backend
    backend.begin_capture(rig.side)
    rig.delay(rig.side)
    rig.work(rig.side)
    graph_exec = rig.end_exec(rig.side)
    rig.work(rig.main, rig.affine(rig.x, 7, 1))
    backend.launch_graph(graph_exec, rig.main)
    rig.work(rig.main, rig.affine(rig.x, 11, 2))
    return {"in order": rig.holds(affine(affine(affine(rig.words, 7, 1)), 11, 2))}


@case("Fork and join become edges: every replay runs both branches after the fork and before the join.")
def captured_fork_and_join(rig: Rig) -> Outcome:
    backend = rig.backend
    y = rig.upload("y", rig.words)
    branch, last = rig.affine(y, 7, 1), rig.affine(y, 11, 2)
    rig.begin_forked()  # x = 3 x + 5
    backend.copy_d2d(y, rig.x, NBYTES, rig.side)
    rig.delay(rig.side)
    rig.work(rig.side, branch)
    backend.record(rig.join, rig.side)
    backend.wait(rig.main, rig.join)
    rig.work(rig.main, last)
    graph_exec = rig.end_exec()
    x, right = rig.words, []
    for _ in range(2):
        backend.launch_graph(graph_exec, rig.main)
        x = affine(x)
        right.append(str(rig.holds(affine(affine(x, 7, 1), 11, 2), y)))
    return {"right": right}


@case("An executable graph cannot be launched into a capture; trying invalidates it.")
def graph_launch_in_capture(rig: Rig) -> Outcome:
    backend = rig.backend
    backend.begin_capture(rig.main)
    rig.work(rig.main)
    inner = rig.end_exec()
    backend.begin_capture(rig.main)
    outcome: Outcome = {"launch": code(lambda: backend.launch_graph(inner, rig.main)), "status": rig.status(rig.main)}
    outcome["launch again"] = code(lambda: backend.launch_graph(inner, rig.main))
    outcome["end"] = code(lambda: backend.launch_graph(rig.end_exec(), rig.main))
    outcome["twice"] = rig.holds(affine(affine(rig.words)))
    outcome["usable"] = rig.usable()
    return outcome


@case("An empty graph can be instantiated and launched.")
def empty_graph(rig: Rig) -> Outcome:
    backend = rig.backend
    backend.begin_capture(rig.main)
    graph = backend.end_capture(rig.main)
    graph_exec = backend.instantiate(graph)
    outcome: Outcome = {"launch": code(lambda: backend.launch_graph(graph_exec, rig.main))}
    outcome["untouched"] = rig.holds(rig.words)
    return outcome


@case("A captured kernel keeps its arguments; the launch object may go away.")
def captured_arguments_are_kept(rig: Rig) -> Outcome:
    backend = rig.backend
    backend.begin_capture(rig.main)
    launch = rig.affine(rig.x, 7, 1)
    backend.launch(launch, rig.main)
    del launch
    graph_exec = rig.end_exec()
    other = [rig.affine(rig.x, 1000 + i, i) for i in range(100)]
    backend.launch_graph(graph_exec, rig.main)
    return {"right": len(other) == 100 and rig.holds(affine(rig.words, 7, 1))}


@case("A replay reads the pinned source of a copy again, and writes the pinned target again.")
def replay_rereads_pinned_memory(rig: Rig) -> Outcome:
    backend = rig.backend
    source, target = rig.pinned("source", rig.words), rig.pinned("target", ~rig.words)
    backend.begin_capture(rig.main)
    backend.copy_h2d(rig.x, source, NBYTES, rig.main)
    rig.work(rig.main)
    backend.copy_d2h(target, rig.x, NBYTES, rig.main)
    graph_exec = rig.end_exec()
    right = []
    for turn in range(3):
        words = np.roll(rig.words, turn + 1)
        source.array[:] = words.view(np.uint8)
        target.array[:] = 0x77
        backend.launch_graph(graph_exec, rig.main)
        backend.synchronize(rig.main)
        right.append(str(np.array_equal(target.array.view(np.int32), affine(words))))
    return {"right": right}


@case("A launch prepared by one backend, or made by hand, is refused by another.")
def foreign_launch(rig: Rig) -> Outcome:
    made_up = type("MadeUp", (), {"label": "made up"})()
    return {"launch": code(lambda: rig.backend.launch(made_up, rig.main)), "untouched": rig.holds(rig.words)}


@case("When pageable memory is read by a copy behind other work: at the call, or when the copy runs.", observed=True)
def pageable_source(rig: Rig) -> Outcome:
    outcome: Outcome = {}
    for nbytes in (256, 64 << 10, 1 << 20):
        page = np.full(nbytes, 0x11, np.uint8)
        buf = rig.backend.alloc("target", nbytes)
        rig.delay(rig.main)
        rig.backend.copy_h2d(buf.ptr, HostBuffer.pageable("page", page), nbytes, rig.main)
        page[:] = 0x22
        out = np.zeros(nbytes, np.uint8)
        rig.backend.copy_d2h(HostBuffer.pageable("out", out), buf.ptr, nbytes, rig.main)
        rig.backend.synchronize(rig.main)
        values = set(out.tolist())
        outcome[f"{nbytes} bytes"] = {0x11: "read at the call", 0x22: "read when it ran"}.get(
            values.pop() if len(values) == 1 else 0, "mixed"
        )
    return outcome


@case("When pageable memory is written by a copy behind other work: before the call returns, or later.", observed=True)
def pageable_target(rig: Rig) -> Outcome:
    outcome: Outcome = {}
    for nbytes in (256, 64 << 10, 1 << 20):
        buf = rig.backend.alloc("source", nbytes)
        rig.delay(rig.main)
        rig.backend.fill(buf.ptr, 0x33, nbytes, rig.main)
        out = np.zeros(nbytes, np.uint8)
        rig.backend.copy_d2h(HostBuffer.pageable("out", out), buf.ptr, nbytes, rig.main)
        at_return = bool(np.all(out == 0x33))
        rig.backend.synchronize(rig.main)
        outcome[f"{nbytes} bytes"] = "written at the call" if at_return else "written later"
    return outcome
