"""A pytest of its own over one test file, as somebody else's project would run it."""

import os
import subprocess
import sys
from pathlib import Path


def run_pytest(
    folder: Path, source: str, *options: str, plugin: str = "ds41rt.testing.plugin"
) -> subprocess.CompletedProcess[str]:
    """Run `source` in `folder`, with the plugin named on the command line unless it is ""."""
    (folder / "test_it.py").write_text(source, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(["-p", plugin] if plugin else []), *options]
    env = {**os.environ, "COLUMNS": "400"}
    return subprocess.run([*command, "test_it.py"], cwd=folder, capture_output=True, text=True, check=False, env=env)
