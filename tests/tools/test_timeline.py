"""`ds41rt timeline`: what is recorded is what happened, whatever it took; durations themselves are never looked at."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from ds41rt.cu.backend import Event, GpuBackend
from ds41rt.cu.host import HostBackend
from ds41rt.engine import Engine, Mode
from ds41rt.errors import CheckpointError
from ds41rt.kernels.registry import SPECS
from ds41rt.moe import fetch
from ds41rt.tools.timeline import record, summary
from ds41rt.tools.timeline_backend import DeviceSpan, HostSpan, TimelineBackend, Token
from ds41rt.tools.timeline_events import DEVICE, HOST, trace_events
from ds41rt.tools.timeline_record import Recorder

Checkpoints = Callable[[str], Path]
PROMPT, N = [5], 8
# How the engine runs, and how many expert slots it has: all, or too few for a token's picks.
WAYS = [("eager", 64), ("eager", 8), ("step-graph", 64), ("step-graph", 8)]


@contextmanager
def opened(path: Path, mode: str, slots: int, raw: GpuBackend) -> Iterator[tuple[Engine, TimelineBackend]]:
    backend = TimelineBackend(raw)
    with Engine.open(
        path, mode=cast(Mode, mode), expert_slots=slots, backend=cast(GpuBackend, backend), max_context=32
    ) as engine:
        yield engine, backend
    assert not any(backend.live().values())


@pytest.mark.parametrize(("mode", "slots"), WAYS)
def test_the_picture_is_what_the_engine_counted(checkpoint: Checkpoints, mode: str, slots: int) -> None:
    with opened(checkpoint("micro"), mode, slots, HostBackend()) as (engine, backend):
        tokens = record(engine, backend, PROMPT, N)
        stats, expert_nbytes = engine.stats(), engine.arena.layout.nbytes
    whole = trace_events(tokens, "host", "device")
    assert json.loads(json.dumps(whole, allow_nan=False)) == whole
    events = whole["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    names = check_form(events)
    check_nesting(spans)

    # every token has a span, in order, and only spans of its own inside
    steps = [e for e in spans if e["cat"] == "token"]
    assert [e["args"]["position"] for e in steps] == list(range(len(PROMPT), len(PROMPT) + N))
    for e in spans:
        if e["pid"] == HOST:
            step = next(s for s in steps if s["args"]["position"] == e["args"]["position"])
            assert step["ts"] <= e["ts"]
            assert end(e) <= end(step) + 0.001

    # counters; the prompt is a single token, which no graph runs, and which is not recorded
    launched = [e for e in spans if e["cat"] == "graph launch"]
    replays = [e for e in spans if e["cat"] == "segment"]
    on_device = [e for e in spans if e["cat"] == "graph"]
    assert len(launched) == len(replays) == len(on_device) == stats.replays
    assert {e["name"] for e in on_device} == (
        {"segment 0 to 0", "segment 1 to 2", "segment 3 to 3"} if launched else set()
    )
    falls = [e["args"] for e in replays if e["args"]["fall"] != "none"]
    assert len(falls) == sum(stats.falls.values())
    assert [sum(f["layer"] == layer for f in falls) for layer in range(4)] == stats.falls_by_layer
    assert len(replays) - len(falls) == stats.clean_replays
    reads = [e for e in spans if e["cat"] == "read"]
    rows = [summary(token) for token in tokens]
    assert len(reads) == sum(row["expert_reads"] for row in rows)
    assert len(reads) == sum(token.counted["expert_nbytes_read"] for token in tokens) // expert_nbytes
    assert len(reads) == sum(row["misses"] for row in rows) > 0
    assert sum(row["captures"] for row in rows) == stats.captures == (3 if mode == "step-graph" else 0)
    assert any(e["cat"] == "recorded work" for e in spans) == (mode == "step-graph")
    assert bool(falls) == (mode == "step-graph")
    for token in tokens:  # a token that records runs eagerly, too, but nothing in it is a rerun
        reruns = any(span.name.startswith("rerun") for span in token.host)
        assert reruns == bool(sum(token.counted["falls"].values()))
    assert {"step", "calls into the backend"} <= names[HOST]
    assert names[DEVICE] == {"stream 'compute'", "stream 'shared expert'"}

    # on the device: every launch and copy once, and nothing that was only recorded
    for category, kinds in {
        "launch": ("kernels",), "graph launch": ("graph",), "read-back": ("copy out",), "copy": ("copy in", "copy"),
        "fill": ("fill",),
    }.items():  # fmt: skip
        work = sum(e["args"]["count"] for e in spans if e["pid"] == DEVICE and e["cat"] in kinds)
        assert work == sum(e["cat"] == category for e in spans if e["pid"] == HOST), category
    for row in rows:
        assert row["launches"] > 0
        assert row["read_backs"] > 0
        assert row["synchronisations"] > 0
        assert row["host_us"] > 0
        assert row["device_busy_us"] > 0


def end(event: dict[str, Any]) -> float:
    return cast(float, event["ts"] + event["dur"])


def check_form(events: list[dict[str, Any]]) -> dict[int, set[str]]:
    """The fields that the format asks for; every track has a name; returns the names by process."""
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {e["pid"] for e in events if e["name"] == "process_name"} == {HOST, DEVICE}
    starts: dict[int, dict[str, Any]] = {}
    ends: dict[int, dict[str, Any]] = {}
    for e in events:
        assert e["ph"] in "XMsf"
        assert isinstance(e["name"], str)
        assert isinstance(e["pid"], int)
        if e["ph"] == "M":
            continue
        assert (e["pid"], e["tid"]) in tracks
        assert isinstance(e["ts"], float)
        assert e["cat"]
        if e["ph"] == "X":
            assert e["dur"] >= 0
            assert e["name"]
        else:
            (starts if e["ph"] == "s" else ends)[e["id"]] = e
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(e["ph"] == "X" and e["pid"] == DEVICE for e in events)
    calls = {(e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] == "X"}
    for arrow in (*starts.values(), *ends.values()):
        assert (arrow["pid"], arrow["tid"], arrow["ts"]) in calls
    assert all(e["pid"] == HOST for e in starts.values())
    assert all(e["pid"] == DEVICE for e in ends.values())
    return {pid: {name for (p, _), name in tracks.items() if p == pid} for pid in (HOST, DEVICE)}


def check_nesting(spans: list[dict[str, Any]]) -> None:
    """On each track of the host one span contains another or they are apart; on one of the device they are apart."""
    tracks = {(e["pid"], e["tid"]) for e in spans}
    for track in tracks:
        of_track = sorted(
            ((e["ts"], -e["dur"], e) for e in spans if (e["pid"], e["tid"]) == track), key=lambda x: x[:2]
        )
        open_ends: list[float] = []
        for ts, _, e in of_track:
            while open_ends and open_ends[-1] <= ts + 0.001:
                open_ends.pop()
            assert not open_ends or end(e) <= open_ends[-1] + 0.002, e
            open_ends.append(end(e))
        if track[0] == DEVICE:
            for (_, _, a), (_, _, b) in pairwise(of_track):
                assert end(a) <= b["ts"] + 0.002, (a, b)


def test_runs_on_the_device() -> None:
    """Like work on a stream is one run, until something else comes, or the stream waits; recorded work is in none."""
    backend = TimelineBackend(HostBackend())
    main, side = backend.create_stream("main"), backend.create_stream("side")
    event, buf = backend.create_event("e"), backend.alloc("b", 64)
    token = Token(0, 0, host=[HostSpan("step", "token", "t", 0, 1)])
    with backend.recording(token, main):
        backend.fill(buf.ptr, 1, 8, main, label="one")
        backend.fill(buf.ptr, 2, 8, main, label="two")
        backend.copy_d2d(buf.ptr + 16, buf.ptr, 8, main, label="three")
        backend.record(event, main)
        backend.wait(side, event)
        backend.fill(buf.ptr, 3, 8, side, label="four")
        backend.record(event, side)
        backend.copy_d2d(buf.ptr + 24, buf.ptr + 16, 8, main, label="five")
        backend.wait(main, event)
        backend.copy_d2d(buf.ptr + 16, buf.ptr, 8, main, label="six")
        backend.begin_capture(side)
        backend.fill(buf.ptr + 40, 4, 8, side, label="seven")
        graph_exec = backend.instantiate(backend.end_capture(side))
        backend.wait(side, event)
        backend.graph_names[graph_exec] = "the graph"
        for _ in range(2):
            backend.launch_graph(graph_exec, side)
    seen = {
        stream: [(s.name, s.last, s.kind, s.count) for s in token.device if s.stream == stream]
        for stream in ("main", "side")
    }
    assert seen["main"] == [("one", "two", "fill", 2), ("three", "five", "copy", 2), ("six", "six", "copy", 1)]
    assert seen["side"] == [("four", "four", "fill", 1), *[("the graph", "the graph", "graph", 1)] * 2]
    assert [span.name for span in token.host if span.category == "recorded work"] == ["seven"]
    assert all(span.cause.name == span.name for span in token.device)
    assert all(span.start_ns <= span.end_ns for span in token.device)
    backend.close_events()
    backend.close()


def test_recording_changes_no_bit_and_leaves_no_trace(checkpoint: Checkpoints) -> None:
    with Engine.open(checkpoint("micro"), backend="host", max_context=32) as engine, engine.new_sequence() as seq:
        text = [5, 9, 130, 7, 7]
        want = [engine.decode_step(seq, token) for token in text]
    with opened(checkpoint("micro"), "step-graph", 8, HostBackend()) as (engine, backend):
        objects = (engine.machine, engine.bodies, engine._fetcher, engine._source)
        before = [set(vars(o)) for o in objects]
        n_events = backend.live()["events"]
        seq, recorder = engine.new_sequence(), Recorder(engine, backend)
        assert [set(vars(o)) for o in objects] != before
        got = [recorder.step(seq, token) for token in text]
        recorder.close()
        recorder.close()
        assert [set(vars(o)) for o in objects] == before
        recording = 2  # the engine's own, made for its first capture
        assert backend.live()["events"] == n_events + recording
        for a, b in zip(got, want, strict=True):
            assert np.array_equal(a.view(np.uint32), b.view(np.uint32))
        assert len(recorder.tokens) == len(text)
        engine.decode_step(seq, 6)
        assert len(recorder.tokens) == len(text)


def test_a_large_expert_takes_several_reads(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a span that says which bytes it is about; together they are the experts that were read."""
    monkeypatch.setattr(fetch, "PART_NBYTES", 1500)
    with opened(checkpoint("micro"), "step-graph", 8, HostBackend()) as (engine, backend):
        tokens = record(engine, backend, PROMPT, 2)
        nbytes = engine.arena.layout.nbytes
    for token in tokens:
        names = [span.name for span in token.host if span.category == "read"]
        experts = {name.split(",")[0] for name in names}
        parts = [f"{min(1500, nbytes - at)} bytes from {at} on" for at in range(0, nbytes, 1500)]
        assert len(parts) == 3
        assert sorted(names) == sorted(f"{expert}, {part}" for expert in experts for part in parts)
        assert summary(token)["expert_reads"] == 3 * token.counted["misses"] > 0
        assert token.counted["expert_nbytes_read"] == len(experts) * nbytes


