// Activations into shared memory: read as bf16 (or made from other codes) once a block, normed and quantised there.
// Every function is called by the whole block; a barrier must follow before the values are used.
#pragma once

#include "math.cuh"
#include "reduce.cuh"
#include "tile.cuh"

constexpr u32 RUN = 8;             // consecutive values a thread handles at a time
constexpr u32 PASS = BLOCK * RUN;  // values that the block covers with one run a thread

__device__ __forceinline__ void unpack_bf16(uint4 raw, float (&v)[RUN]) {
    u32 pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        v[2 * i] = low_bf16(pairs[i]);
        v[2 * i + 1] = high_bf16(pairs[i]);
    }
}

__device__ __forceinline__ uint4 pack8_bf16(const float (&v)[RUN]) {
    return {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
}

// The largest magnitude, as bits, of the 32 values that four neighbouring lanes hold.
__device__ __forceinline__ u32 group_amax(const float (&v)[RUN]) {
    u32 amax = 0;
#pragma unroll
    for (u32 i = 0; i < RUN; i++) amax = amax > magnitude(v[i]) ? amax : magnitude(v[i]);
#pragma unroll
    for (u32 lanes = 1; lanes < 4; lanes *= 2) {
        u32 other = __shfl_xor_sync(FULL_WARP, amax, lanes);
        amax = amax > other ? amax : other;
    }
    return amax;
}

// What to do with eight values on their way to shared memory. `quantise` returns the scale that takes the stored values
// back; all lanes of a warp call it together.
struct ActQuant {
    __device__ __forceinline__ static float quantise(float (&v)[RUN]) {
        GroupScale s = act_scale(group_amax(v));
#pragma unroll
        for (u32 i = 0; i < RUN; i++) v[i] = round_e4m3(v[i] * s.inverse);
        return s.scale;
    }
};

// bf16 values to f16 for a product that is not quantised: divided by a power of two that brings the largest one of 32
// close to f16's limit. A value is exact unless it is below 2^-31 of that one, and then off by less than 2^-39 of it:
// far below the rounding of the float32 sum.
struct FitF16 {
    __device__ __forceinline__ static float quantise(float (&v)[RUN]) {
        u32 exponent = group_amax(v) >> 23;
        GroupScale s = power_of_two((exponent > 20u ? exponent : 20u) - 14);
#pragma unroll
        for (u32 i = 0; i < RUN; i++) v[i] *= s.inverse;
        return s.scale;
    }
};

// Stores k values in the order of format F with their scales, and zeros up to the end of the last step. `read(k)` gives
// the raw form of eight values, `decode(raw, k, v)` their floats; apart, so that several reads are in flight at once.
template <class F, class Quantiser, class Raw, class Read, class Decode>
__device__ __forceinline__ void fill_quantised(const Activations& x, u32 k, u32 steps, Read read, Decode decode) {
    constexpr u32 RUNS = 64 / sizeof(Raw);  // reads that a thread issues before it uses the first
    u32 padded = steps * F::K_STEP;
    // Whole warps stay in the loop together: a group of 32 is spread over four lanes.
    for (u32 base = threadIdx.x / 32 * 32 * RUN; base < padded; base += RUNS * PASS) {
        Raw raw[RUNS];
#pragma unroll
        for (u32 i = 0; i < RUNS; i++) {
            u32 at = base + i * PASS + threadIdx.x % 32 * RUN;
            if (at < k) raw[i] = read(at);
        }
#pragma unroll
        for (u32 i = 0; i < RUNS; i++) {
            u32 at = base + i * PASS + threadIdx.x % 32 * RUN;
            if (base + i * PASS >= padded) break;
            float v[RUN] = {};
            if (at < k) decode(raw[i], at, v);
            float scale = Quantiser::quantise(v);
            if (at >= padded) continue;
            F::store(x, at, v);
            if (threadIdx.x % 4 == 0) x.scales[at / 32] = at < k ? scale * F::UNIT : 0.0f;
        }
    }
}

// bf16[k], 16-byte aligned.
template <class F, class Quantiser = ActQuant>
__device__ __forceinline__ void fill_bf16(const Activations& x, const u16* from, u32 k, u32 steps) {
    fill_quantised<F, Quantiser, uint4>(
        x, k, steps, [=](u32 at) { return *reinterpret_cast<const uint4*>(from + at); },
        [](uint4 raw, u32, float(&v)[RUN]) { unpack_bf16(raw, v); });
}

// The same without quantisation, for bf16 weights.
__device__ __forceinline__ void fill_plain(const Activations& x, const u16* from, u32 k, u32 steps) {
    for (u32 at = threadIdx.x * RUN; at < steps * Bf16::K_STEP; at += PASS) {
        uint4 raw = {0, 0, 0, 0};
        if (at < k) raw = *reinterpret_cast<const uint4*>(from + at);
        *reinterpret_cast<uint4*>(x.values + 2 * at) = raw;
    }
}

// 1 / rms of bf16[n], the same bits in every thread. `scratch` holds WARPS floats.
__device__ __forceinline__ float block_inverse_rms(const u16* from, u32 n, float eps, float* scratch) {
    float sum[1] = {0.0f};
    for (u32 at = threadIdx.x * RUN; at < n; at += PASS) {
        float v[RUN];
        unpack_bf16(*reinterpret_cast<const uint4*>(from + at), v);
#pragma unroll
        for (u32 i = 0; i < RUN; i++) sum[0] += v[i] * v[i];
    }
    block_sum(sum, scratch);
    return inverse_rms(sum[0], n, eps);
}

// Eight values through an RMS norm: (x * inverse) * weight, rounded to bf16.
__device__ __forceinline__ void norm8(float (&v)[RUN], float inverse, uint4 weight) {
    float w[RUN];
    unpack_bf16(weight, w);
#pragma unroll
    for (u32 i = 0; i < RUN; i++) v[i] = round_bf16(v[i] * inverse * w[i]);
}
