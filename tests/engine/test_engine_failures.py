"""Failures inside a step: at any backend call, at any read, in a capture, and errors after which nothing works.

Which is which: an exception inside a step leaves position and sequence where they were, and the same token can be
stepped again with equal bits. A failed capture is no exception at all: the token finishes eagerly and the mode is off.
Only an error that loses the device (a sticky status) closes the engine, which then says so at every call.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from engine_harness import (
    Call,
    Checkpoints,
    FailAt,
    Lost,
    ProbeBackend,
    Run,
    check_counters,
    out_of_memory,
    plant_fault,
    reference,
)
from structlog.testing import capture_logs

from ds41rt.cu.result import CudaError
from ds41rt.errors import CacheError, CheckpointError, EngineClosedError

# ---- a capture that fails


STREAM_ARGUMENT = {"launch": 1, "record": 1, "wait": 0, "copy_d2d": 3, "begin_capture": 0, "end_capture": 0}


def recorded_by(run: Run) -> Callable[[str, tuple[Any, ...]], bool]:
    """Accepts the calls that a capture consists of."""

    def counts(name: str, args: tuple[Any, ...]) -> bool:
        if name in ("create_stream", "create_event", "instantiate"):
            return True
        recording = run.engine.machine.seg.recording
        at = STREAM_ARGUMENT.get(name)
        return recording is not None and at is not None and args[at] in (recording.cap_stream, recording.cap_side)

    return counts


def warnings(logs: list[Any]) -> list[Any]:
    return [entry for entry in logs if entry["log_level"] == "warning"]


def fail_capture(run: Run, n: int) -> str:
    """Two tokens, of which the second fails its capture at recorded call `n`; '' if there is no such call."""
    run.step()
    failing = FailAt(n, out_of_memory(), counts=recorded_by(run))
    with capture_logs() as logs, run.hooked(failing):
        run.step()
    if not failing.failed:
        assert warnings(logs) == []
        return ""
    (warning,) = warnings(logs)
    assert warning["event"] == "capture failed, step graph off, the step runs eagerly"
    assert warning["error"] == str(failing.error)
    assert run.engine.machine.seg.disabled
    live = run.live()
    assert (live["graphs"], live["graph_execs"], live["captures"]) == (0, 0, 0), failing.failed
    return failing.failed


def test_a_capture_that_fails_at_each_of_its_calls(checkpoint: Checkpoints) -> None:
    """The token is right, the mode is off with one warning, no graph is kept, later tokens are right and eager."""
    ref = reference(checkpoint("micro"))
    failed: list[str] = []
    while True:
        with Run(ref, slots=30) as run:
            call = fail_capture(run, len(failed))
            if not call:
                break
            failed.append(call)
            with capture_logs() as logs:
                run.steps(2)
            assert warnings(logs) == []
            assert run.stats().replays == 0
            check_counters(run, undisturbed=False)
    kinds = {call.split()[0] for call in failed}
    assert kinds == {*STREAM_ARGUMENT, "create_stream", "create_event", "instantiate"}
    assert len(failed) > 80


def test_a_new_engine_captures_after_a_failed_capture(checkpoint: Checkpoints) -> None:
    """Ten eager steps after the failure, then an engine on the same backend that captures, all bit-equal."""
    ref = reference(checkpoint("micro"))
    backend = ProbeBackend()
    with Run(ref, slots=30, backend=backend) as run:
        assert fail_capture(run, 40)
        run.steps(10)
        assert run.stats().replays == 0
    assert not any(backend.inner.live().values())
    with Run(ref, slots=30, backend=backend) as run:
        run.steps(20)
        assert check_counters(run).clean_replays > 0
    assert not any(backend.inner.live().values())
    backend.close()


def test_an_invalidated_capture_names_the_call_that_did_it(checkpoint: Checkpoints) -> None:
    """The driver's own rule is broken in mid-capture; what follows are 901s, and the warning tells the cause."""
    with Run(reference(checkpoint("micro"))) as run:
        run.step()
        recorded = recorded_by(run)
        seen = 0

        def hook(name: str, args: tuple[Any, ...], call: Call) -> Any:
            nonlocal seen
            seen += recorded(name, args)
            if seen == 50:
                seen += 1
                recording = run.engine.machine.seg.recording
                assert recording is not None
                with pytest.raises(CudaError, match="STREAM_CAPTURE_UNSUPPORTED"):
                    run.backend.synchronize(recording.cap_stream)
            return call()

        with capture_logs() as logs, run.hooked(hook):
            run.step()
        (warning,) = warnings(logs)
        assert "STREAM_CAPTURE_INVALIDATED (901)" in warning["error"]
        assert "cuStreamSynchronize: STREAM_CAPTURE_UNSUPPORTED (900)" in warning["error"]
        run.steps(5)


