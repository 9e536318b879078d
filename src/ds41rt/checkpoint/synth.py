"""Deterministic synthetic checkpoints in the published layout: any geometry, random weights, sane activations.

Statistics follow what keeps so small a model well behaved: attention and MoE outputs are small beside the residual
streams (or every rounding difference would grow), routing is skewed by the router bias so that a minority of experts
gets most picks, some experts are large enough to reach both SwiGLU clamps, and some engram rows are zero or tiny.
Every tensor has a generator seeded by (seed, name): bytes do not depend on the order of writing.
"""

import json
import math
import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import NormalDist

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ds41rt.checkpoint.checkpoint import INDEX_FILE
from ds41rt.checkpoint.layout import (
    TensorSpec,
    embed_tensors,
    engram_tensors,
    expert_tensor,
    head_tensors,
    layer_tensors,
)
from ds41rt.checkpoint.safetensors import encode_header
from ds41rt.checkpoint.synth_presets import PRESETS
from ds41rt.checkpoint.synth_text import build_token_map, build_tokenizer
from ds41rt.checkpoint.token_map import MAP_FILE, TOKENIZER_FILE
from ds41rt.config import INFERENCE_FILE, ROOT_FILE, ModelConfig
from ds41rt.errors import CheckpointError, InputError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# Bias between the most and the least wanted expert. Over logits of deviation 0.58 an LRU cache with 43 % of 384
# experts then hits about nine times in ten.
ROUTER_BIAS_SPREAD = 0.65
# One expert in this many, and the shared expert of odd layers, has w1 and w3 2**5 larger and w2 2**10 smaller.
CLAMP_EVERY = 8
_CLAMP_SHIFT = {"w1": 5, "w2": -10, "w3": 5}

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# Deviation of w * sqrt(fan in); with the norms below it sets the size of every activation.
_GAIN = {
    "attn.wq_a": 1.5,
    "attn.wq_b": 1.0,
    "attn.wkv": 1.9,
    "attn.wo_a": 1.6,
    "attn.wo_b": 0.042,
    "attn.indexer.wq_b": 1.06,
    "attn.indexer.wk": 1.0,
    "attn.indexer.weights_proj": 7.8,
    "attn.compressor.wkv": 1.5,
    "attn.compressor.wgate": 40.0,
    "ffn.gate": 2.9,
    "engram.wkv": 0.021,
    "head": 1.0,
    "w1": 1.58,
    "w2": 0.09,
    "w3": 1.58,
}
_NORM_LEVEL = {
    "attn_norm": 0.025,
    "ffn_norm": 0.2,
    "attn.q_norm": 0.95,
    "attn.kv_norm": 0.4,
    "attn.compressor.norm": 0.6,
    "attn.indexer.k_norm": 0.5,
    "norm": 1.0,
}
_DTYPE_ORDER = ("F8_E8M0", "F32", "BF16", "F8_E4M3", "I8")


def synthesize(directory: str | Path, preset: str, seed: int) -> ModelConfig:
    """Write a checkpoint into `directory`, which must not exist or be empty; returns its configuration.

    The directory appears complete or not at all. Raises `InputError` for an unknown preset, a negative seed or an
    occupied directory, `CheckpointError` when it cannot be written.
    """
    directory = Path(directory)
    if preset not in PRESETS:
        raise InputError(f"preset {preset!r} is unknown; use one of {', '.join(PRESETS)}")
    if not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed {seed!r} must be an integer that is not negative")
    cfg = PRESETS[preset]
    partial = directory.parent / f".{directory.name}.{uuid.uuid4().hex}.partial"
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise InputError(f"{directory} exists and is not an empty directory; nothing was written")
        directory.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.mkdir()
            _write_all(partial, cfg, seed)
            os.rename(partial, directory)  # replaces an empty directory, refuses a filled one
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as e:
        raise CheckpointError(f"{directory}: cannot be written: {e.strerror}") from e
    return cfg


def _write_all(directory: Path, cfg: ModelConfig, seed: int) -> None:
    groups = [list(embed_tensors(cfg))]
    groups += [list(layer_tensors(cfg, layer)) for layer in range(cfg.n_layers)]
    groups += [list(head_tensors(cfg))]
    groups += [list(engram_tensors(cfg, layer)) for layer in cfg.engram_layers]
    weight_map: dict[str, str] = {}
    total = 0
    for i, group in enumerate(groups, start=1):
        file = f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        total += _write_shard(directory / file, group, cfg, seed)
        weight_map.update((t.name, file) for t in group)
    root, inference = cfg.to_dicts()
    tokenizer = build_tokenizer(cfg.vocab, cfg.engram_compressed_vocab)
    (directory / INFERENCE_FILE).parent.mkdir()
    for name, content in (
        (ROOT_FILE, root),
        (INFERENCE_FILE, inference),
        (INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}),
        (TOKENIZER_FILE, tokenizer),
        (MAP_FILE, build_token_map(tokenizer)),
    ):
        text = json.dumps(content, indent=None if name == INDEX_FILE else 1, ensure_ascii=False)
        (directory / name).write_text(text + "\n", encoding="utf-8")


