"""Trace files: what is refused and how it is named, and comparisons of traces that are made up here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds41rt.checkpoint.synth_presets import PRESETS
from ds41rt.config import ModelConfig
from ds41rt.engine import Engine, Mode
from ds41rt.errors import InputError
from ds41rt.trace.compare import checks, first_difference, values
from ds41rt.trace.file import PARTS, Trace, layout, load_trace, selection_name
from ds41rt.trace.record import TraceRecorder, mode_of

CFG = PRESETS["micro"]
N = 6
Change = Callable[[dict[str, Any]], None]


def made_up(cfg: ModelConfig = CFG, n: int = N, seed: int = 3) -> Trace:
    """Random arrays of the right types and shapes, values included."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, Any] = {
        name: rng.integers(0, 2**15, shape).astype(dtype) for name, (dtype, shape) in layout(cfg, n).items()
    }
    arrays["positions"] = np.arange(10, 10 + n, dtype=np.int32)
    for part in PARTS.values():
        raw = rng.standard_normal((n, part.rows(cfg), part.count(cfg))).astype(np.float32)
        whole = {"bf16": raw.view(np.uint32) >> 16, "f32": raw, "u8": raw.view(np.uint32) & 0xFF}[part.kind]
        arrays[f"values.{part.name}"] = whole.astype(part.dtype)
    arrays |= {"version": np.array(2, np.int32), "model": np.array(cfg.model_dump_json()), "about": np.array("{}")}
    return Trace("made up", cfg, arrays)


def changed(trace: Trace, change: Change) -> Trace:
    arrays = {name: array.copy() for name, array in trace.arrays.items()}
    change(arrays)
    return Trace("changed", trace.config, arrays)


def saved(trace: Trace, path: Path) -> Path:
    with path.open("wb") as file:
        trace.save(file)
    return path


# ---- files


def test_a_file_gives_the_trace_back(tmp_path: Path) -> None:
    trace = made_up()
    again = load_trace(saved(trace, tmp_path / "t.npz"))
    assert again.config == CFG
    assert again.where == str(tmp_path / "t.npz")
    assert again.arrays.keys() == trace.arrays.keys()
    for name, array in trace.arrays.items():
        assert array.tobytes() == again.arrays[name].tobytes(), name
    assert first_difference(trace, again) is None


@pytest.mark.parametrize("mode", ["eager", "step-graph", "adaptive"])
def test_the_mode_is_the_engines(checkpoint: Callable[[str], Path], mode: Mode) -> None:
    with Engine.open(checkpoint("micro"), mode=mode, backend="host", device_route=True) as engine:
        assert mode_of(engine) == mode
    with Engine.open(checkpoint("micro"), mode=mode, backend="host", device_route=False) as engine:
        assert mode_of(engine) == "eager"  # experts that the host routes are not captured


def test_what_the_recorder_makes_is_what_a_file_must_hold(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with Engine.open(checkpoint("micro"), backend="host") as engine:
        recorder, seq = TraceRecorder(engine, values=True), engine.new_sequence()
        for token in (5, 9):
            engine.decode_step(seq, token)
            recorder.end_token()
        trace = recorder.trace("run")
        recorder.clear()
        assert recorder.trace("run").n_positions == 0
        recorder.close()
    assert trace.about["mode"] == "eager"
    assert trace.arrays["tokens"].tolist() == [5, 9]
    assert trace.arrays["positions"].tolist() == [0, 1]
    again = load_trace(saved(trace, tmp_path / "t.npz"))
    assert again.arrays.keys() == trace.arrays.keys()


def drop(name: str) -> Change:
    return lambda arrays: arrays.pop(name)


def put(name: str, value: Any) -> Change:
    return lambda arrays: arrays.update({name: np.asarray(value)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop("version"), ["an older ds41rt", "record it again"]),
        (put("version", np.int32(3)), ["version 3", "reads version 2"]),
        (put("version", np.array([2, 2], np.int32)), ["version -1"]),
        (drop("expert_ids"), ["is not a trace", "expert_ids"]),
        (drop("model"), ["damaged", "model"]),
        (put("model", "{"), ["damaged", "description"]),
        (put("model", "[]"), ["damaged", "JSON object"]),
        (put("model", '{"n_layers": 4}'), ["damaged", "dim"]),
        (put("model", CFG.model_dump_json().replace('"hc_mult":4', '"hc_mult":5')), ["damaged", "residual streams"]),
        (put("about", "x"), ["damaged", "description"]),
        (drop("attn_out_hash"), ["damaged", "'attn_out_hash' is missing"]),
        (drop("index_topk.L03"), ["damaged", "'index_topk.L03' is missing"]),
        (drop("positions"), ["damaged", "'positions' is missing"]),
        (put("mix_in_hash", np.zeros((N, 4), np.uint64)), ["damaged", "'mix_in_hash'", "(6, 4)", "(6, 5)"]),
        (put("streams_hash", np.zeros((N, 4), np.int64)), ["damaged", "'streams_hash'", "int64", "uint64"]),
        (put("values.ring", np.zeros((N, 4, 31), np.uint16)), ["damaged", "'ring'", "(6, 4, 31)", "(6, 4, 32)"]),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, change: Change, words: list[str]) -> None:
    path = saved(changed(made_up(), change), tmp_path / "t.npz")
    with pytest.raises(InputError) as e:
        load_trace(path)
    for word in (str(path), *words):
        assert word in str(e.value)


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    whole = saved(made_up(), tmp_path / "t.npz").read_bytes()
    places = [(tmp_path / "none", None), (tmp_path, None), (tmp_path / "cut", whole[:9000]), (tmp_path / "x", b"text")]
    damaged = bytearray(whole)
    damaged[200:2000] = bytes(1800)
    for path, content in (*places, (tmp_path / "damaged", bytes(damaged))):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InputError, match="a trace") as e:
            load_trace(path)
        assert str(path) in str(e.value)


