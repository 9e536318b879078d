"""The copies of host-tier picks: bytes, pointers, and that nothing else is written."""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from ds41rt.cu.backend import GpuBackend, open_backend
from ds41rt.kernels.gather import EXPERT_GATHER
from ds41rt.moe.gather import GatherBuffers
from ds41rt.moe.pool import PinnedPool

K, POOL_SLOTS = 6, 9
SMALL = [(96, 256), (4096 + 16, 4352), (512 * 8 * 16 * 3 + 48, 512 * 8 * 16 * 3 + 256)]
RELEASED = (18_800_640, 18_800_640)


@pytest.fixture
def backend(backend_name: str) -> Iterator[GpuBackend]:
    opened, _ = open_backend(backend_name)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("nbytes", "slot_nbytes"), [*SMALL, pytest.param(*RELEASED, id="released", marks=pytest.mark.long)]
)
def test_every_mix_of_tiers(backend: GpuBackend, nbytes: int, slot_nbytes: int) -> None:
    rng = np.random.default_rng(nbytes)
    stream = backend.create_stream("gather")
    pool = PinnedPool(backend, POOL_SLOTS, slot_nbytes, nbytes)
    experts = rng.integers(0, 256, (POOL_SLOTS + 1) * slot_nbytes, np.uint8)
    pool.host.array[:] = experts
    arena = backend.alloc("arena", 4 * slot_nbytes)
    gathered = GatherBuffers(backend, pool, K)
    ptrs = backend.alloc("pointers", 24 * K)
    sent = backend.alloc_pinned("pointers sent", 24 * K)
    image = backend.alloc_pinned("image", K * slot_nbytes)
    table = backend.alloc_pinned("table image", 24 * K)
    offs = np.array([[32], [nbytes // 48 * 16], [nbytes // 24 * 16]], np.uint64)  # of gate, up, down
    launch = backend.prepare(
        EXPERT_GATHER,
        {
            "ptrs_dev": ptrs.ptr, "gathered_ptrs": gathered.ptrs_dev, "top_k": K, "pool_base": gathered.pool_base,
            "pool_nbytes": gathered.pool_nbytes, "gathered": gathered.slots, "slot_nbytes": slot_nbytes,
            "expert_nbytes": nbytes, "gate_off": 32,
        },
        "gather",
    )  # fmt: skip
    mixes = list(product((False, True), repeat=K)) if nbytes < 1 << 20 else [(True,) * K, (False, True) * 3]
    for mix in mixes:
        slots = [int(rng.integers(1, POOL_SLOTS + 1)) if in_pool else int(rng.integers(4)) for in_pool in mix]
        if mix[0]:
            slots[0] = POOL_SLOTS  # its last byte is the pool's
        bases = [
            pool.ptr(slot) if in_pool else arena.ptr + slot * slot_nbytes
            for slot, in_pool in zip(slots, mix, strict=True)
        ]
        want_ptrs = np.array(bases, np.uint64) + offs
        sent.array.view(np.uint64)[:] = want_ptrs.reshape(-1)
        poison = int(rng.integers(1, 256))
        backend.fill(gathered.slots, poison, K * (slot_nbytes + 24), stream)
        backend.copy_h2d(ptrs.ptr, sent, 24 * K, stream)
        backend.launch(launch, stream)
        backend.copy_d2h(image, gathered.slots, K * slot_nbytes, stream)
        backend.copy_d2h(table, gathered.ptrs_dev, 24 * K, stream)
        backend.synchronize(stream)
        want = np.full((K, slot_nbytes), poison, np.uint8)
        for i, (slot, in_pool) in enumerate(zip(slots, mix, strict=True)):
            if in_pool:
                want[i, :nbytes] = experts[slot * slot_nbytes :][:nbytes]
                want_ptrs[:, i] = offs[:, 0] + np.uint64(gathered.slots + i * slot_nbytes)
        assert np.array_equal(image.array.reshape(K, slot_nbytes), want), mix
        assert np.array_equal(table.array.view(np.uint64).reshape(3, K), want_ptrs), mix
