"""What differs between two dumps, by name: parameters, launch shapes, order, nodes, memory that moved."""

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from small_graphs import NBYTES, WINDOW, N, Rig, changed, graph_of, nodes_of, page, rig

from ds41rt.capture import DumpDiff, diff, lint, render_html
from ds41rt.capture.dump import Dump, Graph, Inside, Kernel, Node, Param, Place, Range
from ds41rt.capture.dump_diff import common, match_nodes
from ds41rt.errors import InputError


def changes(found: DumpDiff) -> list[tuple[str, str, str, str]]:
    """(node, what, before, after) of the only graph."""
    (graph,) = found.graphs
    assert (graph.removed, graph.added) == ((), ())
    return [(c.node, c.what, c.before, c.after) for c in graph.changed]


def test_equal_dumps() -> None:
    with rig() as r:
        dump = r.dump(r.clean)
        found = diff(dump, r.dump(r.clean))
        assert not found
        assert found.same_addresses
        assert found.to_text() == "before: a small graph\nafter:  a small graph\nno difference\n"
        assert json.loads(found.to_json())["differs"] is False


def test_the_moved_window_ring_is_named() -> None:
    """A graph that bakes a ring, captured again after the ring moved: the pointer that changed, and to where."""
    with rig() as r:

        def work() -> None:
            r.add(r.a.ptr, r.b.ptr)
            r.append(r.ring.ptr)
            r.add(r.b.ptr, r.c.ptr)

        before = r.dump(work)
        old = r.ring
        r.ring = r.backend.alloc("window ring", old.nbytes)
        r.backend.free(old)
        after = r.dump(work)
        found = diff(before, after)
        where = f"'window ring' at {old.ptr:#x}, {WINDOW * NBYTES} bytes"
        now = f"'window ring' at {r.ring.ptr:#x}, {WINDOW * NBYTES} bytes"
        assert changes(found) == [("L00.append", "ring", where, now)]
        sizes = [f"256 bytes of device memory at {ring.ptr:#x}" for ring in (old, r.ring)]
        assert [(x.name, x.before, x.after) for x in found.ranges] == [("window ring", *sizes)]
        text = found.to_text()
        assert f"~ node 1 L00.append: ring: {where} -> {now}" in text
        assert f"'window ring': 256 bytes of device memory at {old.ptr:#x}" in text
        assert json.loads(found.to_json())["graphs"][0]["changed"][0]["what"] == "ring"


def test_a_pointer_into_another_part_of_the_same_buffer() -> None:
    with rig() as r:
        before = r.dump(lambda: r.add(r.a.ptr, r.ring.ptr))
        after = r.dump(lambda: r.add(r.a.ptr, r.ring.ptr + NBYTES))
        ((_, what, old, new),) = changes(diff(before, after))
        assert (what, old.split(" at ")[0], new.split(" at ")[0]) == ("y", "'window ring'", f"'window ring' + {NBYTES}")


def test_a_buffer_that_was_freed_is_said_to_be() -> None:
    """The same graph, looked at before and after: the address stands where it stood."""
    with rig() as r:

        def work() -> None:
            r.add(r.a.ptr, r.c.ptr)
            r.backend.copy_d2d(r.a.ptr, r.b.ptr, NBYTES, r.main, label="L00.copy")
            r.backend.fill(r.a.ptr, 1, NBYTES, r.main, label="L00.clear")

        handle = r.capture(work)
        before = r.dump_of(handle)
        r.backend.free(r.a)
        after = r.dump_of(handle)
        where = f"'a' at {r.a.ptr:#x}, {NBYTES} bytes"
        assert changes(diff(before, after)) == [
            ("L00.add", "x", where, f"{where} (freed)"),
            ("L00.copy", "dst", where, f"{where} (freed)"),
            ("L00.clear", "dst", where, f"{where} (freed)"),
        ]
        assert changes(diff(after, before))[0] == ("L00.add", "x", f"{where} (freed)", where)
        assert not diff(after, after)
        (first, *_) = [f for f in lint(before, next_token=after) if f.rule == "baked-scalar"]
        assert f"and as {where} (freed) for another token" in first.why


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("space", "pinned", ("device memory", "pinned memory")),
        ("access", "rw", ("access w", "access rw")),
        ("access", None, ("access w", "access unknown")),
    ],
)
def test_what_differs_is_shown_even_where_the_place_is_the_same(
    field: str, value: str | None, said: tuple[str, str]
) -> None:
    with rig() as r:
        before = r.dump(lambda: r.backend.fill(r.a.ptr, 1, 8, r.main, label="f"))
        fill = nodes_of(before)[0].fill
        assert fill is not None
        dst = fill.dst.model_copy(update={field: value})
        after = changed(before, 0, fill=fill.model_copy(update={"dst": dst}))
        where = f"'a' at {r.a.ptr:#x}, 8 bytes"
        assert changes(diff(before, after)) == [("f", "dst", *(f"{where}, {text}" for text in said))]


