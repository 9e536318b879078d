"""`ds41rt timeline`: the file, the table, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_harness import assert_refused, run_cli

from ds41rt.engine import Engine
from ds41rt.errors import Ds41Error

Capsys = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def micro(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("micro")


def test_table_and_file(micro: Path, tmp_path: Path, capsys: Capsys) -> None:
    out = tmp_path / "t.json"
    result = run_cli(capsys, "timeline", micro, "--prompt-ids", "5,17", "--tokens", 3, "--out", out, "--mode", "eager")
    assert (result.code, result.err) == (0, "")
    about, head, *rows, last, where = result.out.splitlines()
    assert about.endswith("backend host, device simulated device, mode eager")
    assert head.split()[:2] == ["position", "host"]
    assert [row.split()[0] for row in rows] == ["2", "3", "4"]
    assert last.startswith("median: ")
    assert str(out) in where
    written = json.loads(out.read_text())
    assert sum(e["name"].startswith("decode step") for e in written["traceEvents"]) == 3
    assert written["otherData"]["mode"] == "eager"


def test_a_mode_of_the_environment_is_told(
    micro: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS41RT_ADAPTIVE", "1")
    argv = ("--prompt-ids", "5", "--tokens", 1, "--out", tmp_path / "t.json", "--json")
    assert json.loads(run_cli(capsys, "timeline", micro, *argv).out)["mode"] == "adaptive"


def test_json(micro: Path, tmp_path: Path, capsys: Capsys) -> None:
    out = tmp_path / "t.json"
    argv = ("--prompt-ids", "5,17", "--tokens", 4, "--out", out, "--mode", "step-graph", "--expert-slots", 8)
    said = json.loads(run_cli(capsys, "timeline", micro, *argv, "--json").out)
    assert (said["out"], said["mode"], said["backend"]) == (str(out), "step-graph", "host")
    assert [row["position"] for row in said["tokens"]] == [2, 3, 4, 5]
    assert {row["graph_launches"] for row in said["tokens"]} == {3}
    assert sum(row["falls"] for row in said["tokens"]) > 0
    decoded = json.loads(
        run_cli(capsys, "decode", micro, "--prompt-ids", "5,17", "--max-new", 4, "--ignore-eos", "--json").out
    )
    assert [row["token"] for row in said["tokens"]] == decoded["tokens"]
    assert sum(e["name"].startswith("decode step") for e in json.loads(out.read_text())["traceEvents"]) == 4


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--prompt-ids", "1", "--tokens", "0"], ["--tokens", "0"]),
        (["--prompt-ids", "1", "--tokens", "-2"], ["--tokens", "-2"]),
        (["--prompt-ids", "1,x"], ["--prompt-ids", "'x'"]),
        (["--prompt-ids", "1,288"], ["288", "0..287"]),
        (["--prompt-ids", "1", "--expert-slots", "2"], ["2 expert slots"]),
        (["--prompt-ids", "1", "--max-context", "4", "--tokens", "4"], ["max_context", "5 positions"]),
        (["--prompt-ids", "1", "--schedule", "fast"], ["schedule", "'fast'"]),
    ],
)
def test_refusals(micro: Path, tmp_path: Path, capsys: Capsys, argv: list[str], words: list[str]) -> None:
    result = run_cli(capsys, "timeline", micro, *argv, "--out", tmp_path / "t.json")
    assert_refused(result, 2, *words)
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_tried_before_the_work(
    micro: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_work(*args: object, **kwargs: object) -> None:
        raise Ds41Error("the checkpoint was opened before the output was tried")

    monkeypatch.setattr(Engine, "open", no_work)
    result = run_cli(capsys, "timeline", micro, "--prompt-ids", "1", "--out", tmp_path / "none" / "t.json")
    assert_refused(result, 2, str(tmp_path / "none" / "t.json"))


def test_the_backend_setting_counts(
    micro: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS41RT_BACKEND", "tpu")
    result = run_cli(capsys, "timeline", micro, "--prompt-ids", "1", "--out", tmp_path / "t.json")
    assert_refused(result, 2, "DS41RT_BACKEND", "'tpu'")


def test_usage(micro: Path, capsys: Capsys) -> None:
    for argv in ([micro, "--prompt-ids", "1"], [micro, "--out", "t.json"], ["--out", "t.json", "--prompt-ids", "1"]):
        result = run_cli(capsys, "timeline", *argv)
        assert (result.code, result.out) == (2, "")
        assert "usage: ds41rt timeline" in result.err
