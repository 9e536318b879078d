"""The precompiled kernels: where they are, what is in them, and which of them a device and its driver can load.

A tier is the same kernels built for a newer target. For every kernel the newest tier is used that both the device and
the driver accept, and a refusal is a sentence that names both sides. This file must not know `cuda.bindings`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ds41rt.cu.kernel import KernelSpec, Pointer
from ds41rt.errors import UnsupportedError

MANIFEST = "manifest.json"
ENTRY_PREFIX = "ds41_"

# CUDA version -> PTX ISA that its driver reads and the driver branch that came with it (PTX ISA manual, release notes).
# A driver newer than the last line reads at least as much.
_CUDA: tuple[tuple[tuple[int, int], tuple[int, int], int], ...] = (
    ((11, 0), (7, 0), 450),
    ((11, 1), (7, 1), 455),
    ((11, 2), (7, 2), 460),
    ((11, 3), (7, 3), 465),
    ((11, 4), (7, 4), 470),
    ((11, 5), (7, 5), 495),
    ((11, 6), (7, 6), 510),
    ((11, 7), (7, 7), 515),
    ((11, 8), (7, 8), 520),
    ((12, 0), (8, 0), 525),
    ((12, 1), (8, 1), 530),
    ((12, 2), (8, 2), 535),
    ((12, 3), (8, 3), 545),
    ((12, 4), (8, 4), 550),
    ((12, 5), (8, 5), 555),
    ((12, 6), (8, 5), 560),
    ((12, 7), (8, 6), 565),
    ((12, 8), (8, 7), 570),
    ((12, 9), (8, 8), 575),
    ((13, 0), (9, 0), 580),
    ((13, 1), (9, 1), 590),
)

_HEADER = re.compile(r"^\s*\.version\s+(\d+)\.(\d+)\s*$.*?^\s*\.target\s+(\w+)", re.MULTILINE | re.DOTALL)
_TARGET = re.compile(r"sm_(\d+)(\d)([af]?)")
_ENTRY = re.compile(r"^\s*(?:\.\w+\s+)*\.entry\s+(\w+)\s*\(([^)]*)\)", re.MULTILINE)
# ".param .u64 x", from newer compilers ".param .u64 .ptr .global .align 1 x", for structs ".param .align 8 .b8 x[16]"
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.[a-z]+\s+)?(?:\.align\s+\d+\s+)?)?\w+(\[\d+\])?"
)
_SCALARS = {"u32": "u32", "i32": "u32", "u64": "u64", "f32": "f32"}

Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class PtxModule:
    """One PTX file: `entries` maps an entry name to the PTX types of its parameters, in order."""

    name: str
    tier: str
    path: Path
    sha256: str
    entries: Mapping[str, tuple[str, ...]]

    def read(self) -> bytes:
        """The file's bytes. Raises `UnsupportedError` if they are not what the manifest describes."""
        try:
            text = self.path.read_bytes()
        except OSError as e:
            raise UnsupportedError(f"PTX file {self.path}: {e.strerror}; reinstall ds41rt") from e
        if sha256(text).hexdigest() != self.sha256:
            raise UnsupportedError(
                f"PTX file {self.path} is not the one that {MANIFEST} describes; reinstall ds41rt, or run `make ptx`"
            )
        return text


@dataclass(frozen=True, slots=True)
class Tier:
    """The modules of one target, with the PTX ISA that they are written in."""

    name: str
    target: str
    isa: Version
    modules: Mapping[str, PtxModule]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What was built: tiers from the oldest target to the newest, and the tools that built them."""

    folder: Path
    toolchain: Mapping[str, str]
    tiers: tuple[Tier, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a tier can be loaded, and one sentence that says why."""

    tier: str
    accepted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Selection:
    """The module to load for every entry, and the verdict on every tier."""

    entries: Mapping[str, PtxModule]
    verdicts: tuple[Verdict, ...]


def locate() -> Path:
    """The folder of the PTX files: inside the installed package, or the checkout's `ptx` in an editable install.

    Raises `UnsupportedError`.
    """
    package = Path(__file__).resolve().parents[1]
    places = (package / "ptx_data", package.parents[1] / "ptx")
    for folder in places:
        if (folder / MANIFEST).is_file():
            return folder
    looked = " and ".join(map(str, places))
    raise UnsupportedError(f"no PTX files found in {looked}; reinstall ds41rt, or run `make ptx` in a checkout")


def load_manifest(folder: Path | None = None) -> Manifest:
    """The manifest of `folder` (default: what `locate` finds). Raises `UnsupportedError`."""
    folder = locate() if folder is None else folder
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        tiers = sorted((_tier(folder, t) for t in raw["tiers"]), key=lambda t: _parse_target(t.target)[0])
        return Manifest(folder, MappingProxyType(dict(raw["toolchain"])), tuple(tiers))
    except (OSError, ValueError, KeyError, TypeError) as e:
        text = f"PTX manifest {path} cannot be used ({type(e).__name__}: {e}); reinstall ds41rt, or run `make ptx`"
        raise UnsupportedError(text) from e