def _write_shard(path: Path, specs: Iterable[TensorSpec], cfg: ModelConfig, seed: int) -> int:
    """Scales first and packed experts last, as published; returns the payload in bytes."""
    ordered = sorted(specs, key=lambda t: (_DTYPE_ORDER.index(t.dtype), ".experts." not in t.name))
    total = 0
    with path.open("wb") as out:
        out.write(encode_header({t.name: (t.dtype, t.shape) for t in ordered}))
        blob_written: set[str] = set()
        for t in ordered:
            if ".experts." in t.name:  # all experts of a layer are drawn at once, at the place of the first
                layer, kind = int(t.name.split(".")[1]), t.name.rsplit(".", 1)[1]
                if kind in blob_written:
                    continue
                blob_written.add(kind)
                data = _expert_weights(cfg, layer, seed) if kind == "weight" else _expert_scales(cfg, layer, seed)
            else:
                data = tensor_bytes(t, cfg, seed)
            out.write(data.data)
            total += data.nbytes
    return total


def tensor_bytes(t: TensorSpec, cfg: ModelConfig, seed: int) -> Bytes:
    """The bytes of one tensor that is not a routed expert's."""
    raw = _Raw(seed, t.name)
    short = t.name.split(".", 2)[2] if t.name.startswith("layers.") else t.name
    stem = short.removesuffix(".weight").removesuffix(".scale")
    if stem == "engram.embed":
        row_kind = _Raw(seed, t.name.rsplit(".", 1)[0]).u16(t.shape[0]) % 16
        data = _engram_scales(raw, t.shape, row_kind) if t.dtype == "F8_E8M0" else _engram_codes(raw, t.shape, row_kind)
    elif t.dtype in ("F8_E4M3", "F8_E8M0"):
        data = _fp8_matrix(raw, t, stem, cfg)
    else:
        values = _float_values(raw, stem, t.shape, cfg)
        data = values.astype(ml_dtypes.bfloat16 if t.dtype == "BF16" else np.float32)
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


