"""Runs the command line in this process, as a user would see it."""

from dataclasses import dataclass

import pytest
import structlog

from ds41rt.cli import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def run_cli(capsys: pytest.CaptureFixture[str], *argv: object) -> Result:
    """`ds41rt argv...`: exit code and both outputs; the logging that the command line configured is taken back."""
    capsys.readouterr()
    try:
        code = main([str(a) for a in argv])
    except SystemExit as e:  # argparse leaves like this
        code = e.code if isinstance(e.code, int) else -1
    finally:
        structlog.reset_defaults()
    out, err = capsys.readouterr()
    return Result(code, out, err)


def assert_refused(result: Result, code: int, *words: str) -> None:
    """Nothing on stdout, one line on stderr that has all the words, and the right exit code."""
    assert (result.code, result.out) == (code, ""), result
    lines = result.err.splitlines()
    assert len(lines) == 1, result.err
    assert lines[0].startswith("ds41rt: ")
    for word in words:
        assert word in lines[0], f"{word!r} not in {lines[0]!r}"
