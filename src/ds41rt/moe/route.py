"""Routing of one layer for one token: the device's selection with one read-back, the host chain, and the check of both.

Also the half of a replay that reads the headers: which layer, if any, ran with an expert that was not there. Must not
know segments or `skip_until`; it is told which layers to look at.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds41rt.cu.backend import GpuBackend, Stream
from ds41rt.cu.kernel import KernelLaunch
from ds41rt.errors import Ds41Error, NotFiniteError
from ds41rt.kernels.router import plan, select_experts
from ds41rt.log import Logger
from ds41rt.moe.arena import ExpertArena
from ds41rt.moe.cache import ExpertCache
from ds41rt.moe.fetch import ExpertFetcher
from ds41rt.moe.header import (
    ABSENT,
    MISS,
    NOT_FINITE,
    SLOT_TABLE_LAYERS,
    Fall,
    HeaderRow,
    clean_codes,
    header_words,
    parse,
    slots_agree,
)
from ds41rt.moe.mover import Mover
from ds41rt.moe.pool import PinnedPool
from ds41rt.moe.slots import SlotTable

log = Logger("ds41rt.moe")
_DIAG_LOG_EVERY = 4000


class RouteMismatchError(Ds41Error):
    """The device's routing differs from the host chain on the same logits (diagnostic mode)."""


@dataclass(frozen=True, slots=True)
class RouteConfig:
    """The constants of the selection: protocol and formula are those of `kernels.router.select_experts`."""

    n_experts: int
    top_k: int
    temperature: float
    route_scale: float
    normalise: bool


@dataclass(frozen=True, slots=True)
class PlanBuffers:
    """Device addresses of the router logits f32[n_experts] and of the plan block: pointers u64[3, k], weights f32[k],
    rows i32[k], contiguous in this order so that the host can replace it with one copy. `guess_header` is the row that
    a guess of the next layer's experts writes, 0 if none is made."""

    logits: int
    plan: int
    guess_header: int = 0


