"""Writes and takes apart safetensors files without the code under test."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Header = dict[str, Any]


def encode(header: Header | bytes, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def take_apart(path: Path) -> tuple[Header, bytes]:
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + n]), raw[8 + n :]


def tensor_bytes(path: Path, name: str) -> bytes:
    header, data = take_apart(path)
    begin, end = header[name]["data_offsets"]
    return data[begin:end]


def pack(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    """A well-formed file of (dtype, shape, bytes), in this order."""
    header: Header = {}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return encode(header, data)


def unpack(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """The inverse of `pack`, in file order."""
    header, data = take_apart(path)
    header.pop("__metadata__", None)
    ordered = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    return {n: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])]) for n, e in ordered}


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    value = json.loads(path.read_text("utf-8"))
    change(value)
    path.write_text(json.dumps(value), "utf-8")


def copy_of(directory: Path, to: Path) -> Path:
    return Path(shutil.copytree(directory, to / "ckpt", copy_function=shutil.copyfile))


def random_bytes(n: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(1, 255, n, np.uint8).tobytes()


def open_fds() -> set[str]:
    return {p.name for p in Path("/proc/self/fd").iterdir()} if Path("/proc/self/fd").exists() else set()
