// bf16 products with float32 results: router logits, the output head, the compressor's projections.

#include "activations.cuh"
#include "product.cuh"

struct RouterLogits : Product<Bf16> {
    const u16* normed;
    const u8* w;
    float* logits;
    u32 dim, n_experts;

    __device__ __forceinline__ u32 row_nbytes() const { return 2 * dim; }
    __device__ __forceinline__ u32 tiles() const { return (n_experts + ROWS - 1) / ROWS; }
    __device__ __forceinline__ Tile tile(u32, u32 tile, u32) const { return {w, nullptr, tile * ROWS, n_experts}; }
    __device__ __forceinline__ void load(Activations to, u32 steps, u32) const { fill_plain(to, normed, dim, steps); }
    __device__ __forceinline__ void finish(u32, u32 tile, u32 lane, float sum) const {
        u32 row = tile * ROWS + lane;
        if (lane < ROWS && row < n_experts) logits[row] = sum;
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK, 2) ds41_router_logits(
    const u16* __restrict__ normed,  // bf16 [dim]
    const u8* __restrict__ w,        // bf16 [n_experts][dim]
    float* __restrict__ logits,      // [n_experts]
    u32 dim,
    u32 n_experts) {
    multiply(RouterLogits{{}, normed, w, logits, dim, n_experts}, blockIdx.x, gridDim.x);
}

struct Head : Product<Bf16> {
    const u16 *hidden, *norm_w;
    const u8* w;
    u16* normed;
    float* logits;
    u32 dim, vocab;
    float eps;

    __device__ __forceinline__ u32 row_nbytes() const { return 2 * dim; }
    __device__ __forceinline__ u32 tiles() const { return (vocab + ROWS - 1) / ROWS; }
    __device__ __forceinline__ Tile tile(u32, u32 tile, u32) const { return {w, nullptr, tile * ROWS, vocab}; }

    // Every block norms for itself; one of them stores the result.
    __device__ __forceinline__ void load(Activations to, u32 steps, u32) const {
        float inverse = block_inverse_rms(hidden, dim, eps, SharedLayout<Bf16>::partial());
        for (u32 at = threadIdx.x * RUN; at < steps * Bf16::K_STEP; at += PASS) {
            float v[RUN] = {};
            if (at < dim) {
                unpack_bf16(*reinterpret_cast<const uint4*>(hidden + at), v);
                norm8(v, inverse, *reinterpret_cast<const uint4*>(norm_w + at));
                if (blockIdx.x == 0) *reinterpret_cast<uint4*>(normed + at) = pack8_bf16(v);
            }
            Bf16::store(to, at, v);
        }
    }

    __device__ __forceinline__ void finish(u32, u32 tile, u32 lane, float sum) const {
        u32 row = tile * ROWS + lane;
        if (lane < ROWS && row < vocab) logits[row] = sum;
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK, 2) ds41_head(
    const u16* __restrict__ hidden,  // bf16 [dim]
    const u16* __restrict__ norm_w,  // bf16 [dim]
    const u8* __restrict__ w,        // bf16 [vocab][dim]
    u16* __restrict__ normed,        // bf16 [dim]
    float* __restrict__ logits,      // [vocab]
    u32 dim,
    u32 vocab,
    float eps) {
    multiply(Head{{}, hidden, norm_w, w, normed, logits, dim, vocab, eps}, blockIdx.x, gridDim.x);
}

struct CompProj : Product<Bf16> {
    const u16* normed;
    const u8 *wkv, *wgate;
    float *kv, *gate;
    u32 dim, head_dim, ratio;

    __device__ __forceinline__ u32 row_nbytes() const { return 2 * dim; }
    __device__ __forceinline__ u32 kv_tiles() const { return (head_dim + ROWS - 1) / ROWS; }
    __device__ __forceinline__ u32 tiles() const { return ratio > 1 ? 2 * kv_tiles() : kv_tiles(); }
    __device__ __forceinline__ Tile tile(u32, u32 tile, u32) const {
        bool is_kv = tile < kv_tiles();
        return {is_kv ? wkv : wgate, nullptr, (is_kv ? tile : tile - kv_tiles()) * ROWS, head_dim};
    }
    __device__ __forceinline__ void load(Activations to, u32 steps, u32) const { fill_plain(to, normed, dim, steps); }
    __device__ __forceinline__ void finish(u32, u32 tile, u32 lane, float sum) const {
        bool is_kv = tile < kv_tiles();
        u32 row = (is_kv ? tile : tile - kv_tiles()) * ROWS + lane;
        if (lane < ROWS && row < head_dim) (is_kv ? kv : gate)[row] = ratio > 1 ? sum : round_bf16(sum);
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK, 2) ds41_comp_proj(
    const u16* __restrict__ normed,  // bf16 [dim]
    const u8* __restrict__ wkv,      // bf16 [head_dim][dim]
    const u8* __restrict__ wgate,    // bf16 [head_dim][dim], none with ratio 1
    float* __restrict__ kv,          // [head_dim]; bf16 values with ratio 1
    float* __restrict__ gate,        // [head_dim], none with ratio 1
    u32 dim,
    u32 head_dim,
    u32 ratio) {
    multiply(CompProj{{}, normed, wkv, wgate, kv, gate, dim, head_dim, ratio}, blockIdx.x, gridDim.x);
}
