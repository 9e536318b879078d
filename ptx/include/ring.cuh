// The stream of weights: every warp copies its own share of its tiles into a ring of its own and reads it back.
//
// A step is 16 rows x 128 bytes or 8 rows x 256 bytes, as the format says. With g = lane / 4 and t = lane % 4 a lane
// copies of row g the 16-byte chunks t and t+4, and the same of row g+8 or, with 8 rows, of row g 128 bytes further:
// exactly the bytes that it feeds to the tensor core later. So no barrier guards the weights, only the scale bytes
// (copied by some lanes, read by others) need the warp to agree. Copies run RING steps ahead and across tiles.
#pragma once

#include "formats.cuh"
#include "mma.cuh"

constexpr u32 WARPS = 8;
constexpr u32 BLOCK = 32 * WARPS;
constexpr u32 RING = 4;
constexpr u32 NOMINAL_BLOCKS = 128;  // a power of two near the number of multiprocessors of a large device
constexpr u32 CHUNKS_NBYTES = 32 * 16;  // one chunk of every lane
constexpr u32 SLOT_NBYTES = 4 * CHUNKS_NBYTES;

// Some rows of a matrix: row numbers `first` and up; those from `end` on do not exist.
struct Tile {
    const u8* weight;
    const u8* scale;
    u32 first, end;
};

// How a product is shared out, by its shape alone: the K range of a tile goes to `parts` warps in equal runs of steps;
// a block's warps work on `tiles` tiles (of `matrices` matrices each) side by side: a unit. `units` are all there are.
struct Split {
    u32 row_nbytes, steps, parts_log2, parts, tiles, chunks, units;
};

// `set_tiles` tiles in each of `sets` sets. Of the powers of two the number of parts that ends first on a device of
// nominal size, every warp taking as many steps as the longest run; of equals the largest.
__device__ __forceinline__ Split split_product(u32 row_nbytes, u32 step_nbytes, u32 matrices, u32 sets, u32 set_tiles) {
    Split best = {};
    u32 best_steps = 0xFFFFFFFFu;
#pragma unroll
    for (u32 parts_log2 = 0; (matrices << parts_log2) <= WARPS; parts_log2++) {
        Split s;
        s.row_nbytes = row_nbytes;
        s.steps = (row_nbytes + step_nbytes - 1) / step_nbytes;
        s.parts_log2 = parts_log2;
        s.parts = 1u << parts_log2;
        s.tiles = WARPS / matrices >> parts_log2;
        s.chunks = (set_tiles + s.tiles - 1) / s.tiles;
        s.units = sets * s.chunks;
        u32 rounds = (s.units + NOMINAL_BLOCKS - 1) / NOMINAL_BLOCKS;
        u32 steps = rounds * ((s.steps + s.parts - 1) >> parts_log2);
        if (s.parts <= s.steps && steps <= best_steps) {
            best = s;
            best_steps = steps;
        }
    }
    return best;
}

// The units of work that a block does.
struct Units {
    u32 begin, end, stride;
};

// Consecutive units, as many as any other block or one more: for work whose order matters.
__device__ __forceinline__ Units consecutive_units(u32 units, u32 block, u32 blocks) {
    u32 each = units / blocks, extra = units % blocks;
    u32 begin = block * each + (block < extra ? block : extra);
    return {begin, begin + each + (block < extra ? 1u : 0u), 1};
}

// One warp's ring. F is the format (tile.cuh); `Source` gives a unit's tile: `bool tile(u32 unit, Tile&)`, false where
// this warp has none.
template <class F, class Source>
class Ring {
  public:
    // `slots` and `scales`: this warp's shared memory. Begins the first RING copies.
    __device__ __forceinline__ void start(
        const Source& source, Split split, u32 part, Units units, u32 slots, u32 scales) {
        source_ = source;
        row_nbytes_ = split.row_nbytes;
        whole_ = split.row_nbytes % F::STEP_NBYTES == 0;
        first_step_ = part * split.steps >> split.parts_log2;
        last_step_ = (part + 1) * split.steps >> split.parts_log2;
        units_ = units;
        slots_ = slots;
        scales_ = scales;
        fill_ = 0;
        drain_ = 0;
        open_tile();
#pragma unroll
        for (u32 i = 0; i < RING; i++) fetch();
    }

