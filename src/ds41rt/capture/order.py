"""Which nodes of a graph run in a fixed order, and which may run at the same time over the same bytes."""

from collections.abc import Iterator, Sequence

from ds41rt.capture.dump import Graph, Node
from ds41rt.errors import InputError


def ancestors(graph: Graph) -> list[int]:
    """For each node the nodes that complete before it begins: bit i stands for node i.

    Raises `InputError` for a graph whose dependencies form a circle.
    """
    before = [0] * len(graph.nodes)
    done: set[int] = set()
    waiting = list(graph.nodes)
    while waiting:
        left = []
        for node in waiting:
            if done.issuperset(node.deps):
                for dep in node.deps:
                    before[node.index] |= before[dep] | 1 << dep
                done.add(node.index)
            else:
                left.append(node)
        if len(left) == len(waiting):
            raise InputError(f"graph {graph.name!r}: {len(left)} nodes depend on each other in a circle; dump it again")
        waiting = left
    return before


def leaves(graph: Graph, before: Sequence[int]) -> list[Node]:
    """Nodes that nothing comes after, the one with the most nodes before it first."""
    needed = 0
    for ancestry in before:
        needed |= ancestry
    found = [node for node in graph.nodes if not needed >> node.index & 1]
    return sorted(found, key=lambda node: (-before[node.index].bit_count(), -node.index))


def conflicts(graph: Graph, before: Sequence[int]) -> Iterator[tuple[Node, str, Node, str, int, int]]:
    """Pairs of nodes in no order that use the same bytes, at least one of them writing.

    Yields (node, role, node, role, first address, one past the last) once a pair. What a node uses is what was
    declared: kernels of unknown access, and memory behind pointers in device memory, are not looked at.
    """
    uses = []
    for node in graph.nodes:
        for role, place in node.places:
            if place.nbytes and place.access is not None:
                # Addresses of ordinary host memory are a space of their own.
                uses.append(
                    (place.space == "pageable", place.addr, place.addr + place.nbytes, node, role, place.access)
                )
    uses.sort(key=lambda use: (use[:3], use[3].index))
    seen: set[tuple[int, int]] = set()
    active: list[int] = []
    for i, (space, lo, hi, node, role, access) in enumerate(uses):
        active = [j for j in active if uses[j][0] == space and uses[j][2] > lo]
        for j in active:
            _, _, other_hi, other, other_role, other_access = uses[j]
            pair = (min(node.index, other.index), max(node.index, other.index))
            if other is node or pair in seen or access == other_access == "r":
                continue
            if before[node.index] >> other.index & 1 or before[other.index] >> node.index & 1:
                continue
            seen.add(pair)
            first, second = ((other, other_role), (node, role))
            if first[0].index > second[0].index:
                first, second = second, first
            yield *first, *second, lo, min(hi, other_hi)
        active.append(i)
