"""Streams, events and the schedules that decide when enqueued work runs.

Enqueued work is a graph of operations: each depends on its stream's previous one and on what the stream was told to
wait for. Any order that respects those edges is legal. This file must not know captures or status codes.
"""

from collections import deque
from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING, Protocol

from ds41rt.cu.host.command import Command, Stamp
from ds41rt.cu.host.graph import GraphLaunch
from ds41rt.cu.host.memory import Memory
from ds41rt.errors import InputError

if TYPE_CHECKING:
    from ds41rt.cu.host.capture import Capture
    from ds41rt.cu.host.race import Clock, StreamClock, Work


class Op:
    """A command (or, without one, a mere join point) enqueued on a stream."""

    __slots__ = ("command", "deps", "done", "pieces", "stream", "work")

    def __init__(self, command: Command | None, stream: int, deps: tuple["Op", ...]) -> None:
        self.command = command
        self.stream = stream
        self.deps = deps
        self.done = False
        # The remaining nodes of a graph that a random schedule has begun.
        self.pieces: Iterator[int] | None = None
        # What race detection knows of it.
        self.work: Work | None = None

    def ready(self) -> bool:
        return all(dep.done for dep in self.deps)

    def run(self, memory: Memory) -> None:
        if self.command is not None:
            memory.running = self.work
            self.command.run(memory)
        self.finish()

    def finish(self) -> None:
        """Mark as completed and let go of what came before, or every operation ever enqueued would stay alive."""
        self.done = True
        self.command = self.pieces = self.work = None
        self.deps = ()


class StreamState:
    """A stream: its last operation, events waited for since, and its place in a capture.

    `frontier` holds the indices of the captured nodes that the next captured node comes after. `clock` is the stream
    as race detection sees it, None without.
    """

    __slots__ = ("capture", "clock", "frontier", "handle", "name", "tail", "waits")

    def __init__(self, name: str, handle: int) -> None:
        self.name = name
        self.handle = handle
        self.clock: StreamClock | None = None
        self.tail: Op | None = None
        self.waits: list[Op] = []
        self.capture: Capture | None = None
        self.frontier: tuple[int, ...] = ()

    def append(self, command: Command | None) -> Op:
        """A new last operation; the caller hands it to the schedule."""
        tail = self.tail
        if self.waits:
            deps = (*self.waits, tail) if tail is not None else tuple(self.waits)
            self.waits.clear()
        else:
            deps = (tail,) if tail is not None else ()
        op = self.tail = Op(command, self.handle, deps)
        return op


class EventState:
    """An event and its last record: an operation (None: the stream was empty), or a point in a capture.

    `clock` is what race detection knows to be complete after it. `stamp` holds the time of the last record, if the
    event is for `timing` and that record was outside of captures.
    """

    __slots__ = ("capture", "clock", "frontier", "name", "op", "recorded", "stamp", "timing")

    def __init__(self, name: str, timing: bool) -> None:
        self.name = name
        self.timing = timing
        self.stamp: Stamp | None = None
        self.recorded = False
        self.clock: Clock = {}
        self.op: Op | None = None
        self.capture: Capture | None = None
        self.frontier: tuple[int, ...] = ()

    def record(self, op: Op | None, capture: "Capture | None", frontier: tuple[int, ...], clock: "Clock") -> None:
        self.recorded = True
        self.clock = clock
        self.op = op
        self.capture = capture
        self.frontier = frontier


class Schedule(Protocol):
    """When operations run. Every method runs work at once and lets its exceptions through.

    Streams in `slow` run only when something that is waited for needs them.
    """

    slow: set[int]

    def submit(self, op: Op) -> None:
        """An operation was enqueued."""

    def finish(self, op: Op) -> None:
        """Return once the operation has completed."""

    def advance(self, op: Op) -> None:
        """Make a little progress towards the operation, which is not done, so that polling comes to an end."""


class Lazy:
    """Nothing runs until something waits for it, and then only what that wait depends on."""

    def __init__(self, memory: Memory) -> None:
        self.slow: set[int] = set()
        self._memory = memory

    def submit(self, op: Op) -> None:
        pass

    def finish(self, op: Op) -> None:
        memory = self._memory
        stack = [op]
        while stack:
            op = stack[-1]
            before = len(stack)
            for dep in op.deps:
                if not dep.done:
                    stack.append(dep)
            if len(stack) == before:
                if not op.done:
                    op.run(memory)
                stack.pop()

    def advance(self, op: Op) -> None:
        while not op.done:
            behind = next((dep for dep in op.deps if not dep.done), None)
            if behind is None:
                op.run(self._memory)
                return
            op = behind


class Eager(Lazy):
    """Everything runs when it is enqueued."""

    def submit(self, op: Op) -> None:
        if op.stream not in self.slow:
            self.finish(op)


class Randomized:
    """Any legal order, drawn from a seed; graphs are interleaved with other streams node by node."""

    def __init__(self, memory: Memory, seed: int) -> None:
        self.slow: set[int] = set()
        self._memory = memory
        self._rng = Random(seed)
        self._queues: dict[int, deque[Op]] = {}

    def submit(self, op: Op) -> None:
        self._queues.setdefault(op.stream, deque()).append(op)

    def finish(self, op: Op) -> None:
        while not op.done:
            self._step(forced=True)

    def advance(self, op: Op) -> None:
        self._step(forced=True)

    def breathe(self) -> None:
        """To be called at every call of the backend: work may run whenever it likes."""
        for _ in range(self._rng.choice((0, 0, 0, 1, 2, 5))):
            self._step(forced=False)

    def _step(self, forced: bool) -> None:
        """Run one operation, or one node of a graph, at the head of a random stream that can go on.

        A slow stream's turn comes only when `forced`, and when no other stream can go on.
        """
        ready = [queue for queue in self._queues.values() if queue[0].ready()]
        if self.slow:
            quick = [queue for queue in ready if queue[0].stream not in self.slow]
            ready = quick if quick or not forced else ready
        if not ready:
            return
        queue = self._rng.choice(ready)
        op = queue[0]
        graph = op.command
        if isinstance(graph, GraphLaunch):
            if op.pieces is None:
                op.pieces = graph.pieces(self._rng)
            node = next(op.pieces, None)
            if node is not None:
                self._memory.running = op.work
                graph.run_node(node, self._memory)
                return
            op.finish()
        else:
            op.run(self._memory)
        queue.popleft()
        if not queue:
            del self._queues[op.stream]


def make_schedule(text: str, memory: Memory) -> Schedule:
    """ "lazy", "eager" or "random:SEED" (an integer). Raises `InputError`."""
    if text == "lazy":
        return Lazy(memory)
    if text == "eager":
        return Eager(memory)
    kind, _, seed = text.partition(":")
    if kind == "random" and seed.isascii() and seed.isdigit():
        return Randomized(memory, int(seed))
    raise InputError(f"schedule {text!r} is unknown; use lazy, eager or random:SEED with a whole number, as random:7")
