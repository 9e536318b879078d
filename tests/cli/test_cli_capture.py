"""`ds41rt capture inspect | lint | diff`: outputs, files, exit codes, refusals."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_harness import assert_refused, run_cli

from ds41rt.capture import load_dump
from ds41rt.cli import main

Capsys = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def saved(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump of the micro preset, written by the command."""
    path = tmp_path_factory.mktemp("dumps") / "micro.json"
    micro = checkpoint("micro")
    assert main(["capture", "inspect", str(micro), "--out", str(path), "--backend", "host"]) == 0
    return path


def test_inspect_in_words(capsys: Capsys, saved: Path) -> None:
    result = run_cli(capsys, "capture", "inspect", "--dump", saved)
    assert (result.code, result.err) == (0, "")
    for line in (
        "step graph of micro", "  backend: host", "  forks after: L00.ffn_in", "  joins before: L00.combine",
        "  host reads back: routing headers, 2.56 kB",
    ):  # fmt: skip
        assert line in result.out.splitlines()
    assert "segment 0, layers 0 to 0: " in result.out
    only = run_cli(capsys, "capture", "inspect", "--dump", saved, "--segment", "1")
    assert "segment 1, layers 1 to 2: " in only.out
    assert "segment 0" not in only.out


def test_inspect_as_json_is_a_dump(capsys: Capsys, saved: Path, tmp_path: Path) -> None:
    result = run_cli(capsys, "capture", "inspect", "--dump", saved, "--json")
    path = tmp_path / "again.json"
    path.write_text(result.out, encoding="utf-8")
    assert load_dump(path) == load_dump(saved)
    one = json.loads(run_cli(capsys, "capture", "inspect", "--dump", saved, "--json", "--segment", 3).out)
    assert [graph["name"] for graph in one["graphs"]] == ["segment 3"]


