"""`ds41rt bench`: what a token costs, against the bytes it must read and what this machine's memory gives.

The model is made up (see `checkpoint.filled`) but has the released shapes; a number of experts a layer is resident and
the router is limited to them, so the figures are those of the compute, not of the miss path. Everything is a median
over tokens or repeated graphs, in one process, on the machine as it is found.
"""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np

from ds41rt import __version__
from ds41rt.attn.sequence import SequenceBuffers
from ds41rt.capture.words import size
from ds41rt.checkpoint.filled import FilledSource
from ds41rt.checkpoint.synth_presets import PRESETS, RELEASED, first_layers
from ds41rt.config import ModelConfig
from ds41rt.cu.backend import GpuBackend, open_backend
from ds41rt.cu.kernel import KernelLaunch, launch_nbytes
from ds41rt.engine import DecodeSequence, Engine, configured_backend
from ds41rt.errors import InputError
from ds41rt.kernels.probe import READ_SUM
from ds41rt.settings import Settings
from ds41rt.step.launches import LayerLaunches

_WARM_UP = 8
_STAGE_REPEATS = 20
_PROBE_CHUNKS, _PROBE_CHUNK_NBYTES = 1056, 1 << 20
# On the simulated device, whose time is NumPy's, a small probe will do and the released shapes will not.
_HOST_PROBE_CHUNKS = 16
_COUNTED = ("launch", "launch_graph", "copy_d2h", "copy_h2d", "synchronize")

# Stages of the table: name, and the launches of a layer that belong to it.
STAGES: dict[str, Callable[[LayerLaunches], tuple[KernelLaunch | None, ...]]] = {
    "engram": lambda layer: layer.engram,
    "attn_in": lambda layer: (layer.attn_in,),
    "qkv_a": lambda layer: layer.qkv[:1],
    "q_b": lambda layer: layer.qkv[1:],
    "compress": lambda layer: layer.compress,
    "index_q": lambda layer: (layer.index_q,),
    "index_score": lambda layer: (layer.index_score,),
    "attn_score": lambda layer: layer.attn_core[:1],
    "attn_value": lambda layer: layer.attn_core[1:2],
    "wo_a": lambda layer: layer.attn_core[2:3],
    "wo_b": lambda layer: layer.attn_core[3:],
    "ffn_in": lambda layer: (layer.ffn_in,),
    "shared_gate_up": lambda layer: layer.shared[:1],
    "shared_down": lambda layer: layer.shared[1:],
    "router": lambda layer: (layer.router,),
    "route_select": lambda layer: (layer.route_select,),
    "expert_gate_up": lambda layer: layer.experts[:1],
    "expert_down": lambda layer: layer.experts[1:],
    "combine": lambda layer: (layer.combine,),
}


class CountingBackend:
    """Passes everything on and counts the calls that cost a host round trip or a launch."""

    def __init__(self, backend: GpuBackend) -> None:
        self._backend = backend
        self.counts = dict.fromkeys(_COUNTED, 0)
        for name in _COUNTED:
            setattr(self, name, self._counting(name, getattr(backend, name)))

    def _counting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        counts = self.counts

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return call(*args, **kwargs)

        return counted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def read_bandwidth(backend: GpuBackend) -> float:
    """Bytes a second that a kernel reads from device memory; about a gibibyte, median of several launches."""
    n_chunks = _HOST_PROBE_CHUNKS if backend.name == "host" else _PROBE_CHUNKS
    nbytes = n_chunks * _PROBE_CHUNK_NBYTES
    stream = backend.create_stream("bandwidth")
    data, sums = backend.alloc("bandwidth data", nbytes), backend.alloc("bandwidth sums", 4 * n_chunks)
    host = backend.alloc_pinned("bandwidth image", _PROBE_CHUNK_NBYTES)
    host.array[:] = np.random.default_rng(0).integers(0, 256, host.nbytes, np.uint8)
    for i in range(n_chunks):
        backend.copy_h2d(data.ptr + i * _PROBE_CHUNK_NBYTES, host, _PROBE_CHUNK_NBYTES, stream)
    args = {"data": data.ptr, "sums": sums.ptr, "chunks": n_chunks, "chunk_nbytes": _PROBE_CHUNK_NBYTES}
    launch = backend.prepare(READ_SUM, args, "bandwidth")
    seconds = _timed_graph(backend, [launch] * 4) / 4
    backend.free_pinned(host)
    for buf in (data, sums):
        backend.free(buf)
    backend.destroy_stream(stream)
    return nbytes / seconds


