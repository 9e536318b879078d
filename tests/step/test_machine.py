"""The layer-state machine on a fake device: order of calls, exactly-once effects, recapture, failures at every call."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from fake_bodies import ENGRAM, INDEX, KV, PLAIN, RATIO2, SMALL, FakeBackend, FakeBodies, Role
from structlog.testing import capture_logs

from ds41rt.cu.backend import GpuBackend
from ds41rt.cu.result import CudaError, Status
from ds41rt.errors import Ds41Error
from ds41rt.moe.header import FallKind
from ds41rt.step.machine import StepMachine, geometry

FOUR = (PLAIN, PLAIN, KV, RATIO2)  # segments 0..2 and 2..4
OWNER_OF = {0: 0, 1: 0, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 4}


@pytest.fixture(autouse=True)
def _logs() -> Iterator[None]:
    """Keep the machine's events off the terminal."""
    with capture_logs():
        yield


class HookedMachine(StepMachine):
    """Calls `before(idx)` before a layer's step."""

    before: Callable[[int], None] = staticmethod(lambda idx: None)

    def step_seg(self, idx: int) -> None:
        self.before(idx)
        super().step_seg(idx)


class Rig:
    """A machine on a fake device, and the eager machine that says what is right."""

    def __init__(self, roles: tuple[Role, ...] = SMALL, *, step_graph: bool = True, log: bool = False) -> None:
        self.backend = FakeBackend()
        self.bodies = FakeBodies(self.backend, roles)
        self.machine = HookedMachine(
            cast(GpuBackend, self.backend), self.bodies, self.backend.stream, step_graph=step_graph, log=log
        )
        self.seg = self.machine.seg

    def token(self, position: int, wrong: dict[int, FallKind] | None = None) -> dict[str, Any]:
        self.bodies.wrong[self.bodies.seq.ident, position] = wrong or {}
        self.machine.run_token(position)
        self.check()
        return self.bodies.state()

    def calls(self, position: int, wrong: dict[int, FallKind] | None = None) -> list[str]:
        """The calls of one token, less the fork and join around the shared expert."""
        self.backend.timeline.clear()
        self.token(position, wrong)
        return [c for c in self.backend.timeline if not c.startswith(("record", "wait", "shared"))]

    def check(self) -> None:
        """What holds between any two tokens."""
        seg = self.seg
        assert seg.launches == seg.clean_replays + sum(seg.falls.values())
        assert sum(seg.falls.values()) == sum(seg.falls_by_layer)
        assert not self.backend.in_capture
        assert not seg.in_step
        assert seg.capturing is None
        graphs = [h for h, what in self.backend.alive.items() if what in ("graph", "exec")]
        assert len(graphs) == sum(g is not None for g in seg.graphs) + len(seg.doomed)
        effects = [(e, layer) for e, layer, _ in self.bodies.mem["streams"][1:]]
        once: list[tuple[str, int]] = []
        for layer in range(self.machine.n):
            once += [("engram", layer)] if layer in ENGRAM else []
            once += [("attn", layer), ("ffn", layer)]
        assert effects == once

    def close(self) -> None:
        self.machine.close()
        assert self.backend.leaked() == []


@pytest.fixture
def four() -> Iterator[Rig]:
    rig = Rig(FOUR)
    yield rig
    rig.close()


def eager_states(tokens: int, roles: tuple[Role, ...] = SMALL) -> list[dict[str, Any]]:
    rig = Rig(roles, step_graph=False)
    states = [rig.token(p) for p in range(tokens)]
    assert not [c for c in rig.backend.timeline if not c.endswith("@compute")]
    return states


EAGER_0 = ["upload_sequence@compute", "start_token@compute", "preload@compute"]
EAGER_LAYERS = [f"{half} {layer}@compute" for layer in range(4) for half in ("eager attention", "eager ffn")]
START = ["start_token@compute", "preload@compute", "prepare 0..2@compute"]
REPLAY_0 = ["launch@compute", "read_headers 0..1"]
PREPARE_2 = ["own attention 2@compute", "prepare 2..4@compute"]
REPLAY_2 = ["launch@compute", "read_headers 2..3"]
REST_2 = [*PREPARE_2, *REPLAY_2]


