"""A kernel of your own on `GpuBackend`, and its test: `pytest -p ds41rt.testing.plugin examples`.

The kernel is declared once, with its NumPy reference and its PTX text; `Doubler` is the code under test. The simulated
device runs the reference, a real one the PTX.
"""

import numpy as np

from ds41rt.cu.kernel import F32, Array, Geometry, KernelSpec, Pointer, Scalar
from ds41rt.testing import CountingBackend, assert_no_leaks

PTX = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry twice_plus(.param .u64 x, .param .u64 y, .param .u32 n)
{
    .reg .pred %p;
    .reg .b32 %i, %n, %block, %width;
    .reg .f32 %a, %b;
    .reg .b64 %x, %y, %off;
    ld.param.u64 %x, [x];
    ld.param.u64 %y, [y];
    ld.param.u32 %n, [n];
    mov.u32 %block, %ctaid.x;
    mov.u32 %width, %ntid.x;
    mov.u32 %i, %tid.x;
    mad.lo.u32 %i, %block, %width, %i;
    setp.ge.u32 %p, %i, %n;
    @%p bra END;
    mul.wide.u32 %off, %i, 4;
    cvta.to.global.u64 %x, %x;
    cvta.to.global.u64 %y, %y;
    add.u64 %x, %x, %off;
    add.u64 %y, %y, %off;
    ld.global.f32 %a, [%x];
    ld.global.f32 %b, [%y];
    add.rn.f32 %a, %a, %a;
    add.rn.f32 %b, %b, %a;
    st.global.f32 [%y], %b;
END:
    ret;
}
"""


def _twice_plus(x: Array, y: Array, n: int) -> None:
    y[:] = y + (x + x)


TWICE_PLUS = KernelSpec(
    "twice_plus",
    (Pointer("x", F32, lambda s: (s.n,), "r"), Pointer("y", F32, lambda s: (s.n,), "rw"), Scalar("n", "u32")),
    _twice_plus,
    geometry=lambda s, n_multiprocessors: Geometry((-(-s.n // 256), 1, 1), 256),
    ptx=PTX,
)


class Doubler:
    """The code under test: y += 2 x for each x that comes in, copied on one stream and added on another, as a graph."""

    def __init__(self, gpu: CountingBackend, n: int) -> None:
        self.gpu = gpu
        self.host_x, self.host_y = gpu.alloc_pinned("x", 4 * n), gpu.alloc_pinned("y", 4 * n)
        self.x, self.y = gpu.alloc("x", 4 * n), gpu.alloc("y", 4 * n)
        self.copies, self.sums = gpu.create_stream("copies"), gpu.create_stream("sums")
        self.fork, self.copied = gpu.create_event("fork"), gpu.create_event("copied")
        launch = gpu.prepare(TWICE_PLUS, {"x": self.x.ptr, "y": self.y.ptr, "n": n}, "sum")
        gpu.fill(self.y.ptr, 0, 4 * n, self.sums, label="clear")
        gpu.begin_capture(self.sums)
        gpu.record(self.fork, self.sums)
        gpu.wait(self.copies, self.fork)
        gpu.copy_h2d(self.x.ptr, self.host_x, 4 * n, self.copies, label="x")
        gpu.record(self.copied, self.copies)
        gpu.wait(self.sums, self.copied)
        gpu.launch(launch, self.sums)
        graph = gpu.end_capture(self.sums)
        self.exec = gpu.instantiate(graph)
        gpu.destroy_graph(graph)

    def add(self, x: Array) -> None:
        self.host_x.array.view(np.float32)[:] = x
        self.gpu.launch_graph(self.exec, self.sums)
        self.gpu.synchronize(self.sums)  # host_x may be written again from here on

    def result(self) -> Array:
        self.gpu.copy_d2h(self.host_y, self.y.ptr, self.y.nbytes, self.sums, label="y")
        self.gpu.synchronize(self.sums)
        return self.host_y.array.view(np.float32).copy()

    def close(self) -> None:
        gpu = self.gpu
        gpu.destroy_exec(self.exec)
        for event in (self.fork, self.copied):
            gpu.destroy_event(event)
        for stream in (self.copies, self.sums):
            gpu.destroy_stream(stream)
        for buf in (self.x, self.y):
            gpu.free(buf)
        for host in (self.host_x, self.host_y):
            gpu.free_pinned(host)


def test_doubler(gpu: CountingBackend) -> None:
    xs = np.random.default_rng(0).standard_normal((5, 1000)).astype(np.float32)
    want = np.zeros(1000, np.float32)
    doubler = Doubler(gpu, 1000)
    for x in xs:
        doubler.add(x)
        want += x + x
    assert np.array_equal(doubler.result(), want)
    doubler.close()
    assert_no_leaks(gpu)
