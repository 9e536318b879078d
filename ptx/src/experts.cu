// The routed experts, all of a token's in one launch, through the pointer table [gate, up, down][top_k].

#include "activations.cuh"
#include "product.cuh"
#include "swiglu.cuh"

struct ExpertGateUp : Product<Fp4, 2> {
    const u16* normed;
    const u64* ptrs;
    const float* weights;
    u16* t;
    u32 dim, inter, top_k;
    u64 gate_scale_disp, up_scale_disp;
    float limit;

    __device__ __forceinline__ u32 row_nbytes() const { return dim / 2; }
    __device__ __forceinline__ u32 expert_tiles() const { return (inter + ROWS - 1) / ROWS; }
    __device__ __forceinline__ u32 tiles() const { return top_k * expert_tiles(); }
    __device__ __forceinline__ Tile tile(u32, u32 tile, u32 matrix) const {
        u32 expert = tile / expert_tiles();
        const u8* w = reinterpret_cast<const u8*>(ptrs[matrix * top_k + expert]);
        return {w, w + (matrix ? up_scale_disp : gate_scale_disp), tile % expert_tiles() * ROWS, inter};
    }
    __device__ __forceinline__ void load(Activations to, u32 steps, u32) const {
        fill_bf16<Fp4>(to, normed, dim, steps);
    }
    __device__ __forceinline__ void finish(u32, u32 tile, u32 lane, float sum) const {
        float up = __shfl_xor_sync(FULL_WARP, sum, ROWS);
        u32 expert = tile / expert_tiles(), row = tile % expert_tiles() * ROWS + lane;
        if (lane < ROWS && row < inter) t[expert * inter + row] = to_bf16(weights[expert] * swiglu(sum, up, limit));
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK, 2) ds41_expert_gate_up(
    const u16* __restrict__ normed,        // bf16 [dim]
    const u64* __restrict__ ptrs_dev,      // [3][top_k]: e2m1 [inter][dim/2], e8m0 [inter][dim/32] behind it
    const float* __restrict__ weight_dev,  // [top_k]
    u16* __restrict__ t,                   // bf16 [top_k][inter]
    u32 dim,
    u32 inter,
    u32 top_k,
    u64 gate_scale_disp,
    u64 up_scale_disp,
    float limit) {
    ExpertGateUp product{
        {}, normed, ptrs_dev, weight_dev, t, dim, inter, top_k, gate_scale_disp, up_scale_disp, limit};
    multiply(product, blockIdx.x, gridDim.x);
}

// A set is an expert: each has a vector of its own.
struct ExpertDown : Product<Fp4> {
    static constexpr bool MANY_SETS = true;

    const u16* t;
    const u64* ptrs;
    u16* out;
    u32 dim, inter, top_k;
    u64 scale_disp;

    __device__ __forceinline__ u32 row_nbytes() const { return inter / 2; }
    __device__ __forceinline__ u32 sets() const { return top_k; }
    __device__ __forceinline__ u32 tiles() const { return (dim + ROWS - 1) / ROWS; }
    __device__ __forceinline__ Tile tile(u32 expert, u32 tile, u32) const {
        const u8* w = reinterpret_cast<const u8*>(ptrs[2 * top_k + expert]);
        return {w, w + scale_disp, tile * ROWS, dim};
    }
    __device__ __forceinline__ void load(Activations to, u32 steps, u32 expert) const {
        fill_bf16<Fp4>(to, t + expert * inter, inter, steps);
    }
    __device__ __forceinline__ void finish(u32 expert, u32 tile, u32 lane, float sum) const {
        u32 row = tile * ROWS + lane;
        if (lane < ROWS && row < dim) out[expert * dim + row] = to_bf16(sum);
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK, 2) ds41_expert_down(
    const u16* __restrict__ t,         // bf16 [top_k][inter]
    const u64* __restrict__ ptrs_dev,  // [3][top_k]: e2m1 [dim][inter/2], e8m0 [dim][inter/32] behind it
    u16* __restrict__ out,             // bf16 [top_k][dim]
    u32 dim,
    u32 inter,
    u32 top_k,
    u64 down_scale_disp) {
    multiply(ExpertDown{{}, t, ptrs_dev, out, dim, inter, top_k, down_scale_disp}, blockIdx.x, gridDim.x);
}
