"""Tokens per second of the host backend, as the README gives them: one line a mode, with its conditions.

    python tools/host_speed.py

Each run decodes 200 tokens of a tiny synthetic checkpoint after a warm-up, with every expert in a slot and one BLAS
thread; the line has the median of five runs. It measures this machine and NumPy, and says nothing about a GPU.
"""

import os
import platform
import tempfile
from pathlib import Path
from statistics import median

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy loads: threads do not help products as small as these

import numpy as np

from ds41rt import __version__
from ds41rt.checkpoint.synth import synthesize
from ds41rt.engine import Engine, Mode
from ds41rt.tools.decode import greedy

PRESET, PROMPT, NEW, RUNS = "tiny", [0, 17, 42, 99, 256, 301, 7], 194, 5
MODES: tuple[Mode, ...] = ("eager", "step-graph")


def cpu() -> str:
    """The processor's name and the number of cores this process may use."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # not Linux, or a processor without a name
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def measure(checkpoint: Path, mode: Mode) -> str:
    with Engine.open(checkpoint, mode=mode, backend="host") as engine, engine.new_sequence() as seq:
        greedy(engine, seq, PROMPT, 50, ignore_eos=True)
        speeds = []
        for _ in range(RUNS):
            seq.reset()
            before = engine.stats()
            speeds.append(greedy(engine, seq, PROMPT, NEW, ignore_eos=True).tokens_per_s)
        after = engine.stats()
    picks = engine.config.n_layers * engine.config.top_k * (after.tokens - before.tokens)
    hit_rate = 100 * (1 - (after.misses - before.misses) / picks)
    return f"{mode}: {median(speeds):.0f} tokens/s ({hit_rate:.0f} % expert hits)"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / PRESET
        synthesize(checkpoint, PRESET, 1)
        results = [measure(checkpoint, mode) for mode in MODES]
    print(f"Host backend, preset {PRESET}, {'; '.join(results)}; no speculation.")
    print(
        f"ds41rt {__version__}, {cpu()}, one BLAS thread, Python {platform.python_version()}, NumPy {np.__version__}; "
        f"median of {RUNS} runs of {len(PROMPT) + NEW - 1} tokens."
    )


if __name__ == "__main__":
    main()
