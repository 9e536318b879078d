"""Route traces: written, read back, and refused by name when they are not what they should be."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds41rt.errors import InputError
from ds41rt.moe.header import HeaderRow
from ds41rt.moe.route_trace import RouteFacts, RouteRecorder, RouteTrace, load_route_trace

FACTS = RouteFacts(n_layers=3, n_experts=50, top_k=4, expert_nbytes=1000, slot_nbytes=1024, segment_starts=(0, 2))


def some_ids(n_tokens: int, n_experts: int = 50) -> np.ndarray[Any, np.dtype[np.int64]]:
    rng = np.random.default_rng(1)
    return np.array([[rng.permutation(n_experts)[:4] for _ in range(3)] for _ in range(n_tokens)])


def rows_of(token: np.ndarray[Any, Any]) -> list[HeaderRow | None]:
    return [HeaderRow.of(i, [0, *picks, *(1, 2, 3, 4), *(5, 6, 7, 8)]) for i, picks in enumerate(token.tolist())]


def written(trace: RouteTrace, path: Path) -> Path:
    with path.open("wb") as file:
        trace.save(file)
    return path


@pytest.mark.parametrize(("n_experts", "dtype"), [(50, np.int16), (32767, np.int16), (32768, np.int32)])
def test_round_trip(tmp_path: Path, n_experts: int, dtype: type) -> None:
    facts = RouteFacts(3, n_experts, 4, 1000, 1024, (0, 2))
    ids = some_ids(7, n_experts)
    recorder = RouteRecorder(facts)
    for token in ids:
        recorder.end_token(rows_of(token))
    read = load_route_trace(written(recorder.trace(), tmp_path / "routes.npz"))
    assert read.facts == facts
    assert read.expert_ids.dtype == dtype
    assert read.n_tokens == 7
    assert np.array_equal(read.expert_ids, ids)


def test_the_recorder_refuses_an_incomplete_token() -> None:
    recorder = RouteRecorder(FACTS)
    rows = rows_of(some_ids(1)[0])
    with pytest.raises(InputError, match=r"shape \(2, 4\), not \(layers, top-k\) = \(3, 4\)"):
        recorder.end_token([rows[0], None, rows[2]])
    with pytest.raises(InputError, match=r"shape \(0,\)"):
        recorder.end_token([None, None, None])
    recorder.end_token(rows)
    assert recorder.trace().n_tokens == 1


def test_an_empty_recording_cannot_be_replayed(tmp_path: Path) -> None:
    trace = RouteRecorder(FACTS).trace()
    assert trace.expert_ids.shape == (0, 3, 4)
    with pytest.raises(InputError, match="expert_ids is missing, empty"):
        load_route_trace(written(trace, tmp_path / "none.npz"))


def changed(**changes: Any) -> dict[str, Any]:
    buffer = io.BytesIO()
    RouteTrace(FACTS, some_ids(5).astype(np.int16)).save(buffer)
    buffer.seek(0)
    with np.load(buffer) as data:
        arrays = {**data, **changes}
    return {name: value for name, value in arrays.items() if value is not None}


def ids_with(token: int, layer: int, i: int, expert: int) -> np.ndarray[Any, np.dtype[np.int16]]:
    ids = some_ids(5).astype(np.int16)
    ids[token, layer, i] = expert
    return ids


def test_the_unchanged_arrays_are_a_trace(tmp_path: Path) -> None:
    np.savez(tmp_path / "f.npz", **changed())
    assert load_route_trace(tmp_path / "f.npz").facts == FACTS


TWICE = int(some_ids(5)[4, 2, 0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": None}, "no field schema = 'ds41rt.routes'"),
        ({"schema": np.array("something else")}, "no field schema"),
        ({"schema": np.array(["ds41rt.routes"])}, "no field schema"),
        ({"version": np.array(2)}, "has version 2 of the format, this build reads version 1"),
        ({"version": None}, "version is missing or is not one integer"),
        ({"version": np.array(1.0)}, "version is missing or is not one integer"),
        ({"n_experts": np.array([50])}, "n_experts is missing or is not one integer"),
        ({"n_experts": np.array(40)}, "is outside 0..39"),
        ({"expert_nbytes": np.array(0)}, "expert_nbytes is 0"),
        ({"slot_nbytes": np.array(999)}, "at most slot_nbytes, 999"),
        ({"expert_ids": None}, "expert_ids is missing"),
        ({"expert_ids": some_ids(5)}, "not int16 or int32"),
        ({"expert_ids": some_ids(5).astype(np.float32)}, "not int16 or int32"),
        ({"expert_ids": some_ids(5)[0].astype(np.int16)}, "tokens, layers, top-k"),
        ({"expert_ids": ids_with(3, 1, 2, -1)}, "token 3, layer 1: expert -1 is outside 0..49"),
        ({"expert_ids": ids_with(3, 1, 2, 50)}, "token 3, layer 1: expert 50 is outside 0..49"),
        ({"expert_ids": ids_with(4, 2, 3, TWICE)}, f"token 4, layer 2: expert {TWICE} is picked twice"),
        ({"segment_starts": None}, "segment_starts is missing"),
        ({"segment_starts": np.array([0.0])}, "segment_starts is missing or is not int32"),
        ({"segment_starts": np.array([], np.int32)}, "must ascend from 0"),
        ({"segment_starts": np.array([1, 2], np.int32)}, "must ascend from 0"),
        ({"segment_starts": np.array([0, 2, 2], np.int32)}, "must ascend from 0"),
        ({"segment_starts": np.array([0, 3], np.int32)}, "stay below the 3 layers"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = tmp_path / "routes.npz"
    np.savez(path, **changed(**changes))
    with pytest.raises(InputError) as e:
        load_route_trace(path)
    assert words in str(e.value)
    assert str(path) in str(e.value)
    assert "--route-trace-out" in str(e.value)


def test_files_that_are_no_archive(tmp_path: Path) -> None:
    path = written(RouteTrace(FACTS, some_ids(5).astype(np.int16)), tmp_path / "routes.npz")
    whole = path.read_bytes()
    for n in (0, 3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:n])
        with pytest.raises(InputError, match="route trace"):
            load_route_trace(path)
    with pytest.raises(InputError, match=r"none\.npz: is missing"):
        load_route_trace(tmp_path / "none.npz")
    with pytest.raises(InputError, match="is missing, or not a file"):
        load_route_trace(tmp_path)
    np.savez(path, expert_ids=np.array([{}], object), schema=np.array("ds41rt.routes"))
    with pytest.raises(InputError, match="cannot be read as a route trace"):
        load_route_trace(path)
