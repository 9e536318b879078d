// The projections around attention: low-rank q and kv, the q heads with the window row, the grouped output.

#include "activations.cuh"
#include "product.cuh"
#include "rope.cuh"

struct AttnQkvA : Product<Fp8> {
    const u16* normed;
    const u8 *wq_a, *sq_a, *wkv, *skv;
    u16 *qa, *kv;
    u32 dim, q_rank, head_dim;

    __device__ __forceinline__ u32 row_nbytes() const { return dim; }
    __device__ __forceinline__ u32 q_tiles() const { return (q_rank + ROWS - 1) / ROWS; }
    __device__ __forceinline__ u32 tiles() const { return q_tiles() + (head_dim + ROWS - 1) / ROWS; }
    __device__ __forceinline__ Tile tile(u32, u32 tile, u32) const {
        if (tile < q_tiles()) return {wq_a, sq_a, tile * ROWS, q_rank};
        return {wkv, skv, (tile - q_tiles()) * ROWS, head_dim};
    }
    __device__ __forceinline__ void load(Activations to, u32 steps, u32) const {
        fill_bf16<Fp8>(to, normed, dim, steps);
    }
    __device__ __forceinline__ void finish(u32, u32 tile, u32 lane, float sum) const {
        bool is_q = tile < q_tiles();
        u32 row = (is_q ? tile : tile - q_tiles()) * ROWS + lane;
        if (lane < ROWS && row < (is_q ? q_rank : head_dim)) (is_q ? qa : kv)[row] = to_bf16(sum);
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK, 2) ds41_attn_qkv_a(
    const u16* __restrict__ normed,  // bf16 [dim]
    const u8* __restrict__ wq_a,     // e4m3 [q_rank][dim]
    const u8* __restrict__ sq_a,     // e8m0 [q_rank/32][dim/32]
    const u8* __restrict__ wkv,      // e4m3 [head_dim][dim]
    const u8* __restrict__ skv,      // e8m0 [head_dim/32][dim/32]
    u16* __restrict__ qa,            // bf16 [q_rank]
    u16* __restrict__ kv,            // bf16 [head_dim]
    u32 dim,
    u32 q_rank,
    u32 head_dim) {
    multiply(AttnQkvA{{}, normed, wq_a, sq_a, wkv, skv, qa, kv, dim, q_rank, head_dim}, blockIdx.x, gridDim.x);
}

struct NormRow {
    uint4 x, weight;
};

struct AttnQ : Product<Fp8> {
    const u16 *qa, *q_norm;
    const u8 *wq_b, *sq_b;
    const float* rope;
    u16 *qr, *q;
    u32 q_rank, rows, head_dim, rope_dim;
    float eps;

    __device__ __forceinline__ u32 row_nbytes() const { return q_rank; }
    __device__ __forceinline__ u32 tiles() const { return (rows + ROWS - 1) / ROWS; }
    __device__ __forceinline__ Tile tile(u32, u32 tile, u32) const { return {wq_b, sq_b, tile * ROWS, rows}; }

    // Every block norms for itself; one of them stores the result.
    __device__ __forceinline__ void load(Activations to, u32 steps, u32) const {
        float inverse = block_inverse_rms(qa, q_rank, eps, SharedLayout<Fp8>::partial());
        const u16 *from = qa, *weight = q_norm;
        u16* out = blockIdx.x == 0 ? qr : nullptr;
        fill_quantised<Fp8, ActQuant, NormRow>(
            to, q_rank, steps,
            [=](u32 at) {
                auto at_16 = [=](const u16* p) { return *reinterpret_cast<const uint4*>(p + at); };
                return NormRow{at_16(from), at_16(weight)};
            },
            [=](NormRow raw, u32 at, float(&v)[RUN]) {
                unpack_bf16(raw.x, v);
                norm8(v, inverse, raw.weight);
                if (out) *reinterpret_cast<uint4*>(out + at) = pack8_bf16(v);
            });
    }

