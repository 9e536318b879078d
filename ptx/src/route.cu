// The selection of experts, the plan, and what is derived from both: header, weights and pointer table. One block, one
// thread an expert. Every result is bit for bit that of kernels/router.py: each operation is rounded separately.

#include "device.cuh"
#include "softplus.cuh"

constexpr u32 MAX_WARPS = 32, MAX_TOP_K = 8;
constexpr u32 FLAG_MISS = 1, FLAG_NOT_FINITE = 2;
constexpr u32 HOST_SLOT_BIT = 1u << 30;

// An integer that orders like the key: +0 and -0 are equal, NaN counts as -inf, and 0 is below everything.
__device__ __forceinline__ u32 ordered(float key) {
    if (key != key) key = minus_infinity();
    u32 bits = key == 0.0f ? 0u : __float_as_uint(key);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ bool finite(float x) { return (__float_as_uint(x) & 0x7F800000u) != 0x7F800000u; }

extern "C" __global__ void __launch_bounds__(1024) ds41_route_select(
    const float* __restrict__ logits,
    const float* __restrict__ bias,
    const int* __restrict__ slot_row,
    int* __restrict__ header,  // [flags | top_k picks | top_k weight bits | top_k slot codes in plan order]
    float* __restrict__ weight_dev,
    int* __restrict__ rows_dev,
    u64* __restrict__ ptrs_dev,  // [3][top_k]
    u32 n_experts,
    u32 top_k,
    float temperature,
    float route_scale,
    u32 normalise,
    u64 dev_base,
    u64 host_base,
    u64 slot_nbytes,
    u64 gate_off,
    u64 up_off,
    u64 down_off) {
    __shared__ float scores[32 * MAX_WARPS];
    __shared__ int codes[32 * MAX_WARPS];
    // Every warp's best, best first: keys and expert ids.
    __shared__ u32 best_key[MAX_WARPS][MAX_TOP_K], best_id[MAX_WARPS][MAX_TOP_K];
    u32 e = threadIdx.x, warp = e / 32, lane = e % 32, warps = blockDim.x / 32;

    u32 key = 0;
    bool nan = false;
    if (e < n_experts) {
        float logit = logits[e];
        nan = logit != logit;
        float score = route_sqrt_softplus(logit / temperature);
        scores[e] = score;
        codes[e] = slot_row[e];
        key = ordered(score + bias[e]);
    }
    // Lanes stand in the order of ids, so the lowest lane among equals is the lowest id. A warp with fewer experts than
    // picks goes on with keys of 0, which no expert has.
    for (u32 i = 0; i < top_k; i++) {
        u32 top = __reduce_max_sync(FULL_WARP, key);
        u32 winner = __ffs(__ballot_sync(FULL_WARP, key == top)) - 1;
        if (lane == winner) {
            best_key[warp][i] = top;
            best_id[warp][i] = e;
            key = 0;
        }
    }
    bool any_nan = __syncthreads_or(nan);
    if (warp > 0) return;

    // One warp: lane w stands for warp w and shows the best that this one has left.
    u32 shown = 0, pick = 0;
    key = lane < warps ? best_key[lane][0] : 0;
    for (u32 i = 0; i < top_k; i++) {
        u32 top = __reduce_max_sync(FULL_WARP, key);
        u32 winner = __ffs(__ballot_sync(FULL_WARP, key == top)) - 1;
        u32 id = 0;
        if (lane == winner) {
            id = best_id[lane][shown++];
            key = shown < top_k ? best_key[lane][shown] : 0;
        }
        id = __shfl_sync(FULL_WARP, id, winner);
        if (lane == i) pick = id;
    }

    // Lane i < top_k holds pick i from here on.
    bool picked = lane < top_k;
    float weight = picked ? scores[pick] : 0.0f;
    if (normalise) {
        float total = __shfl_sync(FULL_WARP, weight, 0);
        for (u32 i = 1; i < top_k; i++) total += __shfl_sync(FULL_WARP, weight, i);
        weight = weight / (total + 1e-20f);
    }
    weight *= route_scale;
    u32 place = 0;  // in ascending order of ids
    for (u32 i = 0; i < top_k; i++) place += __shfl_sync(FULL_WARP, pick, i) < pick;

    int code = picked ? codes[pick] : 1;
    bool miss = __any_sync(FULL_WARP, code < 1);
    bool not_finite = __any_sync(FULL_WARP, picked && !finite(weight)) || any_nan;
    if (lane == 0) header[0] = (miss ? FLAG_MISS : 0) | (not_finite ? FLAG_NOT_FINITE : 0);
    if (!picked) return;
    header[1 + lane] = pick;
    header[1 + top_k + lane] = __float_as_int(weight);
    header[1 + 2 * top_k + place] = code;
    weight_dev[place] = weight;
    rows_dev[place] = 0;
    u32 slot = code > 0 ? code : 0;
    u64 base = slot & HOST_SLOT_BIT ? host_base + (slot ^ HOST_SLOT_BIT) * slot_nbytes : dev_base + slot * slot_nbytes;
    ptrs_dev[place] = base + gate_off;
    ptrs_dev[top_k + place] = base + up_off;
    ptrs_dev[2 * top_k + place] = base + down_off;
}
