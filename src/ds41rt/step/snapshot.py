"""Per-layer snapshots of the saved block, taken inside a segment's graph between attention and ffn half."""

from ds41rt.cu.backend import DeviceBuffer, GpuBackend, Stream


class Snapshots:
    """One copy of the saved block (see `step.buffers`) per layer; save and restore are one device copy each."""

    def __init__(self, backend: GpuBackend, saved: DeviceBuffer, n_layers: int) -> None:
        self._backend = backend
        self._saved = saved
        self._stride = -(-saved.nbytes // 256) * 256
        self._store = backend.alloc("snapshots", n_layers * self._stride)

    def ptr(self, layer: int) -> int:
        return self._store.ptr + layer * self._stride

    def save(self, layer: int, stream: Stream) -> None:
        self._backend.copy_d2d(self.ptr(layer), self._saved.ptr, self._saved.nbytes, stream, f"L{layer:02d}.snapshot")

    def restore(self, layer: int, stream: Stream) -> None:
        self._backend.copy_d2d(self._saved.ptr, self.ptr(layer), self._saved.nbytes, stream, "snapshot.restore")

    def close(self) -> None:
        self._backend.free(self._store)
