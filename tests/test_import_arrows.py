"""Imports go one way: cli, tools -> engine -> step -> (attn, moe, engram) -> kernels -> cu; what parts may not know.

`ARROWS` is the picture. A module that belongs to no part of it fails, so that a new part is put in its place.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ds41rt

ROOT = Path(ds41rt.__file__).parent

# part -> the parts it may import, besides itself and `errors`
_LEAVES = {"config", "checkpoint", "log"}
_STATE = {"kernels", "cu", *_LEAVES}
_STEP = {"attn", "moe", "engram", *_STATE}
_ENGINE = {"step", "settings", "interrupts", "capture.watch", *_STEP}
_TOOLS = {"", "engine", "trace", "capture", *_ENGINE}  # "": the version
ARROWS: dict[str, set[str]] = {
    "": set(),  # ds41rt/__init__.py
    "errors": set(),
    "interrupts": set(),
    "log": set(),
    "settings": set(),
    "config": {"checkpoint.json_file"},
    "checkpoint": {"config", "log"},
    "cu": set(),
    "kernels": {"cu"},
    "attn": _STATE,
    "moe": _STATE,
    "engram": _STATE,
    "step": _STEP,
    "engine": _ENGINE,
    "trace": {"", "engine", *_ENGINE},
    "capture": {"", "cu"},
    "testing": {"cu"},
    "tools": _TOOLS,
    "cli": {"tools", *_TOOLS},
    "__main__": {"cli"},
}

# module prefix -> top-level names that it and what is below it must not import
FORBIDDEN = {
    "cu": {"structlog", "pydantic", "logging"},
    "cu.host": {"os"},
    "kernels": {"structlog", "pydantic", "logging", "os"},
    "step.machine": {"os", "numpy"},
    "step": {"pydantic", "os"},
    "moe.cache": {"numpy", "os", "io", "pathlib"},
    "moe": {"pydantic"},
    "moe.readers": {"concurrent"},
    "attn": {"pydantic", "os"},
    "engram": {"pydantic", "os"},
    "engine": {"cuda"},
    "capture": {"cuda", "torch", "os"},
    "settings": {"os"},
    "config": {"os"},
}
# the only modules that may import a top-level name
ONLY = {
    "cuda": {"cu.driver"},
    "structlog": {"log", "cli"},
    "argparse": {"cli", "tools"},
    "tokenizers": {"checkpoint.token_map"},
    "pytest": {"testing.plugin"},
}
# modules of ours that only these may import
PRIVATE = {
    "cu.host": {"cu.backend", "cu.host", "testing"},
    "cu.driver": {"cu.backend"},
}
# module -> the only names of ours that it may know
KNOWS = {
    "step.machine": {"cu.backend", "cu.result", "errors", "log", "moe.header", "step.bodies_protocol", "step.state"},
    "moe.readers": {"errors", "log"},  # its threads never call CUDA
    # slot numbers only
    "moe.policy": {"errors", "moe.least_used", "moe.recency"},
    "moe.least_used": {"errors"},
    "moe.recency": {"errors"},
    "tools.cache_plot": set(),
}


def below(module: str, prefixes: set[str]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in prefixes)


def part_of(module: str) -> str:
    return module.split(".")[0]


def imported(source: str, submodules: set[str]) -> Iterator[str]:
    """Every module that the source imports, anywhere in it, as a full dotted name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in submodules else base


def violations(module: str, source: str, submodules: set[str]) -> list[str]:
    """What is wrong with the imports of `module` (dotted, without the leading ds41rt)."""
    found = []
    part = part_of(module)
    if part not in ARROWS:
        return [f"{module}: part {part!r} has no place in the picture"]
    for name in imported(source, submodules):
        top = name.split(".")[0]
        if top != "ds41rt":
            if name.startswith("."):
                found.append(f"{module}: relative import {name}")
            if any(below(module, {prefix}) and top in names for prefix, names in FORBIDDEN.items()):
                found.append(f"{module}: must not know {top}")
            if top in ONLY and not below(module, ONLY[top]):
                found.append(f"{module}: only {sorted(ONLY[top])} may import {top}")
            continue
        target = name.partition(".")[2]
        other = part_of(target)
        if other not in (part, "errors") and not below(target, ARROWS[part] - {""}) and target not in ARROWS[part]:
            found.append(f"{module}: must not import {name}")
        for private, friends in PRIVATE.items():
            if below(target, {private}) and not below(module, friends):
                found.append(f"{module}: only {sorted(friends)} may import {name}")
        if target not in KNOWS.get(module, {target}):
            found.append(f"{module}: must not know {name}")
    return found


