"""`ds41rt trace diff`: both forms, what they print and return, and what they refuse."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_harness import Result, assert_refused, run_cli

from ds41rt.engine import Engine
from ds41rt.trace.file import Trace, load_trace

Capsys = pytest.CaptureFixture[str]
IDS = "5,17,42,99,5,17"


@pytest.fixture(scope="module")
def micro(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("micro")


def recorded(capsys: Capsys, micro: Path, out: Path, *options: object) -> Path:
    argv = ("decode", micro, "--prompt-ids", IDS, "--max-new", 4, "--ignore-eos", "--trace-out", out, *options)
    assert run_cli(capsys, *argv).code == 0
    return out


def altered(path: Path, name: str, index: tuple[int, ...]) -> Path:
    """A copy of a trace with one bit of one number changed."""
    trace = load_trace(path)
    arrays: dict[str, Any] = {k: v.copy() for k, v in trace.arrays.items()}
    arrays[name][index] ^= 1
    out = path.with_name(f"{path.stem}-{name}.npz")
    with out.open("wb") as file:
        Trace(str(out), trace.config, arrays).save(file)
    return out


def diff(capsys: Capsys, *argv: object) -> Result:
    return run_cli(capsys, "trace", "diff", *argv)


def test_files_of_both_modes(micro: Path, tmp_path: Path, capsys: Capsys) -> None:
    a = recorded(capsys, micro, tmp_path / "a.npz")
    b = recorded(capsys, micro, tmp_path / "b.npz", "--mode", "step-graph", "--expert-slots", 8, "--trace-values")
    result = diff(capsys, a, b)
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[-1] == "equal: 9 positions, every half of every layer"
    assert f"a: {a}: ds41rt" in result.out
    assert "mode step-graph, expert_slots 8" in result.out
    result = diff(capsys, a, b, "--json")
    said = json.loads(result.out)
    assert (result.code, said["equal"], said["positions"], said["difference"]) == (0, True, 9, None)
    assert (said["a"]["mode"], said["b"]["where"]) == ("eager", str(b))

    other = altered(b, "attn_out_hash", (7, 2))
    result = diff(capsys, a, other)
    assert (result.code, result.err) == (1, "")
    assert "the runs part at position 7, attention half of layer 2: the attention's output" in result.out
    assert "no values: these traces hold hashes alone" in result.out
    said = json.loads(diff(capsys, a, other, "--json").out)
    found = said["difference"]
    assert (found["position"], found["layer"], found["half"], found["part"]) == (7, 2, "attention", "attn_out")
    assert int(found["a"], 16) ^ 1 == int(found["b"], 16)
    assert found["values"] is None


def test_files_with_values(micro: Path, tmp_path: Path, capsys: Capsys) -> None:
    a = recorded(capsys, micro, tmp_path / "a.npz", "--trace-values")
    # values of another part than the hash that differs: no run writes that
    b = altered(altered(a, "logits_hash", (3, 0)), "values.attn_out", (3, 2, 8))
    assert_refused(diff(capsys, a, b), 2, str(a), str(b), "damaged", "position 3, the head: the logits")
    b = altered(altered(a, "attn_out_hash", (3, 2)), "values.attn_out", (3, 2, 8))
    result = diff(capsys, a, b)
    assert result.code == 1
    assert "1 of 64 values differ" in result.out
    assert [line.split()[0] for line in result.out.splitlines() if line.startswith("    [")] == [
        f"[{i}]" for i in range(5, 12)
    ]
    (marked,) = (line for line in result.out.splitlines() if line.endswith("<- differs"))
    assert marked.startswith("    [8] ")


def test_a_choice_that_differs_is_printed(micro: Path, tmp_path: Path, capsys: Capsys) -> None:
    a = recorded(capsys, micro, tmp_path / "a.npz")
    result = diff(capsys, a, altered(a, "expert_ids", (3, 1, 2)))
    assert "the runs part at position 3, ffn half of layer 1: the experts" in result.out
    picks = load_trace(a).arrays["expert_ids"][3, 1].tolist()
    assert f"  experts: {picks}  a\n           {[*picks[:2], picks[2] ^ 1]}  b\n" in result.out
    result = diff(capsys, a, altered(a, "index_topk.L03", (4, 0)), "--json")
    found = json.loads(result.out)["difference"]
    assert (found["position"], found["layer"], found["half"]) == (4, 3, "attention")
    assert found["selected_rows"] == {"a": found["a"], "b": found["b"]}
    assert (found["a"], found["b"]) == ([0, 1], [1, 1])


def test_runs(micro: Path, capsys: Capsys) -> None:
    result = diff(capsys, micro, "--prompt-ids", IDS, "--max-new", 3)
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[-1] == "equal: 8 positions, every half of every layer"
    argv = (micro, "--prompt-ids", IDS, "--max-new", 0, "--modes", "step-graph,step-graph", "--expert-slots", "8,64")
    said = json.loads(diff(capsys, *argv, "--json").out)
    assert (said["equal"], said["positions"]) == (True, 6)
    assert [(said[side]["mode"], said[side]["expert_slots"]) for side in "ab"] == [
        ("step-graph", "8"), ("step-graph", "64"),
    ]  # fmt: skip


def test_the_mode_of_each_run_is_told(micro: Path, capsys: Capsys) -> None:
    result = diff(capsys, micro, "--prompt-ids", IDS, "--max-new", 0, "--modes", "eager,adaptive")
    a, b = result.out.splitlines()[:2]
    assert "mode eager, " in a
    assert "mode adaptive, " in b


def test_runs_that_part(micro: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second engine has one bit of a weight changed."""
    opened = 0
    build = Engine._build

    def wrong(self: Engine, *args: Any) -> None:
        nonlocal opened
        build(self, *args)
        opened += 1
        if opened == 2:
            addr = self._weights.ptr("layers.2.ffn.shared_experts.w2.weight")
            self.backend.memory.bytes(addr, 64)[:] ^= 0x40  # type: ignore[attr-defined]

    monkeypatch.setattr(Engine, "_build", wrong)
    result = diff(capsys, micro, "--prompt-ids", IDS, "--max-new", 3)
    assert (result.code, result.err) == (1, "")
    assert "the runs part at position 0, ffn half of layer 2: the residual streams that leave layer 2" in result.out
    assert " of 256 values differ, the largest difference is 0." in result.out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["a.npz"], ["a.npz", "two trace files", "--prompt-ids"]),
        (["a.npz", "b.npz", "c.npz"], ["not 3 paths"]),
        (["none.npz", "none.npz"], ["none.npz", "is missing"]),
        (["a.npz", "b.npz", "--prompt-ids", "1"], ["--prompt-ids", "nothing is decoded"]),
        (["a.npz", "b.npz", "--max-new", "1"], ["--max-new"]),
        (["a.npz", "b.npz", "--expert-slots", "8"], ["--expert-slots"]),
        (["a.npz", "b.npz", "--modes", "eager,eager"], ["--modes"]),
        (["MICRO", "--prompt-ids", "1,x"], ["--prompt-ids", "'x'"]),
        (["MICRO", "--prompt-ids", "1,288"], ["288", "0..287"]),
        (["MICRO", "--prompt-ids", "1", "--max-new", "-1"], ["--max-new", "-1"]),
        (["MICRO", "--prompt-ids", "1", "--modes", "eager"], ["--modes", "'eager'", "step-graph"]),
        (["MICRO", "--prompt-ids", "1", "--modes", "eager,graph"], ["--modes", "'eager,graph'"]),
        (["MICRO", "--prompt-ids", "1", "--modes", "eager,eager,eager"], ["--modes"]),
        (["MICRO", "--prompt-ids", "1", "--expert-slots", "8,x"], ["--expert-slots", "'8,x'"]),
        (["MICRO", "--prompt-ids", "1", "--expert-slots", "1,2,3"], ["--expert-slots"]),
        (["MICRO", "--prompt-ids", "1", "--expert-slots", "2"], ["2 expert slots", "working set of 3"]),
        (["MICRO", "--prompt-ids", "1", "--max-context", "8", "--max-new", "9"], ["max_context", "9 positions"]),
    ],
)
def test_refusals(
    micro: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, argv: list[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(diff(capsys, *[micro if a == "MICRO" else a for a in argv]), 2, *words)


def test_files_that_do_not_fit(micro: Path, tmp_path: Path, capsys: Capsys) -> None:
    a = recorded(capsys, micro, tmp_path / "a.npz")
    other = tmp_path / "other.npz"
    assert run_cli(capsys, "decode", micro, "--prompt-ids", "6", "--max-new", 0, "--trace-out", other).code == 0
    assert_refused(diff(capsys, a, other), 2, "different texts", "token 5 and 6")
    old = tmp_path / "old.npz"
    np.savez(old, expert_ids=np.zeros((1, 4, 3), np.int32), streams_hash=np.zeros((1, 4), np.uint64))
    assert_refused(diff(capsys, old, a), 2, str(old), "older ds41rt")
    routes = tmp_path / "routes.npz"
    argv = ("decode", micro, "--prompt-ids", "5", "--max-new", 0, "--route-trace-out", routes)
    assert run_cli(capsys, *argv).code == 0
    assert_refused(diff(capsys, a, routes), 2, f"{routes}: is a route trace", "cache-sim --trace", "--trace-out")
    for option, value in (("--backend", "host"), ("--schedule", "lazy"), ("--max-new", "3")):
        assert_refused(diff(capsys, a, a, option, value), 2, option, "nothing is decoded")


def test_usage(micro: Path, capsys: Capsys) -> None:
    for argv in (["trace"], ["trace", "diff"], ["trace", "dif", micro], ["trace", "diff", micro, "--max-n", 3]):
        result = run_cli(capsys, *argv)
        assert (result.code, result.out) == (2, "")
        assert "usage: ds41rt" in result.err
        assert "Traceback" not in result.err
    assert_refused(
        run_cli(capsys, "decode", micro, "--prompt-ids", "5", "--trace-values"), 2, "--trace-values", "--trace-out"
    )
