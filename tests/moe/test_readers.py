"""Reader threads: every job ends exactly once, with its bytes or its error, and no thread outlives the pool.

No test passes or fails by time: threads wait for each other, `LIMIT` is for what never comes.
"""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, permutations
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from ds41rt.errors import CheckpointError, CheckpointReadError, EngineClosedError, InputError, UnsupportedError
from ds41rt.moe import readers
from ds41rt.moe.readers import ReaderPool, ReadJob

LIMIT = 60
N = 5000
PART = 1700  # three parts, the last shorter
SOURCE = Path(readers.__file__).read_text("utf-8").splitlines()


def want(layer: int, expert: int) -> NDArray[np.uint8]:
    return np.random.default_rng((layer, expert)).integers(0, 256, N, np.uint8)


def read(layer: int, expert: int, out: NDArray[np.uint8], offset: int) -> None:
    out[:] = want(layer, expert)[offset : offset + out.size]


class Gate:
    """A read that says it has begun and goes on when it is let."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()
        self.threads: set[str] = set()

    def read(self, layer: int, expert: int, out: NDArray[np.uint8], offset: int) -> None:
        self.threads.add(threading.current_thread().name)
        self.begun.release()
        assert self.go.wait(LIMIT)
        read(layer, expert, out, offset)

    def wait_begun(self, n: int) -> None:
        for _ in range(n):
            assert self.begun.acquire(timeout=LIMIT)


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def new() -> NDArray[np.uint8]:
    return np.full(N, 0xA5, np.uint8)


OFFSETS = range(0, N, PART)


def slice_at(offset: int) -> slice:
    return slice(offset, offset + PART)


@pytest.mark.parametrize("part_nbytes", [2 * N, N, N - 1, PART, 250])
@pytest.mark.parametrize("n_threads", [0, 1, 8])
def test_reads(n_threads: int, part_nbytes: int) -> None:
    pool = ReaderPool(read, n_threads, part_nbytes)
    outs = [new() for _ in range(200)]
    jobs = [pool.submit(i % 7, i, out) for i, out in enumerate(outs)]
    pool.wait(jobs[::-1])
    pool.wait([])
    for i, (job, out) in enumerate(zip(jobs, outs, strict=True)):
        assert (job.layer, job.expert, job.done, job.error) == (i % 7, i, True, None)
        np.testing.assert_array_equal(out, want(i % 7, i))
    assert (pool.nbytes_read, pool.reads_retried) == (200 * N, 0)
    pool.close()


def test_threads_read_at_the_same_time() -> None:
    gate = Gate()
    pool = ReaderPool(gate.read, 8, N)
    jobs = [pool.submit(0, i, new()) for i in range(9)]
    gate.wait_begun(8)  # the ninth has no thread
    assert not gate.begun.acquire(blocking=False)
    assert len(gate.threads) == 8
    assert threading.current_thread().name not in gate.threads
    for job in jobs:
        assert not job.done
        with pytest.raises(InputError, match=f"layer 0, expert {job.expert} is still being read"):
            _ = job.error
    gate.go.set()
    pool.wait(jobs)
    assert [job.error for job in jobs] == [None] * 9
    pool.close()


def test_without_threads_the_caller_reads() -> None:
    seen: list[threading.Thread] = []
    pool = ReaderPool(lambda *args: seen.append(threading.current_thread()), 0, N)
    assert pool.submit(1, 2, new()).done
    assert seen == [threading.main_thread()]
    pool.drain()
    pool.close()


class Failing:
    """Raises the next of `errors` at each call, None: reads."""

    def __init__(self, *errors: BaseException | None) -> None:
        self.errors = list(errors)

    def read(self, layer: int, expert: int, out: NDArray[np.uint8], offset: int) -> None:
        error = self.errors.pop(0)
        if error is not None:
            raise error
        read(layer, expert, out, offset)


@pytest.mark.parametrize("n_threads", [0, 1])
def test_failures(n_threads: int) -> None:
    """An OSError is tried once more, bad content is not, and what a job ended with stays with it."""
    passing, lasting = OSError(5, "first"), OSError(5, "second")
    passing_typed, lasting_typed = CheckpointReadError("first"), CheckpointReadError("second")
    content, bug, memory = CheckpointError("0xFF"), ZeroDivisionError("bug"), MemoryError()
    later_content = CheckpointError("cut")
    failing = Failing(
        *(passing, None), *(passing, lasting), *(passing_typed, None), *(passing_typed, lasting_typed),
        content, bug, memory, *(passing, later_content), None,
    )  # fmt: skip
    pool = ReaderPool(failing.read, n_threads, N)
    outs = [new() for _ in range(9)]
    jobs = [pool.submit(3, i, out) for i, out in enumerate(outs)]
    pool.wait(jobs)
    assert [job.error for job in jobs] == [
        None,
        lasting,
        None,
        lasting_typed,
        content,
        bug,
        memory,
        later_content,
        None,
    ]
    assert failing.errors == []
    assert (pool.nbytes_read, pool.reads_retried) == (3 * N, 5)
    for i, out in enumerate(outs):
        np.testing.assert_array_equal(out, want(3, i) if i in (0, 2, 8) else new())
    pool.close()


def test_a_retry_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    pool = ReaderPool(Failing(OSError(5, "Input/output error"), None).read, 1, N)
    pool.wait([pool.submit(3, 7, new())])
    (record,) = caplog.records
    assert (record.levelname, record.name) == ("WARNING", "ds41rt.moe")
    assert record.getMessage() == (
        "expert read failed, trying again layer=3 expert=7 offset=0 why='[Errno 5] Input/output error'"
    )
    pool.close()


@pytest.mark.parametrize("n_threads", [1, 8])
def test_what_is_no_exception_is_not_lost(n_threads: int) -> None:
    """It reaches the caller once everything is done, and the threads read on."""
    leave = SystemExit("leave")
    pool = ReaderPool(Failing(leave, None).read if n_threads == 1 else _leave_at_0, n_threads, N)
    jobs = [pool.submit(0, i, new()) for i in range(2)]
    with pytest.raises(SystemExit) as e:
        pool.wait(jobs)
    assert [job.done for job in jobs] == [True, True]
    with pytest.raises(SystemExit):
        _ = jobs[0].error
    assert jobs[1].error is None
    assert (type(jobs[0].outcome()), jobs[1].outcome()) == (SystemExit, None)
    if n_threads == 1:
        assert e.value is leave
    pool.close()


def test_what_is_no_exception_comes_after_the_other_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    outcome = ReadJob.outcome

    def let_go(job: ReadJob) -> BaseException | None:
        """The second job ends only once it is waited for."""
        if job.expert == 1:
            gate.go.set()
        return outcome(job)

    monkeypatch.setattr(ReadJob, "outcome", let_go)
    pool = ReaderPool(lambda *args: gate.read(*args) if args[1] else sys.exit("leave"), 2, N)
    jobs = [pool.submit(0, i, new()) for i in range(2)]
    with pytest.raises(SystemExit):
        pool.wait(jobs)
    assert [job.done for job in jobs] == [True, True]
    pool.close()


def _leave_at_0(layer: int, expert: int, out: NDArray[np.uint8], offset: int) -> None:
    if expert == 0:
        sys.exit("leave")
    read(layer, expert, out, offset)


def test_what_is_no_exception_passes_through_a_read_of_the_caller() -> None:
    pool = ReaderPool(Failing(KeyboardInterrupt(), None).read, 0, N)
    with pytest.raises(KeyboardInterrupt):
        pool.submit(0, 0, new())
    assert pool.submit(0, 1, new()).error is None
    pool.close()


def test_close_gives_up_what_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    pool = ReaderPool(gate.read, 2, N)
    outs = [new() for _ in range(6)]
    jobs = [pool.submit(1, i, out) for i, out in enumerate(outs)]
    gate.wait_begun(2)

    drain = pool.drain

    def let_go() -> None:
        """`close` has done what it does before it waits."""
        assert not any(job.done for job in jobs)
        gate.go.set()
        drain()

    monkeypatch.setattr(pool, "drain", let_go)
    pool.close()
    assert all(job.done for job in jobs)
    for i, (job, out) in enumerate(zip(jobs, outs, strict=True)):
        np.testing.assert_array_equal(out, want(1, i) if i < 2 else new())
        assert (job.error is None) is (i < 2)
    with pytest.raises(EngineClosedError, match="layer 1, expert 5 was not read: the readers are closed"):
        raise jobs[5].error or AssertionError
    assert pool.nbytes_read == 2 * N


@pytest.mark.parametrize("n_threads", [0, 4])
def test_after_close(n_threads: int) -> None:
    pool = ReaderPool(read, n_threads, N)
    job = pool.submit(0, 0, new())
    pool.close()
    pool.close()
    pool.drain()
    pool.wait([job])
    with pytest.raises(EngineClosedError, match="the expert readers are closed"):
        pool.submit(0, 1, new())


def test_drain_waits_for_forgotten_jobs() -> None:
    gate = Gate()
    pool = ReaderPool(gate.read, 3, N)
    outs = [new() for _ in range(10)]
    for i, out in enumerate(outs):
        pool.submit(0, i, out)
    gate.wait_begun(3)
    ended = threading.Event()

    def drain() -> None:
        pool.drain()
        assert pool.nbytes_read == 10 * N
        ended.set()

    drainer = threading.Thread(target=drain)
    drainer.start()
    assert not ended.is_set()
    gate.go.set()
    drainer.join(LIMIT)
    assert ended.is_set()
    for i, out in enumerate(outs):
        np.testing.assert_array_equal(out, want(0, i))
    job = pool.submit(5, 5, new())
    pool.drain()
    assert job.done
    pool.close()


def test_drain_waits_for_every_thread() -> None:
    """One reads, the other is idle: it must not stand in for both."""
    gate = Gate()
    pool = ReaderPool(gate.read, 2, N)
    job = pool.submit(0, 0, new())
    gate.wait_begun(1)
    returned = threading.Event()

    def let_go() -> None:
        returned.wait(0.3)  # long enough for a drain that does not wait to return
        gate.go.set()

    helper = threading.Thread(target=let_go)
    helper.start()
    pool.drain()
    done = job.done
    returned.set()
    helper.join(LIMIT)
    assert done
    pool.close()


# ---- parts


class Parts:
    """Reads of parts that wait, each for its own `go`; `ended` is counted up when a part has ended."""

    def __init__(self, n_threads: int, **errors: BaseException) -> None:
        """`errors`: what the part at that number raises, as p0=..."""
        self.errors = {OFFSETS[int(name[1:])]: error for name, error in errors.items()}
        self.begun: dict[int, threading.Event] = {offset: threading.Event() for offset in OFFSETS}
        self.go: dict[int, threading.Event] = {offset: threading.Event() for offset in OFFSETS}
        self.reads: list[tuple[int, int]] = []
        self.ended = threading.Semaphore(0)
        self.pool = ReaderPool(self.read, n_threads, PART)
        end_part = self.pool._end_part

        def ends(*args: Any) -> None:
            end_part(*args)
            self.ended.release()

        self.pool._end_part = ends  # type: ignore[method-assign,assignment] # a spy

    def read(self, layer: int, expert: int, out: NDArray[np.uint8], offset: int) -> None:
        self.reads.append((expert, offset))
        self.begun[offset].set()
        assert self.go[offset].wait(LIMIT)
        if offset in self.errors:
            raise self.errors[offset]
        read(layer, expert, out, offset)

    def wait_begun(self, n: int = 3) -> None:
        for offset in OFFSETS[:n]:
            assert self.begun[offset].wait(LIMIT)

    def let_go(self, offset: int) -> None:
        """And wait until the part has ended."""
        self.go[offset].set()
        assert self.ended.acquire(timeout=LIMIT)


def test_parts_are_read_in_the_order_of_submission() -> None:
    seen: list[tuple[int, int, int]] = []
    pool = ReaderPool(lambda layer, expert, out, offset: seen.append((expert, offset, out.size)), 1, PART)
    pool.wait([pool.submit(0, expert, new()) for expert in (5, 3)])
    assert seen == [(expert, offset, n) for expert in (5, 3) for offset, n in ((0, PART), (1700, PART), (3400, 1600))]
    assert pool.nbytes_read == 2 * N
    nothing = pool.submit(0, 7, new()[:0])
    pool.drain()
    assert nothing.done
    assert seen[6:] == [(7, 0, 0)]
    pool.close()


@pytest.mark.parametrize("order", list(permutations(OFFSETS)))
def test_parts_end_in_every_order(order: tuple[int, ...]) -> None:
    """All parts of one expert are read at once, and it is there with the last of them."""
    parts, out = Parts(3), new()
    job = parts.pool.submit(2, 4, out)
    parts.wait_begun()
    for offset in order:
        assert not job.done
        assert parts.pool.nbytes_read == 0
        parts.let_go(offset)
        np.testing.assert_array_equal(out[slice_at(offset)], want(2, 4)[slice_at(offset)])
    assert job.done
    assert job.error is None
    np.testing.assert_array_equal(out, want(2, 4))
    assert parts.pool.nbytes_read == N
    parts.pool.close()


@pytest.mark.parametrize("order", list(permutations(OFFSETS)))
@pytest.mark.parametrize("bad", range(3))
def test_a_job_is_not_done_before_its_last_part(order: tuple[int, ...], bad: int) -> None:
    """Other parts may still write, though the expert is lost."""
    error = CheckpointError("planted")
    parts, out = Parts(3, **{f"p{bad}": error}), new()
    job = parts.pool.submit(2, 4, out)
    parts.wait_begun()
    for offset in order:
        assert not job.done
        with pytest.raises(InputError, match="layer 2, expert 4 is still being read"):
            _ = job.error
        parts.let_go(offset)
    assert job.done
    assert job.error is error
    for i, offset in enumerate(OFFSETS):
        np.testing.assert_array_equal(out[slice_at(offset)], (new() if i == bad else want(2, 4))[slice_at(offset)])
    assert parts.pool.nbytes_read == 0
    parts.pool.close()


def test_the_first_error_of_a_job_stays() -> None:
    first = CheckpointError("first")
    parts = Parts(3, p0=CheckpointError("last"), p1=first, p2=CheckpointError("second"))
    job = parts.pool.submit(2, 4, new())
    parts.wait_begun()
    for offset in (OFFSETS[1], OFFSETS[2], OFFSETS[0]):
        parts.let_go(offset)
    assert job.error is first
    parts.pool.close()


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_what_is_no_exception_is_not_lost_behind_other_parts(order: tuple[int, ...]) -> None:
    leave = SystemExit("leave")
    parts = Parts(3, p0=CheckpointError("content"), p1=leave)
    job = parts.pool.submit(2, 4, new())
    parts.wait_begun()
    for which in order:
        parts.let_go(OFFSETS[which])
    assert job.outcome() is leave
    with pytest.raises(SystemExit):
        parts.pool.wait([job])
    parts.pool.close()


@pytest.mark.parametrize("n_threads", [0, 1])
@pytest.mark.parametrize("bad", range(3))
def test_a_part_fails(bad: int, n_threads: int) -> None:
    """It alone is read again after an OSError; once it has failed for good, the parts behind it are not read."""
    reads: list[tuple[int, int]] = []
    passing, lasting, content = OSError(5, "once"), [OSError(5, "first"), OSError(5, "second")], CheckpointError("0xFF")
    planted: dict[int, list[Exception]] = {0: [passing], 1: [*lasting], 2: [content]}

    def fails(layer: int, expert: int, out: NDArray[np.uint8], offset: int) -> None:
        reads.append((expert, offset))
        if offset == OFFSETS[bad] and planted.get(expert):
            raise planted[expert].pop(0)
        read(layer, expert, out, offset)

    pool = ReaderPool(fails, n_threads, PART)
    outs = [new() for _ in range(4)]
    jobs = [pool.submit(3, i, out) for i, out in enumerate(outs)]
    pool.wait(jobs)
    assert [job.error for job in jobs] == [None, lasting[1], content, None]
    until, at = list(OFFSETS[: bad + 1]), OFFSETS[bad]
    assert [o for e, o in reads if e == 0] == [*until, at, *OFFSETS[bad + 1 :]]
    assert [o for e, o in reads if e == 1] == [*until, at]
    assert [o for e, o in reads if e == 2] == until
    assert [o for e, o in reads if e == 3] == list(OFFSETS)
    for expert in (0, 3):
        np.testing.assert_array_equal(outs[expert], want(3, expert))
    assert (pool.nbytes_read, pool.reads_retried) == (2 * N, 2)
    pool.close()


def test_close_while_half_of_the_parts_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs is awaited, what has not begun is given up, and the expert with it."""
    parts, outs = Parts(2), [new(), new()]
    jobs = [parts.pool.submit(1, i, out) for i, out in enumerate(outs)]
    parts.wait_begun(2)
    drain = parts.pool.drain

    def let_go() -> None:
        """`close` has done what it does before it waits; the second part ends last."""
        parts.let_go(OFFSETS[0])
        assert not jobs[0].done
        parts.go[OFFSETS[1]].set()
        drain()

    monkeypatch.setattr(parts.pool, "drain", let_go)
    parts.pool.close()
    assert parts.reads == [(0, OFFSETS[0]), (0, OFFSETS[1])] or parts.reads == [(0, OFFSETS[1]), (0, OFFSETS[0])]
    for job in jobs:
        assert job.done
        with pytest.raises(EngineClosedError, match=f"layer 1, expert {job.expert} was not read"):
            raise job.error or AssertionError
    np.testing.assert_array_equal(outs[0], np.concatenate((want(1, 0)[: 2 * PART], new()[2 * PART :])))
    np.testing.assert_array_equal(outs[1], new())
    assert parts.pool.nbytes_read == 0


