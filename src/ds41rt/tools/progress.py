"""A progress line on a terminal, and nothing anywhere else."""

import sys
from types import TracebackType

_WIDTH = 30


class ProgressBar:
    """`with ProgressBar("loading") as bar: bar(done, total)`; writes to stderr, only when that is a terminal."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._on = sys.stderr.isatty()
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        filled = _WIDTH * done // max(total, 1)
        if self._on and filled != self._shown:
            self._shown = filled
            bar = "#" * filled + "." * (_WIDTH - filled)
            sys.stderr.write(f"\r{self._label} [{bar}] {100 * done // max(total, 1):3d} %")
            sys.stderr.flush()

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._on and self._shown >= 0:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