class _Raw:
    """Raw random words of one tensor, from the bit generator's own stream, which never changes between releases."""

    def __init__(self, seed: int, name: str) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))

    def u16(self, n: int) -> NDArray[np.uint16]:
        words: NDArray[np.uint64] = self._bits.random_raw(-(-n // 4))
        return words.view(np.uint16)[:n]

    def uniform(self, shape: tuple[int, ...]) -> Floats:
        """float32 in (0, 1)."""
        u: Floats = self.u16(math.prod(shape)).astype(np.float32)
        return ((u + np.float32(0.5)) * np.float32(2**-16)).reshape(shape)

    def normal(self, shape: tuple[int, ...]) -> Floats:
        """About standard normal: a sum of four uniforms, so no value beyond 3.5 and no library function in it."""
        u = self.u16(4 * math.prod(shape)).reshape(-1, 4).astype(np.float32).sum(axis=1)
        scaled: Floats = (u * np.float32(2**-16) - np.float32(2.0)) * np.float32(3**0.5)
        return scaled.reshape(shape)


def _float_values(raw: _Raw, stem: str, shape: tuple[int, ...], cfg: ModelConfig) -> Floats:
    if stem in ("ffn.gate.bias", "ffn.gate.bias_vl"):
        return _router_bias(raw, cfg.n_experts)
    if stem in _NORM_LEVEL:
        return np.float32(_NORM_LEVEL[stem]) * (1 + np.float32(0.1) * raw.normal(shape))
    if stem in _GAIN:
        return np.float32(_GAIN[stem] / shape[-1] ** 0.5) * raw.normal(shape)
    simple: dict[str, Callable[[], Floats]] = {
        "embed": lambda: np.float32(0.12) * raw.normal(shape),
        "attn.attn_sink": lambda: np.float32(0.4) * raw.normal(shape),
        "engram.q_weight": lambda: 1 + np.float32(0.3) * raw.normal(shape),
        "engram.k_weight": lambda: 1 + np.float32(0.3) * raw.normal(shape),
    }
    if stem in simple:
        return simple[stem]()
    kind = stem.rsplit("_", 1)[1]  # hc_attn_* and hc_ffn_*
    if kind == "fn":
        return np.float32(shape[-1] ** -0.5) * raw.normal(shape)
    if kind == "base":
        return np.float32(0.5) * raw.normal(shape)
    return np.float32(0.15) + np.float32(0.6) * raw.uniform(shape)


def _router_bias(raw: _Raw, n_experts: int) -> Floats:
    """Zipf-like preference in random order: the bias falls with the logarithm of an expert's rank."""
    rank = np.argsort(np.argsort(raw.uniform((n_experts,)), kind="stable"), kind="stable") + 1
    bias = -ROUTER_BIAS_SPREAD * np.log(rank) / math.log(max(n_experts, 2))
    jittered: Floats = (bias - bias.mean()).astype(np.float32) + np.float32(0.02) * raw.normal((n_experts,))
    return jittered


def _fp8_matrix(raw: _Raw, t: TensorSpec, stem: str, cfg: ModelConfig) -> Bytes:
    """Codes or 32x32 scales of an FP8 matrix; both sides split the wanted deviation the same way."""
    layer, which = int(t.name.split(".")[1]), stem.rsplit(".", 1)[1]
    gain = _GAIN[which] if stem.startswith("ffn.shared_experts.") else _GAIN[stem]
    columns = t.shape[1] * (1 if t.dtype == "F8_E4M3" else 32)
    exponent, code_deviation = _split(gain / columns**0.5, 80.0)
    if t.dtype == "F8_E4M3":
        return _e4m3(raw, t.shape, code_deviation)
    if stem.startswith("ffn.shared_experts.") and layer % 2:
        exponent += _CLAMP_SHIFT[which]
    return _scales(raw, t.shape, exponent)


def expert_bytes(cfg: ModelConfig, n: int, seed: int) -> Bytes:
    """The first `n` experts of layer 0 as uint8[n, expert nbytes], each [w1|w2|w3|s1|s2|s3]."""
    few = cfg.model_copy(update={"n_experts": n})
    parts = [part(few, 0, seed).reshape(n, -1) for part in (_expert_weights, _expert_scales)]
    return np.concatenate(parts, axis=1)


def _expert_weights(cfg: ModelConfig, layer: int, seed: int) -> Bytes:
    """Packed codes of all experts of a layer in file order: two e2m1 codes a byte from one table of 2**16 pairs."""
    raw = _Raw(seed, expert_tensor(layer, 0, "weights"))
    z = np.array([NormalDist().inv_cdf((i + 0.5) / 256) for i in range(256)], np.float32) * np.float32(1.9)
    code = np.abs(np.abs(z)[:, None] - _E2M1).argmin(axis=1).astype(np.uint8) | np.where(z < 0, 8, 0).astype(np.uint8)
    pairs: Bytes = (code[:, None] << 4 | code).reshape(-1)
    return pairs[raw.u16(cfg.n_experts * 3 * cfg.inter_dim * cfg.dim // 2)]


def _expert_scales(cfg: ModelConfig, layer: int, seed: int) -> Bytes:
    """Scales of all experts of a layer in file order, one byte per row and 32 inputs."""
    raw = _Raw(seed, expert_tensor(layer, 0, "scales"))
    n = cfg.inter_dim * cfg.dim // 32
    out = np.empty((cfg.n_experts, 3, n), np.uint8)
    clamped = np.arange(cfg.n_experts) % CLAMP_EVERY == CLAMP_EVERY - 1
    for i, which in enumerate(("w1", "w2", "w3")):
        fan_in = cfg.inter_dim if which == "w2" else cfg.dim
        exponent, _ = _split(_GAIN[which] / fan_in**0.5, 1.35)  # codes deviate by 1.9, in the middle of [1.35, 2.7)
        out[:, i] = _scales(raw, (cfg.n_experts, n), exponent)
        out[clamped, i] += np.uint8(_CLAMP_SHIFT[which] % 256)  # wraps to a subtraction
    return out.reshape(-1)


def _engram_codes(raw: _Raw, shape: tuple[int, ...], row_kind: NDArray[np.uint16]) -> Bytes:
    """One row in sixteen is zero."""
    codes = _e4m3(raw, shape, 130.0)
    codes[row_kind == 0] = 0
    return codes


def _engram_scales(raw: _Raw, shape: tuple[int, ...], row_kind: NDArray[np.uint16]) -> Bytes:
    """Zero rows and one more in sixteen are far below the activation quantiser's floor; others deviate by about 0.5."""
    scales = (118 + raw.u16(math.prod(shape)).reshape(shape) % 3).astype(np.uint8)
    scales[row_kind == 0] = 92
    scales[row_kind == 1] = 99
    return scales


def _split(deviation: float, code_deviation: float) -> tuple[int, float]:
    """`deviation` as 2**e times a code deviation in [code_deviation, 2 * code_deviation): (e, that deviation)."""
    exponent = math.floor(math.log2(deviation / code_deviation))
    return exponent, deviation / 2.0**exponent


def _scales(raw: _Raw, shape: tuple[int, ...], exponent: int) -> Bytes:
    """E8M0 bytes around an exponent: three in four exact, the others one up or down."""
    pick = raw.u16(math.prod(shape)).reshape(shape) & 7
    scales: Bytes = (127 + exponent + (pick == 0).astype(np.int16) - (pick == 1)).astype(np.uint8)
    return scales


def _e4m3(raw: _Raw, shape: tuple[int, ...], deviation: float) -> Bytes:
    """Codes of normal values with this deviation, from 2,048 quantiles."""
    z = np.array([NormalDist().inv_cdf((i + 0.5) / 2048) for i in range(2048)]) * deviation
    codes: Bytes = np.clip(z, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    picked: Bytes = codes[raw.u16(math.prod(shape)).reshape(shape) >> 5]
    return picked
