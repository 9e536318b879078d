"""Where nodes stand, what a graph amounts to, and what nodes are called."""

import random
from itertools import pairwise

import pytest
from page_dumps import foreign_graph, whole_step

from ds41rt.capture.dump import Graph, Kernel, Node
from ds41rt.capture.layout import Layout, Spot, lay_out
from ds41rt.capture.summary import kernel_name, short_name, summarise
from ds41rt.errors import InputError

STEP = whole_step()


def graph_of(*deps: tuple[int, ...], streams: str = "") -> Graph:
    """One node an argument, with these dependencies, each on the stream of its letter."""
    nodes = [
        Node(index=i, kind="kernel", deps=before, stream=streams[i] if streams else None)
        for i, before in enumerate(deps)
    ]
    return Graph(name="g", nodes=tuple(nodes))


def random_graph(seed: int) -> Graph:
    """Up to 40 nodes whose order in the dump says nothing about their dependencies."""
    rng = random.Random(seed)
    n = rng.randrange(1, 40)
    name = rng.sample(range(n), n)
    deps: list[tuple[int, ...]] = [()] * n
    for i in range(n):
        deps[name[i]] = tuple(name[j] for j in rng.sample(range(i), min(i, rng.randrange(4))))
    return graph_of(*deps, streams="".join(rng.choice("abc") for _ in range(n)))


def reachable(deps: tuple[tuple[int, ...], ...]) -> list[set[int]]:
    """By node, all nodes before it, by brute force."""
    before = [set(d) for d in deps]
    for _ in deps:
        for own in before:
            own |= {far for near in tuple(own) for far in before[near]}
    return before


def chains(graph: Graph, layout: Layout) -> list[list[int]]:
    """The nodes of each row from left to right."""
    rows: dict[int, list[int]] = {}
    for i in sorted(range(len(graph.nodes)), key=lambda i: layout.spots[i].column):
        rows.setdefault(layout.spots[i].row, []).append(i)
    return [rows[row] for row in sorted(rows)]


@pytest.mark.parametrize("seed", range(60))
def test_every_edge_leads_to_the_right_and_no_two_nodes_share_a_spot(seed: int) -> None:
    graph = random_graph(seed)
    layout = lay_out(graph)
    assert len(set(layout.spots)) == len(graph.nodes)
    assert all(layout.spots[a].column < layout.spots[b].column for a, b in graph.edges)
    for i, deps in enumerate(layout.deps):
        # Nothing stands further right than what comes before it asks for.
        assert layout.spots[i].column == max((layout.spots[dep].column + 1 for dep in deps), default=0)
    assert {spot.row for spot in layout.spots} == set(range(1 + max(spot.row for spot in layout.spots)))


@pytest.mark.parametrize("seed", range(60))
def test_a_row_is_used_again_only_when_all_in_it_is_joined(seed: int) -> None:
    graph = random_graph(seed)
    layout = lay_out(graph)
    column = [spot.column for spot in layout.spots]
    for row in chains(graph, layout):
        reach = 0  # how far the edges of the nodes up to i run
        for i, j in pairwise(row):
            reach = max(reach, *(column[k] for k in layout.after[i]), column[i] + 1)
            if j not in layout.after[i]:  # the first of a new chain: its edge begins behind those of the old one
                assert reach <= min((column[dep] for dep in layout.deps[j]), default=column[j])


@pytest.mark.parametrize("seed", range(60))
def test_implied_edges_change_no_order_and_all_others_do(seed: int) -> None:
    graph = random_graph(seed)
    layout = lay_out(graph)
    for node in graph.nodes:
        assert sorted((*layout.deps[node.index], *layout.implied[node.index])) == sorted(node.deps)
    order = reachable(layout.deps)
    assert order == reachable(tuple(node.deps for node in graph.nodes))
    for i, deps in enumerate(layout.deps):
        for dep in deps:
            assert not any(dep in order[other] for other in deps), f"{dep} -> {i} is implied"
            assert i in layout.after[dep]
    assert sum(map(len, layout.after)) == sum(map(len, layout.deps))


