"""Direct and cached reads give the file's bytes, whatever the offsets, the file system and the threads do."""

import errno
import json
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from direct_rules import Call, DirectRules
from numpy.typing import NDArray
from shard_files import (
    Header,
    copy_of,
    edit_json,
    encode,
    open_fds,
    pack,
    random_bytes,
    take_apart,
    tensor_bytes,
    unpack,
)

from ds41rt.checkpoint import direct
from ds41rt.checkpoint.checkpoint import INDEX_FILE, Checkpoint
from ds41rt.checkpoint.direct import PART_NBYTES, DirectReader, DirectReads
from ds41rt.checkpoint.safetensors import Shard
from ds41rt.checkpoint.synth import synthesize
from ds41rt.engine import Engine
from ds41rt.errors import CheckpointError, CheckpointReadError, InputError, UnsupportedError

GUARD = 64
LAST = "layers.3.ffn.experts.15.w3.scale"
MODES: tuple[DirectReads, ...] = ("auto", "on", "off")


class DirectOnly(Shard):
    """Refuses what a direct read must not need."""

    def read_at(self, off: int, out: NDArray[np.uint8], what: str) -> None:
        raise AssertionError(f"{what}: {out.size} bytes at {off} went through the page cache")


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """(name, bytes, class) -> an open file with these bytes; closed after the test."""
    opened: list[Shard] = []

    def make(name: str, data: bytes, kind: type[Shard] = Shard) -> Shard:
        path = tmp_path / name
        path.write_bytes(data)
        opened.append(kind(path, os.open(path, os.O_RDONLY), len(data), {}))
        return opened[-1]

    yield make
    for s in opened:
        s.close()


def shard_of(directory: Path, name: str) -> Path:
    file: str = json.loads((directory / INDEX_FILE).read_text("utf-8"))["weight_map"][name]
    return directory / file


def need_direct(directory: Path) -> None:
    """Skip where the file system under `directory`, or the platform, has no direct reads at all."""
    if not hasattr(os, "O_DIRECT"):
        pytest.skip("this platform has no O_DIRECT")
    path = directory / "probe"
    path.write_bytes(random_bytes(65536, 1))
    fd = -1
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        with mmap.mmap(-1, 65536) as window:
            assert os.preadv(fd, [window], 0) == 65536
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        pytest.skip(f"the file system of {directory} refuses O_DIRECT: {e}")
    finally:
        if fd >= 0:
            os.close(fd)


