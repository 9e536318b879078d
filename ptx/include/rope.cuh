// The rotation of one pair by the angle whose cosine and sine a rope cell holds: every product and sum rounded.
#pragma once

#include "device.cuh"

struct Pair {
    float a, b;
};

__device__ __forceinline__ Pair rotate(Pair x, float cosine, float sine) {
    return {x.a * cosine - x.b * sine, x.b * cosine + x.a * sine};
}

// Element d of a row of n values whose tail is rotated, when lanes hold neighbouring elements and even lanes even ones.
// All lanes of a warp call it together.
__device__ __forceinline__ float rotate_row(float x, u32 d, u32 n, u32 rope_dim, const float* cell) {
    float other = __shfl_xor_sync(FULL_WARP, x, 1);
    if (d < n - rope_dim) return x;
    u32 pair = (d - (n - rope_dim)) / 2;
    float cosine = cell[pair], sine = cell[rope_dim / 2 + pair];
    return d % 2 ? rotate({other, x}, cosine, sine).b : rotate({x, other}, cosine, sine).a;
}
