"""The question an arena's eviction asks: which slot is given up next? One interface, and the policies by their names.

This file knows slot numbers only: no keys, no experts, no tiers. Each tier of the cache has a policy object of its own.
"""

from collections.abc import Iterable
from typing import Literal, Protocol, get_args

from ds41rt.errors import InputError
from ds41rt.moe.least_used import LeastUsed
from ds41rt.moe.recency import Recency

PolicyName = Literal["oldest", "least-used"]


class EvictionPolicy(Protocol):
    """Slots 1..n; a slot is *in the order* from `add` until `take_victim` hands it out.

    Time passes in epochs: a slot added or touched in the current epoch is pinned and is no victim. Equal seeds and
    equal calls give equal victims. `unpinned` is the number of slots that `take_victim` may choose from.
    """

    unpinned: int

    def begin_epoch(self) -> None:
        """Unpin everything. Victims handed out before can no longer be put back; `add` is still fine."""

    def add(self, slot: int) -> None:
        """A slot that is not in the order enters it, used once and pinned."""

    def touch(self, slots: Iterable[int]) -> None:
        """These slots were used: pin them. Zeros and slots pinned already are passed over.

        Raises `InputError` for a slot that is not in the order.
        """

    def n_unpinned(self, slots: Iterable[int]) -> int:
        """How many of these distinct slots a `touch` would newly pin; zeros and slots not in the order are none."""

    def take_victim(self) -> tuple[int, int]:
        """Take one unpinned slot out of the order: (slot, place for `put_back`). There must be one (`unpinned`)."""

    def put_back(self, slot: int, place: int) -> None:
        """Undo `take_victim` of this epoch: the order is as if the slot had never been taken."""

    def remove(self, slot: int) -> None:
        """An unpinned slot leaves the order, as a victim does; `InputError` if it is pinned or not in the order."""


def make_policy(name: str, n_slots: int, *, evict_random_pct: float, seed: int) -> EvictionPolicy:
    """The policy `name` for one tier of `n_slots` slots.

    - `oldest`: uniform among the least recently used `evict_random_pct` percent; 0 is strict LRU.
    - `least-used`: the lowest decayed use count of a random sample, whose victim has as low a rank on average as a
      uniform draw from the lowest `evict_random_pct` percent; 0 is the lowest of all.

    Raises `InputError` for another name, fewer slots than one, or a share outside 0..100.
    """
    if name not in get_args(PolicyName):
        raise InputError(f"eviction policy {name!r} is unknown; use one of {', '.join(get_args(PolicyName))}")
    if n_slots < 1:
        raise InputError(f"eviction policy: n_slots must be at least 1, is {n_slots}")
    if not 0.0 <= evict_random_pct <= 100.0:
        raise InputError(f"eviction policy: evict_random_pct must be in 0..100, is {evict_random_pct}")
    if name == "oldest":
        return Recency(n_slots, evict_random_pct, seed)
    return LeastUsed(n_slots, evict_random_pct, seed)
