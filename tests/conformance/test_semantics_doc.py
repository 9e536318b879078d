"""docs/cuda-semantics.md: cases, questions and tests that it names exist, none is left out, and its snippet runs."""

import re
import subprocess
import sys
from pathlib import Path

from ds41rt.testing.conformance import CASES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "cuda-semantics.md").read_text(encoding="utf-8")
QUESTIONS = set(re.findall(r"^def (\w+)\(raw: Raw\)", (ROOT / "tools" / "raw_questions.py").read_text(), re.MULTILINE))
RULES = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| Rule")]


def test_every_rule_has_a_source_and_a_test() -> None:
    assert len(RULES) > 60
    for line in RULES:
        assert "verify" not in line, line
        # A row has three cells; what holds it stands in the last.
        _, rule, source, held, _ = line.split("|")
        assert rule.strip()
        assert re.search(r"\b(doc|record|ours)\b", source), line
        assert re.search(r"`[\w/:.]+`", held), line


def test_every_case_and_question_has_a_row() -> None:
    held = " ".join(line.split("|")[3] for line in RULES)
    raw = set(re.findall(r"raw `(\w+)`", held))
    assert raw == QUESTIONS
    cases = set(re.findall(r"`(\w+)`", re.sub(r"raw `\w+`", "", held)))
    assert cases == set(CASES)


def test_every_named_test_exists() -> None:
    named = set(re.findall(r"`(\w+(?:/\w+)*\.py)::(test_\w+)`", TEXT))
    assert len(named) > 25
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), (file, test)


def test_a_record_leaves_no_question_open() -> None:
    """The markers of rows that wait for a device's answer are gone once there is one, and name real cases till then."""
    waiting = {name for found in re.findall(r"<!-- from record: (.*?) -->", TEXT) for name in found.split(", ")}
    assert waiting <= {*CASES, *QUESTIONS}
    if (ROOT / "tests" / "conformance" / "record-h200.json").is_file():
        assert waiting == set()


def test_the_snippet_runs(tmp_path: Path) -> None:
    found = re.search(r"<!-- snippet -->\n```python\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None
    (tmp_path / "test_snippet.py").write_text(found[1], encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "ds41rt.testing.plugin"]
    done = subprocess.run(
        [*command, "--gpu-seeds=2", "--gpu-device=never"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "8 passed" in done.stdout, done.stdout
