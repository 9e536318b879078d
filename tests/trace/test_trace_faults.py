"""A wrong value in each half of each layer, and everywhere else: the trace names the place, in every way to run it.

A launch of the second engine gets a reference that changes one value behind the real one, at one position. What the
trace must say is then known; the first engine's trace is recorded once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from ds41rt.cu.host import HostBackend
from ds41rt.cu.host.kernels import HostLaunch
from ds41rt.cu.kernel import KernelLaunch
from ds41rt.engine import Engine, Mode
from ds41rt.step.launches import LayerLaunches
from ds41rt.trace.compare import Difference, first_difference
from ds41rt.trace.file import Trace
from ds41rt.trace.record import TraceRecorder

Checkpoints = Callable[[str], Path]
Mutate = Callable[[dict[str, Any]], None]
# Long enough that rows are selected among more than fit; position 1 is the first that a graph may step.
TOKENS = [5, 9, 130, 7, 7, 200, 33, 9, 5, 12, 6, 8, 44, 201]
SHORT, LONG = 1, 13
N_LAYERS = 4


def open_engine(path: Path, way: str) -> Engine:
    """`way`: eager; replay (everything resident, graphs captured); rerun (falls at the first layer of each segment)."""
    engine = Engine.open(
        path,
        mode="eager" if way == "eager" else "step-graph",
        backend=HostBackend(race_detection=False),
        expert_slots=5 if way == "rerun" else None,
        max_context=32,
    )
    if way == "replay":
        for layer in range(engine.config.n_layers):
            engine.preload(layer, range(engine.config.n_experts))
    return engine


def record(engine: Engine, n: int) -> Trace:
    with engine.new_sequence() as seq:
        recorder = TraceRecorder(engine, values=True)
        for token in TOKENS[:n]:
            engine.decode_step(seq, token)
            recorder.end_token()
        trace = recorder.trace("run")
        recorder.close()
    return trace


@pytest.fixture(scope="module")
def right(checkpoint: Checkpoints) -> Trace:
    """Eager, with host routing: not even the selection kernel is shared with the other engine."""
    mode: Mode = "eager"
    with Engine.open(checkpoint("micro"), mode=mode, backend="host", device_route=False, max_context=32) as engine:
        return record(engine, len(TOKENS))


@pytest.fixture(scope="module", params=["eager", "replay", "rerun"])
def way(request: pytest.FixtureRequest) -> str:
    return cast(str, request.param)


@pytest.fixture(scope="module")
def other(checkpoint: Checkpoints, way: str) -> Iterator[Engine]:
    with open_engine(checkpoint("micro"), way) as engine:
        record(engine, 2)
        yield engine
    engine.backend.close()


def head_of(trace: Trace, n: int) -> Trace:
    per_run = ("version", "model", "about")
    return Trace(trace.where, trace.config, {k: v if k in per_run else v[:n] for k, v in trace.arrays.items()})


@contextmanager
def planted(engine: Engine, launch: KernelLaunch, position: int, mutate: Mutate) -> Iterator[list[int]]:
    """`mutate` gets the launch's arguments by name after it ran at `position`; counts how often it did."""
    assert isinstance(launch, HostLaunch)
    real, names, hits = launch._reference, [p.name for p in launch.spec.params], [0]

    def wrong(*args: Any) -> None:
        real(*args)
        if engine.bodies.bound[0] == position:
            mutate(dict(zip(names, args, strict=False)))
            hits[0] += 1

    launch._reference = wrong
    try:
        yield hits
    finally:
        launch._reference = real


def flip(name: str, at: int = 7) -> Mutate:
    """The lowest bit of one value: the smallest fault there is."""

    def mutate(args: dict[str, Any]) -> None:
        flat = args[name].reshape(-1)
        flat.view(f"u{flat.itemsize}")[at % flat.size] ^= 1

    return mutate


def find(engine: Engine, right: Trace, launch: KernelLaunch, position: int, mutate: Mutate) -> tuple[Difference, Trace]:
    with planted(engine, launch, position, mutate) as hits:
        trace = record(engine, position + 1)
    assert hits[0] >= 1
    difference = first_difference(head_of(right, position + 1), trace)
    assert difference is not None
    return difference, trace


def found(difference: Difference) -> tuple[int, int | None, str, str]:
    return difference.position, difference.check.layer, difference.check.half, difference.check.part


ATTENTION: dict[str, tuple[Callable[[LayerLaunches], KernelLaunch], str]] = {
    "attn_out": (lambda x: x.attn_core[-1], "y"),
    "mixes": (lambda x: x.attn_in, "comb"),
}
FFN: dict[str, tuple[Callable[[LayerLaunches], KernelLaunch], str]] = {
    "streams_in": (lambda x: x.combine, "streams"),
    "mix_in": (lambda x: x.ffn_in, "pre_out"),
}


@pytest.mark.parametrize(("part", "layer"), [*(("attn_out", i) for i in range(N_LAYERS)), ("mixes", 1), ("mixes", 2)])
def test_attention_half(other: Engine, way: str, right: Trace, layer: int, part: str) -> None:
    of, name = ATTENTION[part]
    difference, trace = find(other, right, of(other.layers[layer]), SHORT, flip(name))
    assert found(difference) == (SHORT, layer, "attention", part)
    assert trace.arrays["replayed"][SHORT].all() == (way == "replay")


@pytest.mark.parametrize(
    ("part", "layer"), [*(("streams_in", i) for i in range(N_LAYERS)), ("mix_in", 1), ("mix_in", 3)]
)
def test_ffn_half(other: Engine, right: Trace, layer: int, part: str) -> None:
    of, name = FFN[part]
    difference, _ = find(other, right, of(other.layers[layer]), SHORT, flip(name))
    assert found(difference) == (SHORT, layer, "ffn", part)


