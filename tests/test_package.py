"""The package as an installer and an importer see it."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import ds41rt

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

FRESH = """
import os, sys, threading
before = dict(os.environ)
import ds41rt
assert not {"numpy", "pydantic", "structlog"} & set(sys.modules), "import ds41rt loads what it does not need"
import ds41rt.cli
assert "numpy" not in sys.modules, "--help would wait for NumPy"
import ds41rt.engine, ds41rt.trace, ds41rt.tools.demo, ds41rt.tools.decode, ds41rt.tools.verify
loaded = sorted(m for m in sys.modules if m == "cuda" or m.startswith(("cuda.", "ds41rt.cu.host", "tokenizers")))
assert loaded == [], loaded
import structlog, logging
assert not structlog.is_configured() and not logging.root.handlers
assert threading.active_count() == 1 and dict(os.environ) == before
"""


def test_import_initialises_nothing() -> None:
    """No CUDA bindings, no backend, no thread, no logging configuration, nothing printed."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", FRESH], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_one_version() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert metadata.version("ds41rt") == ds41rt.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", changelog, re.MULTILINE)
    assert newest is not None
    assert newest[1] == ds41rt.__version__


def test_metadata() -> None:
    project = PROJECT["project"]
    assert project["license"] == "AGPL-3.0-only"
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert re.search(r"GNU AFFERO GENERAL PUBLIC LICENSE\s+Version 3", licence)
    assert {re.split(r"[<>=]", d)[0] for d in project["dependencies"]} == {
        "cuda-python", "numpy", "ml_dtypes", "pydantic", "structlog",
    }  # fmt: skip
    assert {"text", "dev"} <= set(project["optional-dependencies"])
    assert project["scripts"] == {"ds41rt": "ds41rt.cli:main"}


def test_typed_and_complete() -> None:
    package = Path(ds41rt.__file__).parent
    assert (package / "py.typed").is_file()
    folders = {p.parent for p in package.rglob("*.py")}
    assert all((folder / "__init__.py").is_file() for folder in folders)
