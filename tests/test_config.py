"""The model configuration: two files, one meaning; nothing that matters is guessed or let through."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from ds41rt.config import ModelConfig
from ds41rt.errors import ConfigError

TINY_A = Path(__file__).parent / "goldens" / "tiny-a" / "checkpoint"
GOLDEN = ModelConfig.from_checkpoint(TINY_A)
ROOT: dict[str, Any] = json.loads((TINY_A / "config.json").read_text())
INFERENCE: dict[str, Any] = json.loads((TINY_A / "inference" / "config.json").read_text())
MISSING = object()


def load(tmp_path: Path, root: dict[str, Any], inference: dict[str, Any]) -> ModelConfig:
    (tmp_path / "inference").mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(root))
    (tmp_path / "inference" / "config.json").write_text(json.dumps(inference))
    return ModelConfig.from_checkpoint(tmp_path)


def change(tree: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    out = copy.deepcopy(tree)
    *parents, leaf = path.split(".")
    node = out
    for part in parents:
        node = node[part]
    if value is MISSING:
        node.pop(leaf, None)
    else:
        node[leaf] = value
    return out


def test_golden_values() -> None:
    assert (GOLDEN.n_layers, GOLDEN.dim, GOLDEN.vocab, GOLDEN.n_experts, GOLDEN.top_k) == (8, 128, 512, 384, 6)
    assert GOLDEN.compress_ratios == (0, 0, 2, 2, 2, 1, 1, 1)
    assert (GOLDEN.rms_eps, GOLDEN.hc_eps, GOLDEN.rope_theta, GOLDEN.compress_rope_theta) == (1e-20, 1e-6, 1e4, 1.6e5)
    assert (GOLDEN.yarn_factor, GOLDEN.yarn_beta_fast, GOLDEN.yarn_beta_slow, GOLDEN.yarn_original_len) == (
        16,
        32,
        1,
        256,
    )
    assert (GOLDEN.bos_token, GOLDEN.eos_token, GOLDEN.pad_token, GOLDEN.image_token) == (0, 1, 2, 510)
    assert (GOLDEN.gate_temperature, GOLDEN.norm_topk_prob, GOLDEN.engram_cols) == (1.0, True, 6)
    assert [GOLDEN.kv_source_of(i) for i in range(8)] == [None, None, 2, 2, 2, 5, 5, 5]
    assert [GOLDEN.index_source_of(i) for i in range(8)] == [None, None, 2, 2, 2, 5, 5, 7]


def published(tmp_path: Path) -> ModelConfig:
    """The released geometry, with its 43 ratios."""
    values: dict[str, Any] = {
        "num_hidden_layers": 40,
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0, 0, 0],
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "candidate_source_layer_id": 20,
        "engram_layer_ids": [1, 14],
    }
    root = copy.deepcopy(ROOT)
    root["text_config"].update(values)
    return load(tmp_path, root, {})


def test_published_sources(tmp_path: Path) -> None:
    cfg = published(tmp_path)
    assert len(cfg.compress_ratios) == 40
    assert [cfg.kv_source_of(i) for i in (1, 2, 7, 8, 19, 20, 39)] == [None, 2, 2, 8, 14, 20, 20]
    assert [cfg.index_source_of(i) for i in (1, 2, 13, 20, 23, 24, 27, 39)] == [None, 2, 8, 20, 20, 24, 24, 36]


@pytest.mark.parametrize(
    ("root_path", "inference_key"),
    [
        ("text_config.hidden_size", "dim"),
        ("text_config.num_experts_per_tok", "n_activated_experts"),
        ("text_config.rope_scaling.factor", "rope_factor"),
        ("text_config.kv_source_layer_ids", "kv_source_layers"),
        ("text_config.engram_pad_token_id", "engram_pad_id"),
        ("text_config.scoring_func", "score_func"),
        ("quantization_config.expert_dtype", "expert_dtype"),
        ("image_token_id", "image_token_id"),
    ],
)
def test_falls_back_to_the_inference_file_and_never_further(tmp_path: Path, root_path: str, inference_key: str) -> None:
    root = change(ROOT, root_path, MISSING)
    assert load(tmp_path, root, INFERENCE) == GOLDEN
    assert load(tmp_path, change(ROOT, root_path, None), INFERENCE) == GOLDEN
    assert load(tmp_path, ROOT, change(INFERENCE, inference_key, MISSING)) == GOLDEN
    with pytest.raises(ConfigError) as error:
        load(tmp_path, root, change(INFERENCE, inference_key, MISSING))
    assert root_path in str(error.value)
    assert inference_key in str(error.value)


def test_every_required_key_is_missed(tmp_path: Path) -> None:
    """Each value in turn is taken out of both files: nothing has a default but the gate temperature."""
    from ds41rt.config import _KEYS

    for field, key in _KEYS.items():
        root, inference = ROOT, INFERENCE
        for path in key.root:
            root = change(root, path, MISSING) if path.split(".")[0] in root else root
        if key.inference:
            inference = change(inference, key.inference, MISSING)
        if field == "gate_temperature":
            assert load(tmp_path, root, inference).gate_temperature == 1.0
            continue
        with pytest.raises(ConfigError, match=key.root[0].rsplit(".", 1)[-1]):
            load(tmp_path, root, inference)


def test_ids_may_stand_in_the_text_part(tmp_path: Path) -> None:
    root = change(change(ROOT, "eos_token_id", MISSING), "text_config.eos_token_id", 3)
    assert load(tmp_path, root, INFERENCE).eos_token == 3
    with pytest.raises(ConfigError, match="they must agree"):
        load(tmp_path, change(root, "eos_token_id", 4), INFERENCE)


@pytest.mark.parametrize(
    ("inference_key", "value"),
    [
        ("dim", 256),
        ("rope_theta", 10001),
        ("compress_ratios", [0, 0, 2, 2, 2, 2, 1, 1]),
        ("vocab_size", True),
        ("engram_vocab_size", 98),
    ],
)
def test_files_that_disagree(tmp_path: Path, inference_key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"but inference/config.json: {inference_key} = .*must agree") as error:
        load(tmp_path, ROOT, change(INFERENCE, inference_key, value))
    assert "config.json: text_config." in str(error.value)


# Root key (inside text_config unless it has a dot), value, and what the message must name besides the key.
REFUSED: list[tuple[str, Any, str]] = [
    ("scoring_func", "sigmoid", "'sigmoid'"),
    ("topk_method", "greedy", "'greedy'"),
    ("hidden_act", "gelu", "'gelu'"),
    ("num_key_value_heads", 2, "2"),
    ("num_key_value_heads", True, "True"),
    ("n_group", 8, "8"),
    ("attention_bias", True, "True"),
    ("attention_bias", 0, "0"),
    ("rope_scaling.rope_type", "linear", "'linear'"),
    (".quantization_config.quant_method", "awq", "'awq'"),
    (".quantization_config.weight_block_size", [128, 128], "[128, 128]"),
    (".quantization_config.scale_fmt", "fp32", "'fp32'"),
    (".quantization_config.fmt", "e5m2", "'e5m2'"),
    (".quantization_config.expert_dtype", "fp8", "'fp8'"),
    (".quantization_config.activation_scheme", "static", "'static'"),
    (".architectures", ["LlamaForCausalLM"], "LlamaForCausalLM"),
    (".model_type", "deepseek_v4", "'deepseek_v4'"),
    ("num_experts_per_tok", 0, "0"),
    ("num_experts_per_tok", -1, "-1"),
    ("num_experts_per_tok", 385, "385"),
    ("num_experts_per_tok", 6.0, "6.0"),
    ("num_experts_per_tok", "6", "'6'"),
    ("num_experts_per_tok", True, "True"),
    ("n_shared_experts", 2, "2"),
    ("hc_mult", 2, "2"),
    ("hc_sinkhorn_iters", 0, "0"),
    ("hidden_size", 144, "144"),
    ("moe_intermediate_size", 48, "48"),
    ("index_head_dim", 40, "40"),
    ("engram_head_dim", 16, "16"),
    ("o_lora_rank", 16, "16"),
    ("o_groups", 3, "3"),
    ("qk_rope_head_dim", 15, "15"),
    ("qk_rope_head_dim", 34, "34"),
    ("rms_norm_eps", 0, "0"),
    ("rope_theta", -1.0, "-1.0"),
    ("swiglu_limit", "10", "'10'"),
    ("norm_topk_prob", 1, "1"),
    ("sliding_window", 0, "0"),
    ("rope_scaling.beta_fast", 1, "1"),
    ("compress_ratios", [0, 0, 2, 2, 2, 1, 1, 4], "entry 7 is 4"),
    ("compress_ratios", [0, 0, 2, 2, 2, 1, 1], "8 layers"),
    ("compress_ratios", [0, 0, 2, 2, 2, 1, 2, 1], "layer 6 has 2"),
    ("compress_ratios", [0, 2, 2, 2, 2, 1, 1, 1], "layer 1 has compress ratio 2"),
    ("compress_ratios", 2, "2"),
    ("kv_source_layer_ids", [2, 5, 8], "layer 8"),
    ("kv_source_layer_ids", [5, 2], "ascending"),
    ("kv_source_layer_ids", [2, 2, 5], "ascending"),
    ("kv_source_layer_ids", [0, 2, 5], "layer 0 cannot"),
    ("kv_source_layer_ids", [1, 2, 5], "ratio 0"),
    ("kv_source_layer_ids", [5], "no source before"),
    ("kv_source_layer_ids", [], "no source before"),
    ("index_source_layer_ids", [2, 7], "KV source 5"),
    ("index_source_layer_ids", [-1, 2, 5], "-1"),
    ("candidate_source_layer_id", 6, "6"),
    ("candidate_source_layer_id", 2, "no KV source after"),
    ("engram_layer_ids", [1, 9], "layer 9"),
    ("engram_num_embeddings", [630], "one entry for each"),
    ("engram_max_ngram_size", 1, "1"),
    ("engram_pad_token_id", 512, "512"),
    ("engram_compressed_vocab_size", 513, "513"),
    (".image_token_id", 512, "512"),
    (".bos_token_id", -1, "-1"),
    ("vocab_size", 0, "0"),
    ("num_hidden_layers", "8", "'8'"),
    ("num_hidden_layers", 10**12, "1000000000000"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "says"), REFUSED)
def test_refused_by_key_and_value(tmp_path: Path, path: str, value: Any, says: str) -> None:
    where = path[1:] if path.startswith(".") else f"text_config.{path}"
    with pytest.raises(ConfigError) as error:
        load(tmp_path, change(ROOT, where, value), {})  # the inference file would only say that they differ
    assert says in str(error.value)


@pytest.mark.parametrize("top_k", [1, 6, 8, 17, 384])
def test_any_top_k_up_to_the_expert_count(tmp_path: Path, top_k: int) -> None:
    assert load(tmp_path, change(ROOT, "text_config.num_experts_per_tok", top_k), {}).top_k == top_k


def test_infinite_values_are_refused(tmp_path: Path) -> None:
    load(tmp_path, ROOT, INFERENCE)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"routed_scaling_factor": 1.5', '"routed_scaling_factor": 1e999'))
    (tmp_path / "inference" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="routed_scaling_factor = inf"):
        ModelConfig.from_checkpoint(tmp_path)


def test_written_files_read_back(tmp_path: Path) -> None:
    cfg = GOLDEN.model_copy(update={"gate_temperature": 0.5, "top_k": 17})
    assert load(tmp_path, *cfg.to_dicts()) == cfg
    root, inference = GOLDEN.to_dicts()
    assert load(tmp_path, root, inference) == GOLDEN
    ours = {k for k in inference if k not in INFERENCE}
    assert ours <= {"scale_fmt"}


def test_it_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        GOLDEN.dim = 5