def recorded(layer: int) -> list[str]:
    own = [] if layer == 2 else [f"attn_in {layer}@cap", f"attention {layer}@cap"]
    return [*own, f"save {layer}@cap", f"ffn {layer}@cap", f"experts {layer}@cap"]


def eager(layer: int) -> list[str]:
    return [f"eager attention {layer}@compute", f"eager ffn {layer}@compute"]


RECORDING_NAMES = ["step recording", "step recording side", "recorded fork", "recorded join"]
CLOSE = ["end@cap", "describe", "instantiate", "destroy_graph"]


# ---- geometry


def test_real_geometry_has_nine_segments() -> None:
    kv, index = {2, 8, 14, 20}, {2, 8, 14, 20, 24, 28, 32, 36}
    roles = [Role(0 if i < 2 else 2 if i < 20 else 1, i in kv, i in index) for i in range(40)]
    owners = [0, *sorted(kv | index)]
    spans = {s: geometry(roles, s) for s in owners}
    assert [(s, spans[s][0]) for s in owners] == list(zip(owners, [*owners[1:], 40], strict=True))
    assert spans[0][1] == (False, True)
    assert all(spans[s][1] == (True, False) for s in owners[1:])


def test_geometry_classes_ignore_the_owner_unless_it_is_capturable() -> None:
    assert geometry([PLAIN, RATIO2, KV], 0) == (2, (True, True))
    assert geometry([PLAIN, KV, PLAIN], 1) == (3, (False, True))
    assert geometry([PLAIN, KV, INDEX], 1) == (2, (False, False))
    assert geometry([PLAIN, KV, INDEX], 2) == (3, (False, False))
    assert geometry([PLAIN], 0) == (1, (False, True))


def test_layer_0_a_source_means_eager_with_one_warning() -> None:
    with capture_logs() as logs:
        rig = Rig((KV, RATIO2, PLAIN))
        for p in range(3):
            rig.token(p)
    assert [(e["log_level"], e["reason"]) for e in logs] == [("warning", "layer 0 is a source layer")]
    assert (rig.seg.tokens, rig.seg.segment_tokens, rig.seg.launches) == (3, 0, 0)
    rig.close()


# ---- timelines


def test_position_0_is_eager(four: Rig) -> None:
    assert four.calls(0) == [*EAGER_0, *EAGER_LAYERS]
    assert four.backend.leaked() == []


def test_capture_token_records_while_it_runs_eagerly(four: Rig) -> None:
    four.token(0)
    assert four.calls(1) == [
        *(f"create_stream {n}" for n in RECORDING_NAMES[:2]),
        *(f"create_event {n}" for n in RECORDING_NAMES[2:]),
        *START,
        "begin@cap",
        *recorded(0),
        *eager(0),
        *recorded(1),
        *eager(1),
        "attn_in 2@cap",
        *CLOSE,
        "attn_in 2@compute",
        *PREPARE_2,
        "begin@cap",
        *recorded(2),
        "eager ffn 2@compute",
        *recorded(3),
        *CLOSE,
        *eager(3),
    ]
    assert (four.seg.captures, four.seg.launches) == (2, 0)


def test_recorded_ffn_forks_and_joins_the_shared_expert(four: Rig) -> None:
    four.token(0)
    four.backend.timeline.clear()
    four.token(1)
    at = four.backend.timeline.index("ffn 0@cap")
    assert four.backend.timeline[at + 1 : at + 7] == [
        "record@cap",
        "wait@side",
        "shared 0@side",
        "record@side",
        "wait@cap",
        "experts 0@cap",
    ]


