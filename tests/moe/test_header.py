"""Header rows: layout, what is refused, and the check of the plan slots against the cache."""

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from ds41rt.moe.cache import ExpertCache
from ds41rt.moe.header import (
    ABSENT,
    HOST_SLOT_BIT,
    MISS,
    NOT_FINITE,
    SLOT_TABLE_LAYERS,
    HeaderError,
    clean_codes,
    header_words,
    parse,
    slots_agree,
)

N_EXPERTS = 384
K = 6


def noise(seed: int = 0) -> NDArray[np.int32]:
    """Rows of random words, as device memory holds before a kernel wrote them."""
    rng = np.random.default_rng(seed)
    return rng.integers(-(2**31), 2**31, (SLOT_TABLE_LAYERS, header_words(K)), dtype=np.int32)


def write_row(
    rows: NDArray[np.int32], layer: int, picks: list[int], plan_slots: list[int], flag: int = 0
) -> NDArray[np.float32]:
    """Write one row word by word; returns its weights (with one NaN, whose bits must survive)."""
    weights = np.random.default_rng(layer).random(K, np.float32)
    weights[2] = np.nan
    rows[layer] = [flag, *picks, *weights.view(np.int32).tolist(), *plan_slots]
    return weights


def test_layout() -> None:
    assert (SLOT_TABLE_LAYERS, header_words(6), header_words(8)) == (64, 19, 25)
    assert HOST_SLOT_BIT == 0x40000000
    rows = noise()
    picks = [383, 0, 17, 256, 5, 100]
    slots = [3, ABSENT, 6600, HOST_SLOT_BIT | 9, 1, 2]
    weights = write_row(rows, 39, picks, slots, MISS | NOT_FINITE)
    row = parse(39, rows[39].tolist(), N_EXPERTS)
    rows[:] = 7  # the row is a copy
    assert (row.layer, row.flag, row.picks, row.plan_slots) == (39, 3, picks, slots)
    assert row.weights.dtype == np.float32
    assert row.weights.tobytes() == weights.tobytes()


