"""The header that the routing kernel leaves for the host, one row of int32 words a layer.

    [flag | k picks | k weight bits | k plan slots]      k = top-k

Picks and weight bits stand in pick order, plan slots in ascending expert id. This file says how a row is laid out and
whether it can be believed; it reads no device memory and decides nothing.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ds41rt.errors import Ds41Error
from ds41rt.kernels import router
from ds41rt.moe.cache import ExpertCache

# Rows of the header block and of the slot table, whatever the model's layer count.
SLOT_TABLE_LAYERS = 64
# The kernel that writes the rows defines their words; these are its names on this side.
MISS = router.FLAG_MISS
NOT_FINITE = router.FLAG_NOT_FINITE
HOST_SLOT_BIT = router.HOST_SLOT_BIT
header_words = router.header_words
# Slot codes: a device slot, HOST_SLOT_BIT | a host slot, or ABSENT; a row's plan slots are the table's codes.
ABSENT = -1


FallKind = Literal["miss", "no_flag", "stale_table"]


@dataclass(frozen=True, slots=True)
class Fall:
    """The first layer of a replay that ran on the wrong experts; its picks are resident now, `fetched` of them read.

    miss: a pick was not resident, and the device said so. no_flag: a pick was not resident, and the device did not say
    so. stale_table: all picks are resident, but the device table named another slot, or none.
    """

    layer: int
    kind: FallKind
    fetched: int = 0


class HeaderError(Ds41Error):
    """A header row that no kernel of ours writes: device memory was overwritten, or the row was never written."""


@dataclass(frozen=True, slots=True)
class HeaderRow:
    """One layer's routing. Lists have top-k entries; `weight_bits` are float32 patterns read as int32."""

    layer: int
    flag: int
    picks: list[int]
    weight_bits: list[int]
    plan_slots: list[int]

    @classmethod
    def of(cls, layer: int, words: list[int]) -> "HeaderRow":
        k = (len(words) - 1) // 3
        return cls(layer, words[0], words[1 : 1 + k], words[1 + k : 1 + 2 * k], words[1 + 2 * k :])

    @property
    def weights(self) -> NDArray[np.float32]:
        """float32 [k], in pick order."""
        return np.array(self.weight_bits, np.int32).view(np.float32)


def clean_codes(layer: int, words: list[int], cache: ExpertCache) -> list[int] | None:
    """The slot codes of a row's picks, in ascending order of experts, if all is as it should be: no flag, picks
    distinct and in range, and each in the slot that the device took it from. None if the row needs a closer look.

    This is what nearly every row of every token goes through, and nothing else; NumPy would take twice as long.
    """
    k = (len(words) - 1) // 3
    picks = sorted(words[1 : 1 + k])
    n_experts = cache.n_experts
    if words[0] or picks[0] < 0 or picks[-1] >= n_experts or len(set(picks)) != k:
        return None
    code_of, base = cache.codes, layer * n_experts
    codes = [code_of[base + expert] for expert in picks]
    return codes if codes == words[1 + 2 * k :] and 0 not in codes else None


def parse(layer: int, words: list[int], n_experts: int) -> HeaderRow:
    """The words of row `layer`, checked.

    Raises `HeaderError` for an unknown flag bit, a pick outside 0..n_experts-1 or a pick that occurs twice.
    """
    row = HeaderRow.of(layer, words)
    flag, picks = row.flag, row.picks
    if flag & ~(MISS | NOT_FINITE):
        raise HeaderError(f"route header of layer {layer}: flag {flag:#x} has unknown bits")
    if min(picks) < 0 or max(picks) >= n_experts:
        wrong = next(e for e in picks if not 0 <= e < n_experts)
        raise HeaderError(
            f"route header of layer {layer}: pick {wrong} is outside 0..{n_experts - 1}; picks are {picks}"
        )
    if len(set(picks)) != len(picks):
        raise HeaderError(f"route header of layer {layer}: a pick occurs twice in {picks}")
    return row


def slots_agree(row: HeaderRow, cache: ExpertCache) -> tuple[int, int] | None:
    """None if every present plan slot holds the expert it stands for, else the first (expert, slot code) that lies.

    Absent plan slots are no lie here: they raise the miss flag.
    """
    experts = sorted(row.picks)
    i = cache.first_wrong(row.layer, experts, row.plan_slots)
    return None if i is None else (experts[i], row.plan_slots[i])
