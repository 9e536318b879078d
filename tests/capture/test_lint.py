"""Every lint rule finds its fault where one is seeded, says where it is, and keeps quiet beside it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_graphs import GATHER, NBYTES, WINDOW, N, Rig, changed, graph_of, nodes_of, page, rig

from ds41rt.capture import lint
from ds41rt.capture.dump import Copy, Dump, Graph, Kernel, Node, Param, Place, Range
from ds41rt.capture.finding import Finding
from ds41rt.capture.lint_rules import PER_TOKEN, RULES
from ds41rt.errors import InputError


def found(dump: Dump, **options: Any) -> list[tuple[str, int | None]]:
    return [(f.rule, f.node) for f in lint(dump, **options)]


def one(dump: Dump, rule: str, node: int, *said: str) -> Finding:
    """Exactly one finding, of this rule and node, whose reason has all of `said`."""
    (finding,) = lint(dump)
    assert (finding.rule, finding.graph, finding.node) == (rule, "graph", node)
    for part in said:
        assert part in finding.why
    assert finding.todo
    return finding


def test_a_clean_graph_has_no_findings() -> None:
    with rig() as r:
        assert lint(r.dump(r.clean)) == []


def test_rules_have_names_reasons_and_advice_and_stand_in_the_manual() -> None:
    idents = [rule.ident for rule in RULES]
    assert all(rule.why and rule.todo for rule in RULES)
    manual = (Path(__file__).parents[2] / "docs" / "capture.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([a-z-]+)` \|", manual, re.MULTILINE) == idents


# ---- addresses


def test_past_the_end_of_an_allocation() -> None:
    with rig() as r:
        dump = r.dump(lambda: r.add(r.a.ptr + 4, r.b.ptr))
        finding = one(dump, "outside-allocation", 0, "'x'", f"{NBYTES} bytes", "4 bytes past the end of 'a'")
        assert finding.name == "L00.add"
        assert lint(r.dump(lambda: r.add(r.a.ptr + 4, r.b.ptr, n=N - 1))) == []


@pytest.mark.parametrize(("addr", "said"), [(0x1230, "0x1230"), (0, "null pointer")])
def test_outside_of_any_allocation(addr: int, said: str) -> None:
    with rig() as r:
        one(r.dump(lambda: r.add(addr, r.b.ptr)), "outside-allocation", 0, "'x'", said)
        assert lint(r.dump(lambda: r.add(0, 0, n=0))) == []  # a pointer that is not used


def test_an_unknown_address_is_no_finding_where_nobody_could_be_asked() -> None:
    with rig() as r:
        dump = r.dump(lambda: r.add(0x1230, r.b.ptr))
        assert lint(dump.model_copy(update={"complete": False})) == []
        beyond = r.dump(lambda: r.add(r.a.ptr + 4, r.b.ptr)).model_copy(update={"complete": False})
        assert found(beyond) == [("outside-allocation", 0)]


def test_an_array_has_no_address_and_is_no_null_pointer() -> None:
    with rig() as r:
        dump = r.dump(lambda: r.backend.copy_d2d(r.a.ptr, r.b.ptr, 64, r.main, label="copy"))
        (node,) = nodes_of(dump)
        assert node.copy_ is not None
        array = Place(addr=0, nbytes=64, space="unknown", access="w")
        assert lint(changed(dump, 0, copy_=node.copy_.model_copy(update={"dst": array}))) == []


def test_freed_memory() -> None:
    with rig() as r:
        gone = r.backend.alloc("gone", NBYTES)
        handle = r.capture(lambda: r.add(r.a.ptr, gone.ptr))
        assert lint(r.dump_of(handle)) == []
        r.backend.free(gone)
        one(r.dump_of(handle), "freed-memory", 0, "'y'", "'gone'", "was freed")
        # One reason is enough for a pointer that is wrong in two ways.
        beyond = r.backend.alloc("gone too", NBYTES)
        handle = r.capture(lambda: r.add(r.a.ptr, beyond.ptr + 4))
        r.backend.free(beyond)
        one(r.dump_of(handle), "freed-memory", 0, "'gone too'")


# ---- host memory


def test_a_pageable_source_and_destination() -> None:
    with rig() as r:
        into = r.dump(lambda: r.backend.copy_h2d(r.a.ptr, page(), NBYTES, r.main, label="in"))
        one(into, "pageable-host", 0, "'src'", f"{NBYTES} bytes")
        out = r.dump(lambda: r.backend.copy_d2h(page(), r.a.ptr, NBYTES, r.main, label="out"))
        one(out, "pageable-host", 0, "'dst'")


def test_pinned_memory_that_nobody_vouches_for() -> None:
    """Memory that only the driver knows, as an allocator of pinned blocks gives and takes it. Large: no copy-node."""
    with rig() as r:
        big, host = r.backend.alloc("big", 1 << 17), r.backend.alloc_pinned("big staging", 1 << 17)
        dump = r.dump(lambda: r.backend.copy_h2d(big.ptr, host, 1 << 17, r.main, label="in"))
        assert lint(dump) == []
        from_driver = [
            x.model_copy(update={"source": "driver"}) if x.name == "big staging" else x for x in dump.ranges
        ]  # fmt: skip
        one(dump.model_copy(update={"ranges": tuple(from_driver)}), "borrowed-host", 0, "'src'", "nobody registered")
        nobody = Place(addr=host.device_ptr, nbytes=1 << 17, space="pinned", access="r")
        (node,) = nodes_of(dump)
        assert node.copy_ is not None
        one(changed(dump, 0, copy_=node.copy_.model_copy(update={"src": nobody})), "borrowed-host", 0)


# ---- kinds of nodes


@pytest.mark.parametrize(
    ("kind", "rule", "said"),
    [("alloc", "alloc-node", "allocates"), ("free", "alloc-node", "frees"), ("host", "host-node", "on the host")],
)
def test_nodes_that_a_graph_should_not_have(kind: str, rule: str, said: str) -> None:
    with rig() as r:
        dump = r.dump(r.clean)
        one(changed(dump, 1, kind=kind, kernel=None), rule, 1, said)
        for harmless in ("empty", "graph", "wait event", "record event"):
            assert lint(changed(dump, 1, kind=harmless, kernel=None, label=None)) == []


def test_small_copies_between_kernels() -> None:
    with rig() as r:
        across = r.dump(lambda: r.backend.copy_d2d(r.a.ptr, r.b.ptr, NBYTES, r.main, label="across"))
        one(across, "copy-node", 0, f"{NBYTES} bytes from device to device")
        pinned = r.dump(lambda: r.backend.copy_h2d(r.a.ptr, r.pinned, NBYTES, r.main, label="in"))
        one(pinned, "copy-node", 0, "from pinned to device")
        big = [r.backend.alloc(f"big {i}", (1 << 20) + 1) for i in range(2)]
        host = r.backend.alloc_pinned("big staging", (1 << 16) + 1)

        def large() -> None:
            r.backend.copy_d2d(big[0].ptr, big[1].ptr, (1 << 20) + 1, r.main, label="across")
            r.backend.copy_h2d(big[0].ptr, host, (1 << 16) + 1, r.main, label="in")

        assert lint(r.dump(large)) == []


def test_the_snapshots_of_an_engine_are_no_copies_to_save() -> None:
    """Label and destination both tell: no other small copy passes for one."""
    with rig() as r:
        store, other = r.backend.alloc("snapshots", NBYTES), r.backend.alloc("snapshots of mine", NBYTES)

        def copied(label: str, dst: int) -> list[tuple[str, int | None]]:
            return found(r.dump(lambda: r.backend.copy_d2d(dst, r.a.ptr, NBYTES, r.main, label)))

        assert copied("L07.snapshot", store.ptr) == []
        for label, dst in (("L07.snapshot", other.ptr), ("L07.snapshots", store.ptr), ("snapshot", store.ptr)):
            assert copied(label, dst) == [("copy-node", 0)]


def test_what_cannot_be_looked_at_is_said() -> None:
    with rig() as r:
        dump = r.dump(r.clean)
        for kind in ("other", "batch memory"):
            one(changed(dump, 1, kind=kind, kernel=None), "not-checked", 1, repr(kind), "not known")
        one(changed(dump, 1, kernel=None), "not-checked", 1, "does not say what the kernel is about")
        for kind in ("copy", "fill"):
            one(changed(dump, 1, kind=kind, kernel=None), "not-checked", 1, f"what the {kind} is about")
        (empty,) = lint(r.dump(lambda: None))
        assert (empty.rule, empty.graph, empty.node) == ("not-checked", "graph", None)
        assert "no nodes" in empty.why
        (nothing,) = lint(dump.model_copy(update={"graphs": ()}))
        assert (nothing.rule, nothing.graph, nothing.node) == ("not-checked", "", None)
        assert "no graphs" in nothing.why
        assert lint(dump.model_copy(update={"graphs": ()}), skip=["not-checked"]) == []


def test_work_that_nothing_waits_for() -> None:
    """A capture refuses it, a graph made in other ways does not."""
    with rig() as r:
        dump = r.dump(r.clean)
        loose = changed(dump, 3, deps=(2,))
        finding, race = lint(loose)
        assert (finding.rule, finding.node, finding.name) == ("unjoined-work", 1, "L00.beside")
        assert "on stream 'side'" in finding.why
        assert "ends with 'L01.last'" in finding.why
        assert (race.rule, race.node) == ("unordered-overlap", 3)  # it reads what nobody waits for
        # The end of the graph is where most of it comes together, wherever that stands.
        no_race = ["unordered-overlap"]
        assert found(changed(dump, 3, deps=()), skip=no_race) == [("unjoined-work", 1), ("unjoined-work", 3)]


def test_nodes_without_a_label() -> None:
    with rig() as r:
        dump = r.dump(r.clean)
        for label in ("", None):
            finding = one(changed(dump, 2, label=label), "no-label", 2)
            assert finding.name == "add"
        foreign = graph_of(dump)
        nobody = [node.model_copy(update={"label": None}) for node in foreign.nodes]
        unlabelled = foreign.model_copy(update={"nodes": tuple(nobody)})
        assert lint(dump.model_copy(update={"graphs": (unlabelled,)})) == []


# ---- values of a token


def test_a_scalar_with_a_telling_name() -> None:
    with rig() as r:
        one(r.dump(lambda: r.append(r.ring.ptr)), "baked-scalar", 0, "'position'", "7")
        assert "window" not in PER_TOKEN
        assert lint(r.dump(lambda: r.add(r.a.ptr, r.b.ptr))) == []


def test_a_value_that_differs_for_a_later_token() -> None:
    """Whatever its name, and whoever's kernel it is in."""
    with rig() as r:
        first = r.dump(lambda: r.add(r.a.ptr, r.b.ptr, n=5))
        later = r.dump(lambda: r.add(r.a.ptr, r.b.ptr, n=6))
        assert found(first, next_token=first) == []
        findings = lint(first, next_token=later)
        assert {(f.rule, f.node) for f in findings} == {("baked-scalar", 0)}
        assert ["'n' is baked as 5, and as 6" in f.why for f in findings].count(True) == 1
        assert any("'x' is baked as" in f.why for f in findings)  # it reaches further too
        # A telling name is reported once.
        rings = [r.dump(lambda at=at: r.append(r.ring.ptr, at)) for at in (3, 4)]  # type: ignore[misc] # bound here
        assert found(rings[0], next_token=rings[1]) == [("baked-scalar", 0)]


