// One step of weights against the activations on the tensor core, for the three weight formats.
//
// The weights are the 16x16 operand: its rows are matrix rows. The order of K inside a step is free as long as both
// operands agree, so a lane's words are taken as they lie. The activations are the 16x8 operand, *block-diagonal*:
// column n is zero except where the rows belong to K block n. One accumulator tile therefore holds up to eight separate
// dots over 32 values, which are scaled one by one: acc += dot * act scale * weight scale.
//
// A lane's entries of that operand are zero except in one place that is the same in every step. They live in registers
// that start as zero, and a predicated load refreshes the few that are not.
#pragma once

#include "ring.cuh"

// The activations of a product in shared memory: values in the order of the format, one scale per 32.
struct Activations {
    u8* values;
    float* scales;
};

__device__ __forceinline__ u32 word_of(uint4 x, u32 i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

__device__ __forceinline__ u32 lane_group() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ u32 lane_in_group() { return threadIdx.x % 4; }

__device__ __forceinline__ float sum_of_four_lanes(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

// Sixteen rows x 128 bytes: the lanes' second halves are those of rows g+8.
struct SixteenRows {
    static constexpr u32 ROWS = 16;
    static constexpr u32 STEP_NBYTES = 128;
    static constexpr u32 HIGH_ROW = 8;
    static constexpr u32 HIGH_NBYTES = 0;

    // Adds up the columns of a warp's accumulators, one sum a row.
    __device__ static __forceinline__ void store_sums(float* sums, const float (&acc)[4]) {
        float low = sum_of_four_lanes(acc[0] + acc[1]), high = sum_of_four_lanes(acc[2] + acc[3]);
        if (lane_in_group() != 0) return;
        sums[lane_group()] = low;
        sums[lane_group() + 8] = high;
    }
};

// e4m3 codes, a scale byte per 32x32 tile. A step is 128 K: blocks 0, 1 are the lanes' first chunks (lanes t = 0, 1 and
// t = 2, 3), blocks 2, 3 their second ones. Words 0, 2 of a chunk go to columns 0-3, words 1, 3 to columns 4-7.
struct Fp8 : SixteenRows {
    static constexpr u32 K_STEP = 128;
    static constexpr u32 VALUES_NBYTES = 2 * K_STEP;  // of activations, a step
    static constexpr u32 SCALES_A_ROW = K_STEP / 32;
    static constexpr u32 SCALES_NBYTES = SCALES_A_ROW;
    static constexpr u32 SCALE_RING = RING;
    static constexpr float UNIT = E4M3_UNIT;

    u32 x_[4][4];
    u32 mine_, offset_;

    __device__ __forceinline__ void init() {
        u32 g = lane_group(), t = lane_in_group();
        u32 chunk = g >> 1 & 1u, odd = g >> 2;
        mine_ = t >> 1 == (g & 1u) ? 2 * chunk + odd : 4u;
        offset_ = chunk * 128 + t * 32 + odd * 16;
#pragma unroll
        for (u32 i = 0; i < 16; i++) x_[i / 4][i % 4] = 0;
    }

    __device__ __forceinline__ void step(float (&acc)[4], u32 slot, u32 scales, const Activations& x, u32 step) {
        u32 from = shared_address(x.values) + step * VALUES_NBYTES + offset_;
#pragma unroll
        for (u32 i = 0; i < 4; i++) load_shared16_where(mine_ == i, x_[i], from);
        slot += threadIdx.x % 32 * 16;
        float dots[2][4] = {};
#pragma unroll
        for (u32 chunk = 0; chunk < 2; chunk++) {
            uint4 low = load_shared16(slot + chunk * CHUNKS_NBYTES);
            uint4 high = load_shared16(slot + (2 + chunk) * CHUNKS_NBYTES);
#pragma unroll
            for (u32 word = 0; word < 4; word++) {
                u32 a0, a1, a2, a3;
                decode_e4m3(word_of(low, word), a0, a2);
                decode_e4m3(word_of(high, word), a1, a3);
                const u32(&b)[4] = x_[2 * chunk + word % 2];
                mma_f16(dots[chunk], a0, a1, a2, a3, b[word / 2 * 2], b[word / 2 * 2 + 1]);
            }
        }
        u32 block = lane_in_group() % 2 * 2;
        float w0 = e8m0(load_shared_u8(scales + block)), w1 = e8m0(load_shared_u8(scales + block + 1));
        const float* act = x.scales + step * SCALES_A_ROW + block;
        acc[0] += (dots[0][0] + dots[1][0]) * act[0] * w0;
        acc[1] += (dots[0][1] + dots[1][1]) * act[1] * w1;
        acc[2] += (dots[0][2] + dots[1][2]) * act[0] * w0;
        acc[3] += (dots[0][3] + dots[1][3]) * act[1] * w1;
    }

    __device__ static __forceinline__ const u8* scale_pointer(const Tile& tile, u32 row_nbytes, u32 step, u32) {
        return tile.scale + static_cast<u64>(tile.first / 32) * (row_nbytes / 32) + step * SCALES_A_ROW;
    }

    __device__ static __forceinline__ void copy_scales(
        u32 ring, u32 fill, const u8* from, const u8*, u32, bool, u32) {
        if (threadIdx.x % 32 == 0) copy4(ring + fill * SCALES_NBYTES, from);
    }

    __device__ static __forceinline__ void store_scales(u32 to, const u8* from, const u8*, u32 step, u32 row_nbytes) {
        u32 i = threadIdx.x % 32;
        if (i < SCALES_A_ROW) store_shared_u8(to + i, step * SCALES_A_ROW + i < row_nbytes / 32 ? from[i] : 0u);
    }

    // Stores eight activations of positions k, k+1, ... (k a multiple of 8).
    __device__ static __forceinline__ void store(const Activations& x, u32 k, const float (&v)[8]) {
        u8* to = x.values + 2 * (k & ~15u) + (k & 8u);
        *reinterpret_cast<uint2*>(to) = {pack_f16(v[0], v[2]), pack_f16(v[1], v[3])};
        *reinterpret_cast<uint2*>(to + 16) = {pack_f16(v[4], v[6]), pack_f16(v[5], v[7])};
    }
};

// e2m1 codes, a scale byte per row and 32. A step is 256 K: a chunk is one block, column n is block n.
struct Fp4 : SixteenRows {
    static constexpr u32 K_STEP = 256;
    static constexpr u32 VALUES_NBYTES = 2 * K_STEP;
    static constexpr u32 SCALES_A_ROW = K_STEP / 32;
    static constexpr u32 SCALES_NBYTES = ROWS * SCALES_A_ROW;
    // Memory gives 32 bytes at a time, which are the scales of four steps of a row: they are copied together, so that
    // host memory, which no cache holds, is read once. Twice the ring, because a copy reaches three steps ahead.
    static constexpr u32 SCALE_STEPS = 32 / SCALES_A_ROW;
    static constexpr u32 SCALE_RING = 2 * RING;
    static constexpr float UNIT = E2M1_UNIT;

    u32 x_[2][2][4];
    u32 mine_, offset_;

    __device__ __forceinline__ void init() {
        u32 g = lane_group();
        mine_ = g % 4 == lane_in_group() ? g / 4 : 2u;
        offset_ = g * 64;
#pragma unroll
        for (u32 i = 0; i < 16; i++) x_[i / 8][i / 4 % 2][i % 4] = 0;
    }

    __device__ __forceinline__ void step(float (&acc)[4], u32 slot, u32 scales, const Activations& x, u32 step) {
        u32 from = shared_address(x.values) + step * VALUES_NBYTES + offset_;
        slot += threadIdx.x % 32 * 16;
        uint4 low4[2], high4[2];
#pragma unroll
        for (u32 chunk = 0; chunk < 2; chunk++) {
            low4[chunk] = load_shared16(slot + chunk * CHUNKS_NBYTES);
            high4[chunk] = load_shared16(slot + (2 + chunk) * CHUNKS_NBYTES);
        }
        float dots[2][4] = {};
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            // In halves, for want of registers.
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                load_shared16_where(mine_ == i % 2, x_[i % 2][i / 2], from + (2 * half + i / 2) * 16);
            }
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                u32 chunk = i % 2, l[4], h[4];
                decode_e2m1(word_of(low4[chunk], 2 * half + i / 2), l);
                decode_e2m1(word_of(high4[chunk], 2 * half + i / 2), h);
                const u32(&b)[4] = x_[chunk][i / 2];
                mma_f16(dots[chunk], l[0], h[0], l[1], h[1], b[0], b[1]);
                mma_f16(dots[chunk], l[2], h[2], l[3], h[3], b[2], b[3]);
            }
        }
        u32 block = 2 * lane_in_group();
        u32 low_scales = scales + lane_group() * SCALES_A_ROW + block, high_scales = low_scales + 8 * SCALES_A_ROW;
        const float* act = x.scales + step * SCALES_A_ROW + block;
        acc[0] += (dots[0][0] + dots[1][0]) * act[0] * e8m0(load_shared_u8(low_scales));
        acc[1] += (dots[0][1] + dots[1][1]) * act[1] * e8m0(load_shared_u8(low_scales + 1));
        acc[2] += (dots[0][2] + dots[1][2]) * act[0] * e8m0(load_shared_u8(high_scales));
        acc[3] += (dots[0][3] + dots[1][3]) * act[1] * e8m0(load_shared_u8(high_scales + 1));
    }

    __device__ static __forceinline__ const u8* scale_pointer(const Tile& tile, u32 row_nbytes, u32 step, u32 row) {
        return tile.scale + static_cast<u64>(row) * (row_nbytes / 16) + step * SCALES_A_ROW;
    }

    // `low`, `high`: the step's bytes of rows g and g+8. The four lanes of a row take a step each.
    __device__ static __forceinline__ void copy_scales(
        u32 ring, u32 fill, const u8* low, const u8* high, u32 step, bool first, u32 last) {
        u32 done = step % SCALE_STEPS, t = lane_in_group();
        if (done != 0 && !first) return;  // came with an earlier step
        if (t < done || step + t - done >= last) return;
        u32 ahead = t - done;
        u32 to = ring + (fill + ahead) % SCALE_RING * SCALES_NBYTES + lane_group() * SCALES_A_ROW;
        copy8(to, low + ahead * SCALES_A_ROW);
        copy8(to + 8 * SCALES_A_ROW, high + ahead * SCALES_A_ROW);
    }

    __device__ static __forceinline__ void store_scales(
        u32 to, const u8* low, const u8* high, u32 step, u32 row_nbytes) {
        to += lane_group() * SCALES_A_ROW;
        for (u32 i = lane_in_group(); i < SCALES_A_ROW; i += 4) {
            bool inside = step * SCALES_A_ROW + i < row_nbytes / 16;
            store_shared_u8(to + i, inside ? low[i] : 0u);
            store_shared_u8(to + 8 * SCALES_A_ROW + i, inside ? high[i] : 0u);
        }
    }

    __device__ static __forceinline__ void store(const Activations& x, u32 k, const float (&v)[8]) {
        *reinterpret_cast<uint4*>(x.values + 2 * k) = {pack_f16(v[0], v[4]), pack_f16(v[1], v[5]), pack_f16(v[2], v[6]),
                                                       pack_f16(v[3], v[7])};
    }
};

