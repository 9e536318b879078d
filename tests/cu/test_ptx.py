"""The shipped PTX: finding it, judging it against drivers and devices, and the tool that builds and checks it."""

import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_driver import write_ptx
from tiny_kernels import AXPY, GATHER, SCALE

from ds41rt.cu import ptx
from ds41rt.cu.kernel import Geometry
from ds41rt.cu.ptx import Selection, choose, judge, load_manifest, locate, parse_entries, parse_header
from ds41rt.errors import UnsupportedError
from ds41rt.kernels.registry import SPECS

ROOT = Path(__file__).resolve().parents[2]


def _load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_ptx", ROOT / "tools" / "build_ptx.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build_ptx = _load_tool()


def _merge(folder: Path, *tiers: tuple[str, str]) -> Path:
    """A PTX folder with the kernels `axpy` and `scale` in the first tier (ISA, target), `scale` alone in the others."""
    raw: list[dict[str, Any]] = []
    for i, (isa, target) in enumerate(tiers):
        write_ptx(folder, [AXPY, SCALE] if i == 0 else [SCALE], isa, target)
        raw += json.loads((folder / "manifest.json").read_text())["tiers"]
    (folder / "manifest.json").write_text(json.dumps({"toolchain": {"nvrtc": "0"}, "tiers": raw[::-1]}))
    return folder


# Finding and reading


def test_the_committed_files_are_found_and_are_what_the_manifest_describes() -> None:
    manifest = load_manifest()
    assert manifest.folder == locate()
    assert manifest.toolchain["nvrtc"] == build_ptx.NVRTC_VERSION
    baseline = manifest.tiers[0]
    assert (baseline.name, baseline.target, baseline.isa) == ("sm_80", "sm_80", (8, 4))
    entries: dict[str, tuple[str, ...]] = {}
    for module in baseline.modules.values():
        text = module.read().decode()
        assert parse_header(text) == ((8, 4), "sm_80")
        assert parse_entries(text) == module.entries
        entries.update(module.entries)
    assert "ds41_slot_table_set" in entries
    assert build_ptx.signature_problems(SPECS, entries) == []


def test_the_committed_files_belong_to_the_sources() -> None:
    """No compiler needed: the manifest holds the hash of every source and header that a file was made from."""
    raw = json.loads((ROOT / "ptx" / "manifest.json").read_text())
    headers = {p.name: p.read_text(encoding="utf-8") for p in (ROOT / "ptx" / "include").glob("*.cuh")}
    for tier in raw["tiers"]:
        sources = {p.stem for p in (ROOT / "ptx" / "src").glob("*.cu")}
        assert set(tier["modules"]) == sources, "run `make ptx`"
        for name, about in tier["modules"].items():
            used = build_ptx.includes(ROOT / "ptx" / "src" / f"{name}.cu", headers)
            want = {f"src/{name}.cu", *(f"include/{header}" for header in used)}
            found = {path: sha256((ROOT / "ptx" / path).read_bytes()).hexdigest() for path in want}
            assert about["sources"] == found, f"{name}: run `make ptx`"


def test_the_installed_package_comes_before_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "checkout" / "src" / "ds41rt"
    (package / "cu").mkdir(parents=True)
    monkeypatch.setattr(ptx, "__file__", str(package / "cu" / "ptx.py"))
    with pytest.raises(UnsupportedError, match=r"ptx_data and .*checkout/ptx; reinstall ds41rt, or run `make ptx`"):
        locate()
    checkout = write_ptx(tmp_path / "checkout" / "ptx", [SCALE])
    assert locate() == checkout
    installed = write_ptx(package / "ptx_data", [SCALE])
    assert locate() == installed
    assert load_manifest().folder == installed


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-10],
        lambda text: "[]",
        lambda text: text.replace('"isa": "8.4"', '"isa": "8"'),
        lambda text: text.replace('"target": "sm_80"', '"target": "sm80"'),
        lambda text: text.replace("ptx_sha256", "sha"),
        lambda text: text.replace('"tiers"', '"tires"'),
    ],
)
def test_a_damaged_manifest_is_refused_by_name(tmp_path: Path, damage: Callable[[str], str]) -> None:
    path = write_ptx(tmp_path, [SCALE]) / "manifest.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(UnsupportedError, match=re.escape(f"PTX manifest {path} cannot be used")):
        load_manifest(tmp_path)


