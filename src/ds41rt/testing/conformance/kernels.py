"""The two kernels that conformance cases launch, with PTX text of their own: int32 arithmetic, and a delay."""

import numpy as np

from ds41rt.cu.kernel import I32, Array, Geometry, KernelSpec, Pointer, Scalar, Scalars

AFFINE_PTX = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry conformance_affine(.param .u64 x, .param .u32 a, .param .u32 b, .param .u32 n)
{
    .reg .pred %done;
    .reg .b32 %a, %b, %n, %i, %block, %width, %value;
    .reg .b64 %base, %off;
    ld.param.u64 %base, [x];
    ld.param.u32 %a, [a];
    ld.param.u32 %b, [b];
    ld.param.u32 %n, [n];
    mov.u32 %block, %ctaid.x;
    mov.u32 %width, %ntid.x;
    mov.u32 %i, %tid.x;
    mad.lo.u32 %i, %block, %width, %i;
    setp.ge.u32 %done, %i, %n;
    @%done bra END;
    cvta.to.global.u64 %base, %base;
    mul.wide.u32 %off, %i, 4;
    add.u64 %base, %base, %off;
    ld.global.u32 %value, [%base];
    mad.lo.u32 %value, %value, %a, %b;
    st.global.u32 [%base], %value;
END:
    ret;
}
"""
# Bounded twice, by the clock and by a count: a delay must come to an end on every device.
DELAY_PTX = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry conformance_delay(.param .u32 us)
{
    .reg .pred %early, %more;
    .reg .b32 %us, %left;
    .reg .b64 %start, %now, %limit;
    ld.param.u32 %us, [us];
    mul.wide.u32 %limit, %us, 1000;
    mov.u32 %left, 1000000;
    mov.u64 %start, %globaltimer;
AGAIN:
    nanosleep.u32 500;
    sub.u32 %left, %left, 1;
    setp.ne.u32 %more, %left, 0;
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %start;
    setp.lt.and.u64 %early, %now, %limit, %more;
    @%early bra AGAIN;
    ret;
}
"""


def _affine(x: Array, a: int, b: int, n: int) -> None:
    x[:] = x * np.int32(a) + np.int32(b)


def _delay(us: int) -> None:
    """Nothing to compute: on a simulated device, work is late because nobody has waited for it."""


def _one_thread_each(s: Scalars, n_multiprocessors: int) -> Geometry:
    return Geometry((-(-s.n // 128), 1, 1), 128)


# x = a * x + b, which wraps: unequal orders of two launches give unequal results.
AFFINE = KernelSpec(
    "conformance_affine",
    (Pointer("x", I32, lambda s: (s.n,), "rw"), Scalar("a", "i32"), Scalar("b", "i32"), Scalar("n", "u32")),
    _affine,
    geometry=_one_thread_each,
    ptx=AFFINE_PTX,
)
DELAY = KernelSpec(
    "conformance_delay",
    (Scalar("us", "u32"),),
    _delay,
    geometry=lambda s, n_multiprocessors: Geometry((1, 1, 1), 1),
    ptx=DELAY_PTX,
)
