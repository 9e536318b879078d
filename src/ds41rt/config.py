"""The geometry of the text model, merged from the two configuration files of a checkpoint.

`config.json` and `inference/config.json` name the same things differently. `_KEYS` is the only place that knows both
vocabularies: reading, error messages and writing (`to_dicts`) all go through it. Nothing here opens a weight file.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ds41rt.checkpoint.json_file import load_json
from ds41rt.errors import CheckpointError, ConfigError

ROOT_FILE = "config.json"
INFERENCE_FILE = "inference/config.json"
# Block of the FP8 weight scales, both ways, and group of the activation, FP4 weight and index-key scales.
QUANT_BLOCK = 32

Count = Annotated[int, Field(gt=0)]
Index = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class _Key:
    """Where a value stands: dotted paths in the root file (the first one is canonical), key in the inference file."""

    root: tuple[str, ...] = ()
    inference: str | None = None

    @property
    def label(self) -> str:
        return self.root[0] if self.root else f"{INFERENCE_FILE} {self.inference}"


def _text(name: str, inference: str | None = None) -> _Key:
    return _Key((f"text_config.{name}",), inference)


def _both(name: str) -> _Key:
    return _text(name, name)


def _id(name: str) -> _Key:
    return _Key((name, f"text_config.{name}"), name)


_KEYS: dict[str, _Key] = {
    "n_layers": _text("num_hidden_layers", "n_layers"),
    "dim": _text("hidden_size", "dim"),
    "vocab": _both("vocab_size"),
    "n_heads": _text("num_attention_heads", "n_heads"),
    "head_dim": _both("head_dim"),
    "rope_dim": _text("qk_rope_head_dim", "rope_head_dim"),
    "q_lora_rank": _both("q_lora_rank"),
    "o_groups": _both("o_groups"),
    "o_lora_rank": _both("o_lora_rank"),
    "window": _text("sliding_window", "window_size"),
    "rms_eps": _text("rms_norm_eps", "norm_eps"),
    "rope_theta": _both("rope_theta"),
    "compress_rope_theta": _both("compress_rope_theta"),
    "yarn_factor": _text("rope_scaling.factor", "rope_factor"),
    "yarn_beta_fast": _text("rope_scaling.beta_fast", "beta_fast"),
    "yarn_beta_slow": _text("rope_scaling.beta_slow", "beta_slow"),
    "yarn_original_len": _text("rope_scaling.original_max_position_embeddings", "original_seq_len"),
    "compress_ratios": _both("compress_ratios"),
    "kv_source_layers": _text("kv_source_layer_ids", "kv_source_layers"),
    "index_source_layers": _text("index_source_layer_ids", "index_source_layers"),
    "candidate_source_layer": _text("candidate_source_layer_id", "candidate_source_layer"),
    "candidate_topk_blocks": _both("candidate_topk_blocks"),
    "candidate_block_size": _both("candidate_block_size"),
    "index_heads": _both("index_n_heads"),
    "index_head_dim": _both("index_head_dim"),
    "index_topk": _both("index_topk"),
    "n_experts": _both("n_routed_experts"),
    "top_k": _text("num_experts_per_tok", "n_activated_experts"),
    "n_shared_experts": _both("n_shared_experts"),
    "inter_dim": _text("moe_intermediate_size", "moe_inter_dim"),
    "norm_topk_prob": _both("norm_topk_prob"),
    "route_scale": _text("routed_scaling_factor", "route_scale"),
    "gate_temperature": _both("gate_temperature"),
    "swiglu_limit": _both("swiglu_limit"),
    "hc_mult": _both("hc_mult"),
    "sinkhorn_iters": _both("hc_sinkhorn_iters"),
    "hc_eps": _both("hc_eps"),
    "engram_layers": _both("engram_layer_ids"),
    "engram_num_embeddings": _both("engram_num_embeddings"),
    "engram_vocab_size": _both("engram_vocab_size"),
    "engram_max_ngram": _both("engram_max_ngram_size"),
    "engram_heads": _both("engram_n_heads"),
    "engram_head_dim": _both("engram_head_dim"),
    "engram_compressed_vocab": _both("engram_compressed_vocab_size"),
    "engram_pad_token": _text("engram_pad_token_id", "engram_pad_id"),
    "max_positions": _both("max_position_embeddings"),
    "bos_token": _id("bos_token_id"),
    "eos_token": _id("eos_token_id"),
    "pad_token": _id("pad_token_id"),
    "image_token": _id("image_token_id"),
}

# Keys that ds41rt writes nowhere in the inference file, because the published one does not have them either.
_ROOT_ONLY = frozenset({"norm_topk_prob", "max_positions", "bos_token", "eos_token", "pad_token", "gate_temperature"})

# What this runtime implements of the things that have alternatives: key, legal value, must it be present?
_FIXED: tuple[tuple[_Key, Any, bool], ...] = (
    (_Key(("architectures",)), ["DeepseekV41ForCausalLM"], True),
    (_Key(("model_type",)), "deepseek_v41", True),
    (_Key(("quantization_config.quant_method",), "dtype"), "fp8", True),
    (_Key(("quantization_config.activation_scheme",)), "dynamic", True),
    (_Key(("quantization_config.fmt",)), "e4m3", False),
    (_Key(("quantization_config.scale_fmt",), "scale_fmt"), "ue8m0", True),
    (_Key(("quantization_config.weight_block_size",)), [QUANT_BLOCK, QUANT_BLOCK], True),
    (_Key(("quantization_config.expert_dtype",), "expert_dtype"), "fp4", True),
    (_text("num_key_value_heads"), 1, True),
    (_text("hidden_act"), "silu", True),
    (_text("attention_bias"), False, False),
    (_Key(("text_config.tie_word_embeddings", "tie_word_embeddings")), False, False),
    (_text("rope_scaling.rope_type"), "yarn", True),
    (_text("scoring_func", "score_func"), "sqrtsoftplus", True),
    (_text("topk_method"), "noaux_tc", True),
    (_both("n_group"), 1, False),
    (_both("topk_group"), 1, False),
)


class ModelConfig(BaseModel):
    """The text model's geometry and constants, checked; field meanings follow the names of the published model.

    `compress_ratios` holds one entry per backbone layer: 0 = window only, 1 or 2 = positions per compressed row.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    n_layers: Count
    dim: Count
    vocab: Count
    n_heads: Count
    head_dim: Count
    rope_dim: Count
    q_lora_rank: Count
    o_groups: Count
    o_lora_rank: Count
    window: Count
    rms_eps: Positive
    rope_theta: Positive
    compress_rope_theta: Positive
    yarn_factor: Positive
    yarn_beta_fast: Positive
    yarn_beta_slow: Positive
    yarn_original_len: Count
    compress_ratios: tuple[int, ...]
    kv_source_layers: tuple[Index, ...]
    index_source_layers: tuple[Index, ...]
    candidate_source_layer: Index
    candidate_topk_blocks: Count
    candidate_block_size: Count
    index_heads: Count
    index_head_dim: Count
    index_topk: Count
    n_experts: Count
    top_k: Count
    n_shared_experts: Count
    inter_dim: Count
    norm_topk_prob: bool
    route_scale: Positive
    # The published files have no key for it; the published code's value.
    gate_temperature: Positive = 1.0
    swiglu_limit: Positive
    hc_mult: Count
    sinkhorn_iters: Count
    hc_eps: Positive
    engram_layers: tuple[Index, ...]
    engram_num_embeddings: tuple[Count, ...]
    engram_vocab_size: Count
    engram_max_ngram: Annotated[int, Field(ge=2)]
    engram_heads: Count
    engram_head_dim: Count
    engram_compressed_vocab: Count
    engram_pad_token: Index
    max_positions: Count
    bos_token: Index
    eos_token: Index
    pad_token: Index
    image_token: Index

    @classmethod
    def from_checkpoint(cls, directory: str | Path) -> "ModelConfig":
        """Merge and check both files of a checkpoint directory.

        A value is taken from `config.json`, else from `inference/config.json`; there is no default for one that is in
        neither. Raises `ConfigError` naming key and value, `CheckpointError` for a missing or unreadable file.
        """
        root, inference = (_load_object(Path(directory) / name) for name in (ROOT_FILE, INFERENCE_FILE))
        for key, legal, required in _FIXED:
            for place, value in _look_up(key, root, inference, required):
                if not _same(value, legal):
                    raise ConfigError(f"{place} = {value!r} is not supported; ds41rt implements {legal!r}")
        values: dict[str, Any] = {}
        for field, key in _KEYS.items():
            found = _look_up(key, root, inference, cls.model_fields[field].is_required())
            if not found:
                continue
            if field == "compress_ratios":  # entries past the backbone belong to the draft layers
                found = [(place, _head(v, values["n_layers"])) for place, v in found]
            for place, value in found[1:]:
                if not _same(value, found[0][1]):
                    raise ConfigError(f"{found[0][0]} = {found[0][1]!r} but {place} = {value!r}: they must agree")
            value = found[0][1]
            values[field] = tuple(value) if isinstance(value, list) else value
        try:
            return cls(**values)
        except ValidationError as e:
            first = e.errors(include_url=False)[0]
            name, *rest = first["loc"]
            where = _KEYS[str(name)].label + "".join(f"[{i}]" for i in rest)
            raise ConfigError(f"{where} = {first['input']!r}: {first['msg']}") from e

    def to_dicts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The two configuration files (root, inference) that `from_checkpoint` reads back as this object."""
        root: dict[str, Any] = {}
        inference: dict[str, Any] = {}
        for key, value, required in _FIXED:
            if required:
                _store(root, key.root[0], value)
                if key.inference:
                    inference[key.inference] = value
        for field, key in _KEYS.items():
            value = getattr(self, field)
            if field == "gate_temperature" and value == 1.0:
                continue
            value = list(value) if isinstance(value, tuple) else value
            _store(root, key.root[0], value)
            if key.inference and field not in _ROOT_ONLY:
                inference[key.inference] = value
        return root, inference

    def kv_source_of(self, layer: int) -> int | None:
        """The layer whose compressed rows `layer` reads: the last KV source up to it; None for a window-only layer."""
        return self._last(self.kv_source_layers, layer)

    def index_source_of(self, layer: int) -> int | None:
        """The layer whose row selection `layer` attends with; None for a window-only layer."""
        return self._last(self.index_source_layers, layer)

    def _last(self, sources: tuple[int, ...], layer: int) -> int | None:
        return max(s for s in sources if s <= layer) if self.compress_ratios[layer] else None

    @property
    def engram_cols(self) -> int:
        """Rows that one token reads from one engram table: n-gram sizes 2..max times heads."""
        return (self.engram_max_ngram - 1) * self.engram_heads

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_geometry()
        self._check_sources()
        self._check_tokens()
        return self

    def _check_geometry(self) -> None:
        blocked = ("dim", "inter_dim", "head_dim", "q_lora_rank", "o_lora_rank", "index_head_dim", "engram_head_dim")
        for field in blocked:
            if getattr(self, field) % QUANT_BLOCK:
                self._refuse(field, f"must be a multiple of the scale block {QUANT_BLOCK}")
        if self.n_heads % self.o_groups:
            self._refuse("o_groups", f"must divide the {self.n_heads} attention heads")
        if self.rope_dim % 2 or self.rope_dim > min(self.head_dim, self.index_head_dim):
            self._refuse("rope_dim", f"must be even and at most {min(self.head_dim, self.index_head_dim)}")
        if self.hc_mult != 4:
            self._refuse("hc_mult", "ds41rt implements 4 residual streams")
        if self.n_shared_experts != 1:
            self._refuse("n_shared_experts", "ds41rt implements one shared expert")
        if self.top_k > self.n_experts:
            self._refuse("top_k", f"cannot exceed the {self.n_experts} routed experts")
        if self.yarn_beta_fast <= self.yarn_beta_slow:
            self._refuse("yarn_beta_fast", f"must be above beta_slow = {self.yarn_beta_slow}")

    def _check_sources(self) -> None:
        ratios = self.compress_ratios
        if len(ratios) != self.n_layers:
            self._refuse("compress_ratios", f"needs an entry for each of the {self.n_layers} layers")
        for layer, ratio in enumerate(ratios):
            if ratio not in (0, 1, 2):
                self._refuse("compress_ratios", f"entry {layer} is {ratio}; must be 0, 1 or 2")
        for field in ("kv_source_layers", "index_source_layers", "engram_layers"):
            layers = getattr(self, field)
            if list(layers) != sorted(set(layers)):
                self._refuse(field, "must be ascending without repeats")
            for layer in layers:
                if layer >= self.n_layers:
                    self._refuse(field, f"layer {layer} does not exist; there are {self.n_layers} layers")
                if field != "engram_layers" and layer == 0:
                    self._refuse(field, "layer 0 cannot be a source")
                if field != "engram_layers" and ratios[layer] == 0:
                    self._refuse(field, f"layer {layer} has compress ratio 0 and cannot be a source")
        for layer in self.kv_source_layers:
            if layer not in self.index_source_layers:
                self._refuse("index_source_layers", f"the KV source {layer} must select among its own rows")
        for layer, ratio in enumerate(ratios):
            if ratio and not any(s <= layer for s in self.kv_source_layers):
                self._refuse("kv_source_layers", f"layer {layer} has compress ratio {ratio} but no source before it")
            source = self.kv_source_of(layer)
            if source is not None and ratios[source] != ratio:
                self._refuse("compress_ratios", f"layer {layer} has {ratio}, its source {source} has {ratios[source]}")
        candidate = self.candidate_source_layer
        if candidate not in self.index_source_layers or candidate < max(self.kv_source_layers):
            self._refuse("candidate_source_layer", "must be an index source with no KV source after it")
        if len(self.engram_num_embeddings) != len(self.engram_layers):
            self._refuse("engram_num_embeddings", f"needs one entry for each of the layers {self.engram_layers}")

    def _check_tokens(self) -> None:
        for field in ("bos_token", "eos_token", "pad_token", "image_token", "engram_pad_token"):
            if getattr(self, field) >= self.vocab:
                self._refuse(field, f"must be below the vocabulary size {self.vocab}")
        if self.engram_compressed_vocab > self.vocab:
            self._refuse("engram_compressed_vocab", f"cannot exceed the vocabulary size {self.vocab}")

    def _refuse(self, field: str, why: str) -> None:
        value = getattr(self, field)
        raise ConfigError(f"{_KEYS[field].label} = {list(value) if isinstance(value, tuple) else value!r}: {why}")


def _load_object(path: Path) -> dict[str, Any]:
    value = load_json(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, holds a {type(value).__name__}")
    return value


def _look_up(key: _Key, root: dict[str, Any], inference: dict[str, Any], required: bool) -> list[tuple[str, Any]]:
    """(place, value) wherever the key is present and not null, root file first."""
    found = []
    for path in key.root:
        node: Any = root
        for part in path.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if node is not None:
            found.append((f"{ROOT_FILE}: {path}", node))
    if key.inference is not None and inference.get(key.inference) is not None:
        found.append((f"{INFERENCE_FILE}: {key.inference}", inference[key.inference]))
    if required and not found:
        places = [f"{ROOT_FILE}: {p}" for p in key.root]
        places += [f"{INFERENCE_FILE}: {key.inference}"] if key.inference else []
        raise ConfigError(f"model configuration is incomplete: none of {', '.join(places)} is present")
    return found


def _head(value: Any, n: Any) -> Any:
    return value[:n] if isinstance(value, list) and isinstance(n, int) else value


def _same(a: Any, b: Any) -> bool:
    """Equal, with 1 == 1.0 but True != 1."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def _store(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, leaf = path.split(".")
    for part in parents:
        tree = tree.setdefault(part, {})
    tree[leaf] = value
