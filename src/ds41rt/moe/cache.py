"""Which expert lies in which slot of which tier: the map, victims, moves between the tiers, counters.

A pure data structure: it does no I/O, knows no device and reads no settings. A *slot code* says where an expert is:
a device slot (1..n_slots), HOST_SLOT_BIT | a slot of the pinned pool, or 0 for absent; one expert has one place. A miss
is served in steps, so that the caller can move bytes between them and no key ever maps to bytes that did not arrive:

    plan = cache.plan_fetch(layer, experts)
    try:
        for ticket in plan.tickets:
            ...read the expert into a pool slot that holds no key...
            left = cache.evict(ticket)     # device: from here on the slot's bytes may change
            ...device: copy it into ticket.slot...
            cache.commit(ticket, pool_slot)
    finally:
        cache.abort(plan)           # gives back what did not arrive; after full success there is nothing
"""

from array import array
from collections.abc import Iterable, Sequence
from functools import partial

from ds41rt.errors import CacheError, InputError
from ds41rt.kernels.router import HOST_SLOT_BIT
from ds41rt.moe.changes import ChangeLog, SlotChanges
from ds41rt.moe.plan import NOTHING_TO_FETCH, FetchPlan, Move, Ticket, TicketState
from ds41rt.moe.policy import make_policy
from ds41rt.moe.tier import Tier


