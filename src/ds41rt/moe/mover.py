"""Promotion: experts that were used in the host tier change places with experts of the device tier, behind the step.

A move advances only where a token starts, and never waits. At every moment each of its two experts has one valid place:

    saving    the victim's bytes are copied from its device slot to a spare pool slot; both experts stay where they are
    filling   (that copy is complete, and nobody has used the victim since) the victim's place is the pool slot now; the
              other expert is copied into the device slot, behind all kernels that may still read it there
    landing   (that copy is complete) its place is the device slot now, and the pool slot that it leaves is spare

So no expert is absent because of a move, and a move never costs a fall. This file must not know layers or segments.
"""

from array import array
from dataclasses import dataclass

from ds41rt.cu.backend import Event, GpuBackend, Stream
from ds41rt.cu.result import CudaError
from ds41rt.log import Logger
from ds41rt.moe.arena import ExpertArena
from ds41rt.moe.cache import ExpertCache
from ds41rt.moe.plan import Move
from ds41rt.moe.pool import PinnedPool
from ds41rt.moe.slots import SlotTable

log = Logger("ds41rt.moe")
# With the most used experts first, four do what eight would and keep the link busy for half as long; see
# docs/cache-sizing.md.
MOVES_PER_TOKEN = 4
# A batch lives for three tokens: one is saved, one filled and one lands while the next begins.
_N_BATCHES = 3


@dataclass(slots=True, eq=False)
class _Transfer:
    """A move and the pool slot that takes its victim: 0 when it has none, or has been given back."""

    move: Move
    spare: int


@dataclass(slots=True, eq=False)
class _Batch:
    """Moves that advance together, and the event behind their copies. An idle batch has no transfers.

    `broken`: a call failed or was interrupted. What it enqueued may still run, so its slots are not touched before the
    copy stream was drained.
    """

    event: Event
    transfers: list[_Transfer]
    filling: bool = False
    broken: bool = False


