// Scores and values over the list of window slots and selected compressed rows (kernels/attention.py has its order).
//
// Both kernels multiply on tensor cores. K and N of a product may be permuted freely as long as both operands agree, so
// every lane loads whole runs of 8 or 16 bytes of a row and calls them the elements that the instruction wants from it.

#include "device.cuh"
#include "math.cuh"
#include "rope.cuh"

constexpr u32 BLOCK = 64;  // list entries that share a running maximum

// The list of one step. Entries outside it, and empty ones while the ring fills, have no row.
struct List {
    const u16* ring;
    const u16* comp;
    const int* sel;
    u32 position, window, topk;
    u32 count;  // selected compressed rows

    __device__ __forceinline__ List(const u64* ring_cell, const u64* comp_cell, const int* sel, const int* step,
                                    u32 window, u32 topk)
        : ring(reinterpret_cast<const u16*>(ring_cell[0])),
          comp(topk ? reinterpret_cast<const u16*>(comp_cell[0]) : nullptr),
          sel(sel),
          position(step[0]),
          window(window),
          topk(topk),
          count(topk ? sel[0] : 0) {}

    // The list index behind the window part; at position 0 that is slot 0 alone.
    __device__ __forceinline__ u32 window_end() const { return position == 0 ? 1 : window; }
    __device__ __forceinline__ u32 end() const { return window_end() + count; }

    // The row of entry t, null if it has none. `row_len` in values.
    __device__ __forceinline__ const u16* row(u32 t, u32 row_len) const {
        // The selection is read before the position is known to say that t is one: one trip to memory less.
        u32 guess = t - window;
        int chosen = t >= window && guess < topk ? sel[1 + guess] : 0;
        u32 tail = window_end();
        if (t >= tail) {
            if (t - tail >= count) return nullptr;
            if (tail != window) chosen = sel[1 + t - tail];
            return comp + static_cast<size_t>(chosen) * row_len;
        }
        if (t + position + 1 < window && position > 0) return nullptr;
        u32 slot = position == 0 ? 0 : (position % window + 1 + t) % window;
        return ring + static_cast<size_t>(slot) * row_len;
    }

    __device__ __forceinline__ bool has_row(u32 t) const {
        return t < window_end() ? position == 0 || t + position + 1 >= window : t < end();
    }
};

__device__ __forceinline__ uint4 load16(const u16* p, u32 off) {
    return p ? *reinterpret_cast<const uint4*>(p + off) : make_uint4(0, 0, 0, 0);
}

// Scores: a block makes 32 heads x 16 entries. Eight warps share K in runs of 32 dealt out in turn; their sums are added
// in warp order.
constexpr u32 SCORE_HEADS = 32, SCORE_ENTRIES = 16, SCORE_WARPS = 8;

extern "C" __global__ void __launch_bounds__(32 * SCORE_WARPS) ds41_attn_score(
    const u16* __restrict__ q,
    const u64* __restrict__ ring_cell,
    const u64* __restrict__ comp_cell,
    const int* __restrict__ sel,  // [1 + topk]: count, rows
    const int* __restrict__ step,
    float* __restrict__ scores,  // [heads][window + topk]
    u32 heads,
    u32 head_dim,
    u32 window,
    u32 topk) {
    __shared__ float partial[SCORE_WARPS][SCORE_HEADS][SCORE_ENTRIES + 4];  // the 4 keep banks apart
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 first_head = blockIdx.y * SCORE_HEADS, first_entry = blockIdx.x * SCORE_ENTRIES;
    List list(ring_cell, comp_cell, sel, step, window, topk);

    const u16* head[4];  // heads g, g+8, g+16, g+24 of the block
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 h = first_head + g + 8 * i;
        head[i] = h < heads ? q + static_cast<size_t>(h) * head_dim : nullptr;
    }
    const u16* row[2] = {list.row(first_entry + g, head_dim), list.row(first_entry + g + 8, head_dim)};

    float acc[2][2][4] = {};  // [16 heads][8 entries][a lane's four]
    u32 runs = head_dim / 32;
#pragma unroll 2
    for (u32 run = warp; run < runs; run += SCORE_WARPS) {
        u32 off = run * 32 + 8 * t;
        uint4 a[4], b[2];
#pragma unroll
        for (u32 i = 0; i < 4; i++) a[i] = load16(head[i], off);
#pragma unroll
        for (u32 i = 0; i < 2; i++) b[i] = load16(row[i], off);
#pragma unroll
        for (u32 m = 0; m < 2; m++) {
#pragma unroll
            for (u32 n = 0; n < 2; n++) {
                const uint4 &top = a[2 * m], &low = a[2 * m + 1];
                mma_bf16(acc[m][n], top.x, low.x, top.y, low.y, b[n].x, b[n].y);
                mma_bf16(acc[m][n], top.z, low.z, top.w, low.w, b[n].z, b[n].w);
            }
        }
    }
