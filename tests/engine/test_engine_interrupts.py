"""Ctrl-C between any two statements of a step: the engine goes on with the right bits, and has all its slots.

One engine takes one interrupt after another, each in another place. After each a whole token is compared, and every
slot of the pinned pool is where it belongs.
"""

import gc
import linecache
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from engine_harness import Checkpoints, FailAt, Run, out_of_memory, reference
from structlog.testing import capture_logs

import ds41rt
from ds41rt.cu.result import CudaError
from ds41rt.engine import Engine, _follows_an_interrupt
from ds41rt.errors import InputError
from ds41rt.kernels.router import HOST_SLOT_BIT

PACKAGE = Path(ds41rt.__file__).parent
TRACED = (*(f"moe/{path.name}" for path in sorted((PACKAGE / "moe").glob("*.py"))), "engine.py", "step/machine.py")
OWN_TESTS = {"moe/readers.py"}  # a lock or a queue of theirs may not be left in the middle; see test_readers.py
# The lock is the thread's own, and the mark is set by no other; what comes up in a generator that is given up is lost.
NOT_IN_A_STEP = {"_enter", "_exclusive", "<genexpr>"}
# Signals are looked for after a call, at the beginning of a function and on the way back in a loop: not here.
NEVER = "self._stepping = False"
FILES = frozenset(str(PACKAGE / name) for name in TRACED if name not in OWN_TESTS)


class Interrupt:
    """KeyboardInterrupt before the `at`-th line that is come to in `FILES`, which a step goes through in order."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen = 0
        self.where = ""

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if code.co_filename not in FILES or code.co_name in NOT_IN_A_STEP or self.where:
            return None
        if event in ("call", "line") and linecache.getline(code.co_filename, frame.f_lineno).strip() != NEVER:
            if self.seen == self.at:
                self.where = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
                raise KeyboardInterrupt
            self.seen += 1
        return self

    def run(self, call: Callable[[], object]) -> None:
        before, came_out = sys.gettrace(), False
        gc.disable()  # a finalizer would swallow what is raised in it
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            came_out = True
        except Exception as e:
            came_out = _follows_an_interrupt(e)
            if not came_out:
                raise
        finally:
            sys.settrace(before)
            gc.enable()
        assert came_out == bool(self.where)


def check_slots(engine: Engine) -> None:
    """Every slot of the pool is in exactly one place, and so is every expert."""
    pool, fetcher, mover, cache = engine._pool, engine._fetcher, engine._mover, engine.cache
    held = [code for code in cache.codes if code]
    assert len(set(held)) == len(held)
    assert all(cache._key_in(code) == key for key, code in enumerate(cache.codes) if code)
    slots = [code ^ HOST_SLOT_BIT for code in held if code >= HOST_SLOT_BIT]
    slots += [*pool._spare, *pool._left, *fetcher._unknown, *(slot for slot, _ in pool._quarantined)]
    slots += [slot for half in fetcher._halves for slot in half.slots]
    slots += [slot for slot, _ in fetcher.ahead._pending.values()]
    if mover is not None:
        slots += [t.spare for batch in mover._batches for t in batch.transfers if t.spare]
    assert sorted(slots) == list(range(1, pool.n_slots + 1))


CONFIGURATIONS = {
    "device": {"slots": 9, "mode": "eager"},
    "graph": {"slots": 24, "mode": "step-graph", "reader_threads": 2},
    "host": {"slots": 0, "host_slots": 9, "mode": "step-graph"},
    "both": {"slots": 6, "host_slots": 12, "mode": "step-graph", "reader_threads": 2},
    "ahead": {"slots": 12, "host_slots": 12, "mode": "eager", "prefetch": True},
    "adaptive": {"slots": 12, "host_slots": 12, "mode": "adaptive"},
}


def interrupt_at(checkpoint: Checkpoints, which: str, places: Iterator[int]) -> set[str]:
    """Interrupts one token at each of these places (numbers of lines from its beginning on); where that was."""
    ref = reference(checkpoint("micro"))
    run = Run(ref, **CONFIGURATIONS[which])  # type: ignore[arg-type] # of several types
    met = set()
    with run:
        run.steps(2)
        for at in places:
            if run.seq.position + 4 > ref.n_tokens:
                run.seq.close()
                run.seq = run.engine.new_sequence()
            interrupt = Interrupt(at)
            interrupt.run(lambda: run.engine.decode_step(run.seq, ref.tokens[run.seq.position]))
            met.add(interrupt.where)
            run.step()
            assert not run.engine._unsettled
            check_slots(run.engine)
        run.steps(2)
    return met


@pytest.mark.parametrize("which", CONFIGURATIONS)
def test_a_step_is_interrupted_somewhere(checkpoint: Checkpoints, which: str) -> None:
    rng = random.Random(which)
    met = interrupt_at(checkpoint, which, iter([rng.randrange(900) for _ in range(60)]))
    assert len(met) > 40


@pytest.mark.long
@pytest.mark.parametrize("which", CONFIGURATIONS)
def test_a_step_is_interrupted_everywhere(checkpoint: Checkpoints, which: str) -> None:
    assert len(interrupt_at(checkpoint, which, iter(range(0, 2500)))) > 300


def test_an_interrupted_call_is_said_and_the_experts_stay(checkpoint: Checkpoints) -> None:
    with Run(reference(checkpoint("micro")), slots=40) as run:
        run.steps(6)
        misses, resident = run.stats().misses, sum(map(bool, run.engine.cache.codes))
        Interrupt(3).run(lambda: run.engine.decode_step(run.seq, 5))
        with capture_logs() as logs:
            run.step()
            run.step()
        said = [line for line in logs if "interrupted" in line["event"]]
        assert [line["kept"] for line in said] == [resident]
        assert run.stats().misses - misses < 12


def test_a_recovery_that_fails_is_done_again(checkpoint: Checkpoints) -> None:
    with Run(reference(checkpoint("micro")), slots=12, host_slots=12) as run:
        run.steps(4)
        Interrupt(300).run(lambda: run.engine.decode_step(run.seq, 5))
        with pytest.raises(CudaError, match="planted"), run.hooked(FailAt(0, out_of_memory())):
            run.engine.decode_step(run.seq, 5)
        with capture_logs() as logs:
            run.step()
        assert ["interrupted" in line["event"] for line in logs].count(True) == 1
        check_slots(run.engine)


def test_an_error_that_ends_an_interrupted_call_counts_as_one() -> None:
    def interrupted() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise InputError("while it was on its way")

    with pytest.raises(InputError) as e:
        interrupted()
    assert _follows_an_interrupt(e.value)
    assert not _follows_an_interrupt(InputError("alone"))


def test_closing_is_not_interrupted(checkpoint: Checkpoints) -> None:
    """Signals that arrive in it take effect behind it, once; the handler is the one from before."""
    before = signal.getsignal(signal.SIGINT)
    run = Run(reference(checkpoint("micro")), slots=9, host_slots=9, reader_threads=2)
    run.steps(3)
    threads = threading.active_count()
    calls = 0

    def hook(name: str, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        nonlocal calls
        calls += 1
        signal.raise_signal(signal.SIGINT)
        try:
            return call()
        finally:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), run.hooked(hook):
        run.engine.close()
    assert calls > 50
    assert signal.getsignal(signal.SIGINT) is before
    assert not any(run.live().values()), run.live()
    assert threading.active_count() == threads - 2
    run.engine.close()
    run.probe.close()
