"""Rotary tables and rotation against the golden vectors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_harness import bf16
from numpy.typing import NDArray

from ds41rt.kernels import rope

Goldens = Mapping[str, NDArray[Any]]
YARN = {"factor": 16, "original_len": 65536, "beta_fast": 32, "beta_slow": 1}


@pytest.fixture(scope="module")
def goldens() -> Goldens:
    return dict(np.load(Path(__file__).parents[1] / "goldens" / "formats.npz"))


def freqs(kind: str) -> NDArray[Any]:
    return rope.rope_freqs(64, 1e4) if kind == "plain" else rope.yarn_freqs(64, 1.6e5, **YARN)


@pytest.mark.parametrize("kind", ["plain", "yarn"])
def test_frequencies_are_exact(goldens: Goldens, kind: str) -> None:
    got = freqs(kind)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, goldens[f"rope_freq_{kind}"])


@pytest.mark.parametrize("kind", ["plain", "yarn"])
def test_rotation_matches_goldens(goldens: Goldens, kind: str) -> None:
    for i, position in enumerate(goldens["rope_pos"].tolist()):
        cell = rope.rope_cell(position, freqs(kind))
        assert cell.dtype == np.float32
        np.testing.assert_allclose(cell[:32], goldens[f"rope_cos_{kind}"][i], rtol=0, atol=1.2e-7)
        np.testing.assert_allclose(cell[32:], goldens[f"rope_sin_{kind}"][i], rtol=0, atol=1.2e-7)
        for inverse, name in ((False, "y"), (True, "yinv")):
            x = bf16(goldens["rope_x"][i])
            rope.rotate_tail(x, cell, inverse=inverse)
            got, want = x.astype(np.float64), goldens[f"rope_{name}_{kind}"][i]
            np.testing.assert_array_equal(got[:448], want[:448])
            np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-30)


def test_pairs_are_adjacent_and_inverse_undoes() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 5, 16)).astype(np.float32)
    cell = rope.rope_cell(1234, rope.rope_freqs(16, 1e4))
    turned = rope.rotate(x, cell)
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * (cell[:8] + 1j * cell[8:]).astype(np.complex128)
    np.testing.assert_allclose(turned[..., 0::2], z.real, rtol=0, atol=1e-6)
    np.testing.assert_allclose(turned[..., 1::2], z.imag, rtol=0, atol=1e-6)
    np.testing.assert_allclose(rope.rotate(turned, cell, inverse=True), x, rtol=0, atol=1e-6)


def test_angle_is_rounded_to_float32_first() -> None:
    f = rope.rope_freqs(64, 1e4)
    cell = rope.rope_cell(1_000_003, f)
    angle = (np.float32(1_000_003) * f).astype(np.float64)
    np.testing.assert_array_equal(cell[:32], np.cos(angle).astype(np.float32))
    assert np.abs(cell[:32] - np.cos(1_000_003 * f.astype(np.float64))).max() > 1e-4
