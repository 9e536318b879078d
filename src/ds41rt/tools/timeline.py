"""`ds41rt timeline`: a few decode steps as a picture, host and device side by side, and what each token cost."""

import argparse
import json
from contextlib import ExitStack
from statistics import median
from typing import Any, cast

from ds41rt import __version__
from ds41rt.cu.backend import GpuBackend, open_backend
from ds41rt.engine import Engine, configured_backend
from ds41rt.errors import InputError
from ds41rt.tools.decode import best_token, positions_needed, prompt_of
from ds41rt.tools.output import output_file
from ds41rt.tools.progress import ProgressBar
from ds41rt.tools.timeline_backend import TimelineBackend, Token
from ds41rt.tools.timeline_events import trace_events
from ds41rt.tools.timeline_record import Recorder
from ds41rt.trace.record import mode_of


def summary(token: Token) -> dict[str, Any]:
    """One token as a row of the table. Launches, read-backs, waits and expert reads are calls; work that was recorded
    is none. A large expert takes several reads."""
    return {
        "position": token.position,
        "token": token.token,
        "host_us": token.host_us,
        "device_busy_us": token.busy_us,
        "clock_error_us": token.clock_error_us,
        "launches": token.calls("launch"),
        "graph_launches": token.calls("graph launch"),
        "copies": token.calls("copy", "fill"),
        "read_backs": token.calls("read-back"),
        "synchronisations": token.calls("synchronisation"),
        "expert_reads": sum(span.category == "read" for span in token.host),
        "misses": token.counted["misses"],
        "falls": sum(token.counted["falls"].values()),
        "captures": token.counted["captures"],
    }


def record(engine: Engine, backend: TimelineBackend, prompt: list[int], n: int) -> list[Token]:
    """Process the prompt, then record `n` greedy tokens. Raises what a step raises."""
    with engine.new_sequence() as seq, ProgressBar("recording") as bar:
        total = positions_needed(engine, seq, prompt, n + 1)
        logits = engine.prefill(seq, prompt)
        recorder = Recorder(engine, backend)
        try:
            for done in range(n):
                bar(len(prompt) + done, total)
                logits = recorder.step(seq, best_token(engine, logits))
        finally:
            recorder.close()
    return recorder.tokens


def timeline(args: argparse.Namespace) -> int:
    if args.tokens < 1:
        raise InputError(f"--tokens must be at least 1, is {args.tokens}")
    prompt = prompt_of(args, args.checkpoint)
    with ExitStack() as stack:
        out = stack.enter_context(output_file(args.out))
        raw, _ = open_backend(configured_backend(args.backend), schedule=args.schedule)
        stack.callback(raw.close)
        backend = TimelineBackend(raw)
        bar = stack.enter_context(ProgressBar("loading"))
        engine = stack.enter_context(
            Engine.open(
                args.checkpoint,
                mode=args.mode,
                expert_slots=args.expert_slots,
                progress=bar,
                backend=cast(GpuBackend, backend),
                max_context=args.max_context,
            )
        )
        tokens = record(engine, backend, prompt, args.tokens)
        mode = mode_of(engine)
        about = {"ds41rt": __version__, "backend": raw.name, "device": raw.device_name, "mode": mode}
        events = trace_events(tokens, f"ds41rt {__version__}, {mode}", f"{raw.name}: {raw.device_name}")
        out.write(json.dumps({**events, "otherData": about}).encode())
    rows = [summary(token) for token in tokens]
    if args.json:
        print(json.dumps({"out": str(args.out), **about, "tokens": rows}))
    else:
        _print(about, rows)
        print(f"{args.out}: open it at ui.perfetto.dev")
    return 0


_COLUMNS = {
    "position": "position",
    "host us": "host_us",
    "device us": "device_busy_us",
    "launches": "launches",
    "graphs": "graph_launches",
    "copies": "copies",
    "read-backs": "read_backs",
    "waits": "synchronisations",
    "expert reads": "expert_reads",
    "falls": "falls",
    "captures": "captures",
}


def _print(about: dict[str, str], rows: list[dict[str, Any]]) -> None:
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print("".join(f"{title:>{len(title) + 2}}" for title in _COLUMNS))
    for row in rows:
        cells = (f"{row[key]:.0f}" for key in _COLUMNS.values())
        print("".join(f"{cell:>{len(title) + 2}}" for title, cell in zip(_COLUMNS, cells, strict=True)))
    host, busy = (median(row[key] for row in rows) for key in ("host_us", "device_busy_us"))
    print(f"median: {host:.0f} us on the host, {busy:.0f} us with work on the device; recording itself costs time too")