class MoeRouter:
    """Routes layers eagerly (`route_device`, `route_host`) and reads a replay's headers (`read_headers`)."""

    def __init__(
        self,
        backend: GpuBackend,
        cfg: RouteConfig,
        buffers: PlanBuffers,
        arena: ExpertArena,
        cache: ExpertCache,
        table: SlotTable,
        pool: PinnedPool,
        fetcher: ExpertFetcher,
        mover: Mover | None,
        biases: Sequence[NDArray[np.float32]],
        *,
        diag: bool,
    ) -> None:
        self._backend = backend
        self._cfg = cfg
        self._buffers = buffers
        self._arena = arena
        self._cache = cache
        self._table = table
        self._pool = pool
        self._fetcher = fetcher
        self._mover = mover
        self._biases = biases
        self._diag = diag
        self.diag_checked = 0
        k = cfg.top_k
        words = header_words(k)
        # host images: logits | all header rows | plan block as uploaded, and as read back by the check | a guess's row
        sizes = (4 * cfg.n_experts, 4 * SLOT_TABLE_LAYERS * words, 32 * k, 32 * k, 4 * words)
        offsets = np.cumsum((0, *sizes[:-1])).tolist()
        self._logits_off, self._rows_off, self._plan_off, self._check_off, self._guess_off = offsets
        self._host = backend.alloc_pinned("route image", sum(sizes))
        image = self._host.array
        self._logits = image[: sizes[0]].view(np.float32)
        self._rows = image[self._rows_off : self._rows_off + sizes[1]].view(np.int32).reshape(SLOT_TABLE_LAYERS, words)
        block = image[self._plan_off : self._plan_off + sizes[2]]
        self._plan_ptrs = block[: 24 * k].view(np.uint64).reshape(3, k)
        self._plan_weights = block[24 * k : 28 * k].view(np.float32)
        self._plan_rows = block[28 * k :].view(np.int32)
        self._check = image[self._check_off : self._guess_off]
        self._guess = image[self._guess_off :].view(np.int32)
        lay = arena.layout
        self._part_off = np.array([[lay.gate_off], [lay.up_off], [lay.down_off]], np.uint64)
        self._counted: list[bool] = []
        self._seen: list[list[int] | None] = []  # the words of every layer of the current token

    @property
    def picks(self) -> list[HeaderRow | None]:
        """What was chosen in every layer of the current token, for traces."""
        return [None if words is None else HeaderRow.of(i, words) for i, words in enumerate(self._seen)]

    def begin_token(self, n_layers: int, stream: Stream) -> None:
        """Forget what was counted for the last token; moves between the tiers advance, as they do nowhere else."""
        self._counted = [False] * n_layers
        self._seen = [None] * n_layers
        self._fetcher.ahead.settle()  # what a failed token has left
        if self._mover is not None:
            self._mover.advance(stream)

    def end_token(self) -> None:
        """Nothing is read ahead over the end of a token."""
        self._fetcher.ahead.settle()

    def update_table(self) -> None:
        """Bring the device slot table up to date with the cache."""
        self._table.update()

    def route_device(
        self, layer: int, position: int, select: KernelLaunch, stream: Stream, guess: Sequence[KernelLaunch] = ()
    ) -> None:
        """Select on the device, read 76 bytes back, make the picks resident; `select` needs the router's logits.

        `guess` are the launches that guess the next layer's picks: they are read back in the same go, and what is
        missing of them is read ahead.
        """
        backend, nbytes = self._backend, 4 * self._rows.shape[1]
        self._table.update()
        backend.launch(select, stream)
        rows_off = self._rows_off + nbytes * layer
        backend.copy_d2h(self._host, self._arena.header_row(layer), nbytes, stream, rows_off, "route.header")
        for launch in guess:
            backend.launch(launch, stream)
        if guess:
            backend.copy_d2h(self._host, self._buffers.guess_header, nbytes, stream, self._guess_off, "route.guess")
        self._drain(stream)
        fall = self._use_row(layer, position, stream)
        if fall is not None or self._diag:
            row = HeaderRow.of(layer, self._rows[layer].tolist())
            if fall is not None:
                self._upload_plan(layer, row.picks, row.weights, stream)
            if self._diag:
                self._check_against_host(layer, row, stream)
        if guess:
            self._read_ahead(layer + 1)

    def _read_ahead(self, layer: int) -> None:
        row = HeaderRow.of(layer, self._guess.tolist())
        if not row.flag & NOT_FINITE:
            # one layer's misses must find a slot each, whatever was guessed
            self._fetcher.ahead.issue(layer, row.picks, keep=self._cfg.top_k)

    def _drain(self, stream: Stream) -> None:
        """Wait for `stream`: what was read back is there, and no kernel reads a pool slot that a key has left."""
        self._backend.synchronize(stream)
        self._pool.drained()

    def route_host(self, layer: int, position: int, stream: Stream) -> None:
        """The host chain on the router's logits: read them back, select, fetch, upload the plan."""
        cfg = self._cfg
        self._backend.copy_d2h(self._host, self._buffers.logits, 4 * cfg.n_experts, stream, 0, "route.logits")
        self._drain(stream)
        ids, weights, not_finite = self._select(layer)
        if not_finite:
            raise self._not_finite(layer, position)
        picks = ids.tolist()
        self._fetch(layer, picks, stream)
        self._seen[layer] = [0, *picks, *weights.view(np.int32).tolist(), *([ABSENT] * cfg.top_k)]
        self._upload_plan(layer, picks, weights, stream)

    def read_headers(self, layers: Sequence[int], position: int, stream: Stream) -> Fall | None:
        """One read-back of all header rows (it drains `stream`), then layer by layer up to the first fall.

        Layers behind that one ran on a wrong input: nothing of their rows is looked at.
        """
        self._backend.copy_d2h(
            self._host, self._arena.headers_ptr, self._arena.headers_nbytes, stream, self._rows_off, "route.headers"
        )
        self._drain(stream)
        for layer in layers:
            fall = self._use_row(layer, position, stream)
            if fall is not None:
                return fall
        return None

    def _use_row(self, layer: int, position: int, stream: Stream) -> Fall | None:
        """Make the layer's picks resident and the table right; None if its kernels had exactly those picks."""
        words: list[int] = self._rows[layer].tolist()
        codes = clean_codes(layer, words, self._cache)
        if codes is not None:
            self._seen[layer] = words
            self._cache.begin_epoch()
            self._cache.hit(codes, count=not self._counted[layer])
            self._counted[layer] = True
            return None
        row = parse(layer, words, self._cfg.n_experts)
        self._check_finite(row, layer, position)
        self._seen[layer] = words
        return self._settle(row, stream)

    def _settle(self, row: HeaderRow, stream: Stream) -> Fall | None:
        """A row that is not as it should be."""
        lies = slots_agree(row, self._cache) is not None
        fetched = self._fetch(row.layer, row.picks, stream)
        self._table.update()
        flagged = bool(row.flag & MISS)
        n_absent = row.plan_slots.count(ABSENT)
        if not (lies or fetched or flagged or n_absent):
            return None
        if lies or fetched != n_absent or not fetched:
            # the table disagrees with the cache: without this the same fall would come back every token
            self._table.rewrite_layer(row.layer, row.picks)
        if not fetched:
            return Fall(row.layer, "stale_table", 0)
        return Fall(row.layer, "miss" if flagged else "no_flag", fetched)

    def _fetch(self, layer: int, picks: Sequence[int], stream: Stream) -> int:
        # demand is counted once a (token, layer): a rerun after a fall looks the same picks up again
        count = not self._counted[layer]
        self._cache.begin_epoch()
        fetched = self._fetcher.fetch(layer, picks, stream, count=count)
        self._counted[layer] = True
        return fetched

    def _select(self, layer: int) -> tuple[NDArray[np.int32], NDArray[np.float32], bool]:
        cfg = self._cfg
        return select_experts(
            self._logits,
            self._biases[layer],
            top_k=cfg.top_k,
            temperature=cfg.temperature,
            route_scale=cfg.route_scale,
            normalise=cfg.normalise,
        )

    def _upload_plan(self, layer: int, picks: Sequence[int], weights: NDArray[np.float32], stream: Stream) -> None:
        self._fill_plan(layer, picks, weights)
        self._backend.copy_h2d(
            self._buffers.plan, self._host, 32 * self._cfg.top_k, stream, self._plan_off, "route.plan"
        )

    def _fill_plan(self, layer: int, picks: Sequence[int], weights: NDArray[np.float32]) -> None:
        _, ids, plan_weights = plan(np.asarray(picks, np.int32), weights)
        bases = np.array([self._arena.slot_ptr(self._cache.slot_of(layer, e)) for e in ids.tolist()], np.uint64)
        self._plan_ptrs[:] = bases + self._part_off
        self._plan_weights[:] = plan_weights
        self._plan_rows[:] = 0

    def _check_finite(self, row: HeaderRow, layer: int, position: int) -> None:
        if row.flag & NOT_FINITE:
            raise self._not_finite(layer, position)

    def _not_finite(self, layer: int, position: int) -> NotFiniteError:
        return NotFiniteError(
            f"layer {layer}, position {position}: the router saw a not-finite logit or weight; "
            "check the checkpoint's weights and the token ids of this sequence"
        )

    def _check_against_host(self, layer: int, row: HeaderRow, stream: Stream) -> None:
        """The host chain on the same logits against the header and the plan block on the device."""
        cfg = self._cfg
        self._backend.copy_d2h(self._host, self._buffers.logits, 4 * cfg.n_experts, stream, 0, "diag.logits")
        self._backend.copy_d2h(self._host, self._buffers.plan, 32 * cfg.top_k, stream, self._check_off, "diag.plan")
        self._backend.synchronize(stream)
        ids, weights, _ = self._select(layer)
        if ids.tolist() != list(row.picks):
            raise RouteMismatchError(f"layer {layer}: device picks {list(row.picks)}, host chain {ids.tolist()}")
        if weights.tobytes() != row.weights.tobytes():
            raise RouteMismatchError(f"layer {layer}: device weights {row.weights}, host chain {weights}")
        self._fill_plan(layer, row.picks, weights)
        want = self._host.array[self._plan_off : self._plan_off + 32 * cfg.top_k]
        if not np.array_equal(self._check, want):
            raise RouteMismatchError(f"layer {layer}: the plan block on the device differs from the host's plan")
        self.diag_checked += 1
        if self.diag_checked % _DIAG_LOG_EVERY == 0:
            log.info("device route checked", layer_tokens=self.diag_checked, mismatches=0)

    def close(self) -> None:
        self._backend.free_pinned(self._host)