def modules() -> dict[str, str]:
    """Dotted name without the leading ds41rt -> source."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path.read_text(encoding="utf-8")
    return found


SOURCES = modules()
SUBMODULES = {f"ds41rt.{m}" for m in SOURCES if m}


def test_imports_follow_the_arrows() -> None:
    assert len(SOURCES) > 60
    assert [v for module, source in SOURCES.items() for v in violations(module, source, SUBMODULES)] == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("cu.backend", "import structlog"),
        ("cu.host.memory", "import os.path"),
        ("cu.kernel", "from pydantic import BaseModel"),
        ("cu.result", "from ds41rt.config import ModelConfig"),
        ("cu.result", "from ds41rt.settings import Settings"),
        ("cu.result", "from ds41rt import log"),
        ("cu.backend", "from ds41rt.kernels.params import F32"),
        ("cu.host.device", "from cuda.bindings import driver"),
        ("cu.backend", "import cuda.bindings.driver"),
        ("engine", "def f():\n    from cuda.bindings import driver"),
        ("engine", "from ds41rt.cu.host import HostBackend"),
        ("tools.decode", "import ds41rt.cu.host.device"),
        ("kernels.rope", "from ds41rt.config import ModelConfig"),
        ("kernels.rope", "from ds41rt.moe.cache import ExpertCache"),
        ("moe.fetch", "from ds41rt.step.state import SegState"),
        ("moe.fetch", "from ds41rt.attn.select import top_rows"),
        ("moe.cache", "import numpy as np"),
        ("moe.readers", "from ds41rt.cu.backend import GpuBackend"),
        ("moe.readers", "from ds41rt.moe.cache import ExpertCache"),
        ("moe.least_used", "from ds41rt.moe.tier import Tier"),
        ("tools.cache_plot", "from ds41rt.tools.tier_sim import Counts"),
        ("attn.select", "from ds41rt.settings import Settings"),
        ("step.machine", "import os"),
        ("step.machine", "from ds41rt.settings import Settings"),
        ("step.machine", "from ds41rt.kernels import hc"),
        ("step.machine", "from ds41rt.checkpoint.checkpoint import Checkpoint"),
        ("step.machine", "from ds41rt.step.bodies import DecodeBodies"),
        ("step.bodies", "from ds41rt.engine import Engine"),
        ("step.bodies", "from ds41rt import engine"),
        ("step.bodies", "from .. import engine"),
        ("checkpoint.synth", "from ds41rt.cu.backend import GpuBackend"),
        ("config", "from ds41rt.checkpoint.checkpoint import Checkpoint"),
        ("settings", "from ds41rt.config import ModelConfig"),
        ("errors", "from ds41rt.log import Logger"),
        ("engine", "from ds41rt.tools.decode import greedy"),
        ("engine", "import structlog"),
        ("engine", "from ds41rt.testing import assert_no_leaks"),
        ("testing.checks", "import pytest"),
        ("testing.checks", "from ds41rt.engine import Engine"),
        ("trace.record", "from ds41rt.tools.progress import ProgressBar"),
        ("tools.demo", "from ds41rt.cli import main"),
        ("", "from ds41rt.engine import Engine"),
        ("serving.server", "import ds41rt.engine"),
    ],
)
def test_a_wrong_import_is_found(module: str, line: str) -> None:
    assert len(violations(module, line, SUBMODULES)) >= 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("cu.backend", "from ds41rt.cu.host import HostBackend"),
        ("cu.driver", "from cuda.bindings import driver"),
        ("cu.result", "from ds41rt.errors import Ds41Error"),
        ("cli", "from ds41rt import __version__"),
        ("cli", "import structlog"),
        ("config", "from ds41rt.checkpoint.json_file import load_json"),
        ("engine", "from os import environ"),
    ],
)
def test_a_right_import_is_not_found(module: str, line: str) -> None:
    assert violations(module, line, SUBMODULES) == []


def reads_environment(source: str) -> bool:
    names = {"environ", "environb", "getenv", "getenvb"}
    return any(
        (isinstance(node, ast.Attribute) and node.attr in names) or (isinstance(node, ast.alias) and node.name in names)
        for node in ast.walk(ast.parse(source))
    )


def test_only_the_engine_reads_the_environment() -> None:
    """And the doctor, which reports on it."""
    assert {m for m, source in SOURCES.items() if reads_environment(source)} - {"tools.doctor"} == {"engine"}
    for line in ("from os import environ", "import os\nx = os.environ", "import os\nos.getenv('X')"):
        assert reads_environment(line)


def test_only_open_backend_chooses_the_host_backend() -> None:
    """The import stands inside the function: a process that uses another backend never loads it."""
    tree = ast.parse(SOURCES["cu.backend"])
    functions = {
        f.name
        for f in ast.walk(tree)
        if isinstance(f, ast.FunctionDef)
        for node in ast.walk(f)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ds41rt.cu.host")
    }
    assert functions == {"open_backend"}
    top_level = [n for n in tree.body if isinstance(n, ast.ImportFrom)]
    assert not any((n.module or "").startswith("ds41rt.cu.host") for n in top_level)


def test_every_import_is_declared() -> None:
    """What the package imports from outside is the standard library or stands in pyproject.toml."""
    declared = {"cuda", "numpy", "ml_dtypes", "pydantic", "pydantic_core", "pytest", "structlog", "tokenizers"}
    used = {n.split(".")[0] for source in SOURCES.values() for n in imported(source, SUBMODULES)}
    assert used - set(sys.stdlib_module_names) - {"ds41rt"} <= declared
