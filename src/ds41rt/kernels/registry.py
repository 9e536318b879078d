"""Every kernel of the decode step, in the order in which a step meets them."""

from ds41rt.cu.kernel import KernelSpec
from ds41rt.kernels import (
    attention,
    compressor,
    engram,
    experts,
    hc,
    head,
    indexer,
    linear,
    projection,
    router,
    slots,
)

SPECS: tuple[KernelSpec, ...] = (
    hc.EMBED_EXPAND,
    engram.ENGRAM_KV,
    engram.ENGRAM_APPLY,
    hc.HC_IN,
    hc.HC_EXPAND_IN,
    projection.ATTN_QKV_A,
    projection.ATTN_Q,
    attention.ATTN_SCORE,
    attention.ATTN_VALUE,
    projection.ATTN_WO_A,
    linear.LINEAR_FP8,
    router.ROUTER_LOGITS,
    router.ROUTE_SELECT,
    slots.SLOT_TABLE_SET,
    experts.EXPERT_GATE_UP,
    experts.EXPERT_DOWN,
    linear.SHARED_GATE_UP,
    experts.MOE_COMBINE,
    hc.HC_COLLAPSE,
    head.HEAD,
    compressor.COMP_PROJ,
    compressor.COMP_ROW,
    indexer.INDEX_Q,
    indexer.INDEX_SCORE,
)