class Interrupted:
    """A queue: KeyboardInterrupt before or after its `at`-th put."""

    def __init__(self, queue: Any, at: int, after: bool) -> None:
        self.queue = queue
        self.left = at
        self.after = after

    def put(self, task: Any) -> None:
        self.left -= 1
        if self.left == -1 and not self.after:
            raise KeyboardInterrupt
        self.queue.put(task)
        if self.left == -1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", range(3))
def test_an_interrupt_between_two_parts(at: int, after: bool) -> None:
    """Nobody has the job: what was submitted of it still writes, until `drain` has come back."""
    parts, out = Parts(3), new()
    queue: Any = parts.pool._queue
    parts.pool._queue = cast(Any, Interrupted(queue, at, after))
    with pytest.raises(KeyboardInterrupt):
        parts.pool.submit(2, 4, out)
    parts.pool._queue = queue
    n = at + after
    parts.wait_begun(n)
    np.testing.assert_array_equal(out, new())

    def let_go() -> None:
        for offset in OFFSETS[:n]:
            parts.let_go(offset)

    helper = threading.Thread(target=let_go)
    helper.start()
    parts.pool.drain()
    written = min(n * PART, N)
    np.testing.assert_array_equal(out, np.concatenate((want(2, 4)[:written], new()[written:])))
    helper.join(LIMIT)
    for event in parts.go.values():
        event.set()
    again = new()
    parts.pool.wait([parts.pool.submit(3, 1, again)])
    np.testing.assert_array_equal(again, want(3, 1))
    assert [o for e, o in sorted(parts.reads) if e == 4] == list(OFFSETS[:n])
    parts.pool.close()