@pytest.fixture(params=["system", "rules"])
def file_system(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Direct reads by this machine's own file system, and by the rules alone."""
    if request.param == "system":
        need_direct(tmp_path)
    else:
        DirectRules(monkeypatch, 4096)


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> DirectRules:
    return DirectRules(monkeypatch)


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks instead of megabytes, so that short extents take several."""
    monkeypatch.setattr(direct, "_BOUNCE_NBYTES", 8192)


def room(nbytes: int, address: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Memory full of 0xA5, and `nbytes` inside it at `address` mod 4096, with a guard on both sides."""
    memory = np.full(nbytes + 2 * 4096 + 2 * GUARD, 0xA5, np.uint8)
    begin = GUARD + (address - memory.ctypes.data - GUARD) % 4096
    return memory, memory[begin : begin + nbytes]


def check(reader: DirectReader, shard: Shard, data: bytes, off: int, nbytes: int, address: int = 0) -> None:
    """The extent arrives and nothing beside it is touched."""
    memory, out = room(nbytes, address)
    reader.read(shard, off, out, "extent")
    assert out.tobytes() == data[off : off + nbytes], (off, nbytes, address)
    assert np.count_nonzero(memory == 0xA5) == memory.size - nbytes + out.tobytes().count(0xA5), (off, nbytes, address)


@pytest.mark.usefixtures("file_system", "small_windows")
@pytest.mark.parametrize("tail", [0, 1, 511])
def test_every_residue(shard: Callable[..., Shard], tail: int) -> None:
    """Case 42: extents that end with the file and inside it, in a file of k * 512 + tail bytes."""
    data = random_bytes(50 * 512 + tail, tail)
    with_cache, without = shard("a", data), shard("b", data, DirectOnly)
    direct_reader, cached = DirectReader([without], "on"), DirectReader([with_cache], "off")
    for residue in range(512):
        off = 512 * (residue % 17) + residue
        to_end = len(data) - off
        address = residue * 8 % 4096
        check(direct_reader, without, data, off, to_end, address)
        check(direct_reader, without, data, off, 9000 + residue, 0)
        check(cached, with_cache, data, off, to_end, address)
    for off, nbytes in ((0, 1), (0, len(data)), (4096, 4096), (4095, 2), (4096, 12288), (8192, len(data) - 8192)):
        check(direct_reader, without, data, off, nbytes)
    check(direct_reader, without, data, len(data) - 1, 1, 77)
    direct_reader.close()
    cached.close()


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("unit", [512, 1])
def test_short_reads(shard: Callable[..., Shard], rules: DirectRules, unit: int) -> None:
    """Reads that come back with any number of bytes, odd ones and none at all included."""
    rng = np.random.default_rng(7)
    data = random_bytes(70_001, 3)
    file = shard("a", data)
    reader = DirectReader([file], "on")
    rules.give = lambda call: int(rng.integers(0, call.nbytes // unit, endpoint=True)) * unit
    for _ in range(500):
        off = int(rng.integers(len(data)))
        check(reader, file, data, off, int(rng.integers(1, len(data) - off + 1)), int(rng.integers(4096)))
    reader.close()


def test_aligned_extents_are_read_in_place(shard: Callable[..., Shard], rules: DirectRules) -> None:
    data = random_bytes(100_000, 4)
    file = shard("a", data, DirectOnly)
    reader = DirectReader([file], "on")
    memory = np.frombuffer(mmap.mmap(-1, 65536), np.uint8)
    rules.calls.clear()
    reader.read(file, 8192, memory[:20_000], "extent")
    assert memory[:20_000].tobytes() == data[8192 : 8192 + 20_000]
    in_place, rest = rules.calls
    assert (in_place.off, in_place.address, in_place.nbytes) == (8192, memory.ctypes.data, 16384)
    assert (rest.off, rest.nbytes) == (8192 + 16384, 4096)
    # In step with the file from the second window on: [8192, 8192 + 4096) is enough to get there.
    for off, begin in ((8192, 1), (8191, 0)):
        rules.calls.clear()
        reader.read(file, off, memory[begin : begin + 20_000], "extent")
        (call,) = rules.calls
        assert not memory.ctypes.data <= call.address < memory.ctypes.data + memory.size
    reader.close()


@pytest.mark.parametrize("align", [1, 512, 4096, 16384, 65536])
@pytest.mark.parametrize("size", [100, 4096, 65536, 300_001])
@pytest.mark.parametrize("of", ["both", "file", "memory"])
def test_finds_the_alignment(shard: Callable[..., Shard], rules: DirectRules, align: int, size: int, of: str) -> None:
    rules.align = 512 if of == "memory" else align
    rules.align_address = 512 if of == "file" else align
    data = random_bytes(size, align)
    file = shard("a", data, DirectOnly)
    reader = DirectReader([file], "on")
    for off in (0, size // 3, size - 1):
        for address in (0, 512, 1):
            check(reader, file, data, off, size - off, address)
    reader.close()


@pytest.mark.parametrize("kind", ["open", "read", "alignment", "platform"])
def test_a_file_system_without_direct_reads(
    shard: Callable[..., Shard],
    rules: DirectRules,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if kind == "open":
        rules.open_errno = errno.EINVAL
    elif kind == "read":
        rules.refuse = lambda call: errno.EINVAL
    elif kind == "alignment":
        rules.align = 1 << 20
    else:
        monkeypatch.setattr(direct, "_O_DIRECT", 0)
    data = random_bytes(9000, 5)
    files = [shard("a", data), shard("b", data)]
    before = open_fds()
    with pytest.raises(UnsupportedError, match=r"/a: cannot be read directly \(.*\); use direct_reads auto or off"):
        DirectReader(files, "on")
    assert open_fds() == before
    with caplog.at_level("INFO", "ds41rt"):
        reader = DirectReader(files, "auto")
        for file in files:
            check(reader, file, data, 100, 8000)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("ds41rt.checkpoint", "INFO")
    why = "this platform has no O_DIRECT" if kind == "platform" else "Invalid argument"
    assert record.getMessage() == f"no direct reads n_files=2 first={str(files[0].path)!r} why={why!r}"
    reader.close()
    assert open_fds() == before


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT])
@pytest.mark.usefixtures("small_windows")
def test_a_region_that_refuses(
    shard: Callable[..., Shard], rules: DirectRules, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of an extent: that file is read through the page cache from there on, the other one is not."""
    data = random_bytes(60_000, 6)
    bad, good = shard("bad", data), shard("good", data, DirectOnly)
    rules.refuse = lambda call: code if call.path.endswith("bad") and call.off >= 32768 else 0
    strict, lenient = DirectReader([bad, good], "on"), DirectReader([bad, good], "auto")
    out = np.empty(50_000, np.uint8)
    for _ in range(2):
        with pytest.raises(CheckpointReadError, match=r"/bad: extent: direct read of 50000 bytes at offset 7 refused"):
            strict.read(bad, 7, out, "extent")
        check(strict, good, data, 7, 50_000)
    with caplog.at_level("INFO", "ds41rt"):
        check(lenient, bad, data, 7, 20_000)
        for _ in range(3):
            check(lenient, bad, data, 7, 50_000)
            check(lenient, good, data, 7, 50_000)
        rules.calls.clear()
        check(lenient, bad, data, 7, 20_000)
        assert rules.calls == []
    (record,) = caplog.records
    assert (record.levelname, record.getMessage().split(" file=")[0]) == ("WARNING", "direct reads given up")
    assert "/bad" in record.getMessage()
    strict.close()
    lenient.close()


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_disk_error_is_no_refusal(shard: Callable[..., Shard], rules: DirectRules, mode: DirectReads) -> None:
    data = random_bytes(60_000, 6)
    file = shard("a", data, DirectOnly)
    reader = DirectReader([file], mode)
    failing = [errno.EIO, errno.EIO]
    rules.refuse = lambda call: failing.pop() if failing else 0
    for _ in range(2):
        with pytest.raises(
            CheckpointReadError, match="/a: extent: direct read of 500 bytes at offset 99 failed: "
        ) as e:
            reader.read(file, 99, np.empty(500, np.uint8), "extent")
        assert isinstance(e.value, OSError)
        assert isinstance(e.value.__cause__, OSError)
    check(reader, file, data, 99, 500)
    reader.close()


def test_a_disk_error_in_the_page_cache(shard: Callable[..., Shard], monkeypatch: pytest.MonkeyPatch) -> None:
    file = shard("a", random_bytes(1000, 6))
    reader = DirectReader([file], "off")

    def fail(fd: int, buffers: Any, off: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointReadError, match="/a: extent: read at offset 99 failed: Input/output error"):
        reader.read(file, 99, np.empty(500, np.uint8), "extent")
    reader.close()


@pytest.mark.usefixtures("file_system", "small_windows")
@pytest.mark.parametrize("mode", MODES)
def test_a_file_cut_after_open(shard: Callable[..., Shard], mode: DirectReads) -> None:
    data = random_bytes(40_000, 8)
    file = shard("a", data)
    reader = DirectReader([file], mode)
    off, nbytes = 5000, 34_000
    for size in (38_999, 36_864, 20_480, 20_001, 8192, 5001, 5000, 4999, 4096, 0):
        os.truncate(file.path, size)
        for address in (0, 5000 % 4096, 1):
            with pytest.raises(CheckpointError) as e:
                reader.read(file, off, room(nbytes, address)[1], "extent")
            assert not isinstance(e.value, OSError)
            left = max(size, off)
            assert str(e.value) == (
                f"{file.path}: extent: the file ends {off + nbytes - left} bytes too early, "
                f"nothing is left at offset {left}"
            )
    file.path.write_bytes(data)
    check(reader, file, data, off, nbytes)
    reader.close()


def test_a_file_replaced_during_open(shard: Callable[..., Shard], rules: DirectRules) -> None:
    old = shard("a", random_bytes(5000, 1))
    os.replace(shard("b", random_bytes(5000, 2)).path, old.path)
    for mode in ("auto", "on"):
        before = open_fds()
        with pytest.raises(CheckpointError, match="/a: was replaced while the checkpoint was being opened"):
            DirectReader([old], mode)
        assert open_fds() == before


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this platform has no posix_fadvise")
def test_cached_pages_are_dropped(shard: Callable[..., Shard], monkeypatch: pytest.MonkeyPatch) -> None:
    advice: list[tuple[int, int, int, int]] = []

    def note(*args: int) -> None:
        advice.append(args)  # type: ignore[arg-type]
        raise OSError(errno.EOPNOTSUPP, "not here")  # must not matter

    monkeypatch.setattr(os, "posix_fadvise", note)
    data = random_bytes(60_000, 6)
    file = shard("a", data)
    reader = DirectReader([file], "off")
    page = mmap.PAGESIZE
    check(reader, file, data, page + 1, 2 * page)
    check(reader, file, data, page, page)
    drop = os.POSIX_FADV_DONTNEED
    assert advice == [(file.fd, page, 3 * page, drop), (file.fd, page, page, drop)]
    monkeypatch.delattr(os, "posix_fadvise")
    check(reader, file, data, page, page)


@pytest.mark.parametrize("align", [512, 4096, 65536])
def test_a_part_is_one_call(shard: Callable[..., Shard], rules: DirectRules, align: int) -> None:
    """Wherever it begins and ends."""
    data = random_bytes(PART_NBYTES + 3 * 65536, 4)
    file = shard("a", data, DirectOnly)
    rules.align = rules.align_address = align
    reader = DirectReader([file], "on")
    for off in (1, align - 1, 2 * align - 7, 65536):
        rules.calls.clear()
        check(reader, file, data, off, PART_NBYTES, 77)
        assert len(rules.calls) == 1, (off, rules.calls)
    reader.close()


@pytest.mark.usefixtures("small_windows")
def test_far_offsets_in_a_sparse_file(tmp_path: Path) -> None:
    """Beyond 4 GiB, through the window and straight into aligned memory."""
    path = tmp_path / "sparse"
    data, far = random_bytes(5 * 4096, 3), 2**32 + 3 * 4096
    with path.open("wb") as f:
        f.truncate(far + 2**31)
        for off in (far, far + 2**31 - len(data)):
            f.seek(off)
            f.write(data)
    need_direct(tmp_path)
    shard = DirectOnly(path, os.open(path, os.O_RDONLY), path.stat().st_size, {})
    reader = DirectReader([shard], "on")
    _, aligned = room(len(data), 0)
    for off in (far, far + 2**31 - len(data)):
        for skip in (0, 1543):
            out = aligned[: len(data) - skip]
            out[:] = 0xA5
            reader.read(shard, off + skip, out, "far")
            assert out.tobytes() == data[skip:]
    reader.close()
    shard.close()


@pytest.mark.usefixtures("file_system", "small_windows")
def test_eight_threads(shard: Callable[..., Shard]) -> None:
    data = [random_bytes(100_003, seed) for seed in (1, 2)]
    files = [shard("a", data[0], DirectOnly), shard("b", data[1], DirectOnly)]
    reader = DirectReader(files, "on")

    def job(seed: int) -> None:
        rng = np.random.default_rng(seed)
        which, off = int(rng.integers(2)), int(rng.integers(60_000))
        check(reader, files[which], data[which], off, int(rng.integers(1, 40_000)), int(rng.integers(4096)))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(job, range(400)))
    reader.close()


def test_threads_share_no_window(shard: Callable[..., Shard], rules: DirectRules) -> None:
    """Both windows are full before either thread goes on: in a shared one, the first thread's bytes would be gone."""
    data = random_bytes(100_000, 3)
    file = shard("a", data)
    reader = DirectReader([file], "on")
    both = threading.Barrier(2)

    def meet(call: Call) -> None:
        both.wait(60)

    rules.after = meet
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda off: check(reader, file, data, off, 20_000), (100, 50_001)))
    reader.close()


def test_a_thread_takes_its_window_with_it(shard: Callable[..., Shard], rules: DirectRules) -> None:
    file = shard("a", random_bytes(10_000, 3))
    reader = DirectReader([file], "on")
    windows: list[weakref.ref[NDArray[np.uint8]]] = []

    def job() -> None:
        reader.read(file, 1, np.empty(9000, np.uint8), "extent")
        windows.append(weakref.ref(reader._bounce.array))

    for _ in range(2):
        thread = threading.Thread(target=job)
        thread.start()
        thread.join()
    assert [w() for w in windows] == [None, None]
    reader.close()


def test_close_is_idempotent(shard: Callable[..., Shard], rules: DirectRules) -> None:
    data = random_bytes(10_000, 3)
    file = shard("a", data)
    before = open_fds()
    reader = DirectReader([file], "on")
    reader.close()
    reader.close()
    assert open_fds() == before
    file.close()
    with pytest.raises(CheckpointError, match="/a: extent cannot be read, the checkpoint is closed"):
        reader.read(file, 0, np.empty(10, np.uint8), "extent")


# ---- through a checkpoint


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("micro") / "ckpt"
    synthesize(directory, "micro", 5)
    return directory


def with_tail(directory: Path, to: Path, tail: int) -> Path:
    """A copy in which the shard of layer 3's experts ends with an expert and is `tail` bytes long mod 512."""
    copy = copy_of(directory, to)
    path = shard_of(copy, LAST)
    header, data = take_apart(path)
    header.pop("__metadata__", None)
    ordered: Header = {}
    parts, end = [], 0
    for name in sorted(header, key=lambda n: (".experts." in n, n.endswith(".scale"), header[n]["data_offsets"])):
        begin, old_end = header[name]["data_offsets"]
        parts.append(data[begin:old_end])
        ordered[name] = {**header[name], "data_offsets": [end, end + old_end - begin]}
        end += old_end - begin
    assert list(ordered)[-1] == LAST
    text = json.dumps(ordered).encode()
    path.write_bytes(encode(text + b" " * ((tail - 8 - len(text) - end) % 512), b"".join(parts)))
    assert path.stat().st_size % 512 == tail
    return copy


@pytest.mark.usefixtures("file_system")
@pytest.mark.parametrize("tail", [0, 1, 511])
def test_experts_are_the_same_in_every_mode(micro: Path, tmp_path: Path, tail: int) -> None:
    directory = with_tail(micro, tmp_path, tail)
    want = {
        (layer, expert): b"".join(
            tensor_bytes(
                shard_of(directory, LAST.replace("3", str(layer), 1)), f"layers.{layer}.ffn.experts.{expert}.{t}"
            )
            for t in ("w1.weight", "w2.weight", "w3.weight", "w1.scale", "w2.scale", "w3.scale")
        )
        for layer in (0, 3)
        for expert in (0, 7, 15)
    }
    for mode in MODES:
        with Checkpoint.open(directory, direct_reads=mode) as ckpt:
            nbytes = ckpt.expert_layout.nbytes
            for address in (0, 512, 4095):
                for (layer, expert), raw in want.items():
                    for part in (nbytes, 1000):
                        memory, out = room(nbytes, address)
                        for offset in range(0, nbytes, part):
                            ckpt.read_expert(layer, expert, out[offset : offset + part], offset)
                        assert out.tobytes() == raw
                        assert np.count_nonzero(memory == 0xA5) == memory.size - nbytes + raw.count(0xA5)


def test_experts_alone_are_read_directly(micro: Path, rules: DirectRules, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_fds()
    with Checkpoint.open(micro) as ckpt:
        with_experts = {str(part.path) for layer in range(4) for part in ckpt.expert_extents(layer, 0)}
        assert {call.path for call in rules.calls} == with_experts
        rules.calls.clear()
        ckpt.read("embed.weight")
        ckpt.read("layers.3.ffn.gate.weight")
        assert rules.calls == []
        monkeypatch.setattr(Shard, "read_at", DirectOnly.read_at)
        ckpt.read_expert(3, 2, np.empty(ckpt.expert_layout.nbytes, np.uint8))
        assert {call.path for call in rules.calls} == {str(shard_of(micro, LAST))}
    assert open_fds() == before


def test_scales_in_another_file(
    micro: Path, tmp_path: Path, rules: DirectRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = copy_of(micro, tmp_path)
    path = shard_of(directory, LAST)
    tensors = unpack(path)
    scales = {n: t for n, t in tensors.items() if ".experts." in n and n.endswith(".scale")}
    path.write_bytes(pack({n: t for n, t in tensors.items() if n not in scales}))
    path.with_name("scales.safetensors").write_bytes(pack(scales))
    edit_json(directory / INDEX_FILE, lambda i: i["weight_map"].update(dict.fromkeys(scales, "scales.safetensors")))
    with Checkpoint.open(micro) as whole, Checkpoint.open(directory, direct_reads="on") as split:
        want, out = (np.full(whole.expert_layout.nbytes, fill, np.uint8) for fill in (1, 2))
        whole.read_expert(3, 15, want)
        monkeypatch.setattr(Shard, "read_at", DirectOnly.read_at)
        split.read_expert(3, 15, out)
        np.testing.assert_array_equal(out, want)


@pytest.mark.usefixtures("file_system")
@pytest.mark.parametrize("mode", MODES)
def test_scales_are_checked_in_every_mode(micro: Path, tmp_path: Path, mode: DirectReads) -> None:
    directory = copy_of(micro, tmp_path)
    path = shard_of(directory, LAST)
    raw = bytearray(path.read_bytes())
    scales = tensor_bytes(path, LAST)
    raw[raw.index(scales) + 9] = 0xFF
    path.write_bytes(raw)
    with Checkpoint.open(directory, direct_reads=mode) as ckpt:
        out = np.empty(ckpt.expert_layout.nbytes, np.uint8)
        with pytest.raises(
            CheckpointError, match=r"'layers\.3\.ffn\.experts\.15\.w3\.scale': scale at index 9 is 0xFF"
        ):
            ckpt.read_expert(3, 15, out)
        ckpt.read_expert(3, 14, out)


def test_unknown_mode(micro: Path) -> None:
    before = open_fds()
    with pytest.raises(InputError, match="direct_reads 'yes' is unknown; use auto, on or off"):
        Checkpoint.open(micro, direct_reads="yes")  # type: ignore[arg-type]
    assert open_fds() == before


def test_engine_passes_the_setting(micro: Path, rules: DirectRules, monkeypatch: pytest.MonkeyPatch) -> None:
    rules.open_errno = errno.EINVAL
    before = open_fds()
    with pytest.raises(UnsupportedError, match="cannot be read directly"):
        Engine.open(micro, direct_reads="on")
    monkeypatch.setenv("DS41RT_DIRECT_READS", "1")
    with pytest.raises(UnsupportedError, match="cannot be read directly"):
        Engine.open(micro)
    assert open_fds() == before
