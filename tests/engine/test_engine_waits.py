"""Every wait is needed: the calls of each site that orders work are dropped in turn, and a scenario must notice.

A site is a line below the package that calls `record`, `wait`, `synchronize` or `synchronize_event` while an engine
is opened, steps, fails, fetches ahead and closes. A new site is found by itself; one that no scenario notices must be
removed from the code or explained in `UNSEEN`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_harness import SOURCE, Call, Checkpoints, Hook, ProbeBackend, Reference, Run, call_site, reference

from ds41rt.cu.result import CudaError
from ds41rt.errors import Ds41Error
from ds41rt.trace import TraceRecorder

ORDERING = ("record", "wait", "synchronize", "synchronize_event")
N_RANDOM = 12
SCHEDULES = ("lazy", "eager", *(f"random:{seed}" for seed in range(N_RANDOM)))

# Line of code -> why dropping it cannot show in a result.
UNSEEN: dict[str, str] = {}

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
        np.testing.assert_array_equal(trace.arrays()["streams_hash"], ref.streams[:8])
        trace.close()


def fetched_ahead(ref: Reference, backend: ProbeBackend) -> None:
    """Experts move between tokens, many at a time, and nobody synchronises between the fetches."""
    with Run(ref, slots=16, evict_random_pct=0.0, backend=backend) as run:
        run.steps(3)
        for layer in range(run.engine.config.n_layers):
            run.starve([(layer, expert) for expert in run.picks()[layer]])
            for expert in run.picks()[layer]:
                run.engine._fetcher.fetch(layer, [expert], run.engine.stream, count=False)
                run.engine.table.update()
            run.step()
            run.check_table()


def closed_with_work_in_flight(ref: Reference, backend: ProbeBackend) -> None:
    """What is freed at close may still be in use by work that was enqueued outside of a step."""
    with Run(ref, slots=16, evict_random_pct=0.0, backend=backend) as run:
        run.steps(2)
        run.starve([])
        hook, done = backend.hook, backend.inner.create_event("the last work")
        backend.inner.record(done, run.engine.stream)
        run.engine.close()
        backend.hook = hook
        backend.inner.synchronize_event(done)
        backend.inner.destroy_event(done)


class InterruptOverFault:
    """A hook that leaves a faulty operation on a stream and interrupts the step; other calls go on to `inner`."""

    def __init__(self, run: Run, where: str, inner: Hook | None) -> None:
        self.run = run
        self.inner = inner
        self.stream = run.engine.stream if where == "compute" else run.engine.fork.side
        self.label = "head" if where == "compute" else run.engine.layers[3].shared[-1].label

    def __call__(self, name: str, args: tuple[Any, ...], call: Call) -> Any:
        if name == "launch" and args[0].label == self.label:
            self.run.backend.fill(0x1230, 0, 4, self.stream, "planted")
            raise KeyboardInterrupt
        return call() if self.inner is None else self.inner(name, args, call)


def failed_with_a_fault_pending(ref: Reference, backend: ProbeBackend) -> None:
    """An interrupted step drains both streams, so that a fault on either is known before the next token."""
    for where in ("compute", "side"):
        with Run(ref, slots=20, mode="eager", backend=(lost := ProbeBackend("lazy", backend.hook))) as run:
            run.steps(2)
            lost.hook = InterruptOverFault(run, where, backend.hook)
            with pytest.raises(KeyboardInterrupt):
                run.step()
            assert run.engine._closed_because is not None
        lost.close()


SCENARIOS: tuple[Scenario, ...] = (
    step_graph,
    eager,
    fetched_ahead,
    closed_with_work_in_flight,
    host_route,
    checked_route,
    traced,
    failed_with_a_fault_pending,
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
            assert not any(backend.inner.live().values())
            backend.close()
        for site in sorted(drop.seen):
            where.setdefault(site, []).append(scenario)
    assert len(where) >= 15, sorted(where)
    unseen = {
        code_at(site)
        for site, scenarios in where.items()
        if not any(notices(s, ref, site, schedule) for schedule in SCHEDULES for s in scenarios)
    }
    assert unseen == set(UNSEEN), sorted(where)
