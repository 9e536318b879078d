"""One safetensors file: a strict header check, then positional reads into the caller's memory.

Everything that the header says is checked against the file's size before any of it is used. Stricter than most
readers, as the format's own definition is: tensors must tile the data section, so gaps and trailing bytes are refused
as well as overlaps (a hole is what a corrupt offset looks like). Knows nothing of the model.
"""

import json
import math
import os
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ds41rt.checkpoint.json_file import parse_json
from ds41rt.errors import CheckpointError, CheckpointReadError

DTYPE_NBYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
# The format's own limit; a length beyond it is a damaged file, not a large model.
MAX_HEADER_NBYTES = 100_000_000

_Size = Annotated[int, Field(ge=0, le=2**63 - 1)]


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    dtype: str
    shape: list[_Size]
    data_offsets: Annotated[list[_Size], Field(min_length=2, max_length=2)]


_HEADER = TypeAdapter(dict[str, _Entry])


class TensorInfo(NamedTuple):
    """Where a tensor's bytes are: `off` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    off: int
    nbytes: int


class Shard:
    """An open safetensors file. Reads are positional, so threads share one without locks; the owner closes it."""

    def __init__(self, path: Path, fd: int, size: int, tensors: dict[str, TensorInfo]) -> None:
        self.path = path
        self.fd = fd
        self.size = size
        self.tensors = tensors

    @classmethod
    def open(cls, path: Path) -> "Shard":
        """Open and check a file; `CheckpointError` names the file, the tensor and, if it is cut, the missing bytes."""
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing or not a regular file")
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise CheckpointError(f"{path}: cannot be opened: {e.strerror}") from e
        try:
            size = os.fstat(fd).st_size
            return cls(path, fd, size, _read_header(path, fd, size))
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Close the file; a second call does nothing. No read may be in flight."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def read_at(self, off: int, out: NDArray[np.uint8], what: str) -> None:
        """Fill the contiguous byte array `out` from file offset `off`; `what` names the bytes in errors."""
        if self.fd < 0:
            raise CheckpointError(f"{self.path}: {what} cannot be read, the checkpoint is closed")
        _read_exactly(self.path, self.fd, off, out, what)


def _read_exactly(path: Path, fd: int, off: int, out: NDArray[np.uint8], what: str) -> None:
    done, want = 0, out.nbytes
    while done < want:
        try:
            n = os.preadv(fd, [out[done:].data], off + done)  # the kernel gives at most 2 GiB a call
        except OSError as e:
            raise CheckpointReadError(f"{path}: {what}: read at offset {off + done} failed: {e.strerror}") from e
        if n == 0:
            raise CheckpointError(
                f"{path}: {what}: the file ends {want - done} bytes too early, nothing is left at offset {off + done}"
            )
        done += n


def _read_header(path: Path, fd: int, size: int) -> dict[str, TensorInfo]:
    if size < 8:
        raise CheckpointError(f"{path}: cut in the header: {8 - size} of its first 8 bytes are missing")
    prefix = np.empty(8, np.uint8)
    _read_exactly(path, fd, 0, prefix, "header length")
    header_nbytes = int.from_bytes(prefix.tobytes(), "little")
    if header_nbytes > MAX_HEADER_NBYTES:
        raise CheckpointError(f"{path}: header length {header_nbytes} is beyond the limit of {MAX_HEADER_NBYTES}")
    if 8 + header_nbytes > size:
        missing = 8 + header_nbytes - size
        raise CheckpointError(f"{path}: cut in the header: {missing} of its {header_nbytes} bytes are missing")
    raw = np.empty(header_nbytes, np.uint8)
    _read_exactly(path, fd, 8, raw, "header")
    header = parse_json(raw.tobytes(), f"{path}: header")
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: header: must be a JSON object, is a {type(header).__name__}")
    header.pop("__metadata__", None)
    try:
        entries = _HEADER.validate_python(header)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        name, *rest = first["loc"]
        where = ".".join(map(str, rest))
        raise CheckpointError(f"{path}: tensor {name!r}: {where} {first['input']!r}: {first['msg']}") from e
    return _place(path, entries, 8 + header_nbytes, size)


def _place(path: Path, entries: dict[str, _Entry], data_off: int, size: int) -> dict[str, TensorInfo]:
    """Check sizes, tiling and file length; the tensors in file order."""
    tensors: dict[str, TensorInfo] = {}
    expected_begin, previous = 0, "(start)"
    for name, e in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = e.data_offsets
        if begin > end:
            raise CheckpointError(f"{path}: tensor {name!r}: begins at {begin}, after its end {end}")
        if e.dtype not in DTYPE_NBYTES:
            raise CheckpointError(f"{path}: tensor {name!r}: unknown dtype {e.dtype!r}")
        nbytes = math.prod(e.shape) * DTYPE_NBYTES[e.dtype]
        if nbytes != end - begin:
            raise CheckpointError(
                f"{path}: tensor {name!r}: {e.dtype} {e.shape} needs {nbytes} bytes, the header gives it {end - begin}"
            )
        if begin != expected_begin:
            fault = "overlaps" if begin < expected_begin else f"leaves a gap of {begin - expected_begin} bytes after"
            raise CheckpointError(f"{path}: tensor {name!r}: [{begin}, {end}) {fault} {previous!r}")
        tensors[name] = TensorInfo(e.dtype, tuple(e.shape), data_off + begin, nbytes)
        expected_begin, previous = end, name
    file_end = data_off + expected_begin
    if file_end > size:
        name, t = next((n, t) for n, t in tensors.items() if t.off + t.nbytes > size)
        missing = t.off + t.nbytes - size
        raise CheckpointError(
            f"{path}: cut: tensor {name!r} needs file bytes [{t.off}, {t.off + t.nbytes}), its last "
            f"{min(missing, t.nbytes)} bytes are missing ({file_end - size} bytes in all)"
        )
    if file_end < size:
        raise CheckpointError(f"{path}: {size - file_end} bytes after the last tensor {previous!r} belong to nothing")
    return tensors


def encode_header(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """The bytes before the data section for tensors (dtype, shape) stored in this order without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    off = 0
    for name, (dtype, shape) in tensors.items():
        end = off + math.prod(shape) * DTYPE_NBYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [off, end]}
        off = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data section starts 8-byte aligned
    return len(text).to_bytes(8, "little") + text