// bf16 weights without scales. A step is 8 rows x 128 K, so that a matrix of few rows has work for more blocks: rows
// g+8 of the tensor core are the second half of the step's K, and so are columns 4-7. Of the accumulators only rows g
// in columns 0-3 and rows g+8 in columns 4-7 mean anything. Each of the four products of a step has columns of its own:
// the tensor core, which does not round to nearest, adds sixteen terms and no more; the rest is added in float32.
struct Bf16 {
    static constexpr u32 ROWS = 8;
    static constexpr u32 STEP_NBYTES = 256;
    static constexpr u32 HIGH_ROW = 0;
    static constexpr u32 HIGH_NBYTES = 128;
    static constexpr u32 K_STEP = 128;
    static constexpr u32 VALUES_NBYTES = 2 * K_STEP;
    static constexpr u32 SCALES_A_ROW = 0;
    static constexpr u32 SCALES_NBYTES = 0;
    static constexpr u32 SCALE_RING = RING;

    u32 x_[4][2];
    u32 mine_, offset_;

    __device__ __forceinline__ void init() {
        mine_ = lane_group() % 4;
        offset_ = lane_group() / 4 * HIGH_NBYTES + mine_ / 2 * 64 + lane_in_group() * 16 + mine_ % 2 * 8;
#pragma unroll
        for (u32 i = 0; i < 8; i++) x_[i / 2][i % 2] = 0;
    }

