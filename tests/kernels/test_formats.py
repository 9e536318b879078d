"""Number formats against the golden vectors, and by hand."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ds41rt.cu.kernel import BF16
from ds41rt.kernels import formats

Goldens = Mapping[str, NDArray[Any]]


@pytest.fixture(scope="module")
def goldens() -> Goldens:
    return dict(np.load(Path(__file__).parents[1] / "goldens" / "formats.npz"))


@pytest.fixture(autouse=True)
def _as_on_a_device() -> Iterator[None]:
    """References run without floating point warnings."""
    with np.errstate(all="ignore"):
        yield


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> None:
    """Equal bit for bit, any NaN equal to any other."""
    assert a.dtype == b.dtype == np.float32
    nan = np.isnan(a) & np.isnan(b)
    np.testing.assert_array_equal(np.where(nan, 0, a.view(np.uint32)), np.where(nan, 0, b.view(np.uint32)))


def test_every_code_has_its_golden_value(goldens: Goldens) -> None:
    same_bits(formats.E4M3_VALUE, goldens["e4m3_value"])
    same_bits(formats.E2M1_VALUE, goldens["e2m1_value"])
    same_bits(formats.E8M0_VALUE, goldens["e8m0_value"])


def test_e8m0_ends() -> None:
    assert formats.E8M0_VALUE[0] == np.float32(2.0**-127)
    assert formats.E8M0_VALUE[0] != 0
    assert formats.E8M0_VALUE[254] == np.float32(2.0**127)
    assert np.isnan(formats.E8M0_VALUE[255])


def test_decoders_cover_every_byte_in_both_places() -> None:
    hi, lo = np.divmod(np.arange(65536), 256)
    pairs = np.stack([lo, hi], axis=1).astype(np.uint8)
    same_bits(formats.decode_e4m3(pairs).astype(np.float32), formats.E4M3_VALUE[pairs])
    want = np.stack([lo & 15, lo >> 4, hi & 15, hi >> 4], axis=1)
    same_bits(formats.decode_e2m1(pairs).astype(np.float32), formats.E2M1_VALUE[want])


def test_packed_fp4_by_hand() -> None:
    got = formats.decode_e2m1(np.array([0x21, 0xF7], np.uint8))
    assert got.tolist() == [0.5, 1.0, 6.0, -6.0]


def test_encoders_match_goldens(goldens: Goldens) -> None:
    np.testing.assert_array_equal(formats.encode_e4m3(goldens["e4m3_enc_x"]), goldens["e4m3_enc_code"])
    np.testing.assert_array_equal(formats.encode_e2m1(goldens["e2m1_enc_x"]), goldens["e2m1_enc_code"])


def test_act_quant_matches_goldens(goldens: Goldens) -> None:
    values, scale = formats.act_quant(goldens["aq_x"])
    same_bits(values[:, 0].astype(np.float32), formats.E4M3_VALUE[goldens["aq_code"]])
    same_bits(scale[:, 0], goldens["aq_scale"])
    same_bits(scale[:, 0], formats.E8M0_VALUE[goldens["aq_scale_e8m0"]])
    same_bits(formats.act_quant_dequant(goldens["aq_x"]), goldens["aq_deq"])


def test_fp4_pow2_matches_goldens(goldens: Goldens) -> None:
    codes, scale = formats.fp4_pow2(goldens["fp4_e8m0_x"])
    np.testing.assert_array_equal(codes[:, 0], goldens["fp4_e8m0_code"])
    same_bits(scale[:, 0], goldens["fp4_e8m0_scale"])
    same_bits(formats.dequant_e2m1(codes, scale)[:, 0], goldens["fp4_e8m0_deq"])


def test_fp4_e4m3_matches_goldens(goldens: Goldens) -> None:
    codes, scale = formats.fp4_e4m3(goldens["fp4_e4m3_x"])
    np.testing.assert_array_equal(codes[:, 0], goldens["fp4_e4m3_code"])
    same_bits(scale[:, 0], goldens["fp4_e4m3_scale"])
    same_bits(scale[:, 0], formats.E4M3_VALUE[goldens["fp4_e4m3_scale_code"]])
    same_bits(formats.dequant_e2m1(codes, scale)[:, 0], goldens["fp4_e4m3_deq"])


def test_dequantised_values_are_exact_in_bf16(goldens: Goldens) -> None:
    for deq in (
        formats.act_quant_dequant(goldens["aq_x"]),
        formats.dequant_e2m1(*formats.fp4_pow2(goldens["fp4_e8m0_x"])),
        formats.dequant_e2m1(*formats.fp4_e4m3(goldens["fp4_e4m3_x"])),
    ):
        same_bits(formats.round_bf16(deq), deq)


@pytest.mark.parametrize(("amax", "scale"), [(448, 1), (449, 2), (300, 1), (1e-4, 2**-22), (3, 2**-7), (0, 2**-22)])
def test_act_scale_by_hand(amax: float, scale: float) -> None:
    x = np.linspace(-1, 1, 32, dtype=np.float32) * np.float32(amax)
    assert formats.act_quant(x)[1].tolist() == [scale]


def test_groups_by_hand() -> None:
    x = np.zeros(32, np.float32)
    x[:4] = 3, 0.01, -1, 0.3
    values, scale = formats.act_quant(x)
    assert scale.tolist() == [2**-7]
    assert values[0, :4].tolist() == [384, 1.25, -128, 40]
    x[:4] = 7, 1, -3.5, 0
    codes, scale = formats.fp4_e4m3(x[:16])
    assert scale.tolist() == [1.125]
    assert formats.E2M1_VALUE[codes[0, :3]].tolist() == [6, 1, -3]
    codes, scale = formats.fp4_pow2(x)
    assert scale.tolist() == [2]
    assert formats.E2M1_VALUE[codes[0, :3]].tolist() == [4, 0.5, -2]


def test_a_nan_survives_every_quantiser() -> None:
    x = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)
    x[:, 37] = np.nan
    assert np.isnan(formats.act_quant(x)[0][:, 1, 5]).all()
    assert np.isnan(formats.act_quant_dequant(x)[:, 37]).all()
    for deq in (formats.dequant_e2m1(*formats.fp4_pow2(x)), formats.dequant_e2m1(*formats.fp4_e4m3(x))):
        assert np.isnan(deq.reshape(4, 64)[:, 37]).all()
        assert np.isfinite(deq.reshape(4, 64)[:, :32]).all()


def test_bf16_rounding() -> None:
    """Ties to even, NaN stays NaN (whatever its payload), overflow to inf, the sign of zero stays."""
    bits = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x80000000, 0x80000001, 0x7F800001],
        np.uint32,
    )
    want = [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0xFF80, 0x8000, 0x8000]
    got = bits.view(np.float32).astype(BF16)
    assert got.view(np.uint16)[:8].tolist() == want
    assert np.isnan(got[8].astype(np.float32))
    stored = np.empty(9, BF16)
    stored[...] = bits.view(np.float32)
    np.testing.assert_array_equal(stored.view(np.uint16), got.view(np.uint16))
    assert np.isnan(formats.round_bf16(bits.view(np.float32))[8])


def test_bf16_rounding_on_random_bits() -> None:
    bits = np.random.default_rng(2).integers(0, 2**32, 100_000, dtype=np.uint32)
    x = bits.view(np.float32)
    wide = bits.astype(np.uint64)
    want = ((wide + 0x7FFF + ((wide >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)
    finite = ~np.isnan(x)
    np.testing.assert_array_equal(x.astype(BF16).view(np.uint16)[finite], want[finite])
    assert np.isnan(x.astype(BF16)[~finite].astype(np.float32)).all()
