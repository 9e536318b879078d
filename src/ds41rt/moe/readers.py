"""Threads that read experts into the caller's memory, so that several reads are in flight while the caller goes on.

It sees a read function and byte arrays; it must not know devices, slots or caches, and no thread of it ever calls CUDA.

The standard library's thread pool, `Condition` and all that is built on it are not used: they are Python code, and a
KeyboardInterrupt inside them leaves a lock held for good (every tenth that hits `ThreadPoolExecutor.submit` does, in
Python 3.11 to 3.13) or comes out as another error. A `Lock` and a `SimpleQueue` are interrupted before or after a call.
"""

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from ds41rt.errors import EngineClosedError, InputError, UnsupportedError
from ds41rt.log import Logger

log = Logger("ds41rt.moe")
Read = Callable[[int, int, NDArray[np.uint8]], None]
Task = Callable[[], None]  # raises nothing
# Every wait is a series of short ones: a signal that arrives just before a wait begins is seen only after it.
_SLICE_S = 0.2


class _Once:
    """Something that happens once, for any number of threads to wait for."""

    __slots__ = ("_lock", "happened")

    def __init__(self) -> None:
        self.happened = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def happen(self) -> None:
        self.happened = True
        self._lock.release()

    def wait(self) -> None:
        while not self.happened:
            if self._lock.acquire(timeout=_SLICE_S):
                self._lock.release()  # for the next who waits


class ReadJob:
    """One expert on its way into memory. Until the job is `done` that memory belongs to it, whoever was interrupted."""

    __slots__ = ("_end", "_outcome", "expert", "layer")

    def __init__(self, layer: int, expert: int) -> None:
        self.layer = layer
        self.expert = expert
        self._end = _Once()
        self._outcome: BaseException | None = None

    @property
    def done(self) -> bool:
        """Arrived, failed, or given up by `ReaderPool.close`: nothing writes to the memory any more."""
        return self._end.happened

    @property
    def error(self) -> Exception | None:
        """Why the expert did not arrive, None if it did; `InputError` while the job is not done.

        What ended the read without being an `Exception` (SystemExit, for one) is raised: it is not the expert's fault.
        """
        if not self.done:
            raise InputError(f"layer {self.layer}, expert {self.expert} is still being read: wait for it first")
        outcome = self._outcome
        if outcome is None or isinstance(outcome, Exception):
            return outcome
        raise outcome

    def outcome(self) -> BaseException | None:
        """Block until the job is done; what kept the expert from arriving, of whatever kind, or None."""
        self._end.wait()
        return self._outcome

    def end(self, outcome: BaseException | None) -> None:
        """For the reader: from here on the memory is the caller's."""
        self._outcome = outcome
        self._end.happen()


