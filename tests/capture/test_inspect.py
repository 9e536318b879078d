"""Dumps of graphs of the host backend: names, types, values, owners, edges, layers, weights."""

import subprocess
import sys

import pytest
from small_graphs import GATHER, NBYTES, N, graph_of, nodes_of, page, rig

import ds41rt.capture
from ds41rt import __version__
from ds41rt.capture import inspect_backend_graphs
from ds41rt.capture.dump import Copy, Fill, Inside, Place
from ds41rt.capture.inspect import backend_names, dump_graph
from ds41rt.capture.ranges import Names, caller_ranges
from ds41rt.cu.backend import Graph as Handle
from ds41rt.cu.graphinfo import CopyNode, GraphInfo, GraphNode, KernelNode, Param
from ds41rt.cu.kernel import I32, Array, KernelLaunch, KernelSpec, Pointer, Scalar, parameter_block
from ds41rt.errors import InputError


def test_a_kernel_of_ours_with_everything_that_is_declared() -> None:
    with rig() as r:
        dump = r.dump(lambda: r.add(r.a.ptr, r.b.ptr + 0, label="L07.add"))
        (node,) = nodes_of(dump)
        assert (node.kind, node.label, node.stream, node.layer) == ("kernel", "L07.add", "main", 7)
        assert node.moved_nbytes == 2 * NBYTES
        kernel = node.kernel
        assert kernel is not None
        assert (kernel.name, kernel.grid, kernel.block, kernel.shared_nbytes) == ("add", (N, 1, 1), (32, 1, 1), 128)
        assert not kernel.reads_through
        x, y, a, n = kernel.params or ()
        assert [(p.off, p.name, p.type, p.raw) for p in (x, y, a, n)] == [
            (0, "x", "i32*", r.a.ptr.to_bytes(8, "little").hex()),
            (8, "y", "i32*", r.b.ptr.to_bytes(8, "little").hex()),
            (16, "a", "i32", "05000000"),
            (20, "n", "u32", "10000000"),
        ]
        assert x.place == Place(addr=r.a.ptr, nbytes=NBYTES, space="device", owner="a", access="r")
        assert y.place == Place(addr=r.b.ptr, nbytes=NBYTES, space="device", owner="b", access="w")
        assert (a.value, a.place, n.value) == (5, None, N)
        assert dump.made_by == {"ds41rt": __version__, "backend": "host", "device": "simulated device"}
        assert dump.complete


def test_copies_and_fills_have_both_sides() -> None:
    with rig() as r:
        source = page()

        def work() -> None:
            r.backend.copy_h2d(r.a.ptr + 8, source, 16, r.main, src_off=4, label="in")
            r.backend.copy_h2d(r.b.ptr, r.pinned, 32, r.main, label="pinned")
            r.backend.copy_d2d(r.c.ptr, r.a.ptr, 12, r.main, label="across")
            r.backend.fill(r.ring.ptr + 4, 9, 8, r.main, label="clear")

        into, pinned, across, clear = nodes_of(r.dump(work))
        assert into.copy_ == Copy(
            dst=Place(addr=r.a.ptr + 8, nbytes=16, space="device", owner="a", owner_off=8, access="w"),
            src=Place(addr=source.ptr + 4, nbytes=16, space="pageable", access="r"),
            nbytes=16,
        )
        assert pinned.copy_ is not None
        assert pinned.copy_.src == Place(
            addr=r.pinned.device_ptr, nbytes=32, space="pinned", owner="staging", access="r"
        )  # fmt: skip
        assert across.copy_ is not None
        assert (across.copy_.src.owner, across.copy_.dst.owner, across.moved_nbytes) == ("a", "c", 12)
        place = Place(addr=r.ring.ptr + 4, nbytes=8, space="device", owner="window ring", owner_off=4, access="w")
        assert clear.fill == Fill(dst=place, value=9, element_nbytes=1, nbytes=8)
        assert clear.layer is None


def test_forks_and_joins_are_edges_with_streams() -> None:
    with rig() as r:
        graph = graph_of(r.dump(r.clean))
        assert [(n.label, n.stream, n.deps, n.layer) for n in graph.nodes] == [
            ("L00.first", "main", (), 0),
            ("L00.beside", "side", (0,), 0),
            ("L01.second", "main", (0,), 1),
            ("L01.last", "main", (1, 2), 1),
        ]
        assert graph.edges == ((0, 1), (0, 2), (1, 3), (2, 3))


