// The gated addition of an engram value into the streams, one block a stream.

#include "device.cuh"
#include "math.cuh"
#include "reduce.cuh"

extern "C" __global__ void __launch_bounds__(1024) ds41_engram_apply(
    const u16* __restrict__ kv,  // bf16: keys [hc][dim], then value [dim]
    const u16* __restrict__ q_weight,
    const u16* __restrict__ k_weight,
    u16* streams,
    float* __restrict__ gate,
    u32 dim,
    u32 hc,
    float eps) {
    __shared__ float scratch[3 * 32];
    u32 k = blockIdx.x, pairs = dim / 2;
    const u32* key = reinterpret_cast<const u32*>(kv) + k * pairs;
    const u32* value = reinterpret_cast<const u32*>(kv) + hc * pairs;
    const u32* qw = reinterpret_cast<const u32*>(q_weight) + k * pairs;
    const u32* kw = reinterpret_cast<const u32*>(k_weight) + k * pairs;
    u32* stream = reinterpret_cast<u32*>(streams) + k * pairs;

    float sums[3] = {};  // squares of the stream, squares of the key, the weighted dot
#pragma unroll 4
    for (u32 i = threadIdx.x; i < pairs; i += blockDim.x) {
        u32 x = stream[i], y = key[i], q = qw[i], w = kw[i];
        sums[0] = fmaf(high_bf16(x), high_bf16(x), fmaf(low_bf16(x), low_bf16(x), sums[0]));
        sums[1] = fmaf(high_bf16(y), high_bf16(y), fmaf(low_bf16(y), low_bf16(y), sums[1]));
        // Products of three bf16 values: the first is exact, the second has 24 bits.
        float low = low_bf16(x) * (low_bf16(q) * low_bf16(w));
        float high = high_bf16(x) * (high_bf16(q) * high_bf16(w));
        sums[2] = fmaf(high, high_bf16(y), fmaf(low, low_bf16(y), sums[2]));
    }
    block_sum(sums, scratch);
    float delta = inverse_rms(sums[0], dim, eps) * inverse_rms(sums[1], dim, eps) * inverse_sqrt(dim) * sums[2];
    // A comparison, not a maximum, so that NaN stays. The sign by copysign: +0 and -0 count as what they are.
    float size = fabsf(delta) < 1e-6f ? 1e-6f : fabsf(delta);
    float g = ds41_sigmoidf(copysignf(sqrtf(size), delta));
    if (threadIdx.x == 0) gate[k] = g;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < pairs; i += blockDim.x) {
        u32 x = stream[i], v = value[i];
        stream[i] = pack_bf16(low_bf16(x) + g * low_bf16(v), high_bf16(x) + g * high_bf16(v));
    }
}