class ExpertCache:
    """`n_slots` device slots and up to `host_slots` pool slots for the n_layers * n_experts experts of a model.

    Pool slots are numbered 1..`pool_slots`; which of them hold experts changes, because an expert stays where it was
    read. Slots used in the current epoch (see `begin_epoch`) are never evicted. A missing expert goes to an empty
    device slot, else to the host tier (room, or a victim of it), else to a device slot's victim; each tier has a policy
    of its own (see `moe.policy.make_policy`) that chooses victims, reproducible from `seed`. One plan is open at a
    time, so no slot that is being filled can become a victim; slots of a move are no victims either. One thread only.

    A key is layer * n_experts + expert. `codes[key]` is its slot code, for others to read.

    Counters, in experts: `hits` and `host_hits` (requested ones that were on the device, or in the host tier, when
    asked for), `misses` (that were not; the three add up to the demand), `evictions` (keys dropped), `failed`
    (missing ones that a plan did not bring in).
    """

    def __init__(
        self,
        n_layers: int,
        n_experts: int,
        n_slots: int,
        *,
        host_slots: int = 0,
        pool_slots: int = 0,
        policy: str = "oldest",
        evict_random_pct: float = 8.0,
        seed: int = 0,
    ) -> None:
        least_slots = 0 if host_slots > 0 else 1
        for name, value, least in (
            ("n_layers", n_layers, 1),
            ("n_experts", n_experts, 1),
            ("n_slots", n_slots, least_slots),
            ("host_slots", host_slots, 0),
            ("pool_slots", pool_slots, host_slots),
        ):
            if value < least:
                raise InputError(f"expert cache: {name} must be at least {least}, is {value}")
        self.n_layers = n_layers
        self.n_experts = n_experts
        self.n_slots = n_slots
        self.host_slots = host_slots
        self.pool_slots = pool_slots
        self.hits = 0
        self.host_hits = 0
        self.misses = 0
        self.evictions = 0
        self.failed = 0
        self.codes = array("i", [0]) * (n_layers * n_experts)
        self._log = ChangeLog(n_experts)
        self._policy = partial(make_policy, policy, evict_random_pct=evict_random_pct)
        self._seed = seed
        self._start_empty()

    def _start_empty(self) -> None:
        n_slots = self.n_slots
        self._device, self._host = (
            Tier(n, self._policy(max(n, 1), seed=self._seed + i)) for i, n in enumerate((n_slots, self.pool_slots))
        )
        # The hit path goes through these for every layer of every token.
        self._begin_device = self._device.policy.begin_epoch
        self._touch_device = self._device.policy.touch
        self._empty = list(range(n_slots, 0, -1))  # of the device, a stack; low slots are used first
        self._n_promised = 0  # host tickets that will take room and not a victim's place
        self._plan: FetchPlan | None = None
        self._n_open = 0  # tickets of _plan that are neither committed nor given back
        self._moving: dict[int, Move] = {}  # slot code -> its move: two entries a move
        self._n_in_transit = 0  # moves whose victim is in the host tier already, which has one key more until they end
        self._used_in_host: dict[int, None] = {}  # keys, in order of first use

    def begin_epoch(self) -> None:
        """Unpin every slot: the next layer of the step starts. Raises `CacheError` while a plan is open."""
        if self._plan is not None:
            raise CacheError(
                f"layer {self._plan.layer}: a fetch with {self._n_open} unfilled slots is still open; "
                "commit or abort it before the next epoch"
            )
        self._begin_device()
        if self.host_slots:
            self._host.policy.begin_epoch()

    # ---- looking

    def slot_of(self, layer: int, expert: int) -> int:
        """The code of the slot that holds this expert, 0 if none does."""
        if not 0 <= expert < self.n_experts:
            raise self._no_such_expert(layer, expert)
        return self.codes[self._first_key(layer) + expert]

    def is_code(self, code: int) -> bool:
        """True for the code of a slot, of either tier, whether it holds an expert or not."""
        return 0 < code <= self.n_slots or 0 < code - HOST_SLOT_BIT <= self.pool_slots

    def key_of(self, code: int) -> tuple[int, int] | None:
        """(layer, expert) in the slot of this code, None if it is empty or no slot's code."""
        key = self._key_in(code)
        return None if key < 0 else divmod(key, self.n_experts)

    def _key_in(self, code: int) -> int:
        if 0 < code <= self.n_slots:
            return self._device.keys[code]
        return self._host.keys[code - HOST_SLOT_BIT] if 0 < code - HOST_SLOT_BIT <= self.pool_slots else -1

    def first_wrong(self, layer: int, experts: Sequence[int], codes: Sequence[int]) -> int | None:
        """The first i whose codes[i] is above 0 and no slot that holds (layer, experts[i]), by the reverse maps."""
        base = layer * self.n_experts
        for i, code in enumerate(codes):
            if code > 0 and self._key_in(code) != base + experts[i]:
                return i
        return None

    # ---- using

    def touch(self, code: int) -> None:
        """Make this slot the newest and pin it for the epoch. Raises `InputError` if it holds no expert."""
        if not self.is_code(code):
            raise InputError(f"slot {code} is outside 1..{self.n_slots} and 1..{self.pool_slots} of the pinned pool")
        self._use((code,))

    def hit(self, codes: Sequence[int], *, count: bool = True) -> None:
        """`plan_fetch` of experts that the caller found in `codes`: they are counted and pinned."""
        if not self.host_slots or (codes and max(codes) < HOST_SLOT_BIT and self._moving.keys().isdisjoint(codes)):
            self._touch_device(codes)
            n_host = 0
        else:
            n_host = self._use(codes)
        if count:
            self.hits += len(codes) - n_host
            self.host_hits += n_host

    def plan_fetch(self, layer: int, experts: Sequence[int], *, count: bool = True) -> FetchPlan:
        """Pin the resident ones of `experts` and reserve a slot for each missing one; duplicates are one ticket.

        `count=False` leaves hits and misses alone: the same token asks a second time. A plan without tickets is
        complete at once. Raises `InputError` (id out of range, a plan is open) with nothing changed, and `CacheError`
        when there are not enough slots to give up, with only the counters changed.
        """
        base = layer * self.n_experts if 0 <= layer < self.n_layers else self._first_key(layer)
        if self._plan is not None:
            raise InputError(f"layer {layer}: the fetch of layer {self._plan.layer} is still open; commit or abort it")
        n_experts, code_of = self.n_experts, self.codes
        for expert in experts:
            if not 0 <= expert < n_experts:
                raise self._no_such_expert(layer, expert)
        codes = [code_of[base + expert] for expert in experts]
        if 0 not in codes:
            self.hit(codes, count=count)
            return NOTHING_TO_FETCH
        missing = list(dict.fromkeys(e for e, code in zip(experts, codes, strict=True) if not code))
        found = [code for code in codes if code]
        if count:
            n_host = sum(code >= HOST_SLOT_BIT for code in found)
            self.hits += len(found) - n_host
            self.host_hits += n_host
            self.misses += len(codes) - len(found)
        self._require_room(layer, set(found), len(missing))
        self._use(found)
        self._plan = FetchPlan(layer, [self._reserve(layer, expert) for expert in missing])
        self._n_open = len(missing)
        return self._plan

    def _use(self, codes: Iterable[int]) -> int:
        """Pin these slots, which hold experts; returns how many of them are the pool's."""
        device, host = [], []
        n_host = 0
        for code in codes:
            move = self._moving.get(code)
            if code < HOST_SLOT_BIT:
                if move is None:
                    device.append(code)
                else:
                    move.touched = True
                continue
            n_host += 1
            if move is None:
                host.append(code ^ HOST_SLOT_BIT)
                self._used_in_host[self._host.keys[code ^ HOST_SLOT_BIT]] = None
        self._device.policy.touch(device)
        self._host.policy.touch(host)
        return n_host

    # ---- bringing in

    def _require_room(self, layer: int, held: set[int], n_missing: int) -> None:
        device, host = self._device.policy, self._host.policy
        # Slots of moves are in neither order, and do not count.
        room = (
            len(self._empty)
            + self._host_room()
            + (device.unpinned - device.n_unpinned(code for code in held if code < HOST_SLOT_BIT))
            + (host.unpinned - host.n_unpinned(code ^ HOST_SLOT_BIT for code in held if code >= HOST_SLOT_BIT))
        )
        if n_missing <= room:
            return
        self.failed += n_missing
        total = self.n_slots + self.host_slots
        raise CacheError(
            f"layer {layer}: {n_missing} experts are missing and only {room} of {total} slots can be given up "
            f"({len(held)} hold experts of this request, {total - room - len(held)} others are pinned): the "
            "expert cache is smaller than one token's working set; "
            f"raise it to at least {total + n_missing - room} slots"
        )

    def _host_room(self) -> int:
        return max(0, self.host_slots - self._host.n_keys - self._n_promised)

    def _reserve(self, layer: int, expert: int) -> Ticket:
        state = TicketState.RESERVED
        if self._empty:
            return Ticket(layer, expert, False, self._empty.pop(), None, state)
        if self._host_room():
            self._n_promised += 1
            return Ticket(layer, expert, True, 0, None, state)
        to_host = self._host.policy.unpinned > 0
        slot, place = (self._host if to_host else self._device).policy.take_victim()
        return Ticket(layer, expert, to_host, slot, place, state)

    def evict(self, ticket: Ticket) -> int:
        """Drop the key that makes room. On the device: call it just before the slot's bytes can change.

        Returns the pool slot that holds no key any more, 0 if there is none.
        """
        if ticket.state is not TicketState.RESERVED:
            raise self._misuse(ticket, "evicted for")
        ticket.state = TicketState.EVICTED
        if ticket.to_host and not ticket.slot:
            self._n_promised -= 1
            return 0
        self._unmap((self._host if ticket.to_host else self._device).drop(ticket.slot))
        return ticket.slot if ticket.to_host else 0

    def commit(self, ticket: Ticket, pool_slot: int = 0) -> None:
        """The bytes have arrived (or their copy is enqueued in stream order): map the key, pin the slot.

        `pool_slot` is where an expert of the host tier was read to.
        """
        if ticket.state is not TicketState.EVICTED:
            raise self._misuse(ticket, "committed")
        ticket.state = TicketState.COMMITTED
        key = ticket.layer * self.n_experts + ticket.expert
        if ticket.to_host:
            self._host.put(pool_slot, key)
            self._place(key, HOST_SLOT_BIT | pool_slot)
        else:
            self._device.put(ticket.slot, key)
            self._place(key, ticket.slot)
        self._closed(1)

    def abort(self, plan: FetchPlan) -> None:
        """Give back what was reserved for the tickets of the plan that were not committed: with its old key and age if
        that was not evicted. Nothing is left to do for a plan that is complete or was aborted before."""
        n_given_back = 0
        for ticket in reversed(plan.tickets):  # reversed: empty slots return to the stack in their old order
            if ticket.state is TicketState.RESERVED:
                if ticket.place is not None:
                    (self._host if ticket.to_host else self._device).policy.put_back(ticket.slot, ticket.place)
                elif ticket.to_host:
                    self._n_promised -= 1
                else:
                    self._empty.append(ticket.slot)
            elif ticket.state is TicketState.EVICTED:
                if not ticket.to_host:
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

    # ---- moving from the host tier to the device; `moe.mover` moves the bytes

    @property
    def n_moving(self) -> int:
        """Slots that are no victims because a move uses them."""
        return len(self._moving)

    def take_used_in_host(self) -> list[int]:
        """Keys that were used in the host tier since the last call, in order of first use."""
        used = list(self._used_in_host)
        self._used_in_host.clear()
        return used

    def begin_move(self, key: int) -> Move | None:
        """Reserve a device slot for `key`. None if it is not in the host tier, or moving, or no slot can be given up.

        To be called right after `begin_epoch`. All keys stay where they are.
        """
        code = self.codes[key]
        if code < HOST_SLOT_BIT or code in self._moving:
            return None
        if self._empty:
            slot = self._empty.pop()
        elif self._device.policy.unpinned:
            slot, _ = self._device.policy.take_victim()
        else:
            return None
        home = code ^ HOST_SLOT_BIT
        self._host.policy.remove(home)
        move = Move(key, home, slot, self._device.keys[slot])
        self._moving[code] = self._moving[slot] = move
        return move

    def demote(self, move: Move, pool_slot: int) -> None:
        """The victim's bytes are in `pool_slot`: it belongs to the host tier from now on, its device slot to nobody."""
        self._n_in_transit += 1
        self._device.drop(move.slot)
        self._host.put(pool_slot, move.victim)
        self._place(move.victim, HOST_SLOT_BIT | pool_slot)

    def promote(self, move: Move) -> int:
        """The bytes are in the device slot: the move is over. Returns the pool slot that holds no key any more."""
        self._n_in_transit -= move.victim >= 0
        self._host.drop(move.home)
        self._device.put(move.slot, move.key)
        self._place(move.key, move.slot)
        self._forget(move)
        return move.home

    def cancel(self, move: Move) -> None:
        """End the move where it stands. A device slot that belongs to nobody becomes an empty one; the host tier may
        then hold more than it should (see `trim_host`)."""
        if self._moving.get(move.slot) is not move:
            return  # it had ended already when an interrupt came
        if self._device.keys[move.slot] >= 0:
            self._device.policy.add(move.slot)
        else:
            self._n_in_transit -= move.victim >= 0
            self._empty.append(move.slot)
        self._host.policy.add(move.home)
        self._forget(move)

    def trim_host(self) -> int:
        """Evict a key if the host tier holds more than it should; the pool slot that it leaves, 0 if there was none.

        To be called right after `begin_epoch`.
        """
        if self._host.n_keys - self._n_in_transit <= self.host_slots or not self._host.policy.unpinned:
            return 0
        slot, _ = self._host.policy.take_victim()
        self._unmap(self._host.drop(slot))
        return slot

    def _forget(self, move: Move) -> None:
        del self._moving[move.slot], self._moving[HOST_SLOT_BIT | move.home]

    # ---- after an interrupt

    def recover(self) -> list[int]:
        """Keep the experts of which both maps say the same, where they are, and forget all else: the plan, moves, ages.

        An interrupt may have come between any two statements of this file; whatever it left, an expert that both maps
        place in a slot has its bytes there. To be called when no read, copy or kernel is on its way. What every key is
        by then is pending for the slot table. Returns the pool slots that hold an expert.
        """
        found = [(key, code) for key, code in enumerate(self.codes) if code and self._key_in(code) == key]
        in_host = [pair for pair in found if pair[1] >= HOST_SLOT_BIT][: self.host_slots]  # a move may have left more
        kept = [*(pair for pair in found if pair[1] < HOST_SLOT_BIT), *in_host]
        # From here to the end another interrupt leaves fewer experts on which the maps agree, never wrong ones.
        self._start_empty()
        for key in range(len(self.codes)):
            self.codes[key] = 0
            self._log.add(key, -1)
        for key, code in kept:
            if code < HOST_SLOT_BIT:
                self._device.put(code, key)
            else:
                self._host.put(code ^ HOST_SLOT_BIT, key)
            self._place(key, code)
        self._empty = [slot for slot in range(self.n_slots, 0, -1) if self._device.keys[slot] < 0]
        self.begin_epoch()
        return [code ^ HOST_SLOT_BIT for _, code in in_host]

    # ---- what the slot table does not know yet

    def changes(self) -> SlotChanges:
        """See `moe.changes.ChangeLog`."""
        return self._log.changes()

    def changes_applied(self, changes: SlotChanges) -> None:
        """See `moe.changes.ChangeLog.applied`."""
        self._log.applied(changes)

    def _unmap(self, key: int) -> None:
        if key >= 0:
            self.codes[key] = 0
            self.evictions += 1
            self._log.add(key, -1)

    def _place(self, key: int, code: int) -> None:
        self.codes[key] = code
        self._log.add(key, code)

    # ---- errors

    def _first_key(self, layer: int) -> int:
        if not 0 <= layer < self.n_layers:
            raise InputError(f"expert cache: layer {layer} is outside 0..{self.n_layers - 1}")
        return layer * self.n_experts

    def _no_such_expert(self, layer: int, expert: int) -> InputError:
        return InputError(f"layer {layer}: expert {expert} is outside 0..{self.n_experts - 1}")

    def _misuse(self, ticket: Ticket, verb: str) -> InputError:
        return InputError(
            f"layer {ticket.layer}: slot {ticket.slot} cannot be {verb} expert {ticket.expert}: "
            f"its ticket is {ticket.state.value}"
        )
