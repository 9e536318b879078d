"""Finds the numbers of `ds41rt.tools.route_synth.PATTERNS`: spread, boost and its half-life, for a given drift.

    python tools/calibrate_routes.py --lasting 0 --drift-tokens 2000

A damped Gauss-Newton search for the published hit rates of strict LRU, from finite differences on one trace; it prints
every step. The best step goes into the table.
"""

import argparse
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from ds41rt.tools.route_synth import Pattern, synthetic_routes

PUBLISHED = {3000: 0.808, 5000: 0.893, 8000: 0.960}
N_LAYERS, N_EXPERTS, TOP_K = 40, 384, 6


def lru_hit_rate(routes: NDArray[np.int16], n_experts: int, n_slots: int, warm_tokens: int) -> float:
    """Share of the picks after `warm_tokens` that a strict LRU cache of `n_slots` experts, empty at first, has."""
    n_tokens, n_layers, _ = routes.shape
    keys = routes.astype(np.int64) + n_experts * np.arange(n_layers)[:, None]
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for token, row in enumerate(keys.reshape(n_tokens, -1).tolist()):
        for key in row:
            if key in cached:
                cached.move_to_end(key)
                hits += token >= warm_tokens
            else:
                if len(cached) == n_slots:
                    cached.popitem(last=False)
                cached[key] = None
    return hits / routes[warm_tokens:].size


def hit_rates(pattern: Pattern, n_tokens: int, warm_tokens: int, seed: int) -> NDArray[np.float64]:
    routes = synthetic_routes(pattern, n_tokens, n_layers=N_LAYERS, n_experts=N_EXPERTS, top_k=TOP_K, seed=seed)
    return np.array([lru_hit_rate(routes, N_EXPERTS, n, warm_tokens) for n in PUBLISHED])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lasting", type=float, default=0.0)
    parser.add_argument("--drift-tokens", type=float, default=2000.0)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--warm-tokens", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()

    def rates(x: NDArray[np.float64]) -> NDArray[np.float64]:
        pattern = Pattern(float(x[0]), args.lasting, args.drift_tokens, float(x[1]), float(2 ** x[2]))
        return hit_rates(pattern, args.tokens, args.warm_tokens, args.seed)

    target = np.array(list(PUBLISHED.values()))
    x = np.array([1.8, 1.0, 2.5])  # spread, boost, log2 of its half-life
    nudge = np.array([0.08, 0.25, 0.7])
    for _ in range(args.steps):
        now = rates(x)
        error = now - target
        print(
            f"spread {x[0]:.3f} boost {x[1]:.3f} half-life {2 ** x[2]:.2f}: hit rates "
            f"{', '.join(f'{r:.4f}' for r in now)}, worst error {np.abs(error).max():.4f}",
            flush=True,
        )
        if np.abs(error).max() < 0.001:
            break
        slope = np.stack([(rates(x + nudge * (i == np.arange(3))) - now) / nudge[i] for i in range(3)], axis=1)
        damped = slope.T @ slope + 1e-4 * np.diag([1.0, 0.2, 0.05])
        x = x - np.clip(np.linalg.solve(damped, slope.T @ error), [-0.4, -1.0, -1.0], [0.4, 1.0, 1.0])
        x[1] = max(x[1], 0.0)


if __name__ == "__main__":
    main()
