// The gated product of an expert.
#pragma once

#include "device.cuh"
#include "math.cuh"

// (g * sigmoid(g)) * u of the bf16-rounded products, g clamped from above and u from both sides; NaN stays NaN.
__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
    float g = round_bf16(gate), u = round_bf16(up);
    g = g > limit ? limit : g;
    u = u > limit ? limit : u < -limit ? -limit : u;
    return g * ds41_sigmoidf(g) * u;
}
