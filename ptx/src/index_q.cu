// The indexer's queries of a token, rotated and on the FP4 grid, and its head weights.

#include "activations.cuh"
#include "product.cuh"
#include "rope.cuh"

// A group of 32 that is quantised together is two tiles: the "matrices" are the even and the odd tiles of one.
struct IndexQ : Product<Fp8, 2> {
    const u16* qr;
    const u8 *wq_b, *s;
    const float* rope;
    u16* q;
    u32 q_rank, rows, index_dim, rope_dim;

    __device__ __forceinline__ u32 row_nbytes() const { return q_rank; }
    __device__ __forceinline__ u32 tiles() const { return rows / 32; }
    __device__ __forceinline__ Tile tile(u32, u32 tile, u32 half) const {
        return {wq_b, s, tile * 32 + half * ROWS, rows};
    }
    __device__ __forceinline__ void load(Activations to, u32 steps, u32) const {
        fill_bf16<Fp8>(to, qr, q_rank, steps);
    }
    __device__ __forceinline__ void finish(u32, u32 tile, u32 lane, float sum) const {
        u32 row = tile * 32 + lane;
        float x = round_bf16(rotate_row(round_bf16(sum), row % index_dim, index_dim, rope_dim, rope));
        u32 amax = __reduce_max_sync(FULL_WARP, magnitude(x));
        q[row] = to_bf16(through_fp4(x, fp4_pow2_scale(amax)));
    }
};

struct IndexOmega : Product<Bf16> {
    const u16* normed;
    const u8* wproj;
    u16* omega;
    u32 dim, index_heads;
    float factor;

    __device__ __forceinline__ u32 row_nbytes() const { return 2 * dim; }
    __device__ __forceinline__ u32 tiles() const { return (index_heads + ROWS - 1) / ROWS; }
    __device__ __forceinline__ Tile tile(u32, u32 tile, u32) const {
        return {wproj, nullptr, tile * ROWS, index_heads};
    }
    __device__ __forceinline__ void load(Activations to, u32 steps, u32) const { fill_plain(to, normed, dim, steps); }
    __device__ __forceinline__ void finish(u32, u32 tile, u32 lane, float sum) const {
        u32 row = tile * ROWS + lane;
        if (lane < ROWS && row < index_heads) omega[row] = to_bf16(round_bf16(sum) * factor);
    }
};

// The last blocks, one a tile, make the head weights, the others the queries.
extern "C" __global__ void __launch_bounds__(BLOCK, 2) ds41_index_q(
    const u16* __restrict__ qr,      // bf16 [q_rank]
    const u8* __restrict__ wq_b,     // e4m3 [index_heads * index_dim][q_rank]
    const u8* __restrict__ s,        // e8m0 [index_heads * index_dim / 32][q_rank/32]
    const u16* __restrict__ normed,  // bf16 [dim]
    const u8* __restrict__ wproj,    // bf16 [index_heads][dim]
    const float* __restrict__ rope,  // cosines, sines [rope_dim]
    u16* __restrict__ q,             // bf16 [index_heads][index_dim]
    u16* __restrict__ omega,         // bf16 [index_heads]
    u32 q_rank,
    u32 dim,
    u32 index_heads,
    u32 index_dim,
    u32 rope_dim) {
    u32 omega_blocks = (index_heads + IndexOmega::ROWS - 1) / IndexOmega::ROWS;
    omega_blocks = omega_blocks < gridDim.x ? omega_blocks : gridDim.x - 1;
    u32 workers = gridDim.x - omega_blocks;
    if (blockIdx.x < workers) {
        multiply(IndexQ{{}, qr, wq_b, s, rope, q, q_rank, index_heads * index_dim, index_dim, rope_dim}, blockIdx.x,
                 workers);
        if (omega_blocks > 0) return;
        __syncthreads();
    }
    double factor = 1.0 / sqrt(static_cast<double>(index_dim)) * (1.0 / sqrt(static_cast<double>(index_heads)));
    multiply(IndexOmega{{}, normed, wproj, omega, dim, index_heads, static_cast<float>(factor)},
             omega_blocks > 0 ? blockIdx.x - workers : 0, omega_blocks > 0 ? omega_blocks : 1);
}
