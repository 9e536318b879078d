"""`ds41rt doctor`: what this machine offers ds41rt, what is wrong with it, and what to do about each problem."""

import argparse
import json
import platform
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from importlib import metadata
from os import environ
from typing import Any

import numpy as np

from ds41rt import __version__
from ds41rt.cu.backend import open_backend, optional_calls, probe_gpu
from ds41rt.cu.probe import GpuState, Probe
from ds41rt.cu.ptx import choose, cuda_version, entry_name, load_manifest
from ds41rt.errors import ConfigError, Ds41Error, UnsupportedError
from ds41rt.kernels.registry import SPECS
from ds41rt.settings import Settings
from ds41rt.tools.doctor_captures import Finding, examine_captures

PINNED_NBYTES = 64 << 20
DEFAULT_STREAM_SWITCH = "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM"
# From here on the bindings read the switch as a number; before, any text switched it on.
_SWITCH_IS_NUMBER = (13, 3)

_NEXT_STEPS = {
    GpuState.NO_BINDINGS: "pip install 'cuda-python>=13,<14'",
    GpuState.NO_LIBRARY: "install the NVIDIA driver (550 or newer) until nvidia-smi works; containers need --gpus all",
    GpuState.NO_DEVICE: "see whether nvidia-smi lists the GPU and whether CUDA_VISIBLE_DEVICES hides it",
    GpuState.FAILED: "see whether nvidia-smi works; after a driver update, reboot or reload the driver's modules",
}


