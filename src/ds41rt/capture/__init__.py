"""Diagnostics of captured graphs, for our own and for anybody's: dump, lint, compare, draw, explain.

Works on what `cu.graphinfo` reads out of a graph; knows neither the step nor the command line. Nothing is loaded before
it is used: importing this package needs neither CUDA nor torch. Why a capture failed is a package of its own, see
`ds41rt.capture.explain`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds41rt.capture.dump import Dump, load_dump
    from ds41rt.capture.dump_diff import DumpDiff, diff
    from ds41rt.capture.finding import Finding
    from ds41rt.capture.html import render_html
    from ds41rt.capture.inspect import inspect_backend_graphs, inspect_graph
    from ds41rt.capture.lint_rules import lint
    from ds41rt.capture.watch import StaleGraphError, WatchedBackend

__all__ = [
    "Dump",
    "DumpDiff",
    "Finding",
    "StaleGraphError",
    "WatchedBackend",
    "diff",
    "inspect_backend_graphs",
    "inspect_graph",
    "lint",
    "load_dump",
    "render_html",
]
_HOMES = {
    "dump": ("Dump", "load_dump"),
    "dump_diff": ("DumpDiff", "diff"),
    "finding": ("Finding",),
    "html": ("render_html",),
    "inspect": ("inspect_backend_graphs", "inspect_graph"),
    "lint_rules": ("lint",),
    "watch": ("StaleGraphError", "WatchedBackend"),
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
