"""`ds41rt demo`: a tiny synthetic checkpoint, decoded twice with a cache smaller than its working set - eagerly, and as
graph segments that replay over streamed experts - and compared bit for bit.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ds41rt.checkpoint.synth import synthesize
from ds41rt.engine import Engine, Mode
from ds41rt.errors import InputError
from ds41rt.tools.decode import Run, greedy
from ds41rt.tools.progress import ProgressBar

PRESET, SEED = "tiny", 1
# Of 8 x 384 experts: most picks hit, enough miss that falls show.
EXPERT_SLOTS = 1500
PROMPT = (0, 17, 42, 99, 256, 301, 7)
MODES: tuple[Mode, ...] = ("eager", "step-graph")


def run_mode(
    checkpoint: Path,
    mode: Mode,
    tokens: int,
    backend: str | None,
    schedule: str,
    tamper: Callable[[Engine], None] | None = None,
) -> tuple[Run, str]:
    """One run and the backend's name. `tamper` gets the engine before the first step: tests plant faults with it."""
    max_new = tokens - len(PROMPT) + 1
    with (
        Engine.open(checkpoint, mode=mode, backend=backend, schedule=schedule, expert_slots=EXPERT_SLOTS) as engine,
        engine.new_sequence() as seq,
        ProgressBar(f"decoding, {mode}") as bar,
    ):
        if tamper is not None:
            tamper(engine)
        run = greedy(engine, seq, list(PROMPT), max_new, ignore_eos=True, keep_logits=True, progress=bar)
        return run, engine.backend.name


def identical(a: Run, b: Run) -> bool:
    """True when both runs produced the same logits in every bit, at every position."""
    if a.logits is None or b.logits is None or a.logits.shape != b.logits.shape:
        return False
    return bool(np.array_equal(a.logits.view(np.uint32), b.logits.view(np.uint32)))


def _rows(runs: dict[Mode, Run]) -> list[tuple[str, list[str]]]:
    def row(label: str, value: Callable[[Run], str]) -> tuple[str, list[str]]:
        return label, [value(run) for run in runs.values()]

    def hit_rate(run: Run) -> str:
        hits, misses = run.stats.device_hits + run.stats.host_hits, run.stats.misses
        return f"{100 * hits / (hits + misses):.1f} %"

    return [
        row("tokens decoded", lambda r: str(r.positions)),
        row("tokens/s (host backend: no measure of a GPU)", lambda r: f"{r.tokens_per_s:.1f}"),
        row("graph segments captured", lambda r: str(r.stats.captures)),
        row("graph replays", lambda r: str(r.stats.replays)),
        row("  clean: every expert was there", lambda r: str(r.stats.clean_replays)),
        row("  falls: fetched, snapshot restored, rerun", lambda r: str(sum(r.stats.falls.values()))),
        row("expert slots", lambda r: str(r.stats.expert_slots)),
        row("expert hit rate", hit_rate),
        row("experts read from the checkpoint", lambda r: str(r.stats.misses)),
    ]


def demo(args: argparse.Namespace, tamper: Callable[[Engine], None] | None = None) -> int:
    if args.tokens < len(PROMPT):
        raise InputError(f"--tokens must be at least {len(PROMPT)}, the length of the demo's prompt, is {args.tokens}")
    runs: dict[Mode, Run] = {}
    with tempfile.TemporaryDirectory(prefix="ds41rt-demo-") as folder:
        checkpoint = Path(folder) / PRESET
        synthesize(checkpoint, PRESET, SEED)
        for mode in MODES:
            runs[mode], backend = run_mode(
                checkpoint, mode, args.tokens, args.backend, args.schedule, tamper if mode == "step-graph" else None
            )
    same = identical(runs["eager"], runs["step-graph"])
    if args.json:
        result: dict[str, Any] = {"backend": backend, "bit_identical": same}
        for mode, run in runs.items():
            result[mode] = run.as_dict()
        print(json.dumps(result))
        return 0 if same else 1
    print(f"A synthetic checkpoint (preset {PRESET}, 8 layers x 384 experts, top 6), backend {backend}.")
    print(f"{'':<46}{'eager':>12}{'step-graph':>12}")
    for label, values in _rows(runs):
        print(f"{label:<46}" + "".join(f"{v:>12}" for v in values))
    print("first new tokens: " + " ".join(map(str, runs["step-graph"].tokens[:12])))
    print(f"bit-identical: {'yes' if same else 'no'} ({args.tokens} x {runs['eager'].logits_width} logits compared)")
    return 0 if same else 1
