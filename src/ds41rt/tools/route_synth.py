"""Made-up routing, for sizing caches without a recorded trace: which experts a text could pick, token by token.

Every layer's experts have a popularity that is normal in its logarithm, wanders over thousands of tokens, and is raised
for an expert that was picked a moment ago. A token's picks are the `top_k` highest of popularity plus Gumbel noise: a
draw without replacement, by popularity. Nothing is known of the text, and layers do not depend on each other.

What is known of the released model is how often a strict LRU cache of 3,000, 5,000 and 8,000 of its 15,360 experts has
a pick: .808, .893 and .960. That does not tell habit from change, so there are three patterns with these hit rates. A
policy is worth having if it is good on all of them. Their numbers come from `tools/calibrate_routes.py`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds41rt.errors import InputError

# Popularity moves in steps of so many tokens: often enough, and cheap.
_STEP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Pattern:
    """`spread`: standard deviation of the log popularity. Its share `lasting` never changes, the rest forgets itself
    within `drift_tokens`. `boost` is added to the log popularity of an expert just picked, half of it is left after
    `boost_half_life` tokens."""

    spread: float
    lasting: float
    drift_tokens: float
    boost: float
    boost_half_life: float


PATTERNS: dict[str, Pattern] = {
    # One text whose subject changes slowly.
    "drift": Pattern(spread=1.876, lasting=0.0, drift_tokens=2000.0, boost=0.869, boost_half_life=4.9),
    # The same habits for ever.
    "steady": Pattern(spread=1.716, lasting=1.0, drift_tokens=2000.0, boost=1.21, boost_half_life=6.36),
    # Half of it habits, half of it a subject that changes every few hundred tokens.
    "topics": Pattern(spread=1.921, lasting=0.5, drift_tokens=600.0, boost=0.789, boost_half_life=4.3),
}


def synthetic_routes(
    pattern: Pattern, n_tokens: int, *, n_layers: int, n_experts: int, top_k: int, seed: int
) -> NDArray[np.int16]:
    """int16 [n_tokens, n_layers, top_k]: distinct experts, best first. Equal arguments give equal routes.

    Raises `InputError` for sizes that make no sense.
    """
    if n_tokens < 1:
        raise InputError(f"a synthetic trace needs at least one token, not {n_tokens}")
    if not 1 <= top_k <= n_experts <= np.iinfo(np.int16).max:
        raise InputError(f"cannot pick {top_k} of {n_experts} experts; use 1 <= top-k <= experts <= 32767")
    rng = np.random.default_rng(seed)
    shape = (n_layers, n_experts)
    rows = np.arange(n_layers)[:, None]
    lasting = pattern.spread * np.sqrt(pattern.lasting) * rng.standard_normal(shape, np.float32)
    drifting = rng.standard_normal(shape, np.float32)
    drift_spread = np.float32(pattern.spread * np.sqrt(1 - pattern.lasting))
    kept = np.float32(np.exp(-_STEP_TOKENS / pattern.drift_tokens))
    fresh = np.float32(np.sqrt(1 - kept * kept))
    fading = np.float32(0.5 ** (1 / pattern.boost_half_life))
    boost = np.zeros(shape, np.float32)
    routes = np.empty((n_tokens, n_layers, top_k), np.int16)
    popularity = lasting + drift_spread * drifting
    for token in range(n_tokens):
        if token and token % _STEP_TOKENS == 0:
            drifting = kept * drifting + fresh * rng.standard_normal(shape, np.float32)
            popularity = lasting + drift_spread * drifting
        # -log of an exponential variate is Gumbel noise; an exact zero has none.
        noise = np.log(np.maximum(rng.standard_exponential(shape, np.float32), np.float32(1e-30)))
        score = popularity + boost - noise
        best = np.argpartition(score, n_experts - top_k, axis=1)[:, n_experts - top_k :]
        order = np.argsort(-score[rows, best], axis=1, kind="stable")
        best = best[rows, order]
        routes[token] = best
        boost *= fading
        boost[rows, best] = pattern.boost
    return routes
