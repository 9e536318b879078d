"""The pinned pool: slots in host memory that readers fill, copies and kernels read from.

A slot has no fixed role. One that received an expert becomes a slot of the host tier, and the slot whose expert made
room is a spare one again. This file says which slots are spare, and when one may be written by the host or by a reader
thread; which expert is in which slot is the cache's business.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ds41rt.cu.backend import GpuBackend
from ds41rt.cu.result import OutOfDeviceMemory
from ds41rt.log import Logger
from ds41rt.moe.readers import ReadJob

log = Logger("ds41rt.moe")


class PinnedPool:
    """Slots 1..n_slots of `slot_nbytes` each, `nbytes` of them an expert; all are spare at first. Slot 0 is never used:
    it is there so that the address which kernels count from lies in this memory, and tools can say whose it is.

    The proof that nothing reads a spare slot's old bytes: a slot that a key has left goes through `leave`, and kernels
    that were enqueued before may still read it. `drained` says that the compute stream was drained since, and only
    then is it spare. A slot that a read may still write goes through `quarantine`, and is spare once the read is done.
    """

    def __init__(self, backend: GpuBackend, n_slots: int, slot_nbytes: int, nbytes: int) -> None:
        self._backend = backend
        self.slot_nbytes = slot_nbytes
        self._nbytes = nbytes
        self.n_slots = n_slots
        self.host = backend.alloc_pinned("pinned experts", (n_slots + 1) * slot_nbytes)
        # Readers write past NumPy: a plain view, which no hook of an array subclass sees from another thread.
        self._bytes = self.host.array.view(np.ndarray)
        self._spare = deque(range(1, n_slots + 1))
        self._left: list[int] = []
        self._quarantined: list[tuple[int, ReadJob]] = []

    @property
    def base(self) -> int:
        """Device address of slot 0: slot i is at base + i * slot bytes, as in the arena."""
        return self.host.device_ptr

    def offset(self, slot: int) -> int:
        """Byte offset of a slot in `host`."""
        return slot * self.slot_nbytes

    def ptr(self, slot: int) -> int:
        """Device address of a slot."""
        return self.base + slot * self.slot_nbytes

    def for_reader(self, slot: int) -> NDArray[np.uint8]:
        """The expert's bytes in a spare slot, for a reader to fill.

        Four of them are overwritten here, by the thread that owns the backend: a write that race detection sees and
        orders, which it cannot do with what other threads write.
        """
        off = self.offset(slot)
        self.host.array[off : off + self._nbytes : -(-self._nbytes // 4)] = 0
        return self._bytes[off : off + self._nbytes]

    # ---- spare slots

    @property
    def n_spare(self) -> int:
        return len(self._spare)

    def take(self) -> int:
        """A spare slot, 0 if there is none now."""
        return self._spare.popleft() if self._spare else 0

    def give(self, slot: int) -> None:
        """Nothing reads or writes this slot any more: it is spare. 0 is passed over."""
        if slot:
            self._spare.append(slot)

    def leave(self, slot: int) -> None:
        """No key is in this slot any more, but kernels that are enqueued may read it. 0 is passed over."""
        if slot:
            self._left.append(slot)

    def drained(self) -> None:
        """The compute stream was drained after the last `leave`: no kernel reads those slots."""
        if self._left:
            self._spare.extend(self._left)
            self._left.clear()

    @property
    def n_left(self) -> int:
        """Slots that become spare with `drained`."""
        return len(self._left)

    def quarantine(self, slot: int, job: ReadJob) -> None:
        """Nobody wants this read any more, but it may still be writing to the slot."""
        if job.done:
            self._spare.append(slot)
        else:
            self._quarantined.append((slot, job))

    def reclaim(self) -> None:
        """Quarantined slots whose reads are done become spare."""
        if self._quarantined:
            quarantined, self._quarantined = self._quarantined, []
            for slot, job in quarantined:
                self.quarantine(slot, job)

    def quarantined_jobs(self) -> list[ReadJob]:
        return [job for _, job in self._quarantined]

    def recover(self, held: Iterable[int]) -> None:
        """Every slot but `held` is spare, whatever was said before: nothing reads or writes any of them."""
        self._left.clear()
        self._quarantined.clear()
        self._spare = deque(sorted(set(range(1, self.n_slots + 1)).difference(held)))

    def close(self) -> None:
        """Free the memory. The readers were closed and the streams drained before."""
        self._backend.free_pinned(self.host)


def open_pool(
    backend: GpuBackend,
    slot_nbytes: int,
    nbytes: int,
    *,
    host_slots: int,
    spare_slots: int,
    move_slots: int = 0,
    least_host: int = 0,
    least_spare: int = 1,
) -> tuple[PinnedPool, int]:
    """A pool for `host_slots` experts of the host tier: (pool, host slots it has room for).

    It has `spare_slots` more, and up to `move_slots` for moves out of the host tier, one an expert at most. Where the
    system does not give that much, the host tier shrinks by quarters, then the spare slots do; one warning says what
    was asked for and what was achieved. Raises `OutOfDeviceMemory` when there is not even the least.
    """
    host, spare, refused = host_slots, spare_slots, ""
    while True:
        try:
            pool = PinnedPool(backend, host + spare + min(move_slots, host), slot_nbytes, nbytes)
            break
        except OutOfDeviceMemory as e:
            refused = str(e)
            if host > least_host:
                host = max(host * 3 // 4, least_host)
            elif spare > least_spare:
                spare = max(spare * 3 // 4, least_spare)
            else:
                raise
    if refused:
        log.warning(
            "pinned memory is short",
            asked_nbytes=(host_slots + spare_slots + min(move_slots, host_slots)) * slot_nbytes,
            achieved_nbytes=pool.n_slots * slot_nbytes,
            host_slots=f"{host} of {host_slots}",
            spare_slots=f"{spare} of {spare_slots}",
            error=refused,
        )
    return pool, host