def test_a_step_that_fails_is_not_kept(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(checkpoint("micro"), "step-graph", 8, HostBackend()) as (engine, backend):
        seq, recorder = engine.new_sequence(), Recorder(engine, backend)
        recorder.step(seq, 5)
        recorder.step(seq, 9)
        with monkeypatch.context() as patch:
            read = engine._source.read_expert

            def failing(layer: int, expert: int, out: Any, offset: int) -> None:
                if layer == 2:
                    raise CheckpointError("planted")
                read(layer, expert, out, offset)

            patch.setattr(engine._source, "read_expert", failing)
            with pytest.raises(Exception, match="planted"):
                recorder.step(seq, 130)
        assert backend.token is None
        recorder.step(seq, 130)
        assert [token.position for token in recorder.tokens] == [0, 1, 2]
        check_nesting([e for e in trace_events(recorder.tokens, "h", "d")["traceEvents"] if e["ph"] == "X"])
        recorder.close()


def test_on_the_driver(checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same calls through the driver backend: no timing event is recorded on a stream that captures."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "cu"))
    import fake_driver

    raw, cu = fake_driver.open_fake(tmp_path, SPECS)
    with opened(checkpoint("micro"), "step-graph", 64, raw) as (engine, backend):
        tokens = record(engine, backend, PROMPT, 4)
        stats = engine.stats()
    raw.close()
    assert stats.captures == 3
    spans = [e for e in trace_events(tokens, "h", "d")["traceEvents"] if e["ph"] == "X"]
    check_nesting(spans)
    assert sum(e["cat"] == "graph" for e in spans) == stats.replays == 9
    n_timed = sum(call == ("cuEventCreate", 0) for call in cu.calls)
    assert 0 < n_timed < 2 * sum(len(token.device) for token in tokens)  # used again for the next token


def test_time_with_work_on_any_stream() -> None:
    """Overlapping spans of several streams count once, gaps do not."""
    call = HostSpan("driver", "launch", "x", 0, 0)
    token = Token(3, 4, host=[HostSpan("step", "token", "decode step 3", 1_000, 901_000)])
    for stream, first, last in (
        ("a", 100_000, 300_000),
        ("b", 200_000, 250_000),
        ("b", 290_000, 400_000),
        ("a", 600_000, 700_000),
    ):
        span = DeviceSpan(stream, "kernels", "x", Event(0), Event(0), call)
        span.start_ns, span.end_ns = float(first), float(last)
        token.device.insert(0, span)
    assert (token.busy_us, token.host_us) == (400.0, 900.0)
