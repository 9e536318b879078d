// Reads device memory and does next to nothing with it: the yardstick for the bandwidth of the other kernels.

extern "C" __global__ void __launch_bounds__(512) ds41_read_sum(
    const uint4* __restrict__ data,  // [chunks][chunk_nbytes / 16]
    unsigned int* __restrict__ sums,  // [chunks], sum of the 32-bit words of each chunk
    unsigned int chunks,
    unsigned int chunk_nbytes) {
    __shared__ unsigned int warp_sum[16];
    unsigned int n = chunk_nbytes / 16;
    const uint4* chunk = data + (unsigned long long)blockIdx.x * n;
    unsigned int sum = 0;
    unsigned int i = threadIdx.x;
    // Eight independent 16-byte loads a thread in flight.
    for (; i + 7 * 512 < n; i += 8 * 512) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = chunk[i + j * 512];
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += v[j].x + v[j].y + v[j].z + v[j].w;
    }
    for (; i < n; i += 512) sum += chunk[i].x + chunk[i].y + chunk[i].z + chunk[i].w;
    for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (threadIdx.x % 32 == 0) warp_sum[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int j = 1; j < 16; ++j) sum += warp_sum[j];
        sums[blockIdx.x] = sum;
    }
}
