"""The graph tools on a GPU: an engine's segments, a graph of a backend, and graphs that PyTorch captured.

Kernels of libraries are other people's: what the driver does not show of them is left out, never an error.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds41rt.capture import (
    StaleGraphError,
    WatchedBackend,
    diff,
    inspect_backend_graphs,
    inspect_graph,
    lint,
    render_html,
)
from ds41rt.capture.dot import render_dot
from ds41rt.capture.dump import Dump, parse_dump
from ds41rt.capture.text import render_findings, render_text
from ds41rt.cu import driver as driver_module
from ds41rt.cu.backend import GpuBackend, open_backend
from ds41rt.engine import Engine
from ds41rt.errors import InputError
from ds41rt.testing.conformance.kernels import AFFINE
from ds41rt.tools.engine_dump import dump_engine

pytestmark = pytest.mark.gpu
SLOTS = 40


@pytest.fixture
def backend() -> Iterator[GpuBackend]:
    opened, _ = open_backend("cuda")
    yield opened
    opened.close()


def all_outputs(dump: Dump) -> str:
    """Every form of a dump can be made, and it loads back as it was; returns the text."""
    findings = lint(dump)
    assert parse_dump(dump.to_json(), "dump") == dump
    assert "<html" in render_html(dump, findings)
    assert render_dot(dump, findings).startswith("digraph")
    text = render_text(dump)
    print(text, render_findings(findings), sep="")
    return text


# ---- an engine's segments


def engine_dumps(path: Path, backend: GpuBackend) -> tuple[Dump, Dump, Dump]:
    """Of the micro preset: after a few tokens, captured again for a later one, and with a ring moved since."""
    with (
        Engine.open(
            path,
            mode="step-graph",
            backend=backend,
            expert_slots=SLOTS,
            host_slots=0,
            max_context=64,
            capture_watch=True,
        ) as engine,
        engine.new_sequence() as seq,
    ):
        engine.prefill(seq, [5, 17, 3, 250, 9])
        first = dump_engine(engine, [seq])
        engine.machine.drop_graphs(range(engine.machine.n), reason="captured again to compare")
        engine.prefill(seq, [42, 8, 100])
        later = dump_engine(engine, [seq])
        assert engine.stats().replays > 0
        buf, cfg = seq.step.buffers, engine.config
        nbytes = cfg.window * 2 * cfg.head_dim
        moved = backend.alloc("moved", nbytes)
        backend.copy_d2d(moved.ptr, buf.ring[2], nbytes, engine.stream)
        backend.synchronize(engine.stream)
        buf.ring = (*buf.ring[:2], moved.ptr, *buf.ring[3:])
        engine.prefill(seq, [7, 11])
        after = dump_engine(engine, [seq])
        backend.free(moved)
    return first, later, after


def test_an_engine_s_segments(checkpoint: Callable[[str], Path], backend: GpuBackend) -> None:
    first, later, after = engine_dumps(checkpoint("micro"), backend)
    assert "not available" not in first.made_by, first.made_by
    assert first.complete
    text = all_outputs(first)
    assert "segment 1, layers 1 to 2: " in text
    for graph in first.graphs:
        assert {node.kind for node in graph.nodes} == {"kernel", "copy"}
        for node in graph.nodes:
            assert node.label
            assert node.stream in ("step recording", "step recording side")
            for role, place in node.places:
                assert place.owner is not None, (node.label, role)
            if node.kernel is not None:
                assert node.kernel.params
                assert all(param.name for param in node.kernel.params)
                assert node.kernel.grid is not None
    assert lint(first, next_token=later) == []
    assert diff(first, later).graphs == ()
    found = diff(later, after)
    assert found.graphs == ()
    assert "sequence 1 ring layer 2" in {r.name for r in found.ranges}, found.to_text()


def test_an_engine_s_segments_are_those_of_the_simulated_device(
    checkpoint: Callable[[str], Path], backend: GpuBackend
) -> None:
    """Nodes, order, names, values and owners agree; launch shapes may depend on the device."""
    simulated, _ = open_backend("host")
    want, _, _ = engine_dumps(checkpoint("micro"), simulated)
    simulated.close()
    got, _, _ = engine_dumps(checkpoint("micro"), backend)
    found = diff(want, got)
    assert (found.graphs_removed, found.graphs_added) == ((), ())
    for graph in found.graphs:
        assert (graph.removed, graph.added) == ((), ()), found.to_text()
        assert {c.what for c in graph.changed} <= {"grid", "block", "dynamic shared memory"}, found.to_text()


# ---- a graph of a backend


def test_a_stale_replay_is_refused_on_a_device(backend: GpuBackend) -> None:
    """Freed, and with somebody else's buffer in the same place: an address that is alive says nothing."""
    watched = WatchedBackend(backend).as_backend
    stream = watched.create_stream("main")
    x = watched.alloc("x", 4096)
    launch = watched.prepare(AFFINE, {"x": x.ptr, "a": 3, "b": 1, "n": 1024}, "affine")
    watched.begin_capture(stream)
    watched.fill(x.ptr, 0, 4096, stream, label="clear")
    watched.launch(launch, stream)
    graph = watched.end_capture(stream)
    dump = inspect_backend_graphs(watched, {"graph": graph}, title="affine")
    assert [(n.kind, n.label, n.deps) for n in dump.graphs[0].nodes] == [
        ("fill", "clear", ()),
        ("kernel", "affine", (0,)),
    ]
    assert lint(dump) == []
    graph_exec = watched.instantiate(graph)
    watched.launch_graph(graph_exec, stream)
    watched.synchronize(stream)
    watched.free(x)
    assert [f.rule for f in lint(inspect_backend_graphs(watched, {"graph": graph}, title="affine"))] == [
        "freed-memory"
    ] * 2
    with pytest.raises(StaleGraphError, match="'x', which was freed"):
        watched.launch_graph(graph_exec, stream)
    other = watched.alloc("other", 4096)
    with pytest.raises(StaleGraphError, match="'x', which was "):
        watched.launch_graph(graph_exec, stream)
    watched.free(other)
    watched.synchronize(stream)


