"""Every kernel on the device against its reference, launch by launch, on the data of real decode steps.

With the host backend the same tests check the checker: a launch then meets its own reference.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checked_backend import CheckedBackend

from ds41rt.checkpoint.filled import FilledSource
from ds41rt.checkpoint.synth_presets import PRESETS, RELEASED
from ds41rt.config import ModelConfig
from ds41rt.cu.backend import GpuBackend, Stream, open_backend
from ds41rt.cu.host import HostBackend
from ds41rt.cu.kernel import BF16, KernelLaunch, Pointer
from ds41rt.engine import Engine
from ds41rt.kernels.registry import SPECS
from ds41rt.settings import Settings
from ds41rt.tools.bench import fill_sequence

# Every kind of layer at the released widths, few of them: window only, both compression ratios, an index-only source.
TRUE_SHAPES = ModelConfig(
    **{
        **RELEASED.model_dump(),
        "n_layers": 5,
        "compress_ratios": (0, 2, 2, 1, 1),
        "kv_source_layers": (1, 3),
        "index_source_layers": (1, 3, 4),
        "candidate_source_layer": 3,
        "engram_layers": (1,),
        "engram_num_embeddings": RELEASED.engram_num_embeddings[:1],
    }
)


def report(checked: CheckedBackend) -> str:
    lines = [f"{f.label} {f.kernel}.{f.output}: {f.what}" for f in checked.findings[:20]]
    return "\n".join([f"{len(checked.findings)} outputs are wrong", *lines])


def decode(
    backend: GpuBackend, source: Any, cfg: ModelConfig, positions: list[int], slots: int, limit: int | None = None
) -> CheckedBackend:
    checked = CheckedBackend(backend, limit=limit)
    settings = Settings(step_graph=False, max_context=min(max(positions) + 2, cfg.max_positions))
    with Engine(source, settings, backend=checked, expert_slots=slots) as engine, engine.new_sequence() as seq:
        fill_sequence(engine, seq.step.buffers)
        rng = np.random.default_rng(7)
        for position in positions:
            seq.position = position
            checked.again()
            engine.decode_step(seq, int(rng.integers(3, 250)))
    return checked


def test_golden_shapes(backend_name: str, golden: Path) -> None:
    backend, _ = open_backend(backend_name)
    try:
        cfg = PRESETS["tiny"]
        source = FilledSource(cfg, pool=24)
        checked = decode(backend, source, cfg, [0, 1, 2, 7, 8, 9, 30, 31, 200, 201, 511], 400)
    finally:
        backend.close()
    assert not checked.findings, report(checked)
    step_kernels = {s.name for s in SPECS} - {"read_sum", "sqrt_softplus_hash", "slot_table_set", "expert_gather"}
    assert step_kernels <= set(checked.tally.launches)


@pytest.mark.parametrize("preset", ["micro", "small"])
def test_other_shapes(backend_name: str, preset: str) -> None:
    backend, _ = open_backend(backend_name)
    try:
        cfg = PRESETS[preset]
        checked = decode(backend, FilledSource(cfg), cfg, [0, 1, 2, 63, 64, 401], cfg.n_layers * cfg.n_experts)
    finally:
        backend.close()
    assert not checked.findings, report(checked)


@pytest.mark.long
def test_released_shapes(backend_name: str) -> None:
    backend, _ = open_backend(backend_name)
    try:
        checked = decode(backend, FilledSource(TRUE_SHAPES), TRUE_SHAPES, [131, 4000], 40, limit=1)
    finally:
        backend.close()
    for key in sorted(checked.tally.worst):
        far, total = checked.tally.outliers.get(key, (0, 0))
        print(f"{key[0]:<16}{key[1]:<12} worst {checked.tally.worst[key]:<12.3g} beyond one ulp {far} of {total}")
    assert not checked.findings, report(checked)


class OffByTwoUlps(HostBackend):
    """Every twentieth bf16 value that a kernel writes is two units off."""

    def launch(self, launch: KernelLaunch, stream: Stream) -> None:
        super().launch(launch, stream)
        self.synchronize(stream)
        args = dict(zip((p.name for p in launch.spec.params), launch.args, strict=True))
        for p in launch.spec.params:
            if isinstance(p, Pointer) and p.access == "w" and p.dtype == BF16:
                out = self.memory.view(int(args[p.name]), p.dtype, p.shape(launch.spec.scalars(args)), True)
                out.reshape(-1).view(np.uint16)[::20] ^= 2


class WritesNothing(HostBackend):
    def launch(self, launch: KernelLaunch, stream: Stream) -> None:
        pass


@pytest.mark.parametrize("broken", [OffByTwoUlps, WritesNothing])
def test_the_checker_notices(broken: type[HostBackend]) -> None:
    cfg = PRESETS["micro"]
    checked = CheckedBackend(broken())
    with (
        Engine(FilledSource(cfg), Settings(max_context=32, device_route=False), backend=checked) as engine,
        engine.new_sequence() as seq,
    ):
        engine.decode_step(seq, 5)
    assert {f.kernel for f in checked.findings} >= {"attn_qkv_a", "linear_fp8"}
