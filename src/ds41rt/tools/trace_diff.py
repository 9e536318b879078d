"""`ds41rt trace diff`: where two runs part, and what both had there.

Two files of `decode --trace-out`, or one checkpoint that is decoded by two engines in lockstep, token by token, up to
the first difference. What counts as a difference, and which half of which layer made it, is in `trace.compare`.
"""

import argparse
import json
import math
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from ds41rt.engine import Engine, Mode
from ds41rt.errors import Ds41Error, InputError
from ds41rt.tools.decode import best_token, positions_needed, prompt_of
from ds41rt.tools.progress import ProgressBar
from ds41rt.trace.compare import Check, Difference, Values, first_difference, row, values
from ds41rt.trace.file import PARTS, Trace, load_trace, selection_name
from ds41rt.trace.record import TraceRecorder

_RUN_OPTIONS = (
    *("prompt_ids", "prompt_ids_file", "prompt", "max_new", "modes", "expert_slots", "max_context"),
    *("backend", "schedule"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Both traces (of a run: the last token alone), how many positions were compared, and where they part."""

    a: Trace
    b: Trace
    n_positions: int
    difference: Difference | None

    def as_dict(self) -> dict[str, Any]:
        sides = {name: {"where": t.where, **t.about} for name, t in (("a", self.a), ("b", self.b))}
        found = None if self.difference is None else describe(self.a, self.b, self.difference)
        return {"equal": found is None, "positions": self.n_positions, **sides, "difference": found}


def lockstep(a: Engine, b: Engine, prompt: list[int], max_new: int, progress: ProgressBar | None = None) -> Outcome:
    """Step both engines through `prompt` and up to `max_new` greedy tokens, until they part.

    Raises what a step raises; the message then says which of both engines it was, and where.
    """
    with ExitStack() as stack:
        engines = (a, b)
        seqs = [stack.enter_context(engine.new_sequence()) for engine in engines]
        total = max(positions_needed(e, s, prompt, max_new) for e, s in zip(engines, seqs, strict=True))
        recorders = [TraceRecorder(engine, values=True) for engine in engines]
        for recorder in recorders:
            stack.callback(recorder.close)
        token, done, difference = prompt[0], 0, None
        while done < total and difference is None:
            token = prompt[done] if done < len(prompt) else token
            traces, logits = [], None
            for name, engine, seq, recorder in zip("ab", engines, seqs, recorders, strict=True):
                recorder.clear()
                try:
                    logits = engine.decode_step(seq, token)
                except Ds41Error as e:
                    raise Ds41Error(f"run {name} failed at position {done}, up to which both agree: {e}") from e
                recorder.end_token()
                traces.append(recorder.trace(f"run {name}"))
            done += 1
            difference = first_difference(*traces)
            if progress is not None:
                progress(done, total)
            if logits is not None:
                token = best_token(b, logits)
    return Outcome(traces[0], traces[1], done, difference)


def describe(a: Trace, b: Trace, difference: Difference) -> dict[str, Any]:
    """The first difference as a JSON-ready object: the place, and what both sides had there."""
    check, index = difference.check, difference.index

    def both(value: Any) -> dict[str, Any]:
        return {"a": value(a), "b": value(b)}

    found: dict[str, Any] = {
        "position": difference.position,
        "layer": check.layer,
        "half": check.half,
        "part": check.part,
        "text": str(difference),
        **both(lambda t: _shown(t, index, check)),
    }
    if check.layer is not None:
        layer, source = check.layer, a.config.index_source_of(check.layer)
        found["ran"] = both(lambda t: "in a replay" if t.arrays["replayed"][index, layer] else "eagerly")
        found["experts"] = both(lambda t: t.arrays["expert_ids"][index, layer].tolist())
        found["weights"] = both(lambda t: [_number(w) for w in t.arrays["expert_weights"][index, layer].tolist()])
        if source is not None:
            found["selected_rows"] = both(lambda t: _rows(t, index, source))
    parts = values(a, b, difference)
    found["values"] = None if parts is None else _values_dict(parts)
    return found


def _shown(trace: Trace, index: int, check: Check) -> Any:
    """A hash as text; picks, weights and rows as they are."""
    if check.part in PARTS:
        return f"{int(row(trace, index, check)[0]):016x}"
    if check.array == "expert_weights":
        return [_number(w) for w in trace.arrays[check.array][index, check.row].tolist()]
    return row(trace, index, check).tolist() if check.array == "expert_ids" else _rows(trace, index, check.layer or 0)


def _rows(trace: Trace, index: int, source: int) -> list[int]:
    rows = trace.arrays[selection_name(source)][index]
    return [int(r) for r in rows if r >= 0]


def _number(x: float) -> float | str:
    """JSON has no infinity and no not-a-number."""
    return x if math.isfinite(x) else str(x)


def _values_dict(found: Values) -> dict[str, Any]:
    return {
        "n_values": found.n_values,
        "n_differ": found.n_differ,
        "largest": found.largest,
        "first": list(found.first),
        "around": [{"at": list(at), "a": _number(x), "b": _number(y)} for at, x, y in found.around],
    }


def compare_runs(args: argparse.Namespace, checkpoint: Path) -> Outcome:
    """The run form: two engines on one checkpoint."""
    max_new = 32 if args.max_new is None else args.max_new
    if max_new < 0:
        raise InputError(f"--max-new must not be negative, is {max_new}")
    prompt = prompt_of(args, checkpoint)
    modes, slots = _modes(args.modes or "eager,step-graph"), _slots(args.expert_slots)
    with ExitStack() as stack:
        engines = []
        for mode, n_slots in zip(modes, slots, strict=True):
            bar = stack.enter_context(ProgressBar(f"loading, {mode}"))
            engine = Engine.open(
                checkpoint,
                mode=mode,
                schedule=args.schedule or "lazy",
                expert_slots=n_slots,
                progress=bar,
                backend=args.backend,
                max_context=args.max_context,
            )
            engines.append(stack.enter_context(engine))
        bar = stack.enter_context(ProgressBar("comparing"))
        return lockstep(engines[0], engines[1], prompt, max_new, bar)


def _modes(text: str) -> list[Mode]:
    modes = text.split(",")
    known = get_args(Mode)
    if len(modes) != 2 or any(mode not in known for mode in modes):
        raise InputError(f"--modes {text!r}: give two of {', '.join(known)}, as eager,step-graph")
    return cast(list[Mode], modes)


def _slots(text: str | None) -> list[int | None]:
    """One number for both runs, or one for each."""
    if text is None:
        return [None, None]
    counts = text.split(",")
    if len(counts) > 2 or not all(count.isascii() and count.isdigit() for count in counts):
        raise InputError(f"--expert-slots {text!r}: give one number for both runs, or two, as 20,45")
    return [int(counts[0]), int(counts[-1])]


def compare_files(args: argparse.Namespace, a: Path, b: Path) -> Outcome:
    """The file form."""
    for name in _RUN_OPTIONS:
        if getattr(args, name) is not None:
            option = "--" + name.replace("_", "-")
            raise InputError(f"{option} is for decoding a checkpoint; with two trace files nothing is decoded")
    first, second = load_trace(a), load_trace(b)
    difference = first_difference(first, second)
    n = first.n_positions if difference is None else difference.index + 1
    return Outcome(first, second, n, difference)


def trace_diff(args: argparse.Namespace) -> int:
    if len(args.what) > 2:
        raise InputError(f"give a checkpoint or two trace files, not {len(args.what)} paths")
    if len(args.what) == 2:
        outcome = compare_files(args, *args.what)
    elif args.prompt_ids is None and args.prompt_ids_file is None and args.prompt is None:
        raise InputError(f"{args.what[0]}: give two trace files, or a checkpoint and a prompt (--prompt-ids 1,2,3)")
    else:
        outcome = compare_runs(args, args.what[0])
    if args.json:
        print(json.dumps(outcome.as_dict()))
    else:
        _print(outcome)
    return 0 if outcome.difference is None else 1


def _print(outcome: Outcome) -> None:
    found = None if outcome.difference is None else describe(outcome.a, outcome.b, outcome.difference)
    for name, side in (("a", outcome.a), ("b", outcome.b)):
        print(f"{name}: {side.where}: " + ", ".join(f"{key} {value}" for key, value in side.about.items()))
    if found is None:
        print(f"equal: {outcome.n_positions} positions, every half of every layer")
        return
    print(f"the runs part at {found['text']}")
    for key in ("ran", "experts", "weights", "selected_rows"):
        if key in found:
            a, b = found[key]["a"], found[key]["b"]
            print(f"  {key.replace('_', ' ')}: {a}" + ("  (both)" if a == b else f"  a\n  {'':<{len(key)}}  {b}  b"))
    if found["part"] in PARTS:
        print(f"  hash of {found['part']}: {found['a']}  a\n  {'':<{len('hash of ' + found['part'])}}  {found['b']}  b")
    inside = found["values"]
    if inside is None:
        if found["part"] in PARTS:
            print("  no values: these traces hold hashes alone (see decode --trace-values)")
        return
    largest = "not a number" if inside["largest"] is None else f"{inside['largest']:.6g}"
    print(f"  {inside['n_differ']} of {inside['n_values']} values differ, the largest difference is {largest}")
    print(f"    {'at':<12}{'a':>24} {'b':>24}")
    for line in inside["around"]:
        mark = "  <- differs" if line["a"] != line["b"] or line["at"] == inside["first"] else ""
        at = ",".join(map(str, line["at"]))
        print(f"    [{at}]".ljust(16) + f"{line['a']!s:>24} {line['b']!s:>24}{mark}")
