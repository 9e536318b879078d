"""Which expert lies in which slot of the arena: map, reverse map, victims, counters and the log for the slot table.

A pure data structure: it does no I/O, knows no device and reads no settings. A miss is served in steps, so that the
caller can move bytes between them and no key ever maps to bytes that did not arrive:

    plan = cache.plan_fetch(layer, experts)
    try:
        for ticket in plan.tickets:
            ...read the expert into staging...
            cache.evict(ticket)     # from here on the slot's bytes may change
            ...copy it into ticket.slot...
            cache.commit(ticket)
    finally:
        cache.abort(plan)           # gives back what did not arrive; after full success there is nothing
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ds41rt.errors import CacheError, InputError
from ds41rt.moe.recency import Recency

Triple = tuple[int, int, int]


class TicketState(Enum):
    """Where one miss stands; see `Ticket`."""

    RESERVED = "reserved"
    EVICTED = "evicted"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class Ticket:
    """One expert to read and the slot reserved for it.

    `place` is the victim's place in the order of ages, None for an empty slot. Only `ExpertCache` changes a ticket.
    """

    layer: int
    expert: int
    slot: int
    place: int | None
    state: TicketState


@dataclass(slots=True, eq=False)
class FetchPlan:
    """What one call asked for. `slots` has one slot a requested expert, in request order, right once all tickets are
    committed; `tickets` has one entry a distinct missing expert, in order of first request."""

    layer: int
    slots: list[int]
    tickets: list[Ticket]


@dataclass(frozen=True, slots=True)
class SlotChanges:
    """The changes that the slot table has not seen: (layer, expert, slot or -1), one a key, oldest first."""

    triples: list[Triple]
    mark: int


def reads_failed(plan: FetchPlan, failures: Sequence[tuple[Ticket, Exception]]) -> CacheError:
    """The error of a fetch of which some reads failed: how many of how many, and the first one's reason."""
    ticket, why = failures[0]
    return CacheError(
        f"layer {plan.layer}: {len(failures)} of {len(plan.tickets)} expert reads failed; "
        f"first: expert {ticket.expert}: {why}"
    )


