"""The generator: deterministic, in the published layout, skewed in its routing, all or nothing on disk."""

import hashlib
from collections import OrderedDict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from shard_files import take_apart, unpack

from ds41rt.checkpoint import synth
from ds41rt.checkpoint.checkpoint import Checkpoint
from ds41rt.checkpoint.engram_table import engram_constants
from ds41rt.checkpoint.synth import synthesize
from ds41rt.checkpoint.synth_presets import PRESETS
from ds41rt.checkpoint.synth_text import build_tokenizer
from ds41rt.checkpoint.token_map import load_token_map, load_tokenizer, rebuild_token_map
from ds41rt.config import ModelConfig
from ds41rt.errors import CheckpointError, InputError

TINY_A = Path(__file__).parents[1] / "goldens" / "tiny-a" / "checkpoint"


def digest(directory: Path) -> str:
    h = hashlib.sha256()
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        h.update(str(path.relative_to(directory)).encode() + path.read_bytes())
    return h.hexdigest()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("synth") / "tiny"
    synthesize(directory, "tiny", 3)
    return directory


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 11), ("b", 11), ("c", 12)):
        synthesize(tmp_path / name, "micro", seed)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert digest(tmp_path / "a") != digest(tmp_path / "c")


def test_tiny_has_the_golden_geometry(tiny: Path) -> None:
    assert ModelConfig.from_checkpoint(tiny) == ModelConfig.from_checkpoint(TINY_A) == PRESETS["tiny"]
    files = sorted(p.name for p in TINY_A.glob("*.safetensors"))
    assert sorted(p.name for p in tiny.glob("*.safetensors")) == files
    for file in files:
        ours, golden = ({n: e[:2] for n, e in unpack(d / file).items()} for d in (tiny, TINY_A))
        assert ours == golden


def test_scales_come_first_and_weights_of_experts_last(tiny: Path) -> None:
    header, _ = take_apart(tiny / "model-00004-of-00012.safetensors")
    header.pop("__metadata__")
    order = sorted(header, key=lambda n: header[n]["data_offsets"])
    assert order == list(header)
    kinds = list(dict.fromkeys(header[n]["dtype"] for n in order))
    assert kinds == ["F8_E8M0", "F32", "BF16", "F8_E4M3", "I8"]
    assert order[:4] == [f"layers.2.ffn.experts.{e}.{w}.scale" for e, w in ((0, "w1"), (0, "w2"), (0, "w3"), (1, "w1"))]


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_is_complete(tmp_path: Path, preset: str) -> None:
    cfg = synthesize(tmp_path / "d", preset, 1)
    assert cfg == PRESETS[preset] == ModelConfig.from_checkpoint(tmp_path / "d")
    assert tuple(c.n_rows for c in engram_constants(cfg)) == cfg.engram_num_embeddings
    assert sum(p.stat().st_size for p in (tmp_path / "d").rglob("*") if p.is_file()) < 200e6
    with Checkpoint.open(tmp_path / "d") as ckpt:
        out = np.empty(ckpt.expert_layout.nbytes, np.uint8)
        ckpt.read_expert(cfg.n_layers - 1, cfg.n_experts - 1, out)
        assert len(np.unique(out[: ckpt.expert_layout.weights_nbytes] & 15)) == 16
    ids = load_token_map(tmp_path / "d", cfg)
    tokenizer = load_tokenizer(tmp_path / "d")
    assert ids.tolist() == rebuild_token_map(tokenizer)
    text = "The graph replays THE memory\tof Tokens — ünï 東\n"
    encoded = tokenizer.encode(text).ids
    assert tokenizer.decode(encoded) == text
    assert len(encoded) < len(text.encode())
    for special, token in (
        ("<｜User｜>", cfg.vocab - 4),
        ("<｜image｜>", cfg.image_token),
        ("</think>", cfg.vocab - 1),
    ):
        assert tokenizer.encode(special).ids == [token]


def test_micro_has_every_role() -> None:
    cfg = PRESETS["micro"]
    assert cfg.n_layers == 4
    capturable = [i for i in range(4) if i not in (*cfg.kv_source_layers, *cfg.index_source_layers)]
    assert capturable[0] == 0
    assert {cfg.compress_ratios[i] > 0 for i in capturable} == {False, True}
    assert set(cfg.index_source_layers) > set(cfg.kv_source_layers)
    assert cfg.candidate_source_layer < max(cfg.index_source_layers)
    assert cfg.candidate_topk_blocks * cfg.candidate_block_size > cfg.index_topk
    assert set(cfg.engram_layers) & set(cfg.kv_source_layers)
    assert set(cfg.engram_layers) & set(capturable)


