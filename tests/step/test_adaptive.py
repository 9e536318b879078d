"""The adaptive mode on a clock of our own: what it decides, when, and that it sets nothing but the one attribute."""

from copy import copy
from dataclasses import fields

import pytest
from structlog.testing import capture_logs

from ds41rt.step.adaptive import (
    CLEAN_ENOUGH,
    COMPARE_EVERY,
    FIRST_HOLD,
    GAIN,
    LONGEST_HOLD,
    WINDOW,
    Adaptive,
    Phase,
)
from ds41rt.step.state import SegState

N_SEGMENTS = 10


class Steps:
    """Tokens that take as long as is said, with as many clean replays of `N_SEGMENTS`."""

    def __init__(self, *, segments_s: float, eager_s: float, clean: int) -> None:
        self.segments_s = segments_s
        self.eager_s = eager_s
        self.clean = clean
        self.now = 0.0
        self.seg = SegState(4)
        self.adaptive = Adaptive(self.seg, lambda: self.now)
        self.kinds: list[bool] = []

    def token(self, *, position: int = 1, captures: int = 0, seconds: float | None = None) -> None:
        seg = self.seg
        seg.segment_mode = seg.wanted and position > 0 and not seg.disabled
        self.adaptive.token_starts()
        if seg.segment_mode and not captures:
            seg.launches += N_SEGMENTS
            seg.clean_replays += self.clean
        seg.captures += captures
        usual = self.segments_s if seg.segment_mode else self.eager_s
        self.now += usual if seconds is None else seconds
        before = copy(seg)
        self.adaptive.token_ended()
        changed = {f.name for f in fields(SegState) if getattr(before, f.name) != getattr(seg, f.name)}
        assert changed <= {"wanted"}
        self.now += 7.0  # between two tokens: nobody's time
        self.kinds.append(seg.segment_mode)

    def tokens(self, n: int) -> list[bool]:
        """The last n kinds: True for a token with segments."""
        for _ in range(n):
            self.token()
        return self.kinds[-n:]


def runs(kinds: list[bool]) -> list[tuple[bool, int]]:
    """Lengths of equal neighbours."""
    out: list[tuple[bool, int]] = []
    for kind in kinds:
        out.append((kind, out.pop()[1] + 1 if out and out[-1][0] == kind else 1))
    return out


@pytest.mark.parametrize("clean", [N_SEGMENTS, 9])
def test_clean_replays_are_never_compared(clean: int) -> None:
    """Not even where the eager step would be faster: that is not what the mode is for."""
    assert clean / N_SEGMENTS >= CLEAN_ENOUGH
    assert all(Steps(segments_s=0.02, eager_s=0.01, clean=clean).tokens(2000))


def test_segments_that_win_are_compared_now_and_then() -> None:
    kinds = Steps(segments_s=0.01, eager_s=0.012, clean=3).tokens(2 * WINDOW + 3 * (WINDOW + COMPARE_EVERY))
    assert runs(kinds) == [(True, 2 * WINDOW), *[(False, WINDOW), (True, COMPARE_EVERY)] * 3]


def test_a_gain_too_small_changes_nothing() -> None:
    kinds = Steps(segments_s=0.01, eager_s=0.01 * (GAIN + 0.001), clean=0).tokens(3 * WINDOW + 10)
    assert runs(kinds) == [(True, 2 * WINDOW), (False, WINDOW), (True, 10)]


def test_holds_double_up_to_a_limit() -> None:
    steps = Steps(segments_s=0.012, eager_s=0.01, clean=2)
    with capture_logs() as logs:
        kinds = steps.tokens(9000)
    holds = [n for kind, n in runs(kinds)[1:-1] if not kind]
    assert holds[0] == WINDOW + FIRST_HOLD
    assert holds[1:5] == [2 * FIRST_HOLD, 4 * FIRST_HOLD, 8 * FIRST_HOLD, 16 * FIRST_HOLD]
    assert set(holds[4:]) == {LONGEST_HOLD}
    assert set([n for kind, n in runs(kinds)[:-1] if kind][1:]) == {WINDOW}
    assert logs[0] == {
        "event": "segments are left off, the eager step is faster", "log_level": "info", "segments_us": 12000,
        "eager_us": 10000, "clean_replays": 4 * WINDOW, "replays": 2 * N_SEGMENTS * WINDOW, "tokens": FIRST_HOLD,
    }  # fmt: skip
    assert [entry["tokens"] for entry in logs[1:4]] == [2 * FIRST_HOLD, 4 * FIRST_HOLD, 8 * FIRST_HOLD]


def test_a_success_ends_the_hold_and_its_length() -> None:
    steps = Steps(segments_s=0.012, eager_s=0.01, clean=2)
    steps.tokens(3 * WINDOW + FIRST_HOLD + WINDOW)  # compared, held, tried in vain
    assert steps.adaptive.phase is Phase.HOLD
    steps.segments_s, steps.clean = 0.008, 9  # the cache is warm now
    with capture_logs() as logs:
        assert runs(steps.tokens(2 * FIRST_HOLD + 400)) == [(False, 2 * FIRST_HOLD), (True, 400)]
    assert [entry["event"] for entry in logs] == ["segments are used again"]
    assert (logs[0]["segments_us"], logs[0]["eager_us"]) == (8000, 10000)
    steps.segments_s, steps.clean = 0.012, 2
    kinds = steps.tokens(COMPARE_EVERY + 1000)
    assert next(n for kind, n in runs(kinds) if not kind) == WINDOW + FIRST_HOLD


def test_one_slow_token_decides_nothing() -> None:
    """The median of a window is compared, of a hold its last window."""
    steps = Steps(segments_s=0.01, eager_s=0.011, clean=0)
    for i in range(3 * WINDOW):
        steps.token(seconds=5.0 if i in (1, 4, WINDOW + 1, 2 * WINDOW + 3) else None)
    assert steps.adaptive.phase is Phase.SEGMENTS
    assert runs(steps.kinds) == [(True, 2 * WINDOW), (False, WINDOW)]


def test_tokens_that_tell_nothing_are_not_counted() -> None:
    """Captures, and position 0, which is eager whatever is wanted."""
    steps = Steps(segments_s=0.01, eager_s=0.02, clean=0)
    steps.token(position=0, seconds=9.0)
    steps.token(captures=3, seconds=9.0)
    for _ in range(2 * WINDOW - 1):
        steps.token()
        steps.token(position=0, seconds=9.0)
    assert steps.adaptive.phase is Phase.SEGMENTS
    steps.token()
    assert not steps.seg.wanted


def test_a_mode_that_is_off_is_left_alone() -> None:
    """After a failed capture no token has segments, and nothing is decided."""
    steps = Steps(segments_s=0.01, eager_s=0.001, clean=0)
    steps.seg.disabled = True
    assert not any(steps.tokens(1000))
    assert steps.adaptive.phase is Phase.SEGMENTS
    assert steps.seg.wanted