@pytest.mark.parametrize("layer", [1, 2])
def test_choice_of_experts(other: Engine, right: Trace, layer: int) -> None:
    def prefer_the_last(args: dict[str, Any]) -> None:
        args["logits"][args["logits"].argmin()] = 1e4

    difference, _ = find(other, right, other.layers[layer].router, SHORT, prefer_the_last)
    assert found(difference) == (SHORT, layer, "ffn", "expert_ids")


def test_weight_of_an_expert(other: Engine, right: Trace) -> None:
    k = other.config.top_k
    difference, _ = find(other, right, other.layers[2].route_select, SHORT, flip("header", 1 + k))
    assert found(difference) == (SHORT, 2, "ffn", "expert_weights")


@pytest.mark.parametrize("layer", [1, 2])
def test_engram(other: Engine, right: Trace, layer: int) -> None:
    difference, _ = find(other, right, other.layers[layer].engram[-1], SHORT, flip("streams", 99))
    assert found(difference) == (SHORT, layer, "engram", "streams")


@pytest.mark.parametrize("layer", [1, 2])
def test_engram_rows(other: Engine, right: Trace, layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = other._source
    read = source.read_engram_rows

    def wrong(of: int, rows: Any, codes: Any, scales: Any) -> None:
        read(of, rows, codes, scales)
        if of == layer and other.bodies.bound[0] == SHORT:
            codes[1, 3] ^= 1

    monkeypatch.setattr(source, "read_engram_rows", wrong)
    difference = first_difference(head_of(right, 2), record(other, 2))
    assert difference is not None
    assert found(difference) == (SHORT, layer, "engram", "engram_rows")


@pytest.mark.parametrize(("part", "name"), [("comp", "row"), ("key", "ikey"), ("pool", "pool")])
def test_rows_for_later_positions(
    other: Engine, right: Trace, part: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the token itself need show them: here every row is selected, whatever its key is."""
    index = {"pool": 0, "row": 1, "ikey": 2}[name]

    def mutate(args: dict[str, Any]) -> None:
        span = args["spans"][index].reshape(-1)
        span.view(f"u{span.itemsize}")[-1] ^= 1

    launch = other.layers[1].compress[1]
    with planted_spans(other, launch, SHORT, mutate):
        trace = record(other, 2)
    difference = first_difference(head_of(right, 2), trace)
    assert difference is not None
    assert found(difference) == (SHORT, 1, "attention", part)


@pytest.mark.parametrize("layer", [0, 3])
def test_row_of_the_window_ring(other: Engine, right: Trace, layer: int) -> None:
    def mutate(args: dict[str, Any]) -> None:
        args["spans"][0].view(np.uint16)[5] ^= 1

    with planted_spans(other, other.layers[layer].qkv[1], SHORT, mutate):
        trace = record(other, 2)
    difference = first_difference(head_of(right, 2), trace)
    assert difference is not None
    assert found(difference) == (SHORT, layer, "attention", "ring")


@contextmanager
def planted_spans(engine: Engine, launch: KernelLaunch, position: int, mutate: Mutate) -> Iterator[None]:
    """As `planted`, for what a kernel writes through pointers: the last argument of its reference."""
    assert isinstance(launch, HostLaunch)
    real = launch._reference

    def wrong(*args: Any) -> None:
        real(*args)
        if engine.bodies.bound[0] == position:
            mutate({"spans": args[-1]})

    launch._reference = wrong
    try:
        yield
    finally:
        launch._reference = real


@pytest.mark.parametrize("layer", [1, 3])
def test_selection_of_rows(other: Engine, right: Trace, layer: int) -> None:
    def prefer_the_worst(args: dict[str, Any]) -> None:
        scores = args["scores"][: (LONG + 1) // 2]
        legal = np.flatnonzero(np.isfinite(scores))
        scores[legal[scores[legal].argmin()]] = 1e6

    launch = other.layers[layer].index_score
    assert launch is not None
    difference, trace = find(other, right, launch, LONG, prefer_the_worst)
    assert found(difference) == (LONG, layer, "attention", f"index_topk.L{layer:02d}")
    name = f"index_topk.L{layer:02d}"
    assert not np.array_equal(trace.arrays[name][LONG], right.arrays[name][LONG])


@pytest.mark.parametrize(
    ("of", "name", "half", "part"),
    [
        (lambda engine: engine.layers[0].embed[0], "streams", "embedding", "streams_in"),
        (lambda engine: engine.layers[0].embed[0], "pre_prev", "embedding", "mix_in"),
        (lambda engine: engine.layers[-1].final[0], "hidden", "collapse", "hidden"),
        (lambda engine: engine.head_launch, "logits", "head", "logits"),
    ],
)
def test_outside_of_the_layers(
    other: Engine, right: Trace, of: Callable[[Engine], KernelLaunch], name: str, half: str, part: str
) -> None:
    difference, _ = find(other, right, of(other), SHORT, flip(name))
    assert found(difference) == (SHORT, None, half, part)


def test_without_a_fault_nothing_differs(other: Engine, way: str, right: Trace) -> None:
    """Falls included: they are what the third way is made of."""
    before = other.stats()
    trace = record(other, len(TOKENS))
    assert first_difference(right, trace) is None
    after = other.stats()
    assert (after.clean_replays > before.clean_replays) == (way == "replay")
    assert (sum(after.falls.values()) > sum(before.falls.values())) == (way == "rerun")
    for name in ("streams_in_hash", "mixes_hash", "ring_hash", "attn_out_hash"):
        behind = trace.arrays[name][:, 1:]  # equal tokens have equal embeddings
        assert len(np.unique(behind)) == behind.size, name
