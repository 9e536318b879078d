"""The command line: parse, configure logging, call one tool, turn errors into one sentence and an exit code.

Exit codes: 0 fine, 1 a problem was found or the work failed, 2 wrong usage or bad input. This is the only file that
configures logging; results go to stdout, everything else to stderr.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog

from ds41rt import __version__
from ds41rt.errors import ConfigError, Ds41Error, InputError

EXIT_PROBLEM, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def _add_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", choices=("auto", "host", "cuda"), help="default: DS41RT_BACKEND, else auto")
    parser.add_argument(
        "--schedule",
        default="lazy",
        metavar="lazy|eager|random:SEED",
        help="how the host backend orders deferred work (default: lazy)",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds41rt",
        description="Decode DeepSeek-V4.1-Flash on one GPU, with experts streamed from the checkpoint.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ds41rt {__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log events to stderr")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="make a tiny checkpoint, decode it, show what happened", allow_abbrev=False)
    demo.add_argument("--tokens", type=int, default=96, help="tokens to decode (default: 96)")
    demo.add_argument("--json", action="store_true", help="print one JSON object")
    _add_backend(demo)

    decode = commands.add_parser("decode", help="decode a prompt greedily", allow_abbrev=False)
    decode.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    prompt = decode.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt-ids", metavar="1,2,3", help="token ids, comma separated")
    prompt.add_argument("--prompt-ids-file", type=Path, metavar="F", help="file of token ids (commas or white space)")
    prompt.add_argument("--prompt", metavar="TEXT", help="text (needs the extra 'text')")
    decode.add_argument("--max-new", type=int, default=32, metavar="N", help="new tokens at most (default: 32)")
    decode.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-text token")
    _add_backend(decode)
    decode.add_argument("--mode", choices=("eager", "step-graph"), help="default: DS41RT_STEP_GRAPH, else eager")
    slots = decode.add_mutually_exclusive_group()
    slots.add_argument("--expert-slots", type=int, metavar="N", help="experts held on the device")
    slots.add_argument("--expert-cache-gib", type=float, metavar="X", help="the same as a budget in GiB")
    decode.add_argument(
        "--max-context", type=int, metavar="N", help="default: DS41RT_MAX_CONTEXT, else 4096, or the model's if smaller"
    )
    decode.add_argument(
        "--index-keys", choices=("intended", "reference"), help="default: DS41RT_INDEX_KEYS, else intended"
    )
    decode.add_argument("--logits-out", type=Path, metavar="F.npy", help="float32 [positions, vocab]")
    decode.add_argument("--trace-out", type=Path, metavar="F.npz", help="routing, selections, a hash per layer")
    decode.add_argument("--json", action="store_true", help="print one JSON object")

    synth = commands.add_parser(
        "synth", help="write a synthetic checkpoint in the published layout", allow_abbrev=False
    )
    synth.add_argument("dir", type=Path, metavar="DIR")
    synth.add_argument("--preset", choices=("micro", "tiny", "small"), default="tiny")
    synth.add_argument("--seed", type=int, default=0, metavar="N")
    synth.add_argument("--json", action="store_true", help="print one JSON object")

    bench = commands.add_parser(
        "bench", help="time a token at released shapes, against the bytes it must read", allow_abbrev=False
    )
    bench.add_argument("--preset", choices=("released", "small", "tiny", "micro"), default="released")
    bench.add_argument("--layers", type=int, metavar="N", help="only the first N layers")
    bench.add_argument("--context", type=int, metavar="N", help="default: 4096, or the preset's most")
    bench.add_argument(
        "--experts-per-layer", type=int, default=None, metavar="N", help="resident experts (default: 128)"
    )
    bench.add_argument("--tokens", type=int, default=50, metavar="N", help="tokens timed per mode (default: 50)")
    bench.add_argument("--json", action="store_true", help="print one JSON object")
    _add_backend(bench)

    doctor = commands.add_parser(
        "doctor", help="say what this machine offers, what is wrong, and what to do", allow_abbrev=False
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object, for bug reports")

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
    if args.command == "doctor":
        from ds41rt.tools.doctor import doctor

        return doctor(args)
    from ds41rt.tools.verify import verify

    return verify(args)


def main(argv: Sequence[str] | None = None) -> int:
    """The `ds41rt` command. Returns the exit code; argparse itself exits with 2 on wrong usage."""
    args = _parser().parse_args(argv)
    _configure_logging(args.verbose)
    try:
        code = _run(args)
        sys.stdout.flush()
        return code
    except (InputError, ConfigError) as e:
        print(f"ds41rt: {e}", file=sys.stderr)
        return EXIT_USAGE
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
