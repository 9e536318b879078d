"""`ds41rt cache-sim`: what a budget for experts buys, by replaying routes on the runtime's own cache.

The routes are a recorded trace's (`ds41rt decode --route-trace-out`) or made up (`tools.route_synth`). Counts are exact
for the routes; the time is a formula over them, with bandwidths that the user can replace.
"""

import argparse
import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import BinaryIO

import numpy as np

from ds41rt.capture.words import size
from ds41rt.checkpoint.layout import ExpertLayout
from ds41rt.checkpoint.synth_presets import RELEASED
from ds41rt.config import ModelConfig
from ds41rt.errors import InputError
from ds41rt.moe.arena import slot_nbytes
from ds41rt.moe.mover import MOVES_PER_TOKEN
from ds41rt.moe.route_trace import RouteFacts, RouteTrace, load_route_trace
from ds41rt.step.machine import capturable
from ds41rt.tools.cache_plot import Panel, line_charts
from ds41rt.tools.output import output_file
from ds41rt.tools.progress import ProgressBar
from ds41rt.tools.route_synth import PATTERNS, synthetic_routes
from ds41rt.tools.tier_sim import Counts, Tiers, TierSimulator

_RELEASED_COMPUTE_MS = 8.8  # a step-graph token without misses on an H200
POLICIES = ("lru", "oldest", "least-used")
_DEVICE_RESERVED = 1  # slot 0 of the device
FORMULA = (
    "ms a token = compute + (host hits + file misses) x expert bytes / PCIe + file misses x expert bytes / disk; "
    "promotions run beside the step and are not in it, nor is what a fall costs beyond its read"
)


@dataclass(frozen=True, slots=True)
class _Role:
    ratio: int
    is_kv_source: bool
    is_index_source: bool


def route_facts(cfg: ModelConfig) -> RouteFacts:
    """The facts of a model whose experts lie in the published layout."""
    roles = [
        _Role(cfg.compress_ratios[i], i in cfg.kv_source_layers, i in cfg.index_source_layers)
        for i in range(cfg.n_layers)
    ]
    starts = tuple(i for i, role in enumerate(roles) if i == 0 or not capturable(role))
    layout = ExpertLayout.of(cfg)
    return RouteFacts(cfg.n_layers, cfg.n_experts, cfg.top_k, layout.nbytes, slot_nbytes(layout), starts)


@dataclass(frozen=True, slots=True)
class Rates:
    """Bandwidths in GB (1e9 bytes) a second, and the milliseconds of a token that has all its experts."""

    pcie_gb_s: float
    disk_gb_s: float
    compute_ms: float


@dataclass(frozen=True, slots=True)
class Row:
    """One simulated budget. Rates are shares of the picks; `clean_by_segment` shares of the tokens; ms a token."""

    policy: str
    device_slots: int
    host_slots: int
    device_hit_rate: float
    host_hit_rate: float
    file_rate: float
    misses_per_token: float
    moves_per_token: float
    clean_rate: float
    clean_by_segment: list[float]
    pcie_ms: float
    disk_ms: float
    ms_per_token: float
    moves_pcie_ms: float

    @classmethod
    def of(cls, policy: str, tiers: Tiers, counts: Counts, expert_nbytes: int, rates: Rates) -> "Row":
        n = counts.tokens
        picks = counts.device_hits + counts.host_hits + counts.misses
        clean = [c / n for c in counts.clean]
        pcie_ms = expert_nbytes / rates.pcie_gb_s / 1e6
        over_pcie, from_disk = (counts.host_hits + counts.misses) / n, counts.misses / n
        disk = from_disk * expert_nbytes / rates.disk_gb_s / 1e6
        return cls(
            policy=policy,
            device_slots=tiers.device_slots,
            host_slots=tiers.host_slots,
            device_hit_rate=counts.device_hits / picks,
            host_hit_rate=counts.host_hits / picks,
            file_rate=counts.misses / picks,
            misses_per_token=from_disk,
            moves_per_token=counts.moved / n,
            clean_rate=sum(clean) / len(clean),
            clean_by_segment=clean,
            pcie_ms=over_pcie * pcie_ms,
            disk_ms=disk,
            ms_per_token=rates.compute_ms + over_pcie * pcie_ms + disk,
            moves_pcie_ms=counts.moved / n * pcie_ms,
        )


def _numbers(text: str, option: str, whole: bool) -> list[float]:
    """A list like 3000,5000 or, not `whole`, 60,90.5; ascending, without repeats."""
    found = set()
    for piece in text.split(","):
        try:
            value = int(piece) if whole else float(piece)
        except ValueError:
            value = -1
        if not 0 <= value <= 1e9:
            wanted = "whole numbers from 0, for example 3000,5000" if whole else "GiB from 0, for example 60,90.5"
            raise InputError(f"{option} {text!r}: {piece!r} is not understood; give {wanted}")
        found.add(value)
    return sorted(found)


