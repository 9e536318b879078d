// sqrt(softplus(x)) of the router, operation by operation the algorithm of kernels/softplus.py. It must give the same
// bits for every input: a score that differs in the last place can move a selection. No operation may be fused.
#pragma once

#include "device.cuh"

// 2^(i/32) in double, less the exponent that adding k << 47 for a k with k mod 32 = i brings back.
__device__ const u64 DS41_EXP2[32] = {
    0x3FF0000000000000, 0x3FEFD9B0D3158574, 0x3FEFB5586CF9890F, 0x3FEF9301D0125B51,
    0x3FEF72B83C7D517B, 0x3FEF54873168B9AA, 0x3FEF387A6E756238, 0x3FEF1E9DF51FDEE1,
    0x3FEF06FE0A31B715, 0x3FEEF1A7373AA9CB, 0x3FEEDEA64C123422, 0x3FEECE086061892D,
    0x3FEEBFDAD5362A27, 0x3FEEB42B569D4F82, 0x3FEEAB07DD485429, 0x3FEEA47EB03A5585,
    0x3FEEA09E667F3BCD, 0x3FEE9F75E8EC5F74, 0x3FEEA11473EB0187, 0x3FEEA589994CCE13,
    0x3FEEACE5422AA0DB, 0x3FEEB737B0CDC5E5, 0x3FEEC49182A3F090, 0x3FEED503B23E255D,
    0x3FEEE89F995AD3AD, 0x3FEEFF76F2FB5E47, 0x3FEF199BDD85529C, 0x3FEF3720DCEF9069,
    0x3FEF5818DCFBA487, 0x3FEF7C97337B9B5F, 0x3FEFA4AFA2A490DA, 0x3FEFD0765B6E4540,
};

// e^x for x <= 20, not NaN.
__device__ __forceinline__ float route_expf(float x) {
    double z = static_cast<double>(x > -150.0f ? x : -150.0f) * 0x1.71547652b82fep+5;
    double shifted = z + 0x1.8p+52;
    u64 k = static_cast<u64>(__double_as_longlong(shifted));
    z -= shifted - 0x1.8p+52;
    double scale = __longlong_as_double(static_cast<long long>(DS41_EXP2[k & 31] + (k << 47)));
    double high = z * 0x1.c6af84b912394p-20 + 0x1.ebfce50fac4f3p-13;
    double low = z * 0x1.62e42ff0c52d6p-6 + 1.0;
    return static_cast<float>((high * (z * z) + low) * scale);
}

// log(1 + y) for 0 <= y < 2^53.
__device__ __forceinline__ float route_log1pf(float y) {
    float u = y + 1.0f;
    bool large = u >= 2.0f;
    float lost = (large ? 1.0f : y) - (u - (large ? y : 1.0f));
    lost /= u;
    u32 bits = __float_as_uint(u) + (0x3F800000u - 0x3F3504F7u);
    float k = static_cast<float>(static_cast<int>(bits >> 23) - 127);
    float f = __uint_as_float((bits & 0x7FFFFFu) + 0x3F3504F7u) - 1.0f;
    if (y < __uint_as_float(0x3ED413D7u)) f = y;
    if (k == 0.0f) lost = 0.0f;
    float hfsq = f * 0.5f * f;
    float s = f / (f + 2.0f);
    float z = s * s;
    float poly = z * 0x1.2f112ep-3f;
    poly = (poly + 0x1.39a09ep-3f) * z;
    poly = (poly + 0x1.74664ap-3f) * z;
    poly = (poly + 0x1.c71c52p-3f) * z;
    poly = (poly + 0x1.24924ap-2f) * z;
    poly = (poly + 0x1.99999ap-2f) * z;
    poly = (poly + 0x1.555556p-1f) * z;
    poly = (poly + hfsq) * s;
    lost = lost + k * 0x1.2fefa2p-17f;
    hfsq = (hfsq - (poly + lost)) - f;
    return k * 0x1.62e3p-1f - hfsq;
}

// -inf gives 0, +inf gives +inf, NaN stays NaN.
__device__ __forceinline__ float route_sqrt_softplus(float x) {
    float y = x <= 20.0f ? route_log1pf(route_expf(x)) : x;
    return sqrtf(y);
}
