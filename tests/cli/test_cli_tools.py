"""`ds41rt synth`, `verify`, `demo`, `--version`: what they print, return and leave behind."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cli_harness import assert_refused, run_cli

from ds41rt import __version__
from ds41rt.checkpoint.checkpoint import Checkpoint

Capsys = pytest.CaptureFixture[str]
TINY_A = Path(__file__).parents[1] / "goldens" / "tiny-a"


def test_version_and_help(capsys: Capsys) -> None:
    assert run_cli(capsys, "--version").out == f"ds41rt {__version__}\n"
    for argv in (["--help"], ["decode", "--help"], ["synth", "--help"], ["verify", "--help"], ["demo", "--help"]):
        result = run_cli(capsys, *argv)
        assert (result.code, result.err) == (0, "")
        assert result.out.startswith("usage: ds41rt")


def test_module_and_script_are_the_same_command() -> None:
    script = Path(sys.executable).with_name("ds41rt")
    for command in ([sys.executable, "-m", "ds41rt"], [str(script)]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout == f"ds41rt {__version__}\n"


def test_verbose_is_taken_before_and_after_the_command(capsys: Capsys) -> None:
    golden = TINY_A / "checkpoint"
    for argv in (["-v", "decode", golden], ["decode", golden, "-v"], ["-v", "decode", golden, "--verbose"]):
        result = run_cli(capsys, *argv, "--prompt-ids", "1", "--max-new", 1)
        assert result.code == 0
        assert "backend chosen" in result.err
    assert "backend chosen" not in run_cli(capsys, "decode", golden, "--prompt-ids", "1", "--max-new", 1).err
    assert "-v, --verbose" in run_cli(capsys, "capture", "lint", "--help").out


# ---- synth


def test_synth(tmp_path: Path, capsys: Capsys) -> None:
    result = run_cli(capsys, "synth", tmp_path / "a" / "micro", "--preset", "micro", "--seed", 5, "--json")
    assert (result.code, result.err) == (0, "")
    nbytes = sum(p.stat().st_size for p in (tmp_path / "a" / "micro").rglob("*") if p.is_file())
    said = json.loads(result.out)
    assert said == {"dir": str(tmp_path / "a" / "micro"), "preset": "micro", "seed": 5, "nbytes": nbytes}
    with Checkpoint.open(tmp_path / "a" / "micro") as checkpoint:
        assert checkpoint.config.n_layers == 4
    result = run_cli(capsys, "synth", tmp_path / "b", "--preset", "micro", "--seed", 5)
    assert (result.code, result.err) == (0, "")
    assert result.out == f"{tmp_path / 'b'}: preset micro, seed 5, {nbytes / 1e3:.0f} kB\n"
    for path in (tmp_path / "b").rglob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "a" / "micro" / path.name).read_bytes()


def test_synth_does_not_overwrite(tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "keep").write_text("mine")
    for place in (tmp_path, tmp_path / "keep"):
        assert_refused(run_cli(capsys, "synth", place, "--preset", "micro"), 2, str(place), "nothing was written")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("keep", "mine")]


def test_synth_that_cannot_write(tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "file").write_text("x")
    result = run_cli(capsys, "synth", tmp_path / "file" / "micro", "--preset", "micro")
    assert_refused(result, 2, str(tmp_path / "file" / "micro"), "cannot be written")
    assert_refused(run_cli(capsys, "synth", tmp_path / "new", "--seed", "-1"), 2, "seed -1")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


# ---- verify


def test_verify_passes_on_the_goldens(capsys: Capsys) -> None:
    result = run_cli(capsys, "verify", TINY_A)
    assert (result.code, result.err) == (0, "")
    *table, verdict = result.out.splitlines()
    assert verdict == "verify: ok"
    assert {line.split()[0] for line in table} == {"level", "layer", "step", "run", "reference"}
    assert "FAILED" not in result.out
    assert "PROBLEM" not in result.out


def golden_with_flipped_bit(directory: Path, byte: int, bit: int) -> Path:
    """The golden set with one bit of one norm weight (bf16) of layer 3 flipped."""
    copy = Path(shutil.copytree(TINY_A, directory / "tiny-a"))
    with Checkpoint.open(copy / "checkpoint") as checkpoint:
        shard, info = checkpoint._lookup("layers.3.attn_norm.weight")
    assert info.dtype == "BF16"
    data = bytearray(shard.path.read_bytes())
    data[info.off + 2 * 17 + byte] ^= bit
    shard.path.write_bytes(data)
    return copy


def test_verify_stops_at_a_not_finite_value(tmp_path: Path, capsys: Capsys) -> None:
    """The high bit of the exponent: the weight becomes about 1e37."""
    result = run_cli(capsys, "verify", golden_with_flipped_bit(tmp_path, 1, 0x40))
    assert_refused(result, 1, "layer 3", "not-finite")


def test_verify_fails_beyond_the_limits(tmp_path: Path, capsys: Capsys) -> None:
    """The high bit of the fraction: one of 128 values is off by less than a half."""
    copy = golden_with_flipped_bit(tmp_path, 0, 0x40)
    result = run_cli(capsys, "verify", copy, "--json")
    assert (result.code, result.err) == (1, "")
    said = json.loads(result.out)
    assert said["ok"] is False
    worst = next(row for row in said["rows"] if row["level"] == "layer" and row["name"] == "attn_in")
    assert (worst["ok"], worst["where"].endswith("layer 3")) == (False, True)
    assert any(problem.startswith("layer attn_in") for problem in said["problems"])


def test_verify_needs_a_golden_directory(tmp_path: Path, capsys: Capsys) -> None:
    def refused(*words: str) -> None:
        assert_refused(run_cli(capsys, "verify", tmp_path / "g"), 2, *words)

    run = tmp_path / "g" / "run.npz"
    refused(str(run.parent), "has no run.npz", "for example tests/goldens/tiny-a")
    run.parent.mkdir()
    assert_refused(
        run_cli(capsys, "verify", TINY_A.parent), 2, "has no run.npz; give a golden directory: ", str(TINY_A)
    )
    run.write_bytes(b"no archive")
    refused(str(run), "not an npz file")
    whole = (TINY_A / "run.npz").read_bytes()
    run.write_bytes(whole[:50_000])
    refused(str(run), "not an npz file")
    damaged = bytearray(whole)
    damaged[200:2000] = bytes(1800)
    run.write_bytes(damaged)
    refused(str(run), "cannot be read as a golden file")
    run.write_bytes(whole)
    refused(str(tmp_path / "g"), "no trace_s*.npz")
    trace = tmp_path / "g" / "trace_s00.npz"
    shutil.copy(TINY_A / trace.name, trace)
    assert_refused(run_cli(capsys, "verify", tmp_path / "g"), 2, "checkpoint")
    (tmp_path / "g" / "checkpoint").symlink_to(TINY_A / "checkpoint")
    np.savez(trace, token=np.int32(1))
    refused(str(trace), "has no array")


# ---- demo


def test_demo(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = run_cli(capsys, "demo", "--tokens", 24, "--json")
    assert (result.code, result.err) == (0, "")
    said = json.loads(result.out)
    assert (said["bit_identical"], said["backend"]) == (True, "host")
    assert said["eager"]["tokens"] == said["step-graph"]["tokens"]
    assert len(said["eager"]["tokens"]) == 24 - 7 + 1
    graph = said["step-graph"]
    assert graph["clean_replays"] > 0
    assert graph["replays"] == graph["clean_replays"] + sum(graph["falls"].values()) > graph["clean_replays"]
    assert list(tmp_path.iterdir()) == []


def test_demo_with_too_few_tokens(capsys: Capsys) -> None:
    assert_refused(run_cli(capsys, "demo", "--tokens", 6), 2, "--tokens", "6")


@pytest.mark.parametrize("command", ["bench", "bench-streaming"])
def test_benches_take_the_backend_of_the_environment(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """As every other command does, and the option goes before it."""

    def said(*argv: str) -> str:
        result = run_cli(capsys, command, "--preset", "released", *argv)
        assert (result.code, result.out) == (2, "")
        return result.err

    monkeypatch.setenv("DS41RT_BACKEND", "tpu")
    assert "DS41RT_BACKEND='tpu'" in said()
    monkeypatch.setenv("DS41RT_BACKEND", "host")
    assert "the host backend was chosen" in said()
    monkeypatch.setenv("DS41RT_BACKEND", "cuda")
    assert "the host backend was chosen" in said("--backend", "host")


def test_bench_says_small_sizes_in_small_units(capsys: Capsys) -> None:
    done = run_cli(capsys, "bench", "--backend", "host", "--preset", "micro", "--tokens", 1, "--context", 32)
    assert done.code == 0, done.err
    head, *rows = done.out.splitlines()[-21:]
    assert head.split() == ["stage", "nodes", "us", "us", "each", "size", "each", "TB/s"]
    assert len(rows) == 20
    for row in rows:
        amount, unit = row.split()[4:6]
        assert float(amount) > 0
        assert unit in ("B", "kB")


def test_bench_streaming_on_the_simulated_device(tmp_path: Path, capsys: Capsys) -> None:
    done = run_cli(
        capsys,
        "bench-streaming",
        "--backend",
        "host",
        "--preset",
        "tiny",
        "--layers",
        4,
        "--tokens",
        3,
        "--disk",
        tmp_path,
        "--disk-gb",
        0.004,
        "--json",
    )
    assert done.code == 0, done.err
    found = json.loads(done.out)
    host, files = found["host_tier"], found["file_tier"]
    assert 360 * files["expert_nbytes"] < files["file_nbytes"] < 4e6
    assert (host["falls"], host["misses"], host["hits_per_token"]) == (0, 0, 24)
    assert (files["experts"], files["at_a_time"]) == (360, 6)
    assert min(found["touches_us"], host["host_us"], files["gb_per_s"], files["plain_gb_per_s"]) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        ("--tokens", 0),
        ("--tokens", 5000),
        ("--threads", 0),
        ("--threads", 65),
        ("--disk-gb", 0),
        ("--disk-gb", "inf"),
        ("--experts-per-layer", 5),
        ("--layers", 99),
    ],
)
def test_bench_streaming_refuses_before_it_measures(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, options: tuple[str, object]
) -> None:
    def no_work(*args: object, **kwargs: object) -> None:
        raise AssertionError("a backend was opened")

    monkeypatch.setattr("ds41rt.tools.bench_streaming.open_backend", no_work)
    assert_refused(
        run_cli(capsys, "bench-streaming", "--preset", "tiny", "--disk", tmp_path, *options), 2, str(options[1])
    )


@pytest.mark.parametrize(("host_us", "said"), [(90.0, None), (100.0, None), (340.0, 10.0)])
def test_bench_streaming_says_what_it_cannot_measure(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, host_us: float, said: float | None
) -> None:
    """A token that is no slower with all its 24 hits in host memory gives no cost of a hit. The file is cut to the
    model's experts, and the size of that one is shown."""
    stats = SimpleNamespace(falls={}, misses=0)

    def timed(backend: object, source: object, per_layer: int, tokens: int, slots: tuple[int, int]) -> object:
        return (host_us if slots[1] else 100.0), stats

    monkeypatch.setattr("ds41rt.tools.bench_streaming._token_us", timed)
    argv = ("bench-streaming", "--preset", "tiny", "--layers", 4, "--tokens", 1, "--disk", tmp_path, "--disk-gb", 9e9)
    found = json.loads(run_cli(capsys, *argv, "--json").out)
    assert found["host_tier"]["us_per_hit"] == said
    assert (found["host_tier"]["times_link"] is None) == (said is None)
    out = run_cli(capsys, *argv).out
    assert ("not measurable here" in out) == (said is None)
    assert ("10 us a hit = " in out) == (said is not None)
    nbytes = found["file_tier"]["file_nbytes"]
    assert f"360 experts in a file of {nbytes / 1e6:.2f} MB, 6 at a time" in out


@pytest.mark.parametrize("option", ["--threads", "--disk-gb"])
def test_bench_streaming_without_a_disk_has_no_file_to_read(capsys: Capsys, option: str) -> None:
    assert_refused(run_cli(capsys, "bench-streaming", "--preset", "tiny", option, 4), 2, "--disk DIR")
