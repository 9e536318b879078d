"""The command line: parse, configure logging, call one tool, turn errors into one sentence and an exit code.

Exit codes: 0 fine, 1 a problem was found or the work failed, 2 wrong usage or bad input, a checkpoint included. This is
the only file that configures logging; results go to stdout, everything else to stderr.
"""

import argparse
import io
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from ds41rt import __version__
from ds41rt.errors import CheckpointError, CheckpointReadError, ConfigError, Ds41Error, InputError

EXIT_PROBLEM, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


class _Parser(argparse.ArgumentParser):
    """Takes -v in every place: parsers of commands are of this class too. They leave the value of a -v before them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_argument(
            "-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help="log events to stderr"
        )


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number; give one, for example 8") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; give one, for example 8 or 0.5") from None


def _add_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", choices=("auto", "host", "cuda"), help="default: DS41RT_BACKEND, else auto")
    parser.add_argument(
        "--schedule",
        default="lazy",
        metavar="lazy|eager|random:SEED",
        help="how the host backend orders deferred work (default: lazy)",
    )


def _add_capture(parser: argparse.ArgumentParser) -> None:
    """The group `ds41rt capture`: what it says about graphs is in `ds41rt.capture`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, what in (("inspect", "show what captured graphs contain"), ("lint", "find what is wrong with them")):
        action = actions.add_parser(name, help=what, allow_abbrev=False)
        source = action.add_mutually_exclusive_group(required=True)
        source.add_argument("checkpoint", type=Path, nargs="?", metavar="CHECKPOINT", help="capture its step graphs")
        source.add_argument("--dump", type=Path, metavar="F.json", help="graphs that were saved with --out")
        action.add_argument("--segment", type=_whole, metavar="K", help="only the segment that layer K owns")
        action.add_argument("--tokens", type=_whole, metavar="N", help="tokens to decode first (default: 4)")
        action.add_argument("--out", type=Path, metavar="F", help="write F.json, F.html or F.dot")
        action.add_argument("--json", action="store_true", help="print one JSON object")
        _add_backend(action)
        action.set_defaults(schedule=None)  # tells whether it was given
        if name == "lint":
            action.add_argument(
                "--later", type=Path, metavar="G.json", help="the same graphs captured for a later token, with --dump"
            )
            action.add_argument("--skip", action="append", default=[], metavar="RULE", help="a rule to leave out")
    explain = actions.add_parser("explain", help="run a capture, name the first call that broke it", allow_abbrev=False)
    subject = explain.add_mutually_exclusive_group(required=True)
    subject.add_argument("checkpoint", type=Path, nargs="?", metavar="CHECKPOINT", help="capture its step graphs")
    subject.add_argument("--call", metavar="MODULE:FUNCTION", help="a callable of (backend, stream), or of (stream)")
    explain.add_argument("--self-capture", action="store_true", help="the callable takes nothing and captures itself")
    explain.add_argument(
        "--capture-mode",
        choices=("global", "thread_local", "relaxed"),
        help="for a callable that takes the stream (default: global, as PyTorch's)",
    )
    explain.add_argument("--expert-slots", type=_whole, metavar="N", help="experts held on the device")
    explain.add_argument("--json", action="store_true", help="print one JSON object")
    _add_backend(explain)
    diff = actions.add_parser("diff", help="compare two saved dumps", allow_abbrev=False)
    diff.add_argument("before", type=Path, metavar="A.json")
    diff.add_argument("after", type=Path, metavar="B.json")
    diff.add_argument("--json", action="store_true", help="print one JSON object")


def _add_prompt(parser: argparse.ArgumentParser, *, required: bool) -> None:
    prompt = parser.add_mutually_exclusive_group(required=required)
    prompt.add_argument("--prompt-ids", metavar="1,2,3", help="token ids, comma separated")
    prompt.add_argument("--prompt-ids-file", type=Path, metavar="F", help="file of token ids (commas or white space)")
    prompt.add_argument("--prompt", metavar="TEXT", help="text (needs the extra 'text')")


