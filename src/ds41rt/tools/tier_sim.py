"""Replays the picks of a route trace on the runtime's expert cache and counts where they were found.

The cache, its policies and its moves are the runtime's own (`moe.cache`). What is made simple: a read is there at once,
and a promotion is done when its token is: it takes no time, and never meets a victim that is used again meanwhile.
Nothing is read ahead of its use.
"""

from dataclasses import dataclass, field

from ds41rt.errors import InputError
from ds41rt.kernels.router import HOST_SLOT_BIT
from ds41rt.moe.cache import ExpertCache
from ds41rt.moe.mover import MOVES_PER_TOKEN
from ds41rt.moe.route_trace import RouteTrace


@dataclass(frozen=True, slots=True)
class Tiers:
    """What to simulate: slots a tier, the policy of both, and the promotions.

    After a token up to `moves` experts that it used in the host tier, and that were used there `promote_after` times
    since they came, change places with victims of the device tier; the ones used most often since they came, or without
    `most_used_first` the first used ones.
    """

    device_slots: int
    host_slots: int = 0
    policy: str = "least-used"
    evict_random_pct: float = 8.0
    moves: int = MOVES_PER_TOKEN
    promote_after: int = 1
    most_used_first: bool = True
    seed: int = 0


@dataclass(slots=True)
class Counts:
    """Of `tokens` tokens, in experts; `clean` counts, for each segment, the tokens of which no pick was in neither tier
    when its layer ran."""

    tokens: int = 0
    device_hits: int = 0
    host_hits: int = 0
    misses: int = 0
    moved: int = 0
    clean: list[int] = field(default_factory=list)


class TierSimulator:
    """One cache, empty at first, and the pool slots that hold no expert now."""

    def __init__(self, trace: RouteTrace, tiers: Tiers) -> None:
        facts = trace.facts
        slots = tiers.device_slots + tiers.host_slots
        if min(tiers.device_slots, tiers.host_slots) < 0 or slots < facts.top_k:
            raise InputError(
                f"{tiers.device_slots} device and {tiers.host_slots} host slots cannot hold one token's working set of "
                f"{facts.top_k} experts (top-k); give more slots"
            )
        if tiers.moves < 0 or tiers.promote_after < 1:
            raise InputError(f"moves must be at least 0, is {tiers.moves}; promote-after 1, is {tiers.promote_after}")
        self._tiers = tiers
        # A layer's reads before their victims leave, and one victim of a move.
        n_spare = facts.top_k + 1 if tiers.host_slots else 0
        pool_slots = tiers.host_slots + n_spare
        self._spare = list(range(pool_slots, 0, -1))
        self._cache = ExpertCache(
            facts.n_layers,
            facts.n_experts,
            tiers.device_slots,
            host_slots=tiers.host_slots,
            pool_slots=pool_slots,
            policy=tiers.policy,
            evict_random_pct=tiers.evict_random_pct,
            seed=tiers.seed,
        )
        self._picks = trace.expert_ids
        self._ends = [*facts.segment_starts[1:], facts.n_layers]
        self._n_experts = facts.n_experts
        self._uses = [0] * (facts.n_layers * facts.n_experts)  # in the host tier, since the expert came there
        self._moved = 0

    def run(self, warm_tokens: int) -> Counts:
        """Replay all tokens; those behind the first `warm_tokens` are counted."""
        n_tokens = self._picks.shape[0]
        if not 0 <= warm_tokens < n_tokens:
            raise InputError(
                f"{warm_tokens} warm-up tokens of {n_tokens} leave none to count; give fewer, or more tokens"
            )
        cache = self._cache
        before = self._counts()
        clean = [0] * len(self._ends)
        for token, picks in enumerate(self._picks.tolist()):
            if token == warm_tokens:
                before = self._counts()
                clean = [0] * len(self._ends)
            layer = 0
            for segment, end in enumerate(self._ends):
                missing = cache.misses
                while layer < end:
                    self._layer(layer, picks[layer])
                    layer += 1
                clean[segment] += cache.misses == missing
            self._promote()
        now = self._counts()
        return Counts(
            n_tokens - warm_tokens,
            now.device_hits - before.device_hits,
            now.host_hits - before.host_hits,
            now.misses - before.misses,
            now.moved - before.moved,
            clean,
        )

    def _counts(self) -> Counts:
        """Since the beginning."""
        cache = self._cache
        return Counts(0, cache.hits, cache.host_hits, cache.misses, self._moved)

    def _layer(self, layer: int, experts: list[int]) -> None:
        cache = self._cache
        cache.begin_epoch()
        for ticket in cache.plan_fetch(layer, experts).tickets:
            left = cache.evict(ticket)
            slot = 0
            if ticket.to_host:
                slot = self._spare.pop()
                self._uses[layer * self._n_experts + ticket.expert] = 0
            cache.commit(ticket, slot)
            if left:
                self._spare.append(left)

    def _promote(self) -> None:
        cache, tiers, uses = self._cache, self._tiers, self._uses
        used = cache.take_used_in_host()
        for key in used:
            uses[key] += 1
        wanted = [key for key in used if uses[key] >= tiers.promote_after]
        if tiers.most_used_first:
            wanted.sort(key=lambda key: -uses[key])
        cache.begin_epoch()
        n_moved = 0
        for key in wanted:
            if n_moved == tiers.moves:
                break
            move = cache.begin_move(key) if cache.codes[key] >= HOST_SLOT_BIT else None
            if move is None:
                continue
            if move.victim >= 0:
                cache.demote(move, self._spare.pop())
                uses[move.victim] = 0
            self._spare.append(cache.promote(move))
            n_moved += 1
        self._moved += n_moved
