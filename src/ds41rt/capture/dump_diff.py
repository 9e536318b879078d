"""What differs between two dumps of the same thing: two captures, two versions, two machines.

Nodes are matched by structure (kind, kernel, label, in order), never by address. Where both dumps were made in one
address space, or in two with equal layouts, a pointer that moved is a difference; elsewhere it is only whose memory a
pointer leads to, and where in it.
"""

import json
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ds41rt.capture.dump import Dump, Graph, Kernel, Node, Param, Place, check_dump
from ds41rt.capture.finding import name_of
from ds41rt.capture.words import visible

Change = tuple[str, str, str]
"""What (a parameter's name, "grid", ...), and its value before and after."""


@dataclass(frozen=True, slots=True)
class NodeChange:
    """One difference between matched nodes; `before_node` and `after_node` are their indices."""

    node: str
    before_node: int
    after_node: int
    what: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class GraphDiff:
    """Graphs of one name. `removed` and `added` are (index, name) of nodes that only one of them has."""

    graph: str
    removed: tuple[tuple[int, str], ...]
    added: tuple[tuple[int, str], ...]
    changed: tuple[NodeChange, ...]


@dataclass(frozen=True, slots=True)
class RangeChange:
    """A range of memory that only one dump has, or whose place, size or state differs."""

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class DumpDiff:
    """All differences. `same_addresses`: addresses were compared, because named memory lies mostly where it lay."""

    before: str
    after: str
    same_addresses: bool
    graphs_removed: tuple[str, ...]
    graphs_added: tuple[str, ...]
    graphs: tuple[GraphDiff, ...]
    ranges: tuple[RangeChange, ...]

    def __bool__(self) -> bool:
        """True if anything differs."""
        return bool(self.graphs_removed or self.graphs_added or self.graphs or self.ranges)

    def to_json(self) -> str:
        """One object, all differences in it."""
        return json.dumps({"differs": bool(self), **asdict(self)})

    def to_text(self) -> str:
        """For people, a line a difference."""
        return "\n".join(map(visible, _lines(self))) + "\n"


@dataclass(frozen=True, slots=True)
class Sides:
    """What both dumps say beside their nodes: whether an address means the same in both, and whose memory was freed."""

    same_addresses: bool
    freed_before: frozenset[str]
    freed_after: frozenset[str]

    @classmethod
    def of(cls, before: Dump, after: Dump, *, same_addresses: bool) -> "Sides":
        freed = [frozenset(r.name for r in dump.ranges if r.freed) for dump in (before, after)]
        return cls(same_addresses, *freed)


def diff(before: Dump, after: Dump) -> DumpDiff:
    """Compare two dumps. Graphs are matched by name. Raises `InputError` for what is no dump."""
    check_dump(before)
    check_dump(after)
    same = _same_addresses(before, after)
    sides = Sides.of(before, after, same_addresses=same)
    olds, news = {g.name: g for g in before.graphs}, {g.name: g for g in after.graphs}
    graphs = [diff_graphs(old, news[name], sides) for name, old in olds.items() if name in news]
    return DumpDiff(
        before.title,
        after.title,
        same,
        tuple(name for name in olds if name not in news),
        tuple(name for name in news if name not in olds),
        tuple(g for g in graphs if g.removed or g.added or g.changed),
        tuple(_ranges(before, after, same)),
    )


def diff_graphs(before: Graph, after: Graph, sides: Sides) -> GraphDiff:
    pairs = match_nodes(before, after)
    twin = {old.index: new.index for old, new in pairs}
    matched = set(twin.values())
    changed = []
    for old, new in pairs:
        changes = node_changes(old, new, sides)
        # Behind a node that is gone, only what is left of the order can be compared.
        deps = {twin[dep] for dep in old.deps if dep in twin}
        if deps != {dep for dep in new.deps if dep in matched}:
            changes.append(("runs after", _nodes(before, old.deps), _nodes(after, new.deps)))
        changed += [NodeChange(name_of(new), old.index, new.index, *change) for change in changes]
    return GraphDiff(
        before.name,
        tuple((node.index, name_of(node)) for node in before.nodes if node.index not in twin),
        tuple((node.index, name_of(node)) for node in after.nodes if node.index not in matched),
        tuple(changed),
    )


