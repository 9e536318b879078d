"""The page: everything that a dump says is in it as data, and nothing that a dump says gets out of its place."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib import resources
from typing import Any

import pytest
from page_dumps import HOSTILE, SEGMENTS, foreign_graph, hostile, whole_step

from ds41rt.capture.dump import Dump, Graph, Kernel, Node, Param, Place, parse_dump
from ds41rt.capture.finding import Finding
from ds41rt.capture.html import _SCRIPTS, render_html
from ds41rt.errors import InputError

STEP = whole_step()


class Page(HTMLParser):
    """What a browser sees: elements with their attributes, and the text of scripts, styles and the title."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": [], "title": [], "h1": []}
        self._inside: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in self.texts:
            self._inside = tag
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is not None:
            self.texts[self._inside][-1] += data

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.texts["script"][0])
        return found


STEP_TEXT = render_html(STEP)
STEP_PAGE = Page(STEP_TEXT)


def place_back(said: dict[str, Any] | None) -> Place | None:
    """A place as the page has it, as the dump had it."""
    if said is None:
        return None
    return Place(
        addr=int(said["addr"], 16),
        nbytes=None if "nbytes" not in said else int(said["nbytes"]),
        space=said["space"],
        owner=said.get("owner"),
        owner_off=int(said.get("off", 0)),
        access=said.get("access"),
    )


def check_param(said: dict[str, Any], param: Param) -> None:
    assert (said["off"], said["nbytes"], said.get("name"), said.get("type")) == (
        param.off,
        param.nbytes,
        param.name,
        param.type,
    )
    assert place_back(said.get("place")) == param.place
    assert [(at["off"], place_back(at["place"])) for at in said.get("inside", [])] == [
        (at.off, at.place) for at in param.inside
    ]
    if param.value is not None:
        assert type(param.value)(said["value"]) == param.value
    elif param.place is None:
        assert said["raw"] == param.raw


def check_kernel(said: dict[str, Any], kernel: Kernel) -> None:
    assert said.get("name") == kernel.name
    assert (said["grid"], said["block"]) == (list(kernel.grid or ()), list(kernel.block or ()))
    assert said["shared"] == kernel.shared_nbytes
    assert said.get("reads_through", False) == kernel.reads_through
    if kernel.params is None:
        assert "params" not in said
    else:
        for found, param in zip(said["params"], kernel.params, strict=True):
            check_param(found, param)


@pytest.mark.parametrize("dump", [STEP, foreign_graph(), hostile()], ids=["step", "foreign", "hostile"])
def test_the_data_says_what_the_dump_says(dump: Dump) -> None:
    data = Page(render_html(dump)).data
    assert (data["title"], data["made_by"], data["complete"]) == (dump.title, dump.made_by, dump.complete)
    for said, graph in zip(data["graphs"], dump.graphs, strict=True):
        assert said["name"] == graph.name
        assert said.get("layers") == (list(graph.layers) if graph.layers else None)
        assert tuple(said.get("moe_layers", ())) == graph.moe_layers
        assert [(r["what"], r["nbytes"], place_back(r.get("place"))) for r in said["reads_back"]] == [
            (r.what, r.nbytes, r.place) for r in graph.reads_back
        ]
        for found, node in zip(said["nodes"], graph.nodes, strict=True):
            assert sorted(found.get("deps", []) + found.get("implied", [])) == sorted(node.deps)
            for key in ("kind", "label", "stream", "layer"):
                assert found.get(key) == getattr(node, key)
            assert ("moved" in found) == (node.moved_nbytes is not None)
            assert int(found.get("moved", 0)) == (node.moved_nbytes or 0)
            assert ("kernel" in found, "copy" in found, "fill" in found) == (
                node.kernel is not None,
                node.copy_ is not None,
                node.fill is not None,
            )
            if node.kernel is not None:
                check_kernel(found["kernel"], node.kernel)
            if node.copy_ is not None:
                copy = found["copy"]
                assert (place_back(copy["dst"]), place_back(copy["src"])) == (node.copy_.dst, node.copy_.src)
                assert copy["nbytes"] == node.copy_.nbytes
            if node.fill is not None:
                fill = found["fill"]
                assert (place_back(fill["dst"]), int(fill["value"])) == (node.fill.dst, node.fill.value)
                assert (fill["element_nbytes"], fill["nbytes"]) == (node.fill.element_nbytes, node.fill.nbytes)
    for found, r in zip(data["ranges"], dump.ranges, strict=True):
        assert (found["name"], int(found["addr"], 16), int(found["end"], 16) - r.nbytes) == (r.name, r.addr, r.addr)
        assert (found["space"], found["source"], found.get("freed", False)) == (r.space, r.source, r.freed)