def test_an_interrupt_is_not_lost_behind_a_failed_part() -> None:
    """At every line of a submit whose first part fails, in the caller's thread: it always comes out."""
    for at in count():
        tracer = Tracer(at)
        error = CheckpointError("content")
        pool = ReaderPool(Failing(error).read, 0, PART)
        jobs: list[ReadJob] = []
        tracer.run(lambda pool=pool, jobs=jobs: jobs.append(pool.submit(2, 4, new())))  # type: ignore[misc]
        pool.close()
        if not tracer.raised:
            assert [job.error for job in jobs] == [error]
            assert at > 20
            return
        assert jobs == []


class Interrupter:
    """Sends SIGINT to the main thread when told to; lets `gate` go if the main thread does not come back from it."""

    def __init__(self, gate: Gate) -> None:
        self.now = threading.Event()
        self.came_back = threading.Event()
        self._gate = gate
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        assert self.now.wait(LIMIT)
        ident = threading.main_thread().ident
        assert ident is not None
        signal.pthread_kill(ident, signal.SIGINT)
        self.came_back.wait(LIMIT)
        self._gate.go.set()

    def join(self) -> None:
        self.came_back.set()
        self._thread.join(LIMIT)


@pytest.mark.parametrize("call", ["wait", "drain", "close"])
def test_an_interrupt_ends_the_call_at_once(call: str) -> None:
    """The reads still run when KeyboardInterrupt arrives; nothing is lost, and the call can be repeated."""
    gate = Gate()
    pool = ReaderPool(gate.read, 2, N)
    outs = [new() for _ in range(5)]
    jobs = [pool.submit(2, i, out) for i, out in enumerate(outs)]
    gate.wait_begun(2)
    interrupter = Interrupter(gate)
    what: Any = {"wait": lambda: pool.wait(jobs), "drain": pool.drain, "close": pool.close}[call]

    def interrupted() -> None:
        interrupter.now.set()
        what()

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not gate.go.is_set()
    assert [job.done for job in jobs[:2]] == [False, False]
    interrupter.join()
    what()
    pool.drain()
    assert all(job.done for job in jobs)
    arrived = [job.error is None for job in jobs]
    assert arrived[:2] == [True, True]
    if call != "close":
        assert all(arrived)
        assert pool.submit(2, 9, new()).layer == 2
    for i, out in enumerate(outs):
        np.testing.assert_array_equal(out, want(2, i) if arrived[i] else new())
    pool.close()


