"""Which slots were used how long ago, which are pinned, and which one is given up next.

Time passes in epochs. A slot touched in the current epoch is pinned; the others are ordered by the epoch of their last
touch and, inside one epoch, by the first touch of it. This file knows slot numbers only: no keys, no experts.

The order is a list of slots, oldest first, to which a touch appends; the slot's old place becomes a hole (0). Every
block of 128 places keeps the number of its live ones, so the r-th oldest slot is found by adding up counts, not by
walking slots. Holes are squeezed out at the beginning of an epoch, once they outnumber the slots: amortised O(1).
"""

import random
from array import array
from collections.abc import Iterable

import numpy as np

from ds41rt.errors import InputError

_SHIFT = 7
_BLOCK = 1 << _SHIFT


class Recency:
    """Ages of slots 1..n_slots; a slot is in the order from `add` until `take_victim` hands it out.

    The victim is uniform among the oldest `evict_random_pct` percent (at least one) of the unpinned slots; 0 is strict
    LRU. Equal seeds and equal calls give equal victims. A touch costs a few array operations; up to 14 bytes a slot.
    """

    def __init__(self, n_slots: int, evict_random_pct: float, seed: int) -> None:
        self.unpinned = 0
        self._order = array("i")
        self._at = array("i", [-1]) * (n_slots + 1)  # place in _order; -1 = not in it, slot 0 never is
        self._live: list[int] = []  # live places of each block, counted up to _epoch_at only
        self._first_block = 0  # no block before this one has live places
        self._epoch_at = 0  # places from here on were written in this epoch: exactly the pinned slots
        self._squeeze_at = 2 * n_slots + _BLOCK
        self._old_share = evict_random_pct / 100.0
        self._random = random.Random(seed).random

    def begin_epoch(self) -> None:
        """Unpin everything. No victim may be out: a squeeze forgets the places that `put_back` needs."""
        order, live = self._order, self._live
        if len(order) >= self._squeeze_at:
            self._squeeze()
            return
        # Places of the ending epoch are all live: a pinned slot is not moved again and is no victim.
        start, end = self._epoch_at, len(order)
        self.unpinned += end - start
        while start < end:
            block = start >> _SHIFT
            stop = min(end, (block + 1) << _SHIFT)
            if block == len(live):
                live.append(0)
            live[block] += stop - start
            start = stop
        self._epoch_at = end

    def _squeeze(self) -> None:
        order = np.frombuffer(self._order, np.int32)
        order = order[order != 0]
        n = len(order)
        np.frombuffer(self._at, np.int32)[order] = np.arange(n, dtype=np.int32)
        self._order = array("i", order.tobytes())
        self._live = [min(_BLOCK, n - i) for i in range(0, n, _BLOCK)]
        self._first_block = 0
        self._epoch_at = self.unpinned = n

    def add(self, slot: int) -> None:
        """A slot that is not in the order becomes its newest, pinned."""
        self._at[slot] = len(self._order)
        self._order.append(slot)

    def touch(self, slots: Iterable[int]) -> None:
        """Pin these slots and make them the newest; zeros and slots pinned already are passed over."""
        at, order, live, epoch_at = self._at, self._order, self._live, self._epoch_at
        place = n_before = len(order)
        append = order.append
        for slot in slots:
            i = at[slot]
            if i >= epoch_at or not slot:
                continue
            if i < 0:
                self.unpinned -= place - n_before
                raise InputError(f"slot {slot} holds no expert and cannot be touched")
            order[i] = 0
            live[i >> _SHIFT] -= 1
            at[slot] = place
            append(slot)
            place += 1
        self.unpinned -= place - n_before

    def n_unpinned(self, slots: Iterable[int]) -> int:
        """How many of these distinct slots a `touch` would newly pin."""
        at, epoch_at = self._at, self._epoch_at
        return sum(0 <= at[slot] < epoch_at for slot in slots)

    def take_victim(self) -> tuple[int, int]:
        """Take one unpinned slot out of the order; (slot, its place for `put_back`). There must be one (`unpinned`)."""
        n_old = int(self.unpinned * self._old_share)
        rank = int(self._random() * n_old) if n_old > 1 else 0
        live, block = self._live, self._first_block
        while not live[block]:
            block += 1
        self._first_block = block
        while rank >= live[block]:
            rank -= live[block]
            block += 1
        start = block << _SHIFT
        # Pinned places of a mixed block stand behind its unpinned ones, so a rank below the count is never pinned.
        slot = list(filter(None, self._order[start : start + _BLOCK]))[rank]
        place = self._at[slot]
        self.remove(slot)
        return slot, place

    def remove(self, slot: int) -> None:
        """An unpinned slot leaves the order: no victim until `add` makes it the newest."""
        place = self._at[slot]
        if not 0 <= place < self._epoch_at:
            raise InputError(f"slot {slot} is pinned or holds no expert, and cannot leave the order")
        self._order[place] = 0
        self._at[slot] = -1
        self._live[place >> _SHIFT] -= 1
        self.unpinned -= 1

    def put_back(self, slot: int, place: int) -> None:
        """Undo `take_victim` of this epoch: the slot has its old age again."""
        self._order[place] = slot
        self._at[slot] = place
        block = place >> _SHIFT
        self._live[block] += 1
        self._first_block = min(self._first_block, block)
        self.unpinned += 1
