"""What explain knows by itself: rules by code, the codes behind other libraries' exceptions, whose code a file is."""

import contextlib
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ds41rt
from ds41rt.capture.explain.foreign_errors import code_name, code_of, function_of
from ds41rt.capture.explain.rules import NOT_CUDA, OTHER, RULES, SILENT, hints, rule_of
from ds41rt.capture.explain.sources import Owner, statement
from ds41rt.cu.result import CudaError, Status


def test_every_capture_code_has_a_rule_of_its_own() -> None:
    codes = list(range(900, 909))
    rules = [rule_of(code) for code in codes]
    assert OTHER not in rules
    assert len(set(rules)) == len(codes)
    assert all(
        rule.rule.endswith(".") and rule.fix.endswith(".") for rule in (*RULES.values(), SILENT, OTHER, NOT_CUDA)
    )
    assert rule_of(None) is SILENT
    assert rule_of(12345) is OTHER
    assert "broke the device context" in rule_of(719).rule


class TorchError(RuntimeError):
    """As `torch.AcceleratorError` is."""

    def __init__(self, text: str, error_code: Any) -> None:
        super().__init__(text)
        self.error_code = error_code


TorchError.__module__ = "torch"


class CupyError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__("not permitted")
        self.status = status


CupyError.__module__ = "cupy_backends.cuda.api.driver"


class HttpError(RuntimeError):
    status = 404


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CudaError(Status.STREAM_CAPTURE_MERGE, "cuStreamWaitEvent"), 902),
        (TorchError("CUDA error: operation not permitted when stream is capturing", 900), 900),
        (TorchError("CUDA error: whatever this version says", 905), 905),
        (TorchError("CUDA error: no code", None), None),
        (TorchError("CUDA error: no code", 0), None),
        (TorchError("CUDA error: no code", True), None),
        (CupyError(901), 901),
        (HttpError("not found"), None),
        (RuntimeError("Search for `cudaErrorStreamCaptureUnjoined' in the documentation"), 904),
        (RuntimeError("cudaErrorCapturedEvent"), 907),
        (RuntimeError("cudaErrorMemoryAllocation"), 2),
        (RuntimeError("cudaErrorInvalidResourceHandle"), 400),
        (RuntimeError("cudaErrorIllegalAddress: ..."), 700),
        (RuntimeError("cudaErrorNobodyKnows"), None),
        (RuntimeError("CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"), 908),
        (RuntimeError("CUDA error: operation would make the legacy stream depend on a capturing blocking stream"), 906),
        (RuntimeError("CUDA error: operation failed due to a previous error during capture"), 901),
        (ValueError("nothing of the kind"), None),
        (KeyError("x"), None),
    ],
    ids=str,
)
def test_the_code_behind_an_exception(error: BaseException, code: int | None) -> None:
    assert code_of(error) == code


def test_the_name_of_a_code() -> None:
    assert (code_name(904), code_name(98765)) == ("STREAM_CAPTURE_UNJOINED", "UNKNOWN")


def test_the_function_that_failed() -> None:
    assert function_of(CudaError(Status.UNKNOWN, "cuThing"), "cuOther") == "cuThing"
    assert function_of(RuntimeError("cudaErrorUnknown in cudaMallocAsync"), "cuOther") == "cudaMallocAsync"
    assert function_of(RuntimeError("cudaErrorUnknown"), "", "x = cuStreamQuery(s)") == "cuStreamQuery"
    assert function_of(None, "torch.cuda.Stream(), CUDAGraph, cuda, current, custom_op") is None


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("n = loss.item()", "torch.where"),
        ("if x.sum() > 0:", "no branches"),
        ("host = y.cpu()", "non_blocking"),
        ("print(x)", "Printing"),
        ("torch.cuda.synchronize()", "nothing runs before"),
        ("done = event.query()", "nothing runs before"),
        ("z = x[x > 0]", "size depends"),
        ("buf = torch.empty(64, device='cuda')", "private pool"),
        ("cuda.cuMemAlloc(64)", "private pool"),
        ("del model", "Freeing"),
        ("torch.cuda.empty_cache()", "Freeing"),
        ("side.wait_stream(main)", "side.wait_stream(capturing)"),
        ("loss.backward()", "warm-up"),
    ],
)
def test_hints(text: str, word: str) -> None:
    assert any(word in hint for hint in hints(text)), hints(text)


def test_no_hints_where_nothing_is_known() -> None:
    assert hints("y = model(x)") == ()
    assert hints("torch.mul(x, 2, out=y)") == ()


def test_whose_code_a_file_is(tmp_path: Path) -> None:
    owner = Owner()
    assert owner.is_users(__file__)
    assert owner.is_users(str(tmp_path / "model.py"))
    assert owner.is_users("<stdin>")
    assert owner.is_users("<ipython-input-3-abc>")
    for file in (
        contextlib.__file__,
        np.__file__,
        ds41rt.__file__,
        str(Path(ds41rt.__file__).parent / "engine.py"),
        str(Path(sysconfig.get_paths()["purelib"]) / "torch" / "cuda" / "graphs.py"),
        "/opt/other/lib/python3.12/site-packages/torch/cuda/graphs.py",
        "/usr/lib/python3/dist-packages/x.py",
        "/tmp/torchinductor_me/ab/cab.py",
        "<frozen importlib._bootstrap>",
        "<string>",
    ):
        assert not owner.is_users(file), file
    installed = Path(sysconfig.get_paths()["purelib"])
    mine = Owner(f"{installed / 'mine'}/")
    assert mine.is_users(str(installed / "mine" / "model.py"))
    assert not mine.is_users(str(installed / "minefield" / "model.py"))
    assert Owner(str(installed / "alone.py")).is_users(str(installed / "alone.py"))


SOURCE = """\
def f(x):
    with open(
        x
    ) as file:
        y = [
            line
            for line in file
        ]
    return (y,
            1)


@decorator
def g(): pass
"""


def test_the_statement_on_a_line(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text(SOURCE)
    want = {
        1: "def f(x):",
        2: "with open( x ) as file:",
        3: "with open( x ) as file:",
        6: "y = [ line for line in file ]",
        8: "y = [ line for line in file ]",
        10: "return (y, 1)",
    }
    assert {line: statement(str(file), line) for line in want} == want
    assert statement(str(file), 99) == ""
    assert statement("/no/such/file.py", 1) == ""
    broken = tmp_path / "broken.py"
    broken.write_text("def (:\n  x\n")
    assert statement(str(broken), 2) == "x"
    long = tmp_path / "long.py"
    long.write_text("x = [" + ", ".join(map(str, range(500))) + "]\n")
    assert len(statement(str(long), 1)) == 303
