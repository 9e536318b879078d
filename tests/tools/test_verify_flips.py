"""`verify` notices one flipped high bit in any tensor that the golden run reads.

The flip is made in memory, between the checkpoint and the engine, in the value of the largest magnitude that a traced
step uses. The default run takes a sample of tensor kinds and two experts, the long run every tensor.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from ds41rt.checkpoint.checkpoint import Checkpoint
from ds41rt.cli import main
from ds41rt.engine import Engine
from ds41rt.errors import NotFiniteError
from ds41rt.kernels.router import select_experts
from ds41rt.settings import Settings
from ds41rt.tools import verify

GOLDEN = Path(__file__).parents[1] / "goldens" / "tiny-a"
NUMBERS = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}


class FlippedCheckpoint(Checkpoint):
    """A checkpoint that hands out one tensor with one bit wrong."""

    flip: tuple[str, int] = ("", 0)
    expert_flip: tuple[int, int, int] | None = None

    def read_into(self, name: str, out: NDArray[np.uint8], offset: int = 0) -> None:
        super().read_into(name, out, offset)
        tensor, at = self.flip
        if name == tensor and offset <= at < offset + out.size:
            out[at - offset] ^= 0x80

    def read_expert(self, layer: int, expert: int, out: NDArray[np.uint8], offset: int = 0) -> None:
        super().read_expert(layer, expert, out, offset)
        if self.expert_flip is not None and self.expert_flip[:2] == (layer, expert):
            at = self.expert_flip[2] - offset
            if 0 <= at < out.size:
                out[at] ^= 0x80


def traced() -> list[tuple[str, dict[str, NDArray[np.generic]]]]:
    return [(p.stem, dict(np.load(p))) for p in sorted(GOLDEN.glob("trace_s*.npz"))]


def flip_place(ckpt: Checkpoint, name: str) -> int:
    """Byte whose high bit matters most: the sign of the largest value, or the top of a scale's exponent."""
    info = ckpt.info(name)
    values = ckpt.read(name)
    if info.dtype == "F8_E8M0":
        return 0
    if name == "embed.weight":  # rows of traced tokens only
        row = int(traced()[1][1]["token"])
        return int(2 * (row * values.shape[1] + int(np.abs(values[row].astype(np.float32)).argmax())) + 1)
    if name.endswith(".gate.bias"):
        return 4 * decisive_bias(int(name.split(".")[1]), values) + 3
    flat = values.reshape(-1).view(NUMBERS[info.dtype]).astype(np.float32)
    place: int = (int(np.abs(flat).argmax()) + 1) * NUMBERS[info.dtype].itemsize - 1
    return place


def decisive_bias(layer: int, bias: NDArray[np.float32]) -> int:
    """An expert whose bias, with the other sign, changes a traced selection: most do not."""
    select = partial(select_experts, top_k=6, temperature=1.0, route_scale=1.5, normalise=True)
    for _, step in traced():
        logits = np.asarray(step[f"L{layer:02d}.router_logits"], np.float32)
        for expert in np.asarray(step[f"L{layer:02d}.expert_ids"]).tolist():
            other = bias.copy()
            other[expert] = -other[expert]
            if expert not in select(logits, other)[0]:
                return int(expert)
    raise AssertionError(f"no traced selection of layer {layer} depends on the sign of a bias")


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


def expert_flips(ckpt: Checkpoint, layer: int, expert: int) -> list[tuple[str, list[int]]]:
    """(tensor, bytes) to flip in turn until one is noticed, as SwiGLU may have made a hidden value zero: codes of w1
    and w3 under the largest input that a high nibble meets, a code of w2 under every input, a scale of each matrix."""
    lay, cfg = ckpt.expert_layout, ckpt.config
    raw = np.empty(lay.nbytes, np.uint8)
    ckpt.read_expert(layer, expert, raw)
    prefix = f"L{layer:02d}."
    step = next(t for _, t in traced() if expert in np.asarray(t[f"{prefix}expert_ids"]))
    column = int(np.abs(np.asarray(step[f"{prefix}moe_in"], np.float32)[1::2]).argmax())
    places: list[tuple[str, list[int]]] = []
    for name, off in (("w1", lay.gate_off), ("w3", lay.up_off)):
        codes = raw[off : off + lay.weight_nbytes].reshape(cfg.inter_dim, cfg.dim // 2)[:, column] >> 4 & 7
        places.append((name, [off + int(row) * cfg.dim // 2 + column for row in np.argsort(-codes)]))
    codes = raw[lay.down_off : lay.down_off + lay.weight_nbytes].reshape(cfg.dim, cfg.inter_dim // 2) >> 4 & 7
    places.append(("w2", [lay.down_off + int(r) * codes.shape[1] + c for c, r in enumerate(codes.argmax(axis=0))]))
    scales = range(0, lay.scale_nbytes, 4)
    places += [(f"s{i + 1}", [lay.weights_nbytes + i * lay.scale_nbytes + at for at in scales]) for i in range(3)]
    return places


@pytest.mark.parametrize(("layer", "expert"), [traced_experts()[7], traced_experts()[150]])
def test_a_flipped_bit_in_an_expert_is_noticed(ckpt: FlippedCheckpoint, layer: int, expert: int) -> None:
    for name, places in expert_flips(ckpt, layer, expert):
        assert any(notices_in_expert(ckpt, layer, expert, at) for at in places), name


def notices_in_expert(ckpt: FlippedCheckpoint, layer: int, expert: int, at: int) -> bool:
    ckpt.expert_flip = (layer, expert, at)
    return notices(ckpt)


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
        name, places = expert_flips(ckpt, layer, expert)[i % 6]
        if not any(notices_in_expert(ckpt, layer, expert, at) for at in places):
            missed.append((layer, expert, name))
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
