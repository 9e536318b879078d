"""One tier of the expert cache: slots 1..n of an arena, the key that each holds, and the policy that ages them.

A pure data structure. It does not know the other tier, nor where an expert is looked up.
"""

from ds41rt.moe.policy import EvictionPolicy


class Tier:
    """`keys[slot]` is the key in that slot, -1 if there is none; slot 0 is no slot. `n_keys` slots hold one.

    `policy` has the slots that may be victims: those with a key, less those that were reserved or are moving.
    """

    __slots__ = ("keys", "n_keys", "n_slots", "policy")

    def __init__(self, n_slots: int, policy: EvictionPolicy) -> None:
        self.n_slots = n_slots
        self.keys = [-1] * (n_slots + 1)
        self.n_keys = 0
        self.policy = policy

    def put(self, slot: int, key: int) -> None:
        """`slot`, which holds nothing, holds `key` from now on: the newest, pinned for the epoch."""
        self.keys[slot] = key
        self.n_keys += 1
        self.policy.add(slot)

    def drop(self, slot: int) -> int:
        """The key in `slot`, which holds it no longer; -1 if it held none."""
        key = self.keys[slot]
        if key >= 0:
            self.keys[slot] = -1
            self.n_keys -= 1
        return key
