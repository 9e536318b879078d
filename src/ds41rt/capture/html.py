"""A dump as one HTML page that needs nothing else: no network, no server, no other file.

Python places the nodes, adds up and names; the page's scripts (see `page/`) only draw what stands in the embedded data.
Text of a dump is data everywhere: it is embedded so that it cannot end its element, and the page's policy runs no
script but its own. Addresses, and integers that a double cannot hold, are text there.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from ds41rt.capture.dump import Copy, Dump, Fill, Graph, Kernel, Node, Param, Place, Range, ReadBack, check_dump
from ds41rt.capture.finding import Finding
from ds41rt.capture.layout import Layout, lay_out
from ds41rt.capture.summary import short_name, summarise
from ds41rt.errors import InputError

_SCRIPTS = (
    "dom.js", "model.js", "colours.js", "lines.js", "picture.js", "pieces.js", "views.js", "page.js",
)  # fmt: skip
_EXACT = 2**53 - 1  # the largest integer up to which JavaScript's numbers hold them all


def render_html(dump: Dump, findings: Sequence[Finding] = ()) -> str:
    """The page, ASCII only; the same bytes for the same dump and findings.

    Raises `InputError` for a graph with a circle, for a finding about a node that the dump does not have, and for what
    is no dump.
    """
    check_dump(dump)
    script = "\n".join(map(_asset, _SCRIPTS))
    style = _asset("page.css")
    parts = {
        "TITLE": html.escape(dump.title).encode("ascii", "xmlcharrefreplace").decode("ascii"),
        "POLICY": f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; base-uri 'none'; "
        "form-action 'none'",
        "STYLE": style,
        "DATA": _embedded(page_data(dump, findings)),
        "SCRIPT": script,
    }
    # One pass: a part may contain what looks like the mark of another.
    return re.sub(r"@@([A-Z]+)@@", lambda mark: parts[mark[1]], _asset("page.html"))


def page_data(dump: Dump, findings: Sequence[Finding] = ()) -> dict[str, Any]:
    """What the scripts get. A key is left out where the value is None, empty or what most have."""
    return {
        "title": dump.title,
        "made_by": dump.made_by,
        "complete": dump.complete,
        "graphs": [_graph(graph) for graph in dump.graphs],
        "ranges": [_range(r) for r in dump.ranges],
        "findings": [_finding(dump, finding) for finding in findings],
    }


def _asset(name: str) -> str:
    return (resources.files("ds41rt.capture") / "page" / name).read_text(encoding="ascii")


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(data: dict[str, Any]) -> str:
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _known(**fields: Any) -> dict[str, Any]:
    """The fields that say something. Zero does, False and empty ones do not."""
    return {key: value for key, value in fields.items() if value is not None and value is not False and value != ()}


def _number(value: int | None) -> int | str | None:
    return value if value is None or abs(value) <= _EXACT else str(value)


def _graph(graph: Graph) -> dict[str, Any]:
    layout = lay_out(graph)
    total = summarise(graph, layout)
    return _known(
        name=graph.name,
        layers=graph.layers,
        moe_layers=graph.moe_layers,
        nodes=[_node(node, layout) for node in graph.nodes],
        reads_back=[_read_back(read) for read in graph.reads_back],
        kinds=total.kinds,
        moved=_number(total.moved_nbytes),
        n_unknown=total.n_unknown,
        # Pairs, because an object's integer keys would be text, and in an order of their own.
        layer_moved=[[layer, _number(nbytes)] for layer, nbytes in total.layer_nbytes.items()],
        heaviest=total.heaviest,
        starts=total.starts if len(total.starts) > 1 else None,
        forks=total.forks,
        joins=total.joins,
        read_back_nbytes=_number(total.read_back_nbytes),
    )


def _node(node: Node, layout: Layout) -> dict[str, Any]:
    return _known(
        kind=node.kind,
        short=short_name(node),
        column=layout.spots[node.index].column,
        row=layout.spots[node.index].row,
        deps=layout.deps[node.index],
        implied=layout.implied[node.index],
        label=node.label,
        stream=node.stream,
        layer=node.layer,
        moved=_number(node.moved_nbytes),
        kernel=None if node.kernel is None else _kernel(node.kernel),
        copy=None if node.copy_ is None else _copy(node.copy_),
        fill=None if node.fill is None else _fill(node.fill),
    )


def _kernel(kernel: Kernel) -> dict[str, Any]:
    found = _known(
        name=kernel.name,
        grid=kernel.grid,
        block=kernel.block,
        shared=kernel.shared_nbytes,
        reads_through=kernel.reads_through,
    )
    if kernel.params is not None:  # none at all is not the same as unknown
        found["params"] = [_param(param) for param in kernel.params]
    return found


def _param(param: Param) -> dict[str, Any]:
    value = None if param.value is None else str(param.value)
    place = None if param.place is None else _place(param.place)
    return _known(
        off=param.off,
        nbytes=param.nbytes,
        name=param.name,
        type=param.type,
        value=value,
        place=place,
        # The bytes of a known value or address would only repeat it.
        raw=param.raw if value is None and place is None else None,
        inside=tuple({"off": at.off, "place": _place(at.place)} for at in param.inside),
    )


def _copy(copy: Copy) -> dict[str, Any]:
    return {"dst": _place(copy.dst), "src": _place(copy.src), "nbytes": _number(copy.nbytes)}


def _fill(fill: Fill) -> dict[str, Any]:
    return {
        "dst": _place(fill.dst),
        "value": str(fill.value),
        "element_nbytes": fill.element_nbytes,
        "nbytes": _number(fill.nbytes),
    }


def _place(place: Place) -> dict[str, Any]:
    return _known(
        addr=hex(place.addr),
        nbytes=_number(place.nbytes),
        space=place.space,
        owner=place.owner,
        off=None if place.owner is None else _number(place.owner_off),
        access=place.access,
    )


def _read_back(read: ReadBack) -> dict[str, Any]:
    return _known(what=read.what, nbytes=_number(read.nbytes), place=None if read.place is None else _place(read.place))


def _range(r: Range) -> dict[str, Any]:
    return _known(
        name=r.name,
        addr=hex(r.addr),
        end=hex(r.addr + r.nbytes),
        nbytes=_number(r.nbytes),
        space=r.space,
        source=r.source,
        freed=r.freed,
    )


def _finding(dump: Dump, finding: Finding) -> dict[str, Any]:
    if not finding.graph:  # about the whole dump
        return _known(rule=finding.rule, why=finding.why, todo=finding.todo)
    graph = next((graph for graph in dump.graphs if graph.name == finding.graph), None)
    if graph is None:
        names = ", ".join(repr(graph.name) for graph in dump.graphs) or "none"
        raise InputError(f"finding {finding.rule}: graph {finding.graph!r} is not in the dump, which has {names}")
    if finding.node is not None and not 0 <= finding.node < len(graph.nodes):
        raise InputError(
            f"finding {finding.rule}: graph {graph.name!r} has no node {finding.node}, it has {len(graph.nodes)}"
        )
    return _known(rule=finding.rule, graph=finding.graph, node=finding.node, why=finding.why, todo=finding.todo)
