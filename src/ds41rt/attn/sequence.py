"""What belongs to one sequence, and the sequence block through which kernels reach it.

A captured graph bakes addresses. If it baked a sequence's own buffers, two sequences that alternate would recapture
every token. So kernels bake only addresses *inside the sequence block*, one small device buffer of the engine: cells
that hold the current sequence's pointers, the position, the rotary cells and the selections. Switching sequences
uploads that block and recaptures nothing.

This file knows buffers and addresses; it must not know segments, routing or how a row is computed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds41rt.config import ModelConfig
from ds41rt.cu.backend import DeviceBuffer, GpuBackend, HostBuffer, Stream
from ds41rt.kernels.rope import rope_cell, rope_freqs, yarn_freqs

_ALIGN = 256


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Byte offsets of the parts of the sequence block. Three uploads: step (every token), cells, one selection each."""

    rope_dim: int
    ring_off: tuple[int, ...]  # per layer
    comp_off: dict[int, int]  # per KV source
    ikey_off: dict[int, int]
    pool_off: dict[int, int]  # ratio-2 KV sources
    cells_off: int
    cells_nbytes: int
    sel_off: dict[int, int]  # per index source: int32 count, then ascending row ids
    sel_nbytes: int
    nbytes: int

    # The step part: int32 [position, token], then three rotary cells of rope_dim float32 each.
    step_off = 0
    rope_plain_off = 16

    @property
    def rope_yarn_off(self) -> int:
        return self.rope_plain_off + 4 * self.rope_dim

    @property
    def rope_pair_off(self) -> int:
        """The rotary cell of position p - 1, where a ratio-2 row completed at p is rotated."""
        return self.rope_yarn_off + 4 * self.rope_dim

    @property
    def step_nbytes(self) -> int:
        return self.rope_pair_off + 4 * self.rope_dim

    @classmethod
    def of(cls, cfg: ModelConfig) -> "BlockLayout":
        cells_off = _aligned(16 + 12 * cfg.rope_dim)
        cell = cells_off
        offs: list[dict[int, int]] = []
        pools = [s for s in cfg.kv_source_layers if cfg.compress_ratios[s] == 2]
        for keys in (range(cfg.n_layers), cfg.kv_source_layers, cfg.kv_source_layers, pools):
            offs.append({k: cell + 8 * i for i, k in enumerate(keys)})
            cell += 8 * len(keys)
        ring, comp, ikey, pool = offs
        sel_nbytes = 4 * (1 + cfg.index_topk)
        sel = _aligned(cell)
        sel_off = {s: sel + i * _aligned(sel_nbytes) for i, s in enumerate(cfg.index_source_layers)}
        nbytes = sel + len(cfg.index_source_layers) * _aligned(sel_nbytes)
        return cls(
            cfg.rope_dim,
            tuple(ring.values()),
            comp,
            ikey,
            pool,
            cells_off,
            cell - cells_off,
            sel_off,
            sel_nbytes,
            nbytes,
        )


