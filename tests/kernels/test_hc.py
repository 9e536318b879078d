"""The residual highway: goldens, orientation of the mix, aliasing, and the rope tables beside it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_harness import bf16, poisoned, run
from numpy.typing import NDArray

from ds41rt.cu.kernel import BF16, U8
from ds41rt.kernels import hc

Goldens = Mapping[str, NDArray[Any]]
EPS = {"iters": 20, "eps": 1e-20, "hc_eps": 1e-6}


@pytest.fixture(scope="module")
def goldens() -> Goldens:
    return dict(np.load(Path(__file__).parents[1] / "goldens" / "formats.npz"))


def mix_args(goldens: Goldens, i: int) -> dict[str, Any]:
    rng = np.random.default_rng(100 + i)
    return {
        "streams": bf16(goldens["hc_x"][i]),
        "pre_in": goldens["hc_pre_in"][i].copy(),
        "fn": goldens["hc_fn"],
        "scale": goldens["hc_scale"],
        "base": goldens["hc_base"],
        "norm_w": bf16(rng.normal(size=64)),
        "work": poisoned(hc.mix_work_nbytes(64, 4), U8),
        "dim": 64,
        "hc": 4,
        **EPS,
    }


def within_a_bf16_ulp(got: NDArray[Any], want: NDArray[Any]) -> None:
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=2**-7, atol=1e-30)


def test_hc_in_matches_goldens(goldens: Goldens) -> None:
    for i in range(64):
        args = mix_args(goldens, i)
        out = run(hc.HC_IN, args)
        np.testing.assert_allclose(out["pre_out"], goldens["hc_pre"][i], rtol=0, atol=1e-6)
        np.testing.assert_allclose(out["post"], goldens["hc_post"][i], rtol=0, atol=1e-6)
        np.testing.assert_allclose(out["comb"], goldens["hc_comb"][i], rtol=0, atol=1e-6)
        within_a_bf16_ulp(out["hidden"], goldens["hc_collapse"][i])
        wide = out["hidden"].astype(np.float64)
        want = wide / np.sqrt((wide**2).mean() + 1e-20) * args["norm_w"].astype(np.float64)
        np.testing.assert_allclose(out["normed"].astype(np.float64), want, rtol=2**-8)


def test_expand_sums_over_the_first_index(goldens: Goldens) -> None:
    for i in range(64):
        y, x = bf16(goldens["hc_y"][i]).astype(np.float32), bf16(goldens["hc_x"][i]).astype(np.float32)
        got = hc.expand(y, x, goldens["hc_post"][i], goldens["hc_comb"][i]).astype(BF16)
        within_a_bf16_ulp(got, goldens["hc_expand"][i])
    transposed = hc.expand(y, x, goldens["hc_post"][63], goldens["hc_comb"][63].T)
    assert np.abs(transposed - goldens["hc_expand"][63]).max() > 0.01


def test_hc_expand_in_expands_first_and_then_mixes_the_new_streams(goldens: Goldens) -> None:
    for i in (0, 17):
        args = mix_args(goldens, i)
        y, post, comb = bf16(goldens["hc_y"][i]), goldens["hc_post"][i].copy(), goldens["hc_comb"][i].copy()
        expanded = hc.expand(y.astype(np.float32), args["streams"].astype(np.float32), post, comb).astype(BF16)
        want = run(hc.HC_IN, {**args, "streams": expanded})
        streams = args["streams"].copy()
        out = run(hc.HC_EXPAND_IN, {**args, "streams": streams, "y": y, "post": post, "comb": comb})
        np.testing.assert_array_equal(streams.view(np.uint16), expanded.view(np.uint16))
        for name in ("pre_out", "post", "comb", "hidden", "normed"):
            np.testing.assert_array_equal(out[name], want[name])


def test_pre_in_and_pre_out_may_be_one_buffer(goldens: Goldens) -> None:
    args = mix_args(goldens, 5)
    want = run(hc.HC_IN, args)
    out = run(hc.HC_IN, args, out={"pre_out": args["pre_in"]})
    np.testing.assert_array_equal(out["hidden"], want["hidden"])
    np.testing.assert_array_equal(args["pre_in"], want["pre_out"])


def test_sinkhorn_against_arrays() -> None:
    rng = np.random.default_rng(1)
    for iters in (1, 2, 20):
        c = rng.uniform(0.01, 1, (4, 4))
        want = c / (c.sum(0) + 1e-6)
        for _ in range(iters - 1):
            want = want / (want.sum(1, keepdims=True) + 1e-6)
            want = want / (want.sum(0) + 1e-6)
        np.testing.assert_allclose(hc.sinkhorn(c.tolist(), iters, 1e-6), want, rtol=1e-13)


def test_noise_saturates_instead_of_raising() -> None:
    """Layers behind a fall run on garbage: huge and NaN streams must not raise."""
    rng = np.random.default_rng(2)
    args = {
        "pre_in": rng.normal(size=4).astype(np.float32),
        "fn": (rng.normal(size=(24, 128)) * 1e20).astype(np.float32),
        "scale": np.full(3, 1e20, np.float32),
        "base": rng.normal(size=24).astype(np.float32),
        "norm_w": bf16(rng.normal(size=32)),
        "work": poisoned(hc.mix_work_nbytes(32, 4), U8),
        "dim": 32,
        "hc": 4,
        **EPS,
    }
    for streams in (bf16(rng.normal(size=(4, 32)) * 1e38), poisoned((4, 32), BF16)):
        out = run(hc.HC_IN, {**args, "streams": streams})
        assert out["hidden"].shape == (32,)
    assert np.isnan(out["pre_out"]).all()


def test_embed_expand_and_collapse() -> None:
    rng = np.random.default_rng(3)
    embed = bf16(rng.normal(size=(50, 32)))
    args = {"embed": embed, "step": np.array([7, 23], np.int32), "vocab": 50, "dim": 32, "hc": 4}
    out = run(hc.EMBED_EXPAND, args)
    for stream in out["streams"]:
        np.testing.assert_array_equal(stream.view(np.uint16), embed[23].view(np.uint16))
    assert out["pre_prev"].tolist() == [1, 0, 0, 0]
    streams, pre = bf16(rng.normal(size=(4, 32))), rng.normal(size=4).astype(np.float32)
    got = run(hc.HC_COLLAPSE, {"streams": streams, "pre": pre, "dim": 32, "hc": 4})["hidden"]
    want = pre.astype(np.float64) @ streams.astype(np.float64)
    size = np.abs(pre.astype(np.float64)) @ np.abs(streams.astype(np.float64))
    assert np.all(np.abs(got.astype(np.float64) - want) <= 2**-8 * np.abs(want) + 2**-22 * size)
