"""Three tiers on the device: no slot is rewritten while something may read it, and a host-tier hit is no fall.

Proven by the bits: whatever the arenas' sizes, the logits equal those of a run with every expert on the device. The
same tests run on the host backend with fewer tokens.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_device_engine import run, text

from ds41rt.cu.backend import GpuBackend, open_backend

Checkpoints = Callable[[str], Path]

# Of the tiny preset: 8 layers of 384 experts, 3,072 in all.
ALL = 3072
# (device slots, host slots): from top-k + 1 up in steps, either arena empty, both, and all that there are.
ARENAS = [(7, 0), (0, 7), (4, 3), (7, 40), (40, 7), (64, 64), (300, 0), (300, 300), (0, 900), (900, 900), (1536, 1536)]


@pytest.fixture
def backend(backend_name: str) -> Any:
    opened, _ = open_backend(backend_name)
    yield opened
    assert not any(opened.live().values()), opened.live()  # type: ignore[attr-defined]  # both backends have it
    opened.close()


def length(backend_name: str) -> int:
    return 500 if backend_name == "cuda" else 3


@pytest.fixture(scope="module")
def resident(checkpoint: Checkpoints, backend_name: str) -> list[list[bytes]]:
    """Logits of two texts in turn, everything on the device: 1,000 tokens on a GPU."""
    opened, _ = open_backend(backend_name)
    n = length(backend_name)
    logits, _ = run(checkpoint("tiny"), opened, "eager", [text(n, 1), text(n, 2)], ALL)
    opened.close()
    return logits


@pytest.mark.parametrize(("device_slots", "host_slots"), ARENAS)
def test_every_size_of_both_arenas(
    checkpoint: Checkpoints,
    backend: GpuBackend,
    backend_name: str,
    resident: list[list[bytes]],
    device_slots: int,
    host_slots: int,
) -> None:
    n = length(backend_name)
    texts = [text(n, 1), text(n, 2)]
    logits, stats = run(
        checkpoint("tiny"), backend, "step-graph", texts, device_slots, host_slots=host_slots, evict_random_pct=8.0
    )
    for which in range(2):
        wrong = [i for i, (a, b) in enumerate(zip(resident[which], logits[which], strict=True)) if a != b]
        assert wrong == []
    assert stats.recaptures == 0
    if host_slots:
        assert stats.host_hits + stats.misses > 0
    if min(device_slots, host_slots) >= 300 and n > 100:
        assert stats.promotions > 0


@pytest.mark.parametrize("device_slots", [0, 512])
def test_misses_of_the_host_tier_are_no_falls(
    checkpoint: Checkpoints, backend: GpuBackend, backend_name: str, resident: list[list[bytes]], device_slots: int
) -> None:
    """Everything is in one of two tiers once each text's experts have been read; from there on nothing falls."""
    n = length(backend_name)
    halves: list[int] = []

    def note(engine: Any, which: int, at: int) -> None:
        if which == 0 and at == 0:  # what is not in the device arena then is in the host arena
            for layer in range(engine.config.n_layers):
                engine.preload(layer, range(engine.config.n_experts))
        halves.append(sum(engine.stats().falls.values()))

    logits, stats = run(
        checkpoint("tiny"),
        backend,
        "step-graph",
        [text(n, 1), text(n, 2)],
        device_slots,
        note,
        host_slots=ALL - device_slots,
    )
    assert logits == resident
    assert stats.misses == 0
    assert stats.host_hits > 0
    assert sum(stats.falls.values()) == 0
    assert halves[-1] == 0
    assert stats.clean_replays == stats.replays > 0


def test_reader_threads_change_nothing(checkpoint: Checkpoints, backend: GpuBackend, backend_name: str) -> None:
    n = length(backend_name)
    texts = [text(n, 3)]
    outcomes = []
    for threads in (0, 8):
        logits, stats = run(checkpoint("tiny"), backend, "step-graph", texts, 60, host_slots=0, reader_threads=threads)
        outcomes.append((logits, stats.misses, stats.falls))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("prefetch", [False, True])
def test_eager_reads_ahead(
    checkpoint: Checkpoints, backend: GpuBackend, backend_name: str, resident: list[list[bytes]], prefetch: bool
) -> None:
    n = length(backend_name)
    texts = [text(n, 1), text(n, 2)]
    logits, stats = run(
        checkpoint("tiny"), backend, "eager", texts, 64, host_slots=64, prefetch=prefetch, device_route=True
    )
    assert logits == resident
    assert (stats.prefetch_issued > 0) is prefetch
    assert stats.prefetch_useful + stats.prefetch_wasted + stats.prefetch_failed <= stats.prefetch_issued
