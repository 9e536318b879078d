"""`ds41rt decode`: every option, what it prints, what it writes."""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_harness import assert_refused, run_cli
from numpy.typing import NDArray

from ds41rt.checkpoint.checkpoint import Checkpoint
from ds41rt.checkpoint.token_map import load_tokenizer
from ds41rt.config import ModelConfig
from ds41rt.engine import Engine
from ds41rt.trace.file import PARTS

Arrays = dict[str, NDArray[Any]]
PROMPT = [5, 17, 42, 99]
IDS = ",".join(map(str, PROMPT))
COUNTERS = {
    "captures", "recaptures", "replays", "clean_replays", "falls", "falls_by_layer", "device_hits", "host_hits",
    "misses", "expert_nbytes_read", "expert_slots", "device_nbytes", "pinned_nbytes", "promotions", "demotions",
    "prefetch_issued", "prefetch_useful", "prefetch_wasted", "prefetch_failed", "expert_nbytes_moved", "host_slots",
}  # fmt: skip


@pytest.fixture(scope="module")
def micro(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("micro")


@pytest.fixture(scope="module")
def expected(micro: Path) -> tuple[list[int], NDArray[np.float32]]:
    """Eight greedy tokens after PROMPT and the logits of every position, by hand on the engine."""
    image = ModelConfig.from_checkpoint(micro).image_token
    with Engine.open(micro, mode="eager", backend="host") as engine, engine.new_sequence() as seq:
        rows = [engine.decode_step(seq, t) for t in PROMPT]
        new: list[int] = []
        while True:
            allowed = rows[-1].copy()
            allowed[image] = -np.inf
            new.append(int(allowed.argmax()))
            if len(new) == 8:
                return new, np.stack(rows)
            rows.append(engine.decode_step(seq, new[-1]))


def decode_json(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    result = run_cli(capsys, "decode", *argv, "--json")
    assert (result.code, result.err) == (0, "")
    assert result.out.count("\n") == 1
    found: dict[str, Any] = json.loads(result.out)
    return found


def load(path: Path) -> Arrays:
    with np.load(path) as data:
        return dict(data.items())


def test_json_has_the_new_tokens_and_every_counter(
    micro: Path, expected: tuple[list[int], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    got = decode_json(capsys, micro, "--prompt-ids", IDS, "--max-new", 8, "--ignore-eos")
    assert got["tokens"] == expected[0]
    assert set(got) == COUNTERS | {"tokens", "stopped", "positions", "tokens_per_s", "backend"}
    assert (got["positions"], got["stopped"], got["backend"]) == (11, "max-new", "host")
    assert got["tokens_per_s"] > 0
    cfg = ModelConfig.from_checkpoint(micro)
    assert got["device_hits"] + got["host_hits"] + got["misses"] == cfg.n_layers * cfg.top_k * 11
    assert got["replays"] == got["captures"] == 0


def test_plain_output(micro: Path, expected: tuple[list[int], Any], capsys: pytest.CaptureFixture[str]) -> None:
    result = run_cli(capsys, "decode", micro, "--prompt-ids", IDS, "--max-new", 8, "--ignore-eos")
    assert result.code == 0
    assert result.out == ",".join(map(str, expected[0])) + "\n"
    for word in ("11 positions", "tokens/s", "backend host", "max-new", "misses"):
        assert word in result.err
    assert "\r" not in result.err  # no progress bar where there is no terminal


@pytest.mark.parametrize("mode", ["eager", "step-graph"])
@pytest.mark.parametrize("schedule", ["lazy", "eager", "random:3"])
def test_logits_out(
    micro: Path,
    expected: tuple[list[int], NDArray[np.float32]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    mode: str,
    schedule: str,
) -> None:
    out = tmp_path / "logits.npy"
    got = decode_json(
        capsys, micro, "--prompt-ids", IDS, "--max-new", 8, "--ignore-eos", "--mode", mode, "--schedule", schedule,
        "--expert-slots", 20, "--logits-out", out, "--backend", "host",
    )  # fmt: skip
    assert got["tokens"] == expected[0]
    assert got["expert_slots"] == 20
    logits = np.load(out)
    assert (logits.dtype, logits.shape) == (np.float32, (11, ModelConfig.from_checkpoint(micro).vocab))
    assert np.array_equal(logits.view(np.uint32), expected[1].view(np.uint32))
    assert (got["replays"] > 0) == (got["captures"] > 0) == (mode == "step-graph")
    assert [p.name for p in tmp_path.iterdir()] == ["logits.npy"]


def test_max_new_0_only_processes_the_prompt(
    micro: Path, expected: tuple[Any, NDArray[np.float32]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "logits.npy"
    got = decode_json(capsys, micro, "--prompt-ids", IDS, "--max-new", 0, "--logits-out", out)
    assert (got["tokens"], got["positions"]) == ([], 4)
    assert np.array_equal(np.load(out), expected[1][:4])
    assert run_cli(capsys, "decode", micro, "--prompt-ids", IDS, "--max-new", 0).out == ""


def test_max_new_1_feeds_nothing_back(
    micro: Path, expected: tuple[list[int], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    got = decode_json(capsys, micro, "--prompt-ids", IDS, "--max-new", 1)
    assert (got["tokens"], got["positions"]) == (expected[0][:1], 4)


@pytest.fixture
def eos_is_third(micro: Path, expected: tuple[list[int], Any], tmp_path: Path) -> Path:
    """The same checkpoint with the third greedy token as its end of text."""
    third = expected[0][2]
    assert third not in expected[0][:2]
    directory = tmp_path / "eos"
    directory.mkdir()
    for path in micro.iterdir():
        if path.name != "config.json":
            (directory / path.name).symlink_to(path)
    config = json.loads((micro / "config.json").read_text())
    assert config["eos_token_id"] != third
    config["eos_token_id"] = third
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_stops_at_eos(
    eos_is_third: Path, expected: tuple[list[int], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "logits.npy"
    got = decode_json(capsys, eos_is_third, "--prompt-ids", IDS, "--max-new", 8, "--logits-out", out)
    assert (got["tokens"], got["stopped"], got["positions"]) == (expected[0][:3], "eos", 6)
    assert len(np.load(out)) == 6


def test_ignore_eos(eos_is_third: Path, expected: tuple[list[int], Any], capsys: pytest.CaptureFixture[str]) -> None:
    got = decode_json(capsys, eos_is_third, "--prompt-ids", IDS, "--max-new", 8, "--ignore-eos")
    assert (got["tokens"], got["stopped"]) == (expected[0], "max-new")


@pytest.mark.parametrize("content", ["5,17,42,99", "5 17\n42\t99\n", " 5,\n17, 42 ,99\n"])
def test_prompt_ids_file(
    micro: Path, expected: tuple[list[int], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (tmp_path / "ids").write_text(content)
    got = decode_json(capsys, micro, "--prompt-ids-file", tmp_path / "ids", "--max-new", 2)
    assert got["tokens"] == expected[0][:2]


def test_prompt_text(micro: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = load_tokenizer(micro)
    ids = tokenizer.encode("hello there").ids
    by_ids = decode_json(capsys, micro, "--prompt-ids", ",".join(map(str, ids)), "--max-new", 4, "--ignore-eos")
    result = run_cli(capsys, "decode", micro, "--prompt", "hello there", "--max-new", 4, "--ignore-eos")
    assert result.code == 0
    tokens, text = result.out.split("\n", 1)
    assert tokens == ",".join(map(str, by_ids["tokens"]))
    assert text == tokenizer.decode(by_ids["tokens"]) + "\n"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_text_that_the_terminal_cannot_show(micro: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """It is shown with escapes; in a process of its own, whose outputs have the encoding."""
    script = "import sys; import ds41rt.tools.decode as d; from ds41rt.cli import main\n"
    script += "class T:\n  def decode(self, ids): return 'h\\u00e9\\ud800'\n"
    script += "d.prompt_of = lambda *_: [1]; d.load_tokenizer = lambda _: T(); sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", script, "decode", str(micro), "--prompt", "x", "--max-new", "2", "--ignore-eos"],
        env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "LC_ALL": "C"},
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = "h\\xe9\\ud800" if encoding == "ascii" else "h\u00e9\\ud800"
    assert done.stdout.decode().splitlines()[1] == shown


def test_closed_outputs(micro: Path) -> None:
    """As `>&-` leaves them: who closes them wants no output, and gets the exit code."""
    command = f"{shlex.quote(sys.executable)} -m ds41rt decode {shlex.quote(str(micro))} --max-new 1 --prompt-ids"
    for ids, closed, code in (("1", ">&-", 0), ("1", ">&- 2>&-", 0), ("288", ">&- 2>&-", 2)):
        done = subprocess.run(["sh", "-c", f"{command} {ids} {closed}"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert "Traceback" not in done.stderr


def test_prompt_text_without_the_extra(
    micro: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    result = run_cli(capsys, "decode", micro, "--prompt", "hello")
    assert_refused(result, 1, "tokenizers", "ds41rt[text]")


@pytest.mark.parametrize("keys", ["intended", "reference"])
def test_trace_out_has_the_golden_names(keys: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden_dir = Path(__file__).parents[1] / "goldens" / "tiny-a"
    golden = load(golden_dir / "run.npz")
    ids = ",".join(map(str, golden["tokens"][:12].tolist()))
    out = tmp_path / "trace.npz"
    decode_json(
        capsys, golden_dir / "checkpoint", "--prompt-ids", ids, "--max-new", 0, "--trace-out", out,
        "--index-keys", keys, "--max-context", 64, "--expert-cache-gib", 0.05,
    )  # fmt: skip
    trace = load(out)
    names = {"expert_ids", "expert_weights", "index_topk.L02", "index_topk.L05", "index_topk.L07"}
    hashes = {f"{part}_hash" for part in PARTS}
    assert set(trace) == names | hashes | {"version", "model", "about", "positions", "tokens", "replayed"}
    assert trace["version"] == 2
    for name in names:
        assert trace[name].dtype == golden[name].dtype, name
        assert trace[name].shape == (12, *golden[name].shape[1:]), name
    # the golden run's routing and selections; the few first steps are the same in both key modes
    assert np.array_equal(trace["expert_ids"], golden["expert_ids"][:12])
    assert np.abs(trace["expert_weights"] - golden["expert_weights"][:12]).max() < 2e-3
    for layer in (2, 5, 7):
        assert np.array_equal(trace[f"index_topk.L{layer:02d}"], golden[f"index_topk.L{layer:02d}"][:12])
    assert trace["streams_hash"].dtype == np.uint64
    assert trace["streams_hash"].shape == (12, 8)
    assert len(np.unique(trace["streams_hash"])) == 96


def test_streams_hash_is_of_the_streams_before_the_expand(
    micro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layer 0 of a first token without engram: its streams are the embedding, four times."""
    cfg = ModelConfig.from_checkpoint(micro)
    assert 0 not in cfg.engram_layers
    out = tmp_path / "trace.npz"
    decode_json(capsys, micro, "--prompt-ids", "5", "--max-new", 0, "--trace-out", out)
    with Checkpoint.open(micro) as checkpoint:
        row = checkpoint.read("embed.weight")[5]
    digest = hashlib.blake2b(np.tile(row, 4).tobytes(), digest_size=8).digest()
    assert load(out)["streams_hash"][0, 0] == int.from_bytes(digest, "little")


@pytest.mark.parametrize("schedule", ["lazy", "random:11"])
def test_traces_of_both_modes_are_equal(
    micro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], schedule: str
) -> None:
    traces = {}
    for mode in ("eager", "step-graph"):
        out = tmp_path / f"{mode}.npz"
        got = decode_json(
            capsys, micro, "--prompt-ids", IDS, "--max-new", 40, "--ignore-eos", "--mode", mode,
            "--schedule", schedule, "--expert-slots", 45, "--trace-out", out,
        )  # fmt: skip
        traces[mode] = load(out)
    assert got["clean_replays"] > 0
    assert sum(got["falls"].values()) > 0
    assert set(traces["eager"]) == set(traces["step-graph"])
    for name, array in traces["eager"].items():
        other = traces["step-graph"][name]
        if name in ("about", "replayed"):
            assert array.tobytes() != other.tobytes()
            continue
        assert (array.dtype, array.shape) == (other.dtype, other.shape)
        assert array.tobytes() == other.tobytes(), name


def test_both_outputs_replace_older_files(micro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "real.npy").write_bytes(b"old")
    (tmp_path / "l.npy").symlink_to(tmp_path / "real.npy")
    (tmp_path / "t.npz").write_bytes(b"old")
    decode_json(
        capsys, micro, "--prompt-ids", IDS, "--max-new", 0, "--logits-out", tmp_path / "l.npy",
        "--trace-out", tmp_path / "t.npz",
    )  # fmt: skip
    assert (tmp_path / "l.npy").is_symlink()
    assert np.load(tmp_path / "real.npy").shape[0] == 4
    assert load(tmp_path / "t.npz")["expert_ids"].shape[0] == 4
    assert len(list(tmp_path.iterdir())) == 3


def test_context_is_used_to_the_last_position(
    micro: Path, expected: tuple[list[int], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    got = decode_json(capsys, micro, "--prompt-ids", IDS, "--max-new", 8, "--max-context", 11, "--ignore-eos")
    assert got["tokens"] == expected[0]
    result = run_cli(capsys, "decode", micro, "--prompt-ids", IDS, "--max-new", 9, "--max-context", 11)
    assert_refused(result, 2, "12 positions", "11", "max_context", "DS41RT_MAX_CONTEXT")


def test_two_tiers_reading_ahead_and_the_adaptive_mode(
    micro: Path, expected: tuple[list[int], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The same tokens; the counters tell of it in words as well."""
    argv = ["--prompt-ids", IDS, "--max-new", 8, "--ignore-eos", "--expert-slots", 4]
    for more in (
        ["--host-slots", 20],
        ["--host-cache-gib", 0.0001, "--mode", "eager", "--prefetch"],
        ["--host-slots", 10, "--mode", "adaptive"],
        ["--mode", "step-graph", "--prefetch"],
    ):
        got = decode_json(capsys, micro, *argv, *more)
        assert got["tokens"] == expected[0]
        assert (got["prefetch_issued"] > 0) == ("--prefetch" in more)
        assert (got["host_hits"] > 0) == (got["host_slots"] > 0)
    result = run_cli(capsys, "decode", micro, *argv, "--host-slots", 20, "--mode", "eager", "--prefetch")
    assert re.search(
        r"host tier: \d+ of the hits, 20 slots, \d+ promotions, \d+ demotions, [\d.]+ kB moved", result.err
    )
    assert re.search(r"read ahead: \d+ experts, \d+ useful, \d+ wasted, 0 failed", result.err)
