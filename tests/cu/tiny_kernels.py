"""Kernels small enough to check by hand, and shorthands for moving arrays, for the tests of the backends."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41rt.cu.backend import GpuBackend, HostBuffer, Stream
from ds41rt.cu.kernel import F32, I32, U64, Array, KernelSpec, Pointer, Scalar, Span


def _axpy(x: Array, y: Array, a: float, n: int) -> None:
    y[:] = np.float32(a) * y + x


def _scale(x: Array, a: int, n: int) -> None:
    # Wraps on purpose: as integers, unequal orders of scale and add give unequal results.
    x *= a


def _offset(x: Array, b: int, n: int) -> None:
    x += b


def _gather(table: Array, out: Array, n: int, width: int, spans: Sequence[Array]) -> None:
    for i, row in enumerate(spans):
        out[i] = row


def _gather_spans(table: Array, out: Array, n: int, width: int) -> list[Span]:
    return [Span(addr, I32, (width,), "r") for addr in table.tolist()]


def _scatter(table: Array, n: int, width: int, spans: Sequence[Array]) -> None:
    for i, row in enumerate(spans):
        row[:] = i + 100


def _scatter_spans(table: Array, n: int, width: int) -> list[Span]:
    return [Span(addr, I32, (width,), "w") for addr in table.tolist()]


def _optional(x: Array, extra: Array | None, n: int, m: int) -> None:
    x += 1 if extra is None else int(extra.sum())


def _writes_input(x: Array, n: int) -> None:
    x[0] = 1


def _broken(x: Array, n: int) -> None:
    x[0] += 1
    raise ZeroDivisionError("the reference has a bug")


N, M, WIDTH = Scalar("n", "u32"), Scalar("m", "u32"), Scalar("width", "u32")
TABLE = Pointer("table", U64, lambda s: (s.n,), "r")
AXPY = KernelSpec(
    "axpy",
    (Pointer("x", F32, lambda s: (s.n,), "r"), Pointer("y", F32, lambda s: (s.n,), "rw"), Scalar("a", "f32"), N),
    _axpy,
)
X_RW = Pointer("x", I32, lambda s: (s.n,), "rw")
SCALE = KernelSpec("scale", (X_RW, Scalar("a", "i32"), N), _scale)
OFFSET = KernelSpec("offset", (X_RW, Scalar("b", "i32"), N), _offset)
GATHER = KernelSpec(
    "gather", (TABLE, Pointer("out", I32, lambda s: (s.n, s.width), "w"), N, WIDTH), _gather, _gather_spans
)
SCATTER = KernelSpec("scatter", (TABLE, N, WIDTH), _scatter, _scatter_spans)
OPTIONAL = KernelSpec("optional", (X_RW, Pointer("extra", I32, lambda s: (s.m,), "r"), N, M), _optional)
WRITES_INPUT = KernelSpec("writes_input", (Pointer("x", I32, lambda s: (s.n,), "r"), N), _writes_input)
BROKEN = KernelSpec("broken", (X_RW, N), _broken)

SCHEDULES = ["lazy", "eager", *(f"random:{seed}" for seed in range(8))]


def random_i32(rng: np.random.Generator, n: int) -> NDArray[np.int32]:
    return rng.integers(-1000, 1000, n, dtype=np.int32)


def upload(backend: GpuBackend, stream: Stream, name: str, array: NDArray[Any]) -> int:
    """A new device buffer with these contents; its address."""
    buf = backend.alloc(name, array.nbytes)
    backend.copy_h2d(buf.ptr, HostBuffer.pageable(name, array), array.nbytes, stream, label=f"upload {name}")
    backend.synchronize(stream)
    return buf.ptr


def download(backend: GpuBackend, stream: Stream, addr: int, like: NDArray[Any]) -> NDArray[Any]:
    """A synchronised copy of device memory with the shape and dtype of `like`."""
    out = np.full_like(like, 77)
    backend.copy_d2h(HostBuffer.pageable("out", out), addr, out.nbytes, stream, label="download")
    backend.synchronize(stream)
    return out
