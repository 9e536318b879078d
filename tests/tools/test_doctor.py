"""`ds41rt doctor` on machines that have no GPU, a broken one, and a good one; every problem has a next step."""

import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from ds41rt.cli import main
from ds41rt.cu import driver as driver_module
from ds41rt.cu import ptx as ptx_module
from ds41rt.cu.kernel import KernelSpec
from ds41rt.kernels.registry import SPECS
from ds41rt.tools import doctor as doctor_module
from ds41rt.tools.doctor import DEFAULT_STREAM_SWITCH, Report, examine


@pytest.fixture
def cu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fake driver in the place of the bindings."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "cu"))
    import fake_driver

    cu = fake_driver.FakeDriver(SPECS)
    monkeypatch.setattr(driver_module, "_bindings", lambda: cu)
    return cu


def _has_problem(report: Report, *parts: str) -> None:
    """Exactly one problem, with these texts, and something to do about it."""
    ((what, step),) = report.problems
    for part in parts:
        assert part in f"{what} -> {step}"
    assert len(step) > 10


def test_a_good_machine(cu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for part in (
        "cuda-bindings",
        "driver: ready, CUDA 13.0; default stream: legacy",
        "device 0: Fake GPU, compute capability 9.0, 132 multiprocessors, memory 8.0 GiB (8.0 GiB free), 227 KiB",
        "chosen: PTX tier sm_80 (PTX ISA 8.4) fits",
        f"kernels: {len(SPECS)} of {len(SPECS)} have PTX",
        "pinned memory: 64 MiB",
        "a GPU can be used",
    ):
        assert part in out
    assert main(["doctor", "--json"]) == 0
    raw = json.loads(capsys.readouterr().out)
    assert (raw["ok"], raw["problems"], raw["warnings"]) == (True, [], [])
    assert raw["devices"][0]["capability"] == "9.0"
    assert raw["pinned"]["round_trip"] is True
    assert raw["versions"]["cuda-bindings"] == metadata.version("cuda-bindings")
    assert not any(cu.host.live().values())  # nothing stays behind
    assert cu.retained == 0


def _no_library(cu: Any) -> None:
    cu.no_library = RuntimeError("Failed to dlopen libcuda.so.1")


def _old_driver(cu: Any) -> None:
    cu.version = 12020


def _old_device(cu: Any) -> None:
    cu.attributes[75] = 7


def _no_device(cu: Any) -> None:
    cu.fail["cuInit"] = [100]


def _mismatch(cu: Any) -> None:
    cu.fail["cuInit"] = [803]


def _mute_device(cu: Any) -> None:
    cu.fail["cuDeviceGetName"] = [999]


def _no_context(cu: Any) -> None:
    cu.fail["cuDevicePrimaryCtxRetain"] = [2]


def _no_pinned(cu: Any) -> None:
    cu.fail["cuMemHostAlloc"] = [2]


def _broken_copies(cu: Any) -> None:
    cu.fail["cuStreamSynchronize"] = [700]


@pytest.mark.parametrize(
    ("breakage", "parts"),
    [
        (_no_library, ("no driver library: Failed to dlopen", "install the NVIDIA driver")),
        (_no_device, ("no device", "CUDA_VISIBLE_DEVICES")),
        (_mismatch, ("the driver did not start", "803", "nvidia-smi")),
        (_mute_device, ("cuDeviceGetName", "nvidia-smi")),
        (_old_driver, ("8.4", "8.2", "550")),
        (_old_device, ("needs compute capability 8.0", "7.0")),
        (_no_context, ("cuDevicePrimaryCtxRetain", "2 CUDA_ERROR_OUT_OF_MEMORY: what the driver says", "nvidia-smi")),
        (_no_pinned, ("pinned buffer 'doctor'", "locked memory")),
        (_broken_copies, ("ILLEGAL_ADDRESS", "nvidia-smi")),
    ],
)
def test_every_breakage_is_one_problem_with_a_next_step(
    cu: Any, capsys: pytest.CaptureFixture[str], breakage: Callable[[Any], None], parts: tuple[str, ...]
) -> None:
    breakage(cu)
    _has_problem(examine({}), *parts)
    cu.fail.clear()
    breakage(cu)
    assert main(["doctor", "--json"]) == 1
    raw = json.loads(capsys.readouterr().out)
    assert raw["ok"] is False
    assert len(raw["problems"]) == 1
    cu.fail.clear()
    breakage(cu)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "\n  next: " in out
    assert "a GPU cannot be used; --backend host works" in out
    assert not any(cu.host.live().values())


def test_missing_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Any:
        raise ImportError("No module named 'cuda'")

    monkeypatch.setattr(driver_module, "_bindings", absent)
    _has_problem(examine({}), "cuda-bindings cannot be imported", "pip install")


def test_missing_ptx_files(cu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ptx_module, "__file__", str(tmp_path / "src" / "ds41rt" / "cu" / "ptx.py"))
    _has_problem(examine({}), "no PTX files found", "make ptx")


def test_a_kernel_without_ptx_is_named(cu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = KernelSpec("not_compiled", (), lambda: None)
    monkeypatch.setattr(doctor_module, "SPECS", (*SPECS, extra))
    report = examine({})
    _has_problem(report, f"1 of {len(SPECS) + 1} kernels", "not_compiled", "make ptx")
    assert report.pinned["round_trip"]  # the rest is looked at all the same


def test_bytes_that_change_on_the_way_are_a_problem(cu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(cu), "_cuMemcpyDtoHAsync", lambda self, dst, src, nbytes, stream: None)
    _has_problem(examine({}), "came back changed", "dmesg")


def test_another_platform(cu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds41rt.tools.doctor.sys.platform", "win32")
    _has_problem(examine({}), "little-endian Linux", "--backend host")


@pytest.mark.parametrize(
    ("bindings", "value", "stream", "warned", "refused"),
    [
        ("13.4.4", None, "legacy", False, False),
        ("13.4.4", "0", "legacy", False, False),
        ("13.4.4", "1", "per-thread", False, False),
        ("13.3.1", " 2 ", "per-thread", False, False),
        ("13.4.4", "", "", False, True),
        ("13.4.4", "false", "", False, True),
        ("13.0.3", None, "legacy", False, False),
        ("13.0.3", "", "legacy", False, False),
        ("13.0.3", "1", "per-thread", False, False),
        ("13.2.0", "0", "per-thread", True, False),
        ("12.9.2", "off", "per-thread", True, False),
    ],
)
def test_the_default_stream_switch(
    cu: Any, monkeypatch: pytest.MonkeyPatch, bindings: str, value: str | None, stream: str, warned: bool, refused: bool
) -> None:
    """Which releases read the switch how was tried out: test_driver_bindings.py does it with the installed one."""
    monkeypatch.setattr(doctor_module, "_version", lambda package: bindings)
    report = examine({} if value is None else {DEFAULT_STREAM_SWITCH: value})
    assert report.default_stream == stream
    assert len(report.warnings) == warned
    assert len(report.problems) == refused
    for what, step in report.warnings + report.problems:
        assert f"{DEFAULT_STREAM_SWITCH}={value!r}" in what
        assert "unset" in step


def test_variables_that_no_engine_takes(
    cu: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them are problems: a value, and names under both prefixes."""
    bad = {"ATLAS_DS41_TRCE": "1", "DS41RT_BACKNED": "host", "DS41RT_READER_THREADS": "65"}
    for name, value in bad.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DS41RT_REQUIRE_GPU", "1")
    assert main(["doctor", "--json"]) == 1
    raw = json.loads(capsys.readouterr().out)
    assert (raw["ok"], raw["refused"]) == (False, sorted(bad))
    for name, problem in zip(sorted(bad), raw["problems"], strict=True):
        assert name.removeprefix("DS41RT_").lower() in problem["what"].lower()
        assert f"correct {name} or unset it" in problem["next"]
    assert raw["pinned"]["round_trip"] is True  # the rest is looked at all the same
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "problem: DS41RT_BACKNED='host': there is no such setting; use DS41RT_BACKEND, or unset it" in out
    assert out.endswith(f"no engine opens on any backend, because of {', '.join(sorted(bad))}\n")
    for name in bad:
        monkeypatch.delenv(name)
    assert main(["doctor"]) == 0


def test_this_machine_gets_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    raw = json.loads(capsys.readouterr().out)
    assert code == (0 if raw["ok"] else 1)
    assert raw["driver"]["state"]
    assert all(problem["what"] and problem["next"] for problem in raw["problems"])
