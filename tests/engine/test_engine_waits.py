"""Every wait is needed: the calls of each site that orders work are dropped in turn, and a scenario must notice.

A site is a line below the package that calls `record`, `wait`, `synchronize` or `synchronize_event` while an engine
is opened, steps, fails, fetches ahead and closes. A new site is found by itself; one that no scenario notices must be
removed from the code, or needs a scenario.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from engine_harness import (
    SOURCE,
    Call,
    Checkpoints,
    Hook,
    ProbeBackend,
    Reference,
    Run,
    call_site,
    check_trace,
    out_of_memory,
    plant_fault,
    reference,
)

from ds41rt.cu.backend import Stream
from ds41rt.cu.result import CudaError
from ds41rt.errors import Ds41Error
from ds41rt.trace.record import TraceRecorder

ORDERING = ("record", "wait", "synchronize", "synchronize_event")
N_RANDOM = 12
SCHEDULES = ("lazy", "eager", *(f"random:{seed}" for seed in range(N_RANDOM)))

Scenario = Callable[[Reference, ProbeBackend], None]


def decode(run: Run, n_tokens: int = 14) -> None:
    run.steps(n_tokens)
    if run.engine.machine.step_graph:
        stats = run.stats()
        # an ordering that is missing in a capture shows as a failed capture
        assert stats.captures == len(run.engine.machine.owners)
        assert stats.falls["stale_table"] == stats.falls["no_flag"] == 0


def step_graph(ref: Reference, backend: ProbeBackend) -> None:
    with Run(ref, slots=20, backend=backend) as run:
        decode(run)


def eager(ref: Reference, backend: ProbeBackend) -> None:
    with Run(ref, slots=20, mode="eager", backend=backend) as run:
        decode(run)


def host_route(ref: Reference, backend: ProbeBackend) -> None:
    with Run(ref, slots=20, mode="eager", device_route=False, backend=backend) as run:
        decode(run)


def checked_route(ref: Reference, backend: ProbeBackend) -> None:
    with Run(ref, slots=20, mode="eager", device_route_diag=True, backend=backend) as run:
        decode(run)


def traced(ref: Reference, backend: ProbeBackend) -> None:
    with Run(ref, slots=20, backend=backend) as run:
        trace = TraceRecorder(run.engine)
        for _ in range(8):
            run.step()
            trace.end_token()
        check_trace(trace, ref, 0)
        trace.close()


def fetched_ahead(ref: Reference, backend: ProbeBackend) -> None:
    """Experts move between tokens, many at a time, and nobody synchronises between the fetches."""
    with Run(ref, slots=16, evict_random_pct=0.0, staging_slots=2, backend=backend) as run:
        run.steps(3)
        for layer in range(run.engine.config.n_layers):
            run.starve([(layer, expert) for expert in run.picks()[layer]])
            for expert in run.picks()[layer]:
                run.engine._fetcher.fetch(layer, [expert], run.engine.stream, count=False)
                run.engine.table.update()
            run.step()
            run.check_table()


def told_often(ref: Reference, backend: ProbeBackend) -> None:
    """The slot table is updated again and again, and nobody synchronises between the updates."""
    with Run(ref, slots=20, backend=backend) as run:
        run.steps(3)
        for expert in (5, 6, 7):
            run.engine.table.apply([(layer, expert, 1 + expert) for layer in range(run.engine.config.n_layers)])
        assert run.table()[:, 5:8].tolist() == [[6, 7, 8]] * run.engine.config.n_layers


def a_copy_fails(ref: Reference, backend: ProbeBackend) -> None:
    """The first of two experts is on its way when the copy of the second fails; the next fetch follows at once."""
    with Run(ref, slots=20, staging_slots=2, backend=backend) as run:
        outer, seen, stream = backend.hook, 0, run.engine.stream
        cache, arena, fetch = run.engine.cache, run.engine.arena, run.engine._fetcher.fetch

        def hook(name: str, args: tuple[Any, ...], call: Call) -> Any:
            nonlocal seen
            seen += "expert.copy" in args
            if seen == 2:
                raise out_of_memory()
            return call() if outer is None else outer(name, args, call)

        absent = [e for e in range(run.engine.config.n_experts) if not cache.slot_of(0, e)]
        cache.begin_epoch()
        backend.hook = hook
        with pytest.raises(CudaError):
            fetch(0, absent[:2], stream, count=False)
        backend.hook = outer
        fetch(0, absent[2:4], stream, count=False)
        backend.inner.synchronize(stream)
        for expert in absent[:1], absent[2:3], absent[3:4]:
            bytes_read = np.empty(arena.layout.nbytes, np.uint8)
            run.engine._source.read_expert(0, expert[0], bytes_read)
            on_device = backend.inner.memory.bytes(arena.slot_ptr(cache.slot_of(0, expert[0])), arena.layout.nbytes)
            assert np.array_equal(on_device, bytes_read)


def two_tiers(ref: Reference, backend: ProbeBackend) -> None:
    """Experts are read in place, promoted and demoted while tokens run."""
    with Run(ref, slots=12, host_slots=24, backend=backend) as run:
        decode(run, 24)
        assert run.stats().promotions > 0


def moves_at_once(ref: Reference, backend: ProbeBackend) -> None:
    """The victims of the first moves are still being copied to the device when the token starts."""
    with Run(ref, slots=3, host_slots=12, backend=backend) as run:
        for layer in (0, 1, 1):
            run.engine.cache.begin_epoch()
            run.engine._fetcher.fetch(layer, [13, 14, 15], run.engine.stream, count=False)
        run.steps(6)
        assert run.stats().demotions > 0


def a_move_fails(ref: Reference, backend: ProbeBackend) -> None:
    """No event stands for the copy of a victim: its slot is not used again before the copy is complete."""
    with Run(ref, slots=12, host_slots=24, staging_slots=4, backend=backend) as run:
        run.steps(6)
        outer, saved, failed = backend.hook, False, 0

        def hook(name: str, args: tuple[Any, ...], call: Call) -> Any:
            nonlocal saved, failed
            saved |= "expert.save" in args
            if name == "record" and saved:
                saved = False
                failed += 1
                raise out_of_memory()
            return call() if outer is None else outer(name, args, call)

        backend.hook = hook
        run.steps(12)
        backend.hook = outer
        assert failed > 1


class InterruptAt:
    """A hook that interrupts the launch `label`, and with `drains` every synchronise of the clean-up after it.

    `first` is called just before. Other calls go on to `inner`.
    """

    def __init__(self, label: str, inner: Hook | None, *, drains: bool = False, first: Call = lambda: None) -> None:
        self.label = label
        self.inner = inner
        self.drains = drains
        self.first = first
        self.hit = False

    def __call__(self, name: str, args: tuple[Any, ...], call: Call) -> Any:
        if self.hit and self.drains and name == "synchronize":
            raise KeyboardInterrupt
        if not self.hit and name == "launch" and args[0].label == self.label:
            self.hit = True
            self.first()
            raise KeyboardInterrupt
        return call() if self.inner is None else self.inner(name, args, call)


def interrupted_in_the_clean_up_too(ref: Reference, backend: ProbeBackend) -> None:
    """Nothing was drained. Another sequence is stepped next, then the one that was interrupted: both are right."""
    with Run(ref, slots=20, mode="eager", backend=backend) as run, run.engine.new_sequence() as other:
        run.step(other)
        run.step(other)
        run.steps(9)
        assert run.seq.position % run.engine.config.window != other.position % run.engine.config.window
        outer = backend.hook
        backend.hook = InterruptAt("L00.attn_score", outer, drains=True)
        with pytest.raises(KeyboardInterrupt):
            run.step()
        run.engine._unsettled = False  # which would drain in the machine's place; the cache was not being changed
        backend.hook = outer
        run.step(other)
        run.step()


def left_in_flight(backend: ProbeBackend, stream: Stream) -> Call:
    """Marks what is on a stream now; the result waits for it to complete, whatever has become of the stream."""
    mark = backend.inner.create_event("what is in flight")
    backend.inner.record(mark, stream)

    def complete() -> None:
        backend.inner.synchronize_event(mark)
        backend.inner.destroy_event(mark)

    return complete


def closed_with_work_in_flight(ref: Reference, backend: ProbeBackend) -> None:
    """What is freed at close is still in use by work on both streams, which nobody has drained."""
    with Run(ref, slots=16, mode="eager", backend=backend) as run:
        run.steps(2)
        outer = backend.hook
        backend.hook = InterruptAt("L03.router", outer, drains=True)
        with pytest.raises(KeyboardInterrupt):
            run.step()
        backend.hook = outer
        complete = [left_in_flight(backend, stream) for stream in (run.engine.stream, run.engine.fork.side)]
        run.engine.close()
        for call in complete:
            call()


def closed_with_moves_in_flight(ref: Reference, backend: ProbeBackend) -> None:
    """What is freed at close is still being copied to and from."""
    with Run(ref, slots=12, host_slots=24, backend=backend) as run:
        mover = run.engine._mover
        assert mover is not None
        while not any(batch.transfers for batch in mover._batches):
            run.step()
        complete = left_in_flight(backend, mover._streams[0])
        run.engine.close()
        complete()


def host_slots_reused_after_an_interrupt(ref: Reference, backend: ProbeBackend) -> None:
    """Kernels that nobody has drained read pool slots in place, when others are read into the slots they leave."""
    with Run(ref, slots=0, host_slots=3, staging_slots=4, mode="eager", backend=backend) as run:
        run.steps(2)
        outer = backend.hook
        backend.hook = InterruptAt("L03.attn_in", outer, drains=True)
        with pytest.raises(KeyboardInterrupt):
            run.step()
        backend.hook = outer
        for layer in range(3):
            run.engine.cache.begin_epoch()
            run.engine._fetcher.fetch(layer, [0, 1, 2], run.engine.stream, count=False)
        run.steps(3)


def opened_in_vain(ref: Reference, backend: ProbeBackend) -> None:
    """The last allocation of an engine fails; work enqueued before may use what is freed now."""
    outer, complete = backend.hook, []
    streams: list[Stream] = []

    def hook(name: str, args: tuple[Any, ...], call: Call) -> Any:
        if name == "alloc_pinned" and args[0] == "logits image":
            complete.append(left_in_flight(backend, streams[0]))
            raise out_of_memory()
        result = call() if outer is None else outer(name, args, call)
        if name == "create_stream":
            streams.append(result)
        return result

    backend.hook = hook
    with pytest.raises(CudaError, match="planted"):
        Run(ref, slots=16, backend=backend)
    backend.hook = outer
    complete[0]()


def opened_with_a_fault(ref: Reference, backend: ProbeBackend) -> None:
    """Work of loading that faults late is reported when the engine is opened."""
    outer = backend.hook
    streams: list[Stream] = []

    def hook(name: str, args: tuple[Any, ...], call: Call) -> Any:
        if name == "alloc_pinned" and args[0] == "logits image":
            plant_fault(backend.inner, streams[0])
        result = call() if outer is None else outer(name, args, call)
        if name == "create_stream":
            streams.append(result)
        return result

    backend.hook = hook
    raised = False
    try:
        Run(ref, slots=16, backend=backend)
    except CudaError:
        raised = True
    backend.hook = outer
    assert raised


def failed_with_a_fault_pending(ref: Reference, backend: ProbeBackend) -> None:
    """An interrupted step drains both streams, so that a fault on either is known before the next token."""
    for label, on_side in (("head", False), ("L03.router", True)):
        with Run(ref, slots=20, mode="eager", backend=(lost := ProbeBackend("lazy", backend.hook))) as run:
            run.steps(2)
            stream = run.engine.fork.side if on_side else run.engine.stream
            fault = partial(plant_fault, lost.inner, stream)
            lost.hook = InterruptAt(label, backend.hook, first=fault)
            with pytest.raises(KeyboardInterrupt):
                run.step()
            assert run.engine._closed_because is not None
        lost.close()


SCENARIOS: tuple[Scenario, ...] = (
    step_graph,
    eager,
    fetched_ahead,
    two_tiers,
    moves_at_once,
    a_move_fails,
    closed_with_moves_in_flight,
    host_slots_reused_after_an_interrupt,
    told_often,
    a_copy_fails,
    interrupted_in_the_clean_up_too,
    closed_with_work_in_flight,
    opened_in_vain,
    opened_with_a_fault,
    failed_with_a_fault_pending,
    host_route,
    checked_route,
    traced,
)


class Drop:
    """A hook that notes every ordering call's site, and drops those of one."""

    def __init__(self, site: str = "") -> None:
        self.site = site
        self.seen: set[str] = set()

    def __call__(self, name: str, args: tuple[Any, ...], call: Call) -> Any:
        if name in ORDERING:
            at = call_site()
            self.seen.add(at)
            if at == self.site:
                return None
        return call()


