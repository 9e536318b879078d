"""The device arena of routed experts: slots, and the addresses that kernels derive from a slot code.

Slot i lies at base + i * slot_nbytes and holds one expert in file order, [w1|w2|w3] then [s1|s2|s3]. Slot 0 is
reserved and zeroed: an absent expert's pointers lead there, so that a replay never faults. Slots of the pinned pool lie
in the same way behind a base of their own. Knows no residency.
"""

from contextlib import ExitStack

from ds41rt.checkpoint.layout import ExpertLayout
from ds41rt.cu.backend import GpuBackend, Stream
from ds41rt.moe.header import HOST_SLOT_BIT, SLOT_TABLE_LAYERS, header_words

_SLOT_ALIGN = 256


class ExpertArena:
    """`n_slots` usable slots behind the reserved slot 0, and the header rows that the selection kernel writes.

    `host_base` is the device address of the pinned pool's slot 0 (see `moe.pool`).
    """

    def __init__(
        self, backend: GpuBackend, layout: ExpertLayout, n_slots: int, host_base: int, top_k: int, stream: Stream
    ) -> None:
        self._backend = backend
        self.host_base = host_base
        self.layout = layout
        self.n_slots = n_slots
        self.slot_nbytes = slot_nbytes(layout)
        self._header_nbytes = 4 * header_words(top_k)
        with ExitStack() as undo:
            self._arena = backend.alloc("expert arena", (n_slots + 1) * self.slot_nbytes)
            undo.callback(backend.free, self._arena)
            self._headers = backend.alloc("route headers", SLOT_TABLE_LAYERS * self._header_nbytes)
            undo.callback(backend.free, self._headers)
            backend.fill(self._arena.ptr, 0, self.slot_nbytes, stream, "expert arena slot 0")
            undo.pop_all()

    @property
    def base(self) -> int:
        return self._arena.ptr

    @property
    def headers_ptr(self) -> int:
        return self._headers.ptr

    @property
    def headers_nbytes(self) -> int:
        return self._headers.nbytes

    def header_row(self, layer: int) -> int:
        return self._headers.ptr + layer * self._header_nbytes

    def slot_ptr(self, code: int) -> int:
        """Device address of a slot of either tier, by its code; of the reserved slot for 0."""
        if code & HOST_SLOT_BIT:
            return self.host_base + (code ^ HOST_SLOT_BIT) * self.slot_nbytes
        return self._arena.ptr + code * self.slot_nbytes

    def close(self) -> None:
        self._backend.free(self._headers)
        self._backend.free(self._arena)


def slot_nbytes(layout: ExpertLayout) -> int:
    """Bytes from one slot to the next."""
    return -(-layout.nbytes // _SLOT_ALIGN) * _SLOT_ALIGN
