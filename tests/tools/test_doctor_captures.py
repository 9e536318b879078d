"""The doctor's section on captures, in made-up environments and with drivers of several ages."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds41rt.cli import main
from ds41rt.cu import driver as driver_module
from ds41rt.cu.probe import OPTIONAL_CALLS, optional_calls
from ds41rt.kernels.registry import SPECS
from ds41rt.tools.doctor import examine
from ds41rt.tools.doctor_captures import Finding, examine_captures


def of(name: str, **env: str) -> Finding:
    found = {finding.name: finding for finding in examine_captures(env, "legacy", dict.fromkeys(OPTIONAL_CALLS, True))}
    return found[name]


def test_nothing_to_do_in_an_empty_environment() -> None:
    """Every finding says what it is and does; none asks for anything."""
    found = examine_captures({}, "legacy", dict.fromkeys(OPTIONAL_CALLS, True))
    assert len({finding.name for finding in found}) == len(found) == 13 + len(OPTIONAL_CALLS)
    assert [finding.name for finding in found if finding.next] == []
    assert all(finding.value and len(finding.effect) > 20 for finding in found)
    assert not any(finding.effect.endswith(".") for finding in found)


@pytest.mark.parametrize("kind", ["legacy", "per-thread", ""])
def test_the_default_stream(kind: str) -> None:
    finding = examine_captures({}, kind, None)[0]
    assert (finding.name, finding.value, finding.next) == ("default stream", kind or "unknown", None)


@pytest.mark.parametrize(
    ("name", "value", "effect", "next_step"),
    [
        ("CUDA_MODULE_LOADING", "LAZY", "first used", None),
        ("CUDA_MODULE_LOADING", "lazy", "first used", None),
        ("CUDA_MODULE_LOADING", "EAGER", "opening takes longer", None),
        ("CUDA_MODULE_LOADING", "DEFAULT", "12.2", None),
        ("CUDA_MODULE_LOADING", "1", "not a loading mode", "LAZY or EAGER"),
        ("CUDA_LAUNCH_BLOCKING", "1", "every launch waits", "unset"),
        ("CUDA_LAUNCH_BLOCKING", "0", "return at once", None),
        ("CUDA_LAUNCH_BLOCKING", "", "return at once", None),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "one queue", "8 or more"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "8", "8 queues", None),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32", "32 queues", None),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "33", "not a number from 1 to 32", "unset"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "0", "not a number from 1 to 32", "unset"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "many", "not a number from 1 to 32", "unset"),
        ("CUDA_DEVICE_WAITS_ON_EXCEPTION", "1", "wait for a debugger", "unset"),
        ("CUDA_DEVICE_WAITS_ON_EXCEPTION", "0", "is reported", None),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "whatever its value", "unset"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "0", "whatever its value", "0 does not switch it off"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "", "whatever its value", "unset"),
        ("DS41RT_STEP_GRAPH", "1", "captured and replayed", None),
        ("DS41RT_STEP_GRAPH", "0", "mode step-graph", None),
        ("DS41RT_TRACE", "1", "read back and hashed", "unset"),
        ("DS41RT_DEVICE_ROUTE_DIAG", "on", "checked on the host", "unset"),
        ("DS41RT_DEVICE_ROUTE", "0", "every step is eager", None),
        ("DS41RT_CAPTURE_WATCH", "1", "a stale one is refused", "unset"),
    ],
)
def test_a_variable(name: str, value: str, effect: str, next_step: str | None) -> None:
    finding = of(name, **{name: value})
    assert repr(value) == finding.value or name.startswith("DS41RT_")
    assert effect in finding.effect
    assert (finding.next is None) == (next_step is None)
    assert (next_step or "") in (finding.next or "")
    assert of(name).next is None


def test_switches_that_exclude_each_other() -> None:
    assert of("DS41RT_DEVICE_ROUTE", DS41RT_DEVICE_ROUTE="0", DS41RT_STEP_GRAPH="1").next == "unset it to get graphs"
    assert of("DS41RT_STEP_GRAPH", ATLAS_DS41_STEP_GRAPH="1").value == "True"


@pytest.mark.parametrize(("name", "value"), [("DS41RT_TRACE", "2"), ("DS41RT_STEP_GRPAH", "1")])
def test_a_setting_that_no_engine_would_take(name: str, value: str) -> None:
    finding = of("DS41RT_ settings", **{name: value})
    assert name in finding.effect
    assert finding.next is not None
    assert "no engine opens" in finding.next


@pytest.mark.parametrize(
    "env",
    [
        {"CUDA_INJECTION64_PATH": "/opt/libToolsInjection64.so"},
        {"NVTX_INJECTION64_PATH": "/x"},
        {"NV_SANITIZER_INJECTION_PORT_BASE": "49152"},
        {"NSYS_PROFILING_SESSION_ID": "1"},
        {"LD_PRELOAD": "/opt/compute-sanitizer/libsanitizer-collection.so"},
        {"LD_PRELOAD": "/usr/lib/libTreeLauncherTargetInjection.so:/lib/x.so"},
    ],
)
def test_a_tool_in_the_process(env: dict[str, str]) -> None:
    finding = of("profiler or sanitizer", **env)
    assert finding.value == next(iter(env))
    assert finding.next is not None
    assert "without the tool" in finding.next


def test_what_is_no_tool() -> None:
    assert of("profiler or sanitizer", CUDA_INJECTION64_PATH="", LD_PRELOAD="/usr/lib/libjemalloc.so").next is None
    finding = of("profiler or sanitizer", NSYS_A="1", CUDA_INJECTION64_PATH="/x")
    assert finding.value == "CUDA_INJECTION64_PATH, NSYS_A"


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_allocator_of_pytorch(name: str) -> None:
    finding = of("PyTorch's allocator", **{name: "max_split_size_mb:64, backend: cudaMallocAsync"})
    assert "allocation nodes" in finding.effect
    assert name in finding.value
    assert finding.next is not None
    assert of("PyTorch's allocator", **{name: "expandable_segments:True"}).next is None


# ---- the driver


@pytest.fixture
def cu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fake driver in the place of the bindings."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "cu"))
    import fake_driver

    cu = fake_driver.FakeDriver(SPECS)
    monkeypatch.setattr(driver_module, "_bindings", lambda: cu)
    return cu


@pytest.mark.parametrize(
    ("version", "missing"),
    [
        (13000, set()),
        (12080, {"cuLogsCurrent"}),
        (12040, {"cuLogsCurrent", "cuEventElapsedTime"}),
        (12030, {"cuLogsCurrent", "cuEventElapsedTime", "cuFuncGetParamInfo", "cuFuncLoad"}),
    ],
)
def test_calls_that_older_drivers_lack(cu: Any, version: int, missing: set[str]) -> None:
    cu.version = version
    assert {name for name, there in optional_calls(cu).items() if not there} == missing
    by_name = {finding.name: finding for finding in examine({}).captures}
    for name, since in OPTIONAL_CALLS.items():
        finding = by_name[name]
        assert finding.value == ("missing" if name in missing else "there")
        assert (finding.next is not None) == (name in missing)
        if finding.next is not None:
            assert f"CUDA {since // 1000}.{since % 1000 // 10} or newer" in finding.next


def test_calls_that_the_bindings_lack(cu: Any) -> None:
    """Or that the driver lacks although its version says otherwise."""
    cu.missing.add("cuLogsCurrent")
    cu.unloadable.add("cuFuncLoad")
    assert [name for name, there in optional_calls(cu).items() if not there] == ["cuFuncLoad", "cuLogsCurrent"]


def test_without_a_driver_nobody_is_asked(cu: Any) -> None:
    cu.no_library = RuntimeError("Failed to dlopen libcuda.so.1")
    found = {finding.name: finding for finding in examine({}).captures}
    assert {found[name].value for name in OPTIONAL_CALLS} == {"unknown: no driver was asked"}
    assert not any(found[name].next for name in OPTIONAL_CALLS)


def test_text_and_json(cu: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    section = out.split("captures:\n")[1].split("a GPU can be used")[0]
    assert "  CUDA_LAUNCH_BLOCKING: '1'; every launch waits" in section
    assert "\n    next: unset it, except to find the launch that fails\n" in section
    assert main(["doctor", "--json"]) == 0
    raw = json.loads(capsys.readouterr().out)
    (blocking,) = (finding for finding in raw["captures"] if finding["name"] == "CUDA_LAUNCH_BLOCKING")
    assert blocking.keys() == {"name", "value", "effect", "next"}
    assert blocking["next"].startswith("unset it")
    assert all(finding["name"] and finding["effect"] for finding in raw["captures"])
    assert raw["ok"] is True


def test_the_section_is_there_on_this_machine() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ds41rt", "doctor", "--json"], capture_output=True, text=True, check=False
    )
    raw = json.loads(done.stdout)
    assert done.returncode == (0 if raw["ok"] else 1)
    assert {finding["name"] for finding in raw["captures"]} >= {
        "default stream",
        "CUDA_MODULE_LOADING",
        *OPTIONAL_CALLS,
    }