def test_clean_replay(four: Rig) -> None:
    four.token(0)
    four.token(1)
    assert four.calls(2) == [*START, *REPLAY_0, *PREPARE_2, *REPLAY_2]
    assert (four.seg.launches, four.seg.clean_replays) == (2, 2)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (
            0,
            [
                *REPLAY_0,
                "restore 0@compute",
                "eager ffn 0@compute",
                *eager(1),
                "attn_in 2@compute",
                *PREPARE_2,
                *REPLAY_2,
            ],
        ),
        (1, [*REPLAY_0, "restore 1@compute", "eager ffn 1@compute", "attn_in 2@compute", *PREPARE_2, *REPLAY_2]),
        (2, [*REPLAY_0, *PREPARE_2, *REPLAY_2, "restore 2@compute", "eager ffn 2@compute", *eager(3)]),
        (3, [*REPLAY_0, *PREPARE_2, *REPLAY_2, "restore 3@compute", "eager ffn 3@compute"]),
    ],
)
def test_fall(four: Rig, layer: int, expected: list[str]) -> None:
    four.token(0)
    four.token(1)
    assert four.calls(2, {layer: "miss"}) == [*START, *expected]
    assert (four.seg.launches, four.seg.clean_replays, four.seg.falls["miss"]) == (2, 1, 1)
    assert four.seg.falls_by_layer == [int(i == layer) for i in range(4)]
    assert four.calls(3) == [*START, *REPLAY_0, *PREPARE_2, *REPLAY_2]


def test_fall_in_mid_segment_runs_the_layers_behind_it_whole() -> None:
    rig = Rig()
    for p in range(2):
        rig.token(p)
    calls = rig.calls(2, {5: "miss", 7: "miss"})
    assert calls[calls.index("restore 5@compute") :] == [
        "restore 5@compute",
        "eager ffn 5@compute",
        *eager(6),
        *eager(7),
    ]
    rig.close()


# ---- exactly once


def test_every_set_of_wrong_layers_equals_the_eager_run() -> None:
    """All 256 subsets of eight layers in three segments, kinds mixed."""
    kinds: list[FallKind] = ["miss", "stale_table", "no_flag"]
    right = eager_states(2 + 2**8)
    rig = Rig()
    expected = [0] * 8
    for position in range(2 + 2**8):
        wrong = {i: kinds[(i + position) % 3] for i in range(8) if position >= 2 and (position - 2) >> i & 1}
        for owner in (0, 2, 4):
            first = [i for i in sorted(wrong) if OWNER_OF[i] == owner][:1]
            for layer in first:
                expected[layer] += 1
        assert rig.token(position, wrong) == right[position], (position, wrong)
    seg = rig.seg
    assert seg.falls_by_layer == expected
    assert min(seg.falls.values()) > 0
    assert seg.launches == 3 * 2**8
    assert (seg.captures, seg.recaptures, seg.tokens, seg.segment_tokens) == (3, 0, 258, 257)
    rig.close()


# ---- recapture, sequences


def test_a_changed_baked_address_drops_all_graphs() -> None:
    rig, right = Rig(), eager_states(6)
    for p in range(3):
        rig.token(p)
    for p in range(3, 5):
        if p == 3:
            rig.bodies.baked_value = (1, 2, 4)
        rig.backend.timeline.clear()
        with capture_logs() as logs:
            assert rig.token(p) == right[p]
        if p == 3:
            assert rig.backend.timeline[:3] == ["destroy_exec"] * 3
            recaptures = [e for e in logs if e["event"] == "recapture"]
            assert [(e["reason"], e["segments"]) for e in recaptures] == [("baked buffers changed", 3)]
    assert (rig.seg.captures, rig.seg.recaptures, rig.seg.launches) == (6, 3, 6)
    rig.close()


@pytest.mark.parametrize("what", ["rows_b", "end", "classes"])
def test_a_changed_segment_drops_one_graph(what: str) -> None:
    rig, right = Rig(), eager_states(5)
    for p in range(3):
        rig.token(p)
    if what == "rows_b":
        rig.bodies.rows_b[2] = 77
    else:  # as if the graph had been captured for another geometry
        graph = rig.seg.graphs[2]
        assert graph is not None
        object.__setattr__(graph, what, 5 if what == "end" else (False, False))
    assert rig.token(3) == right[3]
    assert (rig.seg.captures, rig.seg.recaptures, rig.seg.launches) == (4, 1, 3 + 2)
    assert rig.token(4) == right[4]
    assert (rig.seg.captures, rig.seg.recaptures, rig.seg.launches) == (4, 1, 3 + 2 + 3)
    rig.close()


