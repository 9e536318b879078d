"""Bad input to the command line: one sentence on stderr, the right exit code, nothing written, no traceback."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_harness import Result, assert_refused, run_cli

from ds41rt.checkpoint.token_map import load_tokenizer
from ds41rt.config import ModelConfig
from ds41rt.engine import Engine
from ds41rt.errors import CheckpointReadError

Capsys = pytest.CaptureFixture[str]
COMMAND = (sys.executable, "-m", "ds41rt")


@pytest.fixture(scope="module")
def micro(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("micro")


@pytest.fixture
def broken(micro: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint to damage."""
    return Path(shutil.copytree(micro, tmp_path / "broken"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--prompt-ids", "1,x"], ["--prompt-ids", "'x'"]),
        (["--prompt-ids", "1.5"], ["--prompt-ids", "'1.5'"]),
        (["--prompt-ids=-1,2"], ["--prompt-ids", "'-1'"]),
        (["--prompt-ids", "1,,2"], ["--prompt-ids", "''"]),
        (["--prompt-ids", "1 , , 2"], ["--prompt-ids", "''"]),
        (["--prompt-ids", "1,2,"], ["--prompt-ids", "''"]),
        (["--prompt-ids", "٣"], ["--prompt-ids", "'٣'"]),
        (["--prompt-ids", "9" * 500], ["--prompt-ids", "999..."]),
        (["--prompt-ids", ""], ["--prompt-ids", "no token ids"]),
        (["--prompt-ids", " \n"], ["--prompt-ids", "no token ids"]),
        (["--prompt", ""], ["--prompt", "no tokens"]),
        (["--prompt-ids", "1,288"], ["288", "0..287"]),
        (["--prompt-ids", "1", "--max-new", "-1"], ["--max-new", "-1"]),
        (["--prompt-ids", "1", "--max-context", "0"], ["max_context", "0"]),
        (["--prompt-ids", "1", "--max-context", "-5"], ["max_context", "-5"]),
        (["--prompt-ids", "1", "--max-context", "99999999"], ["99999999", "positions"]),
        (["--prompt-ids", "1", "--max-context", "16", "--max-new", "17"], ["max_context", "17 positions", "16"]),
        (["--prompt-ids", "1", "--expert-slots", "0"], ["expert slots", "0"]),
        (["--prompt-ids", "1", "--expert-slots", "-3"], ["expert slots", "-3"]),
        (["--prompt-ids", "1", "--expert-cache-gib", "-1"], ["expert_cache_gib", "-1"]),
        (["--prompt-ids", "1", "--expert-cache-gib", "nan"], ["expert_cache_gib", "nan"]),
        (["--prompt-ids", "1", "--expert-cache-gib", "inf"], ["expert_cache_gib", "inf"]),
        (["--prompt-ids", "1", "--expert-cache-gib", "1e-9"], ["expert budget", "DS41RT_EXPERT_CACHE_GIB"]),
        (["--prompt-ids", "1", "--expert-cache-gib", "0"], ["expert_cache_gib", "0 expert slots"]),
        (["--prompt-ids", "1", "--host-cache-gib", "-1"], ["host_cache_gib", "-1"]),
        (["--prompt-ids", "1", "--host-slots", "-2"], ["host slots", "-2"]),
        (["--prompt-ids", "1", "--expert-slots", "1", "--host-slots", "1"], ["1 expert slots and 1 host slots"]),
        (["--prompt-ids", "1", "--schedule", "fast"], ["schedule", "'fast'", "lazy"]),
        (["--prompt-ids", "1", "--schedule", "random:x"], ["schedule", "'random:x'"]),
        (["--prompt-ids", "1", "--schedule", ""], ["schedule", "''"]),
    ],
)
def test_value_is_refused_by_name(micro: Path, capsys: Capsys, argv: list[str], words: list[str]) -> None:
    assert_refused(run_cli(capsys, "decode", micro, *argv), 2, *words)


