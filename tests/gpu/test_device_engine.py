"""Whole engines on the device: step graph equals eager, both routings agree, memory comes back.

The same tests run on the host backend with fewer tokens.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds41rt.cu.backend import GpuBackend, open_backend
from ds41rt.cu.result import CudaError, Status
from ds41rt.engine import DecodeSequence, Engine, Mode, Stats

Checkpoints = Callable[[str], Path]


def text(n: int, seed: int) -> list[int]:
    """Random ids in which phrases come back, so that n-grams and experts do."""
    rng = np.random.default_rng(seed)
    ids: list[int] = rng.integers(3, 250, n).tolist()
    for at in range(20, n - 6, 20):
        ids[at : at + 6] = ids[at - 15 : at - 9]
    return ids


Picks = list[list[int]]
"""Per layer, the experts that a token picks."""


def starve(engine: Engine, picks: Picks, layer: int) -> None:
    """Make one pick of `layer` the only one of the next token that is absent. Wants strict LRU and spare slots."""
    absent = picks[layer][0]

    def load() -> None:
        for at, wanted in enumerate(picks):
            engine.preload(at, [e for e in wanted if (at, e) != (layer, absent)])

    load()
    strangers = ((at, e) for at, wanted in enumerate(picks) for e in range(engine.config.n_experts) if e not in wanted)
    while engine.cache.slot_of(layer, absent):
        at, expert = next(strangers)
        engine.preload(at, [expert])
    load()  # the strangers are the oldest now, and make room


def run(
    path: Path,
    backend: GpuBackend,
    mode: Mode,
    texts: list[list[int]],
    slots: int,
    disturb: Callable[[Engine, int, int], None] | None = None,
    picks: list[Picks] | None = None,
    **settings: Any,
) -> tuple[list[list[bytes]], Stats]:
    """Decode all texts in turn, a token each; returns the logits' bytes per text and position, and the counters.

    `disturb(engine, text, position)` is called before every token, `picks` takes what each token picked.
    """
    with Engine.open(path, mode=mode, backend=backend, expert_slots=slots, max_context=512, **settings) as engine:
        seqs: list[DecodeSequence] = [engine.new_sequence() for _ in texts]
        out: list[list[bytes]] = [[] for _ in texts]
        for at in range(len(texts[0])):
            for which, (ids, seq, logits) in enumerate(zip(texts, seqs, out, strict=True)):
                if disturb is not None:
                    disturb(engine, which, at)
                logits.append(engine.decode_step(seq, ids[at]).tobytes())
                if picks is not None:
                    picks.append([row.picks for row in engine.router.picks if row is not None])
        stats = engine.stats()
    demand = stats.device_hits + stats.host_hits + stats.misses
    assert demand == engine.config.n_layers * engine.config.top_k * stats.tokens
    assert stats.replays == stats.clean_replays + sum(stats.falls.values())
    return out, stats


@pytest.fixture
def backend(backend_name: str) -> Any:
    opened, _ = open_backend(backend_name)
    yield opened
    assert not any(opened.live().values()), opened.live()  # type: ignore[attr-defined]  # both backends have it
    opened.close()


@pytest.mark.parametrize("slots", [7, 1500, 3072])
def test_step_graph_equals_eager(checkpoint: Checkpoints, backend: GpuBackend, backend_name: str, slots: int) -> None:
    n = 500 if backend_name == "cuda" else 8
    eager, _ = run(checkpoint("tiny"), backend, "eager", [text(n, 1)], 3072)
    graph, stats = run(checkpoint("tiny"), backend, "step-graph", [text(n, 1)], slots)
    assert [i for i, (a, b) in enumerate(zip(eager[0], graph[0], strict=True)) if a != b] == []
    assert sum(stats.falls.values()) > 0
    if slots > 7 and n > 8:
        assert stats.clean_replays > 0


def test_two_texts_alternate_with_a_miss_at_every_layer(
    checkpoint: Checkpoints, backend: GpuBackend, backend_name: str
) -> None:
    n = 100 if backend_name == "cuda" else 6
    texts = [text(n, 2), text(n, 3)]
    picks: list[list[Picks]] = [[], []]
    solo = [
        run(checkpoint("tiny"), backend, "eager", [ids], 3072, picks=seen)[0][0]
        for ids, seen in zip(texts, picks, strict=True)
    ]

    def disturb(engine: Engine, which: int, at: int) -> None:
        if at > 1:  # the first two tokens of a text run eagerly and capture
            starve(engine, picks[which][at], (2 * at + which) % engine.config.n_layers)

    lru: dict[str, Any] = {"evict_policy": "oldest", "evict_random_pct": 0.0}
    graph, stats = run(checkpoint("tiny"), backend, "step-graph", texts, 64, disturb, **lru)
    assert graph == solo
    assert stats.recaptures == 0
    assert all(n_falls > 0 for n_falls in stats.falls_by_layer), stats.falls_by_layer
    assert sum(stats.falls.values()) >= 2 * (n - 2)


class FailingCapture:
    """A backend on which the n-th call made while a stream captures fails."""

    def __init__(self, backend: Any, n: int) -> None:
        self._backend = backend
        self.left = n

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def launch(self, launch: Any, stream: Any) -> None:
        if self._backend.capture_status(stream) != 0:
            self.left -= 1
            if self.left == 0:
                raise CudaError(Status.STREAM_CAPTURE_UNSUPPORTED, "cuLaunchKernel", "planted by a test")
        self._backend.launch(launch, stream)


@pytest.mark.parametrize("at", [1, 9, 40, 60])
def test_a_capture_that_fails(checkpoint: Checkpoints, backend: GpuBackend, at: int) -> None:
    ids = text(5, 4)
    eager, _ = run(checkpoint("tiny"), backend, "eager", [ids], 3072)
    failed, stats = run(checkpoint("tiny"), FailingCapture(backend, at), "step-graph", [ids], 900)
    assert failed == eager
    assert stats.replays == 0
    again, stats = run(checkpoint("tiny"), backend, "step-graph", [ids], 900)
    assert again == eager
    assert stats.replays > 0


def test_both_routings_agree(checkpoint: Checkpoints, backend: GpuBackend, backend_name: str) -> None:
    n = 500 if backend_name == "cuda" else 5
    texts = [text(n, seed) for seed in range(5, 9)]
    checked, _ = run(checkpoint("tiny"), backend, "eager", texts, 900, device_route_diag=True)
    on_host, _ = run(checkpoint("tiny"), backend, "eager", [t[:40] for t in texts], 900, device_route=False)
    assert [logits[:40] for logits in checked] == [logits[:40] for logits in on_host]


def test_memory_comes_back(checkpoint: Checkpoints, backend_name: str) -> None:
    rounds = 50 if backend_name == "cuda" else 5
    backend, _ = open_backend(backend_name)
    free: list[int] = []
    first: list[list[bytes]] = []
    for _ in range(rounds):
        logits, _ = run(checkpoint("micro"), backend, "step-graph", [text(8, 1)], 20)
        first = first or logits
        assert logits == first
        assert list(backend.ledger()) == []
        free.append(backend.memory_info()[0])
    backend.close()
    assert free[-1] == free[1], free