def test_alternating_sequences_upload_the_block_and_capture_nothing_again() -> None:
    solo = [Rig(step_graph=False), Rig(step_graph=False)]
    solo[1].bodies.seq = solo[1].bodies.new_sequence(1)
    rig = Rig()
    sequences = [rig.bodies.seq, rig.bodies.new_sequence(1)]
    for position in range(6):
        for s in (0, 1):
            rig.bodies.seq = sequences[s]
            wrong: dict[int, FallKind] = {(position + s) % 8: "miss"}
            assert rig.token(position, wrong) == solo[s].token(position), (position, s)
    assert (rig.seg.captures, rig.seg.recaptures) == (3, 0)
    assert rig.bodies.uploads == 12
    rig.close()


def test_one_sequence_uploads_the_block_once() -> None:
    rig = Rig()
    for position in range(4):
        rig.token(position)
    assert rig.bodies.uploads == 1
    rig.close()


@pytest.mark.parametrize("fall", [None, 0, 4, 6])
@pytest.mark.parametrize("moved", [*range(8), "pool"])
def test_a_buffer_of_the_sequence_moves_before_each_layer(moved: int | str, fall: int | None) -> None:
    right = eager_states(2 + 8 + 1)
    rig = Rig()
    wrong: dict[int, FallKind] = {} if fall is None else {fall: "miss"}
    for position in range(2):
        rig.token(position)

    def before(idx: int) -> None:
        if idx == rig.machine.position - 2:
            rig.bodies.move_pool() if moved == "pool" else rig.bodies.move_ring(cast(int, moved))

    rig.machine.before = before
    for position in range(2, 2 + 8 + 1):
        assert rig.token(position, wrong) == right[position], position
    assert rig.seg.recaptures == 0
    rig.close()


def test_a_ring_that_moves_in_eager_mode_raises_the_generation() -> None:
    rig = Rig()
    rig.token(0)
    before = rig.seg.generation
    rig.bodies.move_ring(5)
    rig.token(0)
    assert rig.seg.generation == before + 1
    rig.close()


# ---- failures


def cuda_error() -> CudaError:
    return CudaError(Status.STREAM_CAPTURE_INVALIDATED, "injected")


TOKENS = 5
WRONG: dict[int, dict[int, FallKind]] = {3: {1: "miss", 5: "stale_table"}}


def ticks_of_a_run() -> list[str]:
    """All calls of the scenario that the fault tests repeat: eager, capture, replay, falls, recapture, close."""
    rig = Rig()
    run_scenario(rig, eager_states(TOKENS))
    rig.close()
    return rig.backend.timeline


def run_scenario(rig: Rig, right: list[dict[str, Any]]) -> list[BaseException]:
    """Steps every token, again after an exception; every state must be right in the end."""
    raised: list[BaseException] = []
    for position in range(TOKENS):
        if position == 4:
            rig.bodies.baked_value = (9,)
        try:
            state = rig.token(position, WRONG.get(position))
        except (CudaError, KeyboardInterrupt) as error:
            raised.append(error)
            rig.backend.fail.clear()
            assert rig.backend.in_capture == {}
            assert rig.seg.capturing is None
            assert rig.seg.skip_until == rig.seg.eager_until == 0
            assert rig.seg.ffn_only_at is None
            state = rig.token(position, WRONG.get(position))
        assert state == right[position], position
    return raised


ALL_TICKS = ticks_of_a_run()
RECORDING = ("create_", "begin@", "end@", "describe", "instantiate")


def belongs_to_a_recording(call: str) -> bool:
    return call.startswith(RECORDING) or call.endswith(("@cap", "@side"))


@pytest.mark.parametrize("after", [False, True])
def test_a_failure_at_every_call(after: bool) -> None:
    """A recorded call that fails turns the mode off without an exception; any other raises and the mode stays on."""
    right = eager_states(TOKENS)
    outcomes = {"disabled": 0, "raised": 0, "kept": 0}
    for n, call in enumerate(ALL_TICKS):
        if after and (call.startswith("end@") or not call.endswith(("@cap", "@side", "@compute"))):
            continue  # a call that fails returns no handle, and one that destroys destroys nothing
        rig = Rig()
        rig.backend.fail, rig.backend.fail_after = {n: cuda_error()}, after
        with capture_logs() as logs:
            raised = run_scenario(rig, right)
        warnings = [e["event"] for e in logs if e["log_level"] == "warning"]
        if belongs_to_a_recording(call):
            outcomes["disabled"] += 1
            assert raised == [], (n, call)
            assert rig.seg.disabled, (n, call)
            assert rig.seg.capture_failures == 1
            assert rig.seg.graphs == [None] * 8
            assert [w for w in warnings if "mode" in w or "step graph off" in w] == warnings, (n, call)
            assert len(warnings) == 1
        elif call.startswith("destroy") or call == "synchronize@compute":
            outcomes["kept"] += 1
            assert raised == [], (n, call)
            assert not rig.seg.disabled
        else:
            outcomes["raised"] += 1
            assert len(raised) == 1, (n, call)
            assert not rig.seg.disabled, (n, call)
            assert warnings == []
            assert rig.token(TOKENS) is not None
            assert rig.seg.clean_replays > 0
        rig.machine.close()
        rig.close()  # a destroy that failed in the first close is tried again
    assert outcomes["raised"] > 20
    assert outcomes["disabled"] > 20
    assert after or outcomes["kept"] > 5


