"""What race detection reports: two accesses that nothing orders, by name. Plain values, free of live objects."""

from dataclasses import dataclass

from ds41rt.errors import Ds41Error

# A message holds this many races in full; `RaceError.races` has all of them.
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Access:
    """One side of a race: bytes lo..hi (exclusive) of `buffer`, touched by one operation.

    `op` numbers the backend's enqueued operations from 1 in the order of the calls (for the host it is larger than
    all); `node` is the graph node's index in capture order, or -1. `kind` is "kernel", "h2d",
    "d2h", "d2d", "fill" or "host"; `role` the parameter; `site` the file:line of the call, outside of `ds41rt.cu`.
    """

    op: int
    node: int
    kind: str
    label: str
    stream: str
    buffer: str
    lo: int
    hi: int
    write: bool
    role: str
    site: str

    def __str__(self) -> str:
        does = "writes" if self.write else "reads"
        where = f"bytes {self.lo}..{self.hi} of {self.buffer!r}"
        if self.kind == "host":
            return f"the host ({self.label}, at {self.site}) {does} {where}"
        role = f" ({self.role})" if self.role else ""
        return f"{self.kind} {self.label!r} on stream {self.stream!r} (enqueued at {self.site}) {does} {where}{role}"


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses with a write that nothing orders; they share bytes lo..hi (exclusive) of the first one's buffer."""

    first: Access
    second: Access
    lo: int
    hi: int

    def __str__(self) -> str:
        return f"{self.first}, and {self.second}; nothing orders them over bytes {self.lo}..{self.hi}"


class RaceError(Ds41Error):
    """Enqueued work races. `races` has every pair found since the last such error. The context is not lost."""

    def __init__(self, call: str, races: tuple[Race, ...]) -> None:
        self.races = races
        self.call = call
        shown = "; ".join(str(race) for race in races[:_SHOWN])
        more = f"; and {len(races) - _SHOWN} more" if len(races) > _SHOWN else ""
        super().__init__(f"{call}: {len(races)} races: {shown}{more}; order them by an event or a synchronise")
