"""Engram hash constants and rows against the golden values of the published model."""

from pathlib import Path

import numpy as np
import pytest

from ds41rt.checkpoint.engram_table import EngramConstants, build_constants, engram_constants, engram_rows
from ds41rt.config import ModelConfig

GOLDENS = Path(__file__).parents[1] / "goldens"
PUBLISHED = build_constants((1, 14), 16_000_000, 4, 8, 99_092)


@pytest.mark.parametrize(("constants", "rows"), [(PUBLISHED[0], 384_006_168), (PUBLISHED[1], 384_016_682)])
def test_published_constants_and_rows(constants: EngramConstants, rows: int) -> None:
    golden = np.load(GOLDENS / "formats.npz")
    at = f"L{constants.layer}"
    np.testing.assert_array_equal(constants.primes, golden[f"hash_primes_{at}"])
    np.testing.assert_array_equal(constants.offsets, golden[f"hash_offsets_{at}"])
    np.testing.assert_array_equal(constants.multipliers, golden[f"hash_mult_{at}"])
    assert constants.n_rows == rows
    t = golden["hash_t"].astype(np.int64)
    np.testing.assert_array_equal(engram_rows(t, constants), golden[f"hash_rows_{at}"])
    np.testing.assert_array_equal(engram_rows(t[7], constants), golden[f"hash_rows_{at}"][7])


def test_golden_checkpoint_table_sizes() -> None:
    cfg = ModelConfig.from_checkpoint(GOLDENS / "tiny-a" / "checkpoint")
    assert [c.n_rows for c in engram_constants(cfg)] == [630, 834]
    assert engram_constants(cfg)[0].primes.tolist() == [97, 101, 103, 107, 109, 113]


def test_no_product_reaches_the_sign_bit() -> None:
    for constants in PUBLISHED:
        assert all(int(m) * 99_091 < 2**63 and m % 2 for m in constants.multipliers)


def test_rows_stay_inside_their_columns() -> None:
    t = np.random.default_rng(3).integers(0, 99_092, (5000, 4))
    for c in PUBLISHED:
        rows = engram_rows(t, c)
        assert (rows >= c.offsets).all()
        assert (rows < c.offsets + c.primes).all()