#pragma unroll
    for (u32 m = 0; m < 2; m++) {
#pragma unroll
        for (u32 n = 0; n < 2; n++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) partial[warp][16 * m + g + 8 * (i / 2)][8 * n + 2 * t + i % 2] = acc[m][n][i];
        }
    }
    __syncthreads();

    u32 entries = window + topk, warps = runs < SCORE_WARPS ? runs : SCORE_WARPS;
    float scale = inverse_sqrt(head_dim);
    for (u32 i = threadIdx.x; i < SCORE_HEADS * SCORE_ENTRIES; i += 32 * SCORE_WARPS) {
        u32 h = i / SCORE_ENTRIES, e = i % SCORE_ENTRIES, entry = first_entry + e;
        if (first_head + h >= heads || entry >= entries) continue;
        float dot = partial[0][h][e];
        for (u32 w = 1; w < warps; w++) dot += partial[w][h][e];
        scores[static_cast<size_t>(first_head + h) * entries + entry] = list.has_row(entry) ? dot * scale : minus_infinity();
    }
}

// Values: a block makes 16 heads x 32 positions of the head. A warp takes whole 64-entry blocks: what a block adds
// depends on the maxima before it alone, so blocks are multiplied side by side and then added in list order.
constexpr u32 VALUE_HEADS = 16, VALUE_DIMS = 32;
constexpr u32 STEPS = BLOCK / 16;  // of 16 entries
constexpr u32 VALUE_PITCH = VALUE_DIMS + 4;  // floats from head to head in shared memory: keeps banks apart

// A lane's share of a block of 64 scores, for heads g and g + 8: entries 16 s + 4 t .. + 3. -inf behind the end.
struct Scores {
    float x[2][STEPS][4];

    __device__ __forceinline__ void load(const float* const head[2], u32 block, u32 t, u32 entries) {
        bool aligned = entries % 4 == 0;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
#pragma unroll
            for (u32 s = 0; s < STEPS; s++) {
                u32 first = block * BLOCK + 16 * s + 4 * t;
                if (aligned && head[i] && first < entries) {
                    float4 v = *reinterpret_cast<const float4*>(head[i] + first);
                    x[i][s][0] = v.x, x[i][s][1] = v.y, x[i][s][2] = v.z, x[i][s][3] = v.w;
                    continue;
                }
#pragma unroll
                for (u32 k = 0; k < 4; k++) x[i][s][k] = head[i] && first + k < entries ? head[i][first + k] : minus_infinity();
            }
        }
    }

    // The largest of the block's scores for head g + 8 i, the same in the four lanes that share it.
    __device__ __forceinline__ float max(u32 i) const {
        float top = minus_infinity();
#pragma unroll
        for (u32 s = 0; s < STEPS; s++) {
#pragma unroll
            for (u32 k = 0; k < 4; k++) top = fmaxf(top, x[i][s][k]);
        }
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 1));
        return fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 2));
    }
};

// The rows of a lane's entries of a block: four values from position 4 g of the block's slice on. Zeros without a row.
struct Rows {
    uint2 x[STEPS][4];

    __device__ __forceinline__ void load(const List& list, u32 block, u32 lane, u32 row_len, u32 off,
                                         const u16** table) {
        __syncwarp();
#pragma unroll
        for (u32 i = lane; i < BLOCK; i += 32) table[i] = list.row(block * BLOCK + i, row_len);
        __syncwarp();
        u32 g = lane / 4, t = lane % 4;
#pragma unroll
        for (u32 s = 0; s < STEPS; s++) {
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                const u16* row = table[16 * s + 4 * t + k];
                x[s][k] = row ? *reinterpret_cast<const uint2*>(row + off + 4 * g) : make_uint2(0, 0);
            }
        }
    }
};

// The two bf16 in the low (HIGH: high) halves of a and b, a's first.
template <bool HIGH>
__device__ __forceinline__ u32 halves(u32 a, u32 b) {
    return __byte_perm(a, b, HIGH ? 0x7632 : 0x5410);
}

