"""Sizes on both sides of a page: what is given is what was asked for, to the byte; nothing cannot be had."""

from collections.abc import Callable

import numpy as np
import pytest

from ds41rt.cu.backend import DeviceBuffer, HostBuffer
from ds41rt.cu.host import HostBackend
from ds41rt.cu.result import CudaError, Status

SIZES = [1, 4095, 4096, 4097]


@pytest.mark.parametrize("nbytes", SIZES)
def test_every_byte_of_an_allocation_can_be_used_and_none_behind_it(nbytes: int) -> None:
    backend = HostBackend()
    stream = backend.create_stream("main")
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    buf, host = backend.alloc("ring", nbytes), backend.alloc_pinned("pages", nbytes)
    assert (buf.nbytes, host.nbytes, host.array.size) == (nbytes, nbytes, nbytes)
    out = np.zeros(nbytes, np.uint8)
    backend.copy_h2d(buf.ptr, HostBuffer.pageable("data", data), nbytes, stream)
    backend.copy_d2d(host.device_ptr, buf.ptr, nbytes, stream)
    backend.copy_d2h(HostBuffer.pageable("out", out), host.device_ptr, nbytes, stream)
    backend.synchronize(stream)
    assert np.array_equal(out, data)
    with pytest.raises(CudaError, match=rf"{nbytes + 1} bytes at 0 do not fit host buffer 'pages' of {nbytes}"):
        backend.copy_h2d(buf.ptr, host, nbytes + 1, stream)
    with pytest.raises(CudaError, match=rf"{nbytes + 1} bytes at .* offset 0 of 'ring' \({nbytes} bytes") as info:
        backend.fill(buf.ptr, 1, nbytes + 1, stream, label="clear")
    assert info.value.status is Status.INVALID_VALUE
    backend.synchronize(stream)


def test_nothing_is_refused_with_a_hint() -> None:
    backend = HostBackend()
    calls: list[Callable[[str, int], DeviceBuffer | HostBuffer]] = [backend.alloc, backend.alloc_pinned]
    for call in calls:
        with pytest.raises(CudaError, match="'ring' of 0 bytes; ask for at least 1") as info:
            call("ring", 0)
        assert info.value.status is Status.INVALID_VALUE


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_refusal_says_how_much_was_asked_for_and_how_much_there_is(nbytes: int) -> None:
    backend = HostBackend(memory_nbytes=nbytes - 1, pinned_nbytes=nbytes - 1)
    with pytest.raises(MemoryError, match=f"device buffer 'ring' needs {nbytes} bytes, {nbytes - 1} are free"):
        backend.alloc("ring", nbytes)
    with pytest.raises(MemoryError, match=f"pinned buffer 'ring' needs {nbytes} bytes, {nbytes - 1} are free"):
        backend.alloc_pinned("ring", nbytes)
    assert backend.live()["buffers"] == 0
