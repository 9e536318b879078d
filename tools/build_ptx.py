"""Compile `ptx/src/*.cu` to the PTX files that ds41rt ships, with one exactly pinned NVRTC; no GPU is needed.

    python tools/build_ptx.py           write ptx/TIER/NAME.ptx and ptx/manifest.json
    python tools/build_ptx.py --check   rebuild and compare byte for byte, compare every entry with its declaration,
                                        assemble every file for all targets

The compiler's output depends on nothing but the sources, so a difference is always somebody's change. Both tools come
from wheels (the extra `ptx`); ptxas may also be the one on PATH.
"""

import argparse
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from ds41rt.cu.kernel import KernelSpec
from ds41rt.cu.ptx import ENTRY_PREFIX, MANIFEST, entry_name, entry_types, parse_entries, parse_header
from ds41rt.kernels.registry import SPECS

PTX = Path(__file__).resolve().parents[1] / "ptx"
NVRTC_WHEEL, NVRTC_VERSION = "nvidia-cuda-nvrtc-cu12", "12.4.127"
PTXAS_WHEEL = "nvidia-cuda-nvcc-cu12"
# Unfused multiply and add, IEEE division and square root: a result must not depend on the compiler's mood.
OPTIONS = ("--fmad=false", "--std=c++17")
ASSEMBLE_FOR = ("sm_80", "sm_90", "sm_100", "sm_120", "sm_121")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(([^)]*)\)")
_PARAMETER = re.compile(r"(?:const\s+)?(?:unsigned\s+)?\w+\s*\*?\s*(?:__restrict__\s+)?(\w*)")
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class Target(NamedTuple):
    """A tier: its folder, the virtual architecture it is compiled for, the folder of its sources."""

    name: str
    arch: str
    sources: str


TIERS = (Target("sm_80", "compute_80", "src"),)


class BuildError(Exception):
    """The build cannot be done; the text says why."""


