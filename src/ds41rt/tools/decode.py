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

from ds41rt.capture.words import size
from ds41rt.checkpoint.token_map import load_tokenizer
from ds41rt.engine import DecodeSequence, Engine, Stats
from ds41rt.errors import ContextFullError, InputError
from ds41rt.moe.route_trace import RouteFacts, RouteRecorder
from ds41rt.tools.output import output_file
from ds41rt.tools.progress import ProgressBar
from ds41rt.trace.record import TraceRecorder


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


def best_token(engine: Engine, logits: NDArray[np.float32]) -> int:
    """The greedy choice, never the image token: that one's logit is overwritten."""
    logits[engine.config.image_token] = -np.inf  # stands for pixels: no text continues with it
    return int(np.argmax(logits))


def positions_needed(engine: Engine, seq: DecodeSequence, prompt: list[int], max_new: int) -> int:
    """Steps of a prompt and `max_new` greedy tokens, the last of which is not fed.

    Raises `InputError` for a token that cannot be decoded, `ContextFullError` if there is no room for all.
    """
    total = len(prompt) + max(max_new - 1, 0)
    if seq.position + total > engine.max_context:
        raise ContextFullError(
            f"a prompt of {len(prompt)} tokens and {max_new} new ones need {total} positions, the maximum context is "
            f"{engine.max_context}; raise it (max_context, DS41RT_MAX_CONTEXT) or ask for fewer new tokens"
        )
    engine.check_tokens(prompt)
    return total


def greedy(
    engine: Engine,
    seq: DecodeSequence,
    prompt: list[int],
    max_new: int,
    *,
    ignore_eos: bool = False,
    keep_logits: bool = False,
    trace: TraceRecorder | None = None,
    routes: RouteRecorder | None = None,
    progress: ProgressBar | None = None,
    new: list[int] | None = None,
) -> Run:
    """Feed `prompt`, then up to `max_new` argmax tokens; the last new token is not fed. Raises what a step raises.

    `new`: an empty list to fill, for a caller who wants what there is when a step fails.
    """
    total = positions_needed(engine, seq, prompt, max_new)
    kept: list[NDArray[np.float32]] = []
    new = [] if new is None else new
    stopped = "max-new"
    feed = list(prompt)
    start = time.perf_counter()
    for done in range(total):
        logits = engine.decode_step(seq, feed[done])
        if trace is not None:
            trace.end_token()
        if routes is not None:
            routes.end_token(engine.router.picks)
        if keep_logits:
            kept.append(logits.copy())
        if progress is not None:
            progress(done + 1, total)
        if done + 1 < len(prompt) or max_new == 0:
            continue
        token = best_token(engine, logits)
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
    for piece in re.split(r"\s*,\s*|\s+", text.strip()):
        if not re.fullmatch(r"[0-9]{1,18}", piece):
            shown = piece if len(piece) <= 40 else piece[:40] + "..."
            raise InputError(f"{where}: {shown!r} is not a token id; give non-negative integers, for example 1,2,3")
        ids.append(int(piece))
    return ids


def prompt_of(args: argparse.Namespace, checkpoint: Path) -> list[int]:
    """The token ids that --prompt-ids, --prompt-ids-file or --prompt asks for. Raises `InputError`."""
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
    ids: list[int] = load_tokenizer(checkpoint).encode(args.prompt).ids
    if not ids:
        raise InputError("--prompt: the text has no tokens")
    return ids


def counters(stats: Stats) -> str:
    """The counters of a run as readable lines."""
    falls = ", ".join(f"{n} {kind}" for kind, n in stats.falls.items() if n) or "none"
    demand = stats.device_hits + stats.host_hits + stats.misses
    rate = 100 * (demand - stats.misses) / demand if demand else 0.0
    text = (
        f"  graphs: {stats.captures} captured, {stats.replays} replays, {stats.clean_replays} clean, falls: {falls}\n"
        f"  experts: {demand} picks, {rate:.1f} % hits, {stats.misses} misses, {stats.expert_slots} slots, "
        f"{size(stats.expert_nbytes_read)} read"
    )
    if stats.host_slots:
        text += (
            f"\n  host tier: {stats.host_hits} of the hits, {stats.host_slots} slots, {stats.promotions} promotions, "
            f"{stats.demotions} demotions, {size(stats.expert_nbytes_moved)} moved"
        )
    if stats.prefetch_issued:
        text += (
            f"\n  read ahead: {stats.prefetch_issued} experts, {stats.prefetch_useful} useful, "
            f"{stats.prefetch_wasted} wasted, {stats.prefetch_failed} failed"
        )
    return text


