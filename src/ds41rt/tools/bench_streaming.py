"""`ds41rt bench-streaming`: what a miss costs in each tier, against what the link and the disk give in the same run.

Three figures, with their conditions: an expert that the step reads from pinned host memory, against its bytes over the
measured copy rate of the link; concurrent reads from files, against plain large reads of the same file; and the host's
time for a token's worth of cache touches. The model is made up and has the released shapes.
"""

import argparse
import json
import math
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41rt import __version__
from ds41rt.capture.words import size
from ds41rt.checkpoint.direct import DirectReader
from ds41rt.checkpoint.filled import FilledSource
from ds41rt.checkpoint.safetensors import Shard
from ds41rt.config import ModelConfig
from ds41rt.cu.backend import GpuBackend, open_backend
from ds41rt.engine import Engine, Stats, configured_backend
from ds41rt.errors import InputError
from ds41rt.kernels.probe import READ_SUM
from ds41rt.moe.cache import ExpertCache
from ds41rt.settings import Settings
from ds41rt.tools.bench import fill_sequence, refuse_released_on_host, shapes_of, time_tokens

_WARM_UP = 6
_LINK_NBYTES = 256 << 20
_CHUNK_NBYTES = 1 << 20
_READ_NBYTES = 16 << 20
_TURN_LAYERS = 5
_DEFAULT_THREADS, _DEFAULT_DISK_GB = 8, 4.0
_GAP_NBYTES = 1543  # between experts of the file, which begin at offsets that no sector knows
# The cache of the touches: the released model's experts, and as many slots as 125 GB hold.
_TOUCH_LAYERS, _TOUCH_EXPERTS, _TOUCH_SLOTS, _TOUCH_TOP_K = 40, 384, 6600, 6


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All measurements as one JSON-ready object."""
    layers = min(8, shapes_of(args.preset, None).n_layers) if args.layers is None else args.layers
    cfg = shapes_of(args.preset, layers)
    per_layer = min(16, cfg.n_experts) if args.experts_per_layer is None else args.experts_per_layer
    threads, disk_gb = _DEFAULT_THREADS if args.threads is None else args.threads, args.disk_gb
    if args.disk is None and (args.threads is not None or disk_gb is not None):
        raise InputError("--threads and --disk-gb say how a file is read that --disk DIR makes: give that too")
    for name, value in (("--tokens", args.tokens), ("--threads", threads)):
        if value < 1:
            raise InputError(f"{name} must be at least 1, is {value}")
    Settings.from_env({}, reader_threads=threads)  # raises for more than an engine takes
    if disk_gb is None:
        disk_gb = _DEFAULT_DISK_GB
    if not 0 < disk_gb < math.inf:
        raise InputError(f"--disk-gb must be above 0, is {disk_gb}")
    most = _context(cfg) - _WARM_UP - 1
    if args.tokens > most:
        raise InputError(f"--tokens must be at most {most} for preset {args.preset}, is {args.tokens}")
    if not cfg.top_k <= per_layer <= cfg.n_experts:
        raise InputError(f"--experts-per-layer must be in {cfg.top_k}..{cfg.n_experts}, is {per_layer}")
    with ExitStack() as stack:
        backend, why = open_backend(configured_backend(args.backend), schedule=args.schedule)
        stack.callback(backend.close)
        refuse_released_on_host(backend, why, args.preset)
        result: dict[str, Any] = {
            "version": __version__,
            "backend": backend.name,
            "device": backend.device_name,
            "conditions": {
                "preset": args.preset,
                "layers": layers,
                "experts_per_layer": per_layer,
                "tokens": args.tokens,
                "threads": threads,
            },
            "touches_us": touches_us(args.tokens),
            "link": link_rates(backend),
        }
        source = FilledSource(cfg, experts_per_layer=per_layer)  # one for all: making the weights takes longest
        result["host_tier"] = host_tier(backend, source, per_layer, args.tokens, result["link"]["copy_gb_per_s"])
        if args.disk is not None:
            result["file_tier"] = file_tier(backend, source, args.disk, disk_gb, threads)
    return result


def _context(cfg: ModelConfig) -> int:
    """Positions of the sequence, of which the last ones are timed."""
    return min(4096, cfg.max_positions)


def touches_us(tokens: int) -> float:
    """Host time in us of a token's cache hits: 40 layers of six experts, random among those that 6,600 slots hold."""
    cache = ExpertCache(_TOUCH_LAYERS, _TOUCH_EXPERTS, _TOUCH_SLOTS, policy=Settings().evict_policy)
    rng = np.random.default_rng(0)
    resident: list[list[int]] = []
    for layer in range(_TOUCH_LAYERS):
        resident.append(rng.permutation(_TOUCH_EXPERTS)[: _TOUCH_SLOTS // _TOUCH_LAYERS].tolist())
        for at in range(0, len(resident[layer]), _TOUCH_TOP_K):
            cache.begin_epoch()
            plan = cache.plan_fetch(layer, resident[layer][at : at + _TOUCH_TOP_K])
            for ticket in plan.tickets:
                cache.evict(ticket)
                cache.commit(ticket)
    times = []
    for _ in range(max(tokens, 200)):
        picks = [rng.choice(experts, _TOUCH_TOP_K, replace=False).tolist() for experts in resident]
        start = time.perf_counter()
        for layer, experts in enumerate(picks):
            cache.begin_epoch()
            cache.plan_fetch(layer, experts)
        times.append(1e6 * (time.perf_counter() - start))
    return median(times)


def link_rates(backend: GpuBackend) -> dict[str, float]:
    """GB/s from pinned host memory: by the copy engine, and by a kernel that reads it in place."""
    with ExitStack() as stack:
        stream = backend.create_stream("link")
        stack.callback(backend.destroy_stream, stream)
        nbytes = _LINK_NBYTES if backend.name != "host" else _CHUNK_NBYTES
        host = backend.alloc_pinned("link host", nbytes)
        stack.callback(backend.free_pinned, host)
        device = backend.alloc("link device", nbytes)
        stack.callback(backend.free, device)
        sums = backend.alloc("link sums", 4 * (nbytes // _CHUNK_NBYTES))
        stack.callback(backend.free, sums)
        host.array[:] = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
        read = backend.prepare(
            READ_SUM,
            {
                "data": host.device_ptr,
                "sums": sums.ptr,
                "chunks": nbytes // _CHUNK_NBYTES,
                "chunk_nbytes": _CHUNK_NBYTES,
            },
            "link read",
        )

        def seconds(enqueue: Callable[[], None]) -> float:
            times = []
            for _ in range(9):
                start = time.perf_counter()
                enqueue()
                backend.synchronize(stream)
                times.append(time.perf_counter() - start)
            return median(times)

        copy = seconds(lambda: backend.copy_h2d(device.ptr, host, nbytes, stream))
        in_place = seconds(lambda: backend.launch(read, stream))
    return {"copy_gb_per_s": nbytes / copy / 1e9, "in_place_gb_per_s": nbytes / in_place / 1e9}


def host_tier(
    backend: GpuBackend, source: FilledSource, per_layer: int, tokens: int, gb_per_s: float
) -> dict[str, Any]:
    """Token times with every expert on the device, and with all in host memory; what one hit there costs."""
    cfg = source.config
    everything = per_layer * cfg.n_layers
    resident_us, _ = _token_us(backend, source, per_layer, tokens, (everything, 0))
    host_us, counted = _token_us(backend, source, per_layer, tokens, (0, everything))
    hits = cfg.n_layers * cfg.top_k
    nbytes = source.expert_layout.nbytes
    link_us = nbytes / gb_per_s / 1e3
    cost_us = (host_us - resident_us) / hits
    measurable = cost_us > 0  # on the simulated device noise is larger than what a hit costs
    return {
        "resident_us": resident_us,
        "host_us": host_us,
        "hits_per_token": hits,
        "falls": sum(counted.falls.values()),
        "misses": counted.misses,
        "expert_nbytes": nbytes,
        "us_per_hit": cost_us if measurable else None,
        "link_us_per_expert": link_us,
        "times_link": cost_us / link_us if measurable else None,
    }


def _token_us(
    backend: GpuBackend, source: FilledSource, per_layer: int, tokens: int, slots: tuple[int, int]
) -> tuple[float, Stats]:
    """Median time of a step-graph token in us, nothing missing; and the counters of what was timed and before."""
    cfg = source.config
    context = _context(cfg)
    settings = Settings(step_graph=True, max_context=context)
    with Engine(source, settings, backend=backend, expert_slots=slots[0], host_slots=slots[1]) as engine:
        for layer in range(cfg.n_layers):
            engine.preload(layer, range(per_layer))
        seq = engine.new_sequence()
        fill_sequence(engine, seq.step.buffers)
        seq.position = context - tokens - _WARM_UP - 1
        times = time_tokens(engine, seq, _WARM_UP + tokens, np.random.default_rng(1))
        return median(times[_WARM_UP:]), engine.stats()


# ---- files


class _InOneFile:
    """`source`, but its first experts are in a file, each [w1|w2|w3|s1|s2|s3] at an offset that no sector knows."""

    def __init__(self, source: FilledSource, reader: DirectReader, shard: Shard, offsets: Sequence[int]) -> None:
        self._source = source
        self._reader = reader
        self._shard = shard
        self._offsets = offsets

    def read_expert(self, layer: int, expert: int, out: NDArray[np.uint8], offset: int = 0) -> None:
        """As from a checkpoint: what lies on both sides of the border takes two reads."""
        off = self._offsets[layer * self._source.config.n_experts + expert] + offset
        split = self._source.expert_layout.weights_among(offset, out.size)
        if split:
            self._reader.read(self._shard, off, out[:split], f"weights of expert {expert}")
        if split < out.size:
            self._reader.read(self._shard, off + split, out[split:], f"scales of expert {expert}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def file_tier(backend: GpuBackend, source: FilledSource, folder: Path, gb: float, threads: int) -> dict[str, Any]:
    """GB/s of misses, one layer's six at a time through staging to the device, and of plain reads of the same file.

    Both read the whole file once, in turns of some layers' experts: the rate of a disk changes from second to second.
    """
    cfg, nbytes = source.config, source.expert_layout.nbytes
    n = min(cfg.n_experts, int(gb * 1e9 / nbytes))
    if n < cfg.top_k:
        raise InputError(f"--disk-gb {gb} is less than {cfg.top_k} experts of {nbytes} bytes")
    turn = min(_TURN_LAYERS, n // cfg.top_k) * cfg.top_k
    n = n // turn * turn
    path = folder / f"ds41rt-bench-{os.getpid()}.bin"
    with ExitStack() as stack:
        offsets = _write_experts(path, n, nbytes, stack)
        plain = _PlainReads(path, threads, stack)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        shard = Shard(path, fd, path.stat().st_size, {})
        stack.callback(shard.close)
        reader = DirectReader([shard], "auto")
        stack.callback(reader.close)
        in_file: Any = _InOneFile(source, reader, shard, offsets)
        settings = Settings(max_context=min(256, cfg.max_positions), reader_threads=threads)
        times, plain_seconds, plain_nbytes = [], 0.0, 0
        with Engine(in_file, settings, backend=backend, expert_slots=n, host_slots=0) as engine:
            for which, first in product((0, 1), range(0, n, turn)):
                if (first // turn + which) % 2:
                    for at in range(first, first + turn, cfg.top_k):
                        start = time.perf_counter()
                        engine.preload(0, range(at, at + cfg.top_k))
                        times.append(time.perf_counter() - start)
                else:
                    start = time.perf_counter()
                    plain_nbytes += plain.read(offsets[first], offsets[first] + turn * (nbytes + _GAP_NBYTES))
                    plain_seconds += time.perf_counter() - start
            read = engine.stats().expert_nbytes_read
        direct = reader.is_direct(shard)
    rate, plain_rate = read / sum(times) / 1e9, plain_nbytes / plain_seconds / 1e9
    return {
        "experts": n,
        "file_nbytes": shard.size,
        "direct": direct,
        "expert_nbytes": nbytes,
        "at_a_time": cfg.top_k,
        "ms_per_layer": 1e3 * median(times),
        "gb_per_s": rate,
        "plain_gb_per_s": plain_rate,
        "share": rate / plain_rate,
    }


def _write_experts(path: Path, n: int, nbytes: int, stack: ExitStack) -> list[int]:
    """Random bytes for `n` experts, removed when `stack` closes; their offsets."""
    block = np.random.default_rng(0).integers(0, 256, nbytes + _GAP_NBYTES, np.uint8)
    offsets = []
    try:
        file = path.open("xb")
    except OSError as e:
        raise InputError(f"--disk {path.parent}: no file can be made there: {e.strerror}") from e
    stack.callback(path.unlink)
    with file:
        for _ in range(n):
            offsets.append(file.tell() + _GAP_NBYTES)
            file.write(block.data)
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return offsets


class _PlainReads:
    """Aligned reads of 16 MiB, one after another per thread, past the page cache where that is possible."""

    def __init__(self, path: Path, threads: int, stack: ExitStack) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | getattr(os, "O_DIRECT", 0))
        except OSError:
            self._fd = os.open(path, flags)
        stack.callback(os.close, self._fd)
        self._memory = [mmap.mmap(-1, _READ_NBYTES) for _ in range(threads)]
        self._pool = stack.enter_context(ThreadPoolExecutor(threads))

    def read(self, begin: int, end: int) -> int:
        """Everything from `begin` to `end`, or to the end of the file; the first and the last block whole."""
        blocks = range(begin // _READ_NBYTES, -(-end // _READ_NBYTES))

        def share(which: int) -> int:
            memory = self._memory[which]
            mine = blocks[which :: len(self._memory)]
            return sum(os.preadv(self._fd, [memory], block * _READ_NBYTES) for block in mine)

        return sum(self._pool.map(share, range(len(self._memory))))


def bench_streaming(args: argparse.Namespace) -> int:
    result = run(args)
    if args.json:
        print(json.dumps(result))
        return 0
    c, link, host = result["conditions"], result["link"], result["host_tier"]
    print(f"ds41rt {result['version']}, backend {result['backend']}, {result['device']}")
    print(
        f"{c['preset']} shapes, {c['layers']} layers, {c['experts_per_layer']} experts a layer in use, "
        f"{c['tokens']} tokens, medians"
    )
    if result["backend"] == "host":
        print("the host backend times NumPy on this machine: no measure of a GPU")
    print(f"cache: {result['touches_us']:.0f} us of host time for 240 touches a token")
    print(
        f"link: {link['copy_gb_per_s']:.1f} GB/s copied from pinned memory, "
        f"{link['in_place_gb_per_s']:.1f} GB/s read in place by a kernel"
    )
    cost = "the cost of a hit is not measurable here, less than noise;"
    if host["us_per_hit"] is not None:
        cost = f"{host['us_per_hit']:.0f} us a hit = {host['times_link']:.2f} x"
    print(
        f"host tier: {cost} its {size(host['expert_nbytes'])} over the link "
        f"({host['link_us_per_expert']:.0f} us); token {host['host_us']:.0f} us with "
        f"{host['hits_per_token']} hits there, {host['resident_us']:.0f} us all on the device; "
        f"{host['falls']} falls, {host['misses']} misses"
    )
    if "file_tier" in result:
        f = result["file_tier"]
        how = "direct" if f["direct"] else "through the page cache"
        print(
            f"file tier: {f['gb_per_s']:.2f} GB/s = {100 * f['share']:.0f} % of {f['plain_gb_per_s']:.2f} GB/s of "
            f"plain reads, {how}, {f['experts']} experts in a file of {size(f['file_nbytes'])}, {f['at_a_time']} at a "
            f"time by {c['threads']} threads ({f['ms_per_layer']:.1f} ms a layer)"
        )
    return 0
