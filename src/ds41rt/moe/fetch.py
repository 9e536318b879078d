"""Brings missing experts from the checkpoint to where kernels read them: reads at once, then one by one copy and map.

An expert of the host tier stays in the pool slot that it was read into, and kernels read it there. One of the device
tier is copied on the compute stream: kernels that still use the slot's old bytes are ahead of the copy, kernels that
need the new ones are behind it. Which slots there are is decided before anything is read, so that the map does not
depend on the readers' timing. Must not know headers, segments or routing.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ds41rt.checkpoint.direct import PART_NBYTES
from ds41rt.checkpoint.source import ModelSource
from ds41rt.cu.backend import Event, GpuBackend, Stream
from ds41rt.errors import CacheError, CheckpointError
from ds41rt.moe.arena import ExpertArena
from ds41rt.moe.cache import ExpertCache
from ds41rt.moe.plan import FetchPlan, Ticket, reads_failed
from ds41rt.moe.pool import PinnedPool
from ds41rt.moe.prefetch import Prefetch
from ds41rt.moe.readers import ReaderPool, ReadJob


@dataclass(slots=True, eq=False)
class _Half:
    """Pool slots that copies to the device read from, and the event behind those copies.

    `unrecorded`: a copy may be on its way that `copied` does not stand for, because a call failed in between.
    """

    copied: Event
    slots: list[int] = field(default_factory=list)
    unrecorded: bool = False


@dataclass(slots=True, eq=False)
class _Read:
    """A ticket's expert on its way into pool slot `slot`: 0 once that belongs to the cache or to a half.

    `job` is None until the read was submitted. `ahead`: it was begun before anybody asked for it.
    """

    ticket: Ticket
    slot: int
    job: ReadJob | None
    ahead: bool


class ExpertFetcher:
    """Serves the misses of one layer at a time. Spare slots of the pool are its staging ring, in two halves: while the
    copies out of one are on their way, the next call uses the other, and a half is given back behind its event."""

    def __init__(
        self,
        backend: GpuBackend,
        cache: ExpertCache,
        arena: ExpertArena,
        pool: PinnedPool,
        source: ModelSource,
        n_threads: int,
    ) -> None:
        self._backend = backend
        self._cache = cache
        self._arena = arena
        self._pool = pool
        self._source = source
        self._nbytes = arena.layout.nbytes
        # Slots of reads whose submission was interrupted: nobody has the job.
        self._unknown: list[int] = []
        self._halves: list[_Half] = []
        self.readers = ReaderPool(self._read_expert, n_threads, PART_NBYTES)
        self.ahead = Prefetch(cache, pool, self.readers, self._unknown)
        try:
            for i in range(2):
                self._halves.append(_Half(backend.create_event(f"expert staging {i} copied")))
        except BaseException:
            self.close()
            raise

    def _read_expert(self, layer: int, expert: int, out: NDArray[np.uint8], offset: int) -> None:
        """Runs in reader threads."""
        self._source.read_expert(layer, expert, out, offset)

    def fetch(self, layer: int, experts: Sequence[int], stream: Stream, *, count: bool) -> int:
        """Make `experts` of `layer` resident; returns how many were missing. Hits are touched, `count` feeds the
        counters.

        Raises `CacheError` when reads fail or no slot can be freed: what arrived stays mapped, what did not is not, and
        nothing was given up for it. After an interrupt the same holds; reads that still run keep their slots.
        """
        plan = self._cache.plan_fetch(layer, experts, count=count)
        if plan.tickets:
            self._serve(plan, stream)
        self.ahead.settle()
        return len(plan.tickets)

    def _serve(self, plan: FetchPlan, stream: Stream) -> None:
        failures: list[tuple[Ticket, Exception]] = []
        waiting = deque(plan.tickets)
        reads: deque[_Read] = deque()
        try:
            while waiting:
                half = self._next_half(stream)
                self._submit(waiting, reads, stream)
                while reads:
                    error = self._outcome(reads[0])
                    if error is None:
                        self._land(reads[0], half, stream)
                    else:
                        failures.append((reads[0].ticket, error))
                        self._give_up(reads[0])
                    reads.popleft()
                if half.unrecorded:
                    self._backend.record(half.copied, stream)
                    half.unrecorded = False
        finally:
            for read in reads:
                self._give_up(read)
            self._cache.abort(plan)
        if failures:
            raise reads_failed(plan, failures) from failures[0][1]

    def _submit(self, waiting: deque[Ticket], reads: deque[_Read], stream: Stream) -> None:
        """Begin the reads of as many tickets as there are slots for, one at least."""
        self._reclaim()
        while waiting:
            ticket = waiting[0]
            begun = self.ahead.take(ticket.layer, ticket.expert)
            if begun is not None:
                reads.append(_Read(ticket, *begun, True))
            else:
                slot = self._pool.take()
                if not slot and reads:
                    return
                read = _Read(ticket, slot or self._wait_for_a_slot(stream), None, False)
                reads.append(read)
                read.job = self.readers.submit(ticket.layer, ticket.expert, self._pool.for_reader(read.slot))
            waiting.popleft()

    def _outcome(self, read: _Read) -> Exception | None:
        """Wait for a read; why it failed. One that was begun ahead and failed is read again."""
        assert read.job is not None
        self.readers.wait((read.job,))
        error = read.job.error
        if error is not None and read.ahead:
            self.ahead.n_failed += 1
            read.ahead = False
            read.job = None
            read.job = self.readers.submit(read.ticket.layer, read.ticket.expert, self._pool.for_reader(read.slot))
            return self._outcome(read)
        if error is not None and not isinstance(error, CheckpointError | OSError):
            raise error
        return error

    def _land(self, read: _Read, half: _Half, stream: Stream) -> None:
        """The expert's bytes are in the pool slot: map it there, or copy it to its device slot and map it that way."""
        ticket, slot, cache = read.ticket, read.slot, self._cache
        read.slot = 0
        if read.ahead:
            self.ahead.n_useful += 1
        if ticket.to_host:
            self._pool.leave(cache.evict(ticket))
            cache.commit(ticket, slot)
            return
        half.slots.append(slot)
        half.unrecorded = True
        cache.evict(ticket)
        self._backend.copy_h2d(
            self._arena.slot_ptr(ticket.slot),
            self._pool.host,
            self._nbytes,
            stream,
            self._pool.offset(slot),
            "expert.copy",
        )
        cache.commit(ticket)

    def _give_up(self, read: _Read) -> None:
        """Nobody waits for this read any more. Its slot is spare again as soon as nothing can write to it."""
        slot, read.slot = read.slot, 0
        if not slot:
            return
        if read.job is None:
            self._unknown.append(slot)
        else:
            self._pool.quarantine(slot, read.job)
            self.ahead.n_wasted += read.ahead

    # ---- slots

    def _next_half(self, stream: Stream) -> _Half:
        """The half that was used longer ago, with no copy out of it on its way."""
        self._halves.reverse()
        half = self._halves[0]
        self._retire(half, stream)
        return half

    def _retire(self, half: _Half, stream: Stream) -> None:
        if not half.slots:
            return
        if half.unrecorded:
            self._backend.synchronize(stream)  # a call failed between copy and record: only the stream knows
            half.unrecorded = False
        else:
            self._backend.synchronize_event(half.copied)
        while half.slots:
            self._pool.give(half.slots.pop())

    def _reclaim(self) -> None:
        """Make spare what earlier calls left to reads that are over by now."""
        if self._unknown:
            self.readers.drain()
            while self._unknown:
                self._pool.give(self._unknown.pop())
        self._pool.reclaim()

    def _wait_for_a_slot(self, stream: Stream) -> int:
        """A slot when none is spare: wait for what makes one so."""
        self._retire(self._halves[1], stream)
        if not self._pool.n_spare and self._pool.n_left:
            self._backend.synchronize(stream)
            self._pool.drained()
        if not self._pool.n_spare:
            self.readers.wait(self._pool.quarantined_jobs())
            self._pool.reclaim()
        slot = self._pool.take()
        if not slot:
            raise CacheError(
                f"no pinned slot is left to read an expert into: all {self._pool.n_slots} hold experts or are part of "
                "a move; raise DS41RT_STAGING_SLOTS"
            )
        return slot

    def recover(self) -> None:
        """Wait for all reads, also those that an interrupt lost, and give up every slot: the pool recovers them."""
        self.readers.drain()
        self._unknown.clear()
        self.ahead.recover()
        for half in self._halves:
            half.slots.clear()
            half.unrecorded = False

    def close(self) -> None:
        """End the readers and destroy the events. The streams were drained; the pool is closed after this."""
        self.readers.close()
        while self._halves:
            self._backend.destroy_event(self._halves[-1].copied)
            self._halves.pop()  # only now: what an interrupt left is destroyed by the next call