def code_at(site: str) -> str:
    """The file and the text of the line, which outlive its number."""
    file, line = site.split(":")
    with open(f"{SOURCE}/{file}") as source:
        return f"{file}: {source.readlines()[int(line) - 1].strip()}"


def notices(scenario: Scenario, ref: Reference, site: str, schedule: str) -> bool:
    backend = ProbeBackend(schedule, Drop(site))
    try:
        scenario(ref, backend)
    except (AssertionError, CudaError, Ds41Error):
        return True
    finally:
        backend.hook = None
        backend.close()
    return False


def test_no_wait_can_be_removed(checkpoint: Checkpoints) -> None:
    ref = reference(checkpoint("micro"))
    where: dict[str, list[Scenario]] = {}
    for scenario in SCENARIOS:
        for schedule in ("lazy", "random:0"):
            drop = Drop()
            backend = ProbeBackend(schedule, drop)
            scenario(ref, backend)
            backend.hook = None
            lost = scenario is opened_with_a_fault  # with the device everything on it is
            assert lost or not any(backend.inner.live().values())
            backend.close()
        for site in sorted(drop.seen):
            where.setdefault(site, []).append(scenario)
    assert len(where) >= 15, sorted(where)
    unseen = {
        code_at(site)
        for site, scenarios in where.items()
        if not any(notices(s, ref, site, schedule) for schedule in SCHEDULES for s in scenarios)
    }
    assert not unseen
