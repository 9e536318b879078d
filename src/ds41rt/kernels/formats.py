"""Number formats: value tables of the 4- and 8-bit codes, decoders, and the three dynamic quantisers.

Codes: e4m3 (finite, 0x7F and 0xFF are NaN), e2m1 packed two a byte with the even element in the low nibble, e8m0
(byte b is 2^(b-127); 0 is 2^-127, 255 is NaN). All roundings are to nearest, ties to the even code.
NaN stays NaN through every quantiser: a group that holds one comes out as NaN in that element or as a whole.
"""

import ml_dtypes
import numpy as np

from ds41rt.cu.kernel import BF16, F32, Array

GROUP = 32
FP4_ROW_GROUP = 16

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
_BYTES = np.arange(256, dtype=np.uint8)

E4M3_VALUE: Array = _BYTES.view(_E4M3).astype(np.float32)
E2M1_VALUE: Array = _BYTES[:16].view(_E2M1).astype(np.float32)
E8M0_VALUE: Array = np.append(np.ldexp(1.0, np.arange(-127, 128)), np.nan).astype(np.float32)

_PAIR = np.arange(65536, dtype="<u2")
# One look-up decodes two bytes: the complex type serves as a 16-byte element, of two float64 or of four float32.
_E4M3_PAIRS: Array = E4M3_VALUE[_PAIR.view(np.uint8)].astype(np.float64).view(np.complex128)
_NIBBLES = np.stack([_PAIR.view(np.uint8) & 15, _PAIR.view(np.uint8) >> 4], axis=1)
_E2M1_QUADS: Array = E2M1_VALUE[_NIBBLES].reshape(-1).view(np.complex128)

_INV_448 = np.float32(1 / 448)
_INV_6 = np.float32(1 / 6)
_FP4_POW2_FLOOR = np.float32(6 * 2.0**-126)
_FP4_ROW_FLOOR = np.float32(6 * 2.0**-9)


def decode_e4m3(codes: Array) -> Array:
    """u8[..., k] -> f64[..., k], k even."""
    return _E4M3_PAIRS.take(codes.view(np.uint16), mode="clip").view(np.float64)


def decode_e2m1(packed: Array) -> Array:
    """u8[..., k/2], two codes a byte -> f64[..., k], k a multiple of 4."""
    return _E2M1_QUADS.take(packed.view(np.uint16), mode="clip").view(np.float32).astype(np.float64)


def tile_scales(scales: Array, n: int) -> Array:
    """Scale bytes of 32x32 tiles, u8[ceil(n/32), kb] -> f32[n, kb], one row a matrix row."""
    return E8M0_VALUE.take(scales).repeat(32, axis=0)[:n]


def round_bf16(x: Array) -> Array:
    """Float array -> f32 array of the same shape holding bf16 values."""
    return x.astype(BF16).astype(F32)


def encode_e4m3(x: Array) -> Array:
    """f32 -> u8 codes of the same shape, clamped to +-448; the sign of zero is kept."""
    return np.minimum(np.maximum(x, np.float32(-448)), np.float32(448)).astype(_E4M3).view(np.uint8)


def encode_e2m1(x: Array) -> Array:
    """f32 -> u8 codes 0..15 of the same shape, clamped to +-6; the sign of zero is kept."""
    return np.minimum(np.maximum(x, np.float32(-6)), np.float32(6)).astype(_E2M1).view(np.uint8) & np.uint8(15)


def _pow2_ceil(x: Array) -> Array:
    """The smallest powers of two >= x, for normal positive f32 and inf; NaN gives -0."""
    bits = x.view(np.uint32) + np.uint32(0x7FFFFF)
    bits &= np.uint32(0xFF800000)
    return bits.view(np.float32)


def _amax(groups: Array, floor: np.float32) -> Array:
    amax: Array = np.maximum.reduce(np.abs(groups), axis=-1, initial=floor)
    return amax


def act_quant(x: Array) -> tuple[Array, Array]:
    """FP8 activation quantisation: f32[..., k] -> (f64[..., k/32, 32] e4m3 values, f32[..., k/32] scales).

    Scale of a group: its largest magnitude (at least 1e-4) times fp32(1/448), rounded up to a power of two.
    """
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    scale = _pow2_ceil(_amax(groups, np.float32(1e-4)) * _INV_448)
    # No clamp: a quotient exceeds 448 by an ulp at most, which rounds to 448.
    return (groups / scale[..., None]).astype(_E4M3).astype(np.float64), scale


def act_quant_dequant(x: Array) -> Array:
    """f32[..., k] -> f32[..., k] on the FP8 grid of `act_quant`: what a window row is stored as."""
    values, scale = act_quant(x)
    return (values.astype(np.float32) * scale[..., None]).reshape(x.shape)


def fp4_pow2(x: Array) -> tuple[Array, Array]:
    """FP4 with a power-of-two scale per 32: f32[..., k] -> (u8[..., k/32, 32] codes, f32[..., k/32] scales)."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    # e2m1 has no NaN: a group that holds one gets an infinite scale and with it NaN values.
    scale = _pow2_ceil(np.fmin(_amax(groups, _FP4_POW2_FLOOR) * _INV_6, np.float32(np.inf)))
    return encode_e2m1(groups / scale[..., None]), scale


def fp4_e4m3(x: Array) -> tuple[Array, Array]:
    """FP4 with an e4m3 scale per 16 (at most 448): f32[..., k] -> (u8[..., k/16, 16] codes, f32[..., k/16] scales)."""
    groups = x.reshape(*x.shape[:-1], -1, FP4_ROW_GROUP)
    scale = E4M3_VALUE.take(encode_e4m3(_amax(groups, _FP4_ROW_FLOOR) / np.float32(6)))
    return encode_e2m1(groups / scale[..., None]), scale


def dequant_e2m1(codes: Array, scale: Array) -> Array:
    """The values of either FP4 quantiser's groups, f32[..., groups, width]; exact in bf16."""
    return E2M1_VALUE.take(codes) * scale[..., None]