def test_parsing_of_entries() -> None:
    text = """
.version 9.0
.target sm_90a, debug
.visible .entry plain(
	.param .u64 plain_param_0,
	.param .u32 plain_param_1
)
.maxntid 256, 1, 1
{ }
.weak .entry newer(
	.param .u64 .ptr .global .align 1 newer_param_0,
	.param .u64 .ptr .align 1 newer_param_1,
	.param .f32 newer_param_2,
	.param .align 8 .b8 newer_param_3[16]
)
{ }
.entry nothing()
{ }
.func (.param .b32 r) helper(.param .b32 x)
{ }
"""
    assert parse_header(text) == ((9, 0), "sm_90a")
    assert parse_entries(text) == {"plain": ("u64", "u32"), "newer": ("u64", "u64", "f32", "b8[16]"), "nothing": ()}
    with pytest.raises(ValueError, match=r"no \.version"):
        parse_header("nothing")


# Judging: drivers are CUDA versions (13000 = 13.0), devices are compute capabilities


@pytest.mark.parametrize(
    ("driver", "isa"),
    [
        (10020, (0, 0)),
        (11000, (7, 0)),
        (12040, (8, 4)),
        (12041, (8, 4)),
        (12060, (8, 5)),
        (12090, (8, 8)),
        (13000, (9, 0)),
        (13090, (9, 1)),
        (99000, (9, 1)),
    ],
)
def test_what_drivers_read(driver: int, isa: tuple[int, int]) -> None:
    assert ptx.newest_isa(driver) == isa


@pytest.mark.parametrize(
    ("isa", "target", "driver", "device", "text"),
    [
        ("8.4", "sm_80", 12040, (8, 0), None),
        ("8.4", "sm_80", 13000, (9, 0), None),
        ("8.4", "sm_80", 13000, (12, 1), None),
        ("9.0", "sm_90a", 13000, (9, 0), None),
        ("9.0", "sm_100f", 13000, (10, 3), None),
        ("8.4", "sm_80", 12030, (9, 0), "is PTX ISA 8.4, but the driver (CUDA 12.3) reads PTX ISA up to 8.3: install a "
         "driver for CUDA 12.4 (550) or newer"),
        ("8.4", "sm_80", 10020, (9, 0), "is PTX ISA 8.4, but the driver (CUDA 10.2) is too old: install a driver"),
        ("9.9", "sm_80", 13000, (9, 0), "reads PTX ISA up to 9.0: install a newer driver"),
        ("8.4", "sm_80", 13000, (7, 5), "needs compute capability 8.0 or newer, this device has 7.5"),
        ("8.4", "sm_90", 13000, (8, 9), "needs compute capability 9.0 or newer, this device has 8.9"),
        ("8.4", "sm_90a", 13000, (10, 0), "runs on compute capability 9.0 alone, this device has 10.0"),
        ("8.4", "sm_90a", 13000, (8, 0), "runs on compute capability 9.0 alone, this device has 8.0"),
        ("9.0", "sm_103f", 13000, (10, 0), "runs on the family of compute capability 10.3 alone, this device has 10.0"),
        ("9.0", "sm_100f", 13000, (12, 0), "runs on the family of compute capability 10.0 alone, this device has 12.0"),
    ],
)  # fmt: skip
def test_a_tier_is_judged_with_both_numbers(
    tmp_path: Path, isa: str, target: str, driver: int, device: tuple[int, int], text: str | None
) -> None:
    manifest = load_manifest(_merge(tmp_path, (isa, target)))
    verdict = judge(manifest.tiers[0], driver, device)
    assert verdict.accepted == (text is None)
    assert (text or "fits") in verdict.reason
    if text is not None:
        with pytest.raises(UnsupportedError, match=re.escape(text)):
            choose(manifest, driver, device)


def _tiers(selection: Selection) -> dict[str, str]:
    return {entry: module.tier for entry, module in selection.entries.items()}


