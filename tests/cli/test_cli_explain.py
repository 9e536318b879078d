"""`ds41rt capture explain`: exit codes, what is printed, what is refused."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_harness import Result, assert_refused, run_cli

from ds41rt.cu.host import HostBackend

PROGRAMS = """\
import helper_of_programs  # also lies in the working directory


def good(backend, stream):
    backend.fill(backend.alloc("x", 64).ptr, 1, 64, stream, "L03.zero")
    helper_of_programs.nothing()


def waits(backend, stream):
    good(backend, stream)
    backend.synchronize(stream)


def prints(backend, stream):
    good(backend, stream)
    print("from the callable")


def nothing(backend, stream):
    pass


async def later(backend, stream):
    pass


def of_a_stream(stream):
    assert isinstance(stream, int)


def of_nothing():
    pass


def of_three(a, b, c):
    pass


class Group:
    @staticmethod
    def good(backend, stream):
        good(backend, stream)


number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with modules that only `python -m` would find."""
    (tmp_path / "programs_to_explain.py").write_text(PROGRAMS)
    (tmp_path / "helper_of_programs.py").write_text("def nothing():\n    import late_helper_of_programs\n")
    (tmp_path / "late_helper_of_programs.py").write_text("")
    (tmp_path / "broken_program.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    before = list(sys.path)
    yield tmp_path
    assert sys.path == before
    for name in ("programs_to_explain", "helper_of_programs", "late_helper_of_programs", "broken_program"):
        sys.modules.pop(name, None)


def explain(capsys: pytest.CaptureFixture[str], function: str, *options: str) -> Result:
    return run_cli(capsys, "capture", "explain", "--call", f"programs_to_explain:{function}", *options)


def test_a_callable_that_is_captured_well(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for function in ("good", "Group.good"):
        done = explain(capsys, function)
        assert (done.code, done.err) == (0, "")
        assert done.out == f"programs_to_explain:{function}: captured well, 1 graph of 1 node in all\n"


def test_a_callable_that_breaks_its_capture(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = explain(capsys, "waits")
    assert (done.code, done.err) == (1, "")
    head, what, where, why, do = done.out.splitlines()[:5]
    assert head == "programs_to_explain:waits: the capture failed"
    assert "what:  cuStreamSynchronize: STREAM_CAPTURE_UNSUPPORTED (900)" in what
    assert "layer 3" in what
    assert f"{folder}/programs_to_explain.py:11 in waits: backend.synchronize(stream)" in where
    assert "Nobody may wait" in why
    assert "Move this call" in do


def test_one_json_object(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = explain(capsys, "waits", "--json", "--schedule", "random:3")
    assert done.code == 1
    found = json.loads(done.out)
    assert (found["ok"], found["first"]["code"], found["first"]["site"]["line"]) == (False, 900, 11)
    done = explain(capsys, "good", "--json", "--backend", "host")
    assert done.code == 0
    assert json.loads(done.out) == {
        "subject": "programs_to_explain:good",
        "ok": True,
        "captures": 1,
        "n_nodes": 1,
        "first": None,
        "later": [],
        "notes": [],
    }
    done = explain(capsys, "prints", "--json")
    assert json.loads(done.out)["ok"]
    assert done.err == "from the callable\n"


def test_a_callable_that_captures_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = explain(capsys, "nothing")
    assert (done.code, done.err) == (1, "")
    assert done.out.startswith("programs_to_explain:nothing: the capture failed\n  what:  nothing was captured")
    found = json.loads(explain(capsys, "nothing", "--json").out)
    assert (found["ok"], found["captures"], found["n_nodes"]) == (False, 0, 0)
    refused = explain(capsys, "later")
    assert_refused(refused, 2, "programs_to_explain:later: a call of it only makes a coroutine")
    assert "never awaited" not in refused.err


def test_a_callable_without_a_backend_is_run_on_the_driver(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def opened(name: str, *, schedule: str) -> tuple[HostBackend, str]:
        asked.append(name)
        return HostBackend(), ""

    monkeypatch.setattr("ds41rt.tools.capture_explain.open_backend", opened)
    for options in ((), ("--backend", "auto")):
        done = explain(capsys, "of_a_stream", *options)
        assert (done.code, "nothing was captured" in done.out) == (1, True)
    assert asked == ["cuda", "cuda"]
    assert_refused(explain(capsys, "of_nothing", "--self-capture"), 2, "began no capture", "PyTorch's current stream")
    assert_refused(explain(capsys, "of_a_stream", "--backend", "host"), 2, "takes no backend", "--backend host")
    assert_refused(explain(capsys, "of_a_stream", "--schedule", "eager"), 2, "takes no backend", "--schedule")
    assert_refused(explain(capsys, "of_a_stream", "--capture-mode", "global"), 1, "'global'", "relaxed mode alone")


def test_a_machine_without_a_gpu(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds41rt.cu.driver.why_not", lambda: "there is none")
    assert_refused(explain(capsys, "of_a_stream"), 1, "backend 'cuda' cannot be used: there is none", "doctor")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("programs_to_explain", ["module:function"]),
        (":good", ["module:function"]),
        ("programs_to_explain:", ["module:function"]),
        ("no_such_module:f", ["no_such_module", "ModuleNotFoundError"]),
        ("broken_program:f", ["broken_program", "ZeroDivisionError"]),
        ("programs_to_explain:nope", ["'programs_to_explain' has no 'nope'"]),
        ("programs_to_explain:Group.nope", ["has no 'Group.nope'"]),
        ("programs_to_explain:number", ["is of type int"]),
        ("programs_to_explain:of_three", ["it takes a, b, c"]),
        ("programs_to_explain:of_nothing", ["takes nothing", "--self-capture"]),
        ("programs_to_explain:good --self-capture", ["takes backend, stream"]),
        ("programs_to_explain:good --capture-mode global", ["'global'", "relaxed"]),
        ("programs_to_explain:good --expert-slots 3", ["--expert-slots", "CHECKPOINT"]),
    ],
)
def test_bad_use_is_refused(folder: Path, capsys: pytest.CaptureFixture[str], call: str, words: list[str]) -> None:
    assert_refused(run_cli(capsys, "capture", "explain", "--call", *call.split(" ")), 2, *words)


def test_an_engine(
    checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint("micro")
    done = run_cli(capsys, "capture", "explain", path, "--expert-slots", 40)
    assert done.code == 0
    assert done.out.startswith(f"engine of {path}: captured well, ")
    assert_refused(run_cli(capsys, "capture", "explain", path, "--self-capture"), 2, "--self-capture", "--call")
    assert_refused(run_cli(capsys, "capture", "explain", path / "nope"), 2, "nope")

    begin = HostBackend.begin_capture

    def failing(self: HostBackend, stream: int) -> None:
        begin(self, stream)  # type: ignore[arg-type]
        begin(self, stream)  # type: ignore[arg-type]

    monkeypatch.setattr(HostBackend, "begin_capture", failing)
    done = run_cli(capsys, "capture", "explain", path, "--expert-slots", 40)
    assert done.code == 1
    assert "cuStreamBeginCapture: ILLEGAL_STATE (401)" in done.out
    assert "step/machine.py:" in done.out.splitlines()[2]
    assert "note: the engine goes on without graphs" in done.out


def test_neither_and_both(checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], [checkpoint("micro"), "--call", "a:b"]):
        done = run_cli(capsys, "capture", "explain", *arguments)
        assert (done.code, done.out) == (2, "")
        assert "--call" in done.err
