"""The diagnostics on an engine's own graphs: names everywhere, nothing wrong but copies, moved rings, stale replays."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from buffer_moves import moved
from engine_harness import Checkpoints, Run, check_counters, reference
from structlog.testing import capture_logs

from ds41rt.capture import StaleGraphError, diff, lint, render_html
from ds41rt.capture.dot import render_dot
from ds41rt.capture.dump import Dump, parse_dump
from ds41rt.capture.finding import Finding
from ds41rt.capture.text import render_text
from ds41rt.cu.backend import DeviceBuffer, Graph, GraphExec
from ds41rt.cu.graphinfo import GraphInfo, GraphNode
from ds41rt.cu.kernel import launch_nbytes
from ds41rt.engine import Engine
from ds41rt.errors import InputError, UnsupportedError
from ds41rt.tools.engine_dump import dump_checkpoint, dump_engine, only_segment

SLOTS = 40


def watching(checkpoint: Checkpoints, preset: str = "micro", **settings: Any) -> Run:
    return Run(reference(checkpoint(preset)), slots=SLOTS, capture_watch=True, **settings)


@pytest.fixture(scope="module")
def dump(checkpoint: Checkpoints) -> Dump:
    with (
        Engine.open(checkpoint("micro"), mode="step-graph", expert_slots=SLOTS, capture_watch=True) as engine,
        engine.new_sequence() as seq,
    ):
        engine.prefill(seq, [5, 17, 3, 250])
        return dump_engine(engine, [seq])


def test_every_segment_with_layers_kinds_and_labels(checkpoint: Checkpoints, dump: Dump) -> None:
    with Engine.open(checkpoint("micro"), expert_slots=SLOTS) as engine:
        geometry = {owner: end for owner, (end, _) in engine.machine.geometry.items()}
        n_layers = engine.config.n_layers
    assert {(g.name, g.layers, g.moe_layers) for g in dump.graphs} == {
        (f"segment {owner}", (owner, end), tuple(range(owner, end))) for owner, end in geometry.items()
    }
    assert len(dump.graphs) > 1
    for graph in dump.graphs:
        assert {node.kind for node in graph.nodes} == {"kernel", "copy"}
        assert graph.layers is not None
        first, end = graph.layers
        # The last part is the attention input of the layer after it.
        assert {node.layer for node in graph.nodes} == set(range(first, min(end + 1, n_layers)))
        assert {node.stream for node in graph.nodes} == {"step recording", "step recording side"}
        assert all(node.label for node in graph.nodes)
        assert all(node.moved_nbytes for node in graph.nodes)
    assert parse_dump(dump.to_json(), "dump") == dump


def test_every_pointer_has_an_owner(dump: Dump) -> None:
    owners = set()
    for graph in dump.graphs:
        for node in graph.nodes:
            for role, place in node.places:
                assert place.owner is not None, (node.label, role)
                owners.add(place.owner)
    for name in (
        "sequence block: step", "sequence block: ring cell layer 2", "saved block: streams", "normed", "expert arena",
        "route header layer 1", "slot table layer 1", "snapshots", "layers.1.ffn.gate.weight",
    ):  # fmt: skip
        assert name in owners
    # Of a sequence nothing is baked, but its parts are in the dump.
    assert not [name for name in owners if name.startswith("sequence 1")]
    assert {f"sequence 1 ring layer {layer}" for layer in range(4)} <= {r.name for r in dump.ranges}


def test_the_weight_of_a_node_is_that_of_its_launch(checkpoint: Checkpoints, dump: Dump) -> None:
    with Engine.open(checkpoint("micro"), expert_slots=SLOTS) as engine:
        layer = engine.layers[2]
        launches = {launch.label: launch for launch in (*layer.qkv, *layer.attn_core, *layer.experts, layer.combine)}
        cfg, saved = engine.config, engine.buffers.saved.nbytes
    nodes = {node.label: node for graph in dump.graphs for node in graph.nodes}
    for label, launch in launches.items():
        assert nodes[label].moved_nbytes == launch_nbytes(launch)
    # The experts' matrices are most of what an expert kernel moves.
    matrices = cfg.top_k * 2 * cfg.inter_dim * cfg.dim * 17 // 32
    assert matrices < (nodes["L02.expert_gate_up"].moved_nbytes or 0) < 1.5 * matrices
    assert nodes["L02.snapshot"].moved_nbytes == saved


def test_what_the_host_reads_is_what_it_was_seen_to_read(checkpoint: Checkpoints) -> None:
    """Between one launch and the next the engine copies back exactly what the dump says, and no more bytes."""
    with watching(checkpoint) as run:
        run.steps(12)
        dump = dump_engine(run.engine)
        owner_of = {g.graph_exec: i for i, g in enumerate(run.engine.machine.seg.graphs) if g is not None}
        seen: dict[int, dict[int, int]] = {}
        launched: list[int] = []

        def hook(name: str, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
            if name == "launch_graph":
                launched.append(owner_of[args[0]])
            if name == "copy_d2h" and launched:
                into = seen.setdefault(launched[-1], {})
                into[args[1]] = max(into.get(args[1], 0), args[2])
            return call()

        before = run.stats().clean_replays
        with run.hooked(hook):
            run.steps(12)
        assert run.stats().clean_replays > before
        arena, buffers = run.engine.arena, run.engine.buffers
        # Besides: the logits behind the last segment, and a header row a layer that runs again after a fall.
        others = {buffers.vocab_logits.ptr, *(arena.header_row(layer) for layer in range(1, 4))}
        for graph in dump.graphs:
            assert graph.layers is not None
            said = {read.place.addr: read.nbytes for read in graph.reads_back if read.place is not None}
            got = {addr: n for addr, n in seen[graph.layers[0]].items() if addr not in others}
            assert got.keys() <= said.keys()
            assert all(n <= said[addr] for addr, n in got.items())
            assert got[arena.headers_ptr] == said[arena.headers_ptr]
        assert any(buffers.index_scores.ptr in of for of in seen.values())


def test_lint_finds_nothing(dump: Dump) -> None:
    """Although there are small copies in it, one a layer: the snapshots, which are meant to be there."""
    copies = [node.label for graph in dump.graphs for node in graph.nodes if node.kind == "copy"]
    assert copies == [f"L{layer:02d}.snapshot" for layer in range(4)]
    assert lint(dump) == []


@pytest.mark.parametrize("preset", ["micro", pytest.param("tiny", marks=pytest.mark.long)])
def test_nothing_of_a_token_is_baked(checkpoint: Checkpoints, preset: str) -> None:
    first, later = dump_checkpoint(checkpoint(preset), tokens=4, backend="host", again=True)
    assert later is not None
    assert lint(first, next_token=later) == []
    assert not diff(first, later).graphs


def test_every_output_takes_an_engine_s_dump(dump: Dump) -> None:
    findings = [Finding("r", graph.name, 0, "", "why", "todo") for graph in dump.graphs]
    assert "segment 1, layers 1 to 2: " in render_text(dump)
    assert render_dot(dump, findings).count("color=red") == len(findings) == 3
    assert "<html" in render_html(dump, findings)


def test_diff_names_the_ring_that_moved(checkpoint: Checkpoints) -> None:
    """No graph bakes a ring: the graphs are equal, and the memory that moved is named by its part."""
    with watching(checkpoint) as run:
        run.steps(6)
        before = dump_engine(run.engine, [run.seq])
        buf, cfg = run.seq.step.buffers, run.engine.config
        rings, keep = list(buf.ring), list[DeviceBuffer]()
        rings[2] = moved(run, rings[2], cfg.window * 2 * cfg.head_dim, keep)
        buf.ring = tuple(rings)
        run.steps(2)
        found = diff(before, dump_engine(run.engine, [run.seq]))
        assert found.same_addresses
        assert found.graphs == ()
        assert [(r.name, r.before is not None, r.after is not None) for r in found.ranges] == [
            ("sequence 1 ring layer 2", True, True), ("moved", False, True)
        ]  # fmt: skip
        assert f"at {rings[2]:#x}" in (found.ranges[0].after or "")
        run.backend.free(keep[0])


def test_an_engine_that_keeps_nothing_or_captured_nothing(checkpoint: Checkpoints) -> None:
    engine = Engine.open(checkpoint("micro"), mode="step-graph", expert_slots=SLOTS)
    with engine, pytest.raises(InputError, match="capture_watch"):
        dump_engine(engine)
    engine = Engine.open(checkpoint("micro"), mode="eager", expert_slots=SLOTS, capture_watch=True)
    with engine, pytest.raises(UnsupportedError, match="no segment is captured: the mode is off"):
        dump_engine(engine)
    with pytest.raises(InputError, match="--tokens must be at least 3"):
        dump_checkpoint(checkpoint("micro"), tokens=2, backend="host")


def test_one_segment_of_a_dump(dump: Dump) -> None:
    assert [g.name for g in only_segment(dump, 1).graphs] == ["segment 1"]
    assert only_segment(dump, None) is dump
    with pytest.raises(InputError, match=r"--segment 2: .* segment 0, segment 1, segment 3"):
        only_segment(dump, 2)


# ---- watch


def test_a_watched_engine_has_the_same_bits_and_leaks_nothing(checkpoint: Checkpoints) -> None:
    with watching(checkpoint) as run:
        run.steps(10)
        check_counters(run)
        assert run.stats().clean_replays > 0


@pytest.mark.parametrize("buffer", ["snapshots", "layers.2.ffn.gate.weight", "expert arena"])
def test_a_stale_replay_is_refused_with_names_and_the_sequence_stands(checkpoint: Checkpoints, buffer: str) -> None:
    """What the engine's graphs bake is freed under it: the token fails, its graph was not launched."""
    with watching(checkpoint) as run:
        run.steps(4)
        (victim,) = [buf for buf in run.backend.ledger() if buf.name == buffer]
        assert isinstance(victim, DeviceBuffer)
        contents = run.backend.memory.bytes(victim.ptr, victim.nbytes).copy()
        hidden = [buf for buf in run.backend.ledger() if buf is not victim]
        run.probe.ledger = lambda: hidden  # type: ignore[attr-defined] # as if it had been freed
        launched: list[GraphExec] = []

        def hook(name: str, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
            if name == "launch_graph":
                launched.append(args[0])
            return call()

        at, launches = run.seq.position, run.stats().replays
        with run.hooked(hook), pytest.raises(StaleGraphError) as info:
            run.step()
        for part in ("L0", "bakes", f"{buffer!r}", "was freed", "was not launched"):
            assert part in str(info.value)
        if buffer == "layers.2.ffn.gate.weight":
            assert "node 'L02.router' bakes 'w'" in str(info.value)
        stale = {g.graph_exec for g in run.engine.machine.seg.graphs if g is not None} - set(launched)
        assert stale
        assert run.seq.position == at
        assert run.stats().replays == launches + len(launched)
        # The buffer is back: so is the engine, with the right bits.
        del run.probe.ledger
        assert (run.backend.memory.bytes(victim.ptr, victim.nbytes) == contents).all()
        run.steps(3)


# ---- graphs that own memory


@pytest.mark.parametrize("kind", ["alloc", "free"])
def test_an_engine_refuses_a_graph_that_owns_memory(checkpoint: Checkpoints, kind: str) -> None:
    """The capture counts as failed: everything runs eagerly, with the right bits, and the log names the node."""
    with Run(reference(checkpoint("micro")), slots=SLOTS) as run:
        describe = run.backend.describe_graph

        def planted(graph: Graph) -> GraphInfo:
            info = describe(graph)
            owner = GraphNode(len(info.nodes), kind, (0,), None, "L00.workspace")
            return replace(info, nodes=(*info.nodes, owner))

        run.backend.describe_graph = planted  # type: ignore[method-assign] # this backend captures no such node
        with capture_logs() as logs:
            run.steps(6)
        run.backend.describe_graph = describe  # type: ignore[method-assign]
        (warning,) = [e for e in logs if e["log_level"] == "warning"]
        assert "'L00.workspace'" in warning["error"]
        assert f"would {kind} memory" in warning["error"]
        stats = run.stats()
        assert (stats.captures, stats.replays) == (0, 0)
        assert (run.live()["graphs"], run.live()["graph_execs"]) == (0, 0)


def test_titles_name_the_checkpoint(checkpoint: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(checkpoint("micro"))
    first, later = dump_checkpoint(tmp_path / "model", tokens=3, backend="host", again=True)
    assert later is not None
    assert (first.title, later.title) == ("step graph of model", "step graph of model, 3 tokens later")
    assert dump_checkpoint(tmp_path / "model", tokens=3, backend="host")[1] is None
