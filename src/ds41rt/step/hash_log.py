"""Logs a 64-bit hash of every part of a step that an observer sees: two logs part where the first hash differs."""

import hashlib

import numpy as np
from numpy.typing import NDArray

from ds41rt.cu.backend import GpuBackend, HostBuffer, Stream
from ds41rt.log import Logger
from ds41rt.step.buffers import StepBuffers

log = Logger("ds41rt.trace")


def hash64(raw: NDArray[np.uint8]) -> int:
    """blake2b with 8 bytes of digest, read as a little-endian number."""
    return int.from_bytes(hashlib.blake2b(raw.tobytes(), digest_size=8).digest(), "little")


class PartReader:
    """Reads parts of a step back, of at most `nbytes`."""

    def __init__(self, backend: GpuBackend, nbytes: int) -> None:
        self._backend = backend
        self._host: HostBuffer = backend.alloc_pinned("trace image", nbytes)

    def read(self, addr: int, nbytes: int, stream: Stream) -> NDArray[np.uint8]:
        """uint8[nbytes] at device address `addr` once `stream` got here; good until the next call. Synchronises."""
        self._backend.copy_d2h(self._host, addr, nbytes, stream, 0, "trace")
        self._backend.synchronize(stream)
        return self._host.array[:nbytes]

    def close(self) -> None:
        self._backend.free_pinned(self._host)


class HashLog:
    """A step observer: one event a part, at level info. Synchronises at each."""

    def __init__(self, backend: GpuBackend, buffers: StepBuffers) -> None:
        self._reader = PartReader(backend, buffers.saved.nbytes)  # no part of a step is larger

    def selection(self, layer: int, rows: NDArray[np.int32]) -> None:
        log.info("trace", layer=layer, part="selection", rows=rows.size, hash=f"{hash64(rows.view(np.uint8)):016x}")

    def point(self, position: int, layer: int, part: str, addr: int, nbytes: int, stream: Stream) -> None:
        raw = self._reader.read(addr, nbytes, stream)
        log.info("trace", pos=position, layer=layer, part=part, hash=f"{hash64(raw):016x}")

    def close(self) -> None:
        self._reader.close()