@pytest.mark.parametrize(("name", "begins"), [("d.html", "<!"), ("d.dot", "digraph"), ("d.json", '{"schema"')])
def test_files_by_their_ending(capsys: Capsys, saved: Path, tmp_path: Path, name: str, begins: str) -> None:
    path = tmp_path / name
    result = run_cli(capsys, "capture", "inspect", "--dump", saved, "--out", path)
    assert (result.code, result.out.splitlines()[-1]) == (0, f"{path}: written")
    assert run_cli(capsys, "capture", "lint", "--dump", saved, "--out", path).out == f"nothing found\n{path}: written\n"
    silent = run_cli(capsys, "capture", "inspect", "--dump", saved, "--out", path, "--json").out
    assert json.loads(silent)["title"] == "step graph of micro"
    text = path.read_text(encoding="utf-8")
    assert text.lower().startswith(begins)
    assert "snapshot" in text
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_lint_of_a_dump_and_of_a_checkpoint(
    capsys: Capsys, saved: Path, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """An engine's own graphs are clean; a copy that is not its snapshot is found among them."""
    result = run_cli(capsys, "capture", "lint", "--dump", saved)
    assert (result.code, result.out, result.err) == (0, "nothing found\n", "")
    micro = checkpoint("micro")
    assert run_cli(capsys, "capture", "lint", micro).code == 0
    live = run_cli(capsys, "capture", "lint", micro, "--json", "--segment", 1, "--tokens", 3)
    assert (live.code, json.loads(live.out)["findings"]) == (0, [])
    foreign, page = tmp_path / "foreign.json", tmp_path / "lint.html"
    foreign.write_text(saved.read_text(encoding="utf-8").replace("L02.snapshot", "L02.save"), encoding="utf-8")
    found = run_cli(capsys, "capture", "lint", "--dump", foreign)
    assert (found.code, found.err) == (1, "")
    assert found.out.splitlines()[-1] == "1 finding: 1 copy-node"
    assert re.search(r"^copy-node: segment 1, node \d+ L02\.save: ", found.out, re.MULTILINE)
    quiet = run_cli(capsys, "capture", "lint", "--dump", foreign, "--skip", "copy-node")
    assert (quiet.code, quiet.out) == (0, "nothing found\n")
    told = run_cli(capsys, "capture", "lint", "--dump", foreign, "--json", "--out", page, "--segment", 1)
    assert told.code == 1
    (finding,) = json.loads(told.out)["findings"]
    assert (finding["rule"], finding["graph"], finding["name"]) == ("copy-node", "segment 1", "L02.save")
    assert finding.keys() == {"rule", "graph", "node", "name", "why", "todo"}
    assert "copy-node" in page.read_text(encoding="utf-8")


def test_lint_says_what_it_could_not_check(capsys: Capsys, saved: Path, tmp_path: Path) -> None:
    raw = json.loads(saved.read_text(encoding="utf-8"))

    def dump(name: str, graphs: list[object]) -> Path:
        path = tmp_path / name
        path.write_text(json.dumps({**raw, "graphs": graphs}), encoding="utf-8")
        return path

    empty, first = dump("empty.json", []), dump("first.json", raw["graphs"][:1])
    page = tmp_path / "page.html"
    result = run_cli(capsys, "capture", "lint", "--dump", empty, "--out", page)
    assert result.code == 1
    assert "not-checked: the dump: the dump has no graphs" in result.out
    assert "the dump has no graphs" in page.read_text(encoding="utf-8")
    more = run_cli(capsys, "capture", "lint", "--dump", saved, "--later", first)
    assert (more.code, more.out.splitlines()[-1]) == (1, "2 findings: 2 not-checked")
    assert "not-checked: segment 3: the dump of the later token has no such graph" in more.out
    fewer = run_cli(capsys, "capture", "lint", "--dump", first, "--later", saved)
    assert fewer.code == 1
    assert "only the dump of the later token has graph 'segment 1'" in fewer.out
    # Of one segment in both, there is nothing else to compare.
    both = ("--dump", first, "--later", saved, "--segment")
    assert run_cli(capsys, "capture", "lint", *both, 0).code == 0
    assert_refused(
        run_cli(capsys, "capture", "lint", *both, 1), 2, f"--segment 1: there is no such segment; {first} has"
    )


def test_lint_compares_with_a_later_token(capsys: Capsys, saved: Path, tmp_path: Path) -> None:
    assert run_cli(capsys, "capture", "lint", "--dump", saved, "--later", saved).code == 0
    raw = json.loads(saved.read_text(encoding="utf-8"))
    param = next(
        p for n in raw["graphs"][0]["nodes"] for p in (n["kernel"] or {"params": []})["params"] if p["name"] == "eps"
    )
    param.update(raw="00000000", value=0.0)
    later = tmp_path / "later.json"
    later.write_text(json.dumps(raw), encoding="utf-8")
    result = run_cli(capsys, "capture", "lint", "--dump", saved, "--later", later)
    assert result.code == 1
    assert "baked-scalar: segment 0" in result.out
    assert "'eps' is baked as" in result.out


def test_diff(capsys: Capsys, saved: Path, tmp_path: Path) -> None:
    same = run_cli(capsys, "capture", "diff", saved, saved)
    assert (same.code, same.err) == (0, "")
    assert "no difference" in same.out
    raw = json.loads(saved.read_text(encoding="utf-8"))
    raw["graphs"][1]["nodes"].pop()
    other = tmp_path / "other.json"
    other.write_text(json.dumps(raw), encoding="utf-8")
    differs = run_cli(capsys, "capture", "diff", saved, other)
    assert differs.code == 1
    assert "graph 'segment 1':" in differs.out
    assert "  - node 27 L03.attn_in" in differs.out
    as_json = run_cli(capsys, "capture", "diff", saved, other, "--json")
    assert as_json.code == 1
    found = json.loads(as_json.out)
    assert found["differs"] is True
    assert found["graphs"][0]["removed"] == [[27, "L03.attn_in"]]


@pytest.mark.parametrize("action", ["inspect", "lint"])
def test_refusals(capsys: Capsys, saved: Path, tmp_path: Path, action: str) -> None:
    def refused(*argv: object, said: str) -> None:
        assert_refused(run_cli(capsys, "capture", action, *argv), 2, said)

    refused("--dump", tmp_path / "none.json", said="none.json: cannot be read")
    broken = tmp_path / "broken.json"
    broken.write_bytes(saved.read_bytes()[:1000])
    refused("--dump", broken, said="is not a capture dump")
    newer = tmp_path / "newer.json"
    newer.write_text('{"schema": "ds41rt.capture", "version": 9}', encoding="utf-8")
    refused("--dump", newer, said="update ds41rt")
    refused("--dump", saved, "--segment", "2", said="--segment 2: there is no such segment")
    refused("--dump", saved, "--out", tmp_path / "x.txt", said="must end in .json, .html, .dot")
    refused("--dump", saved, "--out", tmp_path / "no" / "x.json", said="no file can be made")
    for tokens in ("2", "0", "-1"):
        refused(tmp_path, "--backend", "host", "--tokens", tokens, said=f"--tokens must be at least 3, is {tokens}: ")
    for option, value in (("--tokens", "4"), ("--backend", "host"), ("--schedule", "lazy")):
        refused(
            "--dump",
            saved,
            option,
            value,
            said=f"{option} is for capturing a checkpoint; with --dump nothing is, leave it out",
        )
    for argv in ([], ["--dump", saved, tmp_path]):
        assert run_cli(capsys, "capture", action, *argv).code == 2


def test_refusals_of_lint_alone(capsys: Capsys, saved: Path, tmp_path: Path) -> None:
    result = run_cli(capsys, "capture", "lint", "--dump", saved, "--skip", "no-such")
    assert_refused(result, 2, "--skip no-such", "copy-node")
    assert_refused(run_cli(capsys, "capture", "lint", tmp_path, "--later", saved), 2, "--later goes with --dump")


def test_names_in_a_refusal_are_shown_without_control_characters(capsys: Capsys, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "evil.json"
    path.write_text(saved.read_text(encoding="utf-8").replace('"segment 1"', '"\\u001b[2J"'), encoding="utf-8")
    assert_refused(
        run_cli(capsys, "capture", "inspect", "--dump", path, "--segment", 1), 2, "has segment 0, \\x1b[2J, segment 3"
    )


def test_a_failed_run_leaves_no_file(capsys: Capsys, tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    result = run_cli(capsys, "capture", "inspect", tmp_path / "no checkpoint", "--out", out, "--backend", "host")
    assert result.code == 2
    assert list(tmp_path.iterdir()) == []


def test_every_action_is_listed(capsys: Capsys) -> None:
    assert run_cli(capsys, "capture").code == 2
    out = run_cli(capsys, "capture", "--help").out
    for action in ("inspect", "lint", "diff", "explain"):
        assert action in out