# ---- comparisons


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_array_is_compared_once(preset: str) -> None:
    """Every row of every array that a trace has, less those that only say what was run."""
    cfg = PRESETS[preset]
    compared = [(check.array, check.row) for check in checks(cfg)]
    assert len(set(compared)) == len(compared)
    want = {
        (name, row)
        for name, (_, shape) in layout(cfg, 1).items()
        if name not in ("positions", "tokens", "replayed")
        for row in ([0] if name.startswith("index_topk") else range(shape[1]))
    }
    assert set(compared) == want


def test_the_first_difference_in_the_order_of_a_step() -> None:
    """Of many, at several positions: walk through the checks from the last to the first, adding one at a time."""
    a = made_up()
    arrays = {name: array.copy() for name, array in a.arrays.items()}
    b = Trace("b", CFG, arrays)
    for check in reversed(checks(CFG)):
        index = (3,) if check.array.startswith("index_topk") else (3, check.row)
        arrays[check.array][index] = np.asarray(arrays[check.array][index]) + 1
        later = (4, *index[1:])
        arrays[check.array][later] = np.asarray(arrays[check.array][later]) + 1
        difference = first_difference(a, b)
        assert difference is not None
        assert (difference.index, difference.position, difference.check) == (3, 13, check)
    arrays["attn_out_hash"][1, 2] ^= np.uint64(1 << 63)
    difference = first_difference(a, b)
    assert str(difference) == "position 11, attention half of layer 2: the attention's output"


def test_bits_count_not_values() -> None:
    a = made_up()
    a.arrays["expert_weights"][2, 1, 0] = 0.0
    b = changed(a, lambda arrays: arrays["expert_weights"].__setitem__((2, 1, 0), -0.0))
    difference = first_difference(a, b)
    assert difference is not None
    assert (difference.position, difference.check.array, difference.check.layer) == (12, "expert_weights", 1)
    for trace in (a, b):
        trace.arrays["expert_weights"][2, 1, 0] = np.nan
    assert first_difference(a, b) is None


def test_values_around_the_first_difference() -> None:
    a = made_up()

    def change(arrays: dict[str, Any]) -> None:
        arrays["streams_hash"][4, 2] ^= np.uint64(1)
        row = arrays["values.streams"][4, 2]
        row[70] ^= 0x8000  # the sign
        row[200] = 0x7F80  # infinity

    b = changed(a, change)
    difference = first_difference(a, b)
    assert difference is not None
    found = values(a, b, difference)
    assert found is not None
    assert (found.n_values, found.n_differ, found.largest, found.first) == (256, 2, None, (1, 6))
    assert [at for at, _, _ in found.around] == [(1, i) for i in range(3, 10)]
    assert [x == y for _, x, y in found.around] == [True] * 3 + [False] + [True] * 3
    at, x, y = found.around[3]
    assert (at, x) == ((1, 6), -y)
    b.arrays["values.streams"][4, 2, 200] = a.arrays["values.streams"][4, 2, 200]
    found = values(a, b, difference)
    assert found is not None
    assert (found.n_differ, found.largest) == (1, abs(2 * x))
    del b.arrays["values.streams"]
    assert values(a, b, difference) is None


def test_values_at_the_edges_and_of_bytes() -> None:
    a = made_up()

    def change(arrays: dict[str, Any]) -> None:
        arrays["engram_rows_hash"][0, 1] ^= np.uint64(1)
        arrays["values.engram_rows"][0, 1, 0] ^= 0x80

    b = changed(a, change)
    difference = first_difference(a, b)
    assert difference is not None
    found = values(a, b, difference)
    assert found is not None
    assert (found.n_differ, found.largest, found.first) == (1, 128.0, (0,))
    assert [at for at, _, _ in found.around] == [(0,), (1,), (2,), (3,)]


def test_traces_that_cannot_be_compared() -> None:
    a = made_up()
    other = CFG.model_copy(update={"window": 8, "rope_theta": 5000.0})
    with pytest.raises(InputError, match=r"different models: window 4 and 8; rope_theta 10000.0 and 5000.0"):
        first_difference(a, Trace("b", other, a.arrays))
    token = int(a.arrays["tokens"][2])
    with pytest.raises(InputError, match=rf"different texts: token {token} and {token + 1} as number 2"):
        first_difference(a, changed(a, lambda arrays: arrays["tokens"].__setitem__(2, token + 1)))
    with pytest.raises(InputError, match="different texts: position 10 and 0 as number 0"):
        first_difference(a, changed(a, lambda arrays: arrays["positions"].__setitem__(0, 0)))
    shorter = changed(a, lambda arrays: arrays.update({k: v[:4] for k, v in arrays.items() if v.ndim}))
    for pair in ((a, shorter), (shorter, a)):
        with pytest.raises(InputError, match="agree as far as both go"):
            first_difference(*pair)
    shorter.arrays["logits_hash"][3, 0] ^= np.uint64(1)
    difference = first_difference(a, shorter)
    assert difference is not None
    assert difference.position == 13


def test_a_text_that_went_another_way_parts_where_the_logits_do() -> None:
    """Greedy runs: another token follows from other logits, one position before."""
    a = made_up()

    def change(arrays: dict[str, Any]) -> None:
        arrays["logits_hash"][2, 0] ^= np.uint64(1)
        arrays["tokens"][3] += 1
        arrays[selection_name(1)][3] += 1

    difference = first_difference(a, changed(a, change))
    assert difference is not None
    assert (difference.position, difference.check.half) == (12, "head")
    assert json.dumps(str(difference)) == '"position 12, the head: the logits"'