    __device__ __forceinline__ void step(float (&acc)[4], u32 slot, u32, const Activations& x, u32 step) {
        u32 from = shared_address(x.values) + step * VALUES_NBYTES + offset_;
#pragma unroll
        for (u32 i = 0; i < 4; i++) load_shared8_where(mine_ == i, x_[i], from);
        slot += threadIdx.x % 32 * 16;
        float dots[4] = {};
#pragma unroll
        for (u32 chunk = 0; chunk < 2; chunk++) {
            uint4 low = load_shared16(slot + chunk * CHUNKS_NBYTES);
            uint4 high = load_shared16(slot + (2 + chunk) * CHUNKS_NBYTES);
            mma_bf16(dots, low.x, high.x, low.y, high.y, x_[2 * chunk][0], x_[2 * chunk][1]);
            mma_bf16(dots, low.z, high.z, low.w, high.w, x_[2 * chunk + 1][0], x_[2 * chunk + 1][1]);
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) acc[i] += dots[i];
    }

    __device__ static __forceinline__ void store_sums(float* sums, const float (&acc)[4]) {
        float sum = sum_of_four_lanes(lane_in_group() < 2 ? acc[0] + acc[1] : acc[2] + acc[3]);
        if (lane_in_group() == 0) sums[lane_group()] = sum;
    }

    __device__ static __forceinline__ const u8* scale_pointer(const Tile& tile, u32, u32, u32) { return tile.weight; }
    __device__ static __forceinline__ void copy_scales(u32, u32, const u8*, const u8*, u32, bool, u32) {}
    __device__ static __forceinline__ void store_scales(u32, const u8*, const u8*, u32, u32) {}

    __device__ static __forceinline__ void store(const Activations& x, u32 k, const float (&v)[8]) {
        *reinterpret_cast<uint4*>(x.values + 2 * k) = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                                                       pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
    }
};
