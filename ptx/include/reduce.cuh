// Sums over a warp and over a block in one fixed order.
#pragma once

#include "device.cuh"

// The sum of all lanes' x, the same bits in every lane.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(FULL_WARP, x, step);
    return x;
}

// The sums of N values a thread over the block, the same bits in every thread. All threads must call it, in whole
// warps; `scratch` holds N floats a warp and must not be in use by anything else.
template <int N>
__device__ __forceinline__ void block_sum(float (&x)[N], float* scratch) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = warp_sum(x[i]);
        if (lane == 0) scratch[warp * N + i] = x[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = warp_sum(lane < warps ? scratch[lane * N + i] : 0.0f);
}
