"""Conformance: events between a capture and the world outside of it."""

from collections.abc import Callable

from ds41rt.testing.conformance.case import Outcome, Rig, case, code


@case("Captured work that waits for an event recorded outside is refused, and the capture is invalid.")
def wait_for_outside_event(rig: Rig) -> Outcome:
    rig.work(rig.side)
    rig.backend.record(rig.join, rig.side)
    return _wait_inside(rig)


@case("That the outside event has completed does not help.")
def wait_for_completed_outside_event(rig: Rig) -> Outcome:
    rig.work(rig.side)
    rig.backend.record(rig.join, rig.side)
    rig.backend.synchronize_event(rig.join)
    return _wait_inside(rig)


@case("Nor that it was recorded on an empty stream.")
def wait_for_event_of_empty_stream(rig: Rig) -> Outcome:
    rig.backend.record(rig.join, rig.backend.create_stream("fresh"))
    return _wait_inside(rig)


@case("Nor that it was recorded on the capturing stream itself, before the capture.")
def wait_for_own_earlier_event(rig: Rig) -> Outcome:
    rig.work(rig.main)
    rig.backend.record(rig.join, rig.main)
    return _wait_inside(rig)


@case("Captured work may wait for an event that was never recorded: it waits for nothing.")
def wait_for_unrecorded_event_in_capture(rig: Rig) -> Outcome:
    return _wait_inside(rig)


@case("Captured work that waits for an event of a capture that has ended is refused, and the capture is invalid.")
def wait_for_event_of_ended_capture_in_capture(rig: Rig) -> Outcome:
    rig.backend.begin_capture(rig.main)
    rig.work(rig.main)
    rig.backend.record(rig.join, rig.main)
    rig.backend.end_capture(rig.main)
    return _wait_inside(rig)


@case("Ordinary work cannot wait for an event of a capture that has ended.")
def wait_for_event_of_ended_capture(rig: Rig) -> Outcome:
    rig.backend.begin_capture(rig.main)
    rig.work(rig.main)
    rig.backend.record(rig.join, rig.main)
    rig.backend.end_capture(rig.main)
    outcome: Outcome = {"wait": code(lambda: rig.backend.wait(rig.side, rig.join)), "side": rig.status(rig.side)}
    outcome["usable"] = rig.usable()
    return outcome


@case("Nor for one of a capture that was aborted.")
def wait_for_event_of_aborted_capture(rig: Rig) -> Outcome:
    rig.backend.begin_capture(rig.main)
    rig.work(rig.main)
    rig.backend.record(rig.join, rig.main)
    rig.invalidate()
    rig.backend.abort_capture(rig.main)
    outcome: Outcome = {"wait": code(lambda: rig.backend.wait(rig.side, rig.join)), "side": rig.status(rig.side)}
    outcome["usable"] = rig.usable()
    return outcome


@case("An event last recorded in an open capture cannot be queried; asking invalidates the capture.")
def query_captured_event(rig: Rig) -> Outcome:
    return _ask(rig, lambda: rig.backend.query_event(rig.fork))


@case("Nor can the host wait for it; trying invalidates the capture.")
def synchronize_captured_event(rig: Rig) -> Outcome:
    return _ask(rig, lambda: rig.backend.synchronize_event(rig.fork))


@case("An event of an invalid capture is void, though the capture has not ended yet.")
def event_of_invalidated_capture(rig: Rig) -> Outcome:
    backend = rig.backend
    backend.begin_capture(rig.main)
    rig.work(rig.main)
    backend.record(rig.fork, rig.main)
    rig.invalidate()
    outcome: Outcome = {"query": code(lambda: backend.query_event(rig.fork))}
    outcome["synchronize"] = code(lambda: backend.synchronize_event(rig.fork))
    backend.begin_capture(rig.side)
    outcome["wait in another capture"] = code(lambda: backend.wait(rig.side, rig.fork))
    outcome["side"] = rig.status(rig.side)
    backend.abort_capture(rig.side)
    outcome["record again elsewhere"] = code(lambda: backend.record(rig.fork, rig.side))
    outcome["query then"] = code(lambda: backend.query_event(rig.fork))
    outcome["end"] = code(lambda: backend.end_capture(rig.main))
    outcome["usable"] = rig.usable()
    return outcome


@case("An event of a capture that has ended cannot be queried or waited for until it is recorded again.")
def query_event_of_ended_capture(rig: Rig) -> Outcome:
    backend = rig.backend
    rig.backend.begin_capture(rig.main)
    rig.work(rig.main)
    backend.record(rig.fork, rig.main)
    graph_exec = rig.end_exec()
    outcome: Outcome = {"query": code(lambda: backend.query_event(rig.fork))}
    outcome["synchronize"] = code(lambda: backend.synchronize_event(rig.fork))
    backend.launch_graph(graph_exec, rig.main)
    backend.synchronize(rig.main)
    outcome["query after a replay"] = code(lambda: backend.query_event(rig.fork))
    outcome["record again"] = code(lambda: backend.record(rig.fork, rig.main))
    outcome["synchronize then"] = code(lambda: backend.synchronize_event(rig.fork))
    outcome["done then"] = backend.query_event(rig.fork)
    return outcome


def _wait_inside(rig: Rig) -> Outcome:
    """A capture on `main` that waits for the event `join`."""
    backend = rig.backend
    backend.begin_capture(rig.main)
    rig.work(rig.main)
    outcome: Outcome = {"wait": code(lambda: backend.wait(rig.main, rig.join)), "main": rig.status(rig.main)}
    outcome["work"] = code(lambda: rig.work(rig.main))
    outcome["end"] = code(lambda: backend.end_capture(rig.main))
    outcome["usable"] = rig.usable()
    return outcome


def _ask(rig: Rig, ask: Callable[[], object]) -> Outcome:
    backend = rig.backend
    backend.begin_capture(rig.main)
    rig.work(rig.main)
    backend.record(rig.fork, rig.main)
    outcome: Outcome = {"asked": code(ask), "main": rig.status(rig.main)}
    outcome["end"] = code(lambda: backend.end_capture(rig.main))
    outcome["asked after the end"] = code(ask)
    outcome["usable"] = rig.usable()
    return outcome