def test_image_token_in_the_prompt(micro: Path, capsys: Capsys) -> None:
    image = ModelConfig.from_checkpoint(micro).image_token
    assert_refused(run_cli(capsys, "decode", micro, "--prompt-ids", image), 2, str(image), "image")


def test_too_few_slots_for_one_token(micro: Path, capsys: Capsys) -> None:
    result = run_cli(capsys, "decode", micro, "--prompt-ids", "1", "--expert-slots", 2)
    assert_refused(result, 2, "2 expert slots", "working set of 3", "--expert-slots")


def test_cuda_backend_without_a_gpu(micro: Path) -> None:
    """In a process of its own, to which the driver shows no device."""
    golden = Path(__file__).parents[1] / "goldens" / "tiny-a"
    for command in (["decode", str(micro), "--prompt-ids", "1"], ["verify", str(golden)]):
        done = subprocess.run(
            [*COMMAND, *command, "--backend", "cuda"],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert_refused(Result(done.returncode, done.stdout, done.stderr), 1, "backend 'cuda'")


@pytest.mark.parametrize(
    "argv",
    [
        ["decode"],
        ["decode", "DIR"],
        ["decode", "DIR", "--prompt-ids", "1", "--prompt", "x"],
        ["decode", "DIR", "--prompt-ids", "1", "--max-new", "many"],
        ["decode", "DIR", "--prompt-ids", "1", "--backend", "tpu"],
        ["decode", "DIR", "--prompt-ids", "1", "--mode", "graph"],
        ["decode", "DIR", "--prompt-ids", "1", "--index-keys", "own"],
        ["decode", "DIR", "--prompt-ids", "1", "--expert-slots", "9", "--expert-cache-gib", "1"],
        ["decode", "DIR", "--prompt-ids", "1", "--max-n", "3"],  # no abbreviations
        ["synth", "DIR", "--preset", "huge"],
        ["dekode"],
        [],
    ],
)
def test_usage(micro: Path, capsys: Capsys, argv: list[str]) -> None:
    result = run_cli(capsys, *[micro if a == "DIR" else a for a in argv])
    assert (result.code, result.out) == (2, "")
    assert "usage: ds41rt" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["capture", "inspect", "DIR", "--tokens", "abc"], "--tokens: 'abc' is not a whole number; give one"),
        (["capture", "lint", "DIR", "--tokens", "1e3"], "--tokens: '1e3' is not a whole number; give one"),
        (["cache-sim", "--synthetic", "--device-slots", "9", "--seed", ""], "--seed: '' is not a whole number"),
        (["cache-sim", "--synthetic", "--device-slots", "9", "--disk-gb-s", "x"], "--disk-gb-s: 'x' is not a number"),
    ],
)
def test_text_where_a_number_belongs(micro: Path, capsys: Capsys, argv: list[str], said: str) -> None:
    result = run_cli(capsys, *[micro if a == "DIR" else a for a in argv])
    assert (result.code, result.out) == (2, "")
    assert f"argument {said}" in result.err.splitlines()[-1]


@pytest.mark.parametrize("command", ["decode", "verify", "demo", "bench", "bench-streaming"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DS41RT_STEP_GRPAH", "1"),
        ("DS41RT_STEP_GRAPH", "maybe"),
        ("ds41rt_backend", "host"),
        ("DS41RT_TRACE", "2"),
        ("ATLAS_DS41_TRCE", "1"),
    ],
)
def test_environment_typo(
    micro: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, command: str, name: str, value: str
) -> None:
    golden = Path(__file__).parents[1] / "goldens" / "tiny-a"
    argv: dict[str, list[object]] = {"decode": [micro, "--prompt-ids", "1"], "verify": [golden]}
    monkeypatch.setenv(name, value)
    assert_refused(run_cli(capsys, command, *argv.get(command, [])), 2, name.upper() if name.isupper() else name)