class Mover:
    """Up to `MOVES_PER_TOKEN` promotions a token, of the experts used most often in the host tier.

    `keep` spare pool slots, and as many slots that are no part of a move, are left to the step: what one layer needs.

    Counters: `n_promoted` and `n_demoted` experts that have arrived, `nbytes_moved` of both directions.
    """

    def __init__(
        self, backend: GpuBackend, cache: ExpertCache, arena: ExpertArena, pool: PinnedPool, table: SlotTable, keep: int
    ) -> None:
        self._backend = backend
        self._cache = cache
        self._arena = arena
        self._pool = pool
        self._table = table
        self._keep = keep
        self._nbytes = arena.layout.nbytes
        self.n_promoted = 0
        self.n_demoted = 0
        self.nbytes_moved = 0
        # By key: tokens that used it in the host tier since it was promoted last.
        self._uses = array("i", [0]) * (cache.n_layers * cache.n_experts)
        self._events: list[Event] = []
        self._copies = backend.create_stream("expert moves")
        self._streams = [self._copies]
        try:
            for name in ("expert moves fork", *(f"expert moves {i}" for i in range(_N_BATCHES))):
                self._events.append(backend.create_event(name))
        except BaseException:
            self.close()
            raise
        self._fork = self._events[0]
        self._batches = [_Batch(event, []) for event in self._events[1:]]

    def advance(self, stream: Stream) -> None:
        """A token starts: bring all moves forward whose copies are complete, and begin new ones.

        A call that fails cancels the moves that it was made for, with a warning. Raises only what loses the device.
        """
        self._cache.begin_epoch()  # nothing is pinned between two tokens
        for batch in self._batches:
            if not batch.transfers:
                continue
            try:
                self._bring_forward(batch, stream)
            except CudaError as e:
                self._failed(e)
        while slot := self._cache.trim_host():
            self._pool.leave(slot)
        idle = next((batch for batch in self._batches if not batch.transfers), None)
        wanted = self._cache.take_used_in_host()
        for key in wanted:
            self._uses[key] += 1
        wanted.sort(key=self._uses.__getitem__, reverse=True)  # stable: of equals the first used
        if idle is not None and wanted:
            try:
                self._begin(idle, wanted, stream)
            except CudaError as e:
                self._failed(e)

    def _failed(self, error: CudaError) -> None:
        if error.sticky:
            raise error
        log.warning("experts were not moved to the device", error=str(error))

    def _bring_forward(self, batch: _Batch, stream: Stream) -> None:
        if batch.broken:
            self._cancel(batch)
        elif self._backend.query_event(batch.event):
            # What is enqueued from here on, on any stream, comes after the copies: the host has seen them complete.
            batch.broken = True
            if batch.filling:
                self._land(batch)
            else:
                self._fill(batch, stream)
            batch.broken = False

    def _begin(self, batch: _Batch, keys: list[int], stream: Stream) -> None:
        """Choose moves and save their victims. A move into an empty slot has nothing to save."""
        batch.broken = True
        batch.filling = False
        for key in keys:
            if len(batch.transfers) == MOVES_PER_TOKEN or not self._room():
                break
            move = self._cache.begin_move(key)
            if move is not None:
                transfer = _Transfer(move, 0)
                batch.transfers.append(transfer)
                if move.victim >= 0:
                    transfer.spare = self._pool.take()
        if batch.transfers:
            self._fork_from(stream)
            for transfer in batch.transfers:
                if transfer.spare:
                    source, off = self._arena.slot_ptr(transfer.move.slot), self._pool.offset(transfer.spare)
                    self._backend.copy_d2h(self._pool.host, source, self._nbytes, self._copies, off, "expert.save")
            self._backend.record(batch.event, self._copies)
        batch.broken = False

    def _room(self) -> bool:
        """True if the step is left with what one layer needs when one more move begins."""
        n_slots = self._cache.n_slots + self._cache.host_slots
        return self._pool.n_spare > self._keep and n_slots - self._cache.n_moving - 2 >= self._keep

    def _fork_from(self, stream: Stream) -> None:
        """What is copied next comes after all that is enqueued on `stream` now: its kernels, and copies into slots."""
        self._backend.record(self._fork, stream)
        self._backend.wait(self._copies, self._fork)

    def _fill(self, batch: _Batch, stream: Stream) -> None:
        """Give the victims their new places, and copy the others into the slots that they leave."""
        going: list[_Transfer] = []
        for transfer in batch.transfers:
            spare, transfer.spare = transfer.spare, 0
            if transfer.move.touched:  # it is wanted where it is
                self._cache.cancel(transfer.move)
                self._pool.give(spare)
                continue
            if spare:
                self._cache.demote(transfer.move, spare)
                self.n_demoted += 1
                self.nbytes_moved += self._nbytes
            going.append(transfer)
        batch.transfers = going
        if not going:
            return
        # Before the fork: no selection behind it can name a slot that is being filled.
        self._table.update()
        self._fork_from(stream)
        for transfer in going:
            target, off = self._arena.slot_ptr(transfer.move.slot), self._pool.offset(transfer.move.home)
            self._backend.copy_h2d(target, self._pool.host, self._nbytes, self._copies, off, "expert.promote")
        self._backend.record(batch.event, self._copies)
        batch.filling = True

    def _land(self, batch: _Batch) -> None:
        while batch.transfers:
            move = batch.transfers[-1].move
            home = self._cache.promote(move)
            self._uses[move.key] = 0
            batch.transfers.pop()
            self._pool.leave(home)
            self.n_promoted += 1
            self.nbytes_moved += self._nbytes

    def _cancel(self, batch: _Batch) -> None:
        """End the moves of a broken batch where they stand, once nothing of them is on its way."""
        self._backend.synchronize(self._copies)
        while batch.transfers:
            transfer = batch.transfers.pop()
            self._cache.cancel(transfer.move)
            self._pool.give(transfer.spare)

    def recover(self) -> None:
        """Forget all moves once no copy of one is on its way; the cache and the pool forget them too."""
        self.drain()
        for batch in self._batches:
            batch.transfers.clear()

    def drain(self) -> None:
        """Return once no copy of a move is on its way."""
        self._backend.synchronize(self._copies)

    def close(self) -> None:
        """Destroy stream and events. Drained before."""
        while self._events:
            self._backend.destroy_event(self._events[-1])
            self._events.pop()  # only now: what an interrupt left is destroyed by the next call
        while self._streams:
            self._backend.destroy_stream(self._streams[-1])
            self._streams.pop()
