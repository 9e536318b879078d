// The residual highway: start of the streams, mixing coefficients with collapse and expand, final collapse.
//
// A site's mixes are a product of fn [24][4*dim] with all four streams: 2 MB to read at the released width. Each block
// takes 32 positions of all streams, so that it can expand in place, multiply and collapse what it holds; it leaves 26
// partial sums. The last block to finish adds those in slice order and does what needs the whole: the norm and the
// coefficients. Which block that is does not show in the result.

#include "device.cuh"
#include "math.cuh"
#include "reduce.cuh"

constexpr u32 STREAMS = 4;
constexpr u32 MIXES = STREAMS * (STREAMS + 2);
constexpr u32 SLICE = 32;    // positions a block
constexpr u32 THREADS = 256;
constexpr u32 SUMS = MIXES + 2;  // the mixes, the squares of the streams, the squares of the collapsed vector
constexpr u32 SUM_STREAMS = MIXES, SUM_HIDDEN = MIXES + 1;
constexpr u32 PARTIALS_OFF = 128;  // bytes of the workspace before the partial sums; its first word is the ticket

// New value of stream j: post[j] * y, plus comb[i][j] * old stream i in order of i.
__device__ __forceinline__ float expanded(float y, const float (&x)[STREAMS], const float* post, const float* comb,
                                          u32 j) {
    float v = post[j] * y;
#pragma unroll
    for (u32 i = 0; i < STREAMS; i++) v += comb[i * STREAMS + j] * x[i];
    return v;
}

__device__ __forceinline__ float collapsed(const float* pre, const float (&x)[STREAMS]) {
    float v = pre[0] * x[0];
#pragma unroll
    for (u32 k = 1; k < STREAMS; k++) v += pre[k] * x[k];
    return v;
}

// `y` is null where nothing is expanded first. `pre_in` may be `pre_out`: every block has read the one before the last
// block writes the other. The same holds for `post` and `comb`.
struct Site {
    const u16* y;
    u16* streams;
    const float* pre_in;
    const float* fn;
    const float* scale;
    const float* base;
    const u16* norm_w;
    float* pre_out;
    float* post;
    float* comb;
    u16* hidden;
    u16* normed;
    u8* work;
    u32 dim, iters;
    float eps, hc_eps;
};

// Lane 8 + 4i + j of the warp holds element (i, j); the other lanes hold ones and are carried along.
__device__ __forceinline__ float sinkhorn(float c, u32 lane, u32 iters, float hc_eps) {
    u32 row = lane & ~3u, column = 8 + (lane & 3u);
    for (u32 k = 0; k < iters; k++) {
        if (k) {
            float a0 = __shfl_sync(FULL_WARP, c, row), a1 = __shfl_sync(FULL_WARP, c, row + 1);
            float a2 = __shfl_sync(FULL_WARP, c, row + 2), a3 = __shfl_sync(FULL_WARP, c, row + 3);
            c = c / (a0 + a1 + a2 + a3 + hc_eps);
        }
        float a0 = __shfl_sync(FULL_WARP, c, column), a1 = __shfl_sync(FULL_WARP, c, column + 4);
        float a2 = __shfl_sync(FULL_WARP, c, column + 8), a3 = __shfl_sync(FULL_WARP, c, column + 12);
        c = c / (a0 + a1 + a2 + a3 + hc_eps);
    }
    return c;
}

// One warp: lanes 0..3 make pre, 4..7 post, 8..23 comb.
__device__ __forceinline__ void coefficients(const Site& s, const float* sums, u32 lane) {
    u32 mix = lane < MIXES ? lane : 0;
    u32 kind = mix < 4 ? 0 : mix < 8 ? 1 : 2;
    float m = sums[mix] * inverse_rms(sums[SUM_STREAMS], STREAMS * s.dim, s.eps);
    m = m * s.scale[kind] + s.base[mix];
    float sigma = ds41_sigmoidf(m);

    u32 row = lane & ~3u;
    float a0 = __shfl_sync(FULL_WARP, m, row), a1 = __shfl_sync(FULL_WARP, m, row + 1);
    float a2 = __shfl_sync(FULL_WARP, m, row + 2), a3 = __shfl_sync(FULL_WARP, m, row + 3);
    float c = ds41_expf(m - fmaxf(fmaxf(a0, a1), fmaxf(a2, a3)));
    a0 = __shfl_sync(FULL_WARP, c, row), a1 = __shfl_sync(FULL_WARP, c, row + 1);
    a2 = __shfl_sync(FULL_WARP, c, row + 2), a3 = __shfl_sync(FULL_WARP, c, row + 3);
    c = c / (a0 + a1 + a2 + a3) + s.hc_eps;
    c = sinkhorn(kind == 2 ? c : 1.0f, lane, s.iters, s.hc_eps);

    if (lane < 4) s.pre_out[lane] = sigma + s.hc_eps;
    else if (lane < 8) s.post[lane - 4] = sigma * 2.0f;
    else if (lane < MIXES) s.comb[lane - 8] = c;
}

