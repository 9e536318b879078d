// Weight codes as f16, and the FP8 activation quantiser of kernels/formats.py.
//
// The decoders place a code's bits where f16 has them, with no change of exponent bias: the result is the code's value
// times a power of two, exactly, subnormal codes included. `*_UNIT` takes that power back and is multiplied into a
// block's scale once.
#pragma once

#include "fp4.cuh"
#include "mma.cuh"

constexpr float E4M3_UNIT = 0x1p8f;
constexpr float E2M1_UNIT = 0x1p14f;

// Four e4m3 codes -> the f16 pairs of codes (0, 2) and (1, 3), each divided by E4M3_UNIT. NaN codes come out as 1.875.
__device__ __forceinline__ void decode_e4m3(u32 codes, u32& even, u32& odd) {
    even = ((codes << 8) & 0x80008000u) | ((codes << 7) & 0x3F803F80u);
    odd = (codes & 0x80008000u) | ((codes >> 1) & 0x3F803F80u);
}

// Eight e2m1 codes -> the f16 pairs of codes (0, 4), (1, 5), (2, 6), (3, 7), each divided by E2M1_UNIT. The upper byte
// of such an f16 holds all of it, so four codes are placed at once before the bytes part. Half of the lower bytes are
// moved up by arithmetic: it has units of its own, and those for logic are the bottleneck of an FP4 product.
__device__ __forceinline__ void decode_e2m1(u32 codes, u32 (&pairs)[4]) {
    u32 even = ((codes << 4) & 0x80808080u) | ((codes << 1) & 0x0E0E0E0Eu);
    u32 odd = (codes & 0x80808080u) | ((codes >> 3) & 0x0E0E0E0Eu);
    pairs[2] = even & 0xFF00FF00u;
    pairs[3] = odd & 0xFF00FF00u;
    pairs[0] = __byte_perm(even, 0u, 0x2404u);
    pairs[1] = multiply_add(pairs[3], 0u - 256u, odd * 256u);
}

// The power of two of an e8m0 byte; byte 0 is 2^-127, a subnormal. 255 (NaN) comes out as infinity: it is refused when a
// checkpoint is read.
__device__ __forceinline__ float e8m0(u32 byte) { return __uint_as_float(byte ? byte << 23 : 0x00400000u); }

// The value of an e4m3 code, NaN included.
__device__ __forceinline__ float e4m3(u32 code) {
    u32 magnitude_bits = (code & 0x7Fu) << 20;
    float x = __uint_as_float(magnitude_bits) * 0x1p120f;
    if (magnitude_bits == 0x07F00000u) x = __uint_as_float(0x7FFFFFFFu);
    return __uint_as_float(__float_as_uint(x) | (code & 0x80u) << 24);
}

// The e4m3 value next to x for |x| <= 448 and a trifle, ties to even; the sign of zero is kept, NaN stays NaN.
__device__ __forceinline__ float round_e4m3(float x) {
    u32 bits = magnitude(x);
    float a = __uint_as_float(bits);
    // Below 2^-6 the codes are multiples of 2^-9; from there on they have four significant bits.
    float r = a >= 0x1p-6f ? __uint_as_float((bits + 0x7FFFFu + ((bits >> 20) & 1u)) & 0xFFF00000u)
                           : rintf(a * 0x1p9f) * 0x1p-9f;
    return copysignf(r, x);
}

// How a group of 32 is divided: by `scale`, a power of two, which is to multiply with `inverse`.
struct GroupScale {
    float scale, inverse;
};

// 2^(exponent - 127) and its inverse, for exponents of 1..253.
__device__ __forceinline__ GroupScale power_of_two(u32 exponent) {
    return {__uint_as_float(exponent << 23), __uint_as_float((254u - exponent) << 23)};
}

// The FP8 activation scale of a group from its largest magnitude's bits. A NaN or infinity makes the whole group NaN:
// whatever contains one is no number in the end.
__device__ __forceinline__ GroupScale act_scale(u32 amax) {
    float nan = __uint_as_float(0x7FFFFFFFu);
    if (amax >= 0x7F800000u) return {nan, nan};
    u32 floor = __float_as_uint(1e-4f);
    float x = __uint_as_float(amax > floor ? amax : floor) * (1.0f / 448.0f);
    return power_of_two((__float_as_uint(x) + 0x7FFFFFu) >> 23);
}
