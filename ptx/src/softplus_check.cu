// Hashes of sqrt(softplus(x)) over all float32 inputs, 2^20 a block: what proves the router's function on a device.

#include "device.cuh"
#include "softplus.cuh"

// The finaliser of SplitMix64.
__device__ __forceinline__ u64 mix64(u64 h) {
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9ull;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBull;
    return h ^ (h >> 31);
}

// hashes[i] = sum modulo 2^64 over the inputs x of block first_block + i of mix64(result ^ (x << 32)).
extern "C" __global__ void __launch_bounds__(256) ds41_sqrt_softplus_hash(
    u64* __restrict__ hashes,
    u32 first_block,
    u32 n_blocks) {
    __shared__ u64 scratch[256];
    u64 sum = 0;
    u32 base = (first_block + blockIdx.x) << 20;
    for (u32 i = threadIdx.x; i < 1u << 20; i += blockDim.x) {
        u32 x = base + i;
        float y = route_sqrt_softplus(__uint_as_float(x));
        u32 bits = y != y ? 0x7FC00000u : __float_as_uint(y);
        sum += mix64(bits ^ (static_cast<u64>(x) << 32));
    }
    scratch[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (u32 i = 1; i < blockDim.x; i++) sum += scratch[i];
    hashes[blockIdx.x] = sum;
}