def _tier(folder: Path, raw: Mapping[str, Any]) -> Tier:
    name = str(raw["name"])
    major, minor = str(raw["isa"]).split(".")
    modules = {
        module: PtxModule(
            module,
            name,
            folder / name / f"{module}.ptx",
            str(about["ptx_sha256"]),
            MappingProxyType({entry: tuple(types) for entry, types in about["entries"].items()}),
        )
        for module, about in raw["modules"].items()
    }
    return Tier(name, str(raw["target"]), (int(major), int(minor)), MappingProxyType(modules))


def parse_header(text: str) -> tuple[Version, str]:
    """PTX ISA version and target of a PTX text. Raises ValueError."""
    found = _HEADER.search(text)
    if found is None:
        raise ValueError("no .version and .target lines")
    return (int(found[1]), int(found[2])), found[3]


def parse_entries(text: str) -> dict[str, tuple[str, ...]]:
    """Entry name -> PTX types of its parameters, in order; a by-value array or struct shows as `b8[N]`."""
    return {
        name: tuple(kind + extent for kind, extent in _PARAM.findall(params)) for name, params in _ENTRY.findall(text)
    }


def entry_name(spec: KernelSpec) -> str:
    return spec.name if spec.ptx is not None else ENTRY_PREFIX + spec.name


def judge_text(spec: KernelSpec, driver_version: int, capability: Version) -> Mapping[str, tuple[str, ...]]:
    """The entries of a kernel's own PTX. Raises `UnsupportedError` where it is none, or driver or device refuse it."""
    assert spec.ptx is not None
    try:
        isa, target = parse_header(spec.ptx)
        verdict = judge(Tier(f"of kernel {spec.name}", target, isa, {}), driver_version, capability)
    except ValueError as e:
        raise UnsupportedError(f"the PTX text of kernel {spec.name}: {e}") from e
    if not verdict.accepted:
        raise UnsupportedError(verdict.reason)
    return parse_entries(spec.ptx)


def entry_types(spec: KernelSpec) -> tuple[str, ...]:
    """The PTX parameter types that a declaration asks for; PTX does not tell signed from unsigned words."""
    return tuple("u64" if isinstance(p, Pointer) else _SCALARS[p.ctype] for p in spec.params)


def cuda_version(driver_version: int) -> Version:
    """`cuDriverGetVersion`'s number as (major, minor)."""
    return driver_version // 1000, driver_version % 1000 // 10


def newest_isa(driver_version: int) -> Version:
    """The newest PTX ISA that the driver is known to read; (0, 0) before CUDA 11."""
    cuda = cuda_version(driver_version)
    return max((isa for version, isa, _ in _CUDA if version <= cuda), default=(0, 0))


def choose(manifest: Manifest, driver_version: int, capability: Version) -> Selection:
    """For every entry the newest tier that driver and device accept.

    Raises `UnsupportedError` with the reasons when no tier is accepted.
    """
    verdicts = tuple(judge(tier, driver_version, capability) for tier in manifest.tiers)
    entries: dict[str, PtxModule] = {}
    for tier, verdict in zip(manifest.tiers, verdicts, strict=True):
        if verdict.accepted:
            for module in tier.modules.values():
                entries.update(dict.fromkeys(module.entries, module))
    if not any(v.accepted for v in verdicts):
        raise UnsupportedError("; ".join(v.reason for v in verdicts) or f"{manifest.folder} holds no PTX tier")
    return Selection(MappingProxyType(entries), verdicts)


def judge(tier: Tier, driver_version: int, capability: Version) -> Verdict:
    """Compare a tier with a driver and a device of this compute capability, without loading anything."""
    cuda, isa = cuda_version(driver_version), newest_isa(driver_version)
    if tier.isa > isa:
        need = next(((version, branch) for version, known, branch in _CUDA if known >= tier.isa), None)
        do = "a newer driver" if need is None else f"a driver for CUDA {_dotted(need[0])} ({need[1]}) or newer"
        reads = f"reads PTX ISA up to {_dotted(isa)}" if isa > (0, 0) else "is too old"
        text = f"is PTX ISA {_dotted(tier.isa)}, but the driver (CUDA {_dotted(cuda)}) {reads}: install {do}"
        return Verdict(tier.name, False, f"PTX tier {tier.name} {text}")
    target, suffix = _parse_target(tier.target)
    device = f"this device has {_dotted(capability)}"
    if suffix == "a" and target != capability:
        text = f"runs on compute capability {_dotted(target)} alone, {device}: use a tier without the suffix 'a'"
    elif suffix == "f" and not (target[0] == capability[0] and target <= capability):
        text = f"runs on the family of compute capability {_dotted(target)} alone, {device}: use a tier without 'f'"
    elif capability < target:
        text = f"needs compute capability {_dotted(target)} or newer, {device}: use a newer GPU or an older tier"
    else:
        text = f"(PTX ISA {_dotted(tier.isa)}) fits: the driver reads up to {_dotted(isa)}, {device}"
        return Verdict(tier.name, True, f"PTX tier {tier.name} {text}")
    return Verdict(tier.name, False, f"PTX tier {tier.name} (target {tier.target}) {text}")


def _parse_target(target: str) -> tuple[Version, str]:
    """ "sm_90a" -> ((9, 0), "a"). Raises ValueError."""
    found = _TARGET.fullmatch(target)
    if found is None:
        raise ValueError(f"PTX target {target!r} is not understood")
    return (int(found[1]), int(found[2])), found[3]


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
