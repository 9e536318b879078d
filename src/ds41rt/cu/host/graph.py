"""Graphs: captured commands with their edges, and one replay of them as a single command.

A node holds its command, and with it launch objects and host buffers, for as long as the graph or an executable made
from it exists. This file must not know streams, events or how a capture comes about.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from types import CodeType
from typing import TYPE_CHECKING, Literal

from ds41rt.cu.graphinfo import CopyNode, FillNode, GraphInfo, GraphNode, KernelNode, Param
from ds41rt.cu.host.command import Command, Copy, Fill, Operand
from ds41rt.cu.host.kernels import HostLaunch
from ds41rt.cu.host.memory import Memory
from ds41rt.cu.kernel import parameter_block

if TYPE_CHECKING:
    from ds41rt.cu.host.footprint import Footprint

# Launch shapes may depend on it; a described graph of this backend has those of an H200.
NOMINAL_MULTIPROCESSORS = 132


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A captured command, the stream it was captured from, and the earlier nodes that must complete before it.

    `site` is the call that captured it, kept for race reports.
    """

    command: Command
    stream: str
    deps: tuple[int, ...]
    site: tuple[CodeType, int] | None = None


def describe(nodes: Sequence[Node]) -> GraphInfo:
    """The nodes in capture order. Pinned memory has the address that the device sees, in copies too."""
    return GraphInfo(tuple(_describe(i, node) for i, node in enumerate(nodes)))


def _describe(index: int, node: Node) -> GraphNode:
    command = node.command
    content: KernelNode | CopyNode | FillNode
    launch = command if isinstance(command, HostLaunch) else None
    if launch is not None:
        kind, content = "kernel", _kernel(launch)
    elif isinstance(command, Copy):
        dst, src = command.operands()
        kind, content = "copy", CopyNode(dst.addr, dst.space, src.addr, src.space, command.nbytes)
    elif isinstance(command, Fill):
        kind, content = "fill", FillNode(command.dst, command.byte, 1, command.nbytes)
    else:
        raise TypeError(f"{command!r} cannot be captured")
    return GraphNode(index, kind, node.deps, content, command.label, node.stream, launch)


def _kernel(launch: HostLaunch) -> KernelNode:
    """As a device would have it, one with as many multiprocessors as `NOMINAL_MULTIPROCESSORS` says."""
    spec = launch.spec
    params = tuple(Param(off, raw) for off, raw in parameter_block(launch))
    if spec.geometry is None:
        return KernelNode(spec.name, None, None, 0, params)
    args = dict(zip((p.name for p in spec.params), launch.args, strict=True))
    shape = spec.geometry(spec.scalars(args), NOMINAL_MULTIPROCESSORS)
    return KernelNode(spec.name, shape.grid, (shape.block, 1, 1), shape.shared_nbytes, params)


def unreached(nodes: Sequence[Node], frontier: Sequence[int]) -> list[int]:
    """Indices of nodes that are neither in `frontier` nor needed by it."""
    reached = [False] * len(nodes)
    for i in frontier:
        reached[i] = True
    # Edges point to earlier nodes, so one backward pass is enough.
    for i in range(len(nodes) - 1, -1, -1):
        if reached[i]:
            for dep in nodes[i].deps:
                reached[dep] = True
    return [i for i, hit in enumerate(reached) if not hit]


def ancestors(nodes: Sequence[Node]) -> list[int]:
    """For each node the nodes that must complete before it: bit i stands for node i."""
    bits: list[int] = []
    for node in nodes:
        earlier = 0
        for dep in node.deps:
            earlier |= bits[dep] | 1 << dep
        bits.append(earlier)
    return bits


class GraphLaunch:
    """One executable graph as a command: running it runs every node once, in capture order."""

    kind: Literal["graph"] = "graph"

    def __init__(self, nodes: tuple[Node, ...], label: str) -> None:
        self.nodes = nodes
        self.label = label
        self.footprint: Footprint | None = None

    def run(self, memory: Memory) -> None:
        for i in range(len(self.nodes)):
            self.run_node(i, memory)

    def run_node(self, index: int, memory: Memory) -> None:
        memory.leaf = index
        self.nodes[index].command.run(memory)

    def operands(self) -> tuple[Operand, ...]:
        return tuple(operand for node in self.nodes for operand in node.command.operands())

    def pieces(self, rng: Random) -> Iterator[int]:
        """The nodes' indices one by one in a random order that respects the edges."""
        missing = [len(n.deps) for n in self.nodes]
        users: list[list[int]] = [[] for _ in self.nodes]
        for i, node in enumerate(self.nodes):
            for dep in node.deps:
                users[dep].append(i)
        ready = [i for i, count in enumerate(missing) if count == 0]
        while ready:
            i = ready.pop(rng.randrange(len(ready)))
            yield i
            # The caller comes back for the next piece only after this one has run.
            for user in users[i]:
                missing[user] -= 1
                if missing[user] == 0:
                    ready.append(user)
