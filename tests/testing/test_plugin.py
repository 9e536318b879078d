"""The pytest plugin: what `gpu` runs on, what it checks when a test ends, and faults through `host_gpu`."""

from pathlib import Path

import pytest
from run_pytest import run_pytest

from ds41rt.cu.probe import GpuState, Probe
from ds41rt.testing import plugin

HEAD = """
import pytest
from ds41rt.cu.result import CudaError, OutOfDeviceMemory, Status
"""


@pytest.mark.parametrize(
    ("state", "auto"),
    [
        (GpuState.NO_BINDINGS, False),
        (GpuState.NO_LIBRARY, False),
        (GpuState.NO_DEVICE, False),
        (GpuState.FAILED, True),  # a driver that does not start is to be reported, not passed over
        (GpuState.READY, True),
    ],
)
def test_the_real_device_is_included_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, state: GpuState, auto: bool
) -> None:
    monkeypatch.setattr(plugin, "probe_gpu", lambda: Probe(state))
    assert plugin._device_wanted("auto") is auto
    assert plugin._device_wanted("always")
    assert not plugin._device_wanted("never")


def test_options_choose_the_schedules(tmp_path: Path) -> None:
    source = "def test_it(gpu):\n    assert gpu.name == 'host'\n"
    report = run_pytest(tmp_path, source, "-v", "--gpu-seeds=1", "--gpu-device=never")
    assert report.returncode == 0, report.stdout
    assert "3 passed" in report.stdout
    assert all(f"test_it[{schedule}]" in report.stdout for schedule in ("lazy", "eager", "random:0"))


def test_a_module_can_ask_for_the_plugin(tmp_path: Path) -> None:
    source = "pytest_plugins = ['ds41rt.testing.plugin']\ndef test_it(host_gpu):\n    assert host_gpu.name == 'host'\n"
    report = run_pytest(tmp_path, source, plugin="")
    assert report.returncode == 0, report.stdout
    assert "5 passed" in report.stdout


def test_nothing_is_loaded_without_being_asked_for(tmp_path: Path) -> None:
    report = run_pytest(tmp_path, "def test_it(gpu):\n    pass\n", plugin="")
    assert "fixture 'gpu' not found" in report.stdout


def test_a_device_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    source = """
from ds41rt.cu.probe import GpuState, Probe
import ds41rt.cu.driver
ds41rt.cu.driver.probe = lambda: Probe(GpuState.FAILED, "cuInit: 999")
def test_it(gpu):
    assert gpu.name == "host"
"""
    report = run_pytest(tmp_path, source, "--gpu-device=always")
    assert "5 passed, 1 error" in report.stdout, report.stdout
    assert "the real device was asked for" in report.stdout
    assert "cuInit: 999" in report.stdout


def test_the_end_of_a_test_is_checked(tmp_path: Path) -> None:
    source = """
def test_capture(gpu):
    gpu.begin_capture(gpu.create_stream("main"))
def test_race(gpu):
    buf = gpu.alloc("kv", 64)
    for name in ("a", "b"):
        gpu.fill(buf.ptr, 1, 64, gpu.create_stream(name), label=name)
def test_clean(gpu):
    gpu.alloc("kv", 64)
"""
    report = run_pytest(tmp_path, source, "--gpu-seeds=0", "--gpu-device=never")
    assert "6 passed, 4 errors" in report.stdout, report.stdout
    assert "1 captures are still open" in report.stdout
    assert "unordered accesses" in report.stdout


def test_faults_are_injected_through_the_host_fixture(tmp_path: Path) -> None:
    source = (
        HEAD
        + """
def test_memory(host_gpu):
    host_gpu.faults.out_of_memory(2)
    host_gpu.alloc("first", 64)
    with pytest.raises(OutOfDeviceMemory):
        host_gpu.alloc_pinned("second", 64)
    host_gpu.alloc("third", 64)
def test_call(host_gpu):
    stream = host_gpu.create_stream("main")
    host_gpu.faults.fail(1, Status.LAUNCH_FAILED, "synchronize")
    with pytest.raises(CudaError) as info:
        host_gpu.synchronize(stream)
    assert info.value.sticky
"""
    )
    report = run_pytest(tmp_path, source, "--gpu-seeds=0")
    assert "4 passed" in report.stdout, report.stdout