def test_a_side_stream_stands_below_the_main_one_between_fork_and_join() -> None:
    for graph in STEP.graphs:
        layout = lay_out(graph)
        for node in graph.nodes:
            assert layout.spots[node.index].row == (1 if node.stream == "side" else 0)
        assert {short_name(graph.nodes[i]) for i in layout.forks} == {"ffn_in"}
        assert {short_name(graph.nodes[i]) for i in layout.joins} == {"combine"}
        assert len(layout.forks) == len(layout.joins) == len(graph.moe_layers)
        # The tie of the side stream to its work of the layer before is no fork.
        assert [i for i, deps in enumerate(layout.implied) if deps] == [
            node.index
            for node in graph.nodes
            if short_name(node) == "shared_gate_up" and node.layer != graph.moe_layers[0]
        ]


def test_without_streams_the_longest_way_goes_on_in_the_row() -> None:
    layout = lay_out(graph_of((), (0,), (0,), (2,), (1, 3)))
    assert layout.spots == (Spot(0, 0), Spot(1, 1), Spot(1, 0), Spot(2, 0), Spot(3, 0))


def test_the_stream_goes_before_the_length_of_the_way() -> None:
    layout = lay_out(graph_of((), (0,), (0,), (2,), (1, 3), streams="aabba"))
    assert [spot.row for spot in layout.spots] == [0, 0, 1, 1, 0]


def test_a_graph_without_nodes_has_no_spots() -> None:
    assert lay_out(graph_of()) == Layout((), (), (), ())


@pytest.mark.parametrize("deps", [((1,), (0,)), ((), (0, 3), (1,), (2,))])
def test_a_circle_is_refused(deps: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(InputError, match=r"graph 'g'.*circle"):
        lay_out(graph_of(*deps))


def test_the_summary_adds_up() -> None:
    for graph in (*STEP.graphs, *foreign_graph().graphs):
        total = summarise(graph, lay_out(graph))
        kinds = [node.kind for node in graph.nodes]
        assert total.kinds == {kind: kinds.count(kind) for kind in set(kinds)}
        assert list(total.kinds.values()) == sorted(total.kinds.values(), reverse=True)
        known = [node.moved_nbytes for node in graph.nodes if node.moved_nbytes is not None]
        assert (total.moved_nbytes, total.n_unknown) == (sum(known), len(kinds) - len(known))
        by_layer = {
            layer: sum(node.moved_nbytes or 0 for node in graph.nodes if node.layer == layer)
            for layer in {node.layer for node in graph.nodes if node.layer is not None}
        }
        assert total.layer_nbytes == by_layer
        assert list(total.layer_nbytes) == sorted(by_layer)
        if by_layer:
            most = max(by_layer.values())
            assert total.heaviest == min(layer for layer, nbytes in by_layer.items() if nbytes == most)
        else:
            assert total.heaviest is None
        assert total.read_back_nbytes == sum(read.nbytes for read in graph.reads_back)


def test_unknown_weights_are_not_zero() -> None:
    graph = graph_of((), (0,))
    assert summarise(graph, lay_out(graph)).moved_nbytes is None
    weighed = Node(index=1, kind="copy", deps=(0,), moved_nbytes=0)
    graph = Graph(name="g", nodes=(graph.nodes[0], weighed))
    total = summarise(graph, lay_out(graph))
    assert (total.moved_nbytes, total.n_unknown) == (0, 1)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("linear_fp8", "linear_fp8"),
        (
            "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_",
            "vectorized_elementwise_kernel FillFunctor",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16> >(int)",
            "vectorized_elementwise_kernel CUDAFunctor_add",
        ),
        ("_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfEEEEvT1_", "reduce_kernel"),
        ("_ZN7cutlass7Kernel2I16gemm_bf16_align8EEvNT_6ParamsE", "gemm_bf16_align8"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float>(float*)", "softmax_warp_forward"),
        ("_Z4axpyPfi", "axpy"),
        ("_Z999x", "_Z999x"),
        ("_Z", "_Z"),
        ("</script>", "</script>"),
        ("<lambda>", "<lambda>"),
    ],
)
def test_a_kernel_is_called_by_its_bare_name(name: str, short: str) -> None:
    assert kernel_name(name) == short


def test_a_node_is_called_by_what_is_known_of_it() -> None:
    kernel = Kernel(name="_Z4axpyPfi")
    assert short_name(Node(index=0, kind="kernel", label="L07.q_b", kernel=kernel)) == "q_b"
    assert short_name(Node(index=0, kind="kernel", label="head", kernel=kernel)) == "head"
    assert short_name(Node(index=0, kind="kernel", kernel=kernel)) == "axpy"
    assert short_name(Node(index=0, kind="kernel", kernel=Kernel(name=None))) == "kernel"
    assert short_name(Node(index=0, kind="wait event")) == "wait event"