@pytest.mark.parametrize("given", [None, "a.json", {}])
def test_what_is_no_dump_is_refused(given: Any) -> None:
    dump = Dump(title="t", graphs=())
    for call in (
        lambda: diff(given, dump), lambda: diff(dump, given), lambda: lint(given), lambda: render_html(given),
        *((lambda: lint(dump, next_token=given),) if given is not None else ()),
    ):  # fmt: skip
        with pytest.raises(InputError, match=re.escape(f"{given!r} is no Dump")):
            call()


def test_names_cannot_reach_the_terminal() -> None:
    with rig() as r:
        before = r.dump(lambda: r.add(r.a.ptr, r.b.ptr, label="\x1b[2J\nnode\x9b"))
        after = changed(before, 0, stream="\x1b]0;x\x07")
        after = after.model_copy(update={"title": "\u202etitle", "ranges": ()})
        text = diff(before, after).to_text()
        assert all(line.isprintable() for line in text.splitlines())
        assert "  ~ node 0 \\x1b[2J\\nnode\\x9b: stream: main -> \\x1b]0;x\\x07" in text.splitlines()
        assert "after:  \\u202etitle" in text.splitlines()


Make = Callable[[Rig], Dump]


@pytest.mark.parametrize(
    ("before", "after", "what", "old", "new"),
    [
        (lambda r: r.append(r.ring.ptr, 3), lambda r: r.append(r.ring.ptr, 4), "position", "3", "4"),
        (
            lambda r: r.backend.fill(r.a.ptr, 1, 8, r.main, label="f"),
            lambda r: r.backend.fill(r.a.ptr, 2, 8, r.main, label="f"),
            "value", "1", "2",
        ),
        (
            lambda r: r.backend.copy_d2d(r.a.ptr, r.b.ptr, 8, r.main, label="c"),
            lambda r: r.backend.copy_d2d(r.a.ptr, r.b.ptr, 12, r.main, label="c"),
            "bytes", "8", "12",
        ),
        (
            lambda r: r.backend.copy_d2d(r.a.ptr, r.b.ptr, 8, r.main, label="c"),
            lambda r: r.backend.copy_d2d(r.a.ptr, r.c.ptr, 8, r.main, label="c"),
            "src", "'b' at", "'c' at",
        ),
    ],
)  # fmt: skip
def test_one_change(before: Make, after: Make, what: str, old: str, new: str) -> None:
    with rig() as r:
        found = changes(diff(r.dump(lambda: before(r)), r.dump(lambda: after(r))))
        assert any(c[1] == what and old in c[2] and new in c[3] for c in found), found


def test_a_launch_shape_and_a_stream() -> None:
    with rig() as r:
        before = r.dump(lambda: r.add(r.a.ptr, r.b.ptr, n=N))
        after = r.dump(lambda: r.add(r.a.ptr, r.b.ptr, n=4))
        assert ("L00.add", "grid", f"({N}, 1, 1)", "(4, 1, 1)") in changes(diff(before, after))
        assert changes(diff(before, changed(before, 0, stream="side"))) == [("L00.add", "stream", "main", "side")]
        (node,) = nodes_of(before)
        assert node.kernel is not None
        more = node.kernel.model_copy(update={"shared_nbytes": 256, "block": (64, 1, 1)})
        assert changes(diff(before, changed(before, 0, kernel=more))) == [
            ("L00.add", "block", "(32, 1, 1)", "(64, 1, 1)"), ("L00.add", "dynamic shared memory", "128", "256")
        ]  # fmt: skip


