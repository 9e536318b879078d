"""Where the nodes of a graph stand in a picture: columns by depth, rows by chain.

A node's column is the length of the longest way to it, so that every edge leads to the right. A row is a chain of
nodes, each right behind the one before it: the main stream of a captured step fills row 0, a side stream stands below
it between its fork and its join, and a row is used again once everything in it is joined. This file knows no pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ds41rt.capture.dump import Graph
from ds41rt.capture.order import ancestors


@dataclass(frozen=True, slots=True)
class Spot:
    """A node's place: no two nodes of a graph have the same."""

    column: int
    row: int


@dataclass(frozen=True, slots=True)
class Layout:
    """By node: its spot, the dependencies and the successors that say something, and the dependencies that do not.

    A capture ties every work of a side stream to the work before it as well, which the join in between implies already.
    Such an implied edge is no fork and no join.
    """

    spots: tuple[Spot, ...]
    deps: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    implied: tuple[tuple[int, ...], ...]

    @property
    def forks(self) -> tuple[int, ...]:
        """Nodes with several successors."""
        return tuple(i for i, to in enumerate(self.after) if len(to) > 1)

    @property
    def starts(self) -> tuple[int, ...]:
        """Nodes that wait for nothing. Several of them are a fork ahead of the first node."""
        return tuple(i for i, deps in enumerate(self.deps) if not deps)

    @property
    def joins(self) -> tuple[int, ...]:
        """Nodes with several dependencies."""
        return tuple(i for i, deps in enumerate(self.deps) if len(deps) > 1)


def lay_out(graph: Graph) -> Layout:
    """Raises `InputError` for a graph whose dependencies form a circle: no driver has such a graph."""
    before = ancestors(graph)
    # A node has more nodes before it than any of those.
    order = sorted(range(len(before)), key=lambda i: (before[i].bit_count(), i))
    deps, implied = _split(graph, before)
    after = _successors(deps)
    column, height = [0] * len(order), [0] * len(order)
    for i in order:
        column[i] = max((column[dep] + 1 for dep in deps[i]), default=0)
    for i in reversed(order):
        height[i] = max((height[j] + 1 for j in after[i]), default=0)
    row = _rows(graph, deps, after, column, height)
    return Layout(tuple(map(Spot, column, row)), tuple(deps), tuple(after), tuple(implied))


def _successors(deps: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    after: list[list[int]] = [[] for _ in deps]
    for i, before in enumerate(deps):
        for dep in before:
            after[dep].append(i)
    return [tuple(nodes) for nodes in after]


def _split(graph: Graph, before: Sequence[int]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Dependencies by node: those that no other one implies, and the rest."""
    deps: list[tuple[int, ...]] = []
    implied: list[tuple[int, ...]] = []
    for node in graph.nodes:
        own = sorted(set(node.deps))
        through = 0
        for dep in own:
            through |= before[dep]
        deps.append(tuple(dep for dep in own if not through >> dep & 1))
        implied.append(tuple(dep for dep in own if through >> dep & 1))
    return deps, implied


def _rows(
    graph: Graph,
    deps: Sequence[Sequence[int]],
    after: Sequence[Sequence[int]],
    column: Sequence[int],
    height: Sequence[int],
) -> list[int]:
    heir = _heirs(graph, after, height)
    row = [-1] * len(column)
    # By row: the column up to which the edges of its nodes run. A chain may begin behind it only.
    busy: list[int] = []
    for i in sorted(range(len(column)), key=lambda i: (column[i], -height[i], i)):
        inherited = [row[dep] for dep in deps[i] if heir[dep] == i]
        if inherited:
            row[i] = min(inherited)
        else:
            # The edge from the fork runs in this row, so the row must be free from there on.
            start = min((column[dep] for dep in deps[i]), default=column[i])
            row[i] = next((r for r, until in enumerate(busy) if until <= start), len(busy))
        reach = max((column[j] for j in after[i]), default=column[i] + 1)
        if row[i] == len(busy):
            busy.append(reach)
        else:
            busy[row[i]] = max(busy[row[i]], reach)
    return row


def _heirs(graph: Graph, after: Sequence[Sequence[int]], height: Sequence[int]) -> list[int | None]:
    """The successor that goes on in its row: one of the same stream, else the one with the longest way left."""

    def rank(i: int, j: int) -> tuple[bool, int, int]:
        stream = graph.nodes[i].stream
        return stream is None or graph.nodes[j].stream != stream, -height[j], j

    return [min(after[i], key=lambda j: rank(i, j), default=None) for i in range(len(height))]
