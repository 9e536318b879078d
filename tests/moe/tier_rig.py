"""A cache with its tiers on a simulated device, and what a step would do with it, without a model.

Experts are random bytes. A *use* is a kernel that looks its experts up in the slot table on the device and copies
their bytes, as the step's kernels would: what it copied is compared with the experts once it has run. After every call
`check` compares map, slot table and the bytes of every slot.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ds41rt.checkpoint.layout import ExpertLayout
from ds41rt.checkpoint.source import ModelSource
from ds41rt.cu.backend import GpuBackend
from ds41rt.cu.host import HostBackend
from ds41rt.cu.kernel import I32, U8, Array, KernelSpec, Pointer, Span
from ds41rt.cu.result import CudaError
from ds41rt.errors import CheckpointError
from ds41rt.kernels.params import r, scalars, w
from ds41rt.moe.arena import ExpertArena, slot_nbytes
from ds41rt.moe.cache import ExpertCache
from ds41rt.moe.fetch import ExpertFetcher
from ds41rt.moe.header import HOST_SLOT_BIT, SLOT_TABLE_LAYERS
from ds41rt.moe.mover import Mover
from ds41rt.moe.pool import PinnedPool
from ds41rt.moe.slots import SlotTable

LAYERS, EXPERTS, TOP_K = 4, 16, 3
LAYOUT = ExpertLayout(weight_nbytes=64, scale_nbytes=8)
NBYTES = LAYOUT.nbytes
SLOT_NBYTES = slot_nbytes(LAYOUT)
BYTES = np.random.default_rng(5).integers(0, 256, (LAYERS, EXPERTS, NBYTES), np.uint8)


def _spans(table: Array, picks: Array, out: Array, k: int, layer: int, dev_base: int, host_base: int) -> list[Span]:
    codes = table[layer, picks].tolist()
    assert all(code > 0 for code in codes), f"a use of layer {layer} met an absent expert: {codes}"
    return [
        Span(
            host_base + (code ^ HOST_SLOT_BIT) * SLOT_NBYTES if code & HOST_SLOT_BIT else dev_base + code * SLOT_NBYTES,
            U8,
            (NBYTES,),
            "r",
        )
        for code in codes
    ]


def _use(
    table: Array, picks: Array, out: Array, k: int, layer: int, dev_base: int, host_base: int, spans: Sequence[Array]
) -> None:
    for row, expert in zip(out, spans, strict=True):
        row[:] = expert


USE = KernelSpec(
    "use_experts",
    (
        Pointer("table", I32, lambda s: (SLOT_TABLE_LAYERS, EXPERTS), "r"),
        r("picks", I32, lambda s: (s.k,)),
        w("out", U8, lambda s: (s.k, NBYTES)),
        *scalars("u32", "k", "layer"),
        *scalars("u64", "dev_base", "host_base"),
    ),
    _use,
    _spans,
)


class Source:
    """Reads that give the experts' bytes, after `before(layer, expert)`, which may raise or wait."""

    def __init__(self) -> None:
        self.before: Callable[[int, int], None] = lambda layer, expert: None
        self.reads: list[tuple[int, int]] = []  # offset, bytes

    def read_expert(self, layer: int, expert: int, out: NDArray[np.uint8], offset: int) -> None:
        self.reads.append((offset, out.size))
        self.before(layer, expert)
        half = out.size // 2
        whole = BYTES[layer, expert, offset : offset + out.size]
        out[:half] = whole[:half]
        out[half:] = whole[half:]


def fail_some(rng: random.Random, share: float) -> Callable[[int, int], None]:
    def before(layer: int, expert: int) -> None:
        if rng.random() < share:
            raise CheckpointError(f"planted for {layer}.{expert}")

    return before


