"""Explain on a real device: captures of PyTorch that break, each by one known line, and some that do not.

Every case runs in a process of its own, as a user would run it, because a failed capture leaves PyTorch in a state that
nobody promises anything about. Skipped where there is no PyTorch.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import ds41rt

pytestmark = pytest.mark.gpu
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="no PyTorch here")

PROGRAMS = """\
import torch

X = torch.arange(1024, dtype=torch.float32, device="cuda")
Y, Z = torch.empty_like(X), torch.empty_like(X)
SIDE = torch.cuda.Stream()
# Every kernel is loaded before a capture needs it.
torch.mul(X, 2, out=Y)
torch.add(X, 1, out=Z)
torch.cuda.synchronize()


def work():
    torch.mul(X, 2, out=Y)
    torch.add(Y, 1, out=Z)


def good(stream):
    with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
        work()


def reads_a_value(stream):
    with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
        work()
        if Y[3].item() > 2:  # reads_a_value
            work()


def waits(stream):
    with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
        work()
        torch.cuda.synchronize()  # waits


def allocates_beside(stream):
    with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
        work()
    with torch.cuda.stream(SIDE):
        torch.empty(300 << 20, dtype=torch.uint8, device="cuda")  # allocates_beside
    with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
        work()


def forgets_the_side_stream(stream):
    main = torch.cuda.ExternalStream(stream)
    with torch.cuda.stream(main):
        work()
    SIDE.wait_stream(main)  # forgets_the_side_stream
    with torch.cuda.stream(SIDE):
        torch.add(X, 1, out=Z)


def own_good():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
        SIDE.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(SIDE):
            torch.add(X, 1, out=Z)
        torch.cuda.current_stream().wait_stream(SIDE)
    graph.replay()
    torch.cuda.synchronize()


def own_sync():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
        torch.cuda.synchronize()  # own_sync
        work()


def own_allocates_beside():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
        with torch.cuda.stream(SIDE):
            scratch = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")  # own_allocates_beside
            scratch.fill_(1)
        work()


def own_forgets_the_side_stream():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
        SIDE.wait_stream(torch.cuda.current_stream())  # own_forgets_the_side_stream
        with torch.cuda.stream(SIDE):
            torch.add(X, 1, out=Z)


def own_value_error():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
        raise ValueError("of the user")  # own_value_error
"""


def run(*arguments: object, cwd: Path) -> tuple[int, dict[str, Any], str]:
    """`ds41rt capture explain ... --json`: exit code, the object, and all there is to print when a test fails."""
    source = str(Path(ds41rt.__file__).parents[1])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "ds41rt", "capture", "explain", *map(str, arguments), "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
    )
    story = f"{arguments}: exit {done.returncode}\n--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}"
    print(story)
    assert done.returncode in (0, 1), story
    assert done.stdout.startswith("{"), story
    return done.returncode, json.loads(done.stdout), story


def call(tmp_path: Path, function: str, *options: str) -> tuple[int, dict[str, Any], str]:
    (tmp_path / "torch_programs.py").write_text(PROGRAMS)
    own = ["--self-capture"] if function.startswith("own_") else []
    return run("--call", f"torch_programs:{function}", *own, *options, cwd=tmp_path)


def line_of(function: str) -> int:
    return 1 + next(i for i, line in enumerate(PROGRAMS.splitlines()) if line.endswith(f"  # {function}"))


@needs_torch
@pytest.mark.parametrize(
    ("function", "codes"),
    [
        ("reads_a_value", {900}),
        ("waits", {900}),
        ("allocates_beside", {900}),
        ("forgets_the_side_stream", {904}),
        ("own_sync", {900}),
        ("own_allocates_beside", {900}),
        ("own_forgets_the_side_stream", {904}),
        ("own_value_error", {None}),
    ],
)
def test_a_capture_of_pytorch_that_breaks(tmp_path: Path, function: str, codes: set[int | None]) -> None:
    code, found, story = call(tmp_path, function)
    assert code == 1, story
    first = found["first"]
    assert first["site"] is not None, story
    assert (Path(first["site"]["file"]).name, first["site"]["line"]) == ("torch_programs.py", line_of(function)), story
    assert first["code"] in codes, story
    assert first["rule"], story
    assert first["fix"], story


@needs_torch
@pytest.mark.parametrize("function", ["good", "own_good"])
def test_a_capture_of_pytorch_that_succeeds(tmp_path: Path, function: str) -> None:
    code, found, story = call(tmp_path, function)
    assert code == 0, story
    assert (found["ok"], found["captures"], found["first"]) == (True, 1, None), story
    assert found["n_nodes"] == (2 if function == "good" else None), story


@needs_torch
def test_an_allocation_that_the_relaxed_mode_allows(tmp_path: Path) -> None:
    code, found, story = call(tmp_path, "allocates_beside", "--capture-mode", "relaxed")
    assert (code, found["ok"]) == (0, True), story


def test_an_engine_on_the_device(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    code, found, story = run(checkpoint("micro"), "--backend", "cuda", "--expert-slots", 40, cwd=tmp_path)
    assert code == 0, story
    assert found["captures"] > 0, story
    assert found["n_nodes"] > found["captures"], story


RAW = """\
from cuda.bindings import driver


def of_the_bindings(stream):
    code, address = driver.cuMemAlloc(4096)  # of_the_bindings
    assert int(code) == 900, code


def through_the_backend(backend, stream):
    backend.alloc("allowed", 4096)
    backend.synchronize(stream)  # through_the_backend
"""


@pytest.mark.parametrize("function", ["of_the_bindings", "through_the_backend"])
def test_raw_calls_and_calls_of_ours(tmp_path: Path, function: str) -> None:
    (tmp_path / "raw_programs.py").write_text(RAW)
    code, found, story = run("--call", f"raw_programs:{function}", "--backend", "cuda", cwd=tmp_path)
    assert code == 1, story
    line = 1 + next(i for i, text in enumerate(RAW.splitlines()) if text.endswith(f"# {function}"))
    assert found["first"]["site"]["line"] == line, story
    assert found["first"]["call"] == {"of_the_bindings": "cuMemAlloc"}.get(function, "cuStreamSynchronize"), story
    assert (found["first"]["before"], found["first"]["after"]) == ("ACTIVE", "INVALIDATED"), story
