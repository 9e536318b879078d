"""Loads everything of a checkpoint that stays on the device for the whole run: all text tensors but the routed experts
and the engram tables. One named device buffer a tensor, in the checkpoint's own formats. Must not know the step.
"""

from collections.abc import Callable

from ds41rt.checkpoint.source import ModelSource
from ds41rt.cu.backend import DeviceBuffer, GpuBackend, HostBuffer, Stream

_STAGING_NBYTES = 16 << 20


class DeviceWeights:
    """Name -> device buffer. `ptr(name)` is what launches bake."""

    def __init__(
        self,
        backend: GpuBackend,
        source: ModelSource,
        stream: Stream,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._backend = backend
        self._buffers: dict[str, DeviceBuffer] = {}
        tensors = source.resident_tensors()
        total, done = sum(nbytes for _, nbytes in tensors), 0
        staging = backend.alloc_pinned("weight staging", _STAGING_NBYTES)
        self._staging: HostBuffer | None = staging
        try:
            for name, nbytes in tensors:
                buf = backend.alloc(name, nbytes)
                self._buffers[name] = buf
                for off in range(0, nbytes, _STAGING_NBYTES):
                    part = min(_STAGING_NBYTES, nbytes - off)
                    source.read_into(name, staging.array[:part], off)
                    backend.copy_h2d(buf.ptr + off, staging, part, stream, 0, name)
                    backend.synchronize(stream)  # the staging buffer is rewritten next
                done += nbytes
                if progress is not None:
                    progress(done, total)
            self._free_staging()
        except BaseException:
            try:
                backend.synchronize(stream)  # a copy may still read the staging buffer
            finally:
                self.close()
            raise

    def ptr(self, name: str) -> int:
        return self._buffers[name].ptr

    def _free_staging(self) -> None:
        if self._staging is not None:
            self._backend.free_pinned(self._staging)
            self._staging = None  # only now: an interrupted free is tried again by close

    def close(self) -> None:
        self._free_staging()
        while self._buffers:
            self._backend.free(self._buffers.popitem()[1])
