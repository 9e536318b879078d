"""Launches of the driver backend: parameter bytes, limits of the device, loading. On the fake driver."""

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_driver import FakeDriver, open_fake, read_params, write_ptx
from tiny_kernels import AXPY, GATHER, OPTIONAL, SCALE, download, random_i32, upload

from ds41rt.cu.driver import DriverBackend
from ds41rt.cu.driver_kernels import DriverLaunch
from ds41rt.cu.kernel import F32, Array, Geometry, KernelLaunch, KernelSpec, Pointer, Scalar, Scalars
from ds41rt.cu.result import CudaError, Status
from ds41rt.errors import UnsupportedError


def _on_gpu(spec: KernelSpec, grid: tuple[int, int, int] = (1, 1, 1), block: int = 32, shared: int = 0) -> KernelSpec:
    return replace(spec, geometry=lambda s, n_sms: Geometry(grid, block, shared))


def _mixed(a: Array, i: int, b: Array, f: float, q: int, u: int) -> None:
    raise AssertionError("never run")


MIXED = _on_gpu(
    KernelSpec(
        "mixed",
        (
            Pointer("a", F32, lambda s: (1,), "r"),
            Scalar("i", "i32"),
            Pointer("b", F32, lambda s: (1,), "w"),
            Scalar("f", "f32"),
            Scalar("q", "u64"),
            Scalar("u", "u32"),
        ),
        _mixed,
    )
)
SCALE_ARGS = {"x": 4096, "a": 3, "n": 16}


def test_parameters_are_packed_byte_for_byte(tmp_path: Path) -> None:
    backend, _ = open_fake(tmp_path, [MIXED])
    args = {"u": 2**32 - 1, "a": 2**64 - 256, "i": -7, "b": 0x7F00_1234_5600, "f": 0.1, "q": 2**63 + 5}
    launch = backend.prepare(MIXED, args, "mixed")
    assert isinstance(launch, DriverLaunch)
    want = [struct.pack("<Q", 2**64 - 256), struct.pack("<i", -7), struct.pack("<Q", 0x7F00_1234_5600)]
    want += [struct.pack("<f", 0.1), struct.pack("<Q", 2**63 + 5), b"\xff\xff\xff\xff"]
    assert launch.values.raw == b"".join(value.ljust(8, b"\0") for value in want)
    assert read_params(MIXED, launch.params) == (
        2**64 - 256, -7, 0x7F00_1234_5600, float(np.float32(0.1)), 2**63 + 5, 2**32 - 1
    )  # fmt: skip
    backend.close()


def test_a_launch_passes_prepared_addresses_and_nothing_else(tmp_path: Path) -> None:
    spec = replace(SCALE, geometry=lambda s, n_sms: Geometry((n_sms, s.n, 2), 96, 1000))
    backend, cu = open_fake(tmp_path, [spec])
    stream = backend.create_stream("main")
    x = random_i32(np.random.default_rng(1), 16)
    ptr = upload(backend, stream, "x", x)
    launch = backend.prepare(spec, {"x": ptr, "a": 3, "n": 16}, "L03.scale")
    assert isinstance(launch, DriverLaunch)
    start = len(cu.calls)
    for _ in range(2):
        backend.launch(launch, stream)
    (function,) = {call[1] for call in cu.calls[start:]}
    assert cu.calls[start:] == [("cuLaunchKernel", function, 132, 16, 2, 96, 1, 1, 1000, stream, launch.params, 0)] * 2
    assert download(backend, stream, ptr, x).tolist() == (x * 9).tolist()
    backend.close()


def test_launch_errors_name_kernel_stream_and_label(tmp_path: Path) -> None:
    spec = _on_gpu(SCALE)
    backend, cu = open_fake(tmp_path, [spec])
    stream = backend.create_stream("main")
    launch = backend.prepare(spec, SCALE_ARGS, "L03.scale")
    cu.fail["cuLaunchKernel"] = [701]
    with pytest.raises(CudaError, match=r"stream 'main' kernel 'L03.scale' \(scale\)") as info:
        backend.launch(launch, stream)
    assert info.value.status is Status.LAUNCH_OUT_OF_RESOURCES
    other, _ = open_fake(tmp_path / "other", [spec])
    for foreign in (KernelLaunch(spec, (1, 2, 3), "made up"), other.prepare(spec, SCALE_ARGS, "theirs")):
        with pytest.raises(CudaError, match="was not prepared by this backend") as info:
            backend.launch(foreign, stream)
        assert info.value.status is Status.INVALID_VALUE
    backend.close()
    other.close()