def foreign(raw: str, place: Place | None = None) -> Dump:
    params = (Param(off=0, raw=raw, place=place), Param(off=8, raw="00112233"))
    node = Node(index=0, kind="kernel", kernel=Kernel(name="_Z3foo", params=params))
    ranges = (Range(name="cache", addr=0x7F0000, nbytes=4096, space="device", source="caller"),)
    return Dump(title="foreign", graphs=(Graph(name="graph", nodes=(node,)),), ranges=ranges)


def test_a_foreign_kernel_is_compared_byte_by_byte() -> None:
    assert found(foreign("0102030405060708"), next_token=foreign("0102030405060708")) == []
    findings = lint(foreign("0102030405060708"), next_token=foreign("0102030405060709"))
    assert [(f.rule, f.node) for f in findings] == [("baked-scalar", 0)]
    assert "'parameter at 0' is baked as bytes 0102030405060708" in findings[0].why
    row = [Place(addr=0x7F0000 + off, owner="cache", owner_off=off, space="device") for off in (0, 128)]
    moved = [foreign(at.addr.to_bytes(8, "little").hex(), at) for at in row]
    (finding,) = lint(moved[0], next_token=moved[1])
    assert "'cache' at 0x7f0000" in finding.why
    assert "'cache' + 128 at 0x7f0080" in finding.why


