"""The example with a kernel of its own: it passes as it stands, and its test finds each bug that is put into it."""

import re
from pathlib import Path
from typing import Any

import pytest
from run_pytest import run_pytest

from ds41rt.cu import ptx
from ds41rt.testing.conformance.kernels import AFFINE, DELAY

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "test_own_kernel.py"
SOURCE = EXAMPLE.read_text(encoding="utf-8")
# name -> the line that is taken out, and what the report has to name
BUGS = {
    "a missing join": ("gpu.wait(self.sums, self.copied)", ["STREAM_CAPTURE_UNJOINED", "'copies'", "'x'"]),
    "a pinned buffer rewritten while a copy reads it": (
        "self.gpu.synchronize(self.sums)  # host_x may be written again from here on",
        ["RaceError", "'x'", "the host", "writes", "reads"],
    ),
    "a leak": ("gpu.destroy_exec(self.exec)", ["AssertionError", "1 graph_execs"]),
    "a leaked buffer": ("gpu.free_pinned(host)", ["AssertionError", "2 buffers", "'y' (4000 bytes)"]),
    "a result read too early": (
        "self.gpu.synchronize(self.sums)\n        return",
        ["unordered accesses", "'y'", "the host", "reads"],
    ),
}


def test_the_example_passes(tmp_path: Path) -> None:
    report = run_pytest(tmp_path, SOURCE, "-v")
    assert report.returncode == 0, report.stdout
    for schedule in ("lazy", "eager", "random:0", "random:1", "random:2"):
        assert f"test_doubler[{schedule}] PASSED" in report.stdout


def test_the_example_is_short() -> None:
    found = re.search(r"^def test_doubler.*\Z", SOURCE, re.MULTILINE | re.DOTALL)
    assert found is not None
    assert len(found[0].splitlines()) <= 10


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_in_the_example_is_found(tmp_path: Path, name: str) -> None:
    line, said = BUGS[name]
    assert SOURCE.count(line) == 1
    broken = SOURCE.replace(line, "pass\n        return" if line.endswith("return") else "pass")
    report = run_pytest(tmp_path, broken, "--gpu-seeds=0", "--gpu-device=never")
    assert report.returncode == 1, report.stdout
    assert [text for text in said if text not in report.stdout] == [], report.stdout


def test_ptx_texts_declare_what_their_kernels_do() -> None:
    namespace: dict[str, Any] = {}
    exec(compile(SOURCE, EXAMPLE.name, "exec"), namespace)
    for spec in (AFFINE, DELAY, namespace["TWICE_PLUS"]):
        assert spec.ptx is not None
        assert ptx.parse_entries(spec.ptx) == {spec.name: ptx.entry_types(spec)}
        assert ptx.parse_header(spec.ptx) == ((7, 0), "sm_80")