def sequence_nbytes(cfg: ModelConfig, max_context: int) -> int:
    """Device memory of one sequence's `SequenceBuffers`."""
    row_nbytes = 2 * cfg.head_dim
    total = cfg.n_layers * cfg.window * row_nbytes
    for source in cfg.kv_source_layers:
        rows = max(1, max_context // cfg.compress_ratios[source])
        pool_nbytes = 4 * 4 * cfg.head_dim if cfg.compress_ratios[source] == 2 else 0
        total += rows * (row_nbytes + 2 * cfg.index_head_dim) + pool_nbytes
    return total


class SequenceBuffers:
    """Device memory of one sequence: window rings, compressed rows, index keys, ratio-2 pool state.

    Nothing here needs clearing for a new sequence: a ring slot above the position, a row at or above the row count and
    a pool slot of the other parity are never read before they were written.
    """

    def __init__(self, backend: GpuBackend, cfg: ModelConfig, max_context: int, name: str) -> None:
        self._backend = backend
        self._name = name
        self._owned: list[DeviceBuffer] = []
        try:
            row_nbytes = 2 * cfg.head_dim
            ring_nbytes = cfg.window * row_nbytes
            ring = self._alloc(f"{name}.ring", cfg.n_layers * ring_nbytes)
            self.ring = tuple(ring.ptr + layer * ring_nbytes for layer in range(cfg.n_layers))
            self.comp: dict[int, int] = {}
            self.ikey: dict[int, int] = {}
            self.pool: dict[int, int] = {}
            self.moves = 0  # raised by whoever moves one of these buffers, rings excepted
            rows_of = {s: max(1, max_context // cfg.compress_ratios[s]) for s in cfg.kv_source_layers}
            for s, rows in rows_of.items():
                self.comp[s] = self._alloc(f"{name}.comp.L{s:02d}", rows * row_nbytes).ptr
                self.ikey[s] = self._alloc(f"{name}.ikey.L{s:02d}", rows * 2 * cfg.index_head_dim).ptr
                if cfg.compress_ratios[s] == 2:
                    self.pool[s] = self._alloc(f"{name}.pool.L{s:02d}", 4 * 4 * cfg.head_dim).ptr
            # in the order of `pointers`
            self._sizes = [
                *(ring_nbytes for _ in self.ring),
                *(rows * row_nbytes for rows in rows_of.values()),
                *(rows * 2 * cfg.index_head_dim for rows in rows_of.values()),
                *(4 * 4 * cfg.head_dim for _ in self.pool),
            ]
        except BaseException:
            self.close()
            raise

    def _alloc(self, name: str, nbytes: int) -> DeviceBuffer:
        buf = self._backend.alloc(name, nbytes)
        self._owned.append(buf)
        return buf

    @property
    def owned(self) -> tuple[DeviceBuffer, ...]:
        """The sequence's allocations."""
        return tuple(self._owned)

    @property
    def pointers(self) -> list[int]:
        """Rings by layer, then compressed rows, index keys and pools by source: the order of the block's cells."""
        return [*self.ring, *self.comp.values(), *self.ikey.values(), *self.pool.values()]

    def parts(self) -> Iterator[tuple[str, int, int]]:
        """(name, address, bytes) of every ring and cache where it is now, in the order of `pointers`."""
        names = [f"ring layer {layer}" for layer in range(len(self.ring))]
        for what, cells in (("compressed rows", self.comp), ("index keys", self.ikey), ("pool", self.pool)):
            names += [f"{what} layer {source}" for source in cells]
        for name, ptr, nbytes in zip(names, self.pointers, self._sizes, strict=True):
            yield f"{self._name} {name}", ptr, nbytes

    def copy_from(self, other: "SequenceBuffers", stream: Stream) -> None:
        """Enqueue copies of everything that `other`, of the same model and context, holds."""
        for dst, src, nbytes in zip(self.pointers, other.pointers, self._sizes, strict=True):
            self._backend.copy_d2d(dst, src, nbytes, stream, "sequence.fork")

    def close(self) -> None:
        while self._owned:
            self._backend.free(self._owned[-1])
            self._owned.pop()  # only now: what an interrupt left is freed by the next call


def why_not_truncate(cfg: ModelConfig, started: int, position: int) -> str | None:
    """Why a sequence cannot be stepped again from `position`, or None if all that this needs is still there.

    `started` is one past the position whose step was begun last, completed or not. A step at p needs the ring rows of
    p - window + 1 .. p - 1, and row q is gone once a step at q + window was begun: so only `started - 1` or later will
    do, unless no ring has wrapped yet. (Once one has, `started` can only grow, because no earlier position is allowed.)
    At an odd p it pools p with p - 1, whose projections a step at p + 1 has replaced; at an even p the pool is written
    before it is read. Compressed rows and index keys are never replaced by later positions, and those of p and later
    are written again before they are read.
    """
    if position == 0 or position >= started - 1:
        return None
    if started > cfg.window:
        return f"a window ring holds {cfg.window} rows, and the step at {started - 1} has replaced one that is needed"
    if position % 2 and any(cfg.compress_ratios[s] == 2 for s in cfg.kv_source_layers):
        return f"position {position} is pooled with {position - 1}, whose projections a later step has replaced"
    return None


class SequenceBlock:
    """The device block and its pinned image.

    The image may be rewritten every token because the engine drains the compute stream at the end of every step,
    failed ones included. Step and selections are uploaded every token, cells when the caller says so.
    """

    def __init__(self, backend: GpuBackend, cfg: ModelConfig) -> None:
        self.layout = BlockLayout.of(cfg)
        self._backend = backend
        self._freqs_plain = rope_freqs(cfg.rope_dim, cfg.rope_theta)
        self._freqs_yarn = yarn_freqs(
            cfg.rope_dim,
            cfg.compress_rope_theta,
            factor=cfg.yarn_factor,
            original_len=cfg.yarn_original_len,
            beta_fast=cfg.yarn_beta_fast,
            beta_slow=cfg.yarn_beta_slow,
        )
        self.device = backend.alloc("sequence block", self.layout.nbytes)
        try:
            self._host: HostBuffer = backend.alloc_pinned("sequence block image", self.layout.nbytes)
        except BaseException:
            backend.free(self.device)
            raise
        image = self._host.array
        lay = self.layout
        self._step_image = image[0:8].view(np.int32)
        ropes = image[lay.rope_plain_off : lay.step_nbytes].view(np.float32).reshape(3, cfg.rope_dim)
        self._rope_plain, self._rope_yarn, self._rope_pair = ropes
        self._cells = image[lay.cells_off : lay.cells_off + lay.cells_nbytes].view(np.uint64)
        self._sel_image = {s: image[off : off + lay.sel_nbytes].view(np.int32) for s, off in lay.sel_off.items()}

    @property
    def ptr(self) -> int:
        return self.device.ptr

    def upload_step(self, position: int, token: int, stream: Stream) -> None:
        """Position, token and rotary cells: one copy a token, before anything else of the step."""
        self._step_image[0] = position
        self._step_image[1] = token
        self._rope_plain[:] = rope_cell(position, self._freqs_plain)
        self._rope_yarn[:] = rope_cell(position, self._freqs_yarn)
        self._rope_pair[:] = rope_cell(max(position - 1, 0), self._freqs_yarn)
        self._backend.copy_h2d(self.device.ptr, self._host, self.layout.step_nbytes, stream, 0, "sequence.step")

    def upload_cells(self, buffers: SequenceBuffers, stream: Stream) -> None:
        """The sequence's pointers. The caller knows whether the device has them already."""
        self._cells[:] = buffers.pointers
        off = self.layout.cells_off
        self._backend.copy_h2d(
            self.device.ptr + off, self._host, self.layout.cells_nbytes, stream, off, "sequence.cells"
        )

    def upload_selection(self, source: int, rows: NDArray[np.int32], stream: Stream) -> None:
        """The rows (ascending) that index source `source` selected for this token."""
        image = self._sel_image[source]
        image[0] = rows.size
        image[1 : 1 + rows.size] = rows
        off = self.layout.sel_off[source]
        self._backend.copy_h2d(
            self.device.ptr + off, self._host, 4 * (1 + rows.size), stream, off, "sequence.selection"
        )

    def rows_cell(self, source: int | None) -> int | None:
        """Address of the cell through which kernels reach KV source `source`'s compressed rows."""
        return None if source is None else self.device.ptr + self.layout.comp_off[source]

    def close(self) -> None:
        self._backend.free_pinned(self._host)
        self._backend.free(self.device)