def test_a_pointer_is_compared_whatever_its_name() -> None:
    """`step` would tell as a scalar; as a pointer, into a block of the sequence say, nobody else reports it."""
    block = (Range(name="sequence block", addr=0x7F0000, nbytes=4096, space="device", source="caller"),)

    def baked(off: int) -> Dump:
        at = Place(addr=0x7F0000 + off, nbytes=8, space="device", owner="sequence block", owner_off=off, access="r")
        param = Param(off=0, raw=at.addr.to_bytes(8, "little").hex(), name="step", type="u32*", place=at)
        node = Node(index=0, kind="kernel", label="L00.append", kernel=Kernel(name="append", params=(param,)))
        return Dump(title="t", graphs=(Graph(name="graph", nodes=(node,)),), ranges=block)

    assert lint(baked(0), next_token=baked(0)) == []
    (finding,) = lint(baked(0), next_token=baked(8))
    assert (finding.rule, finding.node) == ("baked-scalar", 0)
    assert "'step' is baked as 'sequence block' at" in finding.why


def test_graphs_that_only_one_dump_has_are_named() -> None:
    with rig() as r:
        first = r.dump(r.clean)
        none = first.model_copy(update={"graphs": ()})
        (finding,) = lint(first, next_token=none)
        assert (finding.rule, finding.graph, finding.node) == ("not-checked", "graph", None)
        assert "no such graph" in finding.why
        more = first.model_copy(update={"graphs": (*first.graphs, graph_of(first).model_copy(update={"name": "two"}))})
        (finding,) = lint(first, next_token=more)
        assert (finding.rule, finding.graph) == ("not-checked", "")
        assert "only the dump of the later token has graph 'two'" in finding.why
        assert lint(more, next_token=more) == []


