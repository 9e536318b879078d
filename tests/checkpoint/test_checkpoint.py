"""A whole checkpoint: consistent or refused at open, and then every read returns the file's bytes."""

import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from shard_files import copy_of, edit_json, open_fds, pack, random_bytes, tensor_bytes, unpack

from ds41rt.checkpoint.checkpoint import INDEX_FILE, Checkpoint
from ds41rt.checkpoint.layout import text_tensors
from ds41rt.checkpoint.synth import synthesize
from ds41rt.errors import CheckpointError, ConfigError, Ds41Error, InputError

TINY_A = Path(__file__).parents[1] / "goldens" / "tiny-a" / "checkpoint"
Tensors = dict[str, tuple[str, list[int], bytes]]


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("micro") / "ckpt"
    synthesize(directory, "micro", 5)
    return directory


@pytest.fixture
def broken(micro: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return copy_of(micro, tmp_path)


def shard_of(directory: Path, name: str) -> Path:
    file: str = json.loads((directory / INDEX_FILE).read_text())["weight_map"][name]
    return directory / file


def rewrite(directory: Path, name: str, change: Callable[[Tensors], Tensors]) -> Path:
    """Replace the shard that holds `name` by a well-formed one with other tensors; the index follows."""
    path = shard_of(directory, name)
    tensors = change(unpack(path))
    path.write_bytes(pack(tensors))

    def update(index: Any) -> None:
        kept = {n: f for n, f in index["weight_map"].items() if f != path.name}
        index["weight_map"] = kept | dict.fromkeys(tensors, path.name)

    edit_json(directory / INDEX_FILE, update)
    return path


def refused(directory: Path, kind: type[Ds41Error] = CheckpointError) -> str:
    before = open_fds()
    with pytest.raises(kind) as error:
        Checkpoint.open(directory)
    assert open_fds() == before
    return str(error.value)


def test_reads_every_tensor_of_the_golden_checkpoint() -> None:
    kinds = {"BF16": ml_dtypes.bfloat16, "F32": np.float32}
    with Checkpoint.open(TINY_A) as ckpt:
        for file in sorted(TINY_A.glob("*.safetensors")):
            for name, (dtype, shape, raw) in unpack(file).items():
                if ".experts." in name and not name.startswith("layers.6.ffn.experts.38"):
                    continue
                got = ckpt.read(name)
                assert got.dtype == kinds.get(dtype, np.uint8)
                assert list(got.shape) == shape
                assert got.tobytes() == raw
                out = np.full(len(raw), 0xA5, np.uint8)
                half = len(raw) // 2
                ckpt.read_into(name, out[:half])
                ckpt.read_into(name, out[half:], half)
                assert out.tobytes() == raw


def test_expert_is_six_tensors_side_by_side() -> None:
    with Checkpoint.open(TINY_A) as ckpt:
        layout = ckpt.expert_layout
        assert (layout.weight_nbytes, layout.scale_nbytes, layout.nbytes) == (2048, 128, 6528)
        tensors = unpack(shard_of(TINY_A, "layers.5.ffn.gate.weight"))
        for expert in (0, 7, 383):
            at = f"layers.5.ffn.experts.{expert}."
            want = {f"{w}.{p}": tensors[f"{at}{w}.{p}"][2] for p in ("weight", "scale") for w in ("w1", "w2", "w3")}
            out = np.full(layout.nbytes, 0xA5, np.uint8)
            ckpt.read_expert(5, expert, out)
            assert out.tobytes() == b"".join(want.values())
            for which, off, disp in (
                ("w1", layout.gate_off, layout.gate_scale_disp),
                ("w2", layout.down_off, layout.down_scale_disp),
                ("w3", layout.up_off, layout.up_scale_disp),
            ):
                assert out[off : off + layout.weight_nbytes].tobytes() == want[f"{which}.weight"]
                assert out[off + disp : off + disp + layout.scale_nbytes].tobytes() == want[f"{which}.scale"]
            parts = ckpt.expert_extents(5, expert)
            assert b"".join(os.pread(e.fd, e.nbytes, e.off) for e in parts) == out.tobytes()
            assert all(e.path.read_bytes()[e.off : e.off + 4] == os.pread(e.fd, 4, e.off) for e in parts)


def test_every_cut_of_an_expert_gives_its_bytes(micro: Path) -> None:
    """In two, everywhere, and into parts of any size; nothing beside a part is touched."""
    with Checkpoint.open(micro) as ckpt:
        n = ckpt.expert_layout.nbytes
        want = np.empty(n, np.uint8)
        ckpt.read_expert(2, 9, want)
        for cut in range(n + 1):
            out = np.full(n, 0xA5, np.uint8)
            ckpt.read_expert(2, 9, out[cut:], cut)
            assert (out[:cut] == 0xA5).all()
            np.testing.assert_array_equal(out[cut:], want[cut:])
            ckpt.read_expert(2, 9, out[:cut])
            np.testing.assert_array_equal(out, want)
        for size in (1, 7, 64, 1000, ckpt.expert_layout.weights_nbytes, ckpt.expert_layout.scales_nbytes, n - 1):
            out = np.full(n, 0xA5, np.uint8)
            for offset in range(0, n, size):
                ckpt.read_expert(2, 9, out[offset : offset + size], offset)
                assert (out[offset + size :] == 0xA5).all()
            np.testing.assert_array_equal(out, want)


def test_engram_rows(micro: Path) -> None:
    with Checkpoint.open(micro) as ckpt:
        cfg = ckpt.config
        for layer, n_rows in zip(cfg.engram_layers, cfg.engram_num_embeddings, strict=True):
            rows = np.array([n_rows - 1, 0, 17, 0, n_rows // 2], np.int64)
            codes = np.full((5, cfg.engram_head_dim), 0xA5, np.uint8)
            scales = np.full((5, cfg.engram_head_dim // 32), 0xA5, np.uint8)
            ckpt.read_engram_rows(layer, rows, codes, scales)
            np.testing.assert_array_equal(codes, ckpt.read(f"layers.{layer}.engram.embed.weight")[rows])
            np.testing.assert_array_equal(scales, ckpt.read(f"layers.{layer}.engram.embed.scale")[rows])
            for bad in (-1, n_rows):
                with pytest.raises(InputError, match=f"engram row {bad} of layer {layer}"):
                    ckpt.read_engram_rows(layer, np.array([0, 0, 0, 0, bad], np.int64), codes, scales)
        with pytest.raises(InputError, match="layer 0 has no engram table"):
            ckpt.read_engram_rows(0, rows, codes, scales)


def test_threads_share_a_checkpoint(micro: Path) -> None:
    with Checkpoint.open(micro) as ckpt:
        want = [
            tensor_bytes(shard_of(micro, "layers.2.ffn.gate.weight"), f"layers.2.ffn.experts.{e}.w2.weight")
            for e in range(16)
        ]
        n = ckpt.expert_layout.weight_nbytes

        def job(i: int) -> bool:
            out = np.full(ckpt.expert_layout.nbytes, 0xA5, np.uint8)
            ckpt.read_expert(2, i % 16, out)
            return out[n : 2 * n].tobytes() == want[i % 16]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(job, range(400)))


def test_every_shard_cut_three_ways(micro: Path, broken: Path) -> None:
    for path in sorted(broken.glob("*.safetensors")):
        raw = path.read_bytes()
        header_nbytes = int.from_bytes(raw[:8], "little")
        tensors = unpack(path)
        middle = list(tensors)[len(tensors) // 2]
        mid_off = 8 + header_nbytes + raw[8 + header_nbytes :].index(tensors[middle][2]) + len(tensors[middle][2]) // 2
        for length, says in (
            (8 + header_nbytes // 2, f"{header_nbytes - header_nbytes // 2} of its {header_nbytes} bytes are missing"),
            (mid_off, f"tensor {middle!r}"),
            (len(raw) - 1, f"tensor {list(tensors)[-1]!r} needs file bytes"),
        ):
            os.truncate(path, length)
            message = refused(broken)
            assert path.name in message
            assert says in message
            path.write_bytes(raw)
    Checkpoint.open(broken).close()


def test_every_missing_tensor_is_named(micro: Path, tmp_path: Path) -> None:
    """Leaves out one tensor of every kind."""
    with Checkpoint.open(micro) as ckpt:
        names = [t.name for t in text_tensors(ckpt.config) if ".experts." not in t.name or ".experts.11." in t.name]
    picked = [n for n in names if not n.startswith("layers.0.")][::4]
    for i, name in enumerate(picked):
        directory = copy_of(micro, tmp_path / str(i))
        rewrite(directory, name, lambda t, name=name: {n: v for n, v in t.items() if n != name})  # type: ignore[misc]
        assert f"tensor {name!r}" in refused(directory)


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("layers.2.attn.wq_b.scale", "F8_E8M0", [1, 2]),
        ("layers.2.attn.wq_b.scale", "U8", [2, 1]),
        ("layers.1.ffn.shared_experts.w1.scale", "F8_E8M0", [1, 1]),
        ("layers.1.engram.wkv.scale", "F8_E8M0", [5, 8]),
        ("layers.3.ffn.experts.4.w2.weight", "U8", [64, 16]),
        ("layers.3.ffn.experts.4.w2.weight", "I8", [32, 32]),
        ("layers.3.ffn.experts.4.w2.scale", "F8_E8M0", [32, 2]),
        ("layers.0.hc_attn_fn", "F32", [256, 24]),
        ("embed.weight", "F16", [288, 64]),
        ("norm.weight", "BF16", [1, 64]),
        ("layers.2.engram.embed.weight", "F8_E4M3", [221, 32]),
    ],
)
def test_wrong_dtype_or_shape_is_refused(broken: Path, name: str, dtype: str, shape: list[int]) -> None:
    """A file that is sound in itself but not what the configuration says, 128x128 scale blocks for instance."""
    nbytes = int(np.prod(shape)) * {"F32": 4, "F16": 2, "BF16": 2}.get(dtype, 1)
    path = rewrite(broken, name, lambda t: t | {name: (dtype, shape, random_bytes(nbytes, 1))})
    message = refused(broken)
    assert path.name in message
    assert f"tensor {name!r} is {dtype} {shape}" in message


def test_other_tensors_are_ignored(broken: Path) -> None:
    extra: Tensors = {
        "mtp.0.attn.wq_a.weight": ("F8_E4M3", [3, 5], random_bytes(15, 1)),
        "vision.odd": ("F64", [1], random_bytes(8, 2)),
    }
    rewrite(broken, "norm.weight", lambda t: extra | t)
    with Checkpoint.open(broken) as ckpt:
        assert ckpt.read("mtp.0.attn.wq_a.weight").tobytes() == extra["mtp.0.attn.wq_a.weight"][2]
        with pytest.raises(CheckpointError, match=r"'vision\.odd': dtype F64"):
            ckpt.read("vision.odd")
        with pytest.raises(InputError, match=r"no tensor 'mtp\.1\.norm'"):
            ckpt.read("mtp.1.norm")


@pytest.mark.parametrize("pad", [1, 3, 511, 512, 1021])
def test_experts_at_odd_offsets(micro: Path, broken: Path, pad: int) -> None:
    rewrite(broken, "layers.1.ffn.gate.weight", lambda t: {"pad": ("I8", [pad], random_bytes(pad, 4)), **t})
    with Checkpoint.open(micro) as whole, Checkpoint.open(broken) as moved:
        n = whole.expert_layout.nbytes
        for expert in range(16):
            a, b = np.full(n, 1, np.uint8), np.full(n, 2, np.uint8)
            whole.read_expert(1, expert, a)
            moved.read_expert(1, expert, b)
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("part", ["weight", "scale"])
@pytest.mark.parametrize("order", [("w1", "w3", "w2"), ("w2", "w1", "w3"), ("w3", "w1", "w2")])
def test_scattered_expert_is_refused(broken: Path, part: str, order: tuple[str, ...]) -> None:
    """A sound shard whose tensors of one expert stand in another order."""
    names = [f"layers.2.ffn.experts.9.{w}.{part}" for w in ("w1", "w2", "w3")]
    swapped = dict(zip(names, (f"layers.2.ffn.experts.9.{w}.{part}" for w in order), strict=True))
    rewrite(broken, names[0], lambda t: {swapped.get(n, n): t[swapped.get(n, n)] for n in t})
    assert f"the {part} tensors of layers.2.ffn.experts.9.w1" in refused(broken)


@pytest.mark.parametrize("part", ["weight", "scale"])
def test_expert_with_a_stray_tensor_is_refused(broken: Path, part: str) -> None:
    """w1 and w2 side by side, w3 at the end of the file."""
    name = f"layers.2.ffn.experts.9.w3.{part}"
    rewrite(broken, name, lambda t: {n: v for n, v in t.items() if n != name} | {name: t[name]})
    assert f"the {part} tensors of layers.2.ffn.experts.9.w1" in refused(broken)


def flip(directory: Path, name: str, index: int, value: int) -> None:
    def change(t: Tensors) -> Tensors:
        dtype, shape, raw = t[name]
        return t | {name: (dtype, shape, raw[:index] + bytes([value]) + raw[index + 1 :])}

    rewrite(directory, name, change)


def test_nan_scales_are_refused_when_loaded(broken: Path) -> None:
    flip(broken, "layers.2.attn.wo_b.scale", 3, 0xFF)
    flip(broken, "layers.2.ffn.experts.9.w3.scale", 41, 0xFF)
    flip(broken, "layers.1.engram.embed.scale", 77, 0xFF)
    with Checkpoint.open(broken) as ckpt:
        with pytest.raises(CheckpointError, match=r"'layers\.2\.attn\.wo_b\.scale': scale at index 3 is 0xFF"):
            ckpt.read("layers.2.attn.wo_b.scale")
        with pytest.raises(CheckpointError, match=r"'layers\.2\.attn\.wo_b\.scale': scale at index 3 is 0xFF"):
            ckpt.read_into("layers.2.attn.wo_b.scale", np.empty(2, np.uint8), 2)
        out = np.empty(ckpt.expert_layout.nbytes, np.uint8)
        with pytest.raises(CheckpointError, match=r"'layers\.2\.ffn\.experts\.9\.w3\.scale': scale at index 41 is"):
            ckpt.read_expert(2, 9, out)
        ckpt.read_expert(2, 8, out)
        codes, scales = np.empty((2, 32), np.uint8), np.empty((2, 1), np.uint8)
        with pytest.raises(CheckpointError, match=r"'layers\.1\.engram\.embed\.scale': scale \[77, 0\] is 0xFF"):
            ckpt.read_engram_rows(1, np.array([5, 77], np.int64), codes, scales)
        ckpt.read_engram_rows(1, np.array([76, 78], np.int64), codes, scales)


@pytest.mark.parametrize("index", [0, 41, 63])
@pytest.mark.parametrize("which", range(3))
def test_a_nan_scale_is_named_from_every_part_that_has_it(broken: Path, which: int, index: int) -> None:
    name = f"layers.2.ffn.experts.9.w{which + 1}.scale"
    flip(broken, name, index, 0xFF)
    with Checkpoint.open(broken) as ckpt:
        layout = ckpt.expert_layout
        assert layout.scale_nbytes == 64
        at, n = layout.weights_nbytes + which * layout.scale_nbytes + index, layout.nbytes
        out = np.empty(n, np.uint8)
        for begin in (0, 5, layout.weights_nbytes - 1, layout.weights_nbytes, at - 1, at):
            for end in (at + 1, n):
                with pytest.raises(CheckpointError, match=re.escape(f"{name!r}: scale at index {index} is 0xFF")):
                    ckpt.read_expert(2, 9, out[begin:end], begin)
            ckpt.read_expert(2, 9, out[min(begin, at) : at], min(begin, at))
        ckpt.read_expert(2, 9, out[at + 1 :], at + 1)


def test_all_other_scale_bytes_are_legal(broken: Path) -> None:
    name = "layers.2.ffn.experts.9.w1.scale"
    values = bytes(range(64)) + bytes(range(191, 255))
    raw = values[: 32 * 2]
    for chunk in (raw, values[64:128]):
        rewrite(broken, name, lambda t, chunk=chunk: t | {name: ("F8_E8M0", [32, 2], chunk)})  # type: ignore[misc]
        with Checkpoint.open(broken) as ckpt:
            assert ckpt.read(name).tobytes() == chunk


INDEX_FAULTS: list[tuple[Callable[[Any], None], str]] = [
    (lambda i: i["weight_map"].update({"ghost": "model-00001-of-00008.safetensors"}), "'ghost'"),
    (lambda i: i["weight_map"].update({"norm.weight": "model-00001-of-00008.safetensors"}), "'norm.weight'"),
    (lambda i: i["weight_map"].update({"norm.weight": "other.safetensors"}), "other.safetensors: is missing"),
    (lambda i: i["weight_map"].pop("norm.weight"), "'norm.weight' is not listed"),
    (lambda i: i["weight_map"].update({"norm.weight": "../model.safetensors"}), "not a plain file name"),
    (lambda i: i["weight_map"].update({"norm.weight": ""}), "is missing or not a regular file"),
    (lambda i: i["weight_map"].update({"norm.weight": 7}), "weight_map.norm.weight"),
    (lambda i: i.pop("weight_map"), "weight_map"),
]


@pytest.mark.parametrize(("change", "says"), INDEX_FAULTS)
def test_index_must_match_the_shards(broken: Path, change: Callable[[Any], None], says: str) -> None:
    edit_json(broken / INDEX_FILE, change)
    assert says in refused(broken)


@pytest.mark.parametrize(
    "file", [INDEX_FILE, "config.json", "inference/config.json", "model-00003-of-00008.safetensors"]
)
def test_missing_files_are_named(broken: Path, file: str) -> None:
    (broken / file).unlink()
    assert file in refused(broken)


@pytest.mark.parametrize("file", [INDEX_FILE, "config.json", "inference/config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"a": 1, "a": 1}'])
def test_broken_json_is_named(broken: Path, file: str, content: bytes) -> None:
    (broken / file).write_bytes(content)
    assert file in refused(broken)


def test_no_such_directory(tmp_path: Path) -> None:
    assert "nowhere" in refused(tmp_path / "nowhere")


def test_engram_table_must_fit_its_hash(broken: Path) -> None:
    """A table that agrees with the configuration but has one row more than the hash addresses."""
    rows = json.loads((broken / "config.json").read_text())["text_config"]["engram_num_embeddings"][1] + 1
    edit_json(broken / "config.json", lambda c: c["text_config"]["engram_num_embeddings"].__setitem__(1, rows))
    edit_json(broken / "inference/config.json", lambda c: c["engram_num_embeddings"].__setitem__(1, rows))
    table: Tensors = {
        "layers.2.engram.embed.weight": ("F8_E4M3", [rows, 32], random_bytes(rows * 32, 1)),
        "layers.2.engram.embed.scale": ("F8_E8M0", [rows, 1], random_bytes(rows, 2)),
    }
    rewrite(broken, "layers.2.engram.embed.weight", lambda t: t | table)
    assert f"engram_num_embeddings of layer 2 is {rows}" in refused(broken, ConfigError)


def test_wrong_outputs_are_refused_untouched(micro: Path) -> None:
    with Checkpoint.open(micro) as ckpt:
        n = ckpt.expert_layout.nbytes
        frozen = np.full(n, 7, np.uint8)
        frozen.flags.writeable = False
        square = np.full((2, n // 2), 7, np.uint8)
        for out in (np.full(2 * n, 7, np.uint8)[::2], np.full(n, 7, np.int8), frozen, square):
            with pytest.raises(InputError, match="read_expert: out must be"):
                ckpt.read_expert(0, 0, out)  # type: ignore[arg-type]
            assert (out == 7).all()
        for size, offset in ((n + 1, 0), (n, 1), (1, n), (0, n + 1), (4, -1), (0, -1)):
            out = np.full(size, 7, np.uint8)
            with pytest.raises(
                InputError, match=rf"read_expert\(0, 3\): {size} bytes from {offset} on, an expert has {n}$"
            ):
                ckpt.read_expert(0, 3, out, offset)
            assert (out == 7).all()
        for layer, expert in ((-1, 0), (4, 0), (0, 16), (0, -1)):
            with pytest.raises(InputError, match=f"layer {layer}, expert {expert} does not exist"):
                ckpt.read_expert(layer, expert, np.empty(n, np.uint8))
            with pytest.raises(InputError, match="does not exist"):
                ckpt.expert_extents(layer, expert)
        for size, offset in ((129, 0), (1, 128), (128, 1), (4, -1), (0, 129)):
            with pytest.raises(InputError, match=r"read_into\('norm\.weight'\)"):
                ckpt.read_into("norm.weight", np.empty(size, np.uint8), offset)


def test_close_is_idempotent(micro: Path) -> None:
    before = open_fds()
    ckpt = Checkpoint.open(micro)
    ckpt.close()
    ckpt.close()
    assert open_fds() == before
    with pytest.raises(CheckpointError, match="closed"):
        ckpt.read("norm.weight")
