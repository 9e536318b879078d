"""The engine's scratch on the device: one set of buffers that every layer and every sequence goes through.

The five buffers that a snapshot must hold lie in one contiguous allocation, so that a snapshot is one copy.
"""

from dataclasses import dataclass

from ds41rt.config import ModelConfig
from ds41rt.cu.backend import DeviceBuffer, GpuBackend
from ds41rt.kernels.hc import mix_work_nbytes


@dataclass(frozen=True, slots=True)
class SavedLayout:
    """Byte offsets inside the saved block: streams, attention output, pre_a, post_s, comb_s."""

    attn_out_off: int
    pre_a_off: int
    post_off: int
    comb_off: int
    nbytes: int

    @classmethod
    def of(cls, cfg: ModelConfig) -> "SavedLayout":
        attn_out = 2 * cfg.hc_mult * cfg.dim
        pre_a = attn_out + 2 * cfg.dim
        post = pre_a + 4 * cfg.hc_mult
        comb = post + 4 * cfg.hc_mult
        return cls(attn_out, pre_a, post, comb, comb + 4 * cfg.hc_mult**2)


class StepBuffers:
    """Addresses of the scratch buffers. `saved` is what a snapshot copies; the rest is rewritten before it is read."""

    def __init__(self, backend: GpuBackend, cfg: ModelConfig, max_context: int) -> None:
        self._backend = backend
        self._owned: list[DeviceBuffer] = []
        layout = SavedLayout.of(cfg)
        try:
            self.saved = self._alloc("saved block", layout.nbytes)
            self.streams = self.saved.ptr
            self.attn_out = self.saved.ptr + layout.attn_out_off
            self.pre_a = self.saved.ptr + layout.pre_a_off
            self.post = self.saved.ptr + layout.post_off
            self.comb = self.saved.ptr + layout.comb_off
            self.pre_prev = self._alloc("pre_prev", 4 * cfg.hc_mult).ptr
            self.hidden = self._alloc("hidden", 2 * cfg.dim).ptr
            self.normed = self._alloc("normed", 2 * cfg.dim).ptr
            # to be filled with zeros once, before the first step
            self.mix_work = self._alloc("mix workspace", mix_work_nbytes(cfg.dim, cfg.hc_mult))
            self.engram_kv = self._alloc("engram kv", 2 * (cfg.hc_mult + 1) * cfg.dim).ptr
            self.engram_gate = self._alloc("engram gate", 4 * cfg.hc_mult).ptr
            self.qa = self._alloc("q_a", 2 * cfg.q_lora_rank).ptr
            self.qr = self._alloc("q_r", 2 * cfg.q_lora_rank).ptr
            self.kv = self._alloc("kv", 2 * cfg.head_dim).ptr
            self.q = self._alloc("q", 2 * cfg.n_heads * cfg.head_dim).ptr
            self.scores = self._alloc("scores", 4 * cfg.n_heads * (cfg.window + cfg.index_topk)).ptr
            self.o = self._alloc("o", 2 * cfg.n_heads * cfg.head_dim).ptr
            self.u = self._alloc("u", 2 * cfg.o_groups * cfg.o_lora_rank).ptr
            self.comp_kv = self._alloc("compressor kv", 4 * cfg.head_dim).ptr
            self.comp_gate = self._alloc("compressor gate", 4 * cfg.head_dim).ptr
            self.index_q = self._alloc("index q", 2 * cfg.index_heads * cfg.index_head_dim).ptr
            self.index_omega = self._alloc("index omega", 2 * cfg.index_heads).ptr
            self.index_scores = self._alloc("index scores", 4 * max_context)
            self.logits = self._alloc("router logits", 4 * cfg.n_experts).ptr
            # pointers, weights, rows of the plan lie together: the host replaces them with one copy
            self.ptrs_dev = self._alloc("plan block", 32 * cfg.top_k).ptr
            self.weight_dev = self.ptrs_dev + 24 * cfg.top_k
            self.rows_dev = self.ptrs_dev + 28 * cfg.top_k
            self.expert_t = self._alloc("expert hidden", 2 * cfg.top_k * cfg.inter_dim).ptr
            self.expert_out = self._alloc("expert out", 2 * cfg.top_k * cfg.dim).ptr
            self.shared_t = self._alloc("shared hidden", 2 * cfg.inter_dim).ptr
            self.shared_out = self._alloc("shared out", 2 * cfg.dim).ptr
            self.moe_out = self._alloc("moe out", 2 * cfg.dim).ptr
            self.final_normed = self._alloc("final normed", 2 * cfg.dim).ptr
            self.vocab_logits = self._alloc("logits", 4 * cfg.vocab)
        except BaseException:
            self.close()
            raise

    def _alloc(self, name: str, nbytes: int) -> DeviceBuffer:
        buf = self._backend.alloc(name, nbytes)
        self._owned.append(buf)
        return buf

    def close(self) -> None:
        while self._owned:
            self._backend.free(self._owned[-1])
            self._owned.pop()  # only now: what an interrupt left is freed by the next call
