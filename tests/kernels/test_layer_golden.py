"""Every layer of the tiny model, kernel after kernel, from the golden inputs of traced steps.

The sharp test of the whole set: one layer's attention and MoE from its own inputs, so that no error of an earlier
layer hides one here. Limits are relative L2 distances, those of the golden set's description.
"""

import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_harness import Memory, bf16, poisoned, run
from numpy.typing import NDArray

from ds41rt.cu.kernel import BF16, U8
from ds41rt.kernels import attention, compressor, engram, experts, hc, indexer, linear, projection, rope, router

TINY = Path(__file__).parents[1] / "goldens" / "tiny-a"
STEPS = (0, 1, 7, 8, 20, 47)
DIM, HEADS, HEAD, ROPE, RANK, WINDOW, TOPK, IDIM, IHEADS, INTER = 128, 4, 64, 16, 64, 8, 8, 32, 32, 32
RATIOS = (0, 0, 2, 2, 2, 1, 1, 1)
SOURCE = {2: 2, 3: 2, 4: 2, 5: 5, 6: 5, 7: 5}
EPS = 1e-20
MIX = {"dim": DIM, "hc": 4, "iters": 20, "eps": EPS, "hc_eps": 1e-6}


@cache
def tensors() -> dict[str, NDArray[Any]]:
    """Every tensor of the checkpoint: bf16 and f32 as such, all 8-bit types as bytes."""
    kinds = {"BF16": BF16, "F32": np.dtype(np.float32)}
    out = {}
    for path in sorted((TINY / "checkpoint").glob("*.safetensors")):
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        for name, entry in json.loads(raw[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = (8 + length + off for off in entry["data_offsets"])
                data = np.frombuffer(raw[begin:end], kinds.get(entry["dtype"], np.dtype(np.uint8)))
                out[name] = data.reshape(entry["shape"])
    return out


@cache
def trace(step: int) -> dict[str, NDArray[Any]]:
    return dict(np.load(TINY / f"trace_s{step:02}.npz"))


@cache
def whole_run() -> dict[str, NDArray[Any]]:
    return dict(np.load(TINY / "run.npz"))


def distance(got: NDArray[Any], want: NDArray[Any]) -> float:
    a, b = got.astype(np.float64).reshape(-1), want.astype(np.float64).reshape(-1)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def mix_weights(w: dict[str, NDArray[Any]], site: str) -> dict[str, Any]:
    return {"fn": w[f"hc_{site}_fn"], "scale": w[f"hc_{site}_scale"], "base": w[f"hc_{site}_base"],
            "norm_w": w[f"{site}_norm.weight"], "work": poisoned(hc.mix_work_nbytes(DIM, 4), U8), **MIX}  # fmt: skip


class Layer:
    """One layer at one traced step: golden inputs, weights by their names inside the layer."""

    def __init__(self, step: int, layer: int) -> None:
        self.layer, self.position = layer, step
        prefix = f"layers.{layer}."
        self.w = {n.removeprefix(prefix): t for n, t in tensors().items() if n.startswith(prefix)}
        mark = f"L{layer:02}."
        self.want = {n.removeprefix(mark): a for n, a in trace(step).items() if n.startswith(mark)}
        self.ratio = RATIOS[layer]
        plain = rope.rope_freqs(ROPE, 1e4)
        yarn = rope.yarn_freqs(ROPE, 1.6e5, factor=16, original_len=256, beta_fast=32, beta_slow=1)
        self.freqs = yarn if self.ratio else plain
        self.step = np.array([step, int(trace(step)["token"])], np.int32)
        self.memory = Memory()
        self.ring = bf16(trace(step)["state.ring"][layer])
        self.ring_cell = self.memory.cell(self.ring)
        if self.ratio:
            source = SOURCE[layer]
            rows = (step + 1) // self.ratio
            self.comp, self.ikey = (poisoned((48, n), BF16) for n in (HEAD, IDIM))
            # Sources write the current row themselves; the others find it there.
            have = trace(step)[f"state.comp.L{source:02}"].shape[0] if source == layer else rows
            self.comp[:have] = whole_run()[f"comp.L{source:02}"][:have]
            self.ikey[:have] = whole_run()[f"ikey.L{source:02}"][:have]
            self.comp_cell, self.ikey_cell = self.memory.cell(self.comp), self.memory.cell(self.ikey)

    def fp8(self, name: str, x: NDArray[Any]) -> NDArray[Any]:
        w = self.w[f"{name}.weight"]
        args = {"x": x, "w": w, "s": self.w[f"{name}.scale"], "n": w.shape[0], "k": w.shape[1]}
        return run(linear.LINEAR_FP8, args)["y"]

    def compress(self, normed: NDArray[Any]) -> None:
        w, ratio = self.w, self.ratio
        extra = {"wgate": w["attn.compressor.wgate.weight"]} if ratio == 2 else {}
        latent = run(
            compressor.COMP_PROJ,
            {"normed": normed, "wkv": w["attn.compressor.wkv.weight"], "dim": DIM, "head_dim": HEAD, "ratio": ratio}
            | extra,
        )
        if ratio == 2:
            pool = trace(self.position)["state.pool.L02"].copy()
            latent["pool_cell"] = self.memory.cell(pool)
        run(
            compressor.COMP_ROW,
            {
                **latent,
                "norm_w": w["attn.compressor.norm.weight"],
                "rope_c": rope.rope_cell(self.position // ratio * ratio, self.freqs),
                "step": self.step,
                "comp_cell": self.comp_cell,
                "ikey_cell": self.ikey_cell,
                "wk": w["attn.indexer.wk.weight"],
                "k_norm": w["attn.indexer.k_norm.weight"],
                "head_dim": HEAD,
                "rope_dim": ROPE,
                "index_dim": IDIM,
                "ratio": ratio,
                "eps": EPS,
            },
            self.memory,
        )
        if ratio == 2:
            np.testing.assert_allclose(pool, whole_run()["pool.L02"][self.position], rtol=1e-5, atol=1e-5)
        rows = (self.position + 1) // ratio
        for got, name in ((self.comp, "comp"), (self.ikey, "ikey")):
            want = whole_run()[f"{name}.L{self.layer:02}"][:rows]
            assert np.count_nonzero(got[:rows].astype(np.float32) != want) <= 0.02 * want.size

    def index_scores(self, normed: NDArray[Any], qr: NDArray[Any], cell: NDArray[Any]) -> NDArray[Any]:
        w = self.w
        query = run(
            indexer.INDEX_Q,
            {
                "qr": qr,
                "wq_b": w["attn.indexer.wq_b.weight"],
                "s": w["attn.indexer.wq_b.scale"],
                "normed": normed,
                "wproj": w["attn.indexer.weights_proj.weight"],
                "rope": cell,
                "q_rank": RANK,
                "dim": DIM,
                "index_heads": IHEADS,
                "index_dim": IDIM,
                "rope_dim": ROPE,
            },
        )
        return run(
            indexer.INDEX_SCORE,
            {
                **query,
                "ikey_cell": self.ikey_cell,
                "step": self.step,
                "index_heads": IHEADS,
                "index_dim": IDIM,
                "ratio": self.ratio,
                "max_rows": 48,
            },
            self.memory,
        )["scores"]

    def attention(self, normed: NDArray[Any]) -> NDArray[Any]:
        w = self.w
        cell = rope.rope_cell(self.position, self.freqs)
        geometry = {"heads": HEADS, "head_dim": HEAD, "window": WINDOW}
        a = run(
            projection.ATTN_QKV_A,
            {
                "normed": normed,
                "wq_a": w["attn.wq_a.weight"],
                "sq_a": w["attn.wq_a.scale"],
                "wkv": w["attn.wkv.weight"],
                "skv": w["attn.wkv.scale"],
                "dim": DIM,
                "q_rank": RANK,
                "head_dim": HEAD,
            },
        )
        heads = run(
            projection.ATTN_Q,
            {
                **a,
                "q_norm": w["attn.q_norm.weight"],
                "wq_b": w["attn.wq_b.weight"],
                "sq_b": w["attn.wq_b.scale"],
                "kv_norm": w["attn.kv_norm.weight"],
                "rope": cell,
                "step": self.step,
                "ring_cell": self.ring_cell,
                "q_rank": RANK,
                "rope_dim": ROPE,
                "eps": EPS,
                **geometry,
            },
            self.memory,
        )
        row = whole_run()["window_rows"][self.layer, self.position]
        assert distance(self.ring[self.position % WINDOW], row) <= 1e-2
        if "attn.compressor.wkv.weight" in w:
            self.compress(normed)
        if "index_scores" in self.want:
            n = self.want["index_scores"].size
            got = self.index_scores(normed, heads["qr"], cell)[:n]
            legal = np.isfinite(self.want["index_scores"])
            assert not n or distance(got[legal], self.want["index_scores"][legal]) <= 2e-2
        rows: dict[str, Any] = {"ring_cell": self.ring_cell, "step": self.step, "topk": 0, **geometry}
        if self.ratio:
            used = self.want["idx_used"]
            sel = poisoned(1 + TOPK, np.int32)
            sel[: 1 + used.size] = [used.size, *used]
            rows |= {"topk": TOPK, "sel": sel, "comp_cell": self.comp_cell}
        scores = run(attention.ATTN_SCORE, {**rows, "q": heads["q"]}, self.memory)["scores"]
        o = run(
            attention.ATTN_VALUE,
            {**rows, "scores": scores, "sink": w["attn.attn_sink"], "rope": cell, "rope_dim": ROPE},
            self.memory,
        )["o"]
        assert distance(o, self.want["attn_core"]) <= 3e-2
        wo = {"w": w["attn.wo_a.weight"], "s": w["attn.wo_a.scale"], "groups": 2, "rank": 32, "k": 128}
        u = run(projection.ATTN_WO_A, {"o": o.reshape(2, 128), **wo})["u"]
        return self.fp8("attn.wo_b", u)

    def moe(self, normed: NDArray[Any], streams: NDArray[Any], mix: dict[str, Any]) -> NDArray[Any]:
        w = self.w
        logits = run(router.ROUTER_LOGITS, {"normed": normed, "w": w["ffn.gate.weight"], "dim": DIM, "n_experts": 384})[
            "logits"
        ]
        assert distance(logits, self.want["router_logits"]) <= 4e-3
        ids, weights, not_finite = router.select_experts(
            logits, w["ffn.gate.bias"], top_k=6, temperature=1.0, route_scale=1.5, normalise=True
        )
        assert not not_finite
        assert ids.tolist() == self.want["expert_ids"].tolist()
        np.testing.assert_allclose(weights, self.want["expert_weights"], rtol=0, atol=2e-3)
        _, planned, planned_weights = router.plan(ids, weights)
        slots = [
            np.concatenate(
                [w[f"ffn.experts.{e}.w{m}.{kind}"].reshape(-1) for kind in ("weight", "scale") for m in (1, 3, 2)]
            )
            for e in planned
        ]
        bases, size, scale_size = [self.memory.put(s) for s in slots], INTER * DIM // 2, INTER * DIM // 32
        ptrs = np.array([[b + m * size for b in bases] for m in range(3)], np.uint64)
        disp = [3 * size + m * scale_size - m * size for m in range(3)]
        geometry = {"ptrs_dev": ptrs, "dim": DIM, "inter": INTER, "top_k": 6}
        t = run(
            experts.EXPERT_GATE_UP,
            {
                "normed": normed,
                "weight_dev": planned_weights,
                "gate_scale_disp": disp[0],
                "up_scale_disp": disp[1],
                "limit": 10.0,
                **geometry,
            },
            self.memory,
        )["t"]
        out = run(experts.EXPERT_DOWN, {"t": t, "down_scale_disp": disp[2], **geometry}, self.memory)["out"]
        shared = run(
            linear.SHARED_GATE_UP,
            {
                "normed": normed,
                "w1": w["ffn.shared_experts.w1.weight"],
                "s1": w["ffn.shared_experts.w1.scale"],
                "w3": w["ffn.shared_experts.w3.weight"],
                "s3": w["ffn.shared_experts.w3.scale"],
                "dim": DIM,
                "inter": INTER,
                "limit": 10.0,
            },
        )["t"]
        return run(
            experts.MOE_COMBINE,
            {
                "expert_out": out,
                "shared_out": self.fp8("ffn.shared_experts.w2", shared),
                "streams": streams,
                "dim": DIM,
                "hc": 4,
                "top_k": 6,
                **mix,
            },
        )["moe_out"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("layer", range(8))
def test_layer_from_golden_inputs(step: int, layer: int) -> None:
    one = Layer(step, layer)
    want = one.want
    streams = bf16(want["X_in"])
    if "engram_rows" in want:
        rows, w = want["engram_rows"], one.w
        kv = run(
            engram.ENGRAM_KV,
            {
                "codes": w["engram.embed.weight"][rows],
                "scales": w["engram.embed.scale"][rows],
                "w": w["engram.wkv.weight"],
                "ws": w["engram.wkv.scale"],
                "cols": 6,
                "head_dim": 32,
                "n": 5 * DIM,
                "k": 192,
            },
        )["kv"]
        apply = {"q_weight": w["engram.q_weight"], "k_weight": w["engram.k_weight"], "dim": DIM, "hc": 4, "eps": EPS}
        gate = run(engram.ENGRAM_APPLY, {"kv": kv, "streams": streams, **apply})["gate"]
        np.testing.assert_allclose(gate, want["engram_gate"], rtol=0, atol=1e-3)
        assert distance(streams, want["X_engram"]) <= 1e-3
    a = run(hc.HC_IN, {"streams": streams, "pre_in": want["pre_in"].copy(), **mix_weights(one.w, "attn")})
    coeffs = np.concatenate([a["pre_out"], a["post"], a["comb"].reshape(-1)])
    np.testing.assert_allclose(coeffs, want["hc_attn"], rtol=0, atol=2e-6)
    assert distance(a["normed"], want["attn_in"]) <= 1e-3
    y = one.attention(a["normed"])
    assert distance(y, want["attn_out"]) <= 3e-2
    f = run(
        hc.HC_EXPAND_IN,
        {
            "y": y,
            "streams": streams,
            "pre_in": a["pre_out"],
            "post": a["post"],
            "comb": a["comb"],
            **mix_weights(one.w, "ffn"),
        },
    )
    assert distance(streams, want["X_attn"]) <= 4e-3
    assert distance(f["normed"], want["moe_in"]) <= 4e-3
    coeffs = np.concatenate([f["pre_out"], f["post"], f["comb"].reshape(-1)])
    np.testing.assert_allclose(coeffs, want["hc_ffn"], rtol=0, atol=1e-3)
    moe = one.moe(f["normed"], streams, {"post": f["post"], "comb": f["comb"]})
    assert distance(moe, want["moe_out"]) <= 4e-2
    assert distance(streams, want["X_out"]) <= 4e-3
    np.testing.assert_allclose(f["pre_out"], want["pre_out"], rtol=0, atol=1e-3)
