"""Whose code a file is, and what a line of it says. Knows no captures."""

import ast
import linecache
import site
import sysconfig
from functools import cache
from pathlib import Path

import ds41rt

# Standard library and installed packages, wherever this interpreter keeps them.
_LIBRARY_DIRS = tuple(
    {
        str(Path(path).resolve()) + "/"
        for path in (
            *(sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
            *site.getsitepackages(),
            site.getusersitepackages(),
            str(Path(ds41rt.__file__).parent),
        )
    }
)
# Of other environments, and code that a compiler wrote.
_LIBRARY_PARTS = ("/site-packages/", "/dist-packages/", "/torchinductor_")
_MOST_TEXT = 300


class Owner:
    """Tells the user's files from library files. `also` is a file, or a folder with a slash behind it, that counts as
    the user's wherever it lies."""

    def __init__(self, also: str | None = None) -> None:
        self._also = also
        self._known: dict[str, bool] = {}

    def is_users(self, file: str) -> bool:
        found = self._known.get(file)
        if found is None:
            found = self._known[file] = self._look(file)
        return found

    def _look(self, file: str) -> bool:
        if file.startswith("<"):  # made by exec; what a person types in is theirs
            return file.startswith(("<stdin", "<ipython"))
        path = str(Path(file).resolve())
        if self._also is not None and path.startswith(self._also):
            return True
        return not path.startswith(_LIBRARY_DIRS) and not any(part in path for part in _LIBRARY_PARTS)


@cache
def _statements(file: str) -> tuple[tuple[int, int], ...]:
    """First and last line of every statement; of one with a body, its head alone."""
    source = "".join(linecache.getlines(file))
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            found.append((node.lineno, max(node.lineno, last)))
    return tuple(found)


def line_text(file: str, line: int) -> str:
    return linecache.getline(file, line).strip()


def statement(file: str, line: int) -> str:
    """The text of the smallest statement that contains the line, on one line; "" where there is no source."""
    spans = [(last - first, first, last) for first, last in _statements(file) if first <= line <= last]
    _, first, last = min(spans, default=(0, line, line))
    text = " ".join(line_text(file, n) for n in range(first, last + 1)).strip()
    return text if len(text) <= _MOST_TEXT else text[:_MOST_TEXT] + "..."
