"""Reads that were begun before a layer asked for its experts, in case it will; nobody waits for them here.

A read ahead takes a spare slot of the pool and evicts nothing. It changes no counter but its own and never fails a
step. Where the guess comes from is not this file's business.
"""

from collections.abc import Sequence

from ds41rt.moe.cache import ExpertCache
from ds41rt.moe.pool import PinnedPool
from ds41rt.moe.readers import ReaderPool, ReadJob


class Prefetch:
    """Counters, in experts: `n_issued` reads begun, of which `n_useful` arrived and were asked for, `n_failed` failed,
    `n_wasted` were not asked for. The three add up to `n_issued` whenever nothing is pending."""

    def __init__(self, cache: ExpertCache, pool: PinnedPool, readers: ReaderPool, unknown: list[int]) -> None:
        """`unknown` gets the slot of a read whose submission was interrupted: its owner drains the readers first."""
        self._unknown = unknown
        self._cache = cache
        self._pool = pool
        self._readers = readers
        self._pending: dict[tuple[int, int], tuple[int, ReadJob]] = {}
        self.n_issued = 0
        self.n_useful = 0
        self.n_wasted = 0
        self.n_failed = 0

    def issue(self, layer: int, experts: Sequence[int], keep: int) -> None:
        """Begin to read those of `experts` that are in no tier, while more than `keep` slots are spare.

        To be called at a drained point, like a fetch.
        """
        self._pool.reclaim()
        for expert in experts:
            if self._pool.n_spare <= keep:
                return
            if not self._cache.slot_of(layer, expert) and (layer, expert) not in self._pending:
                slot = self._pool.take()
                try:
                    job = self._readers.submit(layer, expert, self._pool.for_reader(slot))
                    self._pending[layer, expert] = slot, job
                except BaseException:
                    if (layer, expert) not in self._pending:
                        self._unknown.append(slot)
                    raise
                self.n_issued += 1

    def take(self, layer: int, expert: int) -> tuple[int, ReadJob] | None:
        """The slot and the read of this expert if there is one; both are the caller's from now on."""
        return self._pending.pop((layer, expert), None) if self._pending else None

    def recover(self) -> None:
        """Forget what is pending; the pool has its slots back in another way."""
        self.n_wasted += len(self._pending)
        self._pending.clear()

    def settle(self) -> None:
        """The layer that was guessed for has got what it needs: what is still pending was for nothing."""
        while self._pending:
            _, (slot, job) = self._pending.popitem()
            self._pool.quarantine(slot, job)
            if job.done and job.outcome() is not None:
                self.n_failed += 1
            else:
                self.n_wasted += 1