@dataclass
class Report:
    """What was found. `problems` keep the GPU from being used, `warnings` do not; each is (what, what to do).
    `refused` are variables that no engine takes, on whatever backend; they are among the problems. `captures` is what
    bears on captures, harmful or not."""

    versions: dict[str, str]
    platform: dict[str, Any]
    default_stream: str = ""
    driver: dict[str, Any] = field(default_factory=dict)
    devices: list[dict[str, Any]] = field(default_factory=list)
    ptx: dict[str, Any] = field(default_factory=dict)
    pinned: dict[str, Any] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    captures: list[Finding] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[tuple[str, str]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; `ok` says whether a GPU can be used."""
        both = {
            kind: [{"what": what, "next": step} for what, step in getattr(self, kind)]
            for kind in ("problems", "warnings")
        }
        return {"ok": not self.problems, **asdict(self), **both}


def examine(env: Mapping[str, str]) -> Report:
    """Look at everything that a GPU run needs, as far as it goes. Raises nothing that a broken machine can cause."""
    report = Report(
        {
            "ds41rt": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "cuda-bindings": _version("cuda-bindings"),
        },
        {"system": platform.system(), "machine": platform.machine(), "release": platform.release()},
    )
    if sys.platform != "linux" or sys.byteorder != "little":
        what = f"a GPU is supported on little-endian Linux, this is {platform.system()} ({sys.byteorder}-endian)"
        report.problems.append((what, "use --backend host here, or a Linux machine"))
    _settings(report, env)
    _default_stream(report, env.get(DEFAULT_STREAM_SWITCH))
    found = _probe(report)
    calls = optional_calls() if found.state is GpuState.READY else None
    report.captures = examine_captures(env, report.default_stream, calls)
    if _ptx(report, found):
        _use(report)
    return report


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _settings(report: Report, env: Mapping[str, str]) -> None:
    """Each variable by itself, so that all of them are named, not the first alone."""
    for variable in sorted(env):
        try:
            Settings.from_env({variable: env[variable]})
        except ConfigError as e:
            report.refused.append(variable)
            report.problems.append((str(e), f"correct {variable} or unset it: no engine opens until then"))


def _default_stream(report: Report, value: str | None) -> None:
    """What the bindings make of their switch for per-thread default streams; ds41rt itself uses neither kind."""
    version = report.versions["cuda-bindings"].split(".")
    is_number = len(version) > 1 and version[1].isdigit() and (int(version[0]), int(version[1])) >= _SWITCH_IS_NUMBER
    text = (value or "").strip()
    setting = f"{DEFAULT_STREAM_SWITCH}={value!r}"
    on = bool(value)
    if is_number and value is not None:
        if not text.lstrip("+-").isdigit():
            what = (
                f"{setting} is not a number, and the bindings {report.versions['cuda-bindings']} do not start with it"
            )
            report.problems.append((what, f"unset {DEFAULT_STREAM_SWITCH}, or set it to 1"))
            return
        on = int(text) != 0
    report.default_stream = "per-thread" if on else "legacy"
    if on and text.lower() in ("0", "false", "off", "no"):
        what = f"{setting} switches per-thread default streams on: these bindings take any text for on"
        report.warnings.append((what, f"unset {DEFAULT_STREAM_SWITCH} to switch them off; ds41rt itself does not mind"))


def _probe(report: Report) -> Probe:
    try:
        found = probe_gpu()
    except Ds41Error as e:
        found = Probe(GpuState.FAILED, str(e))
    report.driver = {"state": found.state.value, "detail": found.detail}
    if found.state is not GpuState.READY:
        report.problems.append((str(found), _NEXT_STEPS[found.state]))
    if found.driver_version:
        report.driver["cuda"] = "{}.{}".format(*cuda_version(found.driver_version))
    report.devices = [
        asdict(d) | {"capability": f"{d.capability[0]}.{d.capability[1]}", "free_nbytes": None} for d in found.devices
    ]
    return found


def _ptx(report: Report, found: Probe) -> bool:
    """The PTX files, their fit for device 0, and whether every kernel is among them. True if device 0 takes any."""
    try:
        manifest = load_manifest()
        report.ptx = {"folder": str(manifest.folder), "toolchain": dict(manifest.toolchain), "tiers": []}
        if found.state is not GpuState.READY:
            report.ptx["tiers"] = [
                {"tier": t.name, "accepted": None, "reason": f"PTX tier {t.name}, no GPU"} for t in manifest.tiers
            ]
            return False
        selection = choose(manifest, found.driver_version, found.devices[0].capability)
    except UnsupportedError as e:
        report.problems.append((str(e), "do what it says, or use --backend host"))
        return False
    report.ptx["tiers"] = [asdict(v) for v in selection.verdicts]
    missing = [s.name for s in SPECS if s.geometry is None or entry_name(s) not in selection.entries]
    report.ptx |= {"kernels": len(SPECS), "missing": missing}
    if missing:
        what = f"{len(missing)} of {len(SPECS)} kernels have no PTX for this device: {', '.join(missing)}"
        report.problems.append((what, "reinstall ds41rt, or run `make ptx` in a checkout"))
    return True


def _use(report: Report) -> None:
    """Open device 0, allocate pinned memory, and send bytes there and back."""
    try:
        backend, _ = open_backend("cuda")
        with closing(backend):
            report.devices[0]["free_nbytes"] = backend.memory_info()[0]
            stream = backend.create_stream("doctor")
            start = time.perf_counter()
            host = backend.alloc_pinned("doctor", PINNED_NBYTES)
            report.pinned = {"nbytes": PINNED_NBYTES, "allocated_ms": 1e3 * (time.perf_counter() - start)}
            half = PINNED_NBYTES // 2
            sent = np.random.default_rng().integers(0, 256, half, dtype=np.uint8)
            host.array[:half], host.array[half:] = sent, ~sent
            buf = backend.alloc("doctor", half)
            backend.copy_h2d(buf.ptr, host, half, stream, 0, "doctor")
            backend.copy_d2h(host, buf.ptr, half, stream, half, "doctor")
            backend.synchronize(stream)
            report.pinned["round_trip"] = bool(np.array_equal(host.array[half:], sent))
    except MemoryError as e:
        step = "free device or host memory (see nvidia-smi and free), or raise the limit on locked memory (ulimit -l)"
        report.problems.append((str(e), step))
        return
    except Ds41Error as e:
        report.problems.append((str(e), "see whether nvidia-smi works and what else uses the GPU"))
        return
    if not report.pinned["round_trip"]:
        step = "this is a fault of the machine: see the driver's messages in dmesg (Xid)"
        report.problems.append(("bytes that went to the device and back came back changed", step))


def _print(report: Report) -> None:
    def gib(nbytes: int | None) -> str:
        return "unknown" if nbytes is None else f"{nbytes / 2**30:.1f} GiB"

    print(", ".join(f"{name} {version}" for name, version in report.versions.items()))
    print(" ".join(str(v) for v in report.platform.values()))
    cuda = f", CUDA {report.driver['cuda']}" if "cuda" in report.driver else ""
    print(f"driver: {report.driver['state']}{cuda}; default stream: {report.default_stream or 'unknown'}")
    for d in report.devices:
        print(
            f"device {d['ordinal']}: {d['name']}, compute capability {d['capability']}, {d['n_multiprocessors']} "
            f"multiprocessors, memory {gib(d['memory_nbytes'])} ({gib(d['free_nbytes'])} free), "
            f"{d['shared_nbytes'] >> 10} KiB of shared memory a block, L2 {d['l2_nbytes'] >> 20} MiB"
        )
    for tier in report.ptx.get("tiers", []):
        verdict = {True: "chosen", False: "refused", None: "not judged"}[tier["accepted"]]
        print(f"{verdict}: {tier['reason']}")
    if "kernels" in report.ptx:
        print(f"kernels: {report.ptx['kernels'] - len(report.ptx['missing'])} of {report.ptx['kernels']} have PTX")
    if report.pinned:
        print(f"pinned memory: {report.pinned['nbytes'] >> 20} MiB in {report.pinned['allocated_ms']:.0f} ms")
    print("captures:")
    for finding in report.captures:
        print(f"  {finding.name}: {finding.value}; {finding.effect}")
        if finding.next is not None:
            print(f"    next: {finding.next}")
    for kind, found in (("problem", report.problems), ("warning", report.warnings)):
        for what, step in found:
            print(f"{kind}: {what}\n  next: {step}")
    if report.refused:
        print(f"no engine opens on any backend, because of {', '.join(report.refused)}")
    else:
        print("a GPU cannot be used; --backend host works" if report.problems else "a GPU can be used")


def doctor(args: argparse.Namespace) -> int:
    report = examine(environ)
    if args.json:
        print(json.dumps(report.as_dict(), indent=1))
    else:
        _print(report)
    return 1 if report.problems else 0