class Rig:
    """`device` and `host` slots, `spare` more in the pool. `backend` may be a proxy over a host backend."""

    def __init__(
        self,
        device: int,
        host: int,
        *,
        spare: int = 6,
        schedule: str = "lazy",
        threads: int = 0,
        policy: str = "oldest",
        seed: int = 0,
        backend: Any = None,
    ) -> None:
        self.inner: HostBackend = HostBackend(schedule) if backend is None else backend.inner
        self.backend = cast(GpuBackend, self.inner if backend is None else backend)
        self.source = Source()
        self.stream = self.backend.create_stream("compute")
        self.pool = PinnedPool(self.backend, host + spare, SLOT_NBYTES, NBYTES)
        self.cache = ExpertCache(
            LAYERS, EXPERTS, device, host_slots=host, pool_slots=host + spare if host else 0, policy=policy, seed=seed
        )
        self.arena = ExpertArena(self.backend, LAYOUT, device, self.pool.base, TOP_K, self.stream)
        self.table = SlotTable(self.backend, self.cache, self.stream)
        self.fetcher = ExpertFetcher(
            self.backend, self.cache, self.arena, self.pool, cast(ModelSource, self.source), threads
        )
        self.mover = None
        if device and host:
            self.mover = Mover(self.backend, self.cache, self.arena, self.pool, self.table, keep=TOP_K)
        self.picks = self.backend.alloc("picks", 4 * LAYERS * TOP_K)
        self.out = self.backend.alloc("out", LAYERS * TOP_K * NBYTES)
        self.image = self.backend.alloc_pinned("image", 4 * LAYERS * TOP_K + self.out.nbytes)
        self.uses = [self._prepare(layer) for layer in range(LAYERS)]
        self.pending: list[tuple[int, list[int]]] = []
        self.drain()

    def _prepare(self, layer: int) -> Any:
        args = {
            "table": self.table.table.ptr, "picks": self.picks.ptr + 4 * layer * TOP_K,
            "out": self.out.ptr + layer * TOP_K * NBYTES, "k": TOP_K, "layer": layer,
            "dev_base": self.arena.base, "host_base": self.arena.host_base,
        }  # fmt: skip
        return self.backend.prepare(USE, args, f"L{layer}.use")

    # ---- what a step does

    def token_starts(self) -> None:
        self.fetcher.ahead.settle()
        if self.mover is not None:
            self.mover.advance(self.stream)

    def fetch(self, layer: int, experts: list[int], *, count: bool = True) -> int:
        """As the router does it: in an epoch of its own, then the table."""
        self.cache.begin_epoch()
        n = self.fetcher.fetch(layer, experts, self.stream, count=count)
        self.table.update()
        return n

    def use(self, layer: int, experts: list[int]) -> None:
        """Enqueue the kernel on these experts of the layer, once a layer between two drains."""
        assert len(experts) == TOP_K
        off = 4 * layer * TOP_K
        self.image.array[off : off + 4 * TOP_K].view(np.int32)[:] = experts
        self.backend.copy_h2d(self.picks.ptr + off, self.image, 4 * TOP_K, self.stream, off, "picks")
        self.backend.launch(self.uses[layer], self.stream)
        self.pending.append((layer, experts))

    def drain(self) -> None:
        """Wait for the stream, and compare what the kernels have seen."""
        off = 4 * LAYERS * TOP_K
        self.backend.copy_d2h(self.image, self.out.ptr, self.out.nbytes, self.stream, off, "out")
        self.backend.synchronize(self.stream)
        self.pool.drained()
        out = np.array(self.image.array[off:]).reshape(LAYERS, TOP_K, NBYTES)
        for layer, experts in self.pending:
            np.testing.assert_array_equal(out[layer], BYTES[layer, experts], f"layer {layer} used other bytes")
        self.pending.clear()

    def token(self, rng: random.Random, *, drain: bool = True) -> None:
        """A token of random picks, skewed so that some come back often; one drain a layer."""
        self.token_starts()
        for layer in range(LAYERS):
            picks: list[int] = []
            while len(picks) < TOP_K:
                e = int(EXPERTS * rng.random() ** 2)
                if e not in picks:
                    picks.append(e)
            self.drain()
            self.fetch(layer, picks)
            self.use(layer, picks)
        if drain:
            self.drain()

    # ---- what must hold

    def mapped(self) -> dict[tuple[int, int], int]:
        """(layer, expert) -> slot code, by the map."""
        found = {(i, e): self.cache.slot_of(i, e) for i in range(LAYERS) for e in range(EXPERTS)}
        return {key: code for key, code in found.items() if code}

    def bytes_of(self, code: int) -> NDArray[np.uint8]:
        return self.inner.memory.bytes(self.arena.slot_ptr(code), NBYTES)

    def check(self, *, table: bool = True) -> None:
        """Map and reverse map agree, no slot is lost or held twice, the slots hold what the map says, and, once the
        pending changes are in, so does the table on the device. Waits for both streams."""
        cache, pool = self.cache, self.pool
        mapped = self.mapped()
        codes = [*range(1, cache.n_slots + 1), *(HOST_SLOT_BIT | i for i in range(1, cache.pool_slots + 1))]
        held = {code: key for code in codes if (key := cache.key_of(code)) is not None}
        assert held == {code: key for key, code in mapped.items()}
        on_device = [code for code in held if code < HOST_SLOT_BIT]
        in_host = {code ^ HOST_SLOT_BIT for code in held if code >= HOST_SLOT_BIT}
        # every device slot: a key, empty, or the target of a move
        targets = {code for code in cache._moving if code < HOST_SLOT_BIT}
        places = [*on_device, *cache._empty, *(targets - set(on_device))]
        assert sorted(places) == list(range(1, cache.n_slots + 1)), "a device slot was lost or is held twice"
        # every pool slot: a key, spare, left, quarantined, unknown, being copied from, part of a move, or read ahead
        moving = [] if self.mover is None else [t.spare for b in self.mover._batches for t in b.transfers if t.spare]
        ahead = [slot for slot, _ in self.fetcher.ahead._pending.values()]
        staged = [slot for half in self.fetcher._halves for slot in half.slots]
        slots = [*in_host, *pool._spare, *pool._left, *(s for s, _ in pool._quarantined), *self.fetcher._unknown]
        assert sorted([*slots, *staged, *moving, *ahead]) == list(range(1, pool.n_slots + 1)), "a pool slot was lost"
        assert len(in_host) <= cache.host_slots + cache._n_in_transit
        self.backend.synchronize(self.stream)
        if self.mover is not None:
            self.mover.drain()
        for (layer, expert), code in mapped.items():
            assert np.array_equal(self.bytes_of(code), BYTES[layer, expert]), f"slot {code:#x} lost {layer}.{expert}"
        assert not self.inner.memory.bytes(self.arena.base, NBYTES).any(), "the reserved slot was written to"
        if table:
            self.table.update()
            self.backend.synchronize(self.stream)
            raw = self.inner.memory.bytes(self.table.table.ptr, 4 * LAYERS * EXPERTS).view(np.int32)
            want = [mapped.get(divmod(i, EXPERTS), -1) for i in range(LAYERS * EXPERTS)]
            assert raw.tolist() == want, "the table differs from the map"

    def close(self) -> None:
        """Everything is given back; no thread and no memory is left."""
        self.backend.synchronize(self.stream)
        if self.mover is not None:
            self.mover.drain()
            self.mover.close()
        self.fetcher.close()
        self.table.close()
        self.arena.close()
        self.pool.close()
        self.backend.free_pinned(self.image)
        self.backend.free(self.out)
        self.backend.free(self.picks)
        self.backend.destroy_stream(self.stream)
        assert not any(self.inner.live().values()), self.inner.live()
        assert self.inner.races == ()
        self.inner.close()


