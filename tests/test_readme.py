"""The README tells the truth: the example runs, commands parse, tables and outputs are those of the code."""

import argparse
import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ds41rt import errors
from ds41rt.cli import main
from ds41rt.settings import ALIASES, PREFIX, Settings

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(marker: str, language: str = "") -> str:
    """The fenced block after <!-- marker -->."""
    found = re.search(rf"<!-- {marker} -->\n```{language}\n(.*?)```", README, re.DOTALL)
    assert found is not None, f"README.md has no block {marker!r}"
    return found[1]


def printed(argv: list[str]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(argv) == 0
    return out.getvalue()


@pytest.mark.parametrize("image", [None, 0, 5])
def test_example_runs(checkpoint: Callable[[str], Path], tmp_path: Path, image: int | None) -> None:
    """As it stands, in a directory that has a checkpoint: the tokens are those of `ds41rt decode`.

    Also where the model's first or sixth choice stands for an image, which no step takes.
    """
    example = block("example", "python")
    assert len(example.splitlines()) <= 20
    micro = checkpoint("micro")
    argv = ["decode", str(micro), "--prompt-ids", "5,17,42", "--max-new", "16", "--ignore-eos", "--json"]
    directory = tmp_path / "checkpoint"
    shutil.copytree(micro, directory)
    if image is not None:
        new = json.loads(printed(argv))["tokens"][image]
        for path in (directory / "config.json", directory / "inference" / "config.json"):
            text, n = re.subn(r'"image_token_id": \d+', f'"image_token_id": {new}', path.read_text())
            assert n == 1
            path.write_text(text)
    argv[1] = str(directory)
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", script.name], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    tokens, counters = done.stdout.splitlines()
    assert tokens == "new tokens: " + " ".join(map(str, json.loads(printed(argv))["tokens"]))
    said = re.fullmatch(r"19 tokens, (\d+) of (\d+) replays clean, (\d+) experts read", counters)
    assert said is not None
    assert 0 < int(said[1]) <= int(said[2])
    assert int(said[3]) > 0


def test_demo_output_is_shown_as_it_is() -> None:
    """Line by line, without the figures: they are of a longer run, on another machine."""

    def without_figures(text: str) -> str:
        return re.sub(r" +", " ", re.sub(r"\b\d[\d. ]*", "N ", text))

    assert without_figures(block("demo")) == without_figures(printed(["demo", "--tokens", "30"]))


def test_commands_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command line of the README is legal, and the README shows every command."""
    seen: list[str] = []

    def note(args: argparse.Namespace) -> int:
        seen.append(args.command)
        return 0

    monkeypatch.setattr("ds41rt.cli._run", note)
    for line in block("commands", "sh").splitlines():
        name, *argv = shlex.split(line)
        assert name == "ds41rt"
        assert main(argv) == 0, line
    assert set(seen) == {
        "synth",
        "decode",
        "verify",
        "doctor",
        "bench",
        "bench-streaming",
        "trace",
        "timeline",
        "cache-sim",
        "capture",
    }


def test_the_host_tier_example_uses_the_host_tier(checkpoint: Callable[[str], Path]) -> None:
    (line,) = [line for line in block("commands", "sh").splitlines() if "--host-slots" in line]
    said = json.loads(
        printed([str(checkpoint("tiny")) if a == "tiny" else a for a in shlex.split(line)[1:]] + ["--json"])
    )
    assert said["host_hits"] > 0
    assert said["promotions"] > 0
    assert said["prefetch_useful"] > 0


def test_settings_table() -> None:
    rows = dict(re.findall(r"^\| `(DS41RT_\w+)` \| `(\w[\w.-]*)` \|", README, re.MULTILINE))
    assert rows == {PREFIX + name.upper(): str(field.default) for name, field in Settings.model_fields.items()}
    text = README.replace("`_", "`ATLAS_DS41_")  # the list shortens all but the first
    assert {a for a in ALIASES if f"`{a}`" in text} == set(ALIASES)


def test_every_public_error_is_explained() -> None:
    public = {n for n, e in vars(errors).items() if isinstance(e, type) and issubclass(e, Exception)}
    assert [name for name in sorted(public) if f"`{name}`" not in README and f".{name}`" not in README] == []


def test_paths_exist() -> None:
    """Every repository path in the map, and every script named in the text."""
    listing = README.split("## Repository")[1].split("## Licence")[0]
    paths = re.findall(r"^    (\S+) ", listing, re.MULTILINE)
    assert len(paths) >= 9
    for path in [*paths, "tools/host_speed.py", "LICENSE", "tests/goldens/tiny-a", "ptx/README.md", ".ci/run"]:
        assert (ROOT / path).exists(), path
    assert "python tools/host_speed.py" in README