def _add_trace(parser: argparse.ArgumentParser) -> None:
    """The group `ds41rt trace`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    diff = actions.add_parser("diff", help="name the first half of a layer where two runs part", allow_abbrev=False)
    diff.add_argument(
        "what", type=Path, nargs="+", metavar="CHECKPOINT | A.npz B.npz", help="decode this twice, or compare two files"
    )
    _add_prompt(diff, required=False)
    diff.add_argument("--max-new", type=_whole, metavar="N", help="new tokens at most (default: 32)")
    diff.add_argument("--modes", metavar="A,B", help="how both runs decode (default: eager,step-graph)")
    diff.add_argument("--expert-slots", metavar="N[,M]", help="experts held on the device, of both runs or of each")
    diff.add_argument("--max-context", type=_whole, metavar="N", help="as for decode")
    diff.add_argument("--json", action="store_true", help="print one JSON object")
    _add_backend(diff)
    diff.set_defaults(schedule=None)  # tells whether it was given


def _add_timeline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    _add_prompt(parser, required=True)
    parser.add_argument("--tokens", type=_whole, default=4, metavar="N", help="decode steps to record (default: 4)")
    parser.add_argument("--out", type=Path, required=True, metavar="F.json", help="for ui.perfetto.dev")
    parser.add_argument(
        "--mode", choices=("eager", "step-graph"), help="default: DS41RT_STEP_GRAPH or DS41RT_ADAPTIVE, else eager"
    )
    parser.add_argument("--expert-slots", type=_whole, metavar="N", help="experts held on the device")
    parser.add_argument("--max-context", type=_whole, metavar="N", help="as for decode")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _add_backend(parser)


def _add_cache_sim(parser: argparse.ArgumentParser) -> None:
    """`ds41rt cache-sim`. The rates of PCIe and compute were measured on an H200; the disk's is an assumption."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace", type=Path, metavar="F.npz", help="routes that `ds41rt decode --route-trace-out` wrote"
    )
    source.add_argument(
        "--synthetic",
        nargs="?",
        const="drift",
        choices=("drift", "steady", "topics"),
        help="made-up routes of the released model, with the LRU hit rates that are published for it (default: drift)",
    )
    parser.add_argument("--tokens", type=_whole, metavar="N", help="length of a synthetic trace (default: 3000)")
    parser.add_argument("--seed", type=_whole, metavar="N", help="of a synthetic trace (default: 0)")
    parser.add_argument(
        "--warm-tokens", type=_whole, metavar="N", help="first tokens that are not counted (default: a third)"
    )
    for tier, what in (("device", "device memory"), ("host", "pinned host memory")):
        size = parser.add_mutually_exclusive_group(required=tier == "device")
        size.add_argument(f"--{tier}-slots", metavar="N,N,...", help=f"experts in {what}")
        size.add_argument(f"--{tier}-gib", metavar="X,X,...", help=f"{what} for experts in GiB")
    parser.add_argument("--policies", default="lru,oldest,least-used", metavar="P,P,...", help="default: %(default)s")
    parser.add_argument("--evict-random-pct", type=_number, default=8.0, metavar="X", help="default: %(default)s")
    parser.add_argument(
        "--moves", type=_whole, metavar="N", help="promotions a token at most (default: as many as the runtime makes)"
    )
    parser.add_argument(
        "--promote-after",
        type=_whole,
        choices=(1, 2),
        default=1,
        help="host hits since it came there that let an expert move to the device (default: %(default)s)",
    )
    parser.add_argument(
        "--first-used-first",
        action="store_true",
        help="of more candidates than moves take those of the first layers, not those with the most host hits",
    )
    parser.add_argument(
        "--pcie-gb-s", type=_number, default=54.0, metavar="X", help="host to device, H200: %(default)s GB/s (default)"
    )
    parser.add_argument(
        "--disk-gb-s",
        type=_number,
        default=2.0,
        metavar="X",
        help="expert files to memory, assumed: %(default)s GB/s (default)",
    )
    parser.add_argument(
        "--compute-ms",
        type=_number,
        metavar="X",
        help="a token without misses (default: a step-graph token of the released model on an H200, 8.8 ms)",
    )
    parser.add_argument("--svg", type=Path, metavar="F.svg", help="hit rate and time a token as a picture")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ds41rt",
        description="Decode DeepSeek-V4.1-Flash on one GPU, with experts streamed from the checkpoint.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ds41rt {__version__}")
    parser.set_defaults(verbose=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="make a tiny checkpoint, decode it, show what happened", allow_abbrev=False)
    demo.add_argument("--tokens", type=_whole, default=96, help="tokens to decode (default: 96)")
    demo.add_argument("--json", action="store_true", help="print one JSON object")
    _add_backend(demo)

    decode = commands.add_parser("decode", help="decode a prompt greedily", allow_abbrev=False)
    decode.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    _add_prompt(decode, required=True)
    decode.add_argument("--max-new", type=_whole, default=32, metavar="N", help="new tokens at most (default: 32)")
    decode.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-text token")
    _add_backend(decode)
    decode.add_argument(
        "--mode",
        choices=("eager", "step-graph", "adaptive"),
        help="default: DS41RT_STEP_GRAPH or DS41RT_ADAPTIVE, else eager",
    )
    slots = decode.add_mutually_exclusive_group()
    slots.add_argument("--expert-slots", type=_whole, metavar="N", help="experts held on the device")
    slots.add_argument("--expert-cache-gib", type=_number, metavar="X", help="the same as a budget in GiB")
    host = decode.add_mutually_exclusive_group()
    host.add_argument("--host-slots", type=_whole, metavar="N", help="experts held in pinned host memory besides")
    host.add_argument("--host-cache-gib", type=_number, metavar="X", help="the same as a budget in GiB")
    decode.add_argument(
        "--prefetch", action="store_true", default=None, help="read ahead what the next layer may need (eager layers)"
    )
    decode.add_argument(
        "--max-context",
        type=_whole,
        metavar="N",
        help="default: DS41RT_MAX_CONTEXT, else 4096, or the model's if smaller",
    )
    decode.add_argument(
        "--index-keys", choices=("intended", "reference"), help="default: DS41RT_INDEX_KEYS, else intended"
    )
    decode.add_argument("--logits-out", type=Path, metavar="F.npy", help="float32 [positions, vocab]")
    decode.add_argument("--trace-out", type=Path, metavar="F.npz", help="routing, selections, hashes of every layer")
    decode.add_argument("--route-trace-out", type=Path, metavar="F.npz", help="the picks alone, for cache-sim")
    decode.add_argument("--trace-values", action="store_true", help="keep in it the hashed values too (large)")
    decode.add_argument("--json", action="store_true", help="print one JSON object")

    synth = commands.add_parser(
        "synth", help="write a synthetic checkpoint in the published layout", allow_abbrev=False
    )
    synth.add_argument("dir", type=Path, metavar="DIR")
    synth.add_argument("--preset", choices=("micro", "tiny", "small"), default="tiny")
    synth.add_argument("--seed", type=_whole, default=0, metavar="N")
    synth.add_argument("--json", action="store_true", help="print one JSON object")

    bench = commands.add_parser(
        "bench", help="time a token at released shapes, against the bytes it must read", allow_abbrev=False
    )
    bench.add_argument("--preset", choices=("released", "small", "tiny", "micro"), default="released")
    bench.add_argument("--layers", type=_whole, metavar="N", help="only the first N layers")
    bench.add_argument("--context", type=_whole, metavar="N", help="default: 4096, or the preset's most")
    bench.add_argument(
        "--experts-per-layer", type=_whole, default=None, metavar="N", help="resident experts (default: 128)"
    )
    bench.add_argument("--tokens", type=_whole, default=50, metavar="N", help="tokens timed per mode (default: 50)")
    bench.add_argument("--json", action="store_true", help="print one JSON object")
    _add_backend(bench)

    streaming = commands.add_parser(
        "bench-streaming", help="time a miss in each tier, against the link and the disk", allow_abbrev=False
    )
    streaming.add_argument("--preset", choices=("released", "small", "tiny", "micro"), default="released")
    streaming.add_argument("--layers", type=_whole, metavar="N", help="only the first N layers (default: 8)")
    streaming.add_argument("--experts-per-layer", type=_whole, metavar="N", help="experts in use (default: 16)")
    streaming.add_argument("--tokens", type=_whole, default=40, metavar="N", help="tokens timed (default: 40)")
    streaming.add_argument("--disk", type=Path, metavar="DIR", help="also time reads of a file made in DIR")
    streaming.add_argument("--disk-gb", type=_number, metavar="X", help="its size at most (default: 4)")
    streaming.add_argument("--threads", type=_whole, metavar="N", help="readers of that file, up to 64 (default: 8)")
    streaming.add_argument("--json", action="store_true", help="print one JSON object")
    _add_backend(streaming)

    doctor = commands.add_parser(
        "doctor", help="say what this machine offers, what is wrong, and what to do", allow_abbrev=False
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object, for bug reports")

    _add_capture(commands.add_parser("capture", help="look into captured graphs", allow_abbrev=False))
    _add_trace(commands.add_parser("trace", help="compare what two runs computed", allow_abbrev=False))
    _add_timeline(commands.add_parser("timeline", help="record a few decode steps as a picture", allow_abbrev=False))

    _add_cache_sim(
        commands.add_parser(
            "cache-sim",
            help="say what a budget for experts buys, from recorded or made-up routes",
            epilog="ms a token = compute + (host hits + file misses) x expert bytes / PCIe + file misses x expert "
            "bytes / disk; promotions run beside the step and are not in it, nor is what a fall costs beyond its read",
            allow_abbrev=False,
        )
    )

    verify = commands.add_parser(
        "verify", help="compare this build and machine with reference values", allow_abbrev=False
    )
    verify.add_argument("golden_dir", type=Path, metavar="GOLDEN_DIR")
    verify.add_argument("--json", action="store_true", help="print one JSON object")
    _add_backend(verify)
    return parser


def _configure_logging(verbose: bool) -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO if verbose else logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _prepare_outputs() -> None:
    """A text that the terminal's encoding does not have is shown with escapes; a closed output takes everything."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # open to the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _run(args: argparse.Namespace) -> int:
    # imported here, so that --help and --version answer at once
    if args.command == "demo":
        from ds41rt.tools.demo import demo

        return demo(args)
    if args.command == "decode":
        from ds41rt.tools.decode import decode

        return decode(args)
    if args.command == "synth":
        from ds41rt.tools.synth import synth

        return synth(args)
    if args.command == "bench":
        from ds41rt.tools.bench import bench

        return bench(args)
    if args.command == "bench-streaming":
        from ds41rt.tools.bench_streaming import bench_streaming

        return bench_streaming(args)
    if args.command == "doctor":
        from ds41rt.tools.doctor import doctor

        return doctor(args)
    if args.command == "capture" and args.action == "explain":
        from ds41rt.tools.capture_explain import capture_explain

        return capture_explain(args)
    if args.command == "capture":
        from ds41rt.tools.capture import capture

        return capture(args)
    if args.command == "cache-sim":
        from ds41rt.tools.cache_sim import cache_sim

        return cache_sim(args)
    if args.command == "trace":
        from ds41rt.tools.trace_diff import trace_diff

        return trace_diff(args)
    if args.command == "timeline":
        from ds41rt.tools.timeline import timeline

        return timeline(args)
    from ds41rt.tools.verify import verify

    return verify(args)


def main(argv: Sequence[str] | None = None) -> int:
    """The `ds41rt` command. Returns the exit code; argparse itself exits with 2 on wrong usage."""
    args = _parser().parse_args(argv)
    _prepare_outputs()
    _configure_logging(args.verbose)
    try:
        code = _run(args)
        sys.stdout.flush()
        return code
    except (InputError, ConfigError, CheckpointError) as e:
        print(f"ds41rt: {e}", file=sys.stderr)
        # A read that the system refused is no fault of what it was to read.
        return EXIT_PROBLEM if isinstance(e, CheckpointReadError) else EXIT_USAGE
    except BrokenPipeError:
        # The reader of the results has left: no news. Python would complain once more when it flushes at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PROBLEM
    except (Ds41Error, OSError, MemoryError) as e:
        print(f"ds41rt: {e}", file=sys.stderr)
        return EXIT_PROBLEM
    except KeyboardInterrupt:
        print("ds41rt: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
