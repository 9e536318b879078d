// The instructions that the matrix kernels are made of: tensor core product, asynchronous copies into shared memory,
// loads from it, integer multiply-add. One instruction a function; what they are used for stands in tile.cuh.
#pragma once

#include "device.cuh"

// As mma_bf16 (device.cuh), f16 into f32.
__device__ __forceinline__ void mma_f16(float (&acc)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two floats as f16, to nearest even, `low` in the low half.
__device__ __forceinline__ u32 pack_f16(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// a * b + c, as an instruction of its own even where b is a power of two.
__device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) {
    u32 r;
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// Sixteen bytes past the first-level cache: a weight is read once.
__device__ __forceinline__ void copy16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The first `nbytes` bytes of sixteen, the rest zeros.
__device__ __forceinline__ void copy16_padded(u32 to, const void* from, u32 nbytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(nbytes) : "memory");
}

// Through the first-level cache, past which only sixteen bytes can be copied.
__device__ __forceinline__ void copy8(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// Closes the group of this thread's copies since the last call.
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `PENDING` of this thread's groups are unfinished.
template <u32 PENDING>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ uint4 load_shared16(u32 from) {
    uint4 r;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "r"(from)
                 : "memory");
    return r;
}

// Loads where `on`; elsewhere the registers keep what they held.
__device__ __forceinline__ void load_shared16_where(bool on, u32 (&r)[4], u32 from) {
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];}"
        : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3])
        : "r"(from), "r"(static_cast<u32>(on))
        : "memory");
}

__device__ __forceinline__ void load_shared8_where(bool on, u32 (&r)[2], u32 from) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p ld.shared.v2.u32 {%0, %1}, [%2];}"
                 : "+r"(r[0]), "+r"(r[1])
                 : "r"(from), "r"(static_cast<u32>(on))
                 : "memory");
}

__device__ __forceinline__ u32 load_shared_u8(u32 from) {
    u32 r;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(r) : "r"(from) : "memory");
    return r;
}

__device__ __forceinline__ void store_shared_u8(u32 to, u32 x) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

// A barrier of `threads` threads (whole warps) under a number of 1..15.
__device__ __forceinline__ void named_barrier(u32 number, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
