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
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ds41rt.errors import CheckpointError, CheckpointReadError, EngineClosedError, InputError, UnsupportedError
from ds41rt.moe import readers
from ds41rt.moe.readers import ReaderPool, ReadJob

LIMIT = 60
N = 5000
SOURCE = Path(readers.__file__).read_text("utf-8").splitlines()


def want(layer: int, expert: int) -> NDArray[np.uint8]:
    return np.random.default_rng((layer, expert)).integers(0, 256, N, np.uint8)


def read(layer: int, expert: int, out: NDArray[np.uint8]) -> None:
    out[:] = want(layer, expert)


class Gate:
    """A read that says it has begun and goes on when it is let."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()
        self.threads: set[str] = set()

    def read(self, layer: int, expert: int, out: NDArray[np.uint8]) -> None:
        self.threads.add(threading.current_thread().name)
        self.begun.release()
        assert self.go.wait(LIMIT)
        read(layer, expert, out)

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


@pytest.mark.parametrize("n_threads", [0, 1, 8])
def test_reads(n_threads: int) -> None:
    pool = ReaderPool(read, n_threads)
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
    pool = ReaderPool(gate.read, 8)
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
    pool = ReaderPool(lambda layer, expert, out: seen.append(threading.current_thread()), 0)
    assert pool.submit(1, 2, new()).done
    assert seen == [threading.main_thread()]
    pool.drain()
    pool.close()


class Failing:
    """Raises the next of `errors` at each call, None: reads."""

    def __init__(self, *errors: BaseException | None) -> None:
        self.errors = list(errors)

    def read(self, layer: int, expert: int, out: NDArray[np.uint8]) -> None:
        error = self.errors.pop(0)
        if error is not None:
            raise error
        read(layer, expert, out)


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
    pool = ReaderPool(failing.read, n_threads)
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
    pool = ReaderPool(Failing(OSError(5, "Input/output error"), None).read, 1)
    pool.wait([pool.submit(3, 7, new())])
    (record,) = caplog.records
    assert (record.levelname, record.name) == ("WARNING", "ds41rt.moe")
    assert record.getMessage() == (
        "expert read failed, trying again layer=3 expert=7 why='[Errno 5] Input/output error'"
    )
    pool.close()


@pytest.mark.parametrize("n_threads", [1, 8])
def test_what_is_no_exception_is_not_lost(n_threads: int) -> None:
    """It reaches the caller once everything is done, and the threads read on."""
    leave = SystemExit("leave")
    pool = ReaderPool(Failing(leave, None).read if n_threads == 1 else _leave_at_0, n_threads)
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
    pool = ReaderPool(lambda layer, expert, out: gate.read(layer, expert, out) if expert else sys.exit("leave"), 2)
    jobs = [pool.submit(0, i, new()) for i in range(2)]
    with pytest.raises(SystemExit):
        pool.wait(jobs)
    assert [job.done for job in jobs] == [True, True]
    pool.close()


def _leave_at_0(layer: int, expert: int, out: NDArray[np.uint8]) -> None:
    if expert == 0:
        sys.exit("leave")
    read(layer, expert, out)


def test_what_is_no_exception_passes_through_a_read_of_the_caller() -> None:
    pool = ReaderPool(Failing(KeyboardInterrupt(), None).read, 0)
    with pytest.raises(KeyboardInterrupt):
        pool.submit(0, 0, new())
    assert pool.submit(0, 1, new()).error is None
    pool.close()


def test_close_gives_up_what_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    pool = ReaderPool(gate.read, 2)
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
    pool = ReaderPool(read, n_threads)
    job = pool.submit(0, 0, new())
    pool.close()
    pool.close()
    pool.drain()
    pool.wait([job])
    with pytest.raises(EngineClosedError, match="the expert readers are closed"):
        pool.submit(0, 1, new())


def test_drain_waits_for_forgotten_jobs() -> None:
    gate = Gate()
    pool = ReaderPool(gate.read, 3)
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
    pool = ReaderPool(gate.read, 2)
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
    pool = ReaderPool(gate.read, 2)
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
        before = sys.gettrace()
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            assert self.raised
        finally:
            sys.settrace(before)


@pytest.mark.parametrize("n_threads", [0, 2])
@pytest.mark.parametrize("call", ["submit", "wait", "drain", "close"])
def test_an_interrupt_anywhere(call: str, n_threads: int) -> None:
    """At every line in turn: nothing hangs afterwards, no job is lost and the pool works on, or is closed."""
    for at in count():
        tracer = Tracer(at)
        pool = ReaderPool(read, n_threads)
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
            assert error is None or (call == "close" and isinstance(error, EngineClosedError))
            np.testing.assert_array_equal(out, want(2, job.expert) if error is None else new())
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
        tracer.run(lambda pools=pools: pools.append(ReaderPool(read, 2)))  # type: ignore[misc]
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
        ReaderPool(read, 4)
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
        ReaderPool(read, 8)
    assert len(started) == n_started
    assert not any(thread.is_alive() for thread in started)


def test_all_threads_run_before_the_first_job() -> None:
    before = threading.active_count()
    pool = ReaderPool(read, 5)
    assert threading.active_count() == before + 5
    pool.close()
    assert threading.active_count() == before


def test_negative() -> None:
    with pytest.raises(InputError, match="n_threads -1"):
        ReaderPool(read, -1)


def test_a_dropped_pool_leaves_no_thread() -> None:
    """Dropped by its caller while reads are pending, and by the last reader after them."""
    gate = Gate()
    before = set(threading.enumerate())
    pool = ReaderPool(gate.read, 3)
    jobs: list[ReadJob] = [pool.submit(0, i, new()) for i in range(5)]
    threads = set(threading.enumerate()) - before
    assert len(threads) == 3
    dropped = weakref.ref(pool)
    del pool
    gate.go.set()
    for thread in threads:
        thread.join(LIMIT)
    assert dropped() is None
    assert [job.error for job in jobs] == [None] * 5


def test_a_failed_job_is_freed_without_the_collector() -> None:
    """No cycle keeps a job's memory: an error leads to the frame that raised it, which must not lead to the job."""

    def fail(layer: int, expert: int, out: NDArray[np.uint8]) -> None:
        raise CheckpointError("content")

    pool = ReaderPool(fail, 1)
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

    def read(layer, expert, out):
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
    pool = ReaderPool(read, 2)
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
