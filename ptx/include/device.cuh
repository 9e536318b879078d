// Short names for integer types, and the instructions that C++ has no word for. Everything here is one instruction or
// a few; no kernel's meaning lives in this file.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;  // also the bits of a bf16
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 FULL_WARP = 0xFFFFFFFFu;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }

// Two floats as bf16, to nearest even, `low` in the low half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ u16 to_bf16(float x) {
    u16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ float from_bf16(u16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }
__device__ __forceinline__ float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
__device__ __forceinline__ float round_bf16(float x) { return from_bf16(to_bf16(x)); }

// acc[16x8] += a[16x16] b[16x8], bf16 into f32. With g = lane / 4 and t = lane % 4 a lane holds
//   a: rows g, g+8, g, g+8 at columns (2t, 2t+1), twice, then (2t+8, 2t+9), twice
//   b: column g at rows (2t, 2t+1), then (2t+8, 2t+9)
//   acc: row g at columns 2t, 2t+1, then row g+8 at the same.
__device__ __forceinline__ void mma_bf16(float acc[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Loads that bypass the first-level cache, for what another block of the same launch wrote. Volatile: they stay behind
// the fence that makes those writes visible.
__device__ __forceinline__ float load_shared_between_blocks(const float* p) {
    float r;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(r) : "l"(p) : "memory");
    return r;
}

__device__ __forceinline__ uint4 load_shared_between_blocks(const uint4* p) {
    uint4 r;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(p)
                 : "memory");
    return r;
}

// Asks for the line at `p` ahead of a load by another block.
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
