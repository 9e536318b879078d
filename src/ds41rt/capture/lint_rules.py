"""What is wrong, or may go wrong, with captured graphs: one small function a rule, in one table.

The rules look at a dump alone, so that a saved one can be checked on another machine. What a dump does not tell is not
guessed: a kernel whose parameters nobody declared is no reason for a finding. This file must not know where a dump
comes from.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ds41rt.capture.dump import Copy, Dump, Graph, Node, Param, Place, Range, check_dump
from ds41rt.capture.dump_diff import Sides, match_nodes, node_changes
from ds41rt.capture.finding import Finding, name_of
from ds41rt.capture.order import ancestors, conflicts, leaves

# Below these sizes the fixed cost of a copy node outweighs what a copy engine saves.
_SMALL_COPY, _SMALL_HOST_COPY = 1 << 20, 1 << 16
# Names of scalars whose value belongs to one token. In ds41rt none is a scalar: they come from device memory.
PER_TOKEN = frozenset(
    [
        *("position", "pos", "positions", "cache_position", "step", "token", "token_id", "n_tokens", "context_len"),
        *("kv_len", "seq_len", "seqlen", "slot", "ring_slot", "n_rows", "row_count", "selected", "n_selected"),
    ]
)
# The kinds of nodes whose effect the rules know; "other" is what the driver's own types lack a name for.
_KNOWN_KINDS = frozenset(
    ("kernel", "copy", "fill", "host", "graph", "empty", "wait event", "record event", "alloc", "free")
)
# The copy that an engine puts in front of a layer's experts on purpose, to go back there after a fall: its label, and
# the buffer it goes to. Both have to fit, so that no other copy passes under its name.
_SNAPSHOT_LABEL, _SNAPSHOT_OWNER = re.compile(r"L\d+\.snapshot"), "snapshots"

Hit = tuple[Node | None, str]
"""The node, or None for the graph, and what is wrong with it."""


class _View:
    """A graph of a dump, with the ranges by name, and the same graph of a later token (`twin`) where it is `compared`
    with one; None if that dump does not have it."""

    def __init__(self, dump: Dump, graph: Graph, later: Dump | None) -> None:
        self.graph = graph
        self.complete = dump.complete
        self.compared = later is not None
        self.sides = Sides.of(dump, later or dump, same_addresses=True)
        self.twin = None if later is None else next((g for g in later.graphs if g.name == graph.name), None)
        self._ranges = {r.name: r for r in dump.ranges}

    def owner(self, place: Place) -> Range | None:
        return None if place.owner is None else self._ranges.get(place.owner)

    def places(self) -> Iterator[tuple[Node, str, Place]]:
        return ((node, role, place) for node in self.graph.nodes for role, place in node.places)


@dataclass(frozen=True, slots=True)
class Rule:
    """`why` completes a sentence that says what is wrong; `todo` says what to do about it."""

    ident: str
    why: str
    todo: str
    check: Callable[[_View], Iterable[Hit]]


def _outside(view: _View) -> Iterator[Hit]:
    for node, role, place in view.places():
        owner = view.owner(place)
        what = f"{role!r}, {_bytes(place)} at {place.addr:#x},"
        if owner is not None:
            end = place.owner_off + (place.nbytes or 0)
            if not owner.freed and end > owner.nbytes:
                yield node, f"{what} reaches {end - owner.nbytes} bytes past the end of {owner.name!r}"
        elif place.space in ("device", "unknown") and view.complete:
            if place.addr:
                yield node, f"{what} lies in no live allocation"
            elif node.copy_ is None:  # a copy without an address is one of an array
                yield node, f"{role!r} is a null pointer"


def _freed(view: _View) -> Iterator[Hit]:
    for node, role, place in view.places():
        owner = view.owner(place)
        if owner is not None and owner.freed:
            yield node, f"{role!r} is offset {place.owner_off} of {owner.name!r}, which was freed"


def _pageable(view: _View) -> Iterator[Hit]:
    for node, role, place in view.places():
        if place.space == "pageable":
            yield node, f"{role!r}, {_bytes(place)}, is ordinary host memory"


def _borrowed(view: _View) -> Iterator[Hit]:
    for node, role, place in view.places():
        owner = view.owner(place)
        if place.space == "pinned" and (owner is None or owner.source == "driver"):
            yield node, f"{role!r}, {_bytes(place)}, is pinned host memory that nobody registered"


def _alloc(view: _View) -> Iterator[Hit]:
    for node in view.graph.nodes:
        if node.kind in ("alloc", "free"):
            yield node, f"the graph {'allocates' if node.kind == 'alloc' else 'frees'} memory"


def _host(view: _View) -> Iterator[Hit]:
    for node in view.graph.nodes:
        if node.kind == "host":
            yield node, "the graph calls a function on the host"


def _unjoined(view: _View) -> Iterator[Hit]:
    if view.graph.nodes:
        last, *others = leaves(view.graph, ancestors(view.graph))
        for node in others:
            on = f" on stream {node.stream!r}" if node.stream else ""
            yield node, f"nothing waits for this work{on}; the graph ends with {name_of(last)!r}"


def _unlabelled(view: _View) -> Iterator[Hit]:
    nodes = view.graph.nodes
    if any(node.label is not None for node in nodes):  # else nobody was there to name them
        for node in nodes:
            if not node.label and node.kind in ("kernel", "copy", "fill"):
                yield node, "the node has no label"


def _telling(node: Node) -> list[Param]:
    """The scalars whose name says that they belong to one token."""
    params = (node.kernel and node.kernel.params) or ()
    return [param for param in params if param.name in PER_TOKEN and param.value is not None]


def _per_token(view: _View) -> Iterator[Hit]:
    for node in view.graph.nodes:
        for param in _telling(node):
            yield node, f"scalar {param.name!r} is baked as {param.value}"
    for node, twin in () if view.twin is None else match_nodes(view.graph, view.twin):
        told = {param.name for param in _telling(node)}
        for what, before, after in node_changes(node, twin, view.sides):
            if what not in told:
                yield node, f"{what!r} is baked as {before}, and as {after} for another token"


def _unordered(view: _View) -> Iterator[Hit]:
    for node, role, other, other_role, lo, hi in conflicts(view.graph, ancestors(view.graph)):
        place = next(p for r, p in node.places if r == role)
        where = f"{lo:#x}" if place.owner is None else f"offset {lo - place.addr + place.owner_off} of {place.owner!r}"
        who = f"{name_of(node)!r} ({role!r}) and {name_of(other)!r} ({other_role!r})"
        yield other, f"{who} use the same {hi - lo} bytes at {where} in no order, and one of them writes"


def _copies(view: _View) -> Iterator[Hit]:
    for node in view.graph.nodes:
        copy = node.copy_
        if copy is None or _is_snapshot(node, copy):
            continue
        spaces = {copy.dst.space, copy.src.space}
        limit = _SMALL_COPY if spaces == {"device"} else _SMALL_HOST_COPY if spaces == {"device", "pinned"} else 0
        if copy.nbytes <= limit:
            yield node, f"the node copies {copy.nbytes} bytes from {copy.src.space} to {copy.dst.space} memory"


def _is_snapshot(node: Node, copy: Copy) -> bool:
    return copy.dst.owner == _SNAPSHOT_OWNER and _SNAPSHOT_LABEL.fullmatch(node.label or "") is not None


def _unchecked(view: _View) -> Iterator[Hit]:
    if not view.graph.nodes:
        yield None, "the graph has no nodes"
    for node in view.graph.nodes:
        if node.kind not in _KNOWN_KINDS:
            yield node, f"what a node of kind {node.kind!r} does is not known here"
        elif node.kind in ("kernel", "copy", "fill") and (node.kernel or node.copy_ or node.fill) is None:
            yield node, f"the dump does not say what the {node.kind} is about"
    if not view.compared:
        return
    if view.twin is None:
        yield None, "the dump of the later token has no such graph to compare with"
        return
    pairs = match_nodes(view.graph, view.twin)
    here, there = {node.index for node, _ in pairs}, {twin.index for _, twin in pairs}
    for node in view.graph.nodes:
        if node.index not in here:
            yield node, "the graph of the later token has no such node to compare with"
    for node in view.twin.nodes:
        if node.index not in there:
            yield None, f"only the graph of the later token has node {node.index} {name_of(node)!r}"


def _bytes(place: Place) -> str:
    return "an unknown number of bytes" if place.nbytes is None else f"{place.nbytes} bytes"


_NOT_CHECKED = Rule(
    "not-checked",
    "without a finding there it need not be well",
    "look at it by other means, or make dumps that have it",
    _unchecked,
)
RULES: tuple[Rule, ...] = (
    Rule(
        "outside-allocation",
        "a replay faults there, or uses memory of somebody else",
        "bake an address inside a live allocation, or register the range it belongs to",
        _outside,
    ),
    Rule(
        "freed-memory",
        "every replay uses the address again, whoever has the memory by then",
        "keep the buffer until the graph is destroyed, or capture again after it was replaced",
        _freed,
    ),
    Rule(
        "pageable-host",
        "every replay reads or writes that very page again, and the driver stages it synchronously",
        "copy from pinned memory that lives as long as the graph, or have the bytes on the device before the launch",
        _pageable,
    ),
    Rule(
        "borrowed-host",
        "every replay uses it again, and its allocator may have given it to somebody else by then",
        "keep it for as long as the graph and register it as a range, or allocate it through the backend",
        _borrowed,
    ),
    Rule(
        "alloc-node",
        "a graph that owns memory cannot run twice at once, and its addresses are nobody's to look after",
        "allocate before the capture and pass the address",
        _alloc,
    ),
    Rule(
        "host-node",
        "the device waits for a host thread in every replay, and that function must not call CUDA",
        "do the host's part between two graphs, after a read-back",
        _host,
    ),
    Rule(
        "unjoined-work",
        "what comes after in the graph does not see its result",
        "record an event behind it and let the main stream wait for it before its next work",
        _unjoined,
    ),
    Rule(
        "no-label",
        "errors, profiles and these tools can only call it by a number",
        "pass a label to the capturing call",
        _unlabelled,
    ),
    Rule(
        "baked-scalar",
        "every replay gets the value of the token that was captured",
        "keep it in device memory, bake its address and upload it before each launch",
        _per_token,
    ),
    Rule(
        "unordered-overlap",
        "what a replay reads or leaves there changes from run to run",
        "order them with an event, or give them separate buffers",
        _unordered,
    ),
    Rule(
        "copy-node",
        "a small copy costs a node of its own, between kernels that could do it on the way",
        "let the kernel that makes or uses the bytes write or read both places",
        _copies,
    ),
    _NOT_CHECKED,
)


def lint(dump: Dump, *, next_token: Dump | None = None, skip: Iterable[str] = ()) -> list[Finding]:
    """All findings, graph by graph in the order of the rules, then those about the whole dump; `skip` are rules to
    leave out.

    Per-token values baked into a graph are seen in two ways. From one dump: scalars of declared kernels with a telling
    name, see `PER_TOKEN`; others stay unseen, and so does every value in a kernel that nobody declared. With
    `next_token`, a dump of the same graphs captured again for a later token: everything that differs, by bytes, in
    whatever kernel, copy or fill. What could not be looked at or compared is a finding too (`not-checked`).

    Raises `InputError` for a damaged graph, and for what is no dump.
    """
    check_dump(dump)
    if next_token is not None:
        check_dump(next_token)
    left_out = set(skip)
    found = []
    for graph in dump.graphs:
        view = _View(dump, graph, next_token)
        for rule in RULES:
            if rule.ident not in left_out:
                found += [_finding(rule, graph.name, *hit) for hit in rule.check(view)]
    if _NOT_CHECKED.ident not in left_out:
        found += [_finding(_NOT_CHECKED, "", None, what) for what in _not_in(dump, next_token)]
    return found


def _not_in(dump: Dump, later: Dump | None) -> Iterator[str]:
    """What a rule, which sees a graph at a time, cannot see."""
    if not dump.graphs:
        yield "the dump has no graphs"
    names = {graph.name for graph in dump.graphs}
    for graph in () if later is None else later.graphs:
        if graph.name not in names:
            yield f"only the dump of the later token has graph {graph.name!r}"


def _finding(rule: Rule, graph: str, node: Node | None, what: str) -> Finding:
    index, name = (None, graph) if node is None else (node.index, name_of(node))
    return Finding(rule.ident, graph, index, name, f"{what}: {rule.why}", rule.todo)
