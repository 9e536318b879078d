"""A dump in words and as DOT: what stands in it, and that hostile names stay inside their quotes."""

import re

import pytest
from small_graphs import NBYTES, changed, graph_of, page, rig

from ds41rt.capture import lint
from ds41rt.capture.dot import render_dot
from ds41rt.capture.dump import Dump, Graph, Kernel, Node, ReadBack
from ds41rt.capture.text import render_findings, render_text
from ds41rt.capture.words import size


def test_text_says_what_a_graph_amounts_to() -> None:
    with rig() as r:
        dump = r.dump(r.clean)
        graph = graph_of(dump).model_copy(
            update={"layers": (0, 2), "reads_back": (ReadBack(what="routing headers", nbytes=4864),)}
        )
        text = render_text(dump.model_copy(update={"graphs": (graph,)}))
        assert text.splitlines()[0] == "a small graph"
        for line in (
            "  device: simulated device",
            "graph, layers 0 to 1: 4 nodes, 4 edges",
            "  kinds: 4 kernel",
            f"  moves: {8 * NBYTES} B at least",
            f"  heaviest layer: 0 with {4 * NBYTES} B (50 %)",
            "  forks after: L00.first",
            "  joins before: L01.last",
            "  memory (nodes that use it): b (4), c (2), a (1), window ring (1)",
            "  host reads back: routing headers, 4.86 kB",
        ):
            assert line in text.splitlines(), line


def test_a_graph_that_begins_in_several_places() -> None:
    """A side stream that forks ahead of all work has no node that it forks from."""
    nodes = (
        Node(index=0, kind="kernel", label="here"),
        Node(index=1, kind="fill", label="there"),
        Node(index=2, kind="kernel", label="both", deps=(0, 1)),
    )
    lines = render_text(Dump(title="t", graphs=(Graph(name="g", nodes=nodes),))).splitlines()
    assert "  starts in parallel with: here, there" in lines
    assert "  joins before: both" in lines
    assert "starts" not in render_text(Dump(title="t", graphs=(Graph(name="g", nodes=nodes[:1]),)))


def test_text_says_what_is_not_known() -> None:
    nodes = (Node(index=0, kind="kernel", kernel=Kernel(name=None)), Node(index=1, kind="other", deps=(0,)))
    dump = Dump(
        title="t", made_by={"not available": "names of kernels (cuFuncGetName)"}, graphs=(Graph(name="g", nodes=nodes),)
    )
    text = render_text(dump)
    assert "  not available: names of kernels (cuFuncGetName)" in text.splitlines()
    assert "  kernels with unknown parameters: 1" in text.splitlines()
    assert "moves" not in text
    assert render_text(Dump(title="t", graphs=())) == "t\n"
    assert "  kinds: none" in render_text(Dump(title="t", graphs=(Graph(name="g", nodes=()),))).splitlines()
    with rig() as r:
        text = render_text(r.dump(lambda: r.backend.copy_h2d(r.a.ptr, page(), 8, r.main, label="in")))
        assert "  addresses of unknown memory: 1" in text.splitlines()


def test_findings_in_words() -> None:
    with rig() as r:
        findings = lint(r.dump(lambda: r.backend.copy_h2d(r.a.ptr, page(), 8, r.main)))
        first, _, second, _, last = render_findings(findings).splitlines()
        assert first.startswith("pageable-host: graph, node 0 copy 0: 'src', 8 bytes, is ordinary host memory: ")
        assert second.startswith("no-label: graph, node 0 copy 0: ")
        assert last == "2 findings: 1 pageable-host, 1 no-label"
        assert render_findings([]) == "nothing found\n"
        assert render_findings(findings[:1]).splitlines()[-1] == "1 finding: 1 pageable-host"


def test_names_are_shown_without_control_characters() -> None:
    evil = "\x1b]0;gone\x07\nline\r\x9b\u202e\ud800"
    read = ReadBack(what=evil, nbytes=1)
    graph = Graph(name=evil, nodes=(Node(index=0, kind=evil, label=evil),), reads_back=(read,))
    dump = Dump(title=f"{evil} \u00fc \\", made_by={evil: evil}, graphs=(graph,))
    text = render_text(dump)
    assert all(line.isprintable() for line in text.splitlines())
    shown = "\\x1b]0;gone\\x07\\nline\\r\\x9b\\u202e\\ud800"
    assert text.splitlines()[:3] == [f"{shown} \u00fc \\", f"  {shown}: {shown}", f"{shown}: 1 node, 0 edges"]
    said = render_findings(lint(dump))
    assert said.startswith(f"not-checked: {shown}, node 0 {shown}: ")
    assert all(line.isprintable() for line in said.splitlines())


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (13_100_000_000, "13.1 GB"),
        (5 * 10**15, "5e+03 TB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


def test_dot_has_a_box_a_node_and_an_arrow_an_edge() -> None:
    with rig() as r:
        dump = r.dump(r.clean)
        findings = lint(changed(dump, 1, label=""))
        dot = render_dot(dump, findings)
        boxes = re.findall(r"^ +(g0n\d) \[label=\"(\d [^\"]*)\"", dot, re.MULTILINE)
        assert [name for name, _ in boxes] == ["g0n0", "g0n1", "g0n2", "g0n3"]
        assert boxes[0][1] == "0 first\\n16x1x1 blocks of 32x1x1"
        assert re.findall(r"(g0n\d) -> (g0n\d);", dot) == [
            ("g0n0", "g0n1"), ("g0n0", "g0n2"), ("g0n1", "g0n3"), ("g0n2", "g0n3")
        ]  # fmt: skip
        assert dot.count('label="layer ') == 2
        assert [line.split()[0] for line in dot.splitlines() if "color=red" in line] == ["g0n1"]
        assert dot.count("{") == dot.count("}")


def test_dot_quotes_whatever_it_is_given() -> None:
    evil = 'a"; } evil [label="\\'
    nodes = (Node(index=0, kind="kernel", label=evil), Node(index=1, kind="fill", deps=(0,), label="b\nc\r"))
    dot = render_dot(Dump(title=evil, graphs=(Graph(name=evil, nodes=nodes),)))
    for line in dot.splitlines():
        # Outside of strings nothing of a name is left.
        bare = re.sub(r'"(\\.|[^"\\])*"', "", line)
        assert "evil" not in bare
        assert '"' not in bare
    assert '"1 b\\nc"' in dot