def test_the_newest_tier_that_fits_is_taken_kernel_by_kernel(tmp_path: Path) -> None:
    manifest = load_manifest(_merge(tmp_path, ("8.4", "sm_80"), ("8.7", "sm_90a"), ("9.0", "sm_100")))
    assert [t.name for t in manifest.tiers] == ["sm_80", "sm_90a", "sm_100"]
    selection = choose(manifest, 13000, (9, 0))
    assert _tiers(selection) == {"ds41_axpy": "sm_80", "ds41_scale": "sm_90a"}
    assert [(v.tier, v.accepted) for v in selection.verdicts] == [("sm_80", True), ("sm_90a", True), ("sm_100", False)]
    assert _tiers(choose(manifest, 13000, (12, 0)))["ds41_scale"] == "sm_100"
    assert _tiers(choose(manifest, 12080, (12, 0)))["ds41_scale"] == "sm_80"  # the driver reads no 9.0
    assert _tiers(choose(manifest, 13000, (8, 6)))["ds41_scale"] == "sm_80"
    with pytest.raises(UnsupportedError, match=r"sm_80 .*7\.5.*sm_90a .*7\.5.*sm_100 .*7\.5"):
        choose(manifest, 13000, (7, 5))


# The tool


GPU_SCALE = replace(SCALE, geometry=lambda s, n_sms: Geometry((1, 1, 1), 32))


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({}, "kernel scale declares a launch geometry, but there is no entry ds41_scale"),
        ({"ds41_scale": ("u64", "u32")}, r"ds41_scale takes \(u64, u32\), .* \(x: u64, a: u32, n: u32\)"),
        ({"ds41_scale": ("u64", "f32", "u32")}, "takes"),
        ({"ds41_scale": ("u64", "u32", "u32"), "ds41_other": ()}, "entry ds41_other has no declaration 'other'"),
        ({"ds41_scale": ("u64", "u32", "u32"), "helper": ()}, "entry helper has no declaration"),
        (
            {"ds41_scale": ("u64", "u32", "u32"), "ds41_gather": ("u64", "u64", "u32", "u32")},
            "gather declares no launch",
        ),
    ],
)
def test_declarations_and_entries_that_differ(entries: dict[str, tuple[str, ...]], text: str) -> None:
    (problem,) = build_ptx.signature_problems([GPU_SCALE, AXPY, GATHER], entries)
    assert re.search(text, problem)


def test_declarations_and_entries_that_agree() -> None:
    assert build_ptx.signature_problems([GPU_SCALE, AXPY], {"ds41_scale": ("u64", "u32", "u32")}) == []


@pytest.mark.parametrize(
    ("params", "fine"),
    [
        ("int* __restrict__ x, // [n]\n int a, u32 n", True),
        ("int *x,\n    int a, unsigned int n", True),
        ("int* x, int /* a */, const unsigned n", True),
        ("int* a, int x, u32 n", False),
        ("int* x, u32 n, int a", False),
        ("int* x, int a", False),
        ("int* x, int a, u32 n, u32 m", False),
        ("Struct<int, 2> x, int a, u32 n", False),
    ],
)
def test_parameters_of_a_source_have_the_declared_names(params: str, fine: bool) -> None:
    source = f'extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) ds41_scale({params}) {{\n}}\n'
    assert (build_ptx.source_problems([GPU_SCALE], source) == []) is fine
    assert build_ptx.source_problems([AXPY], source) != []


def test_differences_name_the_file(tmp_path: Path) -> None:
    files = {"sm_80/a.ptx": "text a", "sm_80/b.ptx": "text b", "manifest.json": "{}"}
    assert sorted(build_ptx.differences(tmp_path, files)) == [f"ptx/{name} is missing" for name in sorted(files)]
    build_ptx.write(tmp_path, files)
    assert build_ptx.differences(tmp_path, files) == []
    (tmp_path / "sm_80" / "a.ptx").write_text("text A")
    (tmp_path / "sm_80" / "old.ptx").write_text("old")
    assert build_ptx.differences(tmp_path, files) == [
        "ptx/sm_80/old.ptx is not generated by any source",
        "ptx/sm_80/a.ptx differs from a fresh build",
    ]
    build_ptx.write(tmp_path, files)
    assert build_ptx.differences(tmp_path, files) == []


def test_includes_are_followed(tmp_path: Path) -> None:
    source = tmp_path / "k.cu"
    source.write_text('#include "a.cuh"\n  #  include "b.cuh"\n#include <cuda_fp16.h>\n')
    headers = {"a.cuh": '#include "c.cuh"', "b.cuh": "", "c.cuh": '#include "a.cuh"', "unused.cuh": ""}
    assert build_ptx.includes(source, headers) == ["a.cuh", "b.cuh", "c.cuh"]
    del headers["c.cuh"]
    with pytest.raises(build_ptx.BuildError, match=r'a\.cuh: #include "c\.cuh": there is no ptx/include/c\.cuh'):
        build_ptx.includes(source, headers)