// All warps but the first: the norm of the collapsed vector, eight values at a time.
__device__ __forceinline__ void norm(const Site& s, float inverse) {
    constexpr u32 WORKERS = THREADS - 32, DEPTH = 3;
    const uint4* hidden = reinterpret_cast<const uint4*>(s.hidden);
    const uint4* weight = reinterpret_cast<const uint4*>(s.norm_w);
    uint4* normed = reinterpret_cast<uint4*>(s.normed);
    u32 n = s.dim / 8;
    for (u32 first = threadIdx.x - 32; first < n; first += DEPTH * WORKERS) {
        uint4 h[DEPTH], w[DEPTH];
#pragma unroll
        for (u32 i = 0; i < DEPTH; i++) {
            u32 v = first + i * WORKERS;
            if (v >= n) break;
            h[i] = load_shared_between_blocks(hidden + v);
            w[i] = weight[v];
        }
#pragma unroll
        for (u32 i = 0; i < DEPTH; i++) {
            u32 v = first + i * WORKERS;
            if (v >= n) break;
            const u32* hp = &h[i].x;
            const u32* wp = &w[i].x;
            u32 out[4];
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                float low = low_bf16(hp[k]) * inverse * low_bf16(wp[k]);
                float high = high_bf16(hp[k]) * inverse * high_bf16(wp[k]);
                out[k] = pack_bf16(low, high);
            }
            normed[v] = make_uint4(out[0], out[1], out[2], out[3]);
        }
    }
}

template <bool EXPAND>
__device__ __forceinline__ void site(const Site& s) {
    __shared__ __align__(16) float x[STREAMS][SLICE];
    __shared__ float sums[SUMS];
    __shared__ bool last;
    u32 tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    u32 slice = blockIdx.x, n_slices = gridDim.x, first = slice * SLICE;
    u32* ticket = reinterpret_cast<u32*>(s.work);
    float* partials = reinterpret_cast<float*>(s.work + PARTIALS_OFF);  // [SUMS][n_slices]

    // The weights first: they depend on nothing. A warp takes three rows; eight lanes cover a stream's 32 positions.
    constexpr u32 ROWS = MIXES / (THREADS / 32);
    u32 stream = lane / 8, offset = 4 * (lane % 8);
    float4 weight[ROWS];
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
        size_t row = warp * ROWS + r;
        weight[r] = *reinterpret_cast<const float4*>(s.fn + (row * STREAMS + stream) * s.dim + first + offset);
    }
    if (tid == 0) prefetch_l2(s.norm_w + first);

    u32 j = tid / SLICE, d = tid % SLICE;
    if (j < STREAMS) {
        if (EXPAND) {
            float old[STREAMS];
#pragma unroll
            for (u32 i = 0; i < STREAMS; i++) old[i] = from_bf16(s.streams[i * s.dim + first + d]);
            x[j][d] = round_bf16(expanded(from_bf16(s.y[first + d]), old, s.post, s.comb, j));
        } else {
            x[j][d] = from_bf16(s.streams[j * s.dim + first + d]);
        }
    }
    __syncthreads();
    // In place: only now has every thread read the old streams.
    if (EXPAND && j < STREAMS) s.streams[j * s.dim + first + d] = to_bf16(x[j][d]);

    float4 v = *reinterpret_cast<const float4*>(&x[stream][offset]);
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
        float4 w = weight[r];
        float sum = warp_sum(fmaf(w.w, v.w, fmaf(w.z, v.z, fmaf(w.y, v.y, w.x * v.x))));
        if (lane == 0) partials[(warp * ROWS + r) * n_slices + slice] = sum;
    }
    if (warp == 1) {
        float sum = warp_sum(fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, v.x * v.x))));
        if (lane == 0) partials[SUM_STREAMS * n_slices + slice] = sum;
    }
    if (warp == 2) {
        float column[STREAMS] = {x[0][lane], x[1][lane], x[2][lane], x[3][lane]};
        float h = round_bf16(collapsed(s.pre_in, column));
        s.hidden[first + lane] = to_bf16(h);
        float sum = warp_sum(h * h);
        if (lane == 0) partials[SUM_HIDDEN * n_slices + slice] = sum;
    }

    // The ticket wraps to zero at the last block, ready for the next launch.
    __threadfence();
    __syncthreads();
    if (tid == 0) last = atomicInc(ticket, n_slices - 1) == n_slices - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();

    constexpr u32 WARPS = THREADS / 32, TURNS = (SUMS + WARPS - 1) / WARPS;
    float total[TURNS] = {};
    for (u32 i = lane; i < n_slices; i += 32) {
#pragma unroll
        for (u32 q = 0; q < TURNS; q++) {
            u32 which = q * WARPS + warp;
            if (which < SUMS) total[q] += load_shared_between_blocks(partials + which * n_slices + i);
        }
    }
