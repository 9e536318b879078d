"""Moves a buffer of a sequence to another place, as whoever grows or compacts one would."""

from collections.abc import Callable

import numpy as np
from engine_harness import Run

from ds41rt.cu.backend import DeviceBuffer


def moved(run: Run, ptr: int, nbytes: int, keep: list[DeviceBuffer]) -> int:
    """A copy of the bytes in a new place; garbage in the old one."""
    backend, stream = run.backend, run.engine.stream
    backend.synchronize(stream)
    new = backend.alloc("moved", nbytes)
    keep.append(new)
    garbage = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    backend.memory.bytes(new.ptr, nbytes)[:] = backend.memory.bytes(ptr, nbytes)
    backend.memory.bytes(ptr, nbytes)[:] = garbage
    return new.ptr


def movers(run: Run, keep: list[DeviceBuffer]) -> list[Callable[[], None]]:
    """One for each ring and each cache of the run's sequence."""
    cfg, buf = run.engine.config, run.seq.step.buffers
    row_nbytes, rows = 2 * cfg.head_dim, run.ref.max_context

    def ring(layer: int) -> Callable[[], None]:
        def move() -> None:
            rings = list(buf.ring)
            rings[layer] = moved(run, rings[layer], cfg.window * row_nbytes, keep)
            buf.ring = tuple(rings)

        return move

    def cache(cells: dict[int, int], source: int, nbytes: int) -> Callable[[], None]:
        def move() -> None:
            cells[source] = moved(run, cells[source], nbytes, keep)
            buf.moves += 1

        return move

    out = [ring(layer) for layer in range(cfg.n_layers)]
    for source in cfg.kv_source_layers:
        n = rows // cfg.compress_ratios[source]
        out.append(cache(buf.comp, source, n * row_nbytes))
        out.append(cache(buf.ikey, source, n * 2 * cfg.index_head_dim))
        if source in buf.pool:
            out.append(cache(buf.pool, source, 16 * cfg.head_dim))
    return out
