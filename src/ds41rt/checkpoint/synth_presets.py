"""The geometries that `synth` can write, in one table of complete model configurations.

- `tiny`: the geometry of the golden checkpoint, published expert count and top-k included.
- `micro`: four layers with every role. Ratios 0, 2, 2, 2: layer 0 is window-only and capturable; layer 1 is KV, index
  and candidate source; layer 2 is capturable and reads compressed rows; layer 3 is an index source only. One ratio
  must do, since a second KV source would leave no capturable compressed layer; 2 has the richer state. Engram sits on
  a source (1) and in mid-segment (2). 16 experts, top 3, keep exhaustive tests short.
- `small`: twelve layers that take some memory and time, both ratios, two reusing layers between sources.
"""

from typing import Any

from ds41rt.config import ModelConfig
from ds41rt.errors import InputError

# What all presets share with the published model.
_SHARED: dict[str, Any] = {
    "rms_eps": 1e-20,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "yarn_factor": 16.0,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "route_scale": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_pad_token": 2,
    "bos_token": 0,
    "eos_token": 1,
    "pad_token": 2,
}

PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(
        **_SHARED,
        n_layers=8,
        dim=128,
        vocab=512,
        n_heads=4,
        head_dim=64,
        rope_dim=16,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=32,
        window=8,
        yarn_original_len=256,
        compress_ratios=(0, 0, 2, 2, 2, 1, 1, 1),
        kv_source_layers=(2, 5),
        index_source_layers=(2, 5, 7),
        candidate_source_layer=5,
        candidate_topk_blocks=6,
        candidate_block_size=2,
        index_heads=32,
        index_head_dim=32,
        index_topk=8,
        n_experts=384,
        top_k=6,
        inter_dim=32,
        engram_layers=(1, 4),
        engram_num_embeddings=(630, 834),
        engram_vocab_size=97,
        engram_max_ngram=4,
        engram_heads=2,
        engram_head_dim=32,
        engram_compressed_vocab=295,
        max_positions=4096,
        image_token=510,
    ),
    "micro": ModelConfig(
        **_SHARED,
        n_layers=4,
        dim=64,
        vocab=288,
        n_heads=2,
        head_dim=32,
        rope_dim=8,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=32,
        window=4,
        yarn_original_len=64,
        compress_ratios=(0, 2, 2, 2),
        kv_source_layers=(1,),
        index_source_layers=(1, 3),
        candidate_source_layer=1,
        candidate_topk_blocks=3,
        candidate_block_size=2,
        index_heads=8,
        index_head_dim=32,
        index_topk=4,
        n_experts=16,
        top_k=3,
        inter_dim=32,
        engram_layers=(1, 2),
        engram_num_embeddings=(152, 220),
        engram_vocab_size=31,
        engram_max_ngram=3,
        engram_heads=2,
        engram_head_dim=32,
        engram_compressed_vocab=240,
        max_positions=1024,
        image_token=286,
    ),
    "small": ModelConfig(
        **_SHARED,
        n_layers=12,
        dim=256,
        vocab=1024,
        n_heads=8,
        head_dim=64,
        rope_dim=32,
        q_lora_rank=128,
        o_groups=4,
        o_lora_rank=64,
        window=32,
        yarn_original_len=512,
        compress_ratios=(0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1),
        kv_source_layers=(2, 4, 6),
        index_source_layers=(2, 4, 6, 9),
        candidate_source_layer=6,
        candidate_topk_blocks=16,
        candidate_block_size=4,
        index_heads=16,
        index_head_dim=64,
        index_topk=32,
        n_experts=128,
        top_k=6,
        inter_dim=128,
        engram_layers=(1, 4),
        engram_num_embeddings=(12458, 13416),
        engram_vocab_size=1009,
        engram_max_ngram=4,
        engram_heads=4,
        engram_head_dim=64,
        engram_compressed_vocab=424,
        max_positions=8192,
        image_token=1022,
    ),
}

# The released model's text part: too large for `synth`, used where its shapes matter and its files do not.
RELEASED = ModelConfig(
    **_SHARED,
    n_layers=40,
    dim=5120,
    vocab=129280,
    n_heads=64,
    head_dim=512,
    rope_dim=64,
    q_lora_rank=1280,
    o_groups=8,
    o_lora_rank=1024,
    window=128,
    yarn_original_len=65536,
    compress_ratios=(0, 0, *(2,) * 18, *(1,) * 20),
    kv_source_layers=(2, 8, 14, 20),
    index_source_layers=(2, 8, 14, 20, 24, 28, 32, 36),
    candidate_source_layer=20,
    candidate_topk_blocks=2048,
    candidate_block_size=8,
    index_heads=32,
    index_head_dim=128,
    index_topk=512,
    n_experts=384,
    top_k=6,
    inter_dim=2304,
    engram_layers=(1, 14),
    engram_num_embeddings=(384_006_168, 384_016_682),
    engram_vocab_size=16_000_000,
    engram_max_ngram=4,
    engram_heads=8,
    engram_head_dim=256,
    engram_compressed_vocab=99_092,
    max_positions=1_048_576,
    image_token=129_264,
)


def first_layers(cfg: ModelConfig, n_layers: int) -> ModelConfig:
    """The same model cut to its first layers, enough of them to hold a source; the last KV source builds candidates."""
    kv = tuple(s for s in cfg.kv_source_layers if s < n_layers)
    if not kv or n_layers > cfg.n_layers:
        raise InputError(f"{n_layers} layers: give {cfg.kv_source_layers[0] + 1} to {cfg.n_layers}")
    engram = [i for i, layer in enumerate(cfg.engram_layers) if layer < n_layers]
    return ModelConfig(
        **{
            **cfg.model_dump(),
            "n_layers": n_layers,
            "compress_ratios": cfg.compress_ratios[:n_layers],
            "kv_source_layers": kv,
            "index_source_layers": tuple(s for s in cfg.index_source_layers if s < n_layers),
            "candidate_source_layer": min(cfg.candidate_source_layer, kv[-1]),
            "engram_layers": tuple(cfg.engram_layers[i] for i in engram),
            "engram_num_embeddings": tuple(cfg.engram_num_embeddings[i] for i in engram),
        }
    )
