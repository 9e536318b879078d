"""The installed `cuda.bindings` with a driver library compiled here: the calls mean what the fake driver says.

Needs a C compiler. Everything runs in processes of their own, because a process loads one driver library.
"""

import ctypes
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from ds41rt.cu.driver import probe
from ds41rt.cu.probe import GpuState

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
    command = [
        "cc",
        "-shared",
        "-fPIC",
        "-O1",
        "-Wl,-soname,libcuda.so.1",
        *options,
        "-o",
        str(lib),
        str(source),
        "-ldl",
    ]
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
        "from ds41rt.cu.probe import optional_calls\n"
        "backend = DriverBackend()\n"
        "names = ('cuLogsCurrent', 'cuFuncLoad', 'cuFuncGetName', 'cuFuncGetParamInfo')\n"
        "print([try_optional(backend._cu, name, *[0] * (1 + ('Param' in name))) for name in names])\n"
        "print(sorted(name for name, there in optional_calls(backend._cu).items() if there))\n"
        "print(repr(backend._log.news()))\n"
        "backend.close()\n"
    )
    assert run(tmp_path, "-c", code) == ("[None, None, None, None]\n['cuEventElapsedTime', 'cuGraphGetEdges']\n''\n")


def test_the_probe_agrees_with_the_loader() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        expected = True
    else:
        expected = False
    assert (probe().state is GpuState.NO_LIBRARY) is expected


@pytest.mark.parametrize(("value", "on"), [("", False), ("0", False), ("1", True), ("no", None)])
def test_what_the_bindings_make_of_the_default_stream_switch(stub: Path, value: str, on: bool | None) -> None:
    """`doctor` says the same: from 13.3 on a number (nothing and other text fail the start), before, any text is on."""
    number = tuple(map(int, metadata.version("cuda-bindings").split(".")[:2])) >= (13, 3)
    code = "from ds41rt.tools.doctor import examine\nfrom os import environ\n"
    code += "r = examine(environ)\nprint(r.driver['state'], r.default_stream or 'unknown')"
    out = run(stub, "-c", code, CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM=value, SHOW_DEFAULT_STREAM="1")
    if number and not value.isdigit():
        assert out == "the driver did not start unknown\n"
        return
    flags, said = out.splitlines()
    on = on if number else bool(value)
    assert flags == f"copies: flags {2 if on else 0}"
    assert said == f"ready {'per-thread' if on else 'legacy'}"
