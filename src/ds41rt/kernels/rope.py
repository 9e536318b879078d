"""Rotary position tables and the rotation of adjacent pairs.

A *rope cell* is f32[rope_dim]: the cosines of one position's angles, then the sines. It is made on the host once a
token and uploaded, so that every kernel rotates with the same numbers.
"""

import math

import numpy as np

from ds41rt.cu.kernel import Array


def rope_freqs(rope_dim: int, theta: float) -> Array:
    """Inverse frequencies theta^(-2i/rope_dim), f32[rope_dim/2]; the power and its inverse are each rounded to f32."""
    exponents = (np.arange(0, rope_dim, 2, dtype=np.float32) / np.float32(rope_dim)).tolist()
    return np.float32(1) / np.array([theta**e for e in exponents], np.float32)


def yarn_freqs(
    rope_dim: int, theta: float, *, factor: float, original_len: int, beta_fast: float, beta_slow: float
) -> Array:
    """`rope_freqs` stretched by YaRN: pairs that turn rarely within `original_len` are slowed by `factor`."""

    def pair_of(turns: float) -> float:
        return rope_dim * math.log(original_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(beta_fast)), 0)
    high = min(math.ceil(pair_of(beta_slow)), rope_dim - 1)
    span = float(high - low) or 0.001
    ramp = np.clip((np.arange(rope_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(span), 0, 1)
    smooth = np.float32(1) - ramp
    freqs = rope_freqs(rope_dim, theta)
    stretched: Array = freqs / np.float32(factor) * (np.float32(1) - smooth) + freqs * smooth
    return stretched


def rope_cell(position: int, freqs: Array) -> Array:
    """The rope cell of a position: the angle is rounded to f32, its cosine and sine are those of the rounded angle."""
    angle = (np.float32(position) * freqs).astype(np.float64)
    return np.concatenate((np.cos(angle), np.sin(angle))).astype(np.float32)


def rotate(x: Array, cell: Array, *, inverse: bool = False) -> Array:
    """Rotate the last axis f32[..., rope_dim] pair by pair, (a, b) -> (a cos - b sin, a sin + b cos), each operation
    rounded to f32. `inverse` turns the other way."""
    half = cell.size // 2
    pairs = x.reshape(*x.shape[:-1], half, 2)
    sin = np.empty((half, 2), np.float32)
    if inverse:
        sin[:, 0] = cell[half:]
        np.negative(cell[half:], out=sin[:, 1])
    else:
        np.negative(cell[half:], out=sin[:, 0])
        sin[:, 1] = cell[half:]
    y = pairs * cell[:half, None]
    y += pairs[..., ::-1] * sin
    return y.reshape(x.shape)


def rotate_tail(rows: Array, cell: Array, *, inverse: bool = False) -> None:
    """Rotate the last rope_dim values of every row of a bf16 array in place; the result is rounded to bf16."""
    tail = rows[..., rows.shape[-1] - cell.size :]
    tail[...] = rotate(tail.astype(np.float32), cell, inverse=inverse)
