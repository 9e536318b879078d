"""The reader of one file: nothing that the header claims is believed before it was checked."""

import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shard_files import Header, encode, open_fds, pack, random_bytes

from ds41rt.checkpoint.safetensors import MAX_HEADER_NBYTES, Shard, encode_header
from ds41rt.errors import CheckpointError

A, B, C = random_bytes(24, 1), random_bytes(16, 2), random_bytes(5, 3)
GOOD = {"a": ("F32", [2, 3], A), "b": ("BF16", [8], B), "c": ("F8_E8M0", [5], C)}
DATA = A + B + C


def good_header() -> Header:
    return {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [8], "data_offsets": [24, 40]},
        "c": {"dtype": "F8_E8M0", "shape": [5], "data_offsets": [40, 45]},
    }


def write(tmp_path: Path, raw: bytes) -> Path:
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    return path


def read(shard: Shard, name: str) -> bytes:
    info = shard.tensors[name]
    out = np.full(info.nbytes, 0xA5, np.uint8)
    shard.read_at(info.off, out, name)
    return out.tobytes()


def refused(path: Path) -> str:
    """The message of the refusal; no descriptor may stay open."""
    before = open_fds()
    with pytest.raises(CheckpointError) as error:
        Shard.open(path)
    assert open_fds() == before
    assert str(path) in str(error.value)
    return str(error.value)


def test_reads_what_was_written(tmp_path: Path) -> None:
    shard = Shard.open(write(tmp_path, encode(good_header(), DATA)))
    assert {n: read(shard, n) for n in shard.tensors} == {"a": A, "b": B, "c": C}
    assert [(t.dtype, t.shape) for t in shard.tensors.values()] == [("F32", (2, 3)), ("BF16", (8,)), ("F8_E8M0", (5,))]
    shard.close()


def test_own_header_is_the_same_layout(tmp_path: Path) -> None:
    raw = encode_header({n: (d, tuple(s)) for n, (d, s, _) in GOOD.items()})
    assert len(raw) % 8 == 0
    shard = Shard.open(write(tmp_path, raw + DATA))
    assert {n: read(shard, n) for n in shard.tensors} == {"a": A, "b": B, "c": C}
    shard.close()


def test_empty_tensors_and_no_tensors_are_legal(tmp_path: Path) -> None:
    shard = Shard.open(write(tmp_path, pack({"e": ("F32", [0, 7], b""), "a": GOOD["a"], "z": ("I8", [0], b"")})))
    assert read(shard, "e") == b""
    assert read(shard, "a") == A
    shard.close()
    Shard.open(write(tmp_path, encode({}, b""))).close()


def test_cut_at_every_length(tmp_path: Path) -> None:
    raw = encode(good_header(), DATA)
    data_off = len(raw) - len(DATA)
    ends = {"a": data_off + 24, "b": data_off + 40, "c": data_off + 45}
    for length in range(len(raw)):
        message = refused(write(tmp_path, raw[:length]))
        if length < data_off:
            missing = 8 - length if length < 8 else data_off - length
            assert f"cut in the header: {missing} of its" in message
        else:
            name = next(n for n in "abc" if length < ends[n])
            nbytes = len(GOOD[name][2])
            assert f"tensor '{name}'" in message
            assert (
                f"last {min(ends[name] - length, nbytes)} bytes are missing ({len(raw) - length} bytes in all)"
                in message
            )


def _set(name: str, **values: Any) -> Callable[[Header], None]:
    return lambda h: h[name].update(values)


