"""The selection on the device against the host chain, bit for bit, and the routing function on all 2^32 inputs.

With the host backend a few cases run, which checks the tests; on a GPU all of them.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ds41rt.cu.backend import GpuBackend, HostBuffer, open_backend
from ds41rt.kernels.router import FLAG_MISS, FLAG_NOT_FINITE, HOST_SLOT_BIT, ROUTE_SELECT, plan, select_experts
from ds41rt.kernels.softplus_check import BLOCKS, SQRT_SOFTPLUS_HASH

E, K = 384, 6
DEVICE_BASE, HOST_BASE, SLOT, OFFS = 0x7000_0000_0000, 0x6000_0000_0000, 1 << 20, (0, 1 << 18, 1 << 19)
BATCH = 256


@pytest.fixture
def backend(backend_name: str) -> Iterator[GpuBackend]:
    opened, _ = open_backend(backend_name)
    yield opened
    opened.close()


def logits_of(rng: np.random.Generator, kind: int, n: int = E) -> NDArray[np.float32]:
    """Random and adversarial router logits: `kind` in 0..9."""
    x = rng.normal(size=n).astype(np.float32)
    if kind == 1:
        x = rng.integers(-3, 4, n).astype(np.float32)  # many ties
    elif kind == 2:
        x = np.full(n, rng.normal(), np.float32)  # all equal
    elif kind == 3:
        x = (x * np.float32(1e-41)).astype(np.float32)  # subnormal
    elif kind == 4:
        x *= np.float32(1e4)
    elif kind == 5:
        x = (20 + rng.integers(-64, 65, n) * np.spacing(np.float32(20))).astype(np.float32)  # around the switch at 20
    elif kind == 6:
        x -= np.float32(95)  # exponentials that are subnormal or zero
    elif kind == 7:
        x[rng.integers(0, n, rng.integers(1, n))] = rng.choice([np.nan, np.inf, -np.inf])
    elif kind == 8:
        x = np.where(rng.random(n) < 0.5, np.float32(0.0), np.float32(-0.0)).astype(np.float32)
    elif kind == 9:
        x[: n * 2 // 3] -= np.float32(50)  # winners in the last third only
    return x


@pytest.mark.parametrize(("n_experts", "top_k"), [(E, K), (1024, 8), (16, 3), (7, 7)])
def test_routes(backend: GpuBackend, backend_name: str, n_experts: int, top_k: int) -> None:
    n_cases = (100_000 if (n_experts, top_k) == (E, K) else 4_000) if backend_name == "cuda" else 512
    rng = np.random.default_rng(n_experts)
    stream = backend.create_stream("routes")
    words = 1 + 3 * top_k
    logits_dev = backend.alloc("logits", 4 * n_experts * BATCH)
    bias_dev = backend.alloc("bias", 4 * n_experts)
    slots_dev = backend.alloc("slots", 4 * n_experts)
    header_dev = backend.alloc("headers", 4 * words * BATCH)
    plan_dev = backend.alloc("plans", 32 * top_k * BATCH)
    launches = []
    for i in range(BATCH):
        base = plan_dev.ptr + 32 * top_k * i
        args = {
            "logits": logits_dev.ptr + 4 * n_experts * i, "bias": bias_dev.ptr, "slot_row": slots_dev.ptr,
            "header": header_dev.ptr + 4 * words * i, "weight_dev": base + 24 * top_k, "rows_dev": base + 28 * top_k,
            "ptrs_dev": base, "n_experts": n_experts, "top_k": top_k, "temperature": 1.0, "route_scale": 1.5,
            "normalise": 1, "dev_base": DEVICE_BASE, "host_base": HOST_BASE, "slot_nbytes": SLOT, "gate_off": OFFS[0],
            "up_off": OFFS[1], "down_off": OFFS[2],
        }  # fmt: skip
        launches.append(backend.prepare(ROUTE_SELECT, args, f"route {i}"))
    logits = np.empty((BATCH, n_experts), np.float32)
    headers, plans = np.empty((BATCH, words), np.int32), np.empty((BATCH, 32 * top_k), np.uint8)
    winners: set[int] = set()
    for first in range(0, n_cases, BATCH):
        bias = (0.2 * rng.normal(size=n_experts)).astype(np.float32) if first % 512 else np.zeros(n_experts, np.float32)
        slots = rng.permutation(np.arange(1, n_experts + 1)).astype(np.int32)
        slots[rng.random(n_experts) < 0.1] = -1
        host = (slots > 0) & (rng.random(n_experts) < 0.2)
        slots[host] |= HOST_SLOT_BIT
        for i in range(BATCH):
            logits[i] = logits_of(rng, (first + i) % 10, n_experts)
        for array, dev in ((logits, logits_dev), (bias, bias_dev), (slots, slots_dev)):
            backend.copy_h2d(dev.ptr, HostBuffer.pageable("case", array), array.nbytes, stream)
        backend.fill(header_dev.ptr, 0x7F, header_dev.nbytes, stream)
        backend.fill(plan_dev.ptr, 0x7F, plan_dev.nbytes, stream)
        for launch in launches:
            backend.launch(launch, stream)
        for result, dev in ((headers.view(np.uint8), header_dev), (plans, plan_dev)):
            backend.copy_d2h(HostBuffer.pageable("result", result), dev.ptr, result.nbytes, stream)
        backend.synchronize(stream)
        for i in range(BATCH):
            ids, weights, not_finite = select_experts(
                logits[i], bias, top_k=top_k, temperature=1.0, route_scale=1.5, normalise=True
            )
            _, planned, planned_weights = plan(ids, weights)
            codes = slots[planned]
            flag = (FLAG_MISS if (codes < 0).any() else 0) | (FLAG_NOT_FINITE if not_finite else 0)
            want = [flag, *ids.tolist(), *weights.view(np.int32).tolist(), *codes.tolist()]
            got = headers[i].tolist()
            if not not_finite:
                assert got == want, (first + i, got, want)
            else:  # which payload a NaN weight has is the processor's choice
                assert got[: 1 + top_k] == want[: 1 + top_k], (first + i, got, want)
                assert len(set(got[1 : 1 + top_k])) == top_k
            number = np.where(codes < 0, 0, codes & ~HOST_SLOT_BIT).astype(np.uint64)
            base_of = np.where((codes > 0) & (codes & HOST_SLOT_BIT != 0), HOST_BASE, DEVICE_BASE).astype(np.uint64)
            pointers = np.stack([base_of + number * np.uint64(SLOT) + np.uint64(off) for off in OFFS])
            assert np.array_equal(plans[i][: 24 * top_k].view(np.uint64).reshape(3, top_k), pointers)
            if not not_finite:
                assert plans[i][24 * top_k : 28 * top_k].tobytes() == planned_weights.tobytes()
            assert not plans[i][28 * top_k :].any()
            winners.update(ids.tolist())
    if n_cases * top_k > 50 * n_experts:
        assert winners == set(range(n_experts))


def test_routing_function_on_every_input(backend: GpuBackend, backend_name: str) -> None:
    table = np.load(Path(__file__).parents[1] / "goldens_own" / "sqrt_softplus_hashes.npy")
    n_blocks = BLOCKS if backend_name == "cuda" else 1
    stream = backend.create_stream("hashes")
    out = backend.alloc("hashes", 8 * n_blocks)
    backend.fill(out.ptr, 0x7F, out.nbytes, stream)
    args = {"hashes": out.ptr, "first_block": 0 if n_blocks == BLOCKS else 1010, "n_blocks": n_blocks}
    backend.launch(backend.prepare(SQRT_SOFTPLUS_HASH, args, "all inputs"), stream)
    hashes = np.empty(n_blocks, np.uint64)
    backend.copy_d2h(HostBuffer.pageable("hashes", hashes), out.ptr, out.nbytes, stream)
    backend.synchronize(stream)
    assert np.array_equal(hashes, table if n_blocks == BLOCKS else table[1010:1011])