#pragma unroll
    for (u32 q = 0; q < TURNS; q++) {
        float sum = warp_sum(total[q]);
        if (lane == 0 && q * WARPS + warp < SUMS) sums[q * WARPS + warp] = sum;
    }
    __syncthreads();
    if (warp == 0) coefficients(s, sums, lane);
    else norm(s, inverse_rms(sums[SUM_HIDDEN], s.dim, s.eps));
}

extern "C" __global__ void __launch_bounds__(THREADS) ds41_hc_in(
    u16* streams,  // bf16 [hc][dim], only read
    const float* pre_in,
    const float* fn,
    const float* scale,
    const float* base,
    const u16* norm_w,
    float* pre_out,
    float* post,
    float* comb,
    u16* hidden,
    u16* normed,
    u8* work,
    u32 dim,
    u32 hc,
    u32 iters,
    float eps,
    float hc_eps) {
    site<false>({nullptr, streams, pre_in, fn, scale, base, norm_w, pre_out, post, comb, hidden, normed, work, dim,
                 iters, eps, hc_eps});
}

extern "C" __global__ void __launch_bounds__(THREADS) ds41_hc_expand_in(
    const u16* y,
    u16* streams,  // bf16 [hc][dim], expanded in place
    const float* pre_in,
    const float* fn,
    const float* scale,
    const float* base,
    const u16* norm_w,
    float* pre_out,
    float* post,
    float* comb,
    u16* hidden,
    u16* normed,
    u8* work,
    u32 dim,
    u32 hc,
    u32 iters,
    float eps,
    float hc_eps) {
    site<true>({y, streams, pre_in, fn, scale, base, norm_w, pre_out, post, comb, hidden, normed, work, dim, iters, eps,
                hc_eps});
}

// One thread a pair of positions in the three below.

extern "C" __global__ void ds41_hc_collapse(
    const u16* __restrict__ streams,
    const float* __restrict__ pre,
    u16* __restrict__ hidden,
    u32 dim,
    u32 hc) {
    u32 pair = blockIdx.x * blockDim.x + threadIdx.x, pairs = dim / 2;
    if (pair >= pairs) return;
    float low[STREAMS], high[STREAMS];
#pragma unroll
    for (u32 k = 0; k < STREAMS; k++) {
        u32 x = reinterpret_cast<const u32*>(streams)[k * pairs + pair];
        low[k] = low_bf16(x);
        high[k] = high_bf16(x);
    }
    reinterpret_cast<u32*>(hidden)[pair] = pack_bf16(collapsed(pre, low), collapsed(pre, high));
}

extern "C" __global__ void ds41_embed_expand(
    const u16* __restrict__ embed,
    const int* __restrict__ step,  // [position, token]
    u16* __restrict__ streams,
    float* __restrict__ pre_prev,
    u32 vocab,
    u32 dim,
    u32 hc) {
    u32 pair = blockIdx.x * blockDim.x + threadIdx.x, pairs = dim / 2;
    if (pair < hc) pre_prev[pair] = pair == 0 ? 1.0f : 0.0f;
    if (pair >= pairs) return;
    u32 x = reinterpret_cast<const u32*>(embed)[static_cast<size_t>(step[1]) * pairs + pair];
    for (u32 k = 0; k < hc; k++) reinterpret_cast<u32*>(streams)[k * pairs + pair] = x;
}

// The ordered sum of the experts and the shared one, expanded into the streams in place.
extern "C" __global__ void ds41_moe_combine(
    const u16* __restrict__ expert_out,  // bf16 [top_k][dim], in plan order
    const u16* __restrict__ shared_out,
    const float* __restrict__ post,
    const float* __restrict__ comb,
    u16* streams,
    u16* __restrict__ moe_out,
    u32 dim,
    u32 hc,
    u32 top_k) {
    u32 pair = blockIdx.x * blockDim.x + threadIdx.x, pairs = dim / 2;
    if (pair >= pairs) return;
    const u32* experts = reinterpret_cast<const u32*>(expert_out);
    u32* out = reinterpret_cast<u32*>(streams);
    u32 shared = reinterpret_cast<const u32*>(shared_out)[pair];
    float low_x[STREAMS], high_x[STREAMS];
#pragma unroll
    for (u32 i = 0; i < STREAMS; i++) {
        u32 x = out[i * pairs + pair];
        low_x[i] = low_bf16(x);
        high_x[i] = high_bf16(x);
    }
    u32 e = experts[pair];
    float low = low_bf16(e), high = high_bf16(e);
#pragma unroll 8
    for (u32 k = 1; k < top_k; k++) {
        e = experts[k * pairs + pair];
        low += low_bf16(e);
        high += high_bf16(e);
    }
    u32 y = pack_bf16(low + low_bf16(shared), high + high_bf16(shared));
    reinterpret_cast<u32*>(moe_out)[pair] = y;
#pragma unroll
    for (u32 j = 0; j < STREAMS; j++) {
        out[j * pairs + pair] =
            pack_bf16(expanded(low_bf16(y), low_x, post, comb, j), expanded(high_bf16(y), high_x, post, comb, j));
    }
}