def test_prompt_ids_file_that_cannot_be_read(micro: Path, tmp_path: Path, capsys: Capsys) -> None:
    for path, why in ((tmp_path / "none", "No such file"), (tmp_path, "directory")):
        assert_refused(run_cli(capsys, "decode", micro, "--prompt-ids-file", path), 2, str(path), why)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe1,2")
    assert_refused(run_cli(capsys, "decode", micro, "--prompt-ids-file", binary), 2, str(binary), "not a text file")


# ---- the checkpoint


def refused_checkpoint(capsys: Capsys, directory: Path, *words: str) -> None:
    assert_refused(run_cli(capsys, "decode", directory, "--prompt-ids", "1"), 2, *words)


def test_no_checkpoint(tmp_path: Path, capsys: Capsys) -> None:
    refused_checkpoint(capsys, tmp_path / "none", str(tmp_path / "none"))
    refused_checkpoint(capsys, tmp_path, "config.json")
    (tmp_path / "file").write_text("x")
    refused_checkpoint(capsys, tmp_path / "file", str(tmp_path / "file"))


@pytest.mark.parametrize(
    "argv",
    [
        ["decode", "DIR", "--prompt-ids", "1"],
        ["decode", "DIR", "--prompt", "hello"],
        ["trace", "diff", "DIR", "--prompt-ids", "1"],
        ["timeline", "DIR", "--prompt-ids", "1", "--out", "OUT"],
        ["capture", "inspect", "DIR"],
        ["capture", "lint", "DIR"],
        ["capture", "explain", "DIR"],
    ],
)
def test_every_command_counts_a_bad_checkpoint_as_bad_input(
    broken: Path, tmp_path: Path, capsys: Capsys, argv: list[str]
) -> None:
    """Missing, and with a file that is cut."""

    def run(directory: Path) -> Result:
        return run_cli(capsys, *[{"DIR": directory, "OUT": tmp_path / "x.json"}.get(a, a) for a in argv])

    assert_refused(run(tmp_path / "none"), 2, str(tmp_path / "none"))
    for path in broken.rglob("*.*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:100])
    assert_refused(run(broken), 2, str(broken))


def test_a_read_that_the_system_refuses_is_no_bad_input(
    micro: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise CheckpointReadError("layers.0: input/output error")

    monkeypatch.setattr(Engine, "decode_step", refuse)
    assert_refused(run_cli(capsys, "decode", micro, "--prompt-ids", "1"), 1, "input/output error")


@pytest.mark.parametrize("cut", [3, 1000, -1])
def test_truncated_shard(broken: Path, capsys: Capsys, cut: int) -> None:
    shard = sorted(broken.glob("*.safetensors"))[2]
    data = shard.read_bytes()
    shard.write_bytes(data[:cut])
    refused_checkpoint(capsys, broken, shard.name)


def test_corrupt_header(broken: Path, capsys: Capsys) -> None:
    shard = sorted(broken.glob("*.safetensors"))[1]
    data = bytearray(shard.read_bytes())
    data[8:12] = b"\0\xff\0\xff"
    shard.write_bytes(data)
    refused_checkpoint(capsys, broken, shard.name)


def test_configuration_of_another_shape(broken: Path, capsys: Capsys) -> None:
    """Both files agree with one another, but not with the shards."""
    for file, keys in (("config.json", ["text_config"]), ("inference/config.json", [])):
        root = json.loads((broken / file).read_text())
        part: dict[str, Any] = root
        for key in keys:
            part = part[key]
        name = "moe_intermediate_size" if keys else "moe_inter_dim"
        part[name] *= 2
        (broken / file).write_text(json.dumps(root))
    refused_checkpoint(capsys, broken, "the configuration asks for", "layers.0.ffn")


def test_unknown_value_that_matters(broken: Path, capsys: Capsys) -> None:
    config = json.loads((broken / "config.json").read_text())
    config["quantization_config"]["scale_fmt"] = "f32"
    (broken / "config.json").write_text(json.dumps(config))
    assert_refused(run_cli(capsys, "decode", broken, "--prompt-ids", "1"), 2, "scale_fmt", "'f32'")


def test_neither_token_map_nor_tokenizer(broken: Path, capsys: Capsys) -> None:
    (broken / "engram_token_map.json").unlink()
    (broken / "tokenizer.json").unlink()
    refused_checkpoint(capsys, broken, "engram_token_map.json", "tokenizer.json")


# ---- outputs


@pytest.mark.parametrize("option", ["--logits-out", "--trace-out"])
def test_output_is_tried_before_the_work(
    micro: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    def no_work(*args: object, **kwargs: object) -> None:
        raise AssertionError("the checkpoint was opened before the outputs were tried")

    monkeypatch.setattr(Engine, "open", no_work)
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    too_long = tmp_path / ("n" * 300)
    for place in (tmp_path / "none" / "x", tmp_path, tmp_path / "file" / "x", too_long, "/proc/x", "/dev/null", ""):
        result = run_cli(capsys, "decode", micro, "--prompt-ids", "1", option, place)
        assert_refused(result, 2, str(Path(place)))
    before = sorted(p.name for p in tmp_path.iterdir())
    assert before == ["file", "loop"]


def test_both_outputs_in_one_file(micro: Path, tmp_path: Path, capsys: Capsys) -> None:
    out = tmp_path / "x"
    result = run_cli(capsys, "decode", micro, "--prompt-ids", "1", "--logits-out", out, "--trace-out", out)
    assert_refused(result, 2, "same file", str(out))
    assert list(tmp_path.iterdir()) == []


def test_failed_run_leaves_no_output(micro: Path, tmp_path: Path, capsys: Capsys) -> None:
    out = tmp_path / "x.npy"
    out.write_bytes(b"older")
    result = run_cli(capsys, "decode", micro, "--prompt-ids", "1,9999", "--logits-out", out)
    assert_refused(result, 2, "9999")
    assert out.read_bytes() == b"older"
    assert len(list(tmp_path.iterdir())) == 1


def test_full_disk_under_the_results(micro: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "decode", micro, "--prompt-ids", "1", "--max-new", "1", "--json"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["ds41rt: [Errno 28] No space left on device"]


def test_reader_that_leaves(micro: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*COMMAND, "decode", micro, "--prompt-ids", "1", "--max-new", "1", "--json"],
        stdout=writer, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


# ---- interrupts


@pytest.mark.parametrize("how", ["ids", "text", "json"])
def test_interrupted_while_decoding(
    micro: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """What was decoded is printed; as JSON a run is whole or not there at all."""
    source = ["--prompt", "a b"] if how == "text" else ["--prompt-ids", "1,2"]
    argv = ["decode", micro, *source, "--ignore-eos"] + ["--json"] * (how == "json")
    n_prompt = len(load_tokenizer(micro).encode("a b").ids) if how == "text" else 2
    first = run_cli(capsys, *argv, "--max-new", 3)
    step = Engine.decode_step
    steps = 0

    def interrupted(*args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == n_prompt + 3:
            signal.raise_signal(signal.SIGINT)
        return step(*args)

    monkeypatch.setattr(Engine, "decode_step", interrupted)
    result = run_cli(capsys, *argv, "--logits-out", tmp_path / "x.npy")
    assert (result.code, result.err) == (130, "ds41rt: interrupted\n")
    assert result.out == ("" if how == "json" else first.out)
    assert list(tmp_path.iterdir()) == []


def test_interrupted_from_outside(micro: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.npy"
    work = ["decode", str(micro), "--prompt-ids", "1", "--ignore-eos", "--max-new", "1024", "--logits-out", str(out)]
    process = subprocess.Popen(
        [*COMMAND, "-v", *work],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert "backend chosen" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    results, rest = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.fullmatch(r"([\d,]+\n)?", results)  # the tokens, if it came that far
    assert rest.splitlines()[-1] == "ds41rt: interrupted"
    assert "Traceback" not in rest
    assert list(tmp_path.iterdir()) == []
