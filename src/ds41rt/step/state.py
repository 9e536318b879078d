"""What the layer-state machine remembers, and the small values it exchanges with the layer bodies.

Plain data: nothing here calls the backend or decides anything.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ds41rt.cu.backend import Event, GraphExec, Stream
from ds41rt.moe.header import FallKind

Classes = tuple[bool, bool]
"""Selections that a segment's attention bodies read: (of layers with ratio > 0, of layers with ratio 0)."""

Doomed = tuple[str, Callable[[], None]]
"""Something out of use that is still to be destroyed: its name, and the call that does it."""


class LayerRole(Protocol):
    """What the machine wants to know of a layer; any object with these attributes will do."""

    @property
    def ratio(self) -> int: ...

    @property
    def is_kv_source(self) -> bool: ...

    @property
    def is_index_source(self) -> bool: ...


class Fork(NamedTuple):
    """The stream that a recorded shared expert runs on, and the two events that tie it to the recording stream."""

    side: Stream
    ev_fork: Event
    ev_join: Event


@dataclass(frozen=True, slots=True)
class Recording:
    """Stream, side stream and events that graphs are recorded on. They exist all together or not at all."""

    cap_stream: Stream
    cap_side: Stream
    ev_fork: Event
    ev_join: Event

    @property
    def fork(self) -> Fork:
        return Fork(self.cap_side, self.ev_fork, self.ev_join)


@dataclass(slots=True)
class SegCapture:
    """An open capture: its owner, the layers whose ffn half is recorded so far, and what the bodies bake."""

    owner: int
    moe_layers: list[int]
    classes: Classes
    rows_b: int | None


@dataclass(frozen=True, slots=True)
class SegGraph:
    """A captured segment. `end` is the layer whose attention input closes it, or the number of layers for the last."""

    graph_exec: GraphExec
    end: int
    moe_layers: tuple[int, ...]
    classes: Classes
    rows_b: int | None


@dataclass(slots=True)
class SegState:
    """Marks of the token in flight, the graphs, and the counters.

    `wanted`: segments are to be used where the token allows it; see `step.adaptive`.

    Marks (cleared when a token starts or is abandoned): layers below `skip_until` were delivered by the replay just
    read; layers below `eager_until` run whole and eagerly; `ffn_only_at` is the layer whose snapshot was restored.
    `capturing` is empty while a body is being recorded: only the stream knows whether a capture is open.

    `generation` counts the changes that `note_window` saw; the sequence block on the device is the one of `uploaded`,
    (sequence key, generation), or unknown when that is None.

    Counters: `launches == clean_replays + sum(falls.values())` at all times. A launch whose headers could not be read
    is in none of them. `recaptures` counts graphs thrown away because they baked something that changed.
    """

    n_layers: int
    disabled: bool = False
    wanted: bool = True
    segment_mode: bool = False
    in_step: bool = False
    skip_until: int = 0
    eager_until: int = 0
    ffn_only_at: int | None = None
    capturing: SegCapture | None = None
    graphs: list[SegGraph | None] = field(init=False)
    baked: tuple[int, ...] | None = None
    recording: Recording | None = None
    windows: list[int | None] = field(init=False)
    generation: int = 0
    uploaded: tuple[tuple[int, int], int] | None = None
    doomed: list[Doomed] = field(default_factory=list)

    tokens: int = 0
    segment_tokens: int = 0
    captures: int = 0
    launches: int = 0
    clean_replays: int = 0
    falls: dict[FallKind, int] = field(default_factory=lambda: {"miss": 0, "stale_table": 0, "no_flag": 0})
    falls_by_layer: list[int] = field(init=False)
    recaptures: int = 0
    capture_failures: int = 0

    def __post_init__(self) -> None:
        self.graphs = [None] * self.n_layers
        self.windows = [None] * self.n_layers
        self.falls_by_layer = [0] * self.n_layers

    def clear_marks(self) -> None:
        self.skip_until = 0
        self.eager_until = 0
        self.ffn_only_at = None
        self.capturing = None