def test_a_graph_that_cannot_be_destroyed_is_kept_for_another_try(checkpoint: Checkpoints) -> None:
    with Run(reference(checkpoint("micro"))) as run:
        run.steps(3)
        run.engine.bodies._baked += (1,)
        failing = FailAt(0, out_of_memory(), counts=lambda name, args: name == "destroy_exec")
        with capture_logs() as logs, run.hooked(failing):
            run.step()
        assert [entry["event"] for entry in warnings(logs)] == ["handle not destroyed, kept for another try"]
        assert run.live()["graph_execs"] == len(run.engine.machine.owners)
        run.steps(3)
        assert run.stats().recaptures == len(run.engine.machine.owners)


# ---- an exception from any call of a token


def raises_at(run: Run, error: BaseException, after: bool) -> Callable[[str, tuple[Any, ...]], bool]:
    """Accepts the calls whose failure reaches the caller of the step."""
    recorded = recorded_by(run)

    def counts(name: str, args: tuple[Any, ...]) -> bool:
        if after and name in ("end_capture", "instantiate"):
            return False  # a handle whose creation was interrupted after the fact is lost whatever anybody does
        # an error in a recording is a failed capture, which has tests of its own
        return isinstance(error, KeyboardInterrupt) or not recorded(name, args)

    return counts