class Tracer:
    """KeyboardInterrupt before the `at`-th line of readers.py that the main thread comes to.

    A signal is handled after a call, at the beginning of a function and on the way back in a loop, nowhere else: not
    before the lines in `NEVER`, for one follows a loop, and the other is come to again when its lock is let go.
    """

    NEVER = ("leave.happened = True", "with self._count_lock:")

    def __init__(self, at: int) -> None:
        self.left = at
        self.raised = False

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if code.co_filename != readers.__file__ or self.raised:
            return None
        if event in ("call", "line") and SOURCE[frame.f_lineno - 1].strip() not in self.NEVER:
            self.left -= 1
            if self.left < 0:
                self.raised = True
                raise KeyboardInterrupt
        return self

    def run(self, call: Callable[[], object]) -> None:
        before, came_out = sys.gettrace(), False
        gc.disable()  # the finalizer of an earlier pool swallows what is raised in it
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            came_out = True
        finally:
            sys.settrace(before)
            gc.enable()
        assert came_out == self.raised


@pytest.mark.parametrize("part_nbytes", [N, PART])
@pytest.mark.parametrize("n_threads", [0, 2])
@pytest.mark.parametrize("call", ["submit", "wait", "drain", "close"])
def test_an_interrupt_anywhere(call: str, n_threads: int, part_nbytes: int) -> None:
    """At every line in turn: nothing hangs afterwards, no job is lost and the pool works on, or is closed."""
    for at in count():
        tracer = Tracer(at)
        pool = ReaderPool(read, n_threads, part_nbytes)
        outs = [new() for _ in range(4)]
        jobs: list[ReadJob] = []

        def submit(pool: ReaderPool = pool, outs: list[NDArray[np.uint8]] = outs, jobs: list[ReadJob] = jobs) -> None:
            jobs.extend(pool.submit(2, i, out) for i, out in enumerate(outs))

        if call == "submit":
            tracer.run(submit)
        else:
            submit()
            tracer.run(partial(pool.wait, jobs) if call == "wait" else getattr(pool, call))
        pool.drain()
        assert all(job.done for job in jobs)
        for job in jobs:
            error, out = job.error, outs[job.expert]
            if error is None:
                np.testing.assert_array_equal(out, want(2, job.expert))
            else:
                assert call == "close"
                assert isinstance(error, EngineClosedError)
                for offset in range(0, N, part_nbytes):  # whole or untouched
                    part = slice(offset, offset + part_nbytes)
                    assert out[part].tobytes() in (new()[part].tobytes(), want(2, job.expert)[part].tobytes())
        if call != "close":
            out = new()
            pool.wait([pool.submit(3, 1, out)])
            np.testing.assert_array_equal(out, want(3, 1))
        pool.close()
        if not tracer.raised:
            assert at > (3 if n_threads == 0 and call != "submit" else 10)
            return


