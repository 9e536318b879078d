"""Which tensors a text model has: name, dtype and shape, derived from the configuration alone.

The reader checks files against this table and the generator writes from it. It opens nothing.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ds41rt.config import QUANT_BLOCK, ModelConfig

_ITEM_NBYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}


class TensorSpec(NamedTuple):
    """A tensor that must be in the checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_NBYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """One routed expert as bytes, in file order: [w1 | w2 | w3 | s1 | s2 | s3] (gate, down, up; then their scales).

    A matrix's scales stand at its own offset plus `*_scale_disp`, so one pointer per matrix is enough.
    """

    weight_nbytes: int
    scale_nbytes: int

    @classmethod
    def of(cls, cfg: ModelConfig) -> "ExpertLayout":
        values = cfg.inter_dim * cfg.dim
        return cls(values // 2, values // QUANT_BLOCK)

    @property
    def weights_nbytes(self) -> int:
        """The three weight matrices: also the offset of the first scale."""
        return 3 * self.weight_nbytes

    @property
    def scales_nbytes(self) -> int:
        return 3 * self.scale_nbytes

    @property
    def nbytes(self) -> int:
        return self.weights_nbytes + self.scales_nbytes

    def weights_among(self, offset: int, nbytes: int) -> int:
        """How many of the `nbytes` from byte `offset` on are weights; the scales come after them."""
        return min(max(self.weights_nbytes - offset, 0), nbytes)

    @property
    def gate_off(self) -> int:
        return 0

    @property
    def down_off(self) -> int:
        return self.weight_nbytes

    @property
    def up_off(self) -> int:
        return 2 * self.weight_nbytes

    @property
    def gate_scale_disp(self) -> int:
        return 3 * self.weight_nbytes

    @property
    def down_scale_disp(self) -> int:
        return 2 * self.weight_nbytes + self.scale_nbytes

    @property
    def up_scale_disp(self) -> int:
        return self.weight_nbytes + 2 * self.scale_nbytes


def text_tensors(cfg: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of the text model, lazily (a wrong configuration must not make a table of a billion names)."""
    yield from embed_tensors(cfg)
    for layer in range(cfg.n_layers):
        yield from layer_tensors(cfg, layer)
    yield from head_tensors(cfg)
    for layer in cfg.engram_layers:
        yield from engram_tensors(cfg, layer)


def resident_tensors(cfg: ModelConfig) -> Iterator[TensorSpec]:
    """The text tensors that stay on the device for a whole run: no routed experts, engram tables or image biases."""
    for spec in text_tensors(cfg):
        if ".experts." not in spec.name and ".engram.embed." not in spec.name and not spec.name.endswith(".bias_vl"):
            yield spec


def embed_tensors(cfg: ModelConfig) -> Iterator[TensorSpec]:
    yield TensorSpec("embed.weight", "BF16", (cfg.vocab, cfg.dim))


def head_tensors(cfg: ModelConfig) -> Iterator[TensorSpec]:
    yield TensorSpec("head.weight", "BF16", (cfg.vocab, cfg.dim))
    yield TensorSpec("norm.weight", "BF16", (cfg.dim,))


def layer_tensors(cfg: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    """One layer without its engram tables; routed experts in ascending order, w1, w2, w3 of one side by side."""
    at = f"layers.{layer}."
    dim, head, heads, qr = cfg.dim, cfg.head_dim, cfg.n_heads, cfg.q_lora_rank
    for site in ("attn", "ffn"):
        mixes, width = (2 + cfg.hc_mult) * cfg.hc_mult, cfg.hc_mult * dim
        yield TensorSpec(f"{at}{site}_norm.weight", "BF16", (dim,))
        yield TensorSpec(f"{at}hc_{site}_fn", "F32", (mixes, width))
        yield TensorSpec(f"{at}hc_{site}_base", "F32", (mixes,))
        yield TensorSpec(f"{at}hc_{site}_scale", "F32", (3,))
    yield from _fp8(f"{at}attn.wq_a", qr, dim)
    yield TensorSpec(f"{at}attn.q_norm.weight", "BF16", (qr,))
    yield from _fp8(f"{at}attn.wq_b", heads * head, qr)
    yield from _fp8(f"{at}attn.wkv", head, dim)
    yield TensorSpec(f"{at}attn.kv_norm.weight", "BF16", (head,))
    yield from _fp8(f"{at}attn.wo_a", cfg.o_groups * cfg.o_lora_rank, heads * head // cfg.o_groups)
    yield from _fp8(f"{at}attn.wo_b", dim, cfg.o_groups * cfg.o_lora_rank)
    yield TensorSpec(f"{at}attn.attn_sink", "F32", (heads,))
    if layer in cfg.kv_source_layers:
        yield TensorSpec(f"{at}attn.compressor.wkv.weight", "BF16", (head, dim))
        yield TensorSpec(f"{at}attn.compressor.norm.weight", "BF16", (head,))
        if cfg.compress_ratios[layer] == 2:
            yield TensorSpec(f"{at}attn.compressor.wgate.weight", "BF16", (head, dim))
        yield TensorSpec(f"{at}attn.indexer.wk.weight", "BF16", (cfg.index_head_dim, head))
        yield TensorSpec(f"{at}attn.indexer.k_norm.weight", "BF16", (cfg.index_head_dim,))
    if layer in cfg.index_source_layers:
        yield from _fp8(f"{at}attn.indexer.wq_b", cfg.index_heads * cfg.index_head_dim, qr)
        yield TensorSpec(f"{at}attn.indexer.weights_proj.weight", "BF16", (cfg.index_heads, dim))
    yield TensorSpec(f"{at}ffn.gate.weight", "BF16", (cfg.n_experts, dim))
    yield TensorSpec(f"{at}ffn.gate.bias", "F32", (cfg.n_experts,))
    yield TensorSpec(f"{at}ffn.gate.bias_vl", "F32", (cfg.n_experts,))
    yield from _fp8(f"{at}ffn.shared_experts.w1", cfg.inter_dim, dim)
    yield from _fp8(f"{at}ffn.shared_experts.w2", dim, cfg.inter_dim)
    yield from _fp8(f"{at}ffn.shared_experts.w3", cfg.inter_dim, dim)
    for expert in range(cfg.n_experts):
        for which, rows, cols in (("w1", cfg.inter_dim, dim), ("w2", dim, cfg.inter_dim), ("w3", cfg.inter_dim, dim)):
            name = expert_tensor(layer, expert, which)
            yield TensorSpec(f"{name}.weight", "I8", (rows, cols // 2))
            yield TensorSpec(f"{name}.scale", "F8_E8M0", (rows, cols // QUANT_BLOCK))


def engram_tensors(cfg: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    at = f"layers.{layer}.engram."
    rows = cfg.engram_num_embeddings[cfg.engram_layers.index(layer)]
    yield TensorSpec(f"{at}embed.weight", "F8_E4M3", (rows, cfg.engram_head_dim))
    yield TensorSpec(f"{at}embed.scale", "F8_E8M0", (rows, cfg.engram_head_dim // QUANT_BLOCK))
    yield from _fp8(f"{at}wkv", (cfg.hc_mult + 1) * cfg.dim, cfg.engram_cols * cfg.engram_head_dim)
    yield TensorSpec(f"{at}q_weight", "BF16", (cfg.hc_mult, cfg.dim))
    yield TensorSpec(f"{at}k_weight", "BF16", (cfg.hc_mult, cfg.dim))


def expert_tensor(layer: int, expert: int, which: str) -> str:
    """Name of a routed expert's matrix ("w1", "w2" or "w3") without `.weight` or `.scale`."""
    return f"layers.{layer}.ffn.experts.{expert}.{which}"


def _fp8(name: str, rows: int, cols: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", "F8_E4M3", (rows, cols))
    yield TensorSpec(f"{name}.scale", "F8_E8M0", (rows // QUANT_BLOCK, cols // QUANT_BLOCK))
