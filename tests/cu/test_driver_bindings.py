"""The installed `cuda.bindings` with a driver library compiled here: the calls mean what the fake driver says.

Needs a C compiler. Everything runs in processes of their own, because a process loads one driver library.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the stub's libcuda.so.1."""
    folder = tmp_path_factory.mktemp("driver")
    build(HERE / "stub_libcuda.c", folder)
    return folder


def build(source: Path, folder: Path, *options: str) -> None:
    lib = folder / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", *options, "-o", lib, source, "-ldl"]
    subprocess.run(command, check=True)


def run(folder: Path, *args: str, **env: str) -> str:
    """stdout of a Python process that finds the driver library in `folder`."""
    done = subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LD_LIBRARY_PATH": str(folder), **env},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_bindings_understand_every_call(stub: Path) -> None:
    assert run(stub, str(HERE / "bindings_run.py")) == "every call was understood\n"


def test_a_driver_without_the_optional_symbols(tmp_path: Path) -> None:
    """Symbols that came after CUDA 12.2 are there in the bindings and missing in the library."""
    build(HERE / "stub_libcuda.c", tmp_path, "-DOLD_DRIVER")
    code = (
        "from ds41rt.cu.driver import DriverBackend\n"
        "from ds41rt.cu.driver_errors import try_optional\n"
        "backend = DriverBackend()\n"
        "names = ('cuLogsCurrent', 'cuFuncLoad', 'cuFuncGetName', 'cuFuncGetParamInfo')\n"
        "print([try_optional(backend._cu, name, *[0] * (1 + ('Param' in name))) for name in names])\n"
        "print(repr(backend._log.news()))\n"
        "backend.close()\n"
    )
    assert run(tmp_path, "-c", code) == "[None, None, None, None]\n''\n"


def test_without_a_library_the_answer_is_typed(tmp_path: Path) -> None:
    code = "from ds41rt.cu.driver import probe\nprint(probe().state.name)"
    assert run(tmp_path, "-c", code) in ("NO_LIBRARY\n", "READY\n", "NO_DEVICE\n")  # a machine may have a driver


@pytest.mark.parametrize("value", ["", "no"])
def test_a_default_stream_switch_that_is_no_number(stub: Path, value: str) -> None:
    code = "from ds41rt.cu.driver import probe\nprint(probe().state.name in ('FAILED', 'READY'))"
    assert run(stub, "-c", code, CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM=value) == "True\n"
