// The compressed row and its index key of a KV source layer, one block: too little work to share.

#include "device.cuh"
#include "fp4.cuh"
#include "math.cuh"
#include "reduce.cuh"
#include "rope.cuh"

constexpr u32 THREADS = 512;

// Two slots' kv, weighted by the softmax of their gates.
__device__ __forceinline__ float pooled(float kv0, float gate0, float kv1, float gate1) {
    float top = fmaxf(gate0, gate1);
    float e0 = ds41_expf(gate0 - top), e1 = ds41_expf(gate1 - top), sum = e0 + e1;
    return e0 / sum * kv0 + e1 / sum * kv1;
}

// The pair of bf16 values at position 2i of a row of n, rotated if it is among the last rope_dim values.
__device__ __forceinline__ u32 turned(u32 pair, u32 i, u32 n, const float* rope, u32 rope_dim) {
    if (2 * i + rope_dim < n) return pair;
    u32 k = i - (n - rope_dim) / 2;
    Pair x = rotate({low_bf16(pair), high_bf16(pair)}, rope[k], rope[rope_dim / 2 + k]);
    return pack_bf16(x.a, x.b);
}

__device__ __forceinline__ float dot8(const uint4& a, const uint4& b) {
    const u32 *ap = &a.x, *bp = &b.x;
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        even = fmaf(low_bf16(ap[k]), low_bf16(bp[k]), even);
        odd = fmaf(high_bf16(ap[k]), high_bf16(bp[k]), odd);
    }
    return even + odd;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) ds41_comp_row(
    const float* __restrict__ kv,
    const float* __restrict__ gate,  // null for ratio 1
    const u16* __restrict__ norm_w,
    const float* __restrict__ rope_c,
    const int* __restrict__ step,
    const u64* __restrict__ pool_cell,  // null for ratio 1
    const u64* __restrict__ comp_cell,
    const u64* __restrict__ ikey_cell,
    const u16* __restrict__ wk,  // bf16 [index_dim][head_dim]
    const u16* __restrict__ k_norm,
    u32 head_dim,
    u32 rope_dim,
    u32 index_dim,
    u32 ratio,
    float eps) {
    extern __shared__ __align__(16) u8 shared[];
    float* x = reinterpret_cast<float*>(shared);        // [head_dim]
    float* dots = x + head_dim;                         // [index_dim]
    u16* latent = reinterpret_cast<u16*>(dots + index_dim);  // [head_dim]
    u16* key = latent + head_dim;                       // [index_dim]
    __shared__ float scratch[THREADS / 32];
    u32 tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    u32 position = step[0];
    bool complete = ratio == 1 || position % 2 == 1;

    // The key's weights are asked for long before they are needed, a line of 128 bytes a thread.
    u32 lines = complete ? index_dim * head_dim * 2 / 128 : 0;
    for (u32 i = tid; i < lines; i += THREADS) prefetch_l2(wk + static_cast<size_t>(i) * 64);

    // The pooled kv, as bf16 values.
    float sum[1] = {};
    if (ratio > 1) {
        float* pool = reinterpret_cast<float*>(pool_cell[0]);  // [slot][kv, gate][head_dim]
        u32 slot = position % 2;
        float* mine = pool + slot * 2 * head_dim;
        const float* other = pool + (1 - slot) * 2 * head_dim;
        for (u32 d = tid; d < head_dim; d += THREADS) {
            float v = kv[d], w = gate[d];
            mine[d] = v;
            mine[head_dim + d] = w;
            if (complete) x[d] = round_bf16(pooled(other[d], other[head_dim + d], v, w));
        }
        if (!complete) return;
    } else {
        for (u32 d = tid; d < head_dim; d += THREADS) x[d] = kv[d];
    }
    // Each thread reads back its own values.
    for (u32 d = tid; d < head_dim; d += THREADS) sum[0] = fmaf(x[d], x[d], sum[0]);
    block_sum(sum, scratch);
    float inverse = inverse_rms(sum[0], head_dim, eps);
    for (u32 d = tid; d < head_dim; d += THREADS) latent[d] = to_bf16(x[d] * inverse * from_bf16(norm_w[d]));
    __syncthreads();

    // The key is made from the latent before its rotation. A warp takes ROWS rows at a time (index_dim is a multiple of
    // 32), a lane 8 values of each.
    constexpr u32 ROWS = 8;
    u32 runs = head_dim / 8;
    for (u32 first = warp * ROWS; first < index_dim; first += THREADS / 32 * ROWS) {
        const uint4* row = reinterpret_cast<const uint4*>(wk) + static_cast<size_t>(first) * runs;
        float dot[ROWS] = {};
        for (u32 i = lane; i < runs; i += 32) {
            uint4 v = reinterpret_cast<const uint4*>(latent)[i], w[ROWS];
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) w[r] = row[r * runs + i];
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) dot[r] += dot8(w[r], v);
        }
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) {
            float sum = warp_sum(dot[r]);
            if (lane == 0) dots[first + r] = round_bf16(sum);
        }
    }
    __syncthreads();
    sum[0] = 0.0f;
    for (u32 d = tid; d < index_dim; d += THREADS) sum[0] = fmaf(dots[d], dots[d], sum[0]);
    block_sum(sum, scratch);
    inverse = inverse_rms(sum[0], index_dim, eps);
    for (u32 i = tid; i < index_dim / 2; i += THREADS) {
        u32 pair = pack_bf16(dots[2 * i] * inverse * from_bf16(k_norm[2 * i]),
                             dots[2 * i + 1] * inverse * from_bf16(k_norm[2 * i + 1]));
        reinterpret_cast<u32*>(key)[i] = turned(pair, i, index_dim, rope_c, rope_dim);
    }
    for (u32 i = tid; i < head_dim / 2; i += THREADS) {
        u32* pair = reinterpret_cast<u32*>(latent) + i;
        *pair = turned(*pair, i, head_dim, rope_c, rope_dim);
    }
    __syncthreads();

    // Rows are multiples of 32 long, so whole warps take part in every group.
    size_t j = position / ratio;
    u16* key_out = reinterpret_cast<u16*>(ikey_cell[0]) + j * index_dim;
    for (u32 d = tid; d < index_dim; d += THREADS) {
        float v = from_bf16(key[d]);
        float scale = fp4_pow2_scale(__reduce_max_sync(FULL_WARP, magnitude(v)));
        key_out[d] = to_bf16(through_fp4(v, scale));
    }
    u16* row_out = reinterpret_cast<u16*>(comp_cell[0]) + j * head_dim;
    for (u32 d = tid; d < head_dim; d += THREADS) {
        float v = from_bf16(latent[d]);
        u32 amax = magnitude(v);
#pragma unroll
        for (int s = 8; s > 0; s >>= 1) {
            u32 across = __shfl_xor_sync(FULL_WARP, amax, s);
            amax = across > amax ? across : amax;
        }
        row_out[d] = to_bf16(through_fp4(v, fp4_e4m3_scale(amax)));
    }
}
