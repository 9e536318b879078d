"""Dumps load back as they were; what is no dump, damaged or of a newer schema is refused with a reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_graphs import NBYTES, N, page, rig

from ds41rt.capture import load_dump
from ds41rt.capture.dump import Dump, Graph, Inside, Kernel, Node, Param, Place, Range, ReadBack, parse_dump
from ds41rt.errors import InputError


def full_dump() -> Dump:
    """One with every kind of content."""
    with rig() as r:

        def work() -> None:
            r.clean()
            r.append(r.ring.ptr)
            r.backend.copy_h2d(r.a.ptr, page(), NBYTES, r.main, label="in")
            r.backend.fill(r.b.ptr, 3, 8, r.main, label="clear")

        dump = r.dump(work)
    place = Place(addr=(1 << 64) - 8, nbytes=N, space="pinned", owner="a", owner_off=8, access="rw")
    odd = Kernel(name=None, grid=(1, 2, 3), params=(Param(off=8, raw="00ff", inside=(Inside(off=0, place=place),)),))
    foreign = Node(index=0, kind="kernel", kernel=odd, moved_nbytes=1 << 60)
    other = Graph(
        name="δ other", nodes=(foreign, Node(index=1, kind="other", deps=(0,))), layers=(0, 3), moe_layers=(0, 2),
        reads_back=(ReadBack(what="headers", nbytes=5, place=place), ReadBack(what="nothing", nbytes=0)),
    )  # fmt: skip
    ranges = (*dump.ranges, Range(name="gone", addr=5, nbytes=0, space="unknown", source="driver", freed=True))
    return dump.model_copy(update={"graphs": (*dump.graphs, other), "ranges": ranges, "complete": False})


def test_a_dump_round_trips(tmp_path: Path) -> None:
    dump = full_dump()
    path = tmp_path / "dump.json"
    path.write_text(dump.to_json(), encoding="utf-8")
    again = load_dump(path)
    assert again == load_dump(str(path)) == dump
    assert again.to_json() == dump.to_json()
    assert {node.kind for graph in again.graphs for node in graph.nodes} == {"kernel", "copy", "fill", "other"}


def test_values_keep_their_type_and_size() -> None:
    params = (
        Param(off=0, raw="", value=0.1),
        Param(off=0, raw="", value=(1 << 64) - 1),
        Param(off=0, raw="", value=-3),
    )
    dump = Dump(
        title="t",
        graphs=(Graph(name="g", nodes=(Node(index=0, kind="kernel", kernel=Kernel(name="k", params=params)),)),),
    )
    (node,) = parse_dump(dump.to_json(), "t").graphs[0].nodes
    assert node.kernel is not None
    assert [p.value for p in node.kernel.params or ()] == [0.1, (1 << 64) - 1, -3]


def test_a_dump_from_before_a_field_was_added_still_loads() -> None:
    raw = json.loads(full_dump().to_json())
    del raw["complete"]
    for graph in raw["graphs"]:
        for node in graph["nodes"]:
            for param in (node["kernel"] or {}).get("params") or ():
                del param["inside"]
    assert parse_dump(json.dumps(raw), "old").complete


def refused(text: str | bytes, *said: str) -> None:
    with pytest.raises(InputError) as info:
        parse_dump(text, "x.json")
    for part in ("x.json: ", *said):
        assert part in str(info.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "3", '{"schema": "other"}', "{}", b"\xff\xfe\x00", b"\x00" * 50]
)
def test_what_is_no_dump(text: str | bytes) -> None:
    refused(text, "is not a capture dump")


@pytest.mark.parametrize("version", [2, 17])
def test_a_newer_schema(version: int) -> None:
    raw = {**json.loads(full_dump().to_json()), "version": version, "new_field": 1}
    refused(json.dumps(raw), f"has version {version}", "reads up to 1", "update ds41rt")


def test_a_truncated_file_at_every_place() -> None:
    """Wherever the text ends, it is an error and never half a dump."""
    text = full_dump().to_json().strip()
    for n in np.random.default_rng(2).integers(0, len(text), 300).tolist():
        refused(text[:n], "is not a capture dump")


Edit = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda d: d.update(version="1"), "version"),
        (lambda d: d.update(version=0), "version is 0"),
        (lambda d: d.update(version=-3), "version is -3"),
        (lambda d: d.update(version=True), "version is True"),
        (lambda d: d.update(version=1.0), "version is 1.0, must be a whole number"),
        (lambda d: d.update(version=2.0), "version is 2.0"),
        (lambda d: d.update(version=None), "version is None"),
        (lambda d: d.pop("version"), "version is missing"),
        (lambda d: d.update(surprise=1), ": surprise: is no field of the schema"),
        (lambda d: d.update({"\x1b[2J": 1}), ": \\x1b[2J: is no field"),
        (lambda d: d.pop("title"), ": title: is missing"),
        (lambda d: d["ranges"][0].pop("nbytes"), ": ranges.0.nbytes: is missing"),
        (lambda d: d["ranges"][0].update(source="me"), ": ranges.0.source: is 'me'; it should be 'ledger', 'caller'"),
        (lambda d: d["graphs"][0]["nodes"][1].update(index=0), ": graph 'graph': node 1 says it is node 0"),
        (lambda d: d["graphs"][0]["nodes"][1].update(deps=[99]), "node 1 depends on node 99"),
        (lambda d: d["graphs"][0]["nodes"][1].update(deps=[1]), "node 1 depends on node 1"),
        (lambda d: d["graphs"][0]["nodes"][0].update(kind=5), "graphs.0.nodes.0.kind"),
        (lambda d: d["graphs"].append(d["graphs"][0]), "two graphs are called 'graph'"),
        (lambda d: d["graphs"][0]["nodes"][0]["kernel"]["params"][0].update(raw="0g"), "raw"),
        (lambda d: d["graphs"][0]["nodes"][0]["kernel"]["params"][0].update(off=-1), "off"),
        (lambda d: d["ranges"][0].update(space="moon"), "ranges.0.space"),
        (lambda d: d["ranges"][0].update(nbytes=-4), "ranges.0.nbytes"),
    ],
)
def test_damage_is_named(edit: Edit, said: str) -> None:
    raw = json.loads(full_dump().to_json())
    edit(raw)
    refused(json.dumps(raw), "is a damaged capture dump", said)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(InputError, match="cannot be read") as info:
            load_dump(path)
        assert str(path) in str(info.value)


def test_nesting_that_no_parser_follows() -> None:
    with pytest.raises(InputError, match="deep: is not a capture dump"):
        parse_dump("[" * 100_000, "deep")
