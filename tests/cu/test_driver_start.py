"""Starting the driver backend: probe, preflight, context, optional symbols, forks. No GPU: the driver is a fake."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cuda.pathfinder import DynamicLibNotFoundError
from fake_driver import FakeDriver, open_fake, write_ptx
from tiny_kernels import SCALE

from ds41rt.cu import driver as driver_module
from ds41rt.cu import probe as probe_module
from ds41rt.cu.backend import GpuBackend, open_backend
from ds41rt.cu.driver import DriverBackend, why_not
from ds41rt.cu.host import HostBackend
from ds41rt.cu.kernel import Geometry
from ds41rt.cu.probe import GpuState, probe_driver
from ds41rt.cu.result import CudaError, Status
from ds41rt.errors import InputError, UnsupportedError

SCALE_GPU = replace(SCALE, geometry=lambda s, n_sms: Geometry((1, 1, 1), 32))
OPTIONAL = ("cuLogsCurrent", "cuLogsDumpToMemory", "cuFuncLoad", "cuFuncGetName", "cuFuncGetParamInfo")


def test_is_a_gpu_backend_and_starts_in_order(tmp_path: Path) -> None:
    backend, cu = open_fake(tmp_path)
    protocol: GpuBackend = backend
    assert protocol.name == "cuda"
    assert (backend.device.name, backend.device.capability, backend.device.n_multiprocessors) == (
        "Fake GPU",
        (9, 0),
        132,
    )
    assert backend.driver_version == 13000
    names = [n for n in cu.names() if n != "cuDeviceGetAttribute"]
    assert names == [
        "cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceTotalMem",
        "cuLogsCurrent", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent",
    ]  # fmt: skip
    backend.close()
    assert cu.retained == 0
    assert cu.calls[-1] == ("cuCtxSetCurrent", None)


@pytest.mark.parametrize(
    "error",
    [
        DynamicLibNotFoundError("no libcuda.so.1 anywhere"),
        RuntimeError("Failed to dlopen libcuda.so.1"),  # bindings before 13.4
    ],
)
def test_no_driver_library(tmp_path: Path, error: RuntimeError) -> None:
    cu = FakeDriver()
    cu.no_library = error
    found = probe_driver(cu)
    assert (found.state, found.detail) == (GpuState.NO_LIBRARY, str(error))
    with pytest.raises(UnsupportedError, match=r"no driver library: .*doctor"):
        DriverBackend(bindings=cu, ptx_folder=tmp_path)


def test_other_errors_of_the_first_call_are_not_taken_for_a_missing_library() -> None:
    cu = FakeDriver()
    cu.no_library = RuntimeError('Function "cuInit" is broken')
    with pytest.raises(RuntimeError, match="is broken"):
        probe_driver(cu)
    cu.no_library = ValueError("invalid literal for int() with base 10: ''")
    found = probe_driver(cu)
    assert found.state is GpuState.FAILED
    assert "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM" in found.detail


@pytest.mark.parametrize(
    ("code", "state", "text"),
    [
        (100, GpuState.NO_DEVICE, "100 CUDA_ERROR_NO_DEVICE: what the driver says"),
        (999, GpuState.FAILED, "999 CUDA_ERROR_UNKNOWN: what the driver says"),
        (803, GpuState.FAILED, "803 CUDA_ERROR_STRANGE: what the driver says"),
    ],
)
def test_cuinit_that_fails_is_a_typed_answer(tmp_path: Path, code: int, state: GpuState, text: str) -> None:
    cu = FakeDriver()
    cu.fail["cuInit"] = [code, code]
    found = probe_driver(cu)
    assert found.state is state
    assert text in found.detail
    with pytest.raises(UnsupportedError, match=text):
        DriverBackend(bindings=cu, ptx_folder=tmp_path)
    assert "cuDevicePrimaryCtxRetain" not in cu.names()


def test_no_device_in_the_list_and_a_device_that_does_not_exist(tmp_path: Path) -> None:
    assert probe_driver(FakeDriver(devices=0)).state is GpuState.NO_DEVICE
    folder = write_ptx(tmp_path, [])
    cu = FakeDriver(devices=2)
    for ordinal in (-1, 2):
        with pytest.raises(InputError, match=f"device {ordinal} does not exist; the driver lists 2"):
            DriverBackend(ordinal, bindings=cu, ptx_folder=folder)
    backend = DriverBackend(1, bindings=cu, ptx_folder=folder)
    assert backend.device.ordinal == 1
    assert ("cuDevicePrimaryCtxRetain", 1) in cu.calls
    backend.close()


@pytest.mark.parametrize(
    ("options", "isa", "target", "text"),
    [
        (
            {"version": 12020},
            "8.4",
            "sm_80",
            r"PTX ISA 8.4, but the driver \(CUDA 12.2\) reads PTX ISA up to 8.2: .*550",
        ),
        ({"capability": (7, 5)}, "8.4", "sm_80", "needs compute capability 8.0 or newer, this device has 7.5"),
        ({"capability": (10, 0)}, "8.4", "sm_90a", "compute capability 9.0 alone, this device has 10.0"),
    ],
)
def test_ptx_that_does_not_fit_is_refused_before_anything_is_loaded(
    tmp_path: Path, options: dict[str, int], isa: str, target: str, text: str
) -> None:
    cu = FakeDriver(**options)  # type: ignore[arg-type]  # a mixed bag of keyword arguments
    with pytest.raises(UnsupportedError, match=text):
        DriverBackend(bindings=cu, ptx_folder=write_ptx(tmp_path, [], isa, target))
    assert not {"cuDevicePrimaryCtxRetain", "cuModuleLoadData"} & set(cu.names())


@pytest.mark.parametrize("call", ["cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuDeviceGet"])
def test_an_error_while_the_context_is_made_keeps_code_and_text(tmp_path: Path, call: str) -> None:
    cu = FakeDriver()
    cu.log.append("an old line")
    if call == "cuDeviceGet":
        cu.fail[call] = [0, 2]  # the first one belongs to the probe
    else:
        cu.fail[call] = [2]
    with pytest.raises(CudaError) as info:
        DriverBackend(bindings=cu, ptx_folder=write_ptx(tmp_path, []))
    assert (info.value.status, info.value.call) == (Status.OUT_OF_MEMORY, call)
    for part in ("device 0 (Fake GPU)", "2 CUDA_ERROR_OUT_OF_MEMORY: what the driver says"):
        assert part in str(info.value)
    assert cu.retained == 0
    backend = DriverBackend(bindings=cu, ptx_folder=tmp_path)  # and the next try works
    backend.close()


def test_a_code_without_a_name_of_ours_keeps_number_and_text(tmp_path: Path) -> None:
    cu = FakeDriver()
    cu.fail["cuDevicePrimaryCtxRetain"] = [46]
    with pytest.raises(CudaError, match=r"46 CUDA_ERROR_STRANGE: what the driver says"):
        DriverBackend(bindings=cu, ptx_folder=write_ptx(tmp_path, []))


@pytest.mark.parametrize("hidden", [{name} for name in OPTIONAL] + [set(OPTIONAL)])
@pytest.mark.parametrize("how", ["missing", "unloadable"])
def test_optional_symbols_may_be_missing(tmp_path: Path, hidden: set[str], how: str) -> None:
    cu = FakeDriver([SCALE_GPU])
    setattr(cu, how, hidden)
    backend = DriverBackend(bindings=cu, ptx_folder=write_ptx(tmp_path, [SCALE_GPU]))
    stream = backend.create_stream("main")
    buf = backend.alloc("x", 64)
    launch = backend.prepare(SCALE_GPU, {"x": buf.ptr, "a": 3, "n": 16}, "scale")
    backend.begin_capture(stream)
    backend.launch(launch, stream)
    graph = backend.end_capture(stream)
    (node,) = backend.describe_graph(graph).nodes
    assert node.kind == "kernel"
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        backend.alloc("nothing", 0)
    cu.log.append("[stub] out of memory")
    cu.fail["cuMemAlloc"] = [2]
    with pytest.raises(MemoryError, match="'big'") as info:
        backend.alloc("big", 100)
    assert ("driver log: [stub] out of memory" in str(info.value)) == (
        not hidden & {"cuLogsCurrent", "cuLogsDumpToMemory"}
    )
    backend.close()


def test_a_broken_optional_symbol_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: FakeDriver, function: int) -> None:
        raise RuntimeError("the stack is corrupt")

    monkeypatch.setattr(FakeDriver, "_cuFuncLoad", broken)
    backend, _ = open_fake(tmp_path, [SCALE_GPU])
    with pytest.raises(RuntimeError, match="corrupt"):
        backend.prepare(SCALE_GPU, {"x": 256, "a": 3, "n": 16}, "scale")


def _in_child(work: Callable[[], str]) -> str:
    """What `work` returned, or the error it raised, in a forked child."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = work()
        except UnsupportedError as e:
            text = f"refused: {e}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(pid, 0)
    return text


