"""What the expert cache hands out: tickets for misses, and moves between the tiers. Only the cache changes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ds41rt.errors import CacheError


class TicketState(Enum):
    """Where one miss stands; see `Ticket`."""

    RESERVED = "reserved"
    EVICTED = "evicted"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class Ticket:
    """One expert to read, and what was reserved for it. Only `ExpertCache` changes a ticket.

    On the device `slot` is where it goes. In the host tier (`to_host`) it stays in the pool slot that it is read into,
    and `slot` is the one whose expert makes room, 0 if there is room. `place` is the victim's place in the order of
    ages, None if there is no victim.
    """

    layer: int
    expert: int
    to_host: bool
    slot: int
    place: int | None
    state: TicketState


@dataclass(slots=True, eq=False)
class FetchPlan:
    """What one call has to bring in: one ticket a distinct missing expert, in order of first request."""

    layer: int
    tickets: Sequence[Ticket]


NOTHING_TO_FETCH = FetchPlan(-1, ())


@dataclass(slots=True, eq=False)
class Move:
    """An expert on its way from pool slot `home` to device slot `slot`, whose expert `victim` (-1: none) goes to the
    host tier first. `touched`: the victim was used since the move began. Only `ExpertCache` changes a move."""

    key: int
    home: int
    slot: int
    victim: int
    touched: bool = False


def reads_failed(plan: FetchPlan, failures: Sequence[tuple[Ticket, Exception]]) -> CacheError:
    """The error of a fetch of which some reads failed: how many of how many, and the first one's reason."""
    ticket, why = failures[0]
    return CacheError(
        f"layer {plan.layer}: {len(failures)} of {len(plan.tickets)} expert reads failed; "
        f"first: expert {ticket.expert}: {why}"
    )