def _slots(args: argparse.Namespace, tier: str, one_nbytes: int, n_reserved: int) -> list[int]:
    """The slots that --TIER-slots or --TIER-gib asks for; a budget in GiB is cut as the engine cuts it."""
    slots: str | None = getattr(args, f"{tier}_slots")
    gib: str | None = getattr(args, f"{tier}_gib")
    if slots is not None:
        return [int(n) for n in _numbers(slots, f"--{tier}-slots", True)]
    if gib is not None:
        return [max(0, int(x * 2**30) // one_nbytes - n_reserved) for x in _numbers(gib, f"--{tier}-gib", False)]
    return [0]


def _policies(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in POLICIES:
            raise InputError(f"--policies: {name!r} is unknown; use {', '.join(POLICIES)}")
    return names


def _trace_of(args: argparse.Namespace) -> tuple[RouteTrace, str]:
    """The trace to replay, and what to call it."""
    if args.trace is not None:
        for option in ("tokens", "seed"):
            if getattr(args, option) is not None:
                raise InputError(f"--{option} goes with --synthetic; a recorded trace has its own tokens")
        return load_route_trace(args.trace), str(args.trace)
    n_tokens = 3000 if args.tokens is None else args.tokens
    if n_tokens < 1:
        raise InputError(f"--tokens {n_tokens}: give at least 1")
    seed = 0 if args.seed is None else args.seed
    if not 0 <= seed < 2**63:
        raise InputError(f"--seed {seed}: give a number from 0")
    facts = route_facts(RELEASED)
    ids = synthetic_routes(
        PATTERNS[args.synthetic],
        n_tokens,
        n_layers=facts.n_layers,
        n_experts=facts.n_experts,
        top_k=facts.top_k,
        seed=seed,
    )
    return RouteTrace(facts, ids), f"synthetic {args.synthetic!r}, seed {seed}"


def simulate(trace: RouteTrace, policies: list[str], budgets: list[Tiers], warm_tokens: int, rates: Rates) -> list[Row]:
    """One row for each budget and policy; the policy in a budget is replaced. Raises `InputError` for one too small."""
    rows: list[Row] = []
    with ProgressBar("simulating") as bar:
        for budget in budgets:
            for policy in policies:
                tiers = replace(budget, policy=policy)
                if policy == "lru":
                    tiers = replace(budget, policy="oldest", evict_random_pct=0.0)
                bar(len(rows), len(budgets) * len(policies))
                counts = TierSimulator(trace, tiers).run(warm_tokens)
                rows.append(Row.of(policy, tiers, counts, trace.facts.expert_nbytes, rates))
    return rows


def first_uses(trace: RouteTrace, warm_tokens: int) -> int:
    """Picks behind the first `warm_tokens` of experts that no earlier token picked: misses whatever the cache holds."""
    layers = np.arange(trace.facts.n_layers)[:, None] * trace.facts.n_experts
    keys = trace.expert_ids + layers
    return len(np.unique(keys)) - len(np.unique(keys[:warm_tokens]))


def _gib(slots: int, facts: RouteFacts, n_reserved: int) -> str:
    """The memory of `slots` slots and the reserved ones; no slots need no reserve."""
    gib = (slots + n_reserved) * facts.slot_nbytes / 2**30 if slots else 0.0
    return "<0.01" if 0 < gib < 0.01 else f"{gib:.2f}"


def table(rows: list[Row], facts: RouteFacts) -> str:
    """The rows as two tables for people: what a token costs, and how often each segment's replay is clean."""
    sizes, counts = ("device", "GiB", "host", "GiB"), ("on device", "in host", "file", "misses", "moves", "clean")
    heads = (*sizes, "policy", *counts, "ms/token")
    lines = [heads] + [
        (
            f"{row.device_slots:,}",
            _gib(row.device_slots, facts, _DEVICE_RESERVED),
            f"{row.host_slots:,}",
            _gib(row.host_slots, facts, 0),
            row.policy,
            f"{100 * row.device_hit_rate:.2f} %",
            f"{100 * row.host_hit_rate:.2f} %",
            f"{100 * row.file_rate:.2f} %",
            f"{row.misses_per_token:.2f}",
            f"{row.moves_per_token:.2f}",
            f"{100 * row.clean_rate:.1f} %",
            f"{row.ms_per_token:.1f}",
        )
        for row in rows
    ]
    ends = [*facts.segment_starts[1:], facts.n_layers]
    spans = [f"{start}-{end - 1}" for start, end in zip(facts.segment_starts, ends, strict=True)]
    segments = [("device", "host", "policy", *spans)] + [
        (
            f"{row.device_slots:,}",
            f"{row.host_slots:,}",
            row.policy,
            *(f"{100 * rate:.1f}" for rate in row.clean_by_segment),
        )
        for row in rows
    ]
    return f"{_aligned(lines)}\n\nclean replays of each segment (its MoE layers) in %:\n{_aligned(segments)}"


def _aligned(lines: Sequence[tuple[str, ...]]) -> str:
    left = lines[0].index("policy")
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def plot(rows: list[Row], title: str) -> str:
    """Hit rate and time a token as an SVG document, over the device's slots, or the host's if those alone differ."""
    over_host = len({row.device_slots for row in rows}) == 1 and len({row.host_slots for row in rows}) > 1
    tier, other = ("host", "device") if over_host else ("device", "host")
    others = {getattr(row, f"{other}_slots") for row in rows}
    hits: dict[str, list[tuple[float, float]]] = {}
    times: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        n_other = getattr(row, f"{other}_slots")
        label = row.policy if others == {0} else f"{row.policy}, {n_other:,} {other} slots"
        x = getattr(row, f"{tier}_slots")
        hits.setdefault(label, []).append((x, 100 * (row.device_hit_rate + row.host_hit_rate)))
        times.setdefault(label, []).append((x, row.ms_per_token))
    x_label = f"{tier} slots (experts)"
    return line_charts(
        title,
        [
            Panel("Picks found in a tier", x_label, "hit rate in %", hits),
            Panel("Time of a token", x_label, "ms a token", times),
        ],
    )


def _budgets(args: argparse.Namespace, facts: RouteFacts) -> list[Tiers]:
    everything = facts.n_layers * facts.n_experts
    device = _slots(args, "device", facts.slot_nbytes, _DEVICE_RESERVED)
    host = _slots(args, "host", facts.slot_nbytes, 0)
    pairs = [(min(d, everything), min(h, everything - min(d, everything))) for d in device for h in host]
    return [
        Tiers(
            d,
            h,
            evict_random_pct=args.evict_random_pct,
            moves=args.moves,
            promote_after=args.promote_after,
            most_used_first=not args.first_used_first,
        )
        for d, h in dict.fromkeys(pairs)
    ]


def _rates(args: argparse.Namespace) -> Rates:
    for name in ("pcie_gb_s", "disk_gb_s"):
        if not 0 < getattr(args, name) < math.inf:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)}: give a bandwidth above 0")
    compute_ms = _RELEASED_COMPUTE_MS if args.compute_ms is None else args.compute_ms
    if not 0 <= compute_ms < math.inf:
        raise InputError(f"--compute-ms {compute_ms}: give milliseconds from 0")
    return Rates(args.pcie_gb_s, args.disk_gb_s, compute_ms)


def cache_sim(args: argparse.Namespace) -> int:
    if args.moves is None:
        args.moves = MOVES_PER_TOKEN
    if args.moves < 0:
        raise InputError(f"--moves must be at least 0, is {args.moves}")
    if args.warm_tokens is not None and args.warm_tokens < 0:
        raise InputError(f"--warm-tokens must be at least 0, is {args.warm_tokens}")
    rates, policies = _rates(args), _policies(args.policies)
    trace, name = _trace_of(args)
    facts = trace.facts
    warm = trace.n_tokens // 3 if args.warm_tokens is None else args.warm_tokens
    budgets = _budgets(args, facts)
    foreign_compute = args.compute_ms is None and facts != route_facts(RELEASED)
    with ExitStack() as stack:
        svg: BinaryIO | None = None if args.svg is None else stack.enter_context(output_file(args.svg))
        rows = simulate(trace, policies, budgets, warm, rates)
        if svg is not None:
            svg.write(plot(rows, f"{facts.n_layers * facts.n_experts:,} experts, {name}").encode())
    first = first_uses(trace, warm) / (trace.n_tokens - warm)
    if args.json:
        result = {
            "trace": {
                "name": name,
                "tokens": trace.n_tokens,
                "warm_tokens": warm,
                "first_uses_per_token": first,
                **asdict(facts),
            },
            "assumed": {
                **asdict(rates),
                "evict_random_pct": args.evict_random_pct,
                "moves": args.moves,
                "promote_after": args.promote_after,
                "most_used_first": not args.first_used_first,
                "formula": FORMULA,
            },
            "rows": [asdict(row) for row in rows],
        }
        print(json.dumps(result))
        return 0
    print(
        f"{name}: {trace.n_tokens} tokens, the first {warm} not counted; {facts.n_layers} layers x {facts.n_experts} "
        f"experts of {size(facts.expert_nbytes)}, top {facts.top_k}"
    )
    print(f"{table(rows, facts)}\n\n{FORMULA}")
    print(
        f"of the misses, {first:.2f} a token are the first use of an expert in the whole trace: no cache saves these, "
        "and a longer trace has fewer"
    )
    whose = " (the released model's on an H200; give this model's with --compute-ms)" if foreign_compute else ""
    print(
        f"assumed: compute {rates.compute_ms:g} ms{whose}, PCIe {rates.pcie_gb_s:g} GB/s, disk "
        f"{rates.disk_gb_s:g} GB/s; up to {args.moves} promotions a token, of experts hit in the host tier "
        f"{args.promote_after} times or more"
    )
    return 0
