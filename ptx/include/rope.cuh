// The rotation of one pair by the angle whose cosine and sine a rope cell holds: every product and sum rounded.
#pragma once

struct Pair {
    float a, b;
};

__device__ __forceinline__ Pair rotate(Pair x, float cosine, float sine) {
    return {x.a * cosine - x.b * sine, x.b * cosine + x.a * sine};
}