def test_a_changed_edge() -> None:
    with rig() as r:
        before = r.dump(r.clean)
        found = changes(diff(before, changed(before, 3, deps=(2,))))
        assert found == [("L01.last", "runs after", "L00.beside, L01.second", "L01.second")]
        assert changes(diff(before, changed(before, 0, deps=(3,))))[0][2:] == ("nothing", "L01.last")


def test_nodes_that_come_and_go_do_not_disturb_the_others() -> None:
    with rig() as r:

        def longer() -> None:
            r.add(r.a.ptr, r.b.ptr, label="L00.first")
            r.backend.fill(r.ring.ptr, 1, 4, r.main, label="L00.clear")
            r.forked()
            r.add(r.b.ptr, r.c.ptr, r.side, label="L00.beside")
            r.add(r.b.ptr, r.ring.ptr, label="L01.second")
            r.joined()
            r.add(r.c.ptr, r.b.ptr, label="L01.last")

        before, after = r.dump(r.clean), r.dump(longer)
        (graph,) = diff(before, after).graphs
        assert (graph.removed, graph.added) == ((), ((1, "L00.clear"),))
        # What came right behind the first node comes behind the new one now.
        assert [(c.node, c.what, c.before_node, c.after_node) for c in graph.changed] == [
            ("L00.beside", "runs after", 1, 2), ("L01.second", "runs after", 2, 3)
        ]  # fmt: skip
        (graph,) = diff(after, before).graphs
        assert (graph.removed, graph.added) == (((1, "L00.clear"),), ())
        assert "  - node 1 L00.clear" in diff(after, before).to_text()
        assert "  + node 1 L00.clear" in diff(before, after).to_text()


def test_graphs_that_only_one_dump_has() -> None:
    with rig() as r:
        dump = r.dump(r.clean)
        other = dump.model_copy(update={"graphs": (graph_of(dump).model_copy(update={"name": "other"}),)})
        found = diff(dump, other)
        assert (found.graphs_removed, found.graphs_added, found.graphs) == (("graph",), ("other",), ())
        assert "graph 'graph': only before" in found.to_text()
        assert "graph 'other': only after" in found.to_text()


def test_another_address_space_compares_owners() -> None:
    """Every address differs; whose memory it is, and where in it, does not. A size that differs is reported."""
    with rig() as r:
        before = r.dump(r.clean)
    with rig() as r:
        for _ in range(3):
            r.backend.alloc("in the way", 5000)
        for name in "abc":
            setattr(r, name, r.backend.alloc(name, NBYTES))
        r.ring = r.backend.alloc("window ring", WINDOW * NBYTES)
        graph = graph_of(r.dump(r.clean))
    # As a process of its own has it: all memory elsewhere, under the names it has there.
    names = {"a #2": "a", "b #2": "b", "c #2": "c", "window ring #2": "window ring"}
    text = graph.model_dump_json(by_alias=True)
    for numbered, name in names.items():
        text = text.replace(f'"{numbered}"', f'"{name}"')
    moved = tuple(x.model_copy(update={"addr": x.addr + (1 << 40)}) for x in before.ranges)
    after = before.model_copy(update={"graphs": (Graph.model_validate_json(text),), "ranges": moved})
    found = diff(before, after)
    assert not found.same_addresses
    assert not found, found.to_text()
    assert "compared by owner and offset" in found.to_text()
    smaller = tuple(x.model_copy(update={"nbytes": 60}) if x.name == "a" else x for x in moved)
    found = diff(before, after.model_copy(update={"ranges": smaller}))
    assert [(x.name, x.before, x.after) for x in found.ranges] == [
        ("a", "64 bytes of device memory", "60 bytes of device memory")
    ]  # fmt: skip
    # The same pointer into another buffer is a difference in any address space.
    swapped = Graph.model_validate_json(text.replace('"owner":"c"', '"owner":"b"'))
    assert diff(before, after.model_copy(update={"graphs": (swapped,)})).graphs


