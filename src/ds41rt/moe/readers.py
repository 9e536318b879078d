"""Threads that read experts into the caller's memory, so that several reads are in flight while the caller goes on.

An expert is read in parts, each by the next thread that is free: fewer experts than threads keep all of them busy, and
while one thread copies its part the others have reads on their way.

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
Read = Callable[[int, int, NDArray[np.uint8], int], None]  # layer, expert, memory, the expert's byte that goes first
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
    """One expert on its way into memory. Until the job is `done` that memory belongs to it, whoever was interrupted.

    It is done with the last of its parts, also where one before has failed.
    """

    __slots__ = ("_end", "_n_left", "_nbytes", "_outcome", "expert", "layer")

    def __init__(self, layer: int, expert: int, nbytes: int, n_parts: int) -> None:
        self.layer = layer
        self.expert = expert
        self._end = _Once()
        # The pool's from here on. `_outcome` is the first failure of a part, and final only at the end.
        self._nbytes = nbytes
        self._n_left = n_parts
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


class ReaderPool:
    """`read(layer, expert, out, offset)` on `n_threads` threads, first come first served; 0: in the caller's thread.

    `out` is at most `part_nbytes` of the expert, from its byte `offset` on. A part whose read fails with an `OSError`
    is tried once more. One thread at a time may use the pool. It is closed when the interpreter exits.

    `nbytes_read` counts experts that arrived whole, `reads_retried` second tries.
    """

    def __init__(self, read: Read, n_threads: int, part_nbytes: int) -> None:
        """Start all threads; `UnsupportedError` if the system does not allow that many, none is left then."""
        for name, value, least in (("n_threads", n_threads, 0), ("part_nbytes", part_nbytes, 1)):
            if value < least:
                raise InputError(f"{name} {value} must be {least} or more")
        self._read = read
        self._part_nbytes = part_nbytes
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
        size = self._part_nbytes
        offsets = range(0, max(out.nbytes, 1), size)  # one part at least, or the job would never end
        job = ReadJob(layer, expert, out.nbytes, len(offsets))
        # An interrupt in here loses the job, and maybe parts that it counts on: `drain` ends those that were submitted.
        for offset in offsets:
            part = partial(self._run, job, out[offset : offset + size], offset)
            if self._threads:
                self._queue.put(part)
            else:
                part()
        if not self._threads:
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

    def _run(self, job: ReadJob, out: NDArray[np.uint8], offset: int) -> None:
        """One part; runs in a reader thread. Once a part has failed, nobody needs the others."""
        try:
            if self._closed:
                raise EngineClosedError(f"layer {job.layer}, expert {job.expert} was not read: the readers are closed")
            if job._outcome is None:
                self._read_twice(job.layer, job.expert, out, offset)
        except BaseException as e:  # noqa: BLE001  # whatever it is: the part ends, and who waits for the job gets it
            self._end_part(job, e)
        else:
            self._end_part(job, None)
        finally:
            del job, out  # an error holds this frame, which must not hold the job in turn

    def _end_part(self, job: ReadJob, error: BaseException | None) -> None:
        """The first failure is the job's. What is no `Exception`, Ctrl-C for one, must not be lost behind it."""
        ends_more = error is not None and not isinstance(error, Exception)
        with self._count_lock:
            if job._outcome is None or ends_more:
                job._outcome = error
            job._n_left -= 1
            last = job._n_left == 0
            if last and job._outcome is None:
                self.nbytes_read += job._nbytes
        if last:
            job._end.happen()  # from here on the memory is the caller's

    def _read_twice(self, layer: int, expert: int, out: NDArray[np.uint8], offset: int) -> None:
        """A `CheckpointError` that is no `OSError` blames the content: no second try."""
        try:
            self._read(layer, expert, out, offset)
        except OSError as e:
            log.warning("expert read failed, trying again", layer=layer, expert=expert, offset=offset, why=str(e))
            with self._count_lock:
                self.reads_retried += 1
            self._read(layer, expert, out, offset)


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