# ---- graphs of PyTorch


@pytest.fixture
def torch() -> Any:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("torch")
    if not module.cuda.is_available():
        pytest.skip("this PyTorch cannot use a GPU")
    return module


def attention_model(torch: Any) -> Any:
    """Activation, projections, attention, norm: kernels of several libraries, in half precision."""
    nn = torch.nn
    base: Any = nn.Module
    torch.manual_seed(0)

    class Model(base):  # type: ignore[misc] # no types without PyTorch
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(64, 192)
            self.out = nn.Linear(64, 64)
            self.norm = nn.LayerNorm(64)

        def forward(self, x: Any) -> Any:
            h = nn.functional.gelu(x)
            q, k, v = (t.view(2, 32, 4, 16).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
            a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.norm(x + self.out(a.transpose(1, 2).reshape(2, 32, 64)))

    return Model().cuda().half().eval()


def captured(torch: Any, work: Callable[[], Any]) -> tuple[Any, Any]:
    """(graph, result) of `work`, warmed up and captured with its graph kept."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.no_grad(), torch.cuda.graph(graph):
        result = work()
    return graph, result


@pytest.mark.filterwarnings("default")
def test_a_graph_of_pytorch(torch: Any) -> None:
    model = attention_model(torch)
    weights = dict(model.named_parameters())
    inputs = [torch.randn(2, 32, 64, device="cuda").half() for _ in range(2)]
    made = [captured(torch, lambda x=x: model(x)) for x in inputs]  # type: ignore[misc] # bound here
    dumps = []
    for (graph, result), x in zip(made, inputs, strict=True):
        dumps.append(inspect_graph(graph, ranges={**weights, "input": x, "result": result}, name="model"))
    dump = dumps[0]
    all_outputs(dump)
    (found,) = dump.graphs
    kernels = [node.kernel for node in found.nodes if node.kind == "kernel"]
    assert len(kernels) >= 4
    named = [k for k in kernels if k is not None and k.name]
    known = [k for k in named if k.params is not None]
    print(f"{len(kernels)} kernels: {len(named)} have a name, {len(known)} known parameters; {dump.made_by}")
    assert 2 * len(named) > len(kernels)
    assert 2 * len(known) > len(kernels)
    owners = {place.owner for node in found.nodes for _, place in node.places}
    print("owners:", sorted(map(str, owners)))
    assert {"input", "result", "norm.weight", "norm.bias"} <= owners
    assert not {"outside-allocation", "freed-memory", "no-label"} & {f.rule for f in lint(dump)}
    assert not diff(
        dump, inspect_graph(made[0][0], ranges={**weights, "input": inputs[0], "result": made[0][1]}, name="model")
    )
    between = diff(*dumps)
    changes = [c for graph in between.graphs for c in graph.changed]
    print(between.to_text())
    assert any("'input'" in c.before and "'input'" in c.after for c in changes)
    assert {f.rule for f in lint(dumps[0], next_token=dumps[1])} >= {"baked-scalar"}
    # The graph is as it was: it can still be made executable, and computes what it should.
    graph, result = made[0]
    graph.instantiate()
    graph.replay()
    torch.cuda.synchronize()
    with torch.no_grad():
        assert torch.allclose(result, model(inputs[0]), atol=1e-2)


@pytest.mark.filterwarnings("default")
def test_without_the_newer_calls_less_is_known_and_nothing_fails(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = attention_model(torch)
    x = torch.randn(2, 32, 64, device="cuda").half()
    graph, _ = captured(torch, lambda: model(x))
    real = driver_module._bindings()
    hidden: set[str] = set()

    class Older:
        def __getattr__(self, name: str) -> Any:
            if name in hidden:
                raise AttributeError(name)
            return getattr(real, name)

    monkeypatch.setattr(driver_module, "_bindings", Older)
    whole = inspect_graph(graph)
    calls = ("cuFuncGetName", "cuFuncGetParamInfo", "cuKernelGetName", "cuKernelGetParamInfo", "cuPointerGetAttribute")
    for names in (*({name} for name in calls), set(calls)):
        hidden.clear()
        hidden.update(names)
        less = inspect_graph(graph)
        assert [(n.kind, n.deps) for n in less.graphs[0].nodes] == [(n.kind, n.deps) for n in whole.graphs[0].nodes]
        assert parse_dump(less.to_json(), "less") == less
        lint(less)
    assert "cuFuncGetName" in less.made_by["not available"] or "cuKernelGetName" in less.made_by["not available"]


@pytest.mark.filterwarnings("default")
def test_pinned_memory_of_pytorch_has_to_be_registered(torch: Any) -> None:
    """A captured copy reads the block at every replay, whoever has it by then."""
    source = torch.arange(1024, dtype=torch.float32).pin_memory()
    target = torch.empty(1024, device="cuda")
    graph, _ = captured(torch, lambda: target.copy_(source, non_blocking=True))
    dump = inspect_graph(graph, ranges={"target": target})
    (copy,) = [node.copy_ for node in dump.graphs[0].nodes if node.copy_ is not None]
    assert (copy.dst.owner, copy.src.addr, copy.src.space, copy.nbytes) == ("target", source.data_ptr(), "pinned", 4096)
    assert "borrowed-host" in {f.rule for f in lint(dump)}
    registered = inspect_graph(graph, ranges={"target": target, "source": source})
    assert "borrowed-host" not in {f.rule for f in lint(registered)}


@pytest.mark.filterwarnings("default")
def test_what_cannot_be_taken_apart_is_said(torch: Any) -> None:
    x = torch.randn(64, device="cuda")
    plain = torch.cuda.CUDAGraph()
    with torch.cuda.graph(plain):
        x + 1
    with pytest.raises(InputError, match="keep_graph=True"):
        inspect_graph(plain)
    with pytest.raises(InputError, match="no handle"):
        inspect_graph(0)
    assert np.isfinite(x.cpu().numpy()).all()
