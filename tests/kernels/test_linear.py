"""The shared products: golden vectors, order of summation, independence of alignment."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_harness import bf16, run
from numpy.typing import NDArray

from ds41rt.kernels import formats, linear

Goldens = Mapping[str, NDArray[Any]]


@pytest.fixture(scope="module")
def goldens() -> Goldens:
    return dict(np.load(Path(__file__).parents[1] / "goldens" / "formats.npz"))


def random_codes(rng: np.random.Generator, *shape: int) -> NDArray[np.uint8]:
    """Any e4m3 code but the two NaNs."""
    codes = rng.integers(0, 254, shape)
    return (codes + (codes >= 127)).astype(np.uint8)


def random_scales(rng: np.random.Generator, *shape: int) -> NDArray[np.uint8]:
    return rng.integers(115, 125, shape).astype(np.uint8)


def ulps_bf16(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.int64]:
    """Distance of two bf16 arrays in units in the last place."""

    def rank(x: NDArray[Any]) -> NDArray[np.int64]:
        bits = x.view(np.uint16).astype(np.int64)
        return np.where(bits & 0x8000, -(bits & 0x7FFF), bits)

    distance: NDArray[np.int64] = np.abs(rank(a) - rank(b))
    return distance


@pytest.mark.parametrize("name", ["linA", "linB"])
def test_quantised_linear_matches_goldens(goldens: Goldens, name: str) -> None:
    got8, got4 = [], []
    weight4 = formats.decode_e2m1(goldens[f"{name}_w4"])
    for row in goldens[f"{name}_x"]:
        x = bf16(row)
        n, k = goldens[f"{name}_w8"].shape
        args = {"x": x, "w": goldens[f"{name}_w8"], "s": goldens[f"{name}_s8"], "n": n, "k": k}
        got8.append(run(linear.LINEAR_FP8, args)["y"])
        quantised = formats.act_quant(x.astype(np.float32))
        got4.append(bf16(linear.quant_matvec(quantised, weight4, formats.E8M0_VALUE[goldens[f"{name}_s4"]])))
    for got, want in ((got8, goldens[f"{name}_y8"]), (got4, goldens[f"{name}_y4"])):
        ulps = ulps_bf16(np.stack(got), want)
        assert ulps.max() <= 1
        assert np.count_nonzero(ulps) <= ulps.size * 0.005


def test_linear_against_float64_and_with_a_partial_tile() -> None:
    """40 rows: the second row of scale tiles is only partly used. Bound: K/32 float32 roundings and one to bf16."""
    rng = np.random.default_rng(5)
    n, k = 40, 320
    x, w, s = bf16(rng.normal(size=k)), random_codes(rng, n, k), random_scales(rng, 2, k // 32)
    y = run(linear.LINEAR_FP8, {"x": x, "w": w, "s": s, "n": n, "k": k})["y"]
    xq = formats.act_quant_dequant(x.astype(np.float32)).astype(np.float64)
    scale = np.exp2(s.astype(np.float64) - 127).repeat(32, 0)[:n].repeat(32, 1)
    full = formats.E4M3_VALUE[w].astype(np.float64) * scale
    want, size = full @ xq, np.abs(full) @ np.abs(xq)
    assert np.all(np.abs(y.astype(np.float64) - want) <= 2**-8 * np.abs(want) + 10 * 2**-24 * size)


def test_a_nan_scale_byte_and_a_nan_activation_reach_the_output() -> None:
    rng = np.random.default_rng(6)
    x, w, s = bf16(rng.normal(size=64)), random_codes(rng, 64, 64), random_scales(rng, 2, 2)
    s[1, 0] = 255
    y = run(linear.LINEAR_FP8, {"x": x, "w": w, "s": s, "n": 64, "k": 64})["y"].astype(np.float32)
    assert np.isfinite(y[:32]).all()
    assert np.isnan(y[32:]).all()
    x[5] = np.nan
    s[1, 0] = 120
    y = run(linear.LINEAR_FP8, {"x": x, "w": w, "s": s, "n": 64, "k": 64})["y"].astype(np.float32)
    assert np.isnan(y).all()


@pytest.mark.parametrize("shape", [(40, 1), (40, 2), (40, 3), (7, 256), (160, 5120), (9, 1, 1), (12, 6, 33)])
def test_rows_are_added_one_after_another(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(7)
    for _ in range(20 if np.prod(shape) < 1000 else 1):
        terms = rng.normal(size=shape).astype(np.float32)
        want = np.zeros(shape[1:], np.float32)
        for row in terms:
            want = want + row
        np.testing.assert_array_equal(linear.sum_rows(terms), want)


def at_offset(array: NDArray[Any], offset: int) -> NDArray[Any]:
    """A copy whose address is `offset` elements behind a 64-byte boundary."""
    raw = np.empty(array.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset * array.itemsize
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def test_plain_product_does_not_depend_on_alignment() -> None:
    rng = np.random.default_rng(8)
    w, x = rng.normal(size=(24, 517)), rng.normal(size=517)
    want = np.einsum("nk,k->n", w, x)
    for offset in range(8):
        got = np.einsum("nk,k->n", at_offset(w, offset), at_offset(x, 7 - offset))
        np.testing.assert_array_equal(got, want)


def test_block_dots_are_exact_so_no_order_can_matter() -> None:
    """The largest and the smallest code products together in one block: float64 loses nothing."""
    big, tiny = 448.0, 2.0**-9
    values = np.array([[big, tiny] * 16], np.float64)
    weight = np.array([[big, tiny] * 16, [-big, tiny] * 16], np.float64)
    scales = np.ones((2, 1), np.float32)
    got = linear.quant_matvec((values, np.ones(1, np.float32)), weight, scales)
    exact = 16 * 448**2, 16 * 2.0**-18
    assert got.tolist() == [np.float32(exact[0] + exact[1]), np.float32(-exact[0] + exact[1])]
    assert float(np.matmul(weight, values[0])[0]) == exact[0] + exact[1]


def test_plain_matvec_bound() -> None:
    rng = np.random.default_rng(9)
    w, x = bf16(rng.normal(size=(50, 640))), bf16(rng.normal(size=640))
    want = w.astype(np.longdouble) @ x.astype(np.longdouble)
    got = linear.plain_matvec(w, x)
    assert np.all(np.abs(got - want) <= 2**-24 * np.abs(want) + 1e-12)


def test_rms_norm_of_zeros_and_of_random_values() -> None:
    rng = np.random.default_rng(10)
    x, w = rng.normal(size=96).astype(np.float32), bf16(rng.normal(size=96))
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean() + 1e-20) * w.astype(np.float64)
    np.testing.assert_allclose(linear.rms_norm(x, w, 1e-20), want, rtol=3 * 2**-24)
    assert not linear.rms_norm(np.zeros(96, np.float32), w, 1e-20).any()
    # The epsilon is far below float32's usual ones: tiny inputs are still normalised.
    np.testing.assert_allclose(linear.rms_norm(x * np.float32(1e-6), w, 1e-20), want, rtol=1e-6)


def test_swiglu_clamps() -> None:
    gate = np.array([20, -1000, 1, 1, -800], np.float32)
    up = np.array([3, 2, 50, -50, 1], np.float32)
    with np.errstate(all="raise", under="ignore"):
        got = linear.swiglu(gate, up, 10.0)
    sig = 1 / (1 + np.exp(-gate.astype(np.float64).clip(-700, 10)))
    want = gate.clip(None, 10) * sig * up.clip(-10, 10)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-30)


def test_shared_gate_up() -> None:
    rng = np.random.default_rng(11)
    dim, inter = 128, 64
    args: dict[str, Any] = {"normed": bf16(rng.normal(size=dim)), "dim": dim, "inter": inter, "limit": 10.0}
    for i in "13":
        args[f"w{i}"], args[f"s{i}"] = random_codes(rng, inter, dim), random_scales(rng, 2, 4)
    g, u = (
        run(linear.LINEAR_FP8, {"x": args["normed"], "w": args[f"w{i}"], "s": args[f"s{i}"], "n": inter, "k": dim})["y"]
        for i in "13"
    )
    g64, u64 = np.minimum(g.astype(np.float64), 10), np.clip(u.astype(np.float64), -10, 10)
    assert (g.astype(np.float64) > 10).any()
    assert (np.abs(u.astype(np.float64)) > 10).any()
    want = g64 / (1 + np.exp(-g64)) * u64
    t = run(linear.SHARED_GATE_UP, args)["t"].astype(np.float64)
    np.testing.assert_allclose(t, want, rtol=2**-8, atol=1e-37)
