// FP8 products of one vector: the plain quantised linear, the shared expert's gate and up, engram keys and value.

#include "activations.cuh"
#include "product.cuh"
#include "swiglu.cuh"

struct LinearFp8 : Product<Fp8> {
    const u16* x;
    const u8* w;
    const u8* s;
    u16* y;
    u32 n, k;

    __device__ __forceinline__ u32 row_nbytes() const { return k; }
    __device__ __forceinline__ u32 tiles() const { return (n + ROWS - 1) / ROWS; }
    __device__ __forceinline__ Tile tile(u32, u32 tile, u32) const { return {w, s, tile * ROWS, n}; }
    __device__ __forceinline__ void load(Activations to, u32 steps, u32) const { fill_bf16<Fp8>(to, x, k, steps); }
    __device__ __forceinline__ void finish(u32, u32 tile, u32 lane, float sum) const {
        u32 row = tile * ROWS + lane;
        if (lane < ROWS && row < n) y[row] = to_bf16(sum);
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK, 2) ds41_linear_fp8(
    const u16* __restrict__ x,  // bf16 [k]
    const u8* __restrict__ w,   // e4m3 [n][k]
    const u8* __restrict__ s,   // e8m0 [n/32][k/32]
    u16* __restrict__ y,        // bf16 [n]
    u32 n,
    u32 k) {
    multiply(LinearFp8{{}, x, w, s, y, n, k}, blockIdx.x, gridDim.x);
}

struct SharedGateUp : Product<Fp8, 2> {
    const u16* normed;
    const u8 *w1, *s1, *w3, *s3;
    u16* t;
    u32 dim, inter;
    float limit;

    __device__ __forceinline__ u32 row_nbytes() const { return dim; }
    __device__ __forceinline__ u32 tiles() const { return (inter + ROWS - 1) / ROWS; }
    __device__ __forceinline__ Tile tile(u32, u32 tile, u32 matrix) const {
        return {matrix ? w3 : w1, matrix ? s3 : s1, tile * ROWS, inter};
    }
    __device__ __forceinline__ void load(Activations to, u32 steps, u32) const {
        fill_bf16<Fp8>(to, normed, dim, steps);
    }
    __device__ __forceinline__ void finish(u32, u32 tile, u32 lane, float sum) const {
        float up = __shfl_xor_sync(FULL_WARP, sum, ROWS);
        u32 row = tile * ROWS + lane;
        if (lane < ROWS && row < inter) t[row] = to_bf16(swiglu(sum, up, limit));
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK, 2) ds41_shared_gate_up(
    const u16* __restrict__ normed,  // bf16 [dim]
    const u8* __restrict__ w1,       // e4m3 [inter][dim]
    const u8* __restrict__ s1,       // e8m0 [inter/32][dim/32]
    const u8* __restrict__ w3,
    const u8* __restrict__ s3,
    u16* __restrict__ t,  // bf16 [inter]
    u32 dim,
    u32 inter,
    float limit) {
    multiply(SharedGateUp{{}, normed, w1, s1, w3, s3, t, dim, inter, limit}, blockIdx.x, gridDim.x);
}

struct EngramRow {
    uint2 codes;
    u32 scale;
};

struct EngramKv : Product<Fp8> {
    const u8 *codes, *scales, *w, *ws;
    u16* kv;
    u32 n, k;

    __device__ __forceinline__ u32 row_nbytes() const { return k; }
    __device__ __forceinline__ u32 tiles() const { return (n + ROWS - 1) / ROWS; }
    __device__ __forceinline__ Tile tile(u32, u32 tile, u32) const { return {w, ws, tile * ROWS, n}; }
    __device__ __forceinline__ void load(Activations to, u32 steps, u32) const {
        const u8 *codes = this->codes, *scales = this->scales;
        fill_quantised<Fp8, ActQuant, EngramRow>(
            to, k, steps,
            [=](u32 at) {
                return EngramRow{*reinterpret_cast<const uint2*>(codes + at), scales[at / 32]};
            },
            [](EngramRow raw, u32, float(&v)[RUN]) {
#pragma unroll
                for (u32 i = 0; i < RUN; i++) {
                    v[i] = e4m3((i < 4 ? raw.codes.x : raw.codes.y) >> i % 4 * 8 & 0xFFu) * e8m0(raw.scale);
                }
            });
    }
    __device__ __forceinline__ void finish(u32, u32 tile, u32 lane, float sum) const {
        u32 row = tile * ROWS + lane;
        if (lane < ROWS && row < n) kv[row] = to_bf16(sum);
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK, 2) ds41_engram_kv(
    const u8* __restrict__ codes,   // e4m3 [cols][head_dim]: k values in all
    const u8* __restrict__ scales,  // e8m0 [cols][head_dim/32]
    const u8* __restrict__ w,       // e4m3 [n][k]
    const u8* __restrict__ ws,      // e8m0 [n/32][k/32]
    u16* __restrict__ kv,           // bf16 [n]
    u32,
    u32,
    u32 n,
    u32 k) {
    multiply(EngramKv{{}, codes, scales, w, ws, kv, n, k}, blockIdx.x, gridDim.x);
}