def test_an_interrupt_anywhere_while_a_pool_is_made() -> None:
    for at in count():
        tracer = Tracer(at)
        pools: list[ReaderPool] = []
        before = set(threading.enumerate())
        tracer.run(lambda pools=pools: pools.append(ReaderPool(read, 2, N)))  # type: ignore[misc]
        if not tracer.raised:
            assert at > 10
            pools[0].close()
            return
        assert pools == []
        for thread in set(threading.enumerate()) - before:
            thread.join(LIMIT)


def test_an_interrupt_while_the_threads_start(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def interrupted(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise KeyboardInterrupt
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ReaderPool(read, 4, N)
    assert len(started) == 2
    assert not any(thread.is_alive() for thread in started)


@pytest.mark.parametrize("n_started", [0, 1, 7])
def test_threads_that_cannot_start(monkeypatch: pytest.MonkeyPatch, n_started: int) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def limited(thread: threading.Thread) -> None:
        if len(started) == n_started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(UnsupportedError, match=r"cannot start 8 reader threads \(can't start new thread\)"):
        ReaderPool(read, 8, N)
    assert len(started) == n_started
    assert not any(thread.is_alive() for thread in started)


def test_all_threads_run_before_the_first_job() -> None:
    before = threading.active_count()
    pool = ReaderPool(read, 5, N)
    assert threading.active_count() == before + 5
    pool.close()
    assert threading.active_count() == before


def test_bad_numbers() -> None:
    with pytest.raises(InputError, match="n_threads -1 must be 0 or more"):
        ReaderPool(read, -1, N)
    with pytest.raises(InputError, match="part_nbytes 0 must be 1 or more"):
        ReaderPool(read, 1, 0)


def test_a_dropped_pool_leaves_no_thread() -> None:
    """Nor anything to do at exit. Dropped by its caller while reads are pending, and by the last reader after them."""
    gate = Gate()
    before = set(threading.enumerate())
    pool = ReaderPool(gate.read, 3, N)
    jobs: list[ReadJob] = [pool.submit(0, i, new()) for i in range(5)]
    threads = set(threading.enumerate()) - before
    assert len(threads) == 3
    dropped, at_exit = weakref.ref(pool), weakref.ref(pool._at_exit)
    del pool
    gate.go.set()
    for thread in threads:
        thread.join(LIMIT)
    assert dropped() is None
    assert at_exit() is None
    assert [job.error for job in jobs] == [None] * 5


@pytest.mark.parametrize("part_nbytes", [N, PART])
def test_a_failed_job_is_freed_without_the_collector(part_nbytes: int) -> None:
    """No cycle keeps a job's memory: an error leads to the frame that raised it, which must not lead to the job."""

    def fail(layer: int, expert: int, out: NDArray[np.uint8], offset: int) -> None:
        raise CheckpointError("content")

    pool = ReaderPool(fail, 1, part_nbytes)
    out = new()
    gone = weakref.ref(out)
    gc.disable()
    try:
        job = pool.submit(0, 0, out)
        pool.drain()
        pool.drain()  # the thread has let go of its last task before it comes by a second time
        assert isinstance(job.error, CheckpointError)
        del job, out
        assert gone() is None
    finally:
        gc.enable()
    pool.close()


def run(code: str) -> subprocess.CompletedProcess[str]:
    """A process with a pool of 2 threads, `pool`, whose reads wait for `go`; both threads have begun one of 20.

    It prints how the 20 ended, after everything else that runs at exit.
    """
    head = """
    import atexit, os, sys, threading
    import numpy as np
    from ds41rt.errors import Ds41Error
    from ds41rt.moe.readers import ReaderPool

    go, begun = threading.Event(), threading.Semaphore(0)
    total = []

    def read(layer, expert, out, offset):
        begun.release()
        go.wait()
        out[:] = expert
        total.append(expert)

    def report():
        assert all(job.done for job in jobs)
        arrived = [job.expert for job in jobs if job.error is None]
        assert sorted(total) == arrived
        print(len(arrived), {type(job.error).__name__ for job in jobs[2:]})
        try:
            pool.submit(0, 99, np.empty(100, np.uint8))
        except Ds41Error as e:
            print(type(e).__name__)

    atexit.register(report)
    pool = ReaderPool(read, 2, 100)
    jobs = [pool.submit(0, i, np.empty(100, np.uint8)) for i in range(20)]
    begun.acquire(), begun.acquire()
    """
    source = textwrap.dedent(head) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore:This process:DeprecationWarning", "-c", source],
        capture_output=True, text=True, check=False, timeout=LIMIT,
    )  # fmt: skip


GIVEN_UP = "2 {'EngineClosedError'}\nEngineClosedError\n"


@pytest.mark.parametrize(
    ("leave", "code", "says"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise KeyError('x')", 1, "KeyError: 'x'"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
    ],
)
def test_a_process_ends_with_jobs_pending(leave: str, code: int, says: str) -> None:
    """What runs is awaited, what has not begun is given up: both threads are in a read until the pool is closed."""
    done = run(
        f"""
        close = pool.close

        def let_go():
            pool._closed = True
            go.set()
            close()

        pool.close = let_go
        {leave}
        """
    )
    assert done.returncode == code
    assert done.stderr.strip().splitlines()[-1:] == ([says] if says else [])
    assert done.stdout == GIVEN_UP


def test_what_is_registered_later_still_reads() -> None:
    done = run("atexit.register(lambda: (go.set(), pool.drain()))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "20 {'NoneType'}\nEngineClosedError\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_forked_child() -> None:
    """Has no reader threads: it is told so, and neither its calls nor its end wait for the parent's jobs."""
    done = run(
        """
        child = os.fork()
        if child == 0:
            atexit.unregister(report)
            pool.drain()
            try:
                pool.submit(0, 99, np.empty(100, np.uint8))
            except Ds41Error as e:
                print(type(e).__name__, "forked child" in str(e))
            pool.close()
            sys.exit(4)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 4, status
        assert not any(job.done for job in jobs)
        go.set()
        pool.drain()
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "UnsupportedError True\n20 {'NoneType'}\nEngineClosedError\n"