    // Waits for the oldest step. Its slot and scale bytes may be read until `release`.
    __device__ __forceinline__ void acquire() {
        wait_copies<RING - 1>();
        __syncwarp();
    }

    __device__ __forceinline__ u32 slot() const { return slots_ + drain_ % RING * SLOT_NBYTES; }
    __device__ __forceinline__ u32 scales() const { return scales_ + drain_ * F::SCALES_NBYTES; }

    // Gives the oldest slot to the next copy. Everything read from it must be in registers.
    __device__ __forceinline__ void release() {
        __syncwarp();
        drain_ = (drain_ + 1) % F::SCALE_RING;
        fetch();
    }

    __device__ __forceinline__ u32 first_step() const { return first_step_; }
    __device__ __forceinline__ u32 last_step() const { return last_step_; }

  private:
    // Finds the next unit in which this warp has a tile and points at its first step.
    __device__ __forceinline__ void open_tile() {
        Tile tile;
        while (units_.begin < units_.end && !source_.tile(units_.begin, tile)) units_.begin += units_.stride;
        if (units_.begin >= units_.end) return;
        u32 lane = threadIdx.x % 32, offset = first_step_ * F::STEP_NBYTES + lane % 4 * 16;
        u32 low = tile.first + lane / 4, high = low + F::HIGH_ROW;
        // Rows past the end are copied from the last one and their results dropped.
        low = low < tile.end ? low : tile.end - 1;
        high = high < tile.end ? high : tile.end - 1;
        low_ = tile.weight + static_cast<u64>(low) * row_nbytes_ + offset;
        high_ = tile.weight + static_cast<u64>(high) * row_nbytes_ + offset + F::HIGH_NBYTES;
        scale_low_ = F::scale_pointer(tile, row_nbytes_, first_step_, low);
        scale_high_ = F::scale_pointer(tile, row_nbytes_, first_step_, high);
        step_ = first_step_;
    }

    __device__ __forceinline__ void fetch() {
        if (units_.begin < units_.end) {
            u32 to = slots_ + fill_ % RING * SLOT_NBYTES + threadIdx.x % 32 * 16;
            if (whole_) {
                copy16(to, low_);
                copy16(to + CHUNKS_NBYTES, low_ + 64);
                copy16(to + 2 * CHUNKS_NBYTES, high_);
                copy16(to + 3 * CHUNKS_NBYTES, high_ + 64);
                F::copy_scales(scales_, fill_, scale_low_, scale_high_, step_, step_ == first_step_, last_step_);
            } else {
                u32 at = step_ * F::STEP_NBYTES + threadIdx.x % 4 * 16;
                copy_padded(to, low_, at);
                copy_padded(to + CHUNKS_NBYTES, low_ + 64, at + 64);
                copy_padded(to + 2 * CHUNKS_NBYTES, high_, at + F::HIGH_NBYTES);
                copy_padded(to + 3 * CHUNKS_NBYTES, high_ + 64, at + F::HIGH_NBYTES + 64);
                F::store_scales(scales_ + fill_ * F::SCALES_NBYTES, scale_low_, scale_high_, step_, row_nbytes_);
            }
            low_ += F::STEP_NBYTES;
            high_ += F::STEP_NBYTES;
            scale_low_ += F::SCALES_A_ROW;
            scale_high_ += F::SCALES_A_ROW;
            if (++step_ == last_step_) {
                units_.begin += units_.stride;
                open_tile();
            }
        }
        close_copies();
        fill_ = (fill_ + 1) % F::SCALE_RING;
    }

    // Rows are multiples of 16 bytes: a chunk lies inside its row or outside.
    __device__ __forceinline__ void copy_padded(u32 to, const u8* from, u32 at) const {
        bool inside = at < row_nbytes_;
        copy16_padded(to, inside ? from : from - at % F::STEP_NBYTES, inside ? 16u : 0u);
    }

    Source source_;
    const u8 *low_, *high_, *scale_low_, *scale_high_;
    u32 row_nbytes_, first_step_, last_step_, step_;
    Units units_;  // those not copied yet
    u32 slots_, scales_, fill_, drain_;  // fill and drain count modulo the scale bytes' ring, a multiple of RING
    bool whole_;
};