class ExpertCache:
    """Slots 1..n_slots for the n_layers * n_experts experts of a model; slot 0 is reserved and never handed out.

    Slots used in the current epoch (see `begin_epoch`) are never evicted; empty slots are used first, then a random
    one among the oldest `evict_random_pct` percent, reproducible from `seed`. One plan is open at a time, so no slot
    that is being filled can become a victim. One thread only.

    Counters, in experts: `hits` and `misses` (requested ones that were resident when asked for, and that were not;
    their sum is the demand), `evictions` (keys dropped), `failed` (missing ones that a plan did not bring in).
    """

    def __init__(
        self, n_layers: int, n_experts: int, n_slots: int, *, evict_random_pct: float = 8.0, seed: int = 0
    ) -> None:
        for name, value in (("n_layers", n_layers), ("n_experts", n_experts), ("n_slots", n_slots)):
            if value < 1:
                raise InputError(f"expert cache: {name} must be at least 1, is {value}")
        if not 0.0 <= evict_random_pct <= 100.0:
            raise InputError(f"expert cache: evict_random_pct must be in 0..100, is {evict_random_pct}")
        self.n_layers = n_layers
        self.n_experts = n_experts
        self.n_slots = n_slots
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self.failed = 0
        # A key is layer * n_experts + expert.
        self._rows = [[0] * n_experts for _ in range(n_layers)]  # layer -> expert -> slot, 0 = absent
        self._key = [-1] * (n_slots + 1)  # slot -> key, -1 = empty
        self._empty = list(range(n_slots, 0, -1))  # a stack; low slots are used first
        self._recency = Recency(n_slots, evict_random_pct, seed)
        self._plan: FetchPlan | None = None
        self._n_open = 0  # tickets of _plan that are neither committed nor given back
        self._changes: dict[int, tuple[int, int]] = {}  # key -> (serial, slot or -1), ascending serials
        self._serial = 0

    def begin_epoch(self) -> None:
        """Unpin every slot: the next layer of the step starts. Raises `CacheError` while a plan is open."""
        if self._plan is not None:
            raise CacheError(
                f"layer {self._plan.layer}: a fetch with {self._n_open} unfilled slots is still open; "
                "commit or abort it before the next epoch"
            )
        self._recency.begin_epoch()

    def slot_of(self, layer: int, expert: int) -> int:
        """The slot that holds this expert, 0 if none does."""
        if not 0 <= expert < self.n_experts:
            raise self._no_such_expert(layer, expert)
        return self._row(layer)[expert]

    def key_of(self, slot: int) -> tuple[int, int] | None:
        """(layer, expert) in this slot, None if it is empty or no usable slot."""
        key = self._key[slot] if 0 < slot <= self.n_slots else -1
        return None if key < 0 else divmod(key, self.n_experts)

    def first_wrong(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> int | None:
        """The first i whose slots[i] is a slot (above 0) that does not hold (layer, experts[i]), by the reverse map."""
        key_of, n_slots, base = self._key, self.n_slots, layer * self.n_experts
        for i, slot in enumerate(slots):
            if slot > 0 and not (slot <= n_slots and key_of[slot] == base + experts[i]):
                return i
        return None

    def touch(self, slot: int) -> None:
        """Make this slot the newest and pin it for the epoch. Raises `InputError` if it holds no expert."""
        if not 0 < slot <= self.n_slots:
            raise InputError(f"slot {slot} is outside 1..{self.n_slots}")
        self._recency.touch((slot,))

    def plan_fetch(self, layer: int, experts: Sequence[int], *, count: bool = True) -> FetchPlan:
        """Pin the resident ones of `experts` and reserve a slot for each missing one; duplicates are one ticket.

        `count=False` leaves hits and misses alone: the same token asks a second time. A plan without tickets is
        complete at once. Raises `InputError` (id out of range, a plan is open) with nothing changed, and `CacheError`
        when there are not enough slots to give up, with only the counters changed.
        """
        row = self._row(layer)
        if self._plan is not None:
            raise InputError(f"layer {layer}: the fetch of layer {self._plan.layer} is still open; commit or abort it")
        if experts and not (min(experts) >= 0 and max(experts) < self.n_experts):
            raise self._no_such_expert(layer, next(e for e in experts if not 0 <= e < self.n_experts))
        slots = [row[expert] for expert in experts]
        n_absent = slots.count(0)
        if count:
            self.hits += len(slots) - n_absent
            self.misses += n_absent
        if not n_absent:
            self._recency.touch(slots)
            return FetchPlan(layer, slots, [])
        missing = list(dict.fromkeys(e for e, slot in zip(experts, slots, strict=True) if not slot))
        self._require_room(layer, slots, len(missing))
        self._recency.touch(slots)
        tickets = [self._reserve(layer, expert) for expert in missing]
        reserved = {ticket.expert: ticket.slot for ticket in tickets}
        slots = [slot or reserved[expert] for expert, slot in zip(experts, slots, strict=True)]
        self._plan = FetchPlan(layer, slots, tickets)
        self._n_open = len(tickets)
        return self._plan

    def _require_room(self, layer: int, slots: list[int], n_missing: int) -> None:
        hit = set(slots) - {0}
        room = len(self._empty) + self._recency.unpinned - self._recency.n_unpinned(hit)
        if n_missing <= room:
            return
        self.failed += n_missing
        raise CacheError(
            f"layer {layer}: {n_missing} experts are missing and only {room} of {self.n_slots} slots can be given up "
            f"({len(hit)} hold experts of this request, {self.n_slots - room - len(hit)} others are pinned): the "
            "expert cache is smaller than one token's working set; "
            f"raise it to at least {self.n_slots + n_missing - room} slots"
        )

    def _reserve(self, layer: int, expert: int) -> Ticket:
        if self._empty:
            return Ticket(layer, expert, self._empty.pop(), None, TicketState.RESERVED)
        slot, place = self._recency.take_victim()
        return Ticket(layer, expert, slot, place, TicketState.RESERVED)

    def evict(self, ticket: Ticket) -> None:
        """Drop the key that the reserved slot still holds: call it just before the slot's bytes can change."""
        if ticket.state is not TicketState.RESERVED:
            raise self._misuse(ticket, "evicted for")
        ticket.state = TicketState.EVICTED
        key = self._key[ticket.slot]
        if key < 0:
            return
        self._key[ticket.slot] = -1
        layer, expert = divmod(key, self.n_experts)
        self._rows[layer][expert] = 0
        self.evictions += 1
        self._log(key, -1)

    def commit(self, ticket: Ticket) -> None:
        """The bytes have arrived (or their copy is enqueued in stream order): map the key, pin the slot."""
        if ticket.state is not TicketState.EVICTED:
            raise self._misuse(ticket, "committed")
        ticket.state = TicketState.COMMITTED
        key = ticket.layer * self.n_experts + ticket.expert
        self._key[ticket.slot] = key
        self._rows[ticket.layer][ticket.expert] = ticket.slot
        self._recency.add(ticket.slot)
        self._log(key, ticket.slot)
        self._closed(1)

    def abort(self, plan: FetchPlan) -> None:
        """Give back every slot of the plan that was not committed: with its old key and age if that was not evicted,
        as an empty slot otherwise. Nothing is left to do for a plan that is complete or was aborted before."""
        n_given_back = 0
        for ticket in reversed(plan.tickets):  # reversed: empty slots return to the stack in their old order
            if ticket.state is TicketState.RESERVED and ticket.place is not None:
                self._recency.put_back(ticket.slot, ticket.place)
            elif ticket.state is TicketState.RESERVED or ticket.state is TicketState.EVICTED:
                self._empty.append(ticket.slot)
            else:
                continue
            ticket.state = TicketState.ABORTED
            n_given_back += 1
        self.failed += n_given_back
        self._closed(n_given_back)

    def _closed(self, n_tickets: int) -> None:
        self._n_open -= n_tickets
        if self._n_open == 0:
            self._plan = None

    def changes(self) -> SlotChanges:
        """What the slot table does not know yet. Nothing is forgotten before `changes_applied`."""
        n = self.n_experts
        triples = [(key // n, key % n, slot) for key, (_, slot) in self._changes.items()]
        return SlotChanges(triples, self._serial)

    def changes_applied(self, changes: SlotChanges) -> None:
        """The table update of this snapshot was accepted: forget what has not changed since it was taken."""
        done = []
        for key, (serial, _) in self._changes.items():
            if serial > changes.mark:
                break
            done.append(key)
        for key in done:
            del self._changes[key]

    def _log(self, key: int, slot: int) -> None:
        # One entry a key, the last: the log is bounded even if nobody reads it. Re-inserting keeps serials ascending.
        self._changes.pop(key, None)
        self._serial += 1
        self._changes[key] = (self._serial, slot)

    def _row(self, layer: int) -> list[int]:
        if not 0 <= layer < self.n_layers:
            raise InputError(f"expert cache: layer {layer} is outside 0..{self.n_layers - 1}")
        return self._rows[layer]

    def _no_such_expert(self, layer: int, expert: int) -> InputError:
        return InputError(f"layer {layer}: expert {expert} is outside 0..{self.n_experts - 1}")

    def _misuse(self, ticket: Ticket, verb: str) -> InputError:
        return InputError(
            f"layer {ticket.layer}: slot {ticket.slot} cannot be {verb} expert {ticket.expert}: "
            f"its ticket is {ticket.state.value}"
        )
