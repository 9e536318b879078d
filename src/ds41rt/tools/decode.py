"""`ds41rt decode`: a prompt in, greedy tokens out, with counters, and files for comparing runs."""

import argparse
import json
import os
import re
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ds41rt.checkpoint.token_map import load_tokenizer
from ds41rt.engine import DecodeSequence, Engine, Stats
from ds41rt.errors import ContextFullError, InputError
from ds41rt.tools.output import output_file
from ds41rt.tools.progress import ProgressBar
from ds41rt.trace import TraceRecorder


@dataclass(frozen=True, slots=True)
class Run:
    """One greedy run: the new tokens, why it stopped, its speed without loading, the logits of every position."""

    tokens: list[int]
    stopped: str
    seconds: float
    positions: int
    stats: Stats
    logits: NDArray[np.float32] | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: `tokens` are the new ones, `positions` counts the tokens processed, then every other counter."""
        counted = self.stats.as_dict()
        del counted["tokens"]
        return {
            "tokens": self.tokens,
            "stopped": self.stopped,
            "positions": self.positions,
            "tokens_per_s": self.tokens_per_s,
            **counted,
        }

    @property
    def logits_width(self) -> int:
        return 0 if self.logits is None else self.logits.shape[1]

    @property
    def tokens_per_s(self) -> float:
        return self.positions / self.seconds if self.seconds > 0 else 0.0


def greedy(
    engine: Engine,
    seq: DecodeSequence,
    prompt: list[int],
    max_new: int,
    *,
    ignore_eos: bool = False,
    keep_logits: bool = False,
    trace: TraceRecorder | None = None,
    progress: ProgressBar | None = None,
) -> Run:
    """Feed `prompt`, then up to `max_new` argmax tokens; the last new token is not fed. Raises what a step raises."""
    total = len(prompt) + max(max_new - 1, 0)
    if seq.position + total > engine.max_context:
        raise ContextFullError(
            f"a prompt of {len(prompt)} tokens and {max_new} new ones need {total} positions, the maximum context is "
            f"{engine.max_context}; raise --max-context or lower --max-new"
        )
    engine.check_tokens(prompt)
    kept: list[NDArray[np.float32]] = []
    new: list[int] = []
    stopped = "max-new"
    feed = list(prompt)
    image_token = engine.config.image_token
    start = time.perf_counter()
    for done in range(total):
        logits = engine.decode_step(seq, feed[done])
        if trace is not None:
            trace.end_token()
        if keep_logits:
            kept.append(logits.copy())
        if progress is not None:
            progress(done + 1, total)
        if done + 1 < len(prompt) or max_new == 0:
            continue
        if image_token is not None:
            logits[image_token] = -np.inf  # stands for pixels: no text continues with it
        token = int(np.argmax(logits))
        new.append(token)
        feed.append(token)
        if token == engine.config.eos_token and not ignore_eos:
            stopped = "eos"
            break
    seconds = time.perf_counter() - start
    positions = len(prompt) + max(len(new) - 1, 0)
    stacked = np.stack(kept) if keep_logits else None
    return Run(new, stopped, seconds, positions, engine.stats(), stacked)


def parse_ids(text: str, where: str) -> list[int]:
    """Token ids from `text`, separated by commas or white space; errors name the piece that is not a number."""
    if not text.strip():
        raise InputError(f"{where}: there are no token ids; give for example 1,2,3")
    ids = []
    for piece in re.split(r"[,\s]+", text.strip()):
        if not re.fullmatch(r"[0-9]{1,18}", piece):
            shown = piece if len(piece) <= 40 else piece[:40] + "..."
            raise InputError(f"{where}: {shown!r} is not a token id; give non-negative integers, for example 1,2,3")
        ids.append(int(piece))
    return ids


def _prompt_of(args: argparse.Namespace) -> list[int]:
    if args.prompt_ids is not None:
        return parse_ids(args.prompt_ids, "--prompt-ids")
    if args.prompt_ids_file is not None:
        try:
            text = args.prompt_ids_file.read_text(encoding="utf-8")
        except OSError as e:
            raise InputError(f"--prompt-ids-file {args.prompt_ids_file}: cannot be read: {e.strerror}") from e
        except UnicodeDecodeError as e:
            raise InputError(f"--prompt-ids-file {args.prompt_ids_file}: is not a text file: {e}") from e
        return parse_ids(text, f"--prompt-ids-file {args.prompt_ids_file}")
    if not args.prompt.isprintable() and any("\ud800" <= c <= "\udfff" for c in args.prompt):
        raise InputError("--prompt: the text is not valid UTF-8")
    ids: list[int] = load_tokenizer(args.checkpoint).encode(args.prompt).ids
    if not ids:
        raise InputError("--prompt: the text has no tokens")
    return ids


def counters(stats: Stats) -> str:
    """The counters of a run as two readable lines."""
    falls = ", ".join(f"{n} {kind}" for kind, n in stats.falls.items() if n) or "none"
    demand = stats.device_hits + stats.host_hits + stats.misses
    rate = 100 * (demand - stats.misses) / demand if demand else 0.0
    return (
        f"  graphs: {stats.captures} captured, {stats.replays} replays, {stats.clean_replays} clean, falls: {falls}\n"
        f"  experts: {demand} picks, {rate:.1f} % hits, {stats.misses} misses, {stats.expert_slots} slots, "
        f"{stats.expert_nbytes_read / 1e6:.1f} MB read"
    )


def _outputs(stack: ExitStack, logits: Path | None, trace: Path | None) -> tuple[BinaryIO | None, BinaryIO | None]:
    """Both result files, open before the work starts: one that cannot be written is refused now, not minutes later."""
    if logits is not None and trace is not None and os.path.realpath(logits) == os.path.realpath(trace):
        raise InputError(f"--logits-out and --trace-out are the same file: {logits}")
    return (
        None if logits is None else stack.enter_context(output_file(logits)),
        None if trace is None else stack.enter_context(output_file(trace)),
    )


def decode(args: argparse.Namespace) -> int:
    if args.max_new < 0:
        raise InputError(f"--max-new must not be negative, is {args.max_new}")
    prompt = _prompt_of(args)
    with ExitStack() as stack:
        logits_out, trace_out = _outputs(stack, args.logits_out, args.trace_out)
        bar = stack.enter_context(ProgressBar("loading"))
        engine = stack.enter_context(
            Engine.open(
                args.checkpoint,
                mode=args.mode,
                schedule=args.schedule,
                expert_slots=args.expert_slots,
                progress=bar,
                backend=args.backend,
                expert_cache_gib=args.expert_cache_gib,
                max_context=args.max_context,
                index_keys=args.index_keys,
            )
        )
        seq = stack.enter_context(engine.new_sequence())
        trace = None
        if trace_out is not None:
            trace = TraceRecorder(engine)
            stack.callback(trace.close)
        bar = stack.enter_context(ProgressBar("decoding"))
        run = greedy(
            engine,
            seq,
            prompt,
            args.max_new,
            ignore_eos=args.ignore_eos,
            keep_logits=logits_out is not None,
            trace=trace,
            progress=bar,
        )
        if logits_out is not None and run.logits is not None:
            np.save(logits_out, run.logits)
        if trace_out is not None and trace is not None:
            trace.save(trace_out)
        backend = engine.backend.name
    if args.json:
        print(json.dumps({"backend": backend, **run.as_dict()}))
        return 0
    print(",".join(map(str, run.tokens)))
    if args.prompt is not None and run.tokens:
        print(load_tokenizer(args.checkpoint).decode(run.tokens))
    sys.stdout.flush()
    print(
        f"{run.positions} positions, {run.tokens_per_s:.1f} tokens/s without loading, backend {backend}, "
        f"stopped: {run.stopped}\n{counters(run.stats)}",
        file=sys.stderr,
    )
    return 0