@pytest.mark.parametrize("wrong", [-1, 384, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("at", range(K))
def test_a_pick_out_of_range_is_refused_by_layer_and_value(at: int, wrong: int) -> None:
    picks = [1, 2, 3, 4, 5, 6]
    picks[at] = wrong
    rows = noise()
    write_row(rows, 11, picks, [1] * K)
    with pytest.raises(HeaderError, match=f"layer 11: pick {wrong} is outside 0..383"):
        parse(11, rows[11].tolist(), N_EXPERTS)


def test_a_repeated_pick_and_an_unknown_flag_are_refused() -> None:
    rows = noise()
    write_row(rows, 3, [1, 2, 3, 4, 5, 2], [1] * K)
    with pytest.raises(HeaderError, match=r"layer 3: a pick occurs twice in \[1, 2, 3, 4, 5, 2\]"):
        parse(3, rows[3].tolist(), N_EXPERTS)
    write_row(rows, 3, [1, 2, 3, 4, 5, 6], [1] * K, flag=4)
    with pytest.raises(HeaderError, match="layer 3: flag 0x4 has unknown bits"):
        parse(3, rows[3].tolist(), N_EXPERTS)


def test_every_row_of_noise_is_refused() -> None:
    rows = noise(5)
    for layer in range(SLOT_TABLE_LAYERS):
        with pytest.raises(HeaderError, match=f"layer {layer}:"):
            parse(layer, rows[layer].tolist(), N_EXPERTS)


def resident_row(cache: ExpertCache, rows: NDArray[np.int32], layer: int, picks: list[int]) -> None:
    plan = cache.plan_fetch(layer, picks)
    for ticket in plan.tickets:
        cache.evict(ticket)
        cache.commit(ticket)
    write_row(rows, layer, picks, [cache.slot_of(layer, e) for e in sorted(picks)])


def test_slots_agree_finds_each_wrong_slot() -> None:
    """Every plan slot in turn names another expert's slot, an empty one, none, the other layer's, a host slot."""
    rng = random.Random(2)
    cache = ExpertCache(4, N_EXPERTS, 40)
    rows = noise()
    picks, other = rng.sample(range(N_EXPERTS), K), rng.sample(range(N_EXPERTS), K)
    resident_row(cache, rows, 2, picks)
    resident_row(cache, rows, 3, other)
    row = parse(2, rows[2].tolist(), N_EXPERTS)
    assert slots_agree(row, cache) is None
    for i, expert in enumerate(sorted(picks)):
        right = row.plan_slots[i]
        for absent in (ABSENT, 0):
            row.plan_slots[i] = absent
            assert slots_agree(row, cache) is None  # absent is a miss, which has its own flag
        for wrong in (row.plan_slots[i - 1], cache.slot_of(3, other[0]), 13, 40, 41, HOST_SLOT_BIT | right):
            row.plan_slots[i] = wrong
            assert slots_agree(row, cache) == (expert, wrong)
        row.plan_slots[i] = right
    assert slots_agree(row, cache) is None


def test_slots_agree_is_in_ascending_order_of_experts_not_in_pick_order() -> None:
    cache = ExpertCache(1, N_EXPERTS, 12)
    rows = noise()
    picks = [300, 7, 120, 4, 250, 9]
    resident_row(cache, rows, 0, picks)
    write_row(rows, 0, picks, [cache.slot_of(0, e) for e in picks])
    assert slots_agree(parse(0, rows[0].tolist(), N_EXPERTS), cache) == (4, cache.slot_of(0, 300))


def test_clean_codes_are_those_of_a_row_without_a_fault() -> None:
    """Anything odd about a row sends it to the closer look: flags, picks, and each plan slot."""
    cache = ExpertCache(4, N_EXPERTS, 20, host_slots=20, pool_slots=26)
    picks, other = [300, 7, 120, 4, 250, 9], [1, 2, 3, 5, 6, 8]
    for layer, experts in ((2, picks[:4]), (3, other), (1, list(range(10, 16))), (0, list(range(6))), (2, picks[4:])):
        cache.begin_epoch()
        for ticket in cache.plan_fetch(layer, experts).tickets:
            cache.evict(ticket)
            cache.commit(ticket, 20 + ticket.expert % 6)
    codes = [cache.slot_of(2, e) for e in sorted(picks)]
    assert any(code & HOST_SLOT_BIT for code in codes)
    assert any(not code & HOST_SLOT_BIT for code in codes)
    words = [0, *picks, *([0x3F000000] * K), *codes]
    assert clean_codes(2, words, cache) == codes
    for flag in (MISS, NOT_FINITE, 4, -1):
        assert clean_codes(2, [flag, *words[1:]], cache) is None
    for i in range(K):
        for wrong in (-1, N_EXPERTS, 2**31 - 1, -(2**31), words[1 + (i + 1) % K], 17):
            assert clean_codes(2, [*words[: 1 + i], wrong, *words[2 + i :]], cache) is None
        for wrong in (ABSENT, 0, codes[i - 1], 1 << 29, HOST_SLOT_BIT | 7, codes[i] ^ HOST_SLOT_BIT):
            at = 1 + 2 * K + i
            assert clean_codes(2, [*words[:at], wrong, *words[at + 1 :]], cache) is None
    assert clean_codes(3, words, cache) is None  # the same picks of another layer


def test_an_absent_pick_is_not_clean_though_the_table_agrees() -> None:
    cache = ExpertCache(1, N_EXPERTS, 8)
    assert clean_codes(0, [0, 1, 2, 3, 4, 5, 6, *([0] * K), *([0] * K)], cache) is None


def test_the_same_pick_twice_is_not_clean_though_its_slot_is_right() -> None:
    cache = ExpertCache(1, N_EXPERTS, 8)
    rows = noise()
    resident_row(cache, rows, 0, [1, 2, 3, 4, 5, 6])
    words = [0, 1, 2, 3, 4, 5, 5, *([0] * K), *(cache.slot_of(0, e) for e in (1, 2, 3, 4, 5, 5))]
    assert clean_codes(0, words, cache) is None