def match_nodes(before: Graph, after: Graph) -> list[tuple[Node, Node]]:
    """Nodes that are the same one in both graphs, in order: as many pairs as there can be."""
    return [(before.nodes[i], after.nodes[j]) for i, j in common(_structure(before), _structure(after))]


def _structure(graph: Graph) -> list[tuple[str, str | None, str | None]]:
    return [(node.kind, node.kernel.name if node.kernel else None, node.label) for node in graph.nodes]


def common(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Index pairs of a longest common subsequence.

    Row i of the usual table is kept as one integer: bit j is clear where the length grows from b[:j] to b[: j + 1].
    Graphs repeat few kernels often, where a comparison by longest blocks loses most of them.
    """
    places: dict[Hashable, int] = {}
    for j, item in enumerate(b):
        places[item] = places.get(item, 0) | 1 << j
    all_bits = (1 << len(b)) - 1
    row, rows = all_bits, []
    for item in a:
        hits = row & places.get(item, 0)
        row = ((row + hits) | (row - hits)) & all_bits
        rows.append(row)
    pairs = []
    i, j = len(a), len(b)
    while i and j:
        if rows[i - 1] >> (j - 1) & 1:
            j -= 1
            continue
        i -= 1
        if i == 0 or rows[i - 1] >> (j - 1) & 1:
            j -= 1
            pairs.append((i, j))
    return pairs[::-1]


def node_changes(old: Node, new: Node, sides: Sides) -> list[Change]:
    """What two nodes of one kind bake differently."""
    found: list[Change] = []
    if old.stream != new.stream:
        found.append(("stream", str(old.stream), str(new.stream)))
    if old.kernel is not None and new.kernel is not None:
        found += _kernel(old.kernel, new.kernel, sides)
    if old.copy_ is not None and new.copy_ is not None:
        found += _scalar("bytes", old.copy_.nbytes, new.copy_.nbytes)
        found += _place("dst", old.copy_.dst, new.copy_.dst, sides)
        found += _place("src", old.copy_.src, new.copy_.src, sides)
    if old.fill is not None and new.fill is not None:
        found += _scalar("value", old.fill.value, new.fill.value)
        found += _scalar("bytes", old.fill.nbytes, new.fill.nbytes)
        found += _place("dst", old.fill.dst, new.fill.dst, sides)
    return found


def _kernel(old: Kernel, new: Kernel, sides: Sides) -> Iterator[Change]:
    yield from _scalar("grid", old.grid, new.grid)
    yield from _scalar("block", old.block, new.block)
    yield from _scalar("dynamic shared memory", old.shared_nbytes, new.shared_nbytes)
    if old.params is None or new.params is None:
        if old.params is not new.params:
            yield "parameters", _layout(old.params), _layout(new.params)
        return
    if _layout(old.params) != _layout(new.params):
        yield "parameters", _layout(old.params), _layout(new.params)
        return
    for a, b in zip(old.params, new.params, strict=True):
        yield from _param(a, b, sides)


def _layout(params: tuple[Param, ...] | None) -> str:
    return "unknown" if params is None else ", ".join(f"{p.name or p.off}:{p.nbytes}" for p in params)


def _param(a: Param, b: Param, sides: Sides) -> Iterator[Change]:
    what = a.name or f"parameter at {a.off}"
    if a.place is not None and b.place is not None:
        yield from _place(what, a.place, b.place, sides)
        return
    inner, others = {at.off: at.place for at in a.inside}, {at.off: at.place for at in b.inside}
    for off in sorted(inner.keys() & others.keys()):
        yield from _place(f"{what}, byte {off}", inner[off], others[off], sides)
    if _plain(a, inner) != _plain(b, others):
        yield what, _value(a), _value(b)


def _plain(param: Param, inside: dict[int, Place]) -> bytes:
    """The bytes of a parameter, less the addresses that are compared by owner."""
    raw = bytearray.fromhex(param.raw)
    for off in inside:
        raw[off : off + 8] = bytes(8)
    return bytes(raw)


def _value(param: Param) -> str:
    if param.place is not None:
        return _where(param.place)
    return f"bytes {param.raw}" if param.value is None else str(param.value)


def _place(what: str, a: Place, b: Place, sides: Sides) -> Iterator[Change]:
    freed = (a.owner in sides.freed_before, b.owner in sides.freed_after)
    keys = [(p.owner, p.owner_off, p.nbytes, p.space, p.access) for p in (a, b)]
    # Of an address that nobody owns nothing is known but its number.
    if keys[0] == keys[1] and freed[0] == freed[1] and not (sides.same_addresses and a.addr != b.addr):
        return
    said = []
    for place, gone in zip((a, b), freed, strict=True):
        text = _where(place) + (" (freed)" if gone else "")
        # What is the same mostly, and tells nothing then. Of freed memory nobody knows the space.
        text += f", {place.space} memory" if a.space != b.space and not any(freed) and place.owner is not None else ""
        text += f", access {place.access or 'unknown'}" if a.access != b.access else ""
        said.append(text)
    yield what, said[0], said[1]


def _where(place: Place) -> str:
    off = f" + {place.owner_off}" if place.owner_off else ""
    owner = f"{place.owner!r}{off}" if place.owner is not None else f"{place.space} memory of nobody"
    size = "" if place.nbytes is None else f", {place.nbytes} bytes"
    return f"{owner} at {place.addr:#x}{size}"


def _scalar(what: str, a: Any, b: Any) -> Iterator[Change]:
    if a != b:
        yield what, str(a), str(b)


def _nodes(graph: Graph, deps: tuple[int, ...]) -> str:
    return ", ".join(name_of(graph.nodes[dep]) for dep in deps) or "nothing"


def _same_addresses(before: Dump, after: Dump) -> bool:
    """Whether addresses mean the same in both: at least half of the memory that both name lies where it lay."""
    olds = {r.name: r.addr for r in before.ranges}
    common = [olds[r.name] == r.addr for r in after.ranges if r.name in olds]
    return 2 * sum(common) >= len(common)


def _ranges(before: Dump, after: Dump, same: bool) -> Iterator[RangeChange]:
    def states(dump: Dump) -> dict[str, str]:
        found = {}
        for r in dump.ranges:
            at = f" at {r.addr:#x}" if same else ""
            found[r.name] = f"{r.nbytes} bytes of {r.space} memory{at}{', freed' if r.freed else ''}"
        return found

    olds, news = states(before), states(after)
    for name in {**olds, **news}:
        if olds.get(name) != news.get(name):
            yield RangeChange(name, olds.get(name), news.get(name))


def _lines(found: DumpDiff) -> Iterator[str]:
    yield f"before: {found.before}"
    yield f"after:  {found.after}"
    if not found:
        yield "no difference"
    if not found.same_addresses:
        yield "other address space: addresses are compared by owner and offset"
    for name in found.graphs_removed:
        yield f"graph {name!r}: only before"
    for name in found.graphs_added:
        yield f"graph {name!r}: only after"
    for graph in found.graphs:
        yield f"graph {graph.graph!r}:"
        for index, name in graph.removed:
            yield f"  - node {index} {name}"
        for index, name in graph.added:
            yield f"  + node {index} {name}"
        for c in graph.changed:
            yield f"  ~ node {c.after_node} {c.node}: {c.what}: {c.before} -> {c.after}"
    if found.ranges:
        yield "memory:"
        for r in found.ranges:
            yield f"  {r.name!r}: {r.before or 'not there'} -> {r.after or 'gone'}"
