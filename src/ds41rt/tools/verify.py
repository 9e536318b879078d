"""`ds41rt verify`: compare a build and a machine with a golden directory, from single layers to whole runs.

A golden directory holds a checkpoint, `run.npz` (a fixed token run), `trace_s*.npz` (single steps with the state before
them and every layer's insides) and, if it has one, `run_reference_index_mode.npz`. Three levels, sharp to coarse: each
layer fed with golden inputs, a whole step from golden state, the run from an empty state. Selections must match exactly
at layer level; floats stay within the limits below (relative L2 unless the name says absolute).
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41rt.checkpoint.npz_file import load_npz
from ds41rt.engine import Engine
from ds41rt.errors import InputError
from ds41rt.tools.layer_probe import LayerProbe
from ds41rt.tools.progress import ProgressBar

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Limit:
    """Worst value and median allowed over all layers and steps; None = not limited."""

    worst: float | None
    median: float | None = None


# From the golden sets' own notes: measured noise of +-1 ulp on every fp32 sum, times a margin.
LAYER_LIMITS = {
    "X_engram": Limit(1e-3),
    "engram_gate abs": Limit(1e-3),
    "attn_in": Limit(1e-3),
    "hc_attn abs": Limit(2e-6),
    "index_scores": Limit(2e-2, 1e-3),
    "attn_out": Limit(3e-2, 1e-3),
    "X_attn": Limit(4e-3),
    "moe_in": Limit(4e-3),
    "hc_ffn abs": Limit(1e-3),
    "router_logits": Limit(4e-3),
    "expert_weights abs": Limit(2e-3),
    "moe_out": Limit(4e-2, 1e-3),
    "X_out": Limit(4e-3, 3e-4),
    "pre_out abs": Limit(1e-3),
}
# A fault in one weight moves one layer's output by less than the limits above leave room for, but it moves it. Sums in
# another order leave these outputs where they are, or move one stream value by one bf16 ulp.
UNMOVED = {"index_scores": 1e-6, "attn_out": 1e-6, "router_logits": 1e-6, "moe_out": 1e-6, "X_out": 5e-5}
UNMOVED_SHARE = 0.98
STEP_LIMIT = Limit(0.15, 1e-3)
STEP_SHARE_ABOVE_1E2, STEP_ARGMAX = 0.10, 0.95
RUN_LIMIT, RUN_ARGMAX = Limit(0.2, 4e-2), 0.85
STATE_LIMIT = Limit(None, 5e-2)


@dataclass(slots=True)
class Report:
    """Rows of the table and what went wrong."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def check(self, level: str, name: str, errors: list[tuple[float, str]], limit: Limit) -> None:
        """Add a row for `errors` (value, where); not-a-number counts as infinite."""
        values = np.array([np.inf if np.isnan(e) else e for e, _ in errors])
        worst, median = float(values.max()), float(np.median(values))
        where = errors[int(values.argmax())][1]
        row = {
            "level": level, "name": name, "n": len(errors), "worst": worst, "where": where, "median": median,
            "exact": int((values == 0).sum()), "worst_limit": limit.worst, "median_limit": limit.median,
        }  # fmt: skip
        row["ok"] = self._within(worst, limit.worst) and self._within(median, limit.median)
        if not row["ok"]:
            self.problems.append(f"{level} {name}: worst {worst:.2e} at {where}, median {median:.2e}")
        self.rows.append(row)

    def check_share(self, level: str, name: str, share: float, at_least: float) -> None:
        ok = share >= at_least
        self.rows.append({"level": level, "name": name, "share": share, "at_least": at_least, "ok": ok})
        if not ok:
            self.problems.append(f"{level} {name}: {100 * share:.1f} %, at least {100 * at_least:.0f} % wanted")

    @staticmethod
    def _within(value: float, limit: float | None) -> bool:
        return limit is None or value <= limit


def relative(a: NDArray[Any], b: NDArray[Any]) -> float:
    """|a - b| / |b| in float64; the absolute norm where b is all zero."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    norm = float(np.linalg.norm(y))
    return float(np.linalg.norm(x - y)) / (norm if norm > 0 else 1.0)


def absolute(a: NDArray[Any], b: NDArray[Any]) -> float:
    return float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())


class GoldenFile(dict[str, NDArray[Any]]):
    """The arrays of one npz file. Raises `InputError` naming the file when it is none, or has no such array."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(load_npz(path, "a golden file"))

    def __missing__(self, name: str) -> NDArray[Any]:
        raise InputError(f"{self._path}: has no array {name!r}")


def check_layers(engine: Engine, run: Arrays, traces: Sequence[tuple[str, Arrays]], report: Report) -> None:
    """Every layer of every trace step from golden inputs."""
    errors: dict[str, list[tuple[float, str]]] = {name: [] for name in LAYER_LIMITS}
    with LayerProbe(engine, run["tokens"]) as probe, ProgressBar("layers") as bar:
        for done, (step_name, trace) in enumerate(traces):
            bar(done, len(traces))
            position = int(trace["state.pos"])
            for layer in range(engine.config.n_layers):
                golden = {k[4:]: v for k, v in trace.items() if k.startswith(f"L{layer:02d}.")}
                got = probe.layer(layer, position, trace, golden, run)
                where = f"{step_name} layer {layer}"
                for name in LAYER_LIMITS:
                    key, _, kind = name.partition(" ")
                    if key in golden and golden[key].size:
                        measure: Callable[..., float] = absolute if kind else relative
                        seen = np.isfinite(golden[key])  # scores outside the candidate blocks are -inf
                        errors[name].append((measure(got[key][seen], golden[key][seen]), where))
                for name in ("expert_ids", "index_topk", "engram_rows", "cand_mask"):
                    if name in golden and not np.array_equal(got[name], golden[name]):
                        report.problems.append(f"layer {name} differs at {where}: {got[name]}, golden {golden[name]}")
    for name, limit in LAYER_LIMITS.items():
        if errors[name]:
            report.check("layer", name, errors[name], limit)
    for name, most in UNMOVED.items():
        if errors[name]:
            unmoved = sum(e <= most for e, _ in errors[name]) / len(errors[name])
            report.check_share("layer", f"{name} within {most:.0e}", unmoved, UNMOVED_SHARE)


