"""Every kernel launch of a decode step, prepared once: the eager step and the captured bodies enqueue the same objects.

Nothing a token changes is an argument: position, selections, a sequence's buffers, expert pointers and weights are read
from device memory. This file knows the model's wiring; it must not know streams, segments or where experts come from.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ds41rt.attn.sequence import BlockLayout
from ds41rt.config import ModelConfig
from ds41rt.cu.backend import GpuBackend
from ds41rt.cu.kernel import KernelLaunch, KernelSpec
from ds41rt.engram.rows import EngramUpload
from ds41rt.kernels import attention, compressor, experts, gather, hc, head, indexer, linear, projection, router
from ds41rt.kernels import engram as engram_kernels
from ds41rt.moe.arena import ExpertArena
from ds41rt.moe.gather import GatherBuffers
from ds41rt.moe.guess import GuessBuffers
from ds41rt.moe.slots import SlotTable
from ds41rt.step.buffers import StepBuffers
from ds41rt.step.weights import DeviceWeights

Launches = tuple[KernelLaunch, ...]


@dataclass(frozen=True, slots=True)
class LayerLaunches:
    """One layer's launches in the order of the step. Empty tuples and None where the layer has no such part."""

    embed: Launches  # layer 0
    engram: Launches
    attn_in: KernelLaunch
    qkv: Launches
    compress: Launches  # KV sources
    index_q: KernelLaunch | None  # index sources
    index_score: KernelLaunch | None
    index_score_stale: KernelLaunch | None  # against the keys of the last KV source (the published code's reading)
    attn_core: Launches
    ffn_in: KernelLaunch
    shared: Launches
    router: KernelLaunch
    route_select: KernelLaunch
    guess: Launches  # the layer's router and selection on what the layer before gives its own; () without prefetch
    experts: Launches  # with a host tier the gathering of its picks goes first
    combine: KernelLaunch
    final: Launches  # last layer: the collapse for the head


