"""docs/capture.md: the lines about saving and comparing dumps run, and its link points at a node."""

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from small_graphs import rig

import ds41rt.capture
from ds41rt.capture import load_dump

MANUAL = (Path(__file__).parents[2] / "docs" / "capture.md").read_text(encoding="utf-8")


def block(word: str) -> str:
    """The indented block with this word in it."""
    (found,) = [text for text in re.findall(r"(?:^    .*\n|^\n)+", MANUAL, re.MULTILINE) if word in text]
    return dedent(found)


def test_the_lines_about_saved_dumps_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with rig() as r:
        dump, later = r.dump(lambda: r.append(r.ring.ptr, 3)), r.dump(lambda: r.append(r.ring.ptr, 4))
    names: dict[str, Any] = {"Path": Path, "dump": dump, "later": later}
    (imports,) = re.findall(r"^    (from ds41rt\.capture import .*)$", MANUAL, re.MULTILINE)
    exec(imports, names)
    exec(block("before.json"), names)
    assert load_dump("before.json") == names["dump"]
    assert "position: 3 -> 4" in capsys.readouterr().out
    assert [f.rule for f in names["findings"]] == ["baked-scalar"]
    assert "baked-scalar" in Path("step.html").read_text(encoding="utf-8")


def test_the_link_names_a_graph_as_a_checkpoints_dump_does() -> None:
    assert "step.html#graph=segment+8&node=22 " in block("#graph=")


def test_public_names_are_listed() -> None:
    assert set(ds41rt.capture.__all__) <= set(dir(ds41rt.capture))
