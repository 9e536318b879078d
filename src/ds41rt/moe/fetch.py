"""Brings missing experts from the checkpoint into the device arena: read, stage, copy, map - in that order.

The copy is enqueued on the compute stream: kernels that still use the slot's old bytes are ahead of it, kernels that
need the new ones are behind it. Synchronous reads; must not know headers, segments or routing.
"""

from collections.abc import Sequence
from enum import Enum

from ds41rt.checkpoint.source import ModelSource
from ds41rt.cu.backend import GpuBackend, Stream
from ds41rt.errors import CheckpointError
from ds41rt.moe.arena import ExpertArena
from ds41rt.moe.cache import ExpertCache, Ticket, reads_failed


class _Staged(Enum):
    """What may still read the staging slots: nothing, copies before the event, copies that no event follows."""

    NOTHING = 0
    RECORDED = 1
    UNRECORDED = 2


class ExpertFetcher:
    """One staging slot per pick of a layer; a stager is rewritten only after its last copy has completed."""

    def __init__(
        self, backend: GpuBackend, cache: ExpertCache, arena: ExpertArena, source: ModelSource, top_k: int
    ) -> None:
        self._backend = backend
        self._cache = cache
        self._arena = arena
        self._source = source
        self._nbytes = arena.layout.nbytes
        self._copied = backend.create_event("expert staging")
        self._staged = _Staged.NOTHING
        self.bytes_read = 0
        try:
            self._staging = backend.alloc_pinned("expert staging", top_k * arena.slot_nbytes)
        except BaseException:
            backend.destroy_event(self._copied)
            raise
        self._stagers = [
            self._staging.array[i * arena.slot_nbytes : i * arena.slot_nbytes + self._nbytes] for i in range(top_k)
        ]

    def fetch(self, layer: int, experts: Sequence[int], stream: Stream, *, count: bool) -> int:
        """Make `experts` of `layer` resident; returns how many were read. Hits are touched, `count` feeds the counters.

        Raises `CacheError` when reads fail or no slot can be freed: what arrived stays mapped, what did not is not.
        """
        plan = self._cache.plan_fetch(layer, experts, count=count)
        if not plan.tickets:
            return 0
        failures: list[tuple[Ticket, Exception]] = []
        fetched = 0
        try:
            self._wait_for_staging(stream)
            for i, ticket in enumerate(plan.tickets):
                try:
                    self._source.read_expert(layer, ticket.expert, self._stagers[i])
                except (CheckpointError, OSError) as e:
                    failures.append((ticket, e))
                    continue
                self._cache.evict(ticket)
                self._staged = _Staged.UNRECORDED
                self._backend.copy_h2d(
                    self._arena.slot_ptr(ticket.slot),
                    self._staging,
                    self._nbytes,
                    stream,
                    i * self._arena.slot_nbytes,
                    "expert.copy",
                )
                self._cache.commit(ticket)
                fetched += 1
            if fetched:
                self._backend.record(self._copied, stream)
                self._staged = _Staged.RECORDED
        finally:
            self.bytes_read += fetched * self._nbytes
            self._cache.abort(plan)
        if failures:
            raise reads_failed(plan, failures) from failures[0][1]
        return fetched

    def _wait_for_staging(self, stream: Stream) -> None:
        """Return once no copy can still read the staging slots."""
        if self._staged is _Staged.RECORDED:
            self._backend.synchronize_event(self._copied)
        elif self._staged is _Staged.UNRECORDED:
            self._backend.synchronize(stream)  # a call failed between copy and record: only the stream knows
        self._staged = _Staged.NOTHING

    def close(self) -> None:
        self._backend.destroy_event(self._copied)
        self._backend.free_pinned(self._staging)