def check_steps(engine: Engine, run: Arrays, traces: Sequence[tuple[str, Arrays]], report: Report) -> None:
    """Whole steps from golden state."""
    errors, same = [], 0
    with LayerProbe(engine, run["tokens"]) as probe:
        for name, trace in traces:
            logits = probe.step(int(trace["token"]), int(trace["state.pos"]), trace)
            errors.append((relative(logits, trace["logits"]), name))
            same += int(logits.argmax() == trace["logits"].argmax())
    report.check("step", "logits", errors, STEP_LIMIT)
    below = sum(e <= 1e-2 for e, _ in errors) / len(errors)
    report.check_share("step", "steps below 1e-2", below, 1 - STEP_SHARE_ABOVE_1E2)
    report.check_share("step", "argmax equal", same / len(errors), STEP_ARGMAX)


def check_run(engine: Engine, run: Arrays, label: str, golden: NDArray[Any], report: Report, *, state: bool) -> None:
    """The whole run from an empty state."""
    errors, same = [], 0
    with LayerProbe(engine, run["tokens"]) as probe, ProgressBar(label) as bar:
        for t, token in enumerate(run["tokens"].tolist()):
            bar(t, len(golden))
            logits = engine.decode_step(probe.sequence, token)
            errors.append((relative(logits, golden[t]), f"step {t}"))
            same += int(logits.argmax() == golden[t].argmax())
        if state:
            for name, got in probe.state().items():
                report.check(label, name, [(relative(got, run[name][: len(got)]), name)], STATE_LIMIT)
    report.check(label, "logits", errors, RUN_LIMIT)
    report.check_share(label, "argmax equal", same / len(errors), RUN_ARGMAX)


def compare(directory: Path, backend: str | None, schedule: str) -> Report:
    """All levels on one golden directory. Raises `InputError` if it is none."""
    if not (directory / "run.npz").exists():
        below = [str(path.parent) for path in sorted(directory.glob("*/run.npz"))]
        hint = f": {' or '.join(below)}" if below else ", for example tests/goldens/tiny-a"
        raise InputError(f"{directory}: has no run.npz; give a golden directory{hint}")
    run = GoldenFile(directory / "run.npz")
    traces: Sequence[tuple[str, Arrays]] = [
        (p.stem.removeprefix("trace_"), GoldenFile(p)) for p in sorted(directory.glob("trace_s*.npz"))
    ]
    if not traces:
        raise InputError(f"{directory}: no trace_s*.npz files; give a golden directory")
    report = Report()
    checkpoint = directory / "checkpoint"
    context = max(len(run["tokens"]), 1)
    with Engine.open(checkpoint, mode="eager", backend=backend, schedule=schedule, max_context=context) as engine:
        check_layers(engine, run, traces, report)
        check_steps(engine, run, traces, report)
        check_run(engine, run, "run", run["logits"], report, state=True)
    stale = directory / "run_reference_index_mode.npz"
    if stale.exists():
        with Engine.open(
            checkpoint, mode="eager", backend=backend, schedule=schedule, max_context=context, index_keys="reference"
        ) as engine:
            check_run(engine, run, "reference keys", GoldenFile(stale)["logits"], report, state=False)
    return report


def _print_table(report: Report) -> None:
    print(f"{'level':<15}{'what':<22}{'n':>5}{'equal':>7}{'worst':>10}{'limit':>9}{'median':>10}{'limit':>9}  worst at")
    for row in report.rows:
        if "share" in row:
            share = f"{100 * row['share']:.0f} % (at least {100 * row['at_least']:.0f} %)"
            print(f"{row['level']:<15}{row['name']:<22}{share:>31}{'' if row['ok'] else '  FAILED'}")
            continue
        limits = [f"{v:.0e}" if v is not None else "-" for v in (row["worst_limit"], row["median_limit"])]
        print(
            f"{row['level']:<15}{row['name']:<22}{row['n']:>5}{row['exact']:>7}{row['worst']:>10.1e}{limits[0]:>9}"
            f"{row['median']:>10.1e}{limits[1]:>9}  {row['where']}{'' if row['ok'] else '  FAILED'}"
        )
    for problem in report.problems:
        print(f"PROBLEM {problem}")
    print("verify: " + ("ok" if not report.problems else f"{len(report.problems)} problems"))


def verify(args: argparse.Namespace) -> int:
    report = compare(args.golden_dir, args.backend, args.schedule)
    if args.json:
        print(json.dumps({"ok": not report.problems, "rows": report.rows, "problems": report.problems}))
    else:
        _print_table(report)
    return 1 if report.problems else 0