class LaunchBuilder:
    """Builds the launches of all layers and of the head from addresses that stay put for the engine's life."""

    def __init__(
        self,
        backend: GpuBackend,
        cfg: ModelConfig,
        weights: DeviceWeights,
        buffers: StepBuffers,
        block_ptr: int,
        engram: EngramUpload | None,
        arena: ExpertArena,
        table: SlotTable,
        gathered: GatherBuffers | None,
        guess: GuessBuffers | None,
        max_context: int,
    ) -> None:
        self._backend = backend
        self._cfg = cfg
        self._weights = weights
        self._buf = buffers
        self._lay = BlockLayout.of(cfg)
        self._block = block_ptr
        self._engram = engram
        self._arena = arena
        self._table = table
        self._gathered = gathered
        self._guess_buffers = guess
        self._max_context = max_context

    def head(self) -> KernelLaunch:
        cfg, buf, w = self._cfg, self._buf, self._weights
        return self._backend.prepare(
            head.HEAD,
            {
                "hidden": buf.hidden, "norm_w": w.ptr("norm.weight"), "w": w.ptr("head.weight"),
                "normed": buf.final_normed, "logits": buf.vocab_logits.ptr,
                "dim": cfg.dim, "vocab": cfg.vocab, "eps": cfg.rms_eps,
            },
            "head",
        )  # fmt: skip

    def layer(self, layer: int) -> LayerLaunches:
        cfg = self._cfg
        return LayerLaunches(
            embed=(self._embed(),) if layer == 0 else (),
            engram=self._engram_apply(layer, self._engram) if self._engram and layer in cfg.engram_layers else (),
            attn_in=self._attn_in(layer),
            qkv=self._qkv(layer),
            compress=self._compress(layer) if layer in cfg.kv_source_layers else (),
            index_q=self._index_q(layer) if layer in cfg.index_source_layers else None,
            index_score=self._index_score(layer, cfg.kv_source_of(layer)),
            index_score_stale=self._index_score(layer, cfg.kv_source_layers[-1] if cfg.kv_source_layers else None),
            attn_core=self._attn_core(layer),
            ffn_in=self._ffn_in(layer),
            shared=self._shared(layer),
            router=self._router(layer),
            route_select=self._route_select(layer),
            guess=self._guess(layer),
            experts=self._experts(layer),
            combine=self._combine(layer),
            final=(self._final(layer),) if layer == cfg.n_layers - 1 else (),
        )

    def _prepare(self, layer: int, name: str, spec: KernelSpec, args: Mapping[str, int | float]) -> KernelLaunch:
        return self._backend.prepare(spec, args, f"L{layer:02d}.{name}")

    def _w(self, layer: int, name: str) -> int:
        return self._weights.ptr(f"layers.{layer}.{name}")

    def _quantised(self, layer: int, name: str) -> tuple[int, int]:
        """Addresses of a weight matrix and of its scale blocks."""
        return self._w(layer, f"{name}.weight"), self._w(layer, f"{name}.scale")

    def _rope(self, layer: int) -> int:
        """The rotary cell of the current position: layers without compressed rows have frequencies of their own."""
        yarn = self._cfg.compress_ratios[layer] > 0
        return self._block + (self._lay.rope_yarn_off if yarn else self._lay.rope_plain_off)

    @property
    def _step(self) -> int:
        return self._block + self._lay.step_off

    def _embed(self) -> KernelLaunch:
        cfg, buf = self._cfg, self._buf
        args = {
            "embed": self._weights.ptr("embed.weight"), "step": self._step, "streams": buf.streams,
            "pre_prev": buf.pre_prev, "vocab": cfg.vocab, "dim": cfg.dim, "hc": cfg.hc_mult,
        }  # fmt: skip
        return self._prepare(0, "embed", hc.EMBED_EXPAND, args)

    def _final(self, layer: int) -> KernelLaunch:
        cfg, buf = self._cfg, self._buf
        args = {"streams": buf.streams, "pre": buf.pre_prev, "hidden": buf.hidden, "dim": cfg.dim, "hc": cfg.hc_mult}
        return self._prepare(layer, "final_collapse", hc.HC_COLLAPSE, args)

    def _engram_apply(self, layer: int, rows: EngramUpload) -> Launches:
        cfg, buf = self._cfg, self._buf
        cols = (cfg.engram_max_ngram - 1) * cfg.engram_heads
        w, ws = self._quantised(layer, "engram.wkv")
        kv = {
            "codes": rows.codes_ptr[layer], "scales": rows.scales_ptr[layer], "w": w, "ws": ws,
            "kv": buf.engram_kv, "cols": cols, "head_dim": cfg.engram_head_dim,
            "n": (cfg.hc_mult + 1) * cfg.dim, "k": cols * cfg.engram_head_dim,
        }  # fmt: skip
        apply = {
            "kv": buf.engram_kv, "q_weight": self._w(layer, "engram.q_weight"),
            "k_weight": self._w(layer, "engram.k_weight"), "streams": buf.streams, "gate": buf.engram_gate,
            "dim": cfg.dim, "hc": cfg.hc_mult, "eps": cfg.rms_eps,
        }  # fmt: skip
        return (
            self._prepare(layer, "engram_kv", engram_kernels.ENGRAM_KV, kv),
            self._prepare(layer, "engram_apply", engram_kernels.ENGRAM_APPLY, apply),
        )

    def _mixes(self, layer: int, site: str) -> dict[str, int | float]:
        """Arguments that both hyper-connection sites of a layer share in form."""
        cfg, buf = self._cfg, self._buf
        return {
            "streams": buf.streams, "fn": self._w(layer, f"hc_{site}_fn"), "scale": self._w(layer, f"hc_{site}_scale"),
            "base": self._w(layer, f"hc_{site}_base"), "norm_w": self._w(layer, f"{site}_norm.weight"),
            "post": buf.post, "comb": buf.comb, "hidden": buf.hidden, "normed": buf.normed, "work": buf.mix_work.ptr,
            "dim": cfg.dim, "hc": cfg.hc_mult, "iters": cfg.sinkhorn_iters, "eps": cfg.rms_eps, "hc_eps": cfg.hc_eps,
        }  # fmt: skip

    def _attn_in(self, layer: int) -> KernelLaunch:
        args = {**self._mixes(layer, "attn"), "pre_in": self._buf.pre_prev, "pre_out": self._buf.pre_a}
        return self._prepare(layer, "attn_in", hc.HC_IN, args)

    def _ffn_in(self, layer: int) -> KernelLaunch:
        # pre_prev is free from the attention input on, so the ffn site's pre goes there directly
        buf = self._buf
        args = {**self._mixes(layer, "ffn"), "pre_in": buf.pre_a, "pre_out": buf.pre_prev, "y": buf.attn_out}
        return self._prepare(layer, "ffn_in", hc.HC_EXPAND_IN, args)

    def _qkv(self, layer: int) -> Launches:
        cfg, buf = self._cfg, self._buf
        wq_a, sq_a = self._quantised(layer, "attn.wq_a")
        wkv, skv = self._quantised(layer, "attn.wkv")
        wq_b, sq_b = self._quantised(layer, "attn.wq_b")
        qkv_a = {
            "normed": buf.normed, "wq_a": wq_a, "sq_a": sq_a, "wkv": wkv, "skv": skv, "qa": buf.qa, "kv": buf.kv,
            "dim": cfg.dim, "q_rank": cfg.q_lora_rank, "head_dim": cfg.head_dim,
        }  # fmt: skip
        q = {
            "qa": buf.qa, "q_norm": self._w(layer, "attn.q_norm.weight"), "wq_b": wq_b, "sq_b": sq_b, "kv": buf.kv,
            "kv_norm": self._w(layer, "attn.kv_norm.weight"), "rope": self._rope(layer), "step": self._step,
            "ring_cell": self._block + self._lay.ring_off[layer], "qr": buf.qr, "q": buf.q,
            "q_rank": cfg.q_lora_rank, "heads": cfg.n_heads, "head_dim": cfg.head_dim, "rope_dim": cfg.rope_dim,
            "window": cfg.window, "eps": cfg.rms_eps,
        }  # fmt: skip
        return (
            self._prepare(layer, "qkv_a", projection.ATTN_QKV_A, qkv_a),
            self._prepare(layer, "q_b", projection.ATTN_Q, q),
        )

    def _compress(self, layer: int) -> Launches:
        cfg, buf, lay = self._cfg, self._buf, self._lay
        ratio = cfg.compress_ratios[layer]
        proj = {
            "normed": buf.normed, "wkv": self._w(layer, "attn.compressor.wkv.weight"),
            "wgate": self._w(layer, "attn.compressor.wgate.weight") if ratio == 2 else 0,
            "kv": buf.comp_kv, "gate": buf.comp_gate if ratio == 2 else 0,
            "dim": cfg.dim, "head_dim": cfg.head_dim, "ratio": ratio,
        }  # fmt: skip
        row = {
            "kv": buf.comp_kv, "gate": buf.comp_gate if ratio == 2 else 0,
            "norm_w": self._w(layer, "attn.compressor.norm.weight"),
            "rope_c": self._block + (lay.rope_pair_off if ratio == 2 else lay.rope_yarn_off), "step": self._step,
            "pool_cell": self._block + lay.pool_off[layer] if ratio == 2 else 0,
            "comp_cell": self._block + lay.comp_off[layer], "ikey_cell": self._block + lay.ikey_off[layer],
            "wk": self._w(layer, "attn.indexer.wk.weight"), "k_norm": self._w(layer, "attn.indexer.k_norm.weight"),
            "head_dim": cfg.head_dim, "rope_dim": cfg.rope_dim, "index_dim": cfg.index_head_dim, "ratio": ratio,
            "eps": cfg.rms_eps,
        }  # fmt: skip
        return (
            self._prepare(layer, "comp_proj", compressor.COMP_PROJ, proj),
            self._prepare(layer, "comp_row", compressor.COMP_ROW, row),
        )

    def _index_q(self, layer: int) -> KernelLaunch:
        cfg, buf = self._cfg, self._buf
        w, s = self._quantised(layer, "attn.indexer.wq_b")
        args = {
            "qr": buf.qr, "wq_b": w, "s": s, "normed": buf.normed,
            "wproj": self._w(layer, "attn.indexer.weights_proj.weight"), "rope": self._rope(layer), "q": buf.index_q,
            "omega": buf.index_omega, "q_rank": cfg.q_lora_rank, "dim": cfg.dim, "index_heads": cfg.index_heads,
            "index_dim": cfg.index_head_dim, "rope_dim": cfg.rope_dim,
        }  # fmt: skip
        return self._prepare(layer, "index_q", indexer.INDEX_Q, args)

    def _index_score(self, layer: int, key_source: int | None) -> KernelLaunch | None:
        cfg, buf = self._cfg, self._buf
        if layer not in cfg.index_source_layers or key_source is None:
            return None
        args = {
            "q": buf.index_q, "omega": buf.index_omega, "ikey_cell": self._block + self._lay.ikey_off[key_source],
            "step": self._step, "scores": buf.index_scores.ptr, "index_heads": cfg.index_heads,
            "index_dim": cfg.index_head_dim, "ratio": cfg.compress_ratios[layer],
            "max_rows": self._max_context // cfg.compress_ratios[layer],
        }  # fmt: skip
        return self._prepare(layer, "index_score", indexer.INDEX_SCORE, args)

    def _attn_core(self, layer: int) -> Launches:
        cfg, buf, lay = self._cfg, self._buf, self._lay
        source, kv_source = cfg.index_source_of(layer), cfg.kv_source_of(layer)
        common = {
            "scores": buf.scores, "ring_cell": self._block + lay.ring_off[layer],
            "comp_cell": 0 if kv_source is None else self._block + lay.comp_off[kv_source],
            "sel": 0 if source is None else self._block + lay.sel_off[source], "step": self._step,
            "heads": cfg.n_heads, "head_dim": cfg.head_dim, "window": cfg.window,
            "topk": 0 if source is None else cfg.index_topk,
        }  # fmt: skip
        value = {
            **common, "sink": self._w(layer, "attn.attn_sink"), "rope": self._rope(layer), "o": buf.o,
            "rope_dim": cfg.rope_dim,
        }  # fmt: skip
        wo_a, so_a = self._quantised(layer, "attn.wo_a")
        out_a = {
            "o": buf.o, "w": wo_a, "s": so_a, "u": buf.u, "groups": cfg.o_groups, "rank": cfg.o_lora_rank,
            "k": cfg.n_heads * cfg.head_dim // cfg.o_groups,
        }  # fmt: skip
        wo_b, so_b = self._quantised(layer, "attn.wo_b")
        out_b = {"x": buf.u, "w": wo_b, "s": so_b, "y": buf.attn_out, "n": cfg.dim, "k": cfg.o_groups * cfg.o_lora_rank}
        return (
            self._prepare(layer, "attn_score", attention.ATTN_SCORE, {**common, "q": buf.q}),
            self._prepare(layer, "attn_value", attention.ATTN_VALUE, value),
            self._prepare(layer, "wo_a", projection.ATTN_WO_A, out_a),
            self._prepare(layer, "wo_b", linear.LINEAR_FP8, out_b),
        )

    def _shared(self, layer: int) -> Launches:
        cfg, buf = self._cfg, self._buf
        w1, s1 = self._quantised(layer, "ffn.shared_experts.w1")
        w2, s2 = self._quantised(layer, "ffn.shared_experts.w2")
        w3, s3 = self._quantised(layer, "ffn.shared_experts.w3")
        gate_up = {
            "normed": buf.normed, "w1": w1, "s1": s1, "w3": w3, "s3": s3, "t": buf.shared_t, "dim": cfg.dim,
            "inter": cfg.inter_dim, "limit": cfg.swiglu_limit,
        }  # fmt: skip
        down = {"x": buf.shared_t, "w": w2, "s": s2, "y": buf.shared_out, "n": cfg.dim, "k": cfg.inter_dim}
        return (
            self._prepare(layer, "shared_gate_up", linear.SHARED_GATE_UP, gate_up),
            self._prepare(layer, "shared_down", linear.LINEAR_FP8, down),
        )

    def _router(self, layer: int) -> KernelLaunch:
        return self._prepare(layer, "router", router.ROUTER_LOGITS, self._router_args(layer))

    def _router_args(self, layer: int) -> dict[str, int | float]:
        cfg, buf = self._cfg, self._buf
        return {
            "normed": buf.normed, "w": self._w(layer, "ffn.gate.weight"), "logits": buf.logits, "dim": cfg.dim,
            "n_experts": cfg.n_experts,
        }  # fmt: skip

    def _guess(self, layer: int) -> Launches:
        guess = self._guess_buffers
        if guess is None or layer == 0:
            return ()
        logits = {**self._router_args(layer), "logits": guess.logits}
        select = {
            **self._select_args(layer), "logits": guess.logits, "header": guess.header, "ptrs_dev": guess.ptrs_dev,
            "weight_dev": guess.weight_dev, "rows_dev": guess.rows_dev,
        }  # fmt: skip
        return (
            self._prepare(layer, "router_guess", router.ROUTER_LOGITS, logits),
            self._prepare(layer, "route_guess", router.ROUTE_SELECT, select),
        )

    def _route_select(self, layer: int) -> KernelLaunch:
        return self._prepare(layer, "route_select", router.ROUTE_SELECT, self._select_args(layer))

    def _select_args(self, layer: int) -> dict[str, int | float]:
        cfg, buf, arena = self._cfg, self._buf, self._arena
        return {
            "logits": buf.logits, "bias": self._w(layer, "ffn.gate.bias"), "slot_row": self._table.row_ptr(layer),
            "header": arena.header_row(layer), "weight_dev": buf.weight_dev, "rows_dev": buf.rows_dev,
            "ptrs_dev": buf.ptrs_dev, "n_experts": cfg.n_experts, "top_k": cfg.top_k,
            "temperature": cfg.gate_temperature, "route_scale": cfg.route_scale, "normalise": int(cfg.norm_topk_prob),
            "dev_base": arena.base, "host_base": arena.host_base, "slot_nbytes": arena.slot_nbytes,
            "gate_off": arena.layout.gate_off, "up_off": arena.layout.up_off, "down_off": arena.layout.down_off,
        }  # fmt: skip

    def _experts(self, layer: int) -> Launches:
        cfg, buf, lay, gathered = self._cfg, self._buf, self._arena.layout, self._gathered
        ptrs_dev = buf.ptrs_dev if gathered is None else gathered.ptrs_dev
        gate_up = {
            "normed": buf.normed, "ptrs_dev": ptrs_dev, "weight_dev": buf.weight_dev, "t": buf.expert_t,
            "dim": cfg.dim, "inter": cfg.inter_dim, "top_k": cfg.top_k, "gate_scale_disp": lay.gate_scale_disp,
            "up_scale_disp": lay.up_scale_disp, "limit": cfg.swiglu_limit,
        }  # fmt: skip
        down = {
            "t": buf.expert_t, "ptrs_dev": ptrs_dev, "out": buf.expert_out, "dim": cfg.dim, "inter": cfg.inter_dim,
            "top_k": cfg.top_k, "down_scale_disp": lay.down_scale_disp,
        }  # fmt: skip
        return (
            *self._gather(layer),
            self._prepare(layer, "expert_gate_up", experts.EXPERT_GATE_UP, gate_up),
            self._prepare(layer, "expert_down", experts.EXPERT_DOWN, down),
        )

    def _gather(self, layer: int) -> Launches:
        gathered = self._gathered
        if gathered is None:
            return ()
        lay = self._arena.layout
        args = {
            "ptrs_dev": self._buf.ptrs_dev, "gathered_ptrs": gathered.ptrs_dev, "top_k": self._cfg.top_k,
            "pool_base": gathered.pool_base, "pool_nbytes": gathered.pool_nbytes, "gathered": gathered.slots,
            "slot_nbytes": gathered.slot_nbytes, "expert_nbytes": lay.nbytes, "gate_off": lay.gate_off,
        }  # fmt: skip
        return (self._prepare(layer, "expert_gather", gather.EXPERT_GATHER, args),)

    def _combine(self, layer: int) -> KernelLaunch:
        cfg, buf = self._cfg, self._buf
        args = {
            "expert_out": buf.expert_out, "shared_out": buf.shared_out, "post": buf.post, "comb": buf.comb,
            "streams": buf.streams, "moe_out": buf.moe_out, "dim": cfg.dim, "hc": cfg.hc_mult, "top_k": cfg.top_k,
        }  # fmt: skip
        return self._prepare(layer, "combine", experts.MOE_COMBINE, args)
