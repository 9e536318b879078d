"""Step graph while it pays: measures tokens, and leaves segments off for a while where the eager step is faster.

A segment whose layers often miss falls often, and a fall is a replay for nothing. So tokens are timed. When too few
replays are clean, some tokens run eagerly for comparison; if they are faster, segments stay off for a *hold*, after
which some tokens try them again. Only times depend on it, no bits. This file reads the machine's counters and sets one
attribute, `SegState.wanted`; it must not know anything else of the machine, nor the device.
"""

import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from statistics import median
from typing import NamedTuple

from ds41rt.log import Logger
from ds41rt.step.state import SegState

log = Logger("ds41rt.step")

WINDOW = 8  # tokens of one kind that a median is taken of
CLEAN_ENOUGH = 0.9  # share of clean replays from which on nothing is compared
GAIN = 0.98  # segments are left off when the eager step takes less than this share of their time
COMPARE_EVERY = 256  # tokens with segments between two comparisons
FIRST_HOLD, LONGEST_HOLD = 64, 1024  # eager tokens before segments are tried again; doubled when the trial fails


class Phase(Enum):
    """What tokens are run for."""

    SEGMENTS = "segments"
    COMPARE = "eager, to compare"
    HOLD = "eager, because it is faster"
    RETRY = "segments, to compare again"


class _Token(NamedTuple):
    seconds: float
    replays: int
    clean: int


class Adaptive:
    """Decides after every completed token whether the next one is to use segments. `clock` gives seconds."""

    def __init__(self, seg: SegState, clock: Callable[[], float] = time.perf_counter) -> None:
        self._seg = seg
        self._clock = clock
        self._start = 0.0
        self._last = self._counters()
        self.phase = Phase.SEGMENTS
        self._tokens: deque[_Token] = deque(maxlen=WINDOW)  # of this phase
        self._left = WINDOW  # tokens before this phase may end
        self._dirty = False  # too few replays of the last window were clean
        self._hold = FIRST_HOLD
        self._segments_s = 0.0  # median of the last window of segment tokens
        self._eager_s = 0.0

    def token_starts(self) -> None:
        self._start = self._clock()

    def token_ended(self) -> None:
        """A token was completed. One that captured, or did not run as wanted (position 0 never does), tells nothing."""
        seconds = self._clock() - self._start
        last, self._last = self._last, self._counters()
        captures, replays, clean = (now - then for now, then in zip(self._last, last, strict=True))
        if captures or self._seg.segment_mode != self._seg.wanted:
            return
        self._tokens.append(_Token(seconds, replays, clean))
        self._left -= 1
        if self._left <= 0:
            self._decide(median(token.seconds for token in self._tokens))

    def _counters(self) -> tuple[int, int, int]:
        return self._seg.captures, self._seg.launches, self._seg.clean_replays

    def _decide(self, seconds: float) -> None:
        if self.phase is Phase.SEGMENTS:
            self._segments_s = seconds
            dirty = self._clean_share() < CLEAN_ENOUGH
            if dirty and self._dirty:
                self._enter(Phase.COMPARE, WINDOW)
            else:
                # The next window begins here: one that was clean in part says nothing of what falls cost.
                self._enter(Phase.SEGMENTS, WINDOW)
            self._dirty = dirty
        elif self.phase is Phase.COMPARE:
            self._eager_s = seconds
            if seconds < GAIN * self._segments_s:
                self._log("segments are left off, the eager step is faster", tokens=self._hold)
                self._enter(Phase.HOLD, self._hold)
            else:
                self._enter(Phase.SEGMENTS, COMPARE_EVERY)
        elif self.phase is Phase.HOLD:
            self._eager_s = seconds
            self._enter(Phase.RETRY, WINDOW)
        else:
            self._segments_s = seconds
            if self._eager_s < GAIN * seconds:
                self._hold = min(2 * self._hold, LONGEST_HOLD)
                self._log("segments stay off, the eager step is still faster", tokens=self._hold)
                self._enter(Phase.HOLD, self._hold)
            else:
                self._hold = FIRST_HOLD
                self._log("segments are used again")
                self._enter(Phase.SEGMENTS, COMPARE_EVERY)

    def _enter(self, phase: Phase, n_tokens: int) -> None:
        self.phase = phase
        self._left = n_tokens
        self._tokens.clear()
        self._seg.wanted = phase in (Phase.SEGMENTS, Phase.RETRY)

    def _clean_share(self) -> float:
        replays = sum(token.replays for token in self._tokens)
        return sum(token.clean for token in self._tokens) / replays if replays else 1.0

    def _log(self, event: str, **numbers: int) -> None:
        log.info(
            event,
            segments_us=round(1e6 * self._segments_s),
            eager_us=round(1e6 * self._eager_s),
            clean_replays=self._seg.clean_replays,
            replays=self._seg.launches,
            **numbers,
        )
