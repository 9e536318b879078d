// The frame of every matrix kernel: fill the rings, prepare the activations meanwhile, stream the tiles, add the warps'
// partial sums in warp order, finish a tile.
//
// A tile is computed by one block, its K range by fixed warps: the grid decides who computes a tile and when, never
// what comes out. The block's shared memory is laid out here and sized by kernels/geometry.py, which must agree.
#pragma once

#include "tile.cuh"

extern __shared__ uint4 shared_memory[];

constexpr u32 NOTHING_LOADED = 0xFFFFFFFFu;

// Dynamic shared memory: rings, their scale bytes, two sets of partial sums, activations, activation scales.
template <class F>
struct SharedLayout {
    static constexpr u32 SCALES = WARPS * RING * SLOT_NBYTES;
    static constexpr u32 PARTIAL = SCALES + WARPS * F::SCALE_RING * F::SCALES_NBYTES;
    static constexpr u32 VALUES = PARTIAL + 2 * WARPS * F::ROWS * 4;

    __device__ static __forceinline__ u8* base() { return reinterpret_cast<u8*>(shared_memory); }
    __device__ static __forceinline__ float* partial() { return reinterpret_cast<float*>(base() + PARTIAL); }
    __device__ static __forceinline__ Activations activations(u32 steps) {
        return {base() + VALUES, reinterpret_cast<float*>(base() + VALUES + steps * F::VALUES_NBYTES)};
    }
};

// What a kernel multiplies, MATRICES of the same shape at a time (tile n of all of them goes to the same warps' group):
//   u32 row_nbytes()                            bytes of a matrix row
//   bool MANY_SETS, u32 sets()                  matrices with activations of their own, which a block does in turn
//   u32 tiles()                                 tiles of a set (and matrix)
//   Tile tile(u32 set, u32 tile, u32 matrix)
//   void load(Activations, u32 steps, u32 set)  activations of a set, by the whole block, no barrier needed at the end
//   void finish(u32 set, u32 tile, u32 lane, float y)   by one warp; lane ROWS * m + r has row r of matrix m, and lanes
//                                                       from ROWS * MATRICES on have nothing that is new
// Base of such a description, for the usual case.
template <class Format, u32 N = 1>
struct Product {
    using F = Format;
    static constexpr u32 ROWS = F::ROWS;
    static constexpr u32 MATRICES = N;
    static constexpr bool MANY_SETS = false;
    __device__ __forceinline__ u32 sets() const { return 1; }
};

// What the ring needs to know: the tile of a unit for one warp.
template <class P>
struct TilesOfWarp {
    P product;
    u32 chunks, tiles, group, matrix;

    __device__ __forceinline__ u32 set(u32 unit) const { return P::MANY_SETS ? unit / chunks : 0; }
    __device__ __forceinline__ u32 number(u32 unit) const {
        return (P::MANY_SETS ? unit % chunks : unit) * tiles + group;
    }
    __device__ __forceinline__ bool tile(u32 unit, Tile& out) const {
        u32 n = number(unit);
        if (n >= product.tiles()) return false;
        out = product.tile(set(unit), n, matrix);
        return true;
    }
};

// Does the share of block `block` out of `blocks`. All threads of the block call it; `blocks` may be any number.
template <class P>
__device__ __forceinline__ void multiply(const P& product, u32 block, u32 blocks) {
    using F = typename P::F;
    using Layout = SharedLayout<F>;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Split split = split_product(product.row_nbytes(), F::STEP_NBYTES, P::MATRICES, product.sets(), product.tiles());
    u32 team = P::MATRICES << split.parts_log2;  // warps of a tile
    u32 member = warp & (team - 1), group = warp / team;
    Units units = {block, split.units, blocks};
    if (P::MANY_SETS) units = consecutive_units(split.units, block, blocks);
    if (units.begin >= units.end) return;

    TilesOfWarp<P> source{product, split.chunks, split.tiles, group, member >> split.parts_log2};
    u32 slots = shared_address(Layout::base()) + warp * (RING * SLOT_NBYTES);
    u32 scales = shared_address(Layout::base() + Layout::SCALES) + warp * (F::SCALE_RING * F::SCALES_NBYTES);
    Ring<F, TilesOfWarp<P>> ring;
    ring.start(source, split, member & (split.parts - 1), units, slots, scales);

    F format;
    format.init();
    Activations x = Layout::activations(split.steps);
    float* partial = Layout::partial();
    u32 loaded = NOTHING_LOADED, turn = 0;
    for (u32 unit = units.begin; unit < units.end; unit += units.stride) {
        u32 set = source.set(unit), number = source.number(unit);
        if (set != loaded) {
            if (loaded != NOTHING_LOADED) __syncthreads();
            product.load(x, split.steps, set);
            __syncthreads();
            loaded = set;
        }
        if (number >= product.tiles()) continue;

        float acc[4] = {};
        for (u32 step = ring.first_step(); step < ring.last_step(); step++) {
            ring.acquire();
            format.step(acc, ring.slot(), ring.scales(), x, step);
            ring.release();
        }

        F::store_sums(partial + warp * F::ROWS, acc);
        // One meeting a tile is enough: the other set of sums is written next, and whoever finishes this tile comes to
        // the next meeting only afterwards. The warps of a team take turns.
        if (team == 1) {
            __syncwarp();
        } else {
            named_barrier(1 + group, 32 * team);
        }
        if (member == (turn++ & (team - 1))) {
            u32 first = (group * P::MATRICES + lane / F::ROWS % P::MATRICES) << split.parts_log2;
            const float* sums = partial + first * F::ROWS + lane % F::ROWS;
            float y = sums[0];
            for (u32 i = 1; i < split.parts; i++) y += sums[i * F::ROWS];
            product.finish(set, number, lane, y);
        }
        partial = Layout::partial() + (partial == Layout::partial() ? WARPS * F::ROWS : 0);
    }
    wait_copies<0>();
}
