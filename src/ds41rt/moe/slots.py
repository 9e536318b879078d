"""The device slot table: int32 [SLOT_TABLE_LAYERS][n_experts], every expert's slot code, kept in step with the cache.

Updates travel as (layer, expert, slot) triples through pinned staging to a kernel that scatters them. This file must
not know when in a step an update is due.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import numpy as np

from ds41rt.cu.backend import DeviceBuffer, Event, GpuBackend, HostBuffer, Stream
from ds41rt.errors import InputError
from ds41rt.kernels.slots import SLOT_TABLE_SET
from ds41rt.moe.cache import ExpertCache
from ds41rt.moe.changes import Triple
from ds41rt.moe.header import ABSENT, SLOT_TABLE_LAYERS

DEFAULT_CAPACITY = 1024


class _Half:
    """One pinned staging half: word 0 is the number of triples, the triples follow."""

    __slots__ = ("copied", "host", "unrecorded", "words")

    def __init__(self, host: HostBuffer, event: Event) -> None:
        self.host = host
        self.copied = event
        # True if a copy may be on its way that `copied` does not stand for, because a call failed in between.
        self.unrecorded = False
        self.words = host.array.view(np.int32)


class SlotTable:
    """Owns the table, its staging and its update launch. Everything is enqueued on the one stream given here, that of
    the table's readers.

    There are two staging halves, because a pinned buffer is read when the copy *executes*: a half is rewritten only
    after the event behind its last copy. One device buffer for the triples is enough: the copy of the next chunk stands
    behind the launch that reads this one, in the same stream, and so does every reader of the table.
    """

    def __init__(
        self, backend: GpuBackend, cache: ExpertCache, stream: Stream, *, capacity: int = DEFAULT_CAPACITY
    ) -> None:
        """Allocates and enqueues the fill with -1. `capacity` is the largest number of triples of one launch."""
        if cache.n_layers > SLOT_TABLE_LAYERS:
            raise InputError(f"slot table: {cache.n_layers} layers, at most {SLOT_TABLE_LAYERS} fit")
        if capacity < 1:
            raise InputError(f"slot table: capacity must be at least 1, is {capacity}")
        self._backend = backend
        self._cache = cache
        self._stream = stream
        self._capacity = capacity
        table_nbytes = 4 * SLOT_TABLE_LAYERS * cache.n_experts
        triples_nbytes = 4 * (1 + 3 * capacity)
        with ExitStack() as undo:
            self.table = self._alloc(undo, "slot table", table_nbytes)
            self._triples = self._alloc(undo, "slot table triples", triples_nbytes)
            self._halves = [self._make_half(undo, i, triples_nbytes) for i in range(2)]
            self._launch = backend.prepare(
                SLOT_TABLE_SET,
                {
                    "table": self.table.ptr,
                    "triples": self._triples.ptr,
                    "n_layers": SLOT_TABLE_LAYERS,
                    "n_experts": cache.n_experts,
                    "capacity": capacity,
                },
                "slot table update",
            )
            # Last: no failure behind it may free memory under enqueued work.
            backend.fill(self.table.ptr, 0xFF, table_nbytes, stream, label="slot table init")
            self._resources = undo.pop_all()

    def _alloc(self, undo: ExitStack, name: str, nbytes: int) -> DeviceBuffer:
        buf = self._backend.alloc(name, nbytes)
        undo.callback(self._backend.free, buf)
        return buf

    def _make_half(self, undo: ExitStack, i: int, nbytes: int) -> _Half:
        host = self._backend.alloc_pinned(f"slot table staging {i}", nbytes)
        undo.callback(self._backend.free_pinned, host)
        event = self._backend.create_event(f"slot table staging {i} copied")
        undo.callback(self._backend.destroy_event, event)
        return _Half(host, event)

    def row_ptr(self, layer: int) -> int:
        """Device address of this layer's int32 [n_experts]."""
        return self.table.ptr + 4 * layer * self._cache.n_experts

    def update(self) -> None:
        """Enqueue every change that the cache has pending. If a call fails they all stay pending."""
        changes = self._cache.changes()
        if changes.triples:
            self.apply(changes.triples)
            self._cache.changes_applied(changes)

    def rewrite_layer(self, layer: int, experts: Iterable[int]) -> None:
        """Enqueue what the cache says of these experts, whatever the table holds: cures a stale or lost entry."""
        self.apply([(layer, e, self._cache.slot_of(layer, e) or ABSENT) for e in experts])

    def apply(self, triples: Sequence[Triple]) -> None:
        """Enqueue (layer, expert, slot code or -1) triples; of several for one key the last one counts.

        Raises `InputError` for a layer, expert or slot out of range, before anything is enqueued. After a failed
        backend call some chunks may have been enqueued; applying the same triples again is harmless.
        """
        cache = self._cache
        # The kernel writes a launch's triples in parallel: two for one key would race.
        last: dict[tuple[int, int], int] = {}
        for layer, expert, slot in triples:
            if not (0 <= layer < cache.n_layers and 0 <= expert < cache.n_experts):
                raise InputError(
                    f"slot table: layer {layer} expert {expert} is outside {cache.n_layers} x {cache.n_experts}"
                )
            if slot != ABSENT and not cache.is_code(slot):
                raise InputError(
                    f"slot table: layer {layer} expert {expert}: slot {slot:#x} is outside 1..{cache.n_slots} "
                    f"and 1..{cache.pool_slots} of the pinned pool"
                )
            last[layer, expert] = slot
        flat = [word for (layer, expert), slot in last.items() for word in (layer, expert, slot)]
        step = 3 * self._capacity
        for start in range(0, len(flat), step):
            self._enqueue(flat[start : start + step])

    def _enqueue(self, words: list[int]) -> None:
        backend, stream = self._backend, self._stream
        half = self._halves[0]
        if half.unrecorded:
            backend.synchronize(stream)
        else:
            backend.synchronize_event(half.copied)  # returns at once if it was never recorded
        half.words[0] = len(words) // 3
        half.words[1 : 1 + len(words)] = words
        half.unrecorded = True
        backend.copy_h2d(self._triples.ptr, half.host, 4 * (1 + len(words)), stream, label="slot table triples")
        backend.record(half.copied, stream)
        half.unrecorded = False
        backend.launch(self._launch, stream)
        self._halves.reverse()

    def close(self) -> None:
        """Free everything. Idempotent. The caller drained the stream and destroyed the graphs that read the table."""
        self._resources.close()