HEADER_FAULTS: list[tuple[str, Callable[[Header], None], str]] = [
    ("begin after end", _set("b", data_offsets=[40, 24]), "'b'"),
    ("offset 2**63", _set("c", data_offsets=[40, 2**63]), "'c'"),
    ("offset 2**63 - 1", _set("c", data_offsets=[2**63 - 6, 2**63 - 1]), "gap"),
    ("offset 2**64", _set("c", data_offsets=[2**64, 2**64 + 5]), "'c'"),
    ("offset wraps to a legal one", _set("c", data_offsets=[2**64 + 40, 2**64 + 45]), "'c'"),
    ("negative offset", _set("a", data_offsets=[-24, 0]), "'a'"),
    ("fractional offset", _set("a", data_offsets=[0.0, 24.0]), "'a'"),
    ("offset as text", _set("a", data_offsets=["0", "24"]), "'a'"),
    ("offset as truth value", _set("a", data_offsets=[False, 24]), "'a'"),
    ("one offset", _set("a", data_offsets=[0]), "'a'"),
    ("three offsets", _set("a", data_offsets=[0, 12, 24]), "'a'"),
    ("offsets null", _set("a", data_offsets=None), "'a'"),
    ("overlap by one", _set("b", data_offsets=[23, 39]), "overlaps 'a'"),
    ("same place", _set("b", data_offsets=[0, 16]), "overlaps"),
    ("gap of one", _set("c", data_offsets=[41, 46]), "gap of 1 bytes after 'b'"),
    ("gap at the start", lambda h: h.pop("a"), "gap of 24 bytes after '(start)'"),
    ("tensor left out at the end", lambda h: h.pop("c"), "5 bytes after the last tensor"),
    ("smaller dtype", _set("a", dtype="BF16"), "needs 12 bytes, the header gives it 24"),
    ("larger dtype", _set("b", dtype="F32"), "needs 32 bytes, the header gives it 16"),
    ("unknown dtype", _set("b", dtype="F4"), "unknown dtype 'F4'"),
    ("dtype null", _set("b", dtype=None), "'b'"),
    ("shape too large", _set("c", shape=[6]), "needs 6 bytes"),
    ("shape with other block", _set("a", shape=[1, 1]), "needs 4 bytes"),
    ("negative dimensions", _set("a", shape=[-2, -3]), "'a'"),
    ("dimension 2**64", _set("a", shape=[2**64, 3]), "'a'"),
    ("product wraps to the right size", _set("a", shape=[2**62 + 6]), "'a'"),
    ("shape as text", _set("a", shape="23"), "'a'"),
    ("shape is missing", lambda h: h["a"].pop("shape"), "'a'"),
    ("unknown key", _set("a", stride=[1]), "'a'"),
    ("entry is a list", lambda h: h.update(a=[1]), "'a'"),
]


@pytest.mark.parametrize(("change", "says"), [f[1:] for f in HEADER_FAULTS], ids=[f[0] for f in HEADER_FAULTS])
def test_header_fault_is_refused(tmp_path: Path, change: Callable[[Header], None], says: str) -> None:
    header = good_header()
    change(header)
    assert says in refused(write(tmp_path, encode(header, DATA)))


TEXT = json.dumps(good_header())
RAW_FAULTS: list[tuple[str, bytes]] = [
    ("duplicate name", encode(TEXT.replace('"b"', '"a"').encode(), DATA)),
    ("duplicate key in an entry", encode(TEXT.replace('"shape": [8]', '"shape": [8], "shape": [8]').encode(), DATA)),
    ("no JSON", encode(b"x" * 40, DATA)),
    ("two values", encode(TEXT.encode() + b"{}", DATA)),
    ("a list", encode(b"[]", b"")),
    ("not UTF-8", encode(TEXT.replace("pt", "\udcff").encode("utf-8", "surrogateescape"), DATA)),
    ("NaN", encode(TEXT.replace("[8]", "[NaN]").encode(), DATA)),
    ("a number of 5,000 digits", encode(TEXT.replace("[8]", "[" + "8" * 5000 + "]").encode(), DATA)),
    ("nested 100,000 deep", encode(b"[" * 100_000, DATA)),
    ("trailing byte", encode(TEXT.encode(), DATA + b"\1")),
    ("header length 0", bytes(8) + TEXT.encode()),
    ("header longer than the file", (2**20).to_bytes(8, "little") + TEXT.encode() + DATA),
    ("header length over the limit", (MAX_HEADER_NBYTES + 1).to_bytes(8, "little") + TEXT.encode() + DATA),
    ("header length 2**63", (2**63).to_bytes(8, "little") + TEXT.encode() + DATA),
    ("header length 2**64 - 1", (2**64 - 1).to_bytes(8, "little") + TEXT.encode() + DATA),
    (
        "header length one short",
        encode(TEXT.encode(), DATA).replace(bytes([len(TEXT) % 256]), bytes([len(TEXT) % 256 - 1]), 1),
    ),
]


@pytest.mark.parametrize("raw", [r for _, r in RAW_FAULTS], ids=[n for n, _ in RAW_FAULTS])
def test_raw_fault_is_refused(tmp_path: Path, raw: bytes) -> None:
    refused(write(tmp_path, raw))


