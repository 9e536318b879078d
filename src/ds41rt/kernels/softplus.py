"""sqrt(softplus(x)) in float32, by one written-down algorithm that host and device share bit for bit.

softplus(x) = x above 20, else log1pf(expf(x)): `expf` in double precision over a table of 32 powers of two, with one
rounding at the end; `log1pf` the classic float32 reduction by the nearest power of two with a degree-7 polynomial.
Every operation is rounded separately (no fused multiply-add). NumPy's own functions are other algorithms: they and a
device's native ones would move scores by an ulp and with them a selection.
"""

import math

import numpy as np

from ds41rt.cu.kernel import Array

_TABLE_BITS = 5
_N = 1 << _TABLE_BITS


def _root_bits(i: int) -> int:
    """The bits of 2^(i/32) in double, less the exponent that adding k << 47 for a k with k mod 32 = i brings back."""
    scale = 100
    value = 1 << (i + _N * scale)
    for _ in range(_TABLE_BITS):
        value = math.isqrt(value)
    root = np.float64(value / (1 << scale))
    return (int(root.view(np.uint64)) - (i << (52 - _TABLE_BITS))) % 2**64


_EXP2 = np.array([_root_bits(i) for i in range(_N)], np.uint64)
_INV_LN2_N = float.fromhex("0x1.71547652b82fep+0") * _N
_SHIFT = float.fromhex("0x1.8p+52")
_C0 = float.fromhex("0x1.c6af84b912394p-5") / _N**3
_C1 = float.fromhex("0x1.ebfce50fac4f3p-3") / _N**2
_C2 = float.fromhex("0x1.62e42ff0c52d6p-1") / _N

_LN2_HI = np.float32(6.9313812256e-01)
_LN2_LO = np.float32(9.0580006145e-06)
# Highest power first.
_LP = tuple(
    np.float32(c)
    for c in (
        0.14798198640,
        0.15313838422,
        0.18183572590,
        0.22222198546,
        0.28571429849,
        0.40000000596,
        0.66666668653,
    )
)
# Mantissas from here on are halved; below the other bound 1 + y is not reduced at all.
_HALVE = np.uint32(0x3F3504F7)
_ONE_LESS_HALVE = np.uint32(0x3F800000 - 0x3F3504F7)
_MANTISSA = np.uint32(0x7FFFFF)
_UNREDUCED_BELOW = np.array(0x3ED413D7, np.uint32).view(np.float32)[()]
_ONE, _HALF, _TWO = np.float32(1), np.float32(0.5), np.float32(2)


def expf(x: Array) -> Array:
    """f32 -> f32, for x <= 88; exact underflow to 0, NaN stays NaN."""
    z = np.maximum(x, np.float32(-150)).astype(np.float64)
    z *= _INV_LN2_N
    shifted = z + _SHIFT
    k = shifted.view(np.uint64)
    shifted_back = shifted - _SHIFT
    z -= shifted_back
    scale = _EXP2.take(k & np.uint64(_N - 1), mode="clip")
    scale += k << np.uint64(52 - _TABLE_BITS)
    high = z * _C0
    high += _C1
    low = z * _C2
    low += 1.0
    z *= z
    high *= z
    high += low
    high *= scale.view(np.float64)
    return high.astype(np.float32)


def log1pf(y: Array) -> Array:
    """f32 -> f32, for 0 <= y < 2^53; NaN stays NaN.

    The classic code's special cases (tiny y, a mantissa within 3 ulp of a power of two) give the same bits as its
    general formula for these y, so they are left out.
    """
    u = y + _ONE
    # What rounding lost in u. The split is by u: for the y just below 1 that rounds up to 2 the loss comes out as 0.
    large = u >= _TWO
    lost = np.where(large, _ONE, y) - (u - np.where(large, y, _ONE))
    lost /= u
    bits = u.view(np.uint32) + _ONE_LESS_HALVE
    k = ((bits >> np.uint32(23)).view(np.int32) - np.int32(127)).astype(np.float32)
    bits &= _MANTISSA
    bits += _HALVE
    f = bits.view(np.float32) - _ONE
    np.copyto(f, y, where=y < _UNREDUCED_BELOW)
    np.copyto(lost, 0, where=k == 0)
    hfsq = f * _HALF
    hfsq *= f
    s = f / (f + _TWO)
    z = s * s
    poly = z * _LP[0]
    for c in _LP[1:]:
        poly += c
        poly *= z
    poly += hfsq
    poly *= s
    lost += k * _LN2_LO
    poly += lost
    hfsq -= poly
    hfsq -= f
    k *= _LN2_HI
    k -= hfsq
    return k


def sqrt_softplus(x: Array) -> Array:
    """f32[n] -> f32[n]. -inf gives 0, +inf gives +inf, NaN stays NaN."""
    y = log1pf(expf(np.minimum(x, np.float32(20))))
    np.copyto(y, x, where=x > 20)
    return np.sqrt(y, out=y)
