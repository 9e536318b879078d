"""The scripts of the page, run by a real browser: a state of the page is a link, so that a still picture tests it.

Minutes of nothing but starting a browser, so it is among the long tests; without Chromium there is nothing to ask.
"""

import re
import shutil
import subprocess
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from page_dumps import HOSTILE, foreign_graph, hostile, whole_step

from ds41rt.capture.dump import Dump
from ds41rt.capture.finding import Finding
from ds41rt.capture.html import render_html

pytestmark = pytest.mark.long
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900")

Look = Callable[[Dump, str], str]


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """(dump, hash) -> the document after its script has run, as markup."""
    if BROWSER is None:
        pytest.skip("no Chromium here")

    def look(dump: Dump, state: str) -> str:
        page = tmp_path / "page.html"
        findings = [Finding("a-rule", dump.graphs[0].name, 0, "x", "the reason", "the cure")] if dump.graphs else []
        page.write_text(render_html(dump, findings), encoding="ascii")
        done = subprocess.run(
            [BROWSER, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"{page.as_uri()}#{state}"],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        # Without the data itself, which says everything already.
        document: str = re.sub(r'<script type="application/json".*?</script>', "", done.stdout, flags=re.DOTALL)
        return document.split("<script>")[0]

    return look


class Tags(HTMLParser):
    """Names of the elements and of their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        self.attributes |= {name for name, _ in attrs}


def nodes_with(document: str, mark: str) -> list[tuple[int, int]]:
    """(graph, node) of all drawn nodes of a class, in the order of the dump."""
    found = re.findall(r'<g class="node ([^"]*)"[^>]*?data-g="(\d+)" data-i="(\d+)"', document)
    return [(int(g), int(i)) for classes, g, i in found if mark in classes.split()]


def panel_of(document: str) -> str:
    """The text of the panel."""
    inside = document.split('<aside id="panel"')[1].split("</aside>")[0].split(">", 1)[1]
    return unescape(re.sub(r"<[^>]+>", " ", inside))


def test_every_node_is_drawn_and_summed_up(look: Look) -> None:
    dump = whole_step()
    document = look(dump, "")
    assert nodes_with(document, "k-kernel") == [
        (g, n.index) for g, graph in enumerate(dump.graphs) for n in graph.nodes if n.kind == "kernel"
    ]
    assert len(nodes_with(document, "k-copy")) == 40
    text = " ".join(panel_of(document).split())
    assert "598 nodes 558 kernel 40 copy" in text
    assert "1 finding a-rule the reason the cure embed 0..2 #0" in text
    assert document.count('class="edge fork"') == 9
    # Each layer of each graph has its weight, and the next graph's owner its attention input.
    assert document.count('class="group ') == 40 + 8


def test_a_chosen_node_shows_its_parameters_and_neighbours(look: Look) -> None:
    document = look(whole_step(), "graph=8..14&node=22")
    assert nodes_with(document, "chosen") == [(2, 22)]
    assert nodes_with(document, "beside") == [(2, 21), (2, 23)]
    text = " ".join(panel_of(document).split())
    for said in ("expert_gate_up", "264 \u00d7 1 \u00d7 1", "weight_dev f32*", "plan block + 144", "limit f32 10.0"):
        assert said in text


def test_a_buffer_marks_its_readers_and_writers(look: Look) -> None:
    document = look(whole_step(), "buffer=shared+out")
    dump = whole_step()
    labels = {(g, n.index): n.label or "" for g, graph in enumerate(dump.graphs) for n in graph.nodes}
    assert {labels[at][4:] for at in nodes_with(document, "mark-w")} == {"shared_down"}
    assert {labels[at][4:] for at in nodes_with(document, "mark-r")} == {"combine"}
    assert len(nodes_with(document, "mark-w")) == len(nodes_with(document, "mark-r")) == 40
    assert len(nodes_with(document, "dim")) == 598 - 80


def test_a_buffer_shows_who_reaches_into_it_under_another_name(look: Look) -> None:
    dump = whole_step()
    whole = next(r for r in dump.ranges if r.name == "saved block")
    part = whole.model_copy(update={"name": "its middle", "addr": whole.addr + 51200, "nbytes": 16})
    document = look(dump.model_copy(update={"ranges": (*dump.ranges, part)}), "buffer=its+middle")
    marked = [*nodes_with(document, "mark-r"), *nodes_with(document, "mark-w"), *nodes_with(document, "mark-rw")]
    names = {(dump.graphs[g].nodes[i].label or "")[4:] for g, i in marked}
    # Whoever names the whole block or these bytes of it; not wo_b, whose output ends where they begin.
    assert names == {"embed", "engram_apply", "attn_in", "snapshot", "ffn_in", "combine", "final_collapse"}


def test_a_search_dims_the_rest(look: Look) -> None:
    document = look(whole_step(), "q=L07+w2.weight")
    assert nodes_with(document, "mark-x") == [(1, 83)]
    assert len(nodes_with(document, "dim")) == 597
    assert "layers.7.ffn.shared_experts.w2.weight" not in panel_of(document)  # no buffer is called L07
    assert "1 node " in panel_of(document)


def test_a_foreign_graph_is_drawn(look: Look) -> None:
    document = look(foreign_graph(), "kernel=triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3&size=names")
    wanted = [
        (0, n.index)
        for n in foreign_graph().graphs[0].nodes
        if n.kernel is not None and (n.kernel.name or "").startswith("triton")
    ]
    assert nodes_with(document, "mark-x") == wanted
    assert document.count('class="node ') == 420


def test_long_names_leave_both_columns_of_forks_and_joins_their_half(look: Look) -> None:
    assert look(foreign_graph(), "graph=decode").count('<table class="halves">') == 2
    assert ".halves { table-layout: fixed; }" in render_html(foreign_graph())


@pytest.mark.parametrize("state", ["", "node=0", "layer=0"])
def test_hostile_text_is_shown_and_harmless(look: Look, state: str) -> None:
    document = look(hostile(), state)
    tags = Tags()
    tags.feed(document)
    assert "svg" in tags.found
    assert "img" not in tags.found
    assert not [name for name in tags.attributes if name.startswith("on")]
    # Browsers show the null as the replacement character, or not at all.
    assert HOSTILE[:50] in panel_of(document)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("node=999", "This dump has no node 999."),
        ("graph=none", "This dump has no graph none."),
        ("graph=none&node=22", "This dump has no graph none."),
        ("graph=8..14&node=999", "Graph 8..14 has no node 999."),
        ("buffer=none", "This dump has no buffer none."),
        ("buffer=q&graph=none&node=22", "This dump has no graph none."),
        ("layer=77", "This dump has no layer 77."),
        ("kernel=none", "This dump has no kernel none."),
    ],
)
def test_a_link_to_nothing_says_so(look: Look, state: str, said: str) -> None:
    assert said in panel_of(look(whole_step(), state))