def engine_facts(engine: Engine) -> RouteFacts:
    """What a route trace says of the model that this engine decodes."""
    cfg, arena = engine.config, engine.arena
    starts = tuple(sorted(engine.machine.owners))
    return RouteFacts(cfg.n_layers, cfg.n_experts, cfg.top_k, arena.layout.nbytes, arena.slot_nbytes, starts)


_OUTPUTS = ("--logits-out", "--trace-out", "--route-trace-out")


def _outputs(stack: ExitStack, args: argparse.Namespace) -> list[BinaryIO | None]:
    """The result files, open before the work starts: one that cannot be written is refused now, not minutes later."""
    paths: list[Path | None] = [args.logits_out, args.trace_out, args.route_trace_out]
    taken: dict[str, str] = {}
    for option, path in zip(_OUTPUTS, paths, strict=True):
        if path is not None:
            other = taken.setdefault(os.path.realpath(path), option)
            if other != option:
                raise InputError(f"{other} and {option} are the same file: {path}")
    return [None if path is None else stack.enter_context(output_file(path)) for path in paths]


def _print_tokens(args: argparse.Namespace, tokens: list[int]) -> None:
    if not tokens:
        return
    print(",".join(map(str, tokens)))
    if args.prompt is not None:
        print(load_tokenizer(args.checkpoint).decode(tokens))
    sys.stdout.flush()


def decode(args: argparse.Namespace) -> int:
    if args.max_new < 0:
        raise InputError(f"--max-new must not be negative, is {args.max_new}")
    if args.trace_values and args.trace_out is None:
        raise InputError("--trace-values goes with --trace-out, which names the file")
    prompt = prompt_of(args, args.checkpoint)
    new: list[int] = []

    def print_what_there_is(kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not args.json:
            _print_tokens(args, new)

    with ExitStack() as stack:
        stack.push(print_what_there_is)  # first, so called last: the progress bar is off the screen then
        logits_out, trace_out, routes_out = _outputs(stack, args)
        bar = stack.enter_context(ProgressBar("loading"))
        engine = stack.enter_context(
            Engine.open(
                args.checkpoint,
                mode=args.mode,
                schedule=args.schedule,
                expert_slots=args.expert_slots,
                host_slots=args.host_slots,
                progress=bar,
                backend=args.backend,
                expert_cache_gib=args.expert_cache_gib,
                host_cache_gib=args.host_cache_gib,
                prefetch=args.prefetch,
                max_context=args.max_context,
                index_keys=args.index_keys,
            )
        )
        seq = stack.enter_context(engine.new_sequence())
        trace = None
        if trace_out is not None:
            trace = TraceRecorder(engine, values=args.trace_values)
            stack.callback(trace.close)
        routes = None if routes_out is None else RouteRecorder(engine_facts(engine))
        bar = stack.enter_context(ProgressBar("decoding"))
        run = greedy(
            engine,
            seq,
            prompt,
            args.max_new,
            ignore_eos=args.ignore_eos,
            keep_logits=logits_out is not None,
            trace=trace,
            routes=routes,
            progress=bar,
            new=new,
        )
        if logits_out is not None and run.logits is not None:
            np.save(logits_out, run.logits)
        if trace_out is not None and trace is not None:
            trace.trace(str(args.trace_out)).save(trace_out)
        if routes_out is not None and routes is not None:
            routes.trace().save(routes_out)
        backend = engine.backend.name
    if args.json:
        print(json.dumps({"backend": backend, **run.as_dict()}))
        return 0
    _print_tokens(args, run.tokens)
    print(
        f"{run.positions} positions, {run.tokens_per_s:.1f} tokens/s without loading, backend {backend}, "
        f"stopped: {run.stopped}\n{counters(run.stats)}",
        file=sys.stderr,
    )
    return 0
