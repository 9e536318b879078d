// The index score of every compressed row. Keys and queries are FP4 values with a power-of-two scale per 32, so a dot
// over 32 of them is exact in float32, and the sum of those in double; the head sum runs in head order.

#include "device.cuh"

constexpr u32 THREADS = 64;
constexpr u32 TILE = 16;         // rows a warp at a time
constexpr u32 CHUNK_HEADS = 32;  // heads whose dots a lane holds
constexpr u32 CHUNK_DIMS = 128;  // K whose keys a lane holds

// Lane l of a warp finds in query[run][tile][l] the 8 values from 8 (l % 4) on of run `run` of 32, for the head that
// column l / 4 of tile `tile` stands for. Columns 2t and 2t+1 belong to lane t of the accumulators: its heads over all
// tiles are `per_lane` neighbours, so that the head sum goes through four lanes in order.
extern "C" __global__ void __launch_bounds__(THREADS) ds41_index_score(
    const u16* __restrict__ q,      // bf16 [index_heads][index_dim]
    const u16* __restrict__ omega,  // bf16 [index_heads]
    const u64* __restrict__ ikey_cell,
    const int* __restrict__ step,
    float* __restrict__ scores,  // [max_rows]
    u32 index_heads,
    u32 index_dim,
    u32 ratio,
    u32 max_rows) {
    extern __shared__ __align__(16) u8 shared[];
    uint4* query = reinterpret_cast<uint4*>(shared);
    u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 runs = index_dim / 32, tiles = (index_heads + 7) / 8;
    const u16* keys = reinterpret_cast<const u16*>(ikey_cell[0]);
    u32 rows = (static_cast<u32>(step[0]) + 1) / ratio;
    rows = rows < max_rows ? rows : max_rows;

    for (u32 i = threadIdx.x; i < runs * tiles * 32; i += THREADS) {
        u32 l = i % 32, tile = i / 32 % tiles, run = i / 32 / tiles;
        // Chunks of up to four tiles: 32 heads, of which lane t of the accumulators owns a quarter.
        u32 chunk = tile / 4, in_chunk = tiles - 4 * chunk < 4 ? tiles - 4 * chunk : 4;
        u32 column = l / 4;
        u32 h = chunk * CHUNK_HEADS + column / 2 * 2 * in_chunk + 2 * (tile % 4) + column % 2;
        query[i] = h < index_heads ? *reinterpret_cast<const uint4*>(q + h * index_dim + run * 32 + 8 * (l % 4))
                                   : make_uint4(0, 0, 0, 0);
    }
    __syncthreads();

    u32 warps = gridDim.x * (THREADS / 32);
    for (u32 first = TILE * (blockIdx.x * (THREADS / 32) + threadIdx.x / 32); first < max_rows; first += TILE * warps) {
        if (first >= rows) {
            if (lane < TILE && first + lane < max_rows) scores[first + lane] = minus_infinity();
            continue;
        }
        const u16* key[2];  // rows g and g + 8
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 r = first + g + 8 * i;
            key[i] = r < rows ? keys + static_cast<size_t>(r) * index_dim + 8 * t : nullptr;
        }
        float total[2] = {0.0f, 0.0f};
        for (u32 chunk = 0; chunk * 4 < tiles; chunk++) {
            u32 in_chunk = tiles - 4 * chunk < 4 ? tiles - 4 * chunk : 4;
            double dot[4][4] = {};
            for (u32 first_run = 0; first_run < runs; first_run += CHUNK_DIMS / 32) {
                uint4 a[CHUNK_DIMS / 32][2];
#pragma unroll
                for (u32 k = 0; k < CHUNK_DIMS / 32; k++) {
#pragma unroll
                    for (u32 i = 0; i < 2; i++) {
                        bool there = key[i] && first_run + k < runs;
                        a[k][i] = there ? *reinterpret_cast<const uint4*>(key[i] + (first_run + k) * 32)
                                        : make_uint4(0, 0, 0, 0);
                    }
                }
#pragma unroll
                for (u32 k = 0; k < CHUNK_DIMS / 32; k++) {
                    if (first_run + k >= runs) break;
#pragma unroll
                    for (u32 n = 0; n < 4; n++) {
                        if (n >= in_chunk) break;
                        uint4 b = query[((first_run + k) * tiles + 4 * chunk + n) * 32 + lane];
                        float acc[4] = {};
                        mma_bf16(acc, a[k][0].x, a[k][1].x, a[k][0].y, a[k][1].y, b.x, b.y);
                        mma_bf16(acc, a[k][0].z, a[k][1].z, a[k][0].w, a[k][1].w, b.z, b.w);
#pragma unroll
                        for (u32 i = 0; i < 4; i++) dot[n][i] += static_cast<double>(acc[i]);
                    }
                }
            }
            // This lane's heads, in order: 2n and 2n+1 of tile n.
            u32 per_lane = 2 * in_chunk, first_head = chunk * CHUNK_HEADS + t * per_lane;
            float term[2][8];
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                float weight = i < per_lane && first_head + i < index_heads ? from_bf16(omega[first_head + i]) : 0.0f;
#pragma unroll
                for (u32 r = 0; r < 2; r++) {
                    float d = round_bf16(static_cast<float>(dot[i / 2][2 * r + i % 2]));
                    term[r][i] = round_bf16((d <= 0.0f ? 0.0f : d) * weight);
                }
            }
#pragma unroll
            for (u32 turn = 0; turn < 4; turn++) {
#pragma unroll
                for (u32 r = 0; r < 2; r++) {
                    float sum = total[r];
#pragma unroll
                    for (u32 i = 0; i < 8; i++) {
                        u32 h = first_head + i;
                        // The first term is taken as it is: 0 plus it would turn -0 into +0.
                        if (i < per_lane && h < index_heads) sum = h == 0 ? term[r][i] : sum + term[r][i];
                    }
                    total[r] = __shfl_sync(FULL_WARP, sum, lane / 4 * 4 + turn);
                }
            }
        }
        if (t == 0) {
#pragma unroll
            for (u32 r = 0; r < 2; r++) {
                u32 row = first + g + 8 * r;
                if (row < max_rows) scores[row] = row < rows ? round_bf16(total[r]) : minus_infinity();
            }
        }
    }
}