    __device__ __forceinline__ void finish(u32, u32 tile, u32 lane, float sum) const {
        u32 row = tile * ROWS + lane % ROWS;
        float x = rotate_row(round_bf16(sum), row % head_dim, head_dim, rope_dim, rope);
        if (lane < ROWS && row < rows) q[row] = to_bf16(x);
    }
};

// The token's row of the window ring: normed, rotated, through the FP8 grid and back.
__device__ __forceinline__ void store_window_row(
    const u16* kv, const u16* kv_norm, const float* rope, u16* row, u32 head_dim, u32 rope_dim, float eps,
    float* scratch) {
    float inverse = block_inverse_rms(kv, head_dim, eps, scratch);
    for (u32 base = threadIdx.x / 32 * 32 * RUN; base < head_dim; base += PASS) {
        u32 at = base + threadIdx.x % 32 * RUN;
        float v[RUN] = {};
        if (at < head_dim) {
            unpack_bf16(*reinterpret_cast<const uint4*>(kv + at), v);
            norm8(v, inverse, *reinterpret_cast<const uint4*>(kv_norm + at));
#pragma unroll
            for (u32 i = 0; i < RUN; i += 2) {
                if (at + i < head_dim - rope_dim) continue;
                u32 pair = (at + i - (head_dim - rope_dim)) / 2;
                Pair turned = rotate({v[i], v[i + 1]}, rope[pair], rope[rope_dim / 2 + pair]);
                v[i] = round_bf16(turned.a);
                v[i + 1] = round_bf16(turned.b);
            }
        }
        float scale = ActQuant::quantise(v);
        if (at >= head_dim) continue;
#pragma unroll
        for (u32 i = 0; i < RUN; i++) v[i] *= scale;
        *reinterpret_cast<uint4*>(row + at) = pack8_bf16(v);
    }
}

// The last block writes the window row, the others the heads.
extern "C" __global__ void __launch_bounds__(BLOCK, 2) ds41_attn_q(
    const u16* __restrict__ qa,       // bf16 [q_rank]
    const u16* __restrict__ q_norm,   // bf16 [q_rank]
    const u8* __restrict__ wq_b,      // e4m3 [heads * head_dim][q_rank]
    const u8* __restrict__ sq_b,      // e8m0 [heads * head_dim / 32][q_rank/32]
    const u16* __restrict__ kv,       // bf16 [head_dim]
    const u16* __restrict__ kv_norm,  // bf16 [head_dim]
    const float* __restrict__ rope,   // cosines, sines [rope_dim]
    const int* __restrict__ step,     // position, token
    const u64* __restrict__ ring_cell,
    u16* __restrict__ qr,  // bf16 [q_rank]
    u16* __restrict__ q,   // bf16 [heads][head_dim]
    u32 q_rank,
    u32 heads,
    u32 head_dim,
    u32 rope_dim,
    u32 window,
    float eps) {
    u32 workers = gridDim.x > 1 ? gridDim.x - 1 : 1;
    if (blockIdx.x == gridDim.x - 1) {
        u32 slot = static_cast<u32>(step[0]) % window;
        u16* row = reinterpret_cast<u16*>(ring_cell[0]) + static_cast<u64>(slot) * head_dim;
        store_window_row(kv, kv_norm, rope, row, head_dim, rope_dim, eps, SharedLayout<Fp8>::partial());
    }
    if (blockIdx.x >= workers) return;
    multiply(AttnQ{{}, qa, q_norm, wq_b, sq_b, rope, qr, q, q_rank, heads * head_dim, head_dim, rope_dim, eps},
             blockIdx.x, workers);
}

// e4m3 weights with bf16 activations: a set is a group of heads. Nothing is quantised; see FitF16.
struct AttnWoA : Product<Fp8> {
    static constexpr bool MANY_SETS = true;

    const u16* o;
    const u8 *w, *s;
    u16* u;
    u32 groups, rank, k;

    __device__ __forceinline__ u32 row_nbytes() const { return k; }
    __device__ __forceinline__ u32 sets() const { return groups; }
    __device__ __forceinline__ u32 tiles() const { return (rank + ROWS - 1) / ROWS; }
    __device__ __forceinline__ Tile tile(u32 group, u32 tile, u32) const {
        return {w, s, group * rank + tile * ROWS, group * rank + rank};
    }
    __device__ __forceinline__ void load(Activations to, u32 steps, u32 group) const {
        fill_bf16<Fp8, FitF16>(to, o + static_cast<u64>(group) * k, k, steps);
    }
    __device__ __forceinline__ void finish(u32 group, u32 tile, u32 lane, float sum) const {
        u32 row = tile * ROWS + lane;
        if (lane < ROWS && row < rank) u[group * rank + row] = to_bf16(sum);
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK, 2) ds41_attn_wo_a(
    const u16* __restrict__ o,  // bf16 [groups][k]
    const u8* __restrict__ w,   // e4m3 [groups * rank][k]
    const u8* __restrict__ s,   // e8m0 [groups * rank / 32][k/32]
    u16* __restrict__ u,        // bf16 [groups * rank]
    u32 groups,
    u32 rank,
    u32 k) {
    multiply(AttnWoA{{}, o, w, s, u, groups, rank, k}, blockIdx.x, gridDim.x);
}
