"""Routing: logits, the selection of experts, the plan, and the kernel that builds header and pointer table.

`select_experts` and `plan` are the one host chain; the kernel's reference is made of them. Every float32 operation is
rounded separately, the weight sum is taken in pick order.
"""

import numpy as np

from ds41rt.cu.kernel import BF16, F32, I32, U64, Array, Geometry, KernelSpec, Scalars
from ds41rt.kernels.geometry import BF16_PLAIN, matrix_geometry, shared_nbytes, tiles_of, units
from ds41rt.kernels.linear import plain_matvec
from ds41rt.kernels.params import r, scalars, w
from ds41rt.kernels.softplus import sqrt_softplus

# Header words: [flag bits | picks | weight bit patterns | plan slots], the last three top_k words each.
FLAG_MISS = 1
FLAG_NOT_FINITE = 2
# Slot codes: below 1 absent, else a device slot; with this bit a slot of the host arena.
HOST_SLOT_BIT = 1 << 30


def header_words(top_k: int) -> int:
    """Length of one layer's header in int32 words."""
    return 1 + 3 * top_k


def select_experts(
    logits: Array, bias: Array, *, top_k: int, temperature: float, route_scale: float, normalise: bool
) -> tuple[Array, Array, bool]:
    """Pick experts from f32[n] logits and bias: (ids i32[top_k] best first, weights f32[top_k], not_finite).

    The key is score + bias with score = sqrt(softplus(logit / temperature)); equal keys (+0 and -0 are equal): the
    lower id first. A NaN key ranks as -inf, after which lower ids come first again, so picks are always `top_k`
    distinct ids. Weights are the unbiased scores. `not_finite` is raised by any NaN logit and by a weight that is
    not finite (+inf logit); -inf and very negative logits are legal and weigh 0.
    """
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        scores = sqrt_softplus(logits / np.float32(temperature))
        key = scores + bias
        np.negative(key, out=key)
        np.copyto(key, np.inf, where=np.isnan(key))
        ids = np.argsort(key, kind="stable")[:top_k]
        weights = scores.take(ids)
        if normalise:
            # accumulate adds one after another; a reduction of eight would add in pairs.
            weights /= np.add.accumulate(weights)[-1] + np.float32(1e-20)
        weights *= np.float32(route_scale)
        not_finite = not np.isfinite(weights).all() or np.isnan(logits).any()
    return ids.astype(np.int32), weights, bool(not_finite)


def plan(ids: Array, weights: Array) -> tuple[Array, Array, Array]:
    """The picks in ascending expert id: (order: index into the picks, ids, weights)."""
    order = np.argsort(ids)
    return order, ids.take(order), weights.take(order)


def _router_logits(normed: Array, w: Array, logits: Array, dim: int, n_experts: int) -> None:
    logits[...] = plain_matvec(w, normed)


def _route_select(
    logits: Array,
    bias: Array,
    slot_row: Array,
    header: Array,
    weight_dev: Array,
    rows_dev: Array,
    ptrs_dev: Array,
    n_experts: int,
    top_k: int,
    temperature: float,
    route_scale: float,
    normalise: int,
    dev_base: int,
    host_base: int,
    slot_nbytes: int,
    gate_off: int,
    up_off: int,
    down_off: int,
) -> None:
    ids, weights, not_finite = select_experts(
        logits, bias, top_k=top_k, temperature=temperature, route_scale=route_scale, normalise=bool(normalise)
    )
    _, planned, planned_weights = plan(ids, weights)
    codes = slot_row.take(planned).tolist()  # the header's plan slots are the table's codes: -1 stays -1
    slots = [max(code, 0) for code in codes]
    flags = (FLAG_MISS if 0 in slots else 0) | (FLAG_NOT_FINITE if not_finite else 0)
    header[0] = flags
    header[1 : 1 + top_k] = ids
    header[1 + top_k : 1 + 2 * top_k] = weights.view(np.int32)
    header[1 + 2 * top_k :] = codes
    weight_dev[...] = planned_weights
    rows_dev[...] = 0
    bases = [
        host_base + (slot ^ HOST_SLOT_BIT) * slot_nbytes if slot & HOST_SLOT_BIT else dev_base + slot * slot_nbytes
        for slot in slots
    ]
    ptrs_dev[...] = [[base + off for base in bases] for off in (gate_off, up_off, down_off)]


def _select_geometry(s: Scalars, n_sms: int) -> Geometry:
    # One block, a thread an expert.
    return Geometry((1, 1, 1), -(-s.n_experts // 32) * 32)


def _router_logits_geometry(s: Scalars, n_sms: int) -> Geometry:
    return matrix_geometry(
        n_sms, units(BF16_PLAIN, s.dim, tiles_of(BF16_PLAIN, s.n_experts)), shared_nbytes(BF16_PLAIN, s.dim)
    )


ROUTER_LOGITS = KernelSpec(
    "router_logits",
    (
        r("normed", BF16, lambda s: (s.dim,)),
        r("w", BF16, lambda s: (s.n_experts, s.dim)),
        w("logits", F32, lambda s: (s.n_experts,)),
        *scalars("u32", "dim", "n_experts"),
    ),
    _router_logits,
    geometry=_router_logits_geometry,
)

ROUTE_SELECT = KernelSpec(
    "route_select",
    (
        r("logits", F32, lambda s: (s.n_experts,)),
        r("bias", F32, lambda s: (s.n_experts,)),
        r("slot_row", I32, lambda s: (s.n_experts,)),
        w("header", I32, lambda s: (header_words(s.top_k),)),
        w("weight_dev", F32, lambda s: (s.top_k,)),
        w("rows_dev", I32, lambda s: (s.top_k,)),
        w("ptrs_dev", U64, lambda s: (3, s.top_k)),
        *scalars("u32", "n_experts", "top_k"),
        *scalars("f32", "temperature", "route_scale"),
        *scalars("u32", "normalise"),
        *scalars("u64", "dev_base", "host_base", "slot_nbytes", "gate_off", "up_off", "down_off"),
    ),
    _route_select,
    geometry=_select_geometry,
)
