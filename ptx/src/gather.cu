// Brings a layer's picks that lie in host memory to the device, for the kernels that multiply by them.
//
// A product reads its weights in many places at once, a hundred bytes of a row at a time; over the link that costs a
// fifth more than one walk through memory. Few blocks fill the link, and more would only take room from other work.

#include "device.cuh"

constexpr u32 THREADS = 512;
constexpr u32 IN_FLIGHT = 8;  // loads of a thread

extern "C" __global__ void __launch_bounds__(THREADS) ds41_expert_gather(
    const u64* __restrict__ ptrs_dev,  // [3][top_k]
    u64* __restrict__ gathered_ptrs,   // [3][top_k]: the same, those into the pool led to the copies
    u32 top_k,
    u64 pool_base,
    u64 pool_nbytes,
    u64 gathered,  // u8 [top_k][slot_nbytes]
    u64 slot_nbytes,
    u64 expert_nbytes,
    u64 gate_off) {
    for (u32 n = threadIdx.x; blockIdx.x == 0 && n < 3 * top_k; n += THREADS) {
        u32 i = n % top_k;
        u64 ptr = ptrs_dev[n], slot = ptrs_dev[i] - gate_off;
        bool in_pool = slot - pool_base < pool_nbytes;
        gathered_ptrs[n] = in_pool ? gathered + i * slot_nbytes + (ptr - slot) : ptr;
    }
    const u32 chunks = expert_nbytes / 16, each = THREADS * IN_FLIGHT;
    for (u32 i = 0; i < top_k; i++) {
        u64 slot = ptrs_dev[i] - gate_off;
        if (slot - pool_base >= pool_nbytes) continue;
        const uint4* from = reinterpret_cast<const uint4*>(slot);
        uint4* to = reinterpret_cast<uint4*>(gathered + i * slot_nbytes);
        for (u32 at = blockIdx.x * each + threadIdx.x; at < chunks; at += gridDim.x * each) {
            uint4 held[IN_FLIGHT];
#pragma unroll
            for (u32 j = 0; j < IN_FLIGHT; j++) {
                if (at + j * THREADS < chunks) held[j] = from[at + j * THREADS];
            }
#pragma unroll
            for (u32 j = 0; j < IN_FLIGHT; j++) {
                if (at + j * THREADS < chunks) to[at + j * THREADS] = held[j];
            }
        }
    }
}