class Nvrtc:
    """The pinned compiler, through its C interface."""

    def __init__(self) -> None:
        lib = _wheel_file(NVRTC_WHEEL, "libnvrtc.so.12", NVRTC_VERSION)
        # NVRTC opens its builtins by bare name; once loaded by path they are found.
        ctypes.CDLL(str(lib.parent / "libnvrtc-builtins.so.12.4"), mode=ctypes.RTLD_GLOBAL)
        self._lib = ctypes.CDLL(str(lib))
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p

    def compile(self, source: Path, headers: dict[str, str], options: Sequence[str]) -> str:
        """PTX of one file. Raises `BuildError` with the compiler's log; warnings count as errors."""
        program = ctypes.c_void_p()
        names = (ctypes.c_char_p * len(headers))(*(n.encode() for n in headers))
        texts = (ctypes.c_char_p * len(headers))(*(t.encode() for t in headers.values()))
        text = source.read_bytes()
        self._ok(
            "create",
            self._lib.nvrtcCreateProgram(ctypes.byref(program), text, source.name.encode(), len(headers), texts, names),
        )
        try:
            flags = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
            failed = self._lib.nvrtcCompileProgram(program, len(options), flags)
            log = self._text(program, "ProgramLog").strip()
            if failed or log:
                raise BuildError(f"{source.name}:\n{log}")
            return self._text(program, "PTX")
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> str:
        size = ctypes.c_size_t()
        self._ok(what, getattr(self._lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        text = ctypes.create_string_buffer(size.value)
        self._ok(what, getattr(self._lib, f"nvrtcGet{what}")(program, text))
        return text.value.decode()

    def _ok(self, what: str, status: int) -> None:
        if status:
            raise BuildError(f"NVRTC {what}: {self._lib.nvrtcGetErrorString(status).decode()}")


def _wheel_file(wheel: str, name: str, version: str | None = None) -> Path:
    """The file `name` of an installed wheel, whose version must be `version` if one is given."""
    hint = "install the extra: pip install -e '.[ptx]'"
    try:
        found = metadata.distribution(wheel)
    except metadata.PackageNotFoundError:
        raise BuildError(f"{wheel} is not installed; {hint}") from None
    if version is not None and found.version != version:
        raise BuildError(f"{wheel} is {found.version}, this build is pinned to {version}; {hint}")
    for file in found.files or ():
        if file.name == name:
            return Path(str(found.locate_file(file)))
    raise BuildError(f"{wheel} {found.version} has no file {name}; {hint}")


def includes(source: Path, headers: dict[str, str]) -> list[str]:
    """Names of the headers that a source reaches, sorted. Raises `BuildError` for one that does not exist."""
    seen: set[str] = set()
    todo = [(source.name, source.read_text(encoding="utf-8"))]
    while todo:
        where, text = todo.pop()
        for name in _INCLUDE.findall(text):
            if name not in headers:
                raise BuildError(f'{where}: #include "{name}": there is no ptx/include/{name}')
            if name not in seen:
                seen.add(name)
                todo.append((name, headers[name]))
    return sorted(seen)


def build(root: Path = PTX) -> dict[str, str]:
    """Path under `ptx/` -> text of everything that is generated. Raises `BuildError` listing all failures."""
    nvrtc = Nvrtc()
    headers = {p.name: p.read_text(encoding="utf-8") for p in sorted((root / "include").glob("*.cuh"))}
    files: dict[str, str] = {}
    tiers = []
    errors = []
    for tier in TIERS:
        options = [f"--gpu-architecture={tier.arch}", *OPTIONS]
        modules: dict[str, Any] = {}
        header = None
        for source in sorted((root / tier.sources).glob("*.cu")):
            try:
                used = includes(source, headers)
                ptx = nvrtc.compile(source, headers, options)
            except BuildError as e:
                errors.append(str(e))
                continue
            header = parse_header(ptx)
            sources = {f"{tier.sources}/{source.name}": source.read_text(encoding="utf-8")}
            sources |= {f"include/{name}": headers[name] for name in used}
            modules[source.stem] = {
                "ptx_sha256": _digest(ptx),
                "sources": {name: _digest(text) for name, text in sources.items()},
                "entries": parse_entries(ptx),
            }
            files[f"{tier.name}/{source.stem}.ptx"] = ptx
        if header is None:
            errors.append(f"tier {tier.name}: nothing was compiled from {root / tier.sources}")
            continue
        (major, minor), target = header
        tiers.append(
            {"name": tier.name, "target": target, "isa": f"{major}.{minor}", "options": options, "modules": modules}
        )
    if errors:
        raise BuildError("\n".join(errors))
    manifest = {"toolchain": {"nvrtc": NVRTC_VERSION}, "tiers": tiers}
    files[MANIFEST] = json.dumps(manifest, indent=1) + "\n"
    return files


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def generated(root: Path) -> list[str]:
    """Paths under `ptx/` of the generated files that are there."""
    found = [p.relative_to(root).as_posix() for tier in TIERS for p in (root / tier.name).glob("*.ptx")]
    return sorted(found + ([MANIFEST] if (root / MANIFEST).exists() else []))


def write(root: Path, files: dict[str, str]) -> None:
    """Write what differs and remove what is not generated any more."""
    for name in set(generated(root)) - set(files):
        (root / name).unlink()
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != text.encode():
            path.write_bytes(text.encode())


def differences(root: Path, files: dict[str, str]) -> list[str]:
    """How the committed files differ from a fresh build, one sentence a file."""
    problems = [f"ptx/{name} is not generated by any source" for name in generated(root) if name not in files]
    for name, text in files.items():
        path = root / name
        if not path.exists():
            problems.append(f"ptx/{name} is missing")
        elif path.read_bytes() != text.encode():
            problems.append(f"ptx/{name} differs from a fresh build")
    return problems


def signature_problems(specs: Iterable[KernelSpec], entries: dict[str, tuple[str, ...]]) -> list[str]:
    """How declarations and PTX entries disagree, one sentence each."""
    problems = []
    declared = {entry_name(spec): spec for spec in specs}
    for name, types in entries.items():
        spec = declared.get(name)
        if spec is None:
            problems.append(f"entry {name} has no declaration {name.removeprefix(ENTRY_PREFIX)!r}")
            continue
        if spec.geometry is None:
            problems.append(f"entry {name}: kernel {spec.name} declares no launch geometry")
        if types != entry_types(spec):
            wanted = ", ".join(f"{p.name}: {t}" for p, t in zip(spec.params, entry_types(spec), strict=True))
            problems.append(f"entry {name} takes ({', '.join(types)}), kernel {spec.name} declares ({wanted})")
    for name, spec in declared.items():
        if spec.geometry is not None and name not in entries:
            problems.append(f"kernel {spec.name} declares a launch geometry, but there is no entry {name}")
    return problems


def source_problems(specs: Iterable[KernelSpec], source: str) -> list[str]:
    """Kernels of a source whose parameters are not named as declared: PTX would not show two swapped pointers."""
    problems = []
    declared = {entry_name(spec): [p.name for p in spec.params] for spec in specs}
    for name, params in _KERNEL.findall(_COMMENT.sub(" ", source)):
        found = [_PARAMETER.fullmatch(param.strip()) for param in params.split(",")]
        names = [match[1] if match else "?" for match in found]
        want = declared.get(name, [])
        # A parameter that a kernel does not use may have no name.
        if len(names) != len(want) or any(n not in ("", w) for n, w in zip(names, want, strict=True)):
            problems.append(f"kernel {name} takes ({', '.join(names)}), its declaration has ({', '.join(want)})")
    return problems


def find_ptxas() -> tuple[Path, list[str]]:
    """The assembler (the wheel's before the one on PATH) and those of `ASSEMBLE_FOR` that it knows."""
    try:
        ptxas = _wheel_file(PTXAS_WHEEL, "ptxas")
    except BuildError as e:
        on_path = shutil.which("ptxas")
        if on_path is None:
            raise BuildError(f"no ptxas: none on PATH, and {e}") from None
        ptxas = Path(on_path)
    usage = subprocess.run([ptxas, "--help"], capture_output=True, text=True, check=True).stdout
    return ptxas, [arch for arch in ASSEMBLE_FOR if f"'{arch}'" in usage]


def assemble(files: dict[str, str]) -> list[str]:
    """Assemble every PTX file for every target; one sentence a failure. Prints what was covered."""
    ptxas, archs = find_ptxas()
    version = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
    skipped = [arch for arch in ASSEMBLE_FOR if arch not in archs]
    with tempfile.TemporaryDirectory(prefix="ds41rt-ptx-") as work:
        jobs = []
        for name, text in files.items():
            if name.endswith(".ptx"):
                path = Path(work) / name.replace("/", "-")
                path.write_text(text, encoding="utf-8")
                target = parse_header(text)[1]
                jobs += [(name, path, arch) for arch in archs if _number(arch) >= _number(target)]

        def run(job: tuple[str, Path, str]) -> str:
            name, path, arch = job
            out = path.with_suffix(f".{arch}.cubin")
            done = subprocess.run(
                [ptxas, f"-arch={arch}", path, "-o", out], capture_output=True, text=True, check=False
            )
            return f"ptxas -arch={arch} {name}: {done.stderr.strip()}" if done.returncode else ""

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            problems = [text for text in pool.map(run, jobs) if text]
    unknown = f"; not known to it: {', '.join(skipped)}" if skipped else ""
    print(f"ptxas {version}: {len(jobs)} assemblies for {', '.join(archs)}{unknown}")
    return problems


def _number(arch: str) -> int:
    return int(re.sub(r"\D", "", arch))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="compile the kernels to the PTX files that ds41rt ships")
    parser.add_argument("--check", action="store_true", help="compare with a fresh build instead of writing")
    args = parser.parse_args(argv)
    try:
        files = build()
        entries = {e: t for n, text in files.items() if n.endswith(".ptx") for e, t in parse_entries(text).items()}
        problems = signature_problems(SPECS, entries)
        for source in sorted(PTX.glob("src*/*.cu")):
            problems += source_problems(SPECS, source.read_text(encoding="utf-8"))
        if args.check:
            problems += differences(PTX, files) + assemble(files)
        else:
            write(PTX, files)
    except BuildError as e:
        problems = [str(e)]
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        return 1
    print(
        f"{len(files) - 1} PTX files, {len(entries)} entries, NVRTC {NVRTC_VERSION}: "
        + ("checked" if args.check else "written")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
