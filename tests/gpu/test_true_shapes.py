"""Step graph equals eager at the released widths, bit for bit: misses everywhere, two sequences, a failed capture."""

from typing import Any

import numpy as np
import pytest
from test_device_engine import FailingCapture
from test_device_kernels import TRUE_SHAPES

from ds41rt.checkpoint.filled import FilledSource
from ds41rt.cu.backend import open_backend
from ds41rt.engine import Engine
from ds41rt.settings import Settings

# About 1.9 GB of experts for 5 layers x 384: most picks miss, but the router below is limited to fewer.
SLOTS, EXPERTS_PER_LAYER, TOKENS = 100, 24, 100


def decode(source: FilledSource, backend: Any, step_graph: bool, texts: list[list[int]]) -> tuple[list[Any], Any]:
    settings = Settings(step_graph=step_graph, max_context=TOKENS)
    with Engine(source, settings, backend=backend, expert_slots=SLOTS) as engine:
        seqs = [engine.new_sequence() for _ in texts]
        logits: list[Any] = []
        for at in range(len(texts[0])):
            for text, seq in zip(texts, seqs, strict=True):
                layer = at % source.config.n_layers
                if at % 3 == 0:  # crowd out what the layer needs: a miss there
                    engine.preload((layer + 1) % source.config.n_layers, range(EXPERTS_PER_LAYER))
                logits.append(engine.decode_step(seq, text[at]))
        return logits, engine.stats()


@pytest.mark.long
def test_step_graph_equals_eager(backend_name: str) -> None:
    n = TOKENS if backend_name == "cuda" else 3
    rng = np.random.default_rng(5)
    texts = [rng.integers(3, 250, n).tolist() for _ in range(2)]
    source = FilledSource(TRUE_SHAPES, experts_per_layer=EXPERTS_PER_LAYER)
    backend, _ = open_backend(backend_name)
    try:
        eager, _ = decode(source, backend, False, texts)
        graph, stats = decode(source, backend, True, texts)
        failed, off = decode(source, FailingCapture(backend, 7), True, [t[: n // 4 + 2] for t in texts])
    finally:
        backend.close()
    assert all(np.isfinite(x).all() for x in eager)
    assert len({x.tobytes() for x in eager}) == len(eager)
    assert [i for i, (a, b) in enumerate(zip(eager, graph, strict=True)) if a.tobytes() != b.tobytes()] == []
    assert [i for i, (a, b) in enumerate(zip(eager, failed, strict=False)) if a.tobytes() != b.tobytes()] == []
    assert stats.recaptures == 0
    assert off.replays == 0
    if backend_name == "cuda":
        assert stats.clean_replays > 0
        assert all(n > 0 for n in stats.falls_by_layer), stats.falls_by_layer
