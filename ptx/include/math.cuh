// e^x and the logistic function in float32, both within one unit in the last place for every input. Built from
// explicit fused multiply-adds, so the bits do not depend on how a compiler contracts. Routing has its own, prescribed
// functions: see softplus.cuh.
#pragma once

// The part of e^x behind the power of two: e^x = (high + low) * 2^n, |low| below half a unit of high.
struct ExpParts {
    float high, low;
    int n;
};

// For |x| <= 105.
__device__ __forceinline__ ExpParts exp_parts(float x) {
    float n = rintf(x * 1.44269504f);
    // The first step is exact: x and n * 0.693... are multiples of 2^-25, and the difference is below 0.5.
    float r = fmaf(n, -0.693147182f, x);
    r = fmaf(n, 1.90465421e-9f, r);
    // (e^r - 1 - r) / r^2 on |r| <= ln(2)/2, fitted at Chebyshev nodes; its error is below 2^-30 of the result.
    float q = 0x1.a1517cp-13f;
    q = fmaf(q, r, 0x1.6d4328p-10f);
    q = fmaf(q, r, 0x1.1110c6p-7f);
    q = fmaf(q, r, 0x1.5554eap-5f);
    q = fmaf(q, r, 0x1.555556p-3f);
    q = fmaf(q, r, 0.5f);
    float t = fmaf(r * r, q, r);
    float high = 1.0f + t;
    return {high, (1.0f - high) + t, static_cast<int>(n)};
}

// 2^n for -126 <= n <= 127.
__device__ __forceinline__ float exp2_int(int n) { return __uint_as_float(static_cast<unsigned int>(n + 127) << 23); }

// e^x. Overflows to +inf, underflows through the subnormals to 0, NaN stays NaN.
__device__ __forceinline__ float ds41_expf(float x) {
    ExpParts e = exp_parts(fminf(fmaxf(x, -105.0f), 89.0f));
    // In two steps, because 2^n itself may not be a float; only the second rounds.
    int half = e.n / 2;
    float y = e.high * exp2_int(half) * exp2_int(e.n - half);
    return x != x ? x : y;
}

// 1 / (1 + e^-x), through e^-|x|: nothing overflows, and the tail of a negative x keeps its relative accuracy.
__device__ __forceinline__ float ds41_sigmoidf(float x) {
    if (!(fabsf(x) <= 60.0f)) return x > 0.0f ? 1.0f : ds41_expf(x);
    ExpParts e = exp_parts(-fabsf(x));
    float scale = exp2_int(e.n), high = e.high * scale, low = e.low * scale;
    float sum = 1.0f + high;
    float sum_low = ((1.0f - sum) + high) + low;
    float top = x < 0.0f ? high : 1.0f, top_low = x < 0.0f ? low : 0.0f;
    float inverse = 1.0f / sum;
    float y = top * inverse;
    float rest = fmaf(-y, sum, top) + (top_low - y * sum_low);
    return fmaf(rest, inverse, y);
}

// 1 / sqrt(sum / n + eps): the factor of an RMS norm from the sum of n squares.
__device__ __forceinline__ float inverse_rms(float sum, unsigned int n, float eps) {
    return 1.0f / sqrtf(sum / static_cast<float>(n) + eps);
}

// n^-0.5 rounded to float once (but for a double rounding): the scale of a dot over n values.
__device__ __forceinline__ float inverse_sqrt(unsigned int n) {
    return static_cast<float>(1.0 / sqrt(static_cast<double>(n)));
}