def test_nodes_that_only_one_dump_has_are_named() -> None:
    with rig() as r:
        first = r.dump(r.clean)
        fewer = first.model_copy(
            update={"graphs": (graph_of(first).model_copy(update={"nodes": nodes_of(first)[:-1]}),)}
        )
        assert found(first, next_token=fewer) == [("not-checked", 3)]
        cut = ["unjoined-work"]
        assert found(fewer, next_token=first, skip=cut) == [("not-checked", None)]
        (finding,) = lint(fewer, next_token=first, skip=cut)
        assert "node 3 'L01.last'" in finding.why


# ---- order


def test_unordered_writes_to_the_same_bytes() -> None:
    with rig() as r:

        def race() -> None:
            r.add(r.a.ptr, r.b.ptr, label="L00.first")
            r.forked()
            r.add(r.b.ptr, r.c.ptr, r.side, label="L00.reads")
            r.add(r.a.ptr, r.b.ptr + NBYTES - 4, n=1, label="L00.writes")
            r.joined()
            r.add(r.c.ptr, r.a.ptr, label="L00.last")

        dump = r.dump(race)
        one(
            dump,
            "unordered-overlap",
            2,
            "'L00.reads' ('x')",
            "'L00.writes' ('y')",
            "same 4 bytes",
            f"offset {NBYTES - 4} of 'b'",
        )
        ordered = changed(dump, 2, deps=(1,))
        assert lint(ordered) == []


@pytest.mark.parametrize(
    ("read", "write", "races"),
    [
        ((0, 8), (8, 8), False),
        ((0, 8), (7, 1), True),
        ((4, 4), (0, 4), False),
        ((4, 4), (0, 5), True),
        ((0, 64), (0, 64), True),
    ],
)
def test_overlaps_to_the_byte(read: tuple[int, int], write: tuple[int, int], races: bool) -> None:
    with rig() as r:

        def work() -> None:
            r.add(r.a.ptr, r.ring.ptr, label="L00.first")
            r.forked()
            r.backend.copy_d2d(r.c.ptr, r.b.ptr + read[0], read[1], r.side, label="reads")
            r.backend.fill(r.b.ptr + write[0], 1, write[1], r.main, label="writes")
            r.joined()
            r.add(r.c.ptr, r.a.ptr, label="L00.last")

        assert found(r.dump(work), skip=["copy-node"]) == ([("unordered-overlap", 2)] if races else [])


def test_two_reads_race_with_nobody_and_a_node_not_with_itself() -> None:
    with rig() as r:

        def work() -> None:
            r.add(r.a.ptr, r.b.ptr, label="L00.first")
            r.forked()
            r.add(r.b.ptr, r.c.ptr, r.side, label="L00.one")
            r.add(r.b.ptr, r.ring.ptr, label="L00.two")
            r.joined()
            r.add(r.c.ptr, r.c.ptr, label="L00.in place")

        assert lint(r.dump(work)) == []


