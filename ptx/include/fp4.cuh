// The two dynamic FP4 quantisers, bit for bit those of kernels/formats.py. A magnitude travels as its bits: as
// integers the bits of non-negative floats compare like the floats, and NaN compares above everything, so it survives.
#pragma once

#include "device.cuh"

__device__ __forceinline__ u32 magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }

// The e2m1 value next to x, ties to the even code, clamped to +-6; the sign of zero is kept. NaN
// has no code; it gives 0, which a group's infinite scale turns into NaN again.
__device__ __forceinline__ float round_e2m1(float x) {
    if (x != x) return 0.0f;
    float a = fminf(fabsf(x), 6.0f);
    float step = a < 2.0f ? 0.5f : a < 4.0f ? 1.0f : 2.0f;
    return copysignf(rintf(a / step) * step, x);
}

// The scale of a group of 32 from its largest magnitude: a power of two; infinite for a group with NaN or infinity.
__device__ __forceinline__ float fp4_pow2_scale(u32 amax) {
    u32 least = __float_as_uint(6.0f * 0x1p-126f);
    float x = fminf(__uint_as_float(amax > least ? amax : least) * (1.0f / 6.0f), __uint_as_float(0x7F800000u));
    return __uint_as_float((__float_as_uint(x) + 0x7FFFFFu) & 0xFF800000u);
}

// The scale of a group of 16 from its largest magnitude: an e4m3 value of at least 2^-9 and at most 448, or NaN.
__device__ __forceinline__ float fp4_e4m3_scale(u32 amax) {
    u32 least = __float_as_uint(6.0f * 0x1p-9f);
    float x = __uint_as_float(amax > least ? amax : least) / 6.0f;
    if (x != x) return x;
    x = fminf(x, 448.0f);
    if (x < 0x1p-6f) return rintf(x * 0x1p9f) * 0x1p-9f;
    u32 bits = __float_as_uint(x);
    return __uint_as_float((bits + 0x7FFFFu + ((bits >> 20) & 1u)) & 0xFFF00000u);
}

// A value through the grid of its group and back; exact in bf16.
__device__ __forceinline__ float through_fp4(float x, float scale) { return round_e2m1(x / scale) * scale; }