@pytest.mark.parametrize("make", [KeyboardInterrupt, lambda: TypeError("a bug")])
def test_an_interrupt_or_a_bug_at_every_call_passes_and_the_mode_stays_on(make: Callable[[], BaseException]) -> None:
    right = eager_states(TOKENS)
    for n, call in enumerate(ALL_TICKS):
        rig = Rig()
        rig.backend.fail = {n: make()}
        raised = 0
        for position in range(TOKENS):
            if position == 4:
                rig.bodies.baked_value = (9,)
            try:
                rig.token(position, WRONG.get(position))
            except (KeyboardInterrupt, TypeError):
                raised += 1
                assert rig.backend.in_capture == {}, (n, call)
                rig.token(position, WRONG.get(position))
            assert rig.bodies.state() == right[position], (n, call)
        assert not rig.seg.disabled
        try:
            rig.machine.close()
        except (KeyboardInterrupt, TypeError):
            raised += 1
        assert raised == 1, (n, call)
        rig.close()


def test_the_mode_stays_off_after_a_failed_capture() -> None:
    rig, right = Rig(), eager_states(8)
    rig.token(0)
    at = ALL_TICKS.index("end@cap")
    rig.backend.fail = {at: cuda_error()}
    for position in range(1, 8):
        assert rig.token(position) == right[position]
    assert rig.backend.ticks > at
    assert rig.backend.timeline.count("begin@cap") == 1
    assert (rig.seg.captures, rig.seg.launches, rig.seg.segment_tokens, rig.seg.tokens) == (0, 0, 1, 8)
    rig.close()


def test_a_typed_error_of_ours_in_a_recording_is_a_failed_capture() -> None:
    rig, right = Rig(), eager_states(3)
    rig.token(0)
    rig.backend.fail = {ALL_TICKS.index("save 1@cap"): Ds41Error("waits for an event recorded outside")}
    with capture_logs() as logs:
        assert rig.token(1) == right[1]
    assert [e["error"] for e in logs if e["log_level"] == "warning"] == ["waits for an event recorded outside"]
    assert rig.seg.disabled
    rig.close()


def test_an_unjoined_side_stream_is_a_failed_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, right = Rig(), eager_states(3)
    rig.token(0)
    body_ffn = rig.bodies.body_ffn

    def leaves_the_side_stream_open(idx: int, stream: Any, fork: Any) -> None:
        body_ffn(idx, stream, fork)
        rig.backend.record(fork.ev_fork, stream)
        rig.backend.wait(fork.side, fork.ev_fork)

    monkeypatch.setattr(rig.bodies, "body_ffn", leaves_the_side_stream_open)
    for position in range(1, 3):
        assert rig.token(position) == right[position]
    assert rig.seg.disabled
    rig.close()


@pytest.mark.parametrize("kind", ["alloc", "free"])
def test_a_graph_that_owns_memory_is_a_failed_capture(kind: str) -> None:
    rig, right = Rig(), eager_states(3)
    rig.token(0)
    rig.backend.more_kinds = ("event", kind)
    with capture_logs() as logs:
        for position in range(1, 3):
            assert rig.token(position) == right[position]
    (error,) = [e["error"] for e in logs if e["log_level"] == "warning"]
    for part in (f"would {kind} memory", "'node "):
        assert part in error
    assert rig.seg.disabled
    assert "instantiate" not in rig.backend.timeline
    rig.close()


