"""Random programs for the host backend, and an oracle that says which of their accesses race.

The oracle draws a graph with one node for everything that happens and an edge for every rule that orders two of them,
takes the transitive closure, and looks at all pairs. It shares no code and no idea with the detector's clocks.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import numpy as np
from tiny_kernels import GATHER, OFFSET, SCALE, SCATTER, upload

from ds41rt.cu.backend import Event, GraphExec, HostBuffer, Stream
from ds41rt.cu.host import HostBackend
from ds41rt.cu.host.race_report import Access, RaceError

N_STREAMS, N_EVENTS, N_DEVICE, N_PINNED, NBYTES = 3, 3, 3, 2, 64
# Buffers by number: device ones first. Rows of the tables: (buffer, offset), 8 bytes each.
N_BUFFERS = N_DEVICE + N_PINNED
WIDTH = 2
TABLES = (((0, 0), (1, 8)), ((1, 40), (2, 16)), ((2, 56), (4, 0)), ((3, 8), (0, 32)))
NAMES = [*(f"d{i}" for i in range(N_DEVICE)), *(f"p{i}" for i in range(N_PINNED))]


class Touch(NamedTuple):
    buffer: int
    lo: int
    hi: int
    write: bool


@dataclass(frozen=True)
class Cmd:
    """One command: kind, its numbers, and what it touches."""

    kind: str
    numbers: tuple[int, ...]
    touches: tuple[Touch, ...]


@dataclass(frozen=True)
class Capture:
    """A capture on stream `origin`: commands by stream, and edges (from, to)."""

    origin: int
    steps: tuple[tuple[str, int, Any], ...]


@dataclass
class Program:
    """Actions by name: ("cmd", stream, Cmd), ("record" | "wait", stream, event), ("sync", stream), ("sync_event",
    event), ("host", buffer, lo, hi, write), ("capture", Capture), ("launch", stream, exec)."""

    actions: list[tuple[Any, ...]] = field(default_factory=list)


Key = tuple[int, int] | tuple[str, bool, int, int, int]
Pairs = Counter[tuple[frozenset[Key], int, int, int]]


# The oracle


class Oracle:
    """The conflicting pairs of a program: which accesses, over which bytes of which buffer."""

    def __init__(self, program: Program) -> None:
        self.before: list[int] = []
        self.accesses: list[tuple[int, Key, Touch]] = []
        self.pairs: Pairs = Counter()
        self._n_ops = 0
        stream_last: list[list[int]] = [[] for _ in range(N_STREAMS)]
        event_last: list[list[int]] = [[] for _ in range(N_EVENTS)]
        exec_last: dict[int, list[int]] = {}
        templates: list[list[tuple[Cmd, list[int]]]] = []
        host: list[int] = []
        for kind, *rest in program.actions:
            if kind == "cmd":
                stream, cmd = rest
                self._n_ops += 1
                stream_last[stream] = [self._do(cmd, (self._n_ops, -1), host + stream_last[stream])]
            elif kind == "record":
                stream, event = rest
                event_last[event] = [self._node(host + stream_last[stream])]
            elif kind == "wait":
                stream, event = rest
                stream_last[stream] = [self._node(host + stream_last[stream] + event_last[event])]
            elif kind == "sync":
                host = [self._node(host + stream_last[rest[0]])]
            elif kind == "sync_event":
                host = [self._node(host + event_last[rest[0]])]
            elif kind == "host":
                buffer, lo, hi, write = rest
                node = self._node(host)
                self.accesses.append((node, ("host", write, buffer, lo, hi), Touch(buffer, lo, hi, write)))
                host = [node]
            elif kind == "capture":
                templates.append(_template(rest[0]))
            else:
                stream, index = rest
                self._n_ops += 1
                start = self._node(host + stream_last[stream] + exec_last.get(index, []))
                ends = self._expand(templates[index], start)
                stream_last[stream] = exec_last[index] = [self._node([start, *ends])]
        for i, (n, a, s) in enumerate(self.accesses):
            for m, b, t in self.accesses[i + 1 :]:
                ordered = self.before[m] >> n & 1 or self.before[n] >> m & 1
                lo, hi = max(s.lo, t.lo), min(s.hi, t.hi)
                if n != m and not ordered and s.buffer == t.buffer and lo < hi and (s.write or t.write):
                    self.pairs[frozenset((a, b)), s.buffer, lo, hi] += 1

    def _node(self, earlier: list[int]) -> int:
        bits = 0
        for n in earlier:
            bits |= self.before[n] | 1 << n
        self.before.append(bits)
        return len(self.before) - 1

    def _do(self, cmd: Cmd, key: Key, earlier: list[int]) -> int:
        node = self._node(earlier)
        self.accesses += [(node, key, touch) for touch in cmd.touches]
        if cmd.kind == "d2d":
            (dst, src) = cmd.touches
            lo, hi = max(dst.lo, src.lo), min(dst.hi, src.hi)
            if dst.buffer == src.buffer and lo < hi:
                self.pairs[frozenset((key,)), dst.buffer, lo, hi] += 1
        return node

    def _expand(self, template: list[tuple[Cmd, list[int]]], start: int) -> list[int]:
        ends: list[int] = []
        for leaf, (cmd, deps) in enumerate(template):
            ends.append(self._do(cmd, (self._n_ops, leaf), [start, *(ends[d] for d in deps)]))
        return ends


def _template(capture: Capture) -> list[tuple[Cmd, list[int]]]:
    nodes: list[tuple[Cmd, list[int]]] = []
    last: dict[int, list[int]] = {}
    for kind, stream, what in capture.steps:
        if kind == "edge":
            last[what] = last.get(what, []) + last.get(stream, [])
        else:
            nodes.append((what, last.get(stream, [])))
            last[stream] = [len(nodes) - 1]
    return nodes


# Programs


def _range(rng: Random, nbytes: int | None = None) -> tuple[int, int]:
    nbytes = nbytes or 4 * rng.randint(1, 6)
    lo = 4 * rng.randint(0, (NBYTES - nbytes) // 4)
    return lo, lo + nbytes


def random_cmd(rng: Random) -> Cmd:
    kind = rng.choice(("fill", "d2d", "h2d", "d2h", "scale", "offset", "gather", "scatter"))
    lo, hi = _range(rng)
    device, pinned, any_one = rng.randrange(N_DEVICE), N_DEVICE + rng.randrange(N_PINNED), rng.randrange(N_BUFFERS)
    if kind == "fill":
        return Cmd(kind, (rng.randrange(256),), (Touch(any_one, lo, hi, True),))
    if kind in ("d2d", "h2d", "d2h"):
        src_lo, src_hi = _range(rng, hi - lo)
        dst = pinned if kind == "d2h" else device
        src = pinned if kind == "h2d" else rng.randrange(N_DEVICE)
        return Cmd(kind, (), (Touch(dst, lo, hi, True), Touch(src, src_lo, src_hi, False)))
    if kind in ("scale", "offset"):
        return Cmd(kind, (rng.choice((3, 5, -7)),), (Touch(any_one, lo, hi, True),))
    table = rng.randrange(len(TABLES))
    rows = tuple(Touch(buffer, off, off + 4 * WIDTH, kind == "scatter") for buffer, off in TABLES[table])
    if kind == "scatter":
        return Cmd(kind, (table,), rows)
    lo, hi = _range(rng, 4 * WIDTH * len(rows))
    return Cmd(kind, (table,), (Touch(any_one, lo, hi, True), *rows))


def _random_capture(rng: Random) -> Capture:
    origin, side = rng.sample(range(N_STREAMS), 2)
    steps: list[tuple[str, int, Any]] = []
    joined = False
    for _ in range(rng.randint(2, 6)):
        if rng.random() < 0.3:
            pair = (side, origin) if joined and rng.random() < 0.5 else (origin, side)
            steps.append(("edge", *pair))
            joined = True
            continue
        stream = side if joined and rng.random() < 0.5 else origin
        steps.append(("cmd", stream, random_cmd(rng)))
    if joined:
        steps.append(("edge", side, origin))
    return Capture(origin, tuple(steps))


def _random_action(rng: Random, n_execs: int) -> tuple[Any, ...]:
    kind = rng.choices(
        ("cmd", "record", "wait", "sync", "sync_event", "host", "capture", "launch"), (40, 12, 12, 4, 4, 6, 6, 14)
    )[0]
    stream, event = rng.randrange(N_STREAMS), rng.randrange(N_EVENTS)
    if kind == "cmd":
        return "cmd", stream, random_cmd(rng)
    if kind in ("record", "wait"):
        return kind, stream, event
    if kind == "sync":
        return "sync", stream
    if kind == "sync_event":
        return "sync_event", event
    if kind == "host":
        return ("host", N_DEVICE + rng.randrange(N_PINNED), *_range(rng), rng.random() < 0.5)
    if kind == "capture" or not n_execs:
        return "capture", _random_capture(rng)
    return "launch", stream, rng.randrange(n_execs)


def random_program(rng: Random, race_free: bool) -> Program:
    """`race_free` programs are grown with the oracle: an action that would race is ordered first, or dropped."""
    program = Program()
    n_execs = 0
    for _ in range(rng.randint(6, 22)):
        action = _random_action(rng, n_execs)
        kept = list(program.actions)
        program.actions.append(action)
        if race_free and Oracle(program).pairs:
            event, other = rng.randrange(N_EVENTS), rng.randrange(N_STREAMS)
            order = [("record", other, event), ("wait", action[1], event)]
            program.actions = [*kept, *(order if action[0] in ("cmd", "launch") else [("sync", other)]), action]
            if Oracle(program).pairs:
                program.actions = kept
                continue
        n_execs += action[0] == "capture"
    return program


# Running one


class Runner:
    """Runs a program under one schedule: the bytes that it leaves (and that the host saw), and the races reported."""

    def __init__(self, schedule: str, race_detection: bool = True) -> None:
        self.backend = backend = HostBackend(schedule, race_detection=race_detection)
        self.streams = [backend.create_stream(f"s{i}") for i in range(N_STREAMS)]
        self.events = [backend.create_event(f"e{i}") for i in range(N_EVENTS)]
        self.edge = backend.create_event("edge")
        data = np.random.default_rng(1).integers(0, 256, (N_BUFFERS, NBYTES), dtype=np.uint8)
        setup = backend.create_stream("setup")
        self.addrs = [upload(backend, setup, NAMES[i], data[i]) for i in range(N_DEVICE)]
        self.pinned = [backend.alloc_pinned(NAMES[N_DEVICE + i], NBYTES) for i in range(N_PINNED)]
        for i, host in enumerate(self.pinned):
            host.array[:] = data[N_DEVICE + i]
            self.addrs.append(host.device_ptr)
        self.tables = [
            upload(backend, setup, f"table {t}", np.array([self.addrs[b] + off for b, off in rows], np.uint64))
            for t, rows in enumerate(TABLES)
        ]
        self.n_setup = N_DEVICE + len(TABLES)
        self.execs: list[GraphExec] = []
        self.seen: list[bytes] = []

    def run(self, program: Program) -> tuple[bytes, Pairs]:
        for action in program.actions:
            self._act(*action)
        for stream in self.streams:
            self._wait(self.backend.synchronize, stream)
        races: Pairs = Counter()
        for race in self.backend.races:
            first, second = self._key(race.first), self._key(race.second)
            races[frozenset((first, second)), NAMES.index(race.first.buffer), race.lo, race.hi] += 1
        left = [self.backend.memory.bytes(addr, NBYTES).tobytes() for addr in self.addrs]
        self.backend.close()
        return b"".join([*self.seen, *left]), races

    def _key(self, access: Access) -> Key:
        if access.kind == "host":
            return "host", access.write, NAMES.index(access.buffer), access.lo, access.hi
        return access.op - self.n_setup, access.node

    def _wait(self, call: Any, handle: int) -> None:
        while True:
            try:
                call(handle)
            except RaceError:
                continue
            return

    def _act(self, kind: str, *rest: Any) -> None:
        backend = self.backend
        if kind == "cmd":
            self._enqueue(self.streams[rest[0]], rest[1])
        elif kind == "record":
            backend.record(self.events[rest[1]], self.streams[rest[0]])
        elif kind == "wait":
            backend.wait(self.streams[rest[0]], self.events[rest[1]])
        elif kind == "sync":
            self._wait(backend.synchronize, self.streams[rest[0]])
        elif kind == "sync_event":
            self._wait(backend.synchronize_event, self.events[rest[0]])
        elif kind == "host":
            buffer, lo, hi, write = rest
            array = self.pinned[buffer - N_DEVICE].array
            if write:
                array[lo:hi] = np.arange(lo, hi, dtype=np.uint8) * 3
            else:
                self.seen.append(array[lo:hi].tobytes())
        elif kind == "capture":
            self._capture(rest[0])
        else:
            backend.launch_graph(self.execs[rest[1]], self.streams[rest[0]])

    def _capture(self, capture: Capture) -> None:
        backend, origin = self.backend, self.streams[capture.origin]
        backend.begin_capture(origin)
        for kind, stream, what in capture.steps:
            if kind == "edge":
                self._edge(self.edge, self.streams[stream], self.streams[what])
            else:
                self._enqueue(self.streams[stream], what)
        self.execs.append(backend.instantiate(backend.end_capture(origin)))

    def _edge(self, event: Event, a: Stream, b: Stream) -> None:
        self.backend.record(event, a)
        self.backend.wait(b, event)

    def _enqueue(self, stream: Stream, cmd: Cmd) -> None:
        backend = self.backend
        first = cmd.touches[0]
        addr, nbytes = self.addrs[first.buffer] + first.lo, first.hi - first.lo
        if cmd.kind == "fill":
            backend.fill(addr, cmd.numbers[0], nbytes, stream, label="fill")
        elif cmd.kind in ("d2d", "h2d", "d2h"):
            src = cmd.touches[1]
            src_addr = self.addrs[src.buffer] + src.lo
            if cmd.kind == "d2d":
                backend.copy_d2d(addr, src_addr, nbytes, stream, label="d2d")
            elif cmd.kind == "h2d":
                backend.copy_h2d(addr, self._host(src), nbytes, stream, src.lo, label="h2d")
            else:
                backend.copy_d2h(self._host(first), src_addr, nbytes, stream, first.lo, label="d2h")
        elif cmd.kind in ("scale", "offset"):
            spec, name = (SCALE, "a") if cmd.kind == "scale" else (OFFSET, "b")
            backend.launch(backend.prepare(spec, {"x": addr, name: cmd.numbers[0], "n": nbytes // 4}, cmd.kind), stream)
        else:
            args = {"table": self.tables[cmd.numbers[0]], "n": len(TABLES[cmd.numbers[0]]), "width": WIDTH}
            if cmd.kind == "gather":
                args["out"] = addr
            backend.launch(backend.prepare(GATHER if cmd.kind == "gather" else SCATTER, args, cmd.kind), stream)

    def _host(self, touch: Touch) -> HostBuffer:
        return self.pinned[touch.buffer - N_DEVICE]


def programs(seed: int, n: int, race_free: bool) -> Iterator[Program]:
    for i in range(n):
        yield random_program(Random(f"{seed} {i} {race_free}"), race_free)