def _timed_graph(backend: GpuBackend, launches: list[KernelLaunch]) -> float:
    """Seconds of one replay of `launches` in a row; the median of several batches of replays."""
    stream = backend.create_stream("bench")
    backend.begin_capture(stream)
    for launch in launches:
        backend.launch(launch, stream)
    graph = backend.end_capture(stream)
    graph_exec = backend.instantiate(graph)
    times = []
    for _ in range(7):
        backend.launch_graph(graph_exec, stream)
        backend.synchronize(stream)
        start = time.perf_counter()
        for _ in range(_STAGE_REPEATS):
            backend.launch_graph(graph_exec, stream)
        backend.synchronize(stream)
        times.append((time.perf_counter() - start) / _STAGE_REPEATS)
    backend.destroy_exec(graph_exec)
    backend.destroy_graph(graph)
    backend.destroy_stream(stream)
    return median(times)


def fill_sequence(engine: Engine, buffers: SequenceBuffers, seed: int = 0) -> None:
    """Random rows in rings and caches, as if a text had been read: zeros or leftovers would time something else."""
    backend, stream = engine.backend, engine.stream
    host = backend.alloc_pinned("sequence fill", 1 << 20)
    rng = np.random.default_rng(seed)
    host.array.view(ml_dtypes.bfloat16)[:] = (0.3 * rng.standard_normal(host.nbytes // 2)).astype(ml_dtypes.bfloat16)
    for buf in buffers.owned:
        for off in range(0, buf.nbytes, host.nbytes):
            backend.copy_h2d(buf.ptr + off, host, min(host.nbytes, buf.nbytes - off), stream)
    backend.synchronize(stream)
    backend.free_pinned(host)


def time_tokens(engine: Engine, seq: DecodeSequence, n: int, tokens: np.random.Generator) -> list[float]:
    """Times in us of `n` steps with random tokens."""
    times = []
    for _ in range(n):
        token = int(tokens.integers(3, 256))
        start = time.perf_counter()
        engine.decode_step(seq, token)
        times.append(1e6 * (time.perf_counter() - start))
    return times


def shapes_of(preset: str, layers: int | None) -> ModelConfig:
    """The geometry of a preset or of the released model, cut to its first `layers` if given."""
    cfg = RELEASED if preset == "released" else PRESETS[preset]
    return cfg if layers is None else first_layers(cfg, layers)


def refuse_released_on_host(backend: GpuBackend, why: str, preset: str) -> None:
    """`why` is the reason for which the backend was chosen."""
    if backend.name == "host" and preset == "released":
        raise InputError(
            f"the released shapes need a GPU, and the host backend was chosen ({why}); "
            "try --preset tiny, which times NumPy, or see ds41rt doctor"
        )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All measurements as one JSON-ready object."""
    cfg = shapes_of(args.preset, args.layers)
    if args.tokens < 1:
        raise InputError(f"--tokens must be at least 1, is {args.tokens}")
    per_layer = min(128, cfg.n_experts) if args.experts_per_layer is None else args.experts_per_layer
    if not cfg.top_k <= per_layer <= cfg.n_experts:
        raise InputError(
            f"--experts-per-layer must be in {cfg.top_k}..{cfg.n_experts} for preset {args.preset}, is {per_layer}"
        )
    context = min(4096, cfg.max_positions) if args.context is None else args.context
    needed = 2 * (args.tokens + _WARM_UP) + 2
    if not needed <= context <= cfg.max_positions:
        raise InputError(
            f"--context must be in {needed}..{cfg.max_positions} for --tokens {args.tokens} and preset {args.preset}, "
            f"is {context}"
        )
    with ExitStack() as stack:
        raw, why = open_backend(configured_backend(args.backend), schedule=args.schedule)
        stack.callback(raw.close)
        refuse_released_on_host(raw, why, args.preset)
        result: dict[str, Any] = {"version": __version__, "backend": raw.name, "why": why, "device": raw.device_name}
        bandwidth = read_bandwidth(raw)
        counting: Any = CountingBackend(raw)
        source = FilledSource(cfg, experts_per_layer=per_layer)
        settings = Settings(step_graph=True, max_context=context)
        loading = time.perf_counter()
        engine = stack.enter_context(Engine(source, settings, backend=counting, expert_slots=per_layer * cfg.n_layers))
        for layer in range(cfg.n_layers):
            engine.preload(layer, range(per_layer))
        result["loading_s"] = time.perf_counter() - loading
        seq = stack.enter_context(engine.new_sequence())
        fill_sequence(engine, seq.step.buffers)
        seq.position = context - needed
        tokens = np.random.default_rng(1)
        engine.machine.step_graph = False
        time_tokens(engine, seq, _WARM_UP, tokens)
        eager = time_tokens(engine, seq, args.tokens, tokens)
        engine.machine.step_graph = True
        time_tokens(engine, seq, _WARM_UP, tokens)
        before, launched = dict(counting.counts), engine.stats()
        graph = time_tokens(engine, seq, args.tokens, tokens)
        stats = engine.stats()
        calls = {name: (counting.counts[name] - before[name]) / args.tokens for name in _COUNTED}
        stages = {}
        for name, of in STAGES.items():
            launches = [launch for layer in engine.layers for launch in of(layer) if launch is not None]
            if launches:
                nbytes = sum(launch_nbytes(launch) for launch in launches)
                seconds = _timed_graph(raw, launches)
                stages[name] = {"nodes": len(launches), "us": 1e6 * seconds, "nbytes": nbytes}
        head = engine.head_launch
        stages["head"] = {"nodes": 1, "us": 1e6 * _timed_graph(raw, [head]), "nbytes": launch_nbytes(head)}
    floor_us = 1e6 * sum(s["nbytes"] for s in stages.values()) / bandwidth
    return {
        **result,
        "conditions": {
            "preset": args.preset, "layers": cfg.n_layers, "context": context, "position": context - 1,
            "experts_per_layer": per_layer, "tokens": args.tokens, "speculation": "none",
            "misses": stats.misses - launched.misses, "falls": sum(stats.falls.values()) - sum(launched.falls.values()),
        },
        "read_tb_per_s": bandwidth / 1e12,
        "eager_us": median(eager), "step_graph_us": median(graph), "step_graph_us_min": min(graph),
        "floor_us": floor_us, "times_floor": median(graph) / floor_us, "calls_per_token": calls,
        "nodes_per_layer": engine.bodies.nodes_per_layer(), "stages": stages,
    }  # fmt: skip


def bench(args: argparse.Namespace) -> int:
    result = run(args)
    if args.json:
        print(json.dumps(result))
        return 0
    c, calls = result["conditions"], result["calls_per_token"]
    print(f"ds41rt {result['version']}, backend {result['backend']}, {result['device']}")
    print(
        f"{c['preset']} shapes, {c['layers']} layers, position {c['position']}, {c['experts_per_layer']} resident "
        f"experts a layer, {c['tokens']} tokens, no speculation, {c['misses']} misses, {c['falls']} falls"
    )
    print(f"read bandwidth {result['read_tb_per_s']:.2f} TB/s; byte floor {result['floor_us']:.0f} us a token")
    if result["backend"] == "host":
        print("the host backend times NumPy on this machine: no measure of a GPU")
    floor = result["floor_us"]
    print(f"eager       {result['eager_us']:>9.0f} us a token = {result['eager_us'] / floor:.2f} x the floor")
    print(
        f"step graph  {result['step_graph_us']:>9.0f} us a token = {result['times_floor']:.2f} x the floor, "
        f"{1e6 / result['step_graph_us']:.1f} tokens/s"
    )
    print(
        f"a step-graph token: {calls['launch_graph']:.0f} graph launches, {calls['launch']:.0f} kernel launches, "
        f"{calls['copy_d2h']:.0f} read-backs; {result['nodes_per_layer']:.1f} nodes a layer"
    )
    print(f"{'stage':<16}{'nodes':>6}{'us':>10}{'us each':>9}{'size each':>11}{'TB/s':>7}")
    for name, s in result["stages"].items():
        n = s["nodes"]
        rate = s["nbytes"] / (s["us"] * 1e6)
        print(f"{name:<16}{n:>6}{s['us']:>10.1f}{s['us'] / n:>9.2f}{size(s['nbytes'] // n):>11}{rate:>7.2f}")
    return 0