def test_an_exception_from_an_eager_layer_of_a_capture_token_keeps_complete_segments() -> None:
    rig, right = Rig(), eager_states(3)
    rig.token(0)
    rig.backend.fail = {ALL_TICKS.index("eager attention 3@compute", len(ALL_TICKS) // 8): cuda_error()}
    with pytest.raises(CudaError, match="injected"):
        rig.token(1)
    assert rig.backend.in_capture == {}
    assert [g is not None for g in rig.seg.graphs[:5:2]] == [True, False, False]
    assert rig.token(1) == right[1]
    assert (rig.seg.captures, rig.seg.launches) == (3, 1)
    assert rig.token(2) == right[2]
    rig.close()


def test_a_step_left_without_an_exception_handler_is_abandoned_by_the_next() -> None:
    rig, right = Rig(), eager_states(3)
    rig.token(0)
    rig.seg.in_step = True  # an interrupt that hit the abandoning itself
    rig.machine.position = 1
    for idx in range(2):
        rig.machine.step_seg(idx)
    assert rig.backend.in_capture
    assert rig.token(1) == right[1]
    assert rig.token(2) == right[2]
    assert (rig.seg.disabled, rig.seg.launches) == (False, 3)
    rig.close()


def test_a_failed_upload_of_the_sequence_block_is_not_trusted() -> None:
    """The upload for the other sequence fails after it took effect; the first sequence is stepped next."""
    rig, right = Rig(), eager_states(3)
    for position in range(2):
        rig.token(position)
    first = rig.bodies.seq
    rig.bodies.seq = rig.bodies.new_sequence(1)
    rig.backend.fail, rig.backend.fail_after = {rig.backend.ticks: cuda_error()}, True
    with pytest.raises(CudaError, match="injected"):
        rig.machine.run_token(0)
    assert "upload_sequence@compute" in rig.backend.timeline[-2:]
    rig.bodies.seq = first
    assert rig.token(2) == right[2]
    rig.close()


def test_a_layer_outside_any_segment_is_an_error() -> None:
    rig = Rig()
    rig.token(0)
    rig.token(1)
    rig.machine.position = 2
    rig.machine.step_seg(0)
    rig.seg.skip_until = 0
    with pytest.raises(Ds41Error, match="layer 1 reached outside any segment"):
        rig.machine.step_seg(1)
    rig.close()


def test_close_is_idempotent_and_destroys_everything() -> None:
    rig = Rig()
    for position in range(3):
        rig.token(position)
    assert sorted(set(rig.backend.leaked())) == [
        "exec",
        "recorded fork",
        "recorded join",
        "step recording",
        "step recording side",
    ]
    rig.close()
    ticks = rig.backend.ticks
    rig.close()
    assert rig.backend.timeline[ticks:] == ["synchronize@compute"]


# ---- logs and counters


def test_counters_when_all_is_well() -> None:
    rig = Rig()
    for position in range(10):
        rig.token(position)
    seg = rig.seg
    assert (seg.tokens, seg.segment_tokens, seg.captures, seg.recaptures, seg.capture_failures) == (10, 9, 3, 0, 0)
    assert seg.launches == seg.clean_replays == 8 * 3
    rig.close()


def test_log_events() -> None:
    rig = Rig(FOUR, log=True)
    with capture_logs() as logs:
        for position in range(2):
            rig.token(position)
        rig.token(2, {3: "no_flag"})
    events = [e for e in logs if e["event"] != "step graph token"]
    assert [(e["event"], e.get("owner"), e.get("end"), e.get("moe_layers")) for e in events[:2]] == [
        ("segment captured", 0, 2, 2),
        ("segment captured", 2, 4, 2),
    ]
    assert events[2:] == [
        {"event": "miss fall", "log_level": "debug", "segment": 2, "layer": 3, "kind": "no_flag", "fetched": 1}
    ]
    lines = [e for e in logs if e["event"] == "step graph token"]
    assert [(e["position"], e["launches"], e["falls"]) for e in lines] == [(0, 0, 0), (1, 0, 0), (2, 2, 1)]
    rig.close()


def test_quiet_by_default() -> None:
    rig = Rig()
    rig.token(0)
    rig.token(1)
    with capture_logs() as logs:
        rig.token(2)
    assert logs == []
    rig.close()
