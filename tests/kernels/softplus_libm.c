/* sqrt(softplus(x)) through the system's libm, for the float32 inputs whose bit patterns are first .. first + n - 1. */
#include <math.h>
#include <stdint.h>
#include <string.h>

void sqrt_softplus_libm(uint32_t first, uint32_t n, float *out)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t bits = first + i;
        float x;
        memcpy(&x, &bits, sizeof x);
        out[i] = sqrtf(x > 20.0f ? x : log1pf(expf(x)));
    }
}