class ReaderPool:
    """`read(layer, expert, out)` on `n_threads` threads, first come first served; 0: in the thread that submits.

    A read that fails with an `OSError` is tried once more. One thread at a time may use the pool. It is closed when the
    interpreter exits.
    """

    def __init__(self, read: Read, n_threads: int) -> None:
        """Start all threads; `UnsupportedError` if the system does not allow that many, none is left then."""
        if n_threads < 0:
            raise InputError(f"n_threads {n_threads} must be 0 or more")
        self._read = read
        self._pid = os.getpid()
        self._closed = False
        self._dismissed = False
        self._count_lock = threading.Lock()
        self.nbytes_read = 0
        self.reads_retried = 0
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        # They know the queue alone: a pool that nobody holds, no task either, is collected, and that ends them.
        self._threads = [
            threading.Thread(target=_work, args=(self._queue,), name=f"ds41rt-reader-{i}", daemon=True)
            for i in range(n_threads)
        ]
        self._at_exit = partial(_close_at_exit, weakref.ref(self))
        weakref.finalize(self, _dismiss, self._queue, n_threads, self._at_exit).atexit = False
        try:
            for thread in self._threads:
                thread.start()
            atexit.register(self._at_exit)
        except RuntimeError as e:
            self._end_threads()
            raise UnsupportedError(f"cannot start {n_threads} reader threads ({e}); set reader_threads lower") from e
        except BaseException:
            self._end_threads()
            raise

    def submit(self, layer: int, expert: int, out: NDArray[np.uint8]) -> ReadJob:
        """Read an expert into `out`, contiguous uint8, which nobody else touches before the job is done.

        Raises `EngineClosedError` after `close`, `UnsupportedError` in a forked child.
        """
        if self._pid != os.getpid():
            raise UnsupportedError(f"process {os.getpid()} is a forked child without reader threads; use spawn")
        if self._closed:
            raise EngineClosedError("the expert readers are closed")
        job = ReadJob(layer, expert)
        if self._threads:
            self._queue.put(partial(self._run, job, out))
        else:
            self._run(job, out)
            self.wait((job,))
        return job

    def wait(self, jobs: Iterable[ReadJob]) -> None:
        """Block until all `jobs` are done; their errors stay with them, save what is no `Exception`: that is raised.

        KeyboardInterrupt ends this and every other wait here within a fraction of a second. The jobs still run then,
        and keep their memory until they are done.
        """
        for outcome in [job.outcome() for job in jobs]:
            if outcome is not None and not isinstance(outcome, Exception):
                raise outcome

    def drain(self) -> None:
        """Block until everything that was ever submitted is done, also where an interrupt lost the job.

        Every thread comes by, which it does after what was submitted before, and stays until all are there.
        """
        if self._dismissed or self._pid != os.getpid():
            return
        visits, leave = [_Once() for _ in self._threads], _Once()
        try:
            for visit in visits:
                self._queue.put(partial(_come_by, visit, leave))
            for visit in visits:
                visit.wait()
        finally:
            # An assignment, because an interrupt may come before the first line of any function, this one's `happen`
            # included; the threads would stay for ever.
            leave.happened = True
            leave.happen()

    def close(self) -> None:
        """Give up what has not begun, wait for what runs, end the threads. Repeat it if it was interrupted."""
        self._closed = True
        self.drain()  # joining is no proof: before Python 3.13 an interrupted join takes a running thread for ended
        self._end_threads()

    def _end_threads(self) -> None:
        self._dismissed = True
        _dismiss(self._queue, len(self._threads), self._at_exit)
        for thread in self._threads:
            while thread.is_alive():
                thread.join(_SLICE_S)

    def _run(self, job: ReadJob, out: NDArray[np.uint8]) -> None:
        """Runs in a reader thread."""
        try:
            if self._closed:
                raise EngineClosedError(f"layer {job.layer}, expert {job.expert} was not read: the readers are closed")
            self._read_twice(job.layer, job.expert, out)
        except BaseException as e:  # noqa: BLE001  # whatever it is: the job ends, and who waits for it gets it
            job.end(e)
        else:
            job.end(None)
        finally:
            del job, out  # an error holds this frame, which must not hold the job in turn

    def _read_twice(self, layer: int, expert: int, out: NDArray[np.uint8]) -> None:
        """A `CheckpointError` that is no `OSError` blames the content: no second try."""
        try:
            self._read(layer, expert, out)
        except OSError as e:
            log.warning("expert read failed, trying again", layer=layer, expert=expert, why=str(e))
            with self._count_lock:
                self.reads_retried += 1
            self._read(layer, expert, out)
        with self._count_lock:
            self.nbytes_read += out.nbytes


def _work(queue: "SimpleQueue[Task | None]") -> None:
    while (task := queue.get()) is not None:
        task()
        del task  # it holds the pool and the caller's memory


def _dismiss(queue: "SimpleQueue[Task | None]", n_threads: int, at_exit: Task) -> None:
    for _ in range(n_threads):
        queue.put(None)
    atexit.unregister(at_exit)


def _come_by(visit: _Once, leave: _Once) -> None:
    visit.happen()
    leave.wait()


def _close_at_exit(pool: "weakref.ref[ReaderPool]") -> None:
    """A thread must not write to memory that the interpreter is about to take apart."""
    still_open = pool()
    if still_open is not None:
        still_open.close()