def test_the_figures_of_a_step() -> None:
    """What the page is asked first: nodes, kinds, the heaviest layer, forks and joins, what is read back."""
    graphs = STEP_PAGE.data["graphs"]
    assert [graph["name"] for graph in graphs] == [f"{first}..{end}" for first, end in SEGMENTS]
    assert sum(len(graph["nodes"]) for graph in graphs) == 598
    for graph, (first, end) in zip(graphs, SEGMENTS, strict=True):
        n = end - first
        assert graph["kinds"] == {"kernel": len(graph["nodes"]) - n, "copy": n}
        for i in graph["forks"]:
            assert graph["nodes"][i]["short"] == "ffn_in"
        for i in graph["joins"]:
            assert graph["nodes"][i]["short"] == "combine"
        assert len(graph["forks"]) == len(graph["joins"]) == n
        assert graph["read_back_nbytes"] == 4864
        weights = dict(graph["layer_moved"])
        assert graph["moved"] == sum(weights.values())
        assert weights[graph["heaviest"]] == max(weights.values())
    assert graphs[0]["heaviest"] == 1  # its engram rows are projected in the segment


def test_the_same_dump_gives_the_same_bytes() -> None:
    assert render_html(whole_step()) == STEP_TEXT
    assert render_html(parse_dump(STEP.to_json(), "again")) == STEP_TEXT
    assert STEP_TEXT.isascii()


