"""`ds41rt capture inspect | lint | diff`: what captured graphs contain, what is wrong with them, what changed.

Graphs come from a checkpoint, whose step is captured here, or from a saved dump. The exit code is 1 when lint finds
something or the dumps differ.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from ds41rt.capture.dot import render_dot
from ds41rt.capture.dump import Dump, load_dump
from ds41rt.capture.dump_diff import diff
from ds41rt.capture.finding import Finding
from ds41rt.capture.html import render_html
from ds41rt.capture.lint_rules import RULES, lint
from ds41rt.capture.text import render_findings, render_text
from ds41rt.errors import InputError
from ds41rt.tools.engine_dump import dump_checkpoint, only_segment
from ds41rt.tools.output import output_file

_DEFAULT_TOKENS = 4
_FORMATS: dict[str, Callable[[Dump, Sequence[Finding]], str]] = {
    ".json": lambda dump, _: dump.to_json(),
    ".html": render_html,
    ".dot": render_dot,
}


def capture(args: argparse.Namespace) -> int:
    if args.action == "diff":
        return _diff(args)
    return _inspect(args) if args.action == "inspect" else _lint(args)


def _inspect(args: argparse.Namespace) -> int:
    _check_out(args.out)
    with output_file(args.out) if args.out else nullcontext() as file:
        dump, _ = _dump(args, again=False)
        if file is not None:
            file.write(_rendered(args.out, dump, lint(dump)))
    sys.stdout.write(dump.to_json() if args.json else render_text(dump) + _written(args.out))
    return 0


def _lint(args: argparse.Namespace) -> int:
    _check_out(args.out)
    if args.later is not None and args.dump is None:
        raise InputError("--later goes with --dump; of a checkpoint both are captured here")
    unknown = sorted(set(args.skip) - {rule.ident for rule in RULES})
    if unknown:
        known = ", ".join(rule.ident for rule in RULES)
        raise InputError(f"--skip {unknown[0]}: there is no such rule; known are {known}")
    with output_file(args.out) if args.out else nullcontext() as file:
        dump, later = _dump(args, again=True)
        findings = lint(dump, next_token=later, skip=args.skip)
        if file is not None:
            file.write(_rendered(args.out, dump, findings))
    if args.json:
        print(json.dumps({"title": dump.title, "findings": [asdict(finding) for finding in findings]}))
    else:
        sys.stdout.write(render_findings(findings) + _written(args.out))
    return 1 if findings else 0


def _diff(args: argparse.Namespace) -> int:
    found = diff(load_dump(args.before), load_dump(args.after))
    sys.stdout.write(found.to_json() + "\n" if args.json else found.to_text())
    return 1 if found else 0


def _dump(args: argparse.Namespace, *, again: bool) -> tuple[Dump, Dump | None]:
    """The dump that the arguments mean, and one of a later token if there is one."""
    if args.dump is not None:
        for name in ("tokens", "backend", "schedule"):
            if getattr(args, name) is not None:
                raise InputError(f"--{name} is for capturing a checkpoint; with --dump nothing is, leave it out")
        later = args.later if again else None
        return _loaded(args.dump, args.segment), None if later is None else _loaded(later, args.segment)
    dump, later = dump_checkpoint(
        args.checkpoint,
        tokens=_DEFAULT_TOKENS if args.tokens is None else args.tokens,
        backend=args.backend,
        schedule=args.schedule or "lazy",
        again=again,
    )
    return only_segment(dump, args.segment), None if later is None else only_segment(later, args.segment)


def _loaded(path: Path, segment: int | None) -> Dump:
    return only_segment(load_dump(path), segment, str(path))


def _check_out(out: Path | None) -> None:
    if out is not None and out.suffix not in _FORMATS:
        raise InputError(f"--out {out}: the name must end in {', '.join(_FORMATS)}, which chooses what is written")


def _written(out: Path | None) -> str:
    return "" if out is None else f"{out}: written\n"


def _rendered(out: Path, dump: Dump, findings: Sequence[Finding]) -> bytes:
    return _FORMATS[out.suffix](dump, findings).encode()