def test_addresses_of_ordinary_memory_are_a_space_of_their_own() -> None:
    with rig() as r:
        dump = r.dump(r.clean)
        (_, beside, second, _) = nodes_of(dump)
        clash = Place(addr=r.b.ptr, nbytes=NBYTES, space="pageable", access="w")
        copy = Copy(
            dst=clash, src=Place(addr=r.a.ptr, nbytes=NBYTES, space="device", owner="a", access="r"), nbytes=NBYTES
        )
        raced = changed(dump, 2, kernel=None, kind="copy", copy_=copy)
        assert second.label
        assert beside.stream == "side"
        assert found(raced) == [("pageable-host", 2)]


def test_what_was_not_declared_is_not_guessed() -> None:
    """A kernel that reaches rows through a table, and a foreign one over the same memory."""
    with rig() as r:
        table = r.backend.alloc("table", 8)
        r.backend.memory.bytes(table.ptr, 8)[:] = list(r.b.ptr.to_bytes(8, "little"))
        gather = r.backend.prepare(GATHER, {"table": table.ptr, "out": r.c.ptr, "n": N}, "L00.gather")

        def work() -> None:
            r.add(r.a.ptr, r.b.ptr, label="L00.first")
            r.forked()
            r.backend.launch(gather, r.side)
            r.add(r.a.ptr, r.b.ptr, label="L00.writes what is gathered")
            r.joined()
            r.add(r.c.ptr, r.a.ptr, label="L00.last")

        dump = r.dump(work)
        assert lint(dump) == []
        unknown = Kernel(name="_Z3foo", params=(Param(off=0, raw="00" * 8, place=Place(addr=r.b.ptr, owner="b")),))
        assert lint(changed(dump, 1, kernel=unknown)) == []


def test_a_graph_with_a_circle_is_damaged() -> None:
    with rig() as r, pytest.raises(InputError, match=r"'graph': 4 nodes depend on each other in a circle"):
        lint(changed(r.dump(r.clean), 0, deps=(3,)))


def test_rules_can_be_skipped() -> None:
    with rig() as r:
        dump = r.dump(lambda: r.backend.copy_h2d(r.a.ptr, page(), NBYTES, r.main))
        assert found(dump) == [("pageable-host", 0), ("no-label", 0)]
        assert found(dump, skip=["no-label"]) == [("pageable-host", 0)]


# ---- the seeded bugs of tests/cu/test_seeded_bugs.py, captured


def missing_wait(r: Rig) -> Callable[[], None]:
    def work() -> None:
        r.backend.fill(r.c.ptr, 1, 4, r.main, label="start")
        r.forked()
        r.add(r.a.ptr, r.b.ptr, label="L04.scale")
        r.backend.copy_d2h(r.pinned, r.b.ptr, NBYTES, r.side, label="header copy")
        r.joined()
        r.add(r.b.ptr, r.c.ptr, label="L04.last")

    return work


def queued_on_freed(r: Rig) -> Dump:
    handle = r.capture(lambda: r.add(r.a.ptr, r.b.ptr, label="L04.scale"))
    r.backend.free(r.b)
    return r.dump_of(handle)


def source_that_died(r: Rig) -> Dump:
    handle = r.capture(lambda: r.backend.copy_h2d(r.a.ptr, r.pinned, NBYTES, r.main, label="expert copy"))
    r.backend.free_pinned(r.pinned)
    return r.dump_of(handle)


@pytest.mark.parametrize(
    ("make", "rule", "said"),
    [
        (lambda r: r.dump(missing_wait(r)), "unordered-overlap", ["L04.scale", "header copy", "'b'"]),  # 1
        (queued_on_freed, "freed-memory", ["'b'"]),  # 3
        (source_that_died, "freed-memory", ["'staging'"]),  # 4
        (lambda r: r.dump(lambda: r.add(r.b.ptr + 4, r.a.ptr)), "outside-allocation", ["'b'"]),  # 9
    ],
)
def test_seeded_bugs_that_a_graph_shows(make: Callable[[Rig], Dump], rule: str, said: list[str]) -> None:
    """The others are none of a graph: host reads and writes (2, 7), captures that fail (5, 6, 10, 11), memory behind a
    table (8), two graphs launched at once (12)."""
    with rig() as r:
        (finding,) = [f for f in lint(make(r)) if f.rule != "copy-node"]
        assert finding.rule == rule
        for part in said:
            assert part in finding.why


def test_the_ring_of_the_rig_is_large_enough() -> None:
    with rig() as r:
        assert r.ring.nbytes == WINDOW * NBYTES
        assert found(r.dump(lambda: r.append(r.ring.ptr + 4))) == [("outside-allocation", 0), ("baked-scalar", 0)]