def fail_at_every_call(
    open_run: Callable[[], Run],
    make_error: Callable[[], BaseException],
    *,
    after: bool,
    twice: bool,
    before_token: Callable[[Run, int], None] = lambda run, n: None,
) -> list[str]:
    """Token after token, each failing one call later than the last, then stepped again. Returns the calls."""
    failed: list[str] = []
    while True:
        with open_run() as run:
            run.steps(3)
            buffers = run.live()["buffers"]
            while run.seq.position < run.ref.n_tokens:
                n = len(failed)
                before_token(run, n)
                at = run.seq.position
                error = make_error()
                counts = raises_at(run, error, after)
                attempts = [FailAt(i, error, after=after, counts=counts) for i in ((n, n // 2) if twice else (n,))]
                for failing in attempts:
                    raised = run.try_step(failing)
                    if raised is None:
                        break  # there is no such call
                    assert raised is failing.error
                    assert run.seq.position == at
                    assert not run.engine.machine.seg.in_step
                    assert run.live()["captures"] == 0
                if run.seq.position == at:
                    run.step()
                if not attempts[0].failed:
                    check_counters(run, undisturbed=False)
                    return failed
                failed.append(attempts[0].failed)
                live = run.live()
                # a graph that could not be destroyed is kept for another try
                kept = sum(f.failed.startswith("destroy") for f in attempts)
                assert live["captures"] == 0
                assert live["buffers"] == buffers
                assert live["graphs"] <= kept
                assert live["graph_execs"] <= len(run.engine.machine.owners) + kept


def recapture(run: Run, n: int) -> None:
    """Make the next token a capture token."""
    run.engine.bodies._baked = (*run.engine.bodies._baked, n)


def miss_at(layer: int) -> Callable[[Run, int], None]:
    """Make the next token miss at a layer."""

    def before_token(run: Run, n: int) -> None:
        run.starve([(layer, run.picks()[layer][0])])
        run.engine.table.update()

    return before_token


KINDS: dict[str, Callable[[Run, int], None]] = {
    "eager": miss_at(1),
    "capture": recapture,
    "clean replay": lambda run, n: run.starve([]),
    "fall at the owner": miss_at(1),
    "fall behind the owner": miss_at(2),
    "fall at the last layer": miss_at(3),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("make_error", "after", "twice", "schedule"),
    [
        pytest.param(out_of_memory, False, False, "lazy", id="error"),
        pytest.param(KeyboardInterrupt, False, False, "random:3", id="interrupt before"),
        pytest.param(KeyboardInterrupt, True, True, "lazy", id="interrupt after"),
    ],
)
def test_any_call_fails_and_the_token_is_stepped_again(
    checkpoint: Checkpoints,
    kind: str,
    make_error: Callable[[], BaseException],
    after: bool,
    twice: bool,
    schedule: str,
) -> None:
    ref = reference(checkpoint("micro"))
    failed = fail_at_every_call(
        lambda: Run(
            ref, mode="eager" if kind == "eager" else "step-graph", slots=16, schedule=schedule, evict_random_pct=0.0
        ),
        make_error,
        after=after,
        twice=twice,
        before_token=KINDS[kind],
    )
    kinds = {call.split()[0] for call in failed}
    assert {"launch", "copy_h2d", "copy_d2h", "synchronize"} <= kinds
    in_recording = kind == "capture" and make_error is KeyboardInterrupt
    assert ("wait" in kinds) == (kind != "clean replay")
    assert ("copy_d2d" in kinds) == ("fall" in kind or in_recording)
    assert ("launch_graph" in kinds) == ("replay" in kind or "fall" in kind)
    assert ("begin_capture" in kinds) == in_recording


# ---- reads that fail


class FailingReads:
    """A model source whose n-th read raises; `every` read after that as well."""

    def __init__(self, source: Any, n: int, error: BaseException, every: bool) -> None:
        self._source = source
        self._left = n
        self._error = error
        self._every = every
        self.failures = 0

    def _count(self) -> None:
        self._left -= 1
        if self._left == -1 or (self._every and self._left < 0):
            self.failures += 1
            raise self._error

    def read_expert(self, *args: Any) -> None:
        self._count()
        self._source.read_expert(*args)

    def read_engram_rows(self, *args: Any) -> None:
        self._count()
        self._source.read_engram_rows(*args)


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("mode", ["eager", "step-graph"])
def test_expert_reads_fail(checkpoint: Checkpoints, mode: str, every: bool) -> None:
    """Some or all reads of a fetch fail: the error says how many, nothing is counted, no key maps to missing bytes."""
    with Run(reference(checkpoint("micro")), mode=mode, slots=16, evict_random_pct=0.0) as run:
        run.steps(3)
        fetcher, n_layers, top_k = run.engine._fetcher, run.engine.config.n_layers, run.engine.config.top_k
        source = fetcher._source
        for layer in range(n_layers):
            for n in range(top_k):
                picks = run.picks()[layer]
                run.starve([(layer, expert) for expert in picks])
                before = run.stats()
                failing = FailingReads(source, n, CheckpointError("planted"), every)
                fetcher._source = cast(Any, failing)
                n_failed = top_k - n if every else 1
                message = f"layer {layer}: {n_failed} of {top_k} expert reads failed; first"
                with pytest.raises(CacheError, match=message):
                    run.step()
                assert failing.failures == n_failed
                assert [run.engine.cache.slot_of(layer, e) == 0 for e in picks].count(True) == n_failed
                after = run.stats()
                assert (after.device_hits, after.misses) == (before.device_hits, before.misses)
                fetcher._source = source
                run.step()
                run.check_table()
        check_counters(run, undisturbed=False)


@pytest.mark.parametrize("error", [CheckpointError("planted"), OSError("planted"), KeyboardInterrupt()])
def test_any_read_fails_and_the_token_is_stepped_again(checkpoint: Checkpoints, error: BaseException) -> None:
    """Engram rows and experts, on eager, capture and replay tokens; the mode stays on."""
    with Run(reference(checkpoint("micro")), slots=16, evict_random_pct=0.0) as run:
        fetcher, engram = run.engine._fetcher, run.engine.engram
        assert engram is not None
        source = fetcher._source
        for n in range(60):
            fetcher._source = engram._source = cast(Any, FailingReads(source, n % 12, error, every=False))
            if n % 4 == 0:
                recapture(run, n)
            try:
                run.step()
            except (CacheError, type(error)):
                fetcher._source = engram._source = source
                run.step()
        assert not run.engine.machine.seg.disabled
        assert run.stats().clean_replays > 0
        check_counters(run, undisturbed=False)


# ---- a device that is lost


@pytest.mark.parametrize("kind", ["eager", "capture", "replay"])
def test_a_sticky_error_at_a_call_closes_the_engine(checkpoint: Checkpoints, kind: str) -> None:
    """From the n-th call on every call fails. The engine says so at every use, naming the first error, and closes."""
    ref = reference(checkpoint("micro"))
    n = 0
    while True:
        with Run(
            ref, mode="eager" if kind == "eager" else "step-graph", slots=30, backend=(backend := ProbeBackend())
        ) as run:
            run.steps(1 if kind == "capture" else 3)
            position = run.seq.position
            lost = Lost(n)
            raised = run.try_step(lost)
            if raised is None:
                break
            assert isinstance(raised, CudaError)
            assert raised.sticky
            closed = rf"the engine is closed: the device failed: .*planted: ILLEGAL_ADDRESS \(700\): .*call {n}$"
            for use in (run.step, run.seq.reset, run.engine.new_sequence):
                with pytest.raises(EngineClosedError, match=closed):
                    use()
            assert run.seq.position == position
            assert run.stats().tokens == position
            backend.hook = lost
            run.engine.close()
            run.engine.close()
            with pytest.raises(EngineClosedError, match=closed):
                run.step()
        backend.close()
        n += 3
    assert lost.seen <= n
    assert n > 40
    assert not any(backend.inner.live().values())
    backend.close()


@pytest.mark.parametrize("mode", ["eager", "step-graph"])
def test_a_wild_pointer_closes_the_engine(checkpoint: Checkpoints, mode: str) -> None:
    """A real fault of the simulated device, in the middle of a step."""
    with Run(reference(checkpoint("micro")), mode=mode, backend=(backend := ProbeBackend())) as run:
        run.steps(5)
        block = run.engine.block
        run.backend.memory.bytes(block.ptr + block.layout.ring_off[2], 8).view(np.uint64)[0] = 0x1230
        with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
            run.step()
        with pytest.raises(EngineClosedError, match=r"the device failed: .*ILLEGAL_ADDRESS"):
            run.step()
    backend.close()
    assert not any(backend.inner.live().values())


@pytest.mark.parametrize("where", ["compute", "side"])
def test_a_fault_that_is_still_pending_closes_the_engine_at_once(checkpoint: Checkpoints, where: str) -> None:
    """The step is interrupted before the faulty work ran: draining both streams finds the fault, no later token."""
    with Run(reference(checkpoint("micro")), mode="eager", backend=(backend := ProbeBackend())) as run:
        run.steps(5)
        shared = run.engine.layers[3].shared[-1]

        def hook(name: str, args: tuple[Any, ...], call: Call) -> Any:
            if where == "compute" and name == "launch" and args[0].label == "head":
                plant_fault(backend.inner, run.engine.stream)
                raise KeyboardInterrupt
            if where == "side" and name == "launch" and args[0] is shared:
                plant_fault(backend.inner, run.engine.fork.side)
                raise KeyboardInterrupt
            return call()

        with pytest.raises(KeyboardInterrupt), run.hooked(hook):
            run.step()
        with pytest.raises(EngineClosedError, match="planted"):
            run.step()
    backend.close()