@pytest.mark.parametrize(
    ("args", "error", "text"),
    [
        ({"x": 4096, "a": 3}, TypeError, "kernel scale: missing arguments"),
        ({"x": 4096, "a": 2**31, "n": 1}, ValueError, "a must be an integer"),
        ({"x": -1, "a": 3, "n": 1}, ValueError, "x must be an integer"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, args: dict[str, int], error: type[Exception], text: str) -> None:
    spec = _on_gpu(SCALE)
    backend, cu = open_fake(tmp_path, [spec])
    with pytest.raises(error, match=text):
        backend.prepare(spec, args, "k")
    assert cu.modules == 0
    backend.close()


@pytest.mark.parametrize(
    ("grid", "block", "shared", "error", "text"),
    [
        ((0, 1, 1), 32, 0, ValueError, r"grid of \(0, 1, 1\)"),
        ((1, 65536, 1), 32, 0, ValueError, "cannot be launched"),
        ((2**31, 1, 1), 32, 0, ValueError, "cannot be launched"),
        ((1, 1, 1), 0, 0, UnsupportedError, "blocks of 0 threads"),
        ((1, 1, 1), 513, 0, UnsupportedError, "blocks of 513 threads, but device Fake GPU allows 1 to 512"),
        ((1, 1, 1), 32, (227 << 10) - 99, UnsupportedError, "232449 bytes of shared memory a block, .* has 232448"),
    ],
)
def test_launches_that_the_device_cannot_take_are_refused_at_once(
    tmp_path: Path, grid: tuple[int, int, int], block: int, shared: int, error: type[Exception], text: str
) -> None:
    spec = _on_gpu(SCALE, grid, block, shared)
    backend, cu = open_fake(tmp_path, [spec])
    cu.function_attributes.update({0: 512, 1: 100})
    with pytest.raises(error, match=rf"kernel scale \('k'\): .*{text}"):
        backend.prepare(spec, SCALE_ARGS, "k")
    backend.close()


def test_shared_memory_beyond_the_default_is_asked_for_once_and_never_taken_back(tmp_path: Path) -> None:
    def geometry(s: Scalars, n_sms: int) -> Geometry:
        return Geometry((1, 1, 1), 32, s.n << 10)

    spec = replace(SCALE, geometry=geometry)
    backend, cu = open_fake(tmp_path, [spec])
    cu.function_attributes[1] = 1024  # static
    for kib in (47, 48, 100, 64, 100, 200):
        backend.prepare(spec, {"x": 4096, "a": 3, "n": kib}, "k")
    asked = [call[2:] for call in cu.calls if call[0] == "cuFuncSetAttribute"]
    assert asked == [(8, 48 << 10), (8, 100 << 10), (8, 200 << 10)]
    cu.fail["cuFuncSetAttribute"] = [1]
    args = {"x": 4096, "a": 3, "n": 210}
    with pytest.raises(CudaError, match="kernel scale"):
        backend.prepare(spec, args, "k")
    backend.prepare(spec, args, "k")  # a refusal is not remembered as granted
    assert cu.names().count("cuFuncSetAttribute") == 5
    backend.close()


def test_modules_and_functions_are_loaded_once(tmp_path: Path) -> None:
    specs = [_on_gpu(SCALE), _on_gpu(AXPY), _on_gpu(GATHER), _on_gpu(OPTIONAL)]
    backend, cu = open_fake(tmp_path, specs)
    for _ in range(3):
        backend.prepare(specs[0], SCALE_ARGS, "k")
        backend.prepare(specs[1], {"x": 0, "y": 0, "a": 2.5, "n": 4}, "k")
    assert (cu.modules, cu.names().count("cuModuleLoadData"), cu.names().count("cuModuleGetFunction")) == (1, 1, 2)
    assert cu.names().count("cuFuncLoad") == 2  # no lazy load later
    backend.close()
    assert cu.modules == 0


def test_kernels_without_a_device_version(tmp_path: Path) -> None:
    known, unknown = _on_gpu(SCALE), _on_gpu(AXPY)
    backend, cu = open_fake(tmp_path, [known])
    with pytest.raises(UnsupportedError, match=r"kernel scale \('k'\) has no device version"):
        backend.prepare(SCALE, SCALE_ARGS, "k")
    with pytest.raises(UnsupportedError, match=r"kernel axpy: no PTX .* has an entry ds41_axpy .*PTX tier sm_80"):
        backend.prepare(unknown, {"x": 0, "y": 0, "a": 2.5, "n": 4}, "k")
    changed = replace(known, params=(*known.params[:2], Scalar("n", "u64")))
    with pytest.raises(UnsupportedError, match=r"declares \(u64, u32, u64\), .* has \(u64, u32, u32\): run `make ptx`"):
        backend.prepare(changed, SCALE_ARGS, "k")
    cu._specs.clear()
    with pytest.raises(CudaError, match="entry ds41_scale") as info:
        backend.prepare(known, SCALE_ARGS, "k")
    assert info.value.status is Status.NOT_FOUND
    backend.close()


def _break_file(folder: Path) -> None:
    (folder / "sm_80" / "all.ptx").write_text("something else")


def _remove_file(folder: Path) -> None:
    (folder / "sm_80" / "all.ptx").unlink()


@pytest.mark.parametrize(
    ("damage", "text"), [(_break_file, "is not the one that manifest.json describes"), (_remove_file, "No such file")]
)
def test_ptx_files_are_checked_when_they_are_loaded(tmp_path: Path, damage: Callable[[Path], None], text: str) -> None:
    spec = _on_gpu(SCALE)
    backend, cu = open_fake(tmp_path, [spec])
    damage(tmp_path)
    with pytest.raises(UnsupportedError, match=text):
        backend.prepare(spec, SCALE_ARGS, "k")
    assert cu.modules == 0
    backend.close()


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncGetAttribute"])
def test_a_load_that_fails_can_be_tried_again(tmp_path: Path, call: str) -> None:
    spec = _on_gpu(SCALE)
    cu = FakeDriver([spec])
    backend: Any = DriverBackend(bindings=cu, ptx_folder=write_ptx(tmp_path, [spec]))
    cu.fail[call] = [218]
    cu.log.append("ptxas fatal: bad instruction")
    with pytest.raises(CudaError, match=r"INVALID_PTX.*driver log: ptxas fatal: bad instruction"):
        backend.prepare(spec, SCALE_ARGS, "k")
    backend.prepare(spec, SCALE_ARGS, "k")
    backend.close()
    assert cu.modules == 0