def test_what_lies_behind_pointers_is_weighed_and_said() -> None:
    with rig() as r:
        args = {"table": r.b.ptr, "out": r.a.ptr, "n": N}
        dump = r.dump(lambda: r.backend.launch(r.backend.prepare(GATHER, args, "gather"), r.main))
        (node,) = nodes_of(dump)
        assert node.kernel is not None
        assert node.kernel.reads_through
        assert (node.moved_nbytes, node.layer) == (8 + NBYTES + NBYTES, None)
        assert node.kernel.grid is None


def test_a_pointer_that_a_launch_does_not_use_is_a_number() -> None:
    with rig() as r:
        (node,) = nodes_of(r.dump(lambda: r.add(0, 0, n=0)))
        assert node.kernel is not None
        assert [(p.value, p.place) for p in (node.kernel.params or ())[:2]] == [(0, None), (0, None)]


def test_a_part_that_somebody_named_goes_before_its_allocation() -> None:
    with rig() as r:
        row = r.ring.ptr + 2 * NBYTES
        (node,) = nodes_of(r.dump(lambda: r.add(row, r.ring.ptr), **{"row 2": (row, NBYTES)}))
        x, y = (place for _, place in node.places)
        assert (x.owner, x.owner_off) == ("row 2", 0)
        assert (y.owner, y.owner_off) == ("window ring", 0)
        # A range that leaves the part is of the allocation.
        (node,) = nodes_of(r.dump(lambda: r.add(row, r.a.ptr), **{"half": (row, NBYTES // 2)}))
        (x, _) = (place for _, place in node.places)
        assert (x.owner, x.owner_off) == ("window ring", 2 * NBYTES)


def test_buffers_of_one_name_are_told_apart() -> None:
    with rig() as r:
        twin = r.backend.alloc("a", NBYTES)
        (node,) = nodes_of(r.dump(lambda: r.add(r.a.ptr, twin.ptr)))
        assert [place.owner for _, place in node.places] == ["a", "a #2"]


def test_freed_memory_is_named_while_something_points_to_it() -> None:
    with rig() as r:
        gone, unused = r.backend.alloc("gone", NBYTES), r.backend.alloc("unused", NBYTES)
        handle = r.capture(lambda: r.add(r.a.ptr, gone.ptr + 4, n=4))
        r.backend.free(gone)
        r.backend.free(unused)
        dump = r.dump_of(handle)
        _, y = (place for _, place in nodes_of(dump)[0].places)
        assert (y.owner, y.owner_off, y.addr) == ("gone", 4, gone.ptr + 4)
        assert [(x.name, x.freed) for x in dump.ranges if x.name in ("gone", "unused")] == [("gone", True)]
        assert {x.name for x in dump.ranges if not x.freed} == {"a", "b", "c", "window ring", "staging"}


def test_of_a_foreign_kernel_words_in_known_memory_are_pointers() -> None:
    """8 bytes are a pointer as a whole; structures are searched at the places where a pointer can stand."""
    with rig() as r:
        names = backend_names(r.backend)
        inside = (123).to_bytes(4, "little") + (r.b.ptr + 8).to_bytes(8, "little") + r.c.ptr.to_bytes(8, "little")
        params = (
            Param(0, r.a.ptr.to_bytes(8, "little")),
            Param(8, (r.a.ptr + NBYTES).to_bytes(8, "little")),  # one past the end
            Param(16, b"\x07\0\0\0"),
            Param(20, inside),
            Param(40, (12345).to_bytes(8, "little")),
        )
        content = KernelNode("_Z3fooPf", (1, 2, 3), (4, 5, 6), 7, params)
        graph = dump_graph("g", GraphInfo((GraphNode(0, "kernel", (), content),)), names)
        (node,) = graph.nodes
        assert node.kernel is not None
        first, past, small, struct, number = node.kernel.params or ()
        assert first.place == Place(addr=r.a.ptr, space="device", owner="a")
        assert (past.place, small.place, number.place) == (None, None, None)
        assert struct.inside == (
            Inside(off=4, place=Place(addr=r.b.ptr + 8, space="device", owner="b", owner_off=8)),
            Inside(off=12, place=Place(addr=r.c.ptr, space="device", owner="c")),
        )
        assert [role for role, _ in node.places] == [
            "parameter at 0", "parameter at 20, byte 4", "parameter at 20, byte 12"
        ]  # fmt: skip
        assert (node.moved_nbytes, node.label, node.kernel.reads_through) == (None, None, False)
        assert (node.kernel.grid, node.kernel.block, node.kernel.shared_nbytes) == ((1, 2, 3), (4, 5, 6), 7)


def test_kernels_that_nobody_can_look_into() -> None:
    unknown = KernelNode(None, None, None, 0, None)
    info = GraphInfo((GraphNode(0, "kernel", (), unknown), GraphNode(1, "kernel", (0,), None)), ("cuFuncGetName",))
    graph = dump_graph("g", info, Names([]))
    assert graph.nodes[0].kernel is not None
    assert graph.nodes[0].kernel.params is None
    assert graph.nodes[1].kernel is None


def test_children_within_children() -> None:
    """Nodes before, in and after; deps of the outer graph may point forward."""
    empty = GraphInfo(())
    inner = GraphInfo((GraphNode(0, "fill", (), None), GraphNode(1, "fill", (), None)))
    middle = GraphInfo((GraphNode(0, "graph", (), inner), GraphNode(1, "graph", (0,), empty)))
    outer = GraphInfo(
        (GraphNode(0, "copy", (2,), None), GraphNode(1, "graph", (0,), middle), GraphNode(2, "copy", (), None))
    )
    graph = dump_graph("g", outer, Names([]))
    assert [(n.kind, n.deps) for n in graph.nodes] == [
        ("copy", (6,)),
        ("fill", (0,)), ("fill", (0,)), ("graph", (1, 2)), ("graph", (3,)),
        ("graph", (4,)),
        ("copy", ()),
    ]  # fmt: skip


def test_a_declaration_that_is_not_the_graph_s_is_an_error() -> None:
    with rig() as r:
        info = r.backend.describe_graph(r.capture(lambda: r.add(r.a.ptr, r.b.ptr)))
        (node,) = info.nodes
        assert isinstance(node.content, KernelNode)
        short = KernelNode("add", None, None, 0, (node.content.params or ())[:2])
        with pytest.raises(InputError, match=r"add .*2 parameters in the graph and 4 in its declaration"):
            dump_graph("g", GraphInfo((GraphNode(0, "kernel", (), short, "add", "main", node.launch),)), Names([]))


def test_what_the_graph_holds_goes_before_what_was_asked_for() -> None:
    """Somebody may have changed the node: its bytes are what a replay uses."""
    with rig() as r:
        info = r.backend.describe_graph(r.capture(lambda: r.add(r.a.ptr, r.b.ptr)))
        (node,) = info.nodes
        assert isinstance(node.content, KernelNode)
        x, y, _, n = node.content.params or ()
        now = KernelNode("add", None, None, 0, (Param(0, y.value), Param(8, x.value), Param(16, b"\x09\0\0\0"), n))
        graph = dump_graph(
            "g", GraphInfo((GraphNode(0, "kernel", (), now, "add", "main", node.launch),)), backend_names(r.backend)
        )
        assert [place.owner for _, place in graph.nodes[0].places] == ["b", "a"]
        assert graph.nodes[0].kernel is not None
        assert (graph.nodes[0].kernel.params or ())[2].value == 9


def test_two_graphs_of_one_dump() -> None:
    with rig() as r:
        one, two = r.capture(r.clean), r.capture(lambda: r.add(r.a.ptr, r.b.ptr))
        dump = inspect_backend_graphs(r.backend, {"one": one, "two": two}, title="both")
        assert [(g.name, len(g.nodes)) for g in dump.graphs] == [("one", 4), ("two", 1)]
        assert dump.title == "both"
        empty = r.dump(lambda: None)
        assert nodes_of(empty) == ()
        with pytest.raises(Exception, match="cuGraphGetNodes"):
            inspect_backend_graphs(r.backend, {"none": Handle(12345)}, title="t")


def test_pointers_reach_as_far_as_a_copy_of_rows_does() -> None:
    names = Names(caller_ranges({"image": (0x10_0000, 1000)}))
    copy = CopyNode(0x10_0010, "device", 0x10_0100, "device", 60, dst_reach=220)
    (node,) = dump_graph("g", GraphInfo((GraphNode(0, "copy", (), copy),)), names).nodes
    assert node.copy_ is not None
    assert (node.copy_.nbytes, node.copy_.dst.nbytes, node.copy_.src.nbytes) == (60, 220, 60)


def test_parameters_stand_at_multiples_of_their_size() -> None:
    spec = KernelSpec("odd", (Scalar("n", "u32"), Pointer("x", I32, lambda s: (s.n,), "r"), Scalar("f", "f32")), _odd)
    assert parameter_block(KernelLaunch(spec, (3, 0x7F00, 1.5), "odd")) == (
        (0, b"\x03\0\0\0"), (8, b"\0\x7f\0\0\0\0\0\0"), (16, b"\0\0\xc0\x3f")
    )  # fmt: skip


def _odd(n: int, x: Array, f: float) -> None: ...


def test_the_package_loads_nothing_before_it_is_used() -> None:
    code = "import sys, ds41rt.capture; print(sorted({'cuda', 'torch', 'pydantic', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert all(callable(getattr(ds41rt.capture, name)) for name in ds41rt.capture.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ds41rt.capture.nothing
