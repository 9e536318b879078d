"""A dump as a DOT document for Graphviz: a cluster a graph, in it one a layer, a box a node."""

from collections.abc import Iterator, Sequence

from ds41rt.capture.dump import Dump, Graph, Node, Place
from ds41rt.capture.finding import Finding
from ds41rt.capture.summary import short_name

_COLORS = {"kernel": "#dce6f2", "copy": "#f5e3cf", "fill": "#e4efdc", "host": "#f3d6d6", "alloc": "#f3d6d6"}


def render_dot(dump: Dump, findings: Sequence[Finding] = ()) -> str:
    """DOT text; nodes with a finding have a red border."""
    lines = ["digraph capture {", "  rankdir=LR;", '  node [shape=box, style=filled, fontname="monospace"];']
    lines += [f"  label={_quoted(dump.title)};"]
    for number, graph in enumerate(dump.graphs):
        bad = {finding.node for finding in findings if finding.graph == graph.name}
        lines += _graph(number, graph, bad)
    return "\n".join([*lines, "}", ""])


def _graph(number: int, graph: Graph, bad: set[int | None]) -> Iterator[str]:
    yield f"  subgraph cluster_{number} {{"
    yield f"    label={_quoted(graph.name)};"
    for layer in dict.fromkeys(node.layer for node in graph.nodes):
        members = [node for node in graph.nodes if node.layer == layer]
        indent = "    " if layer is None else "      "
        if layer is not None:
            yield f"    subgraph cluster_{number}_{layer} {{"
            yield f'      label="layer {layer}"; style=dashed;'
        for node in members:
            border = ", color=red, penwidth=2" if node.index in bad else ""
            fill = _COLORS.get(node.kind, "#eeeeee")
            yield f'{indent}g{number}n{node.index} [label={_quoted(_label(node))}, fillcolor="{fill}"{border}];'
        if layer is not None:
            yield "    }"
    for before, after in graph.edges:
        yield f"    g{number}n{before} -> g{number}n{after};"
    yield "  }"


def _label(node: Node) -> str:
    lines = [f"{node.index} {short_name(node)}"]
    if node.kernel is not None:
        grid = "" if node.kernel.grid is None else f"{'x'.join(map(str, node.kernel.grid))} blocks"
        threads = "" if node.kernel.block is None else f" of {'x'.join(map(str, node.kernel.block))}"
        lines.append(f"{grid}{threads}")
    if node.copy_ is not None:
        lines.append(f"{node.copy_.nbytes} bytes {_place(node.copy_.src)} to {_place(node.copy_.dst)}")
    if node.fill is not None:
        lines.append(f"{node.fill.nbytes} bytes {_place(node.fill.dst)}")
    return "\n".join(line for line in lines if line)


def _place(place: Place) -> str:
    return place.owner or place.space


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\r", "").replace("\n", "\\n")
    return f'"{escaped}"'
