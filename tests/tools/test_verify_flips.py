"""`verify` notices one flipped high bit in any tensor that the golden run reads.

The flip is made in memory, between the checkpoint and the engine, in the value of the largest magnitude that a traced
step uses. The default run takes a sample of tensor kinds and two experts, the long run every tensor.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from ds41rt.checkpoint.checkpoint import Checkpoint
from ds41rt.cli import main
from ds41rt.engine import Engine
from ds41rt.errors import NotFiniteError
from ds41rt.settings import Settings
from ds41rt.tools import verify

GOLDEN = Path(__file__).parents[1] / "goldens" / "tiny-a"
NUMBERS = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)}


class FlippedCheckpoint(Checkpoint):
    """A checkpoint that hands out one tensor with one bit wrong."""

    flip: tuple[str, int] = ("", 0)
    expert_flip: tuple[int, int, int] | None = None

    def read_into(self, name: str, out: NDArray[np.uint8], offset: int = 0) -> None:
        super().read_into(name, out, offset)
        tensor, at = self.flip
        if name == tensor and offset <= at < offset + out.size:
            out[at - offset] ^= 0x80

    def read_expert(self, layer: int, expert: int, out: NDArray[np.uint8]) -> None:
        super().read_expert(layer, expert, out)
        if self.expert_flip is not None and self.expert_flip[:2] == (layer, expert):
            out[self.expert_flip[2]] ^= 0x80


def traced() -> list[tuple[str, dict[str, NDArray[np.generic]]]]:
    return [(p.stem, dict(np.load(p))) for p in sorted(GOLDEN.glob("trace_s*.npz"))]


def flip_place(ckpt: Checkpoint, name: str) -> int:
    """Byte of the tensor whose high bit matters most: the sign of the largest value, or the top of a scale's exponent."""
    info = ckpt.info(name)
    values = ckpt.read(name)
    if info.dtype == "F8_E8M0":
        return 0
    if name == "embed.weight":  # rows of traced tokens only
        row = int(traced()[1][1]["token"])
        return 2 * (row * values.shape[1] + int(np.abs(values[row].astype(np.float32)).argmax())) + 1
    flat = values.reshape(-1).view(NUMBERS[info.dtype]).astype(np.float32)
    return (int(np.abs(flat).argmax()) + 1) * NUMBERS[info.dtype].itemsize - 1


def notices(ckpt: FlippedCheckpoint) -> bool:
    """Layer and step level with this checkpoint's bytes; a step that refuses to go on has noticed as well."""
    report = verify.Report()
    run = dict(np.load(GOLDEN / "run.npz"))
    traces = [(name, verify.GoldenFile(GOLDEN / f"{name}.npz")) for name, _ in traced()]
    with Engine(ckpt, Settings(backend="host", max_context=64)) as engine:
        try:
            verify.check_layers(engine, run, traces, report)
            verify.check_steps(engine, run, traces, report)
        except NotFiniteError:
            return True
    return bool(report.problems)


@pytest.fixture
def ckpt() -> Iterator[FlippedCheckpoint]:
    opened = FlippedCheckpoint.open(GOLDEN / "checkpoint")
    assert isinstance(opened, FlippedCheckpoint)
    with opened:
        yield opened


def test_the_harness_itself_finds_nothing(ckpt: FlippedCheckpoint) -> None:
    assert not notices(ckpt)


SAMPLE = (
    "embed.weight",
    "head.weight",
    "norm.weight",
    "layers.0.attn.wq_a.weight",
    "layers.2.attn.compressor.wgate.weight",
    "layers.5.attn.indexer.wq_b.weight",
    "layers.3.attn.wo_b.scale",
    "layers.4.engram.wkv.weight",
    "layers.6.hc_ffn_fn",
    "layers.7.ffn.gate.bias",
    "layers.1.ffn.shared_experts.w2.weight",
)


@pytest.mark.parametrize("name", SAMPLE)
def test_one_flipped_bit_is_noticed(ckpt: FlippedCheckpoint, name: str) -> None:
    ckpt.flip = (name, flip_place(ckpt, name))
    assert notices(ckpt)


def traced_experts() -> list[tuple[int, int]]:
    """(layer, expert) of every pick in the traced steps."""
    picks = {
        (layer, int(e)) for _, t in traced() for layer in range(8) for e in np.asarray(t[f"L{layer:02d}.expert_ids"])
    }
    return sorted(picks)


def expert_flips(ckpt: Checkpoint, layer: int, expert: int) -> list[int]:
    """The high bit of the first non-zero code of w1, w2, w3, and of one scale of each."""
    lay = ckpt.expert_layout
    raw = np.empty(lay.nbytes, np.uint8)
    ckpt.read_expert(layer, expert, raw)
    weights = [off + int((raw[off : off + lay.weight_nbytes] >> 4 & 7).argmax()) for off in (0, lay.down_off, lay.up_off)]
    return weights + [lay.weights_nbytes + i * lay.scale_nbytes for i in range(3)]


@pytest.mark.parametrize(("layer", "expert"), [traced_experts()[7], traced_experts()[150]])
def test_a_flipped_bit_in_an_expert_is_noticed(ckpt: FlippedCheckpoint, layer: int, expert: int) -> None:
    at = expert_flips(ckpt, layer, expert)[1]
    ckpt.expert_flip = (layer, expert, at)
    assert notices(ckpt)


@pytest.mark.long
def test_every_tensor(ckpt: FlippedCheckpoint) -> None:
    missed = []
    for name, _ in ckpt.resident_tensors():
        ckpt.flip = (name, flip_place(ckpt, name))
        if not notices(ckpt):
            missed.append(name)
    assert not missed


@pytest.mark.long
def test_every_traced_expert(ckpt: FlippedCheckpoint) -> None:
    missed = []
    for i, (layer, expert) in enumerate(traced_experts()):
        at = expert_flips(ckpt, layer, expert)[i % 6]
        ckpt.expert_flip = (layer, expert, at)
        if not notices(ckpt):
            missed.append((layer, expert, at))
    assert not missed


def test_the_command_fails_on_a_changed_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in GOLDEN.rglob("*"):
        target = tmp_path / path.relative_to(GOLDEN)
        if path.is_dir():
            target.mkdir(exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path.resolve())
    with Checkpoint.open(GOLDEN / "checkpoint") as original:
        name = "layers.3.attn.wq_b.weight"
        shard, place = original._where[name]
        at = place.off + flip_place(original, name)
        data = bytearray(shard.path.read_bytes())
    data[at] ^= 0x80
    changed = tmp_path / "checkpoint" / shard.path.name
    changed.unlink()
    changed.write_bytes(data)
    assert main(["verify", str(tmp_path), "--json", "--backend", "host"]) == 1
    assert not json.loads(capsys.readouterr().out)["ok"]