extern "C" __global__ void __launch_bounds__(512) ds41_attn_value(
    const float* __restrict__ scores,  // [heads][window + topk]
    const u64* __restrict__ ring_cell,
    const u64* __restrict__ comp_cell,
    const int* __restrict__ sel,
    const int* __restrict__ step,
    const float* __restrict__ sink,
    const float* __restrict__ rope,  // cosines, then sines
    u16* __restrict__ o,             // bf16 [heads][head_dim]
    u32 heads,
    u32 head_dim,
    u32 rope_dim,
    u32 window,
    u32 topk) {
    // Its size is that of _value_geometry in kernels/attention.py.
    extern __shared__ __align__(16) u8 shared[];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
    u32 entries = window + topk, blocks = (entries + BLOCK - 1) / BLOCK;
    const u16** table = reinterpret_cast<const u16**>(shared) + warp * BLOCK;
    typedef float PerHead[VALUE_HEADS];
    PerHead* top = reinterpret_cast<PerHead*>(reinterpret_cast<const u16**>(shared) + warps * BLOCK);  // [blocks]
    PerHead* mass = top + blocks;                                                                       // [blocks]
    typedef float Product[VALUE_HEADS][VALUE_PITCH];
    Product* product = reinterpret_cast<Product*>(mass + blocks);  // [blocks]

    u32 first_dim = blockIdx.x * VALUE_DIMS, first_head = blockIdx.y * VALUE_HEADS;
    const float* head[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 h = first_head + g + 8 * i;
        head[i] = h < heads ? scores + static_cast<size_t>(h) * entries : nullptr;
    }

    // The largest score of every block. The warp's first block stays in registers, rows included.
    Scores s;
    Rows rows;
    for (u32 b = warp; b < blocks; b += warps) {
        Scores other;
        other.load(head, b, t, entries);
        if (b == warp) s = other;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            float m = other.max(i);
            if (t == 0) top[b][g + 8 * i] = m;
        }
    }
    List list(ring_cell, comp_cell, sel, step, window, topk);
    u32 used = (list.end() + BLOCK - 1) / BLOCK;
    if (warp < used) rows.load(list, warp, lane, head_dim, first_dim, table);
    __syncthreads();

    for (u32 b = warp; b < used; b += warps) {
        if (b != warp) {
            s.load(head, b, t, entries);
            rows.load(list, b, lane, head_dim, first_dim, table);
        }
        u32 p[2][STEPS][2];  // probabilities as bf16 pairs
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            float most = -1e30f, sum = 0.0f;
            for (u32 k = 0; k <= b; k++) most = fmaxf(most, top[k][g + 8 * i]);
#pragma unroll
            for (u32 k = 0; k < STEPS; k++) {
                float e[4];
#pragma unroll
                for (u32 n = 0; n < 4; n++) e[n] = ds41_expf(s.x[i][k][n] - most);
                sum += (e[0] + e[1]) + (e[2] + e[3]);
                p[i][k][0] = pack_bf16(e[0], e[1]);
                p[i][k][1] = pack_bf16(e[2], e[3]);
            }
            sum += __shfl_xor_sync(FULL_WARP, sum, 1);
            sum += __shfl_xor_sync(FULL_WARP, sum, 2);
            if (t == 0) mass[b][g + 8 * i] = sum;
        }
        float acc[4][4] = {};  // column g of product n stands for position 4 g + n
#pragma unroll
        for (u32 k = 0; k < STEPS; k++) {
            uint2* r = rows.x[k];
            u32 a0 = p[0][k][0], a1 = p[1][k][0], a2 = p[0][k][1], a3 = p[1][k][1];
            mma_bf16(acc[0], a0, a1, a2, a3, halves<false>(r[0].x, r[1].x), halves<false>(r[2].x, r[3].x));
            mma_bf16(acc[1], a0, a1, a2, a3, halves<true>(r[0].x, r[1].x), halves<true>(r[2].x, r[3].x));
            mma_bf16(acc[2], a0, a1, a2, a3, halves<false>(r[0].y, r[1].y), halves<false>(r[2].y, r[3].y));
            mma_bf16(acc[3], a0, a1, a2, a3, halves<true>(r[0].y, r[1].y), halves<true>(r[2].y, r[3].y));
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float* to = &product[b][g + 8 * (i / 2)][4 * (2 * t + i % 2)];
            *reinterpret_cast<float4*>(to) = make_float4(acc[0][i], acc[1][i], acc[2][i], acc[3][i]);
        }
    }
    __syncthreads();

    // One thread a pair of positions: add the blocks in order, divide, turn back.
    for (u32 i = threadIdx.x; i < VALUE_HEADS * VALUE_DIMS / 2; i += blockDim.x) {
        u32 h = i / (VALUE_DIMS / 2), d = 2 * (i % (VALUE_DIMS / 2)), at = first_dim + d;
        if (first_head + h >= heads) continue;
        float most = -1e30f, total = 0.0f;
        Pair sum = {0.0f, 0.0f};
        for (u32 b = 0; b < used; b++) {
            float next = fmaxf(most, top[b][h]), keep = ds41_expf(most - next);
            total = total * keep + mass[b][h];
            sum.a = sum.a * keep + product[b][h][d];
            sum.b = sum.b * keep + product[b][h][d + 1];
            most = next;
        }
        total += ds41_expf(sink[first_head + h] - most);
        u32 out = pack_bf16(sum.a / total, sum.b / total);
        if (at + rope_dim >= head_dim) {
            u32 pair = (at + rope_dim - head_dim) / 2;
            Pair turned = rotate({low_bf16(out), high_bf16(out)}, rope[pair], -rope[rope_dim / 2 + pair]);
            out = pack_bf16(turned.a, turned.b);
        }
        *reinterpret_cast<u32*>(o + static_cast<size_t>(first_head + h) * head_dim + at) = out;
    }
}