def test_any_changed_header_byte_is_refused_or_harmless(tmp_path: Path) -> None:
    raw = encode(good_header(), DATA)
    n_refused = 0
    for at in range(len(raw) - len(DATA)):
        for mask in (1, 2, 4, 16, 0x80):
            path = write(tmp_path, raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1 :])
            try:
                shard = Shard.open(path)
            except CheckpointError:
                n_refused += 1
                continue
            spans = [(t.off, t.off + t.nbytes) for t in shard.tensors.values()]
            assert spans[-1][1] == shard.size
            assert all(end == begin for (_, end), (begin, _) in pairwise(spans))
            shard.close()
    assert n_refused > 500


def test_missing_file_and_directory_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "none.safetensors")
    refused(tmp_path)


def test_far_offsets_in_a_sparse_file(tmp_path: Path) -> None:
    """A tensor of more than 2 GiB that begins past 4 GiB, and one behind it."""
    filler, big, tail = 2**32 + 12345, 2**31 + 777, 4099
    header = {
        "filler": {"dtype": "I8", "shape": [filler], "data_offsets": [0, filler]},
        "big": {"dtype": "I8", "shape": [big], "data_offsets": [filler, filler + big]},
        "tail": {"dtype": "I8", "shape": [tail], "data_offsets": [filler + big, filler + big + tail]},
    }
    path = write(tmp_path, encode(header, b""))
    data_off = path.stat().st_size
    stamps = {0: random_bytes(64, 4), 2**31 - 32: random_bytes(64, 5), big - 64: random_bytes(64, 6)}
    end = random_bytes(tail, 7)
    with path.open("r+b") as f:
        f.truncate(data_off + filler + big + tail)
        for off, stamp in stamps.items():
            f.seek(data_off + filler + off)
            f.write(stamp)
        f.seek(data_off + filler + big)
        f.write(end)
    shard = Shard.open(path)
    info = shard.tensors["big"]
    assert (info.off, info.nbytes) == (data_off + filler, big)
    for off, stamp in stamps.items():
        out = np.full(64, 0xA5, np.uint8)
        shard.read_at(info.off + off, out, "big")
        assert out.tobytes() == stamp
    assert read(shard, "tail") == end
    shard.close()
    os.truncate(path, data_off + filler + big + tail - 1)
    assert "last 1 bytes are missing" in refused(path)


@pytest.mark.parametrize("tail", [0, 1, 511])
def test_every_alignment_reads_the_same_bytes(tmp_path: Path, tail: int) -> None:
    """A run of tensors at the end of files of k * 512 + {0, 1, 511} bytes, at every residue of its offset."""
    for residue in range(0, 512, 1 if tail == 1 else 37):
        body = random_bytes(600 + residue, residue)
        probe = len(pack({"pad": ("I8", [1000], bytes(1000)), "w": ("I8", [len(body)], body)}))
        pad = 1000 + (tail - probe) % 512
        path = write(tmp_path, pack({"pad": ("I8", [pad], random_bytes(pad, 9)), "w": ("I8", [len(body)], body)}))
        assert path.stat().st_size % 512 == tail
        shard = Shard.open(path)
        assert read(shard, "w") == body
        shard.close()


def test_reads_continue_after_partial_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard.open(write(tmp_path, pack(GOOD)))
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, bufs, off: whole(fd, [bufs[0][:7]], off))
    assert {n: read(shard, n) for n in shard.tensors} == {"a": A, "b": B, "c": C}
    shard.close()


def test_file_that_shrinks_after_open(tmp_path: Path) -> None:
    path = write(tmp_path, pack(GOOD))
    shard = Shard.open(path)
    os.truncate(path, path.stat().st_size - 3)
    with pytest.raises(CheckpointError, match="c: the file ends 3 bytes too early"):
        read(shard, "c")
    assert read(shard, "b") == B
    shard.close()


def test_read_error_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard.open(write(tmp_path, pack(GOOD)))

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match=r"b: read at offset .* failed: Input/output error"):
        read(shard, "b")
    monkeypatch.undo()
    shard.close()


def test_close_is_idempotent_and_final(tmp_path: Path) -> None:
    before = open_fds()
    shard = Shard.open(write(tmp_path, pack(GOOD)))
    shard.close()
    shard.close()
    assert open_fds() == before
    with pytest.raises(CheckpointError, match="closed"):
        read(shard, "a")