def deviation(ckpt: Checkpoint, name: str) -> float:
    """Of the values of an FP8 matrix with 32x32 blocks."""
    scales = 2.0 ** (ckpt.read(f"{name}.scale").astype(np.float64) - 127)
    codes = ckpt.read(f"{name}.weight").view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return float((codes * np.repeat(np.repeat(scales, 32, 0), 32, 1)).std())


def test_weight_statistics_resemble_the_golden_checkpoint(tiny: Path) -> None:
    """Deviations within a factor of two, so that activations have the same size."""
    with Checkpoint.open(tiny) as ours, Checkpoint.open(TINY_A) as golden:
        quantised = [f"layers.{i}.attn.{m}" for i in range(8) for m in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")]
        for name in (*quantised, "layers.1.ffn.shared_experts.w1", "layers.4.engram.wkv"):
            assert 0.5 < deviation(ours, name) / deviation(golden, name) < 2, name
        for name in (
            "embed",
            "head",
            "layers.2.ffn.gate",
            "layers.5.attn_norm",
            "layers.5.ffn_norm",
            "layers.2.attn.kv_norm",
        ):
            a, b = (float(np.abs(c.read(f"{name}.weight").astype(np.float32)).mean()) for c in (ours, golden))
            assert 0.8 < a / b < 1.25, name
        codes = ours.read("layers.1.engram.embed.weight")
        assert 0.02 < (codes == 0).all(axis=1).mean() < 0.12


def lru_hit_rate(picks: NDArray[np.int64], slots: int) -> float:
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for token in picks.tolist():
        for expert in token:
            hits += expert in held
            held[expert] = None
            held.move_to_end(expert)
            if len(held) > slots:
                held.popitem(last=False)
    return hits / picks.size


@pytest.mark.parametrize("layer", [0, 5])
def test_routing_is_skewed(tiny: Path, layer: int) -> None:
    """43 % of the experts resident: LRU hits often, never always; nearly every expert is wanted some time."""
    with Checkpoint.open(tiny) as ckpt:
        gate = ckpt.read(f"layers.{layer}.ffn.gate.weight").astype(np.float32)
        bias = ckpt.read(f"layers.{layer}.ffn.gate.bias")
    h = 0.2 * np.random.default_rng(layer).standard_normal((3000, 128)).astype(np.float32)
    scores = np.sqrt(np.log1p(np.exp(h @ gate.T))) + bias
    picks = np.argsort(-scores, axis=1)[:, :6]
    assert 0.80 < lru_hit_rate(picks, int(0.43 * 384)) < 0.97
    counts = np.sort(np.bincount(picks.ravel(), minlength=384))[::-1]
    assert 0.5 < counts[:38].sum() / picks.size < 0.9
    assert (counts > 0).mean() > 0.85


def test_occupied_directory_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "d"
    target.mkdir()
    (target / "mine").write_text("keep")
    with pytest.raises(InputError, match="not an empty directory"):
        synthesize(target, "micro", 1)
    with pytest.raises(InputError, match="not an empty directory"):
        synthesize(target / "mine", "micro", 1)
    assert [p.name for p in tmp_path.rglob("*")] == ["d", "mine"]
    (target / "mine").unlink()
    synthesize(target, "micro", 1)
    Checkpoint.open(target).close()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    calls = 0
    real = synth._write_shard

    def fail(*args):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls == 4:
            raise error
        return real(*args)

    monkeypatch.setattr(synth, "_write_shard", fail)
    with pytest.raises(CheckpointError if isinstance(error, OSError) else KeyboardInterrupt):
        synthesize(tmp_path / "d", "micro", 1)
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="preset 'huge' is unknown; use one of tiny, micro, small"):
        synthesize(tmp_path / "d", "huge", 1)
    with pytest.raises(InputError, match="seed -1"):
        synthesize(tmp_path / "d", "micro", -1)
    for vocab, compressed in ((262, 234), (300, 200), (300, 290), (90_000, 80_000)):
        with pytest.raises(InputError, match="no tokenizer"):
            build_tokenizer(vocab, compressed)
    assert list(tmp_path.iterdir()) == []
