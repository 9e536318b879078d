"""Kernels that bring their own PTX text, on the fake driver; and the conformance cases through `DriverBackend`."""

from dataclasses import replace
from pathlib import Path

import pytest
from fake_driver import open_fake
from tiny_kernels import SCALE

from ds41rt.cu.host import HostBackend
from ds41rt.cu.kernel import Geometry, KernelSpec
from ds41rt.cu.result import CudaError, Status
from ds41rt.errors import UnsupportedError
from ds41rt.testing.conformance import CASES, run_case
from ds41rt.testing.conformance.kernels import AFFINE, AFFINE_PTX, DELAY

ARGS = {"x": 4096, "a": 3, "b": 5, "n": 64}


def test_the_text_is_loaded_once_and_before_any_capture(tmp_path: Path) -> None:
    backend, cu = open_fake(tmp_path, [AFFINE, DELAY])
    stream = backend.create_stream("main")
    for _ in range(3):
        backend.prepare(AFFINE, ARGS, "k")
    assert [call[1] for call in cu.calls if call[0] == "cuModuleLoadData"] == [AFFINE_PTX.encode() + b"\0"]
    assert [call[2] for call in cu.calls if call[0] == "cuModuleGetFunction"] == [b"conformance_affine"]
    backend.begin_capture(stream)
    backend.prepare(AFFINE, ARGS, "k")
    with pytest.raises(CudaError, match="conformance_delay is not loaded yet") as info:
        backend.prepare(DELAY, {"us": 1}, "k")
    assert info.value.status is Status.STREAM_CAPTURE_UNSUPPORTED
    backend.close()
    assert cu.modules == 0


def test_two_kernels_of_one_name_are_two_kernels(tmp_path: Path) -> None:
    text = AFFINE_PTX.replace("conformance_affine", "scale").replace(".param .u32 b, ", "").replace("[b]", "[a]")
    own = replace(SCALE, ptx=text, geometry=lambda s, n_multiprocessors: Geometry((1, 1, 1), 32))
    built_in = replace(own, ptx=None)
    backend, cu = open_fake(tmp_path, [own, built_in])
    for spec in (own, built_in, own):
        backend.prepare(spec, {"x": 4096, "a": 3, "n": 4}, "k")
    assert [call[2] for call in cu.calls if call[0] == "cuModuleGetFunction"] == [b"scale", b"ds41_scale"]
    backend.close()


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (replace(AFFINE, ptx="not PTX"), "the PTX text of kernel conformance_affine: no .version and .target lines"),
        (
            replace(AFFINE, ptx=AFFINE_PTX.replace("7.0", "9.9")),
            r"of kernel conformance_affine is PTX ISA 9.9, but the driver \(CUDA 13.0\) reads PTX ISA up to 9.0",
        ),
        (
            replace(AFFINE, ptx=AFFINE_PTX.replace("sm_80", "sm_100")),
            r"needs compute capability 10.0 or newer, this device has 9.0",
        ),
        (
            replace(AFFINE, name="other"),
            r"kernel other: its PTX text has no entry other, it has \['conformance_affine'\]",
        ),
        (
            replace(AFFINE, ptx=AFFINE_PTX.replace(".param .u32 n", ".param .u64 n")),
            r"declares \(u64, u32, u32, u32\), PTX text of kernel .* has \(u64, u32, u32, u64\)",
        ),
    ],
)
def test_a_text_that_does_not_fit_is_refused_before_loading(tmp_path: Path, spec: KernelSpec, text: str) -> None:
    backend, cu = open_fake(tmp_path, [AFFINE])
    with pytest.raises(UnsupportedError, match=text):
        backend.prepare(spec, ARGS, "k")
    assert cu.modules == 0
    backend.close()


@pytest.mark.parametrize("name", CASES)
def test_conformance_through_the_driver_backend(tmp_path: Path, name: str) -> None:
    """`DriverBackend` on a driver that is the simulated device answers as that device does."""
    backend, cu = open_fake(tmp_path, [AFFINE, DELAY])
    cu.host = HostBackend(race_detection=False)
    assert run_case(CASES[name], backend) == run_case(CASES[name], HostBackend(race_detection=False))