class Probe:
    """A host backend whose calls pass `hook(name, args, call)`, if there is one."""

    def __init__(self, schedule: str = "lazy") -> None:
        self.inner = HostBackend(schedule)
        self.hook: Callable[[str, tuple[Any, ...], Callable[[], Any]], Any] | None = None

    def __getattr__(self, name: str) -> Any:
        target = getattr(self.inner, name)
        if not callable(target) or name == "ledger":
            return target

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.hook is None:
                return target(*args, **kwargs)
            return self.hook(name, (*args, *kwargs.values()), lambda: target(*args, **kwargs))

        return call


class FailAt:
    """A hook that raises from the n-th call, before or after it took effect."""

    def __init__(self, n: int, error: BaseException, *, after: bool = False) -> None:
        self.left = n
        self.error = error
        self.after = after
        self.fired = ""

    def __call__(self, name: str, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        self.left -= 1
        if self.left != -1:
            return call()
        self.fired = name
        if self.after:
            call()
        raise self.error


def raised_by(call: Callable[[], object]) -> BaseException | None:
    """What was planted and has come through, if anything."""
    try:
        call()
    except (CudaError, KeyboardInterrupt) as error:
        return error
    return None


SCHEDULES = ("lazy", "eager", "random:1", "random:2")
SIZES = ((0, 3), (0, 9), (3, 0), (9, 0), (1, 2), (4, 4), (2, 12), (12, 3), (20, 20))