@pytest.mark.parametrize("dump", [STEP, hostile()], ids=["step", "hostile"])
def test_only_the_own_script_and_style_may_run(dump: Dump) -> None:
    page = Page(render_html(dump))
    policy = next(a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    rules = {name: rest for name, _, rest in (rule.strip().partition(" ") for rule in policy.split(";"))}
    for name, text in (("script-src", page.texts["script"][1]), ("style-src", page.texts["style"][0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[name] == f"'sha256-{digest}'"
    assert rules["default-src"] == "'none'"
    assert set(rules) == {"default-src", "script-src", "style-src", "base-uri", "form-action"}


def test_nothing_is_loaded_from_anywhere() -> None:
    for tag, attributes in STEP_PAGE.elements:
        assert not {"src", "href", "srcset", "data", "action", "background"} & set(attributes), tag
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
    code = "\n".join(STEP_PAGE.texts["script"][1:] + STEP_PAGE.texts["style"])
    assert re.findall(r"[a-z]+://[^\"']*", code) == ["http://www.w3.org/2000/svg"]  # a name, not an address
    for word in ("url(", "@import", "fetch(", "XMLHttpRequest", "WebSocket", "sendBeacon", "import(", "EventSource"):
        assert word not in code


def test_the_scripts_make_no_markup_of_text() -> None:
    code = STEP_PAGE.texts["script"][1]
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "DOMParser"):
        assert word not in code


def test_hostile_text_stays_text() -> None:
    page = Page(render_html(hostile(), [Finding(HOSTILE, HOSTILE, 0, HOSTILE, HOSTILE, HOSTILE)]))
    tags = [tag for tag, _ in page.elements]
    assert tags == [tag for tag, _ in STEP_PAGE.elements]
    assert page.texts["script"][1] == STEP_PAGE.texts["script"][1]
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    # The parser turns the null into what a browser shows for it, or leaves it.
    assert page.texts["title"][0].replace("\ufffd", "\0") == HOSTILE == page.texts["h1"][0].replace("\ufffd", "\0")
    data = page.data
    node = data["graphs"][0]["nodes"][0]
    param = node["kernel"]["params"][0]
    assert {data["title"], *data["made_by"], *data["made_by"].values(), data["ranges"][0]["name"]} == {HOSTILE}
    assert {node["kind"], node["label"], node["stream"], node["kernel"]["name"], param["name"], param["type"]} == {
        HOSTILE
    }
    assert set(data["findings"][0].values()) - {0} == {HOSTILE}


def test_the_embedded_text_has_nothing_that_ends_or_opens_an_element() -> None:
    raw = render_html(hostile()).split('<script type="application/json" id="data">')[1].split("</script>")[0]
    assert json.loads(raw)["title"] == HOSTILE
    assert not set("<>&") & set(raw)


def test_what_a_double_cannot_hold_travels_as_text() -> None:
    data = Page(render_html(hostile())).data
    node = data["graphs"][0]["nodes"][0]
    place = node["kernel"]["params"][0]["place"]
    assert (node["moved"], data["graphs"][0]["moved"]) == (str(2**60 + 1), str(2**60 + 1))
    assert (place["addr"], place["nbytes"]) == ("0xfffffffffffff001", str(2**63))
    assert node["kernel"]["params"][1]["value"] == str(2**64 - 1)
    assert (data["ranges"][0]["addr"], data["ranges"][0]["end"]) == ("0xfffffffffffff000", "0xffffffffffffffff")
    # As a browser would read it, where every number is a double.
    assert json.loads(json.dumps(data), parse_int=float) == data


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -0.0, 1e-20, 2**53, -(2**31)])
def test_any_parameter_value_is_embedded(value: float) -> None:
    kernel = Kernel(name="k", params=(Param(off=0, raw="00000000", name="x", type="f32", value=value),))
    dump = Dump(title="t", graphs=(Graph(name="g", nodes=(Node(index=0, kind="kernel", kernel=kernel),)),))
    assert Page(render_html(dump)).data["graphs"][0]["nodes"][0]["kernel"]["params"][0]["value"] == str(value)


def test_small_dumps() -> None:
    empty = Page(render_html(Dump(title="nothing", graphs=()))).data
    assert (empty["graphs"], empty["ranges"], empty["findings"]) == ([], [], [])
    bare = Page(render_html(Dump(title="t", graphs=(Graph(name="none", nodes=()),)))).data["graphs"][0]
    assert (bare["nodes"], bare["kinds"], "moved" in bare, "heaviest" in bare) == ([], {}, False, False)
    one = Graph(name="one", nodes=(Node(index=0, kind="kernel", kernel=Kernel(name=None)),))
    node = Page(render_html(Dump(title="t", graphs=(one,)))).data["graphs"][0]["nodes"][0]
    assert node == {"kind": "kernel", "short": "kernel", "column": 0, "row": 0, "kernel": {"shared": 0}}


def test_no_parameters_are_not_unknown_parameters() -> None:
    kernels = (Kernel(name="none", params=()), Kernel(name="unknown", params=None))
    nodes = tuple(Node(index=i, kind="kernel", kernel=kernel) for i, kernel in enumerate(kernels))
    found = Page(render_html(Dump(title="t", graphs=(Graph(name="g", nodes=nodes),)))).data["graphs"][0]["nodes"]
    assert found[0]["kernel"]["params"] == []
    assert "params" not in found[1]["kernel"]


def test_a_dump_with_a_circle_is_refused() -> None:
    nodes = (Node(index=0, kind="kernel", deps=(1,)), Node(index=1, kind="kernel", deps=(0,)))
    with pytest.raises(InputError, match=r"'round'.*circle"):
        render_html(Dump(title="t", graphs=(Graph(name="round", nodes=nodes),)))


def test_findings_are_in_the_data() -> None:
    found = [
        Finding("r1", "8..14", 30, "L10.q_b", "why", "todo"),
        Finding("r2", "0..2", None, "", "why", "todo"),
        Finding("r3", "", None, "", "why", "todo"),
    ]
    assert Page(render_html(STEP, found)).data["findings"] == [
        {"rule": "r1", "graph": "8..14", "node": 30, "why": "why", "todo": "todo"},
        {"rule": "r2", "graph": "0..2", "why": "why", "todo": "todo"},
        {"rule": "r3", "why": "why", "todo": "todo"},  # about the whole dump
    ]


@pytest.mark.parametrize(
    ("graph", "node", "message"),
    [("8..15", None, "'8..15' is not in the dump"), ("0..2", 36, "no node 36"), ("0..2", -1, "no node -1")],
)
def test_a_finding_about_another_dump_is_refused(graph: str, node: int | None, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        render_html(STEP, [Finding("r", graph, node, "", "why", "todo")])


def test_the_parts_of_the_page_come_with_the_package() -> None:
    """And every one is used: what is forgotten in the list of scripts would be missing from the page only."""
    folder = resources.files("ds41rt.capture") / "page"
    parts = {part.name: part.read_text(encoding="ascii") for part in folder.iterdir()}
    assert set(parts) == {*_SCRIPTS, "page.html", "page.css"}
    for name in (*_SCRIPTS, "page.css"):
        assert parts[name] in STEP_TEXT
