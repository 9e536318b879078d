"""A backend and layer bodies small enough to prove the layer-state machine on, without arithmetic.

Device memory is a dict of Python values. The streams are a history: a tuple of (effect, layer, digest of the inputs).
So equal streams mean that every effect happened once, in order, on equal inputs. Work on a stream runs at once, or is
kept for the replays when the stream is in capture. Every call ticks: it enters the timeline and may be made to fail.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ds41rt.cu.backend import CaptureStatus, Event, Graph, GraphExec, Stream
from ds41rt.cu.graphinfo import GraphInfo, GraphNode
from ds41rt.cu.result import CudaError, Status
from ds41rt.moe.header import Fall, FallKind
from ds41rt.step.state import Classes, Fork

WINDOW = 3
Op = Callable[[], None]


def digest(*values: object) -> int:
    return zlib.crc32(repr(values).encode())


@dataclass(frozen=True)
class Role:
    ratio: int = 0
    is_kv_source: bool = False
    is_index_source: bool = False


PLAIN, RATIO2, KV, INDEX = (
    Role(),
    Role(2),
    Role(2, is_kv_source=True, is_index_source=True),
    Role(1, is_index_source=True),
)
SMALL = (PLAIN, PLAIN, KV, RATIO2, INDEX, RATIO2, PLAIN, RATIO2)  # segments 0..2, 2..4, 4..8
ENGRAM = (1, 2, 5)


class FakeBackend:
    """The capture half of `GpuBackend`; `fail` maps the number of a tick to the exception it raises."""

    def __init__(self) -> None:
        self.timeline: list[str] = []
        self.ticks = 0
        self.fail: dict[int, BaseException] = {}
        self.fail_after = False  # raise after the call took effect instead of before
        self.in_capture: dict[Stream, Stream] = {}  # stream -> the stream whose capture it takes part in
        self.recorded: dict[Stream, list[Op]] = {}
        self.forked: dict[Event, Stream] = {}
        self.unjoined: set[Stream] = set()
        self.alive: dict[int, str] = {}
        self.content: dict[int, list[Op]] = {}
        self.more_kinds: tuple[str, ...] = ()  # nodes that a graph has besides what was enqueued
        self._next = 100
        self.stream = self.create_stream("compute")
        self.timeline.clear()
        self.ticks = 0

    def tick(self, what: str, effect: Callable[[], Any] = lambda: None) -> Any:
        self.timeline.append(what)
        self.ticks += 1
        error = self.fail.get(self.ticks - 1)
        if error is not None and not self.fail_after:
            raise error
        result = effect()
        if error is not None:
            raise error
        return result

    def name_of(self, stream: Stream) -> str:
        return {"compute": "compute", "step recording": "cap", "step recording side": "side"}[self.alive[stream]]

    def enqueue(self, what: str, stream: Stream, op: Op) -> None:
        """One kernel or copy: runs now, or at each replay."""

        def effect() -> None:
            if stream in self.in_capture:
                self.recorded[self.in_capture[stream]].append(op)
            else:
                op()

        self.tick(f"{what}@{self.name_of(stream)}", effect)

    def _new(self, what: str) -> int:
        self._next += 1
        self.alive[self._next] = what
        return self._next

    def _drop(self, handle: int) -> None:
        if handle not in self.alive:
            raise CudaError(Status.INVALID_HANDLE, "destroy", str(handle))
        del self.alive[handle]

    def create_stream(self, name: str) -> Stream:
        return Stream(self.tick(f"create_stream {name}", lambda: self._new(name)))

    def destroy_stream(self, stream: Stream) -> None:
        self.tick("destroy_stream", lambda: self._drop(stream))

    def create_event(self, name: str, *, timing: bool = False) -> Event:
        return Event(self.tick(f"create_event {name}", lambda: self._new(name)))

    def destroy_event(self, event: Event) -> None:
        self.tick("destroy_event", lambda: self._drop(event))

    def synchronize(self, stream: Stream) -> None:
        self.tick(f"synchronize@{self.name_of(stream)}")

    def record(self, event: Event, stream: Stream) -> None:
        def effect() -> None:
            if stream in self.in_capture:
                self.forked[event] = self.in_capture[stream]
                self.unjoined.discard(stream)

        self.tick(f"record@{self.name_of(stream)}", effect)

    def wait(self, stream: Stream, event: Event) -> None:
        def effect() -> None:
            origin = self.forked.get(event)
            if origin is not None and stream != origin:
                self.in_capture[stream] = origin
                self.unjoined.add(stream)

        self.tick(f"wait@{self.name_of(stream)}", effect)

    def begin_capture(self, stream: Stream) -> None:
        def effect() -> None:
            if stream in self.in_capture:
                raise CudaError(Status.ILLEGAL_STATE, "begin_capture", "already in a capture")
            self.in_capture[stream] = stream
            self.recorded[stream] = []

        self.tick(f"begin@{self.name_of(stream)}", effect)

    def capture_status(self, stream: Stream) -> CaptureStatus:
        return CaptureStatus.ACTIVE if stream in self.in_capture else CaptureStatus.NONE

    def _leave_capture(self, stream: Stream) -> list[Op]:
        self.in_capture = {s: o for s, o in self.in_capture.items() if o != stream}
        self.forked.clear()
        self.unjoined.clear()
        return self.recorded.pop(stream)

    def end_capture(self, stream: Stream) -> Graph:
        def effect() -> int:
            if stream not in self.in_capture:
                raise CudaError(Status.ILLEGAL_STATE, "end_capture", "no capture")
            unjoined, ops = bool(self.unjoined), self._leave_capture(stream)
            if unjoined:
                raise CudaError(Status.STREAM_CAPTURE_UNJOINED, "end_capture")
            graph = self._new("graph")
            self.content[graph] = ops
            return graph

        return Graph(self.tick(f"end@{self.name_of(stream)}", effect))

    def abort_capture(self, stream: Stream) -> None:
        if stream in self.in_capture:
            self.tick(f"abort@{self.name_of(stream)}", lambda: self._leave_capture(stream))

    def describe_graph(self, graph: Graph) -> GraphInfo:
        kinds = ("kernel",) * len(self.content[graph]) + self.more_kinds
        nodes = tuple(GraphNode(i, kind, (), None, f"node {i}") for i, kind in enumerate(kinds))
        return GraphInfo(self.tick("describe", lambda: nodes))

    def instantiate(self, graph: Graph) -> GraphExec:
        def effect() -> int:
            graph_exec = self._new("exec")
            self.content[graph_exec] = list(self.content[graph])
            return graph_exec

        return GraphExec(self.tick("instantiate", effect))

    def launch_graph(self, graph_exec: GraphExec, stream: Stream) -> None:
        assert self.alive[graph_exec] == "exec"

        def effect() -> None:
            for op in self.content[graph_exec]:
                op()

        self.tick(f"launch@{self.name_of(stream)}", effect)

    def destroy_graph(self, graph: Graph) -> None:
        self.tick("destroy_graph", lambda: self._drop(graph))

    def destroy_exec(self, graph_exec: GraphExec) -> None:
        self.tick("destroy_exec", lambda: self._drop(graph_exec))

    def leaked(self) -> list[str]:
        """What is alive beyond the compute stream, captures included."""
        return [w for h, w in self.alive.items() if h != self.stream] + ["capture" for _ in self.in_capture]


@dataclass
class FakeSequence:
    """State of one sequence under its addresses; moving a buffer gives it a new address."""

    ident: int
    rings: list[int] = field(default_factory=list)
    pool: int = 0
    moves: int = 0


class FakeBodies:
    """Layers whose arithmetic is a digest of all inputs. A token starts with nothing but its embedding in memory.

    `wrong[(sequence, position)]` are the layers that a replay would run without their expert, and why; the eager ffn
    half fetches. `rows_b` is what `prepare` returns, by owner.
    """

    def __init__(self, backend: FakeBackend, roles: tuple[Role, ...] = SMALL) -> None:
        self.backend, self.roles, self.n_layers = backend, roles, len(roles)
        self.mem: dict[Any, Any] = {}
        self.heap: dict[int, dict[int, int]] = {}
        self._next_addr = 1
        self.seq = self.new_sequence(0)
        self.position = 0
        self.wrong: dict[tuple[int, int], dict[int, FallKind]] = {}
        self.lacking: dict[int, FallKind] = {}
        self.rows_b: dict[int, int] = {}
        self.baked_value: tuple[int, ...] = (1, 2, 3)
        self.uploads = 0

    def new_sequence(self, ident: int) -> FakeSequence:
        return FakeSequence(ident, [self._place({}) for _ in self.roles], self._place({}))

    def _place(self, content: dict[int, int]) -> int:
        self._next_addr += 1
        self.heap[self._next_addr] = content
        return self._next_addr

    def move_ring(self, layer: int) -> None:
        """The ring gets a new address; the old one holds garbage from now on."""
        old = self.seq.rings[layer]
        self.seq.rings[layer] = self._place(dict(self.heap[old]))
        self.heap[old] = dict.fromkeys(range(WINDOW), 57005)

    def move_pool(self) -> None:
        old = self.seq.pool
        self.seq.pool = self._place(dict(self.heap[old]))
        self.heap[old] = dict.fromkeys(self.heap[old], 0xDEAD)
        self.seq.moves += 1

    def state(self) -> dict[str, Any]:
        """Everything that must equal the eager run after a token."""
        return {
            "logits": self.mem["logits"],
            "streams": self.mem["streams"],
            "rings": [dict(self.heap[a]) for a in self.seq.rings],
            "pool": dict(self.heap[self.seq.pool]),
        }

    # ---- LayerBodies

    def role(self, idx: int) -> Role:
        return self.roles[idx]

    def baked(self) -> tuple[int, ...]:
        return self.baked_value

    def window(self, idx: int) -> int:
        return self.seq.rings[idx]

    def sequence_key(self) -> tuple[int, int]:
        return (self.seq.ident, self.seq.moves)

    def upload_sequence(self, stream: Stream) -> None:
        block = (tuple(self.seq.rings), self.seq.pool)
        self.uploads += 1
        self._put("upload_sequence", stream, "block", block)

    def _put(self, what: str, stream: Stream, key: str, value: object) -> None:
        self.backend.enqueue(what, stream, lambda: self.mem.update({key: value}))

    def start_token(self, position: int, stream: Stream) -> None:
        self.position = position
        self.lacking = dict(self.wrong.get((self.seq.ident, position), {}))
        seq = self.seq.ident

        def op() -> None:
            self.mem = {"block": self.mem["block"], "streams": (("embed", seq, position),), "pre_prev": "one-hot"}
            if position == 0:
                for addr in (*self.seq.rings, self.seq.pool):
                    self.heap[addr].clear()

        self.backend.enqueue("start_token", stream, op)

    def _attn_in(self, layer: int) -> None:
        m = self.mem
        if layer in ENGRAM:
            m["streams"] += (("engram", layer, m["rows"][layer]),)
        for name in ("pre_a", "post", "comb"):
            m[name] = digest(name, layer, m["streams"])
        m["hidden"] = digest(m["streams"], m["pre_prev"])
        m["normed"] = digest("norm", m["hidden"])

    def _attention(self, layer: int) -> None:
        m, role = self.mem, self.roles[layer]
        rings, pool = m["block"]
        ring, position = self.heap[rings[layer]], m["position"]
        ring[position % WINDOW] = digest("kv", layer, m["normed"])
        selection = None
        if role.is_kv_source or role.is_index_source:
            self.heap[pool][layer * 1000 + position] = digest("row", m["normed"])
        rows = sorted(r for r in self.heap[pool].items() if r[0] // 1000 <= layer)
        if role.is_kv_source or role.is_index_source:
            m["selection"] = digest("select", layer, rows)
        if role.ratio:
            selection = (m["selection"], rows)
        m["attn_out"] = digest(layer, m["normed"], sorted(ring.items()), position, selection)

    def _ffn_before_shared(self, layer: int) -> None:
        m = self.mem
        m["streams"] += (("attn", layer, digest(m["attn_out"], m["post"], m["comb"])),)
        for name in ("pre_f", "post", "comb"):
            m[name] = digest("ffn", name, layer, m["streams"])
        m["hidden"] = digest(m["streams"], m["pre_a"])
        m["normed"] = digest("norm", m["hidden"])

    def _ffn_after_shared(self, layer: int, right: bool) -> None:
        m = self.mem
        moe = digest("moe", layer, m["normed"], right)
        m["streams"] += (("ffn", layer, digest(moe, m.pop("shared"), m["post"], m["comb"])),)
        m["pre_prev"] = m["pre_f"]
        if layer + 1 == self.n_layers:
            m["logits"] = digest(m["streams"], m["pre_prev"])

    def attn_in(self, idx: int, stream: Stream) -> None:
        self.backend.enqueue(f"attn_in {idx}", stream, lambda: self._attn_in(idx))

    def prepare(self, idx: int, classes: Classes, end: int, stream: Stream) -> int | None:
        if idx == 0:
            self._preload(stream)
        else:
            position = self.position

            def op() -> None:
                self.mem["position"] = position
                self._attention(idx)

            self.backend.enqueue(f"own attention {idx}", stream, op)
        self._put(f"prepare {idx}..{end}", stream, "position", self.position)
        return self.rows_b.get(idx)

    def _preload(self, stream: Stream) -> None:
        rows = {layer: digest("rows", layer, self.seq.ident, self.position) for layer in ENGRAM}
        self._put("preload", stream, "rows", rows)

    def body_attn(self, idx: int, rows_b: int | None, stream: Stream) -> None:
        self.attn_in(idx, stream)
        self.backend.enqueue(f"attention {idx}", stream, lambda: self._attention(idx))

    SAVED = ("streams", "attn_out", "pre_a", "post", "comb")

    def save_nodes(self, idx: int, stream: Stream) -> None:
        def op() -> None:
            self.mem["save", idx] = {k: self.mem[k] for k in self.SAVED}

        self.backend.enqueue(f"save {idx}", stream, op)

    def restore(self, idx: int, stream: Stream) -> None:
        def op() -> None:
            self.mem.update({"hidden": "poison", "normed": "poison", "pre_prev": "poison", "pre_f": "poison"})
            self.mem.update(self.mem["save", idx])

        self.backend.enqueue(f"restore {idx}", stream, op)

    def body_ffn(self, idx: int, stream: Stream, fork: Fork) -> None:
        b = self.backend
        b.enqueue(f"ffn {idx}", stream, lambda: self._ffn_before_shared(idx))
        b.record(fork.ev_fork, stream)
        b.wait(fork.side, fork.ev_fork)
        b.enqueue(f"shared {idx}", fork.side, lambda: self.mem.update(shared=digest("shared", self.mem["normed"])))
        b.record(fork.ev_join, fork.side)
        b.wait(stream, fork.ev_join)
        b.enqueue(f"experts {idx}", stream, lambda: self._ffn_after_shared(idx, idx not in self.lacking))

    def eager_layer(self, idx: int, stream: Stream) -> None:
        if "rows" not in self.mem:
            self._preload(stream)

        def op() -> None:
            self.mem["position"] = self.position
            self._attn_in(idx)
            self._attention(idx)

        self.backend.enqueue(f"eager attention {idx}", stream, op)
        self.ffn_eager(idx, stream)

    def ffn_eager(self, idx: int, stream: Stream) -> None:
        def op() -> None:
            self.lacking.pop(idx, None)
            self._ffn_before_shared(idx)
            self.mem.update(shared=digest("shared", self.mem["normed"]))
            self._ffn_after_shared(idx, True)

        self.backend.enqueue(f"eager ffn {idx}", stream, op)

    def read_headers(self, layers: tuple[int, ...], stream: Stream) -> Fall | None:
        self.backend.tick(f"read_headers {layers[0]}..{layers[-1]}")
        for layer in layers:
            if layer in self.lacking:
                return Fall(layer, self.lacking.pop(layer), 1)
        return None
