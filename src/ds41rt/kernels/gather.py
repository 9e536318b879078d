"""The copy of a layer's host-tier picks to scratch on the device, and the pointer table that leads to the copies."""

from collections.abc import Sequence

from ds41rt.cu.kernel import U8, U64, Array, Geometry, KernelSpec, Span
from ds41rt.kernels.params import r, scalars, w

_BLOCKS = 32  # fill a link to host memory, measured on PCIe 5


def _expert_gather(
    ptrs_dev: Array,
    gathered_ptrs: Array,
    top_k: int,
    pool_base: int,
    pool_nbytes: int,
    gathered: int,
    slot_nbytes: int,
    expert_nbytes: int,
    gate_off: int,
    spans: Sequence[Array],
) -> None:
    copies = _copies(ptrs_dev, pool_base, pool_nbytes, gathered, slot_nbytes, gate_off)
    gathered_ptrs[...] = ptrs_dev
    for (pick, slot, copy), source, target in zip(copies, spans[0::2], spans[1::2], strict=True):
        target[...] = source
        gathered_ptrs[:, pick] = [int(ptr) - slot + copy for ptr in ptrs_dev[:, pick]]


def _expert_gather_spans(
    ptrs_dev: Array,
    gathered_ptrs: Array,
    top_k: int,
    pool_base: int,
    pool_nbytes: int,
    gathered: int,
    slot_nbytes: int,
    expert_nbytes: int,
    gate_off: int,
) -> list[Span]:
    shape = (expert_nbytes,)
    return [
        span
        for _, slot, copy in _copies(ptrs_dev, pool_base, pool_nbytes, gathered, slot_nbytes, gate_off)
        for span in (Span(slot, U8, shape, "r"), Span(copy, U8, shape, "w"))
    ]


def _copies(
    ptrs_dev: Array, pool_base: int, pool_nbytes: int, gathered: int, slot_nbytes: int, gate_off: int
) -> list[tuple[int, int, int]]:
    """(Pick, address of its pool slot, address of its copy) of the picks that lie in the pool."""
    slots = [int(ptr) - gate_off for ptr in ptrs_dev[0]]
    return [
        (i, slot, gathered + i * slot_nbytes) for i, slot in enumerate(slots) if 0 <= slot - pool_base < pool_nbytes
    ]


EXPERT_GATHER = KernelSpec(
    "expert_gather",
    (
        r("ptrs_dev", U64, lambda s: (3, s.top_k)),
        w("gathered_ptrs", U64, lambda s: (3, s.top_k)),
        *scalars("u32", "top_k"),
        *scalars("u64", "pool_base", "pool_nbytes", "gathered", "slot_nbytes", "expert_nbytes", "gate_off"),
    ),
    _expert_gather,
    _expert_gather_spans,
    geometry=lambda s, n_sms: Geometry((min(_BLOCKS, n_sms), 1, 1), 512),
)