def foreign(*params: Param, name: str | None = "_Z3foo") -> Dump:
    kernel = Kernel(name=name, params=params)
    here = Range(name="cache", addr=0x7F0000, nbytes=4096, space="device", source="caller")
    return Dump(
        title="t", graphs=(Graph(name="g", nodes=(Node(index=0, kind="kernel", kernel=kernel),)),), ranges=(here,)
    )


def test_of_a_foreign_kernel_bytes_and_the_pointers_in_them() -> None:
    def struct(off: int, tail: str) -> Param:
        raw = "aabbccdd00000000" + (0x7F0000 + off).to_bytes(8, "little").hex() + tail
        place = Place(addr=0x7F0000 + off, owner="cache", owner_off=off)
        return Param(off=16, raw=raw, inside=(Inside(off=8, place=place),))

    before = foreign(struct(0, "01"))
    assert not diff(before, foreign(struct(0, "01")))
    assert [c[1:] for c in changes(diff(before, foreign(struct(64, "01"))))] == [
        ("parameter at 16, byte 8", "'cache' at 0x7f0000", "'cache' + 64 at 0x7f0040")
    ]  # fmt: skip
    ((what, old, new),) = [c[1:] for c in changes(diff(before, foreign(struct(0, "02"))))]
    assert (what, old[-2:], new[-2:]) == ("parameter at 16", "01", "02")
    assert [c[1] for c in changes(diff(before, foreign(Param(off=16, raw="00"))))] == ["parameters"]
    unknown = before.model_copy(
        update={"graphs": (Graph(name="g", nodes=(Node(index=0, kind="kernel", kernel=Kernel(name="_Z3foo")),)),)}
    )
    assert [c[1:] for c in changes(diff(before, unknown))] == [("parameters", "16:17", "unknown")]
    assert diff(before, foreign(struct(0, "01"), name="_Z3bar")).graphs[0].added == ((0, "_Z3bar"),)


def test_nodes_without_labels_are_matched_in_order() -> None:
    """Many of one kernel, one of them gone: all others find their partner."""
    nodes = [Node(index=i, kind="kernel", kernel=Kernel(name=name)) for i, name in enumerate("ababcababab")]
    whole = Graph(name="g", nodes=tuple(nodes))
    rest = [n.model_copy(update={"index": i}) for i, n in enumerate(nodes[:4] + nodes[5:])]
    pairs = match_nodes(whole, Graph(name="g", nodes=tuple(rest)))
    assert [old.index for old, _ in pairs] == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert [new.index for _, new in pairs] == list(range(10))


def test_the_match_is_as_long_as_any() -> None:
    """Against the textbook table, on sequences of few letters."""
    rng = np.random.default_rng(4)
    for _ in range(300):
        a, b = (rng.integers(0, 4, rng.integers(0, 25)).tolist() for _ in range(2))
        length = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
        for i, x in enumerate(a):
            for j, y in enumerate(b):
                length[i + 1][j + 1] = length[i][j] + 1 if x == y else max(length[i][j + 1], length[i + 1][j])
        pairs = common(a, b)
        assert len(pairs) == length[-1][-1]
        assert all(a[i] == b[j] for i, j in pairs)
        assert all(i < k and j < m for (i, j), (k, m) in itertools.pairwise(pairs))


def test_freed_memory_is_a_change_of_state() -> None:
    with rig() as r:
        handle = r.capture(lambda: r.add(r.a.ptr, r.b.ptr))
        before = r.dump_of(handle)
        r.backend.free(r.b)
        found = diff(before, r.dump_of(handle))
        ((name, _, after),) = [(x.name, x.before, x.after) for x in found.ranges]
        assert name == "b"
        assert after is not None
        assert after.endswith("freed")
        assert changes(found)[0][1] == "y"  # its space is not known any more


def test_pageable_copies_are_compared_by_address() -> None:
    with rig() as r:
        pages = [page(1), page(2)]
        dumps = [r.dump(lambda p=p: r.backend.copy_h2d(r.a.ptr, p, 8, r.main, label="in")) for p in pages]  # type: ignore[misc] # bound here
        ((_, what, old, _),) = changes(diff(*dumps))
        assert what == "src"
        assert old.startswith("pageable memory of nobody at ")