def test_a_forked_child_is_told_to_spawn(tmp_path: Path) -> None:
    backend, cu = open_fake(tmp_path, [SCALE_GPU])
    stream, event = backend.create_stream("main"), backend.create_event("e")
    buf = backend.alloc("x", 64)
    launch = backend.prepare(SCALE_GPU, {"x": buf.ptr, "a": 3, "n": 16}, "scale")
    before = len(cu.calls)

    def works(call: Callable[[], object]) -> Callable[[], str]:
        return lambda: f"worked: {call()}"

    for call in (
        lambda: backend.launch(launch, stream),  # the shortest path
        lambda: backend.query_event(event),
        lambda: backend.alloc("y", 64),
        lambda: backend.create_stream("other"),
        lambda: DriverBackend(bindings=cu, ptx_folder=tmp_path),
    ):
        text = _in_child(works(call))
        assert text.startswith("refused: process "), text
        assert "'spawn'" in text

    def closing() -> str:
        backend.close()
        return f"{len(cu.calls) - before} calls, {backend.live()}"

    assert _in_child(closing).startswith("0 calls, {'buffers': 0")
    assert backend.query_event(event)  # the parent goes on
    backend.close()


def test_open_backend_chooses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cu = FakeDriver()
    monkeypatch.setattr(driver_module, "_bindings", lambda: cu)
    backend, why = open_backend("auto")
    assert isinstance(backend, DriverBackend)
    assert "Fake GPU" in why
    backend.close()
    backend, why = open_backend("cuda")
    assert backend.name == "cuda"
    backend.close()
    for name in ("cuda", "auto"):
        cu.fail["cuDevicePrimaryCtxRetain"] = [2]
        with pytest.raises(CudaError, match="cuDevicePrimaryCtxRetain"):  # a GPU that is there and fails is no host
            open_backend(name)
    with pytest.raises(InputError, match="orders its work itself"):
        open_backend("cuda", schedule="eager")
    assert isinstance(open_backend("auto", schedule="eager")[0], HostBackend)
    with pytest.raises(InputError, match="'gpu' is unknown"):
        open_backend("gpu")
    cu.version = 12020
    backend, why = open_backend("auto")
    assert isinstance(backend, HostBackend)
    assert "PTX ISA up to 8.2" in why
    assert why_not() == why.removeprefix("no GPU can be used: ")
    with pytest.raises(UnsupportedError, match=r"'cuda' cannot be used: .*8\.2.*doctor"):
        open_backend("cuda")
    assert open_backend("host")[1] == "asked for"

    def absent() -> object:
        raise ImportError("No module named 'cuda'")

    monkeypatch.setattr(driver_module, "_bindings", absent)
    assert "cuda-bindings cannot be imported" in open_backend("auto")[1]
    with pytest.raises(UnsupportedError, match="pip install"):
        DriverBackend()


def test_importing_the_package_and_the_host_backend_leaves_cuda_alone() -> None:
    code = (
        "import sys, ds41rt, ds41rt.engine, ds41rt.cli\n"
        "from ds41rt.cu.backend import open_backend\n"
        "open_backend('host')[0].close()\n"
        "print([m for m in sys.modules if m == 'cuda' or m.startswith('cuda.')])\n"
        "import ds41rt.cu.driver\n"
        "print('cuda.bindings.driver' in sys.modules)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["[]", "False"]


def test_a_process_that_never_initialised_cuda_may_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "_initialised_pid", None)
    assert _in_child(lambda: probe_driver(FakeDriver()).state.value) == "ready"
