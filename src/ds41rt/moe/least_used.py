"""How much each slot was used lately, which slots are pinned, and which one is given up next.

A slot's score is the number of its uses, each counting half as much once `_HALF_LIFE * n_slots` uses (of any slots)
have passed since. Instead of letting all scores shrink, a new use weighs more: the weight grows by a constant factor
per use, and a score changes only when its slot is used. The order of scores is the same.

Nothing is sorted. The victim is the lowest score of a random sample: a window of neighbouring places, into which slots
were shuffled at the start. An expert used once is given up before one that was used twice a little earlier; that is
worth more than exact order. The random sample keeps loops that are a little larger than the cache from missing always.

This file knows slot numbers only: no keys, no experts. A count ends with its slot's `take_victim`.
"""

import math
import random
from array import array
from collections.abc import Iterable

from ds41rt.errors import InputError

# In uses a slot. Measured on the synthetic traces (docs/cache-sizing.md): 2 forgets too early, 8 remembers too long
# when the popularity of experts drifts fast.
_HALF_LIFE = 4.0
# Scores stay below these two marks, which stand in the place of the score of a slot that is no candidate.
_PINNED, _OUT = 1e300, math.inf
# Weight at which all scores are scaled down: far below _PINNED, and reached after hundreds of half-lives.
_HEAVY = 2.0**500


class LeastUsed:
    """Decayed use counts of slots 1..n_slots; a slot is in the order from `add` until `take_victim` hands it out.

    The victim is the unpinned slot with the lowest score among `200 / evict_random_pct` neighbouring places, at most
    half of all (for 0 %: among all); the next ones are looked at when none of those is a candidate. Equal seeds and
    equal calls give equal victims. A touch costs a few array accesses, a victim a slice and its minimum. 16 bytes a
    slot.
    """

    def __init__(self, n_slots: int, evict_random_pct: float, seed: int) -> None:
        self.unpinned = 0
        rng = random.Random(seed)
        places = list(range(n_slots))
        rng.shuffle(places)
        # Slot 0 has a place behind all windows that looks pinned for ever: zeros are passed over without a question.
        self._place = array("i", [n_slots, *places])
        self._slot = array("i", [0]) * n_slots
        for slot, place in enumerate(places, 1):
            self._slot[place] = slot
        self._scores = array("d", [_OUT]) * n_slots
        self._scores.append(_PINNED)
        self._pinned: list[tuple[int, float]] = []  # (place, score) of what this epoch pinned
        self._taken: dict[int, float] = {}  # place -> score of this epoch's victims
        self._weight = 1.0
        self._growth = 2.0 ** (1.0 / (_HALF_LIFE * n_slots))
        # The mean rank of the lowest of n is that of a draw from the lowest 2 / n. Half of a small arena at most: with
        # all of it in the sample a loop would always evict what it needs next.
        self._n_sample = n_slots
        if evict_random_pct > 0:
            self._n_sample = min(math.ceil(200.0 / evict_random_pct), (n_slots + 1) // 2)
        self._random = rng.random

    def begin_epoch(self) -> None:
        """Unpin everything; victims that are out can no longer be put back."""
        scores = self._scores
        for place, score in self._pinned:
            scores[place] = score
        n_used = len(self._pinned)
        self.unpinned += n_used
        self._pinned.clear()
        self._taken.clear()
        self._weight *= self._growth**n_used
        if self._weight > _HEAVY:
            self._scale_down()

    def _scale_down(self) -> None:
        """Only between epochs, when no score stands in `_pinned` or `_taken`."""
        weight = self._weight
        self._scores = array("d", (s if s >= _PINNED else s / weight for s in self._scores))
        self._weight = 1.0

    def add(self, slot: int) -> None:
        """A slot that is not in the order enters it with one use, pinned."""
        place = self._place[slot]
        self._scores[place] = _PINNED
        self._pinned.append((place, self._weight))

    def touch(self, slots: Iterable[int]) -> None:
        """Pin these slots and count a use of each; zeros and slots pinned already are passed over."""
        places, scores, pinned, weight = self._place, self._scores, self._pinned, self._weight
        n_before = len(pinned)
        for slot in slots:
            place = places[slot]
            score = scores[place]
            if score < _PINNED:
                scores[place] = _PINNED
                pinned.append((place, score + weight))
            elif score == _OUT:
                self.unpinned -= len(pinned) - n_before
                raise InputError(f"slot {slot} holds no expert and cannot be touched")
        self.unpinned -= len(pinned) - n_before

    def n_unpinned(self, slots: Iterable[int]) -> int:
        """How many of these distinct slots a `touch` would newly pin."""
        places, scores = self._place, self._scores
        return sum(scores[places[slot]] < _PINNED for slot in slots)

    def take_victim(self) -> tuple[int, int]:
        """Take one unpinned slot out of the order; (slot, its place for `put_back`). There must be one (`unpinned`)."""
        scores, n_slots, n_sample = self._scores, len(self._slot), self._n_sample
        start = int(self._random() * n_slots)
        while True:
            window = scores[start : min(start + n_sample, n_slots)]
            if start + n_sample > n_slots:
                window += scores[: start + n_sample - n_slots]
            lowest = min(window)
            if lowest < _PINNED:
                break
            start = (start + n_sample) % n_slots
        place = (start + window.index(lowest)) % n_slots
        scores[place] = _OUT
        self._taken[place] = lowest
        self.unpinned -= 1
        return self._slot[place], place

    def put_back(self, slot: int, place: int) -> None:
        """Undo `take_victim` of this epoch: the slot has its old score again."""
        self._scores[place] = self._taken.pop(place)
        self.unpinned += 1

    def remove(self, slot: int) -> None:
        """An unpinned slot leaves the order, and its count ends."""
        place = self._place[slot]
        if self._scores[place] >= _PINNED:
            raise InputError(f"slot {slot} is pinned or holds no expert, and cannot leave the order")
        self._scores[place] = _OUT
        self.unpinned -= 1
