"""The host half of an index layer: candidate blocks and the top-k selection over index scores.

Scores are bf16 values, so exact ties are common: a higher score wins, then the lower row. Pure NumPy, no device.
"""

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float32]
Rows = NDArray[np.int32]
Mask = NDArray[np.bool_]


def best_of(scores: Scores, k: int) -> Rows:
    """Positions of the `k` highest scores, ascending; equal scores: the lower position. -inf is never chosen.

    `scores` float32[n] without NaN; the result has min(k, number of scores above -inf) entries.
    """
    n = scores.size
    if n > k:
        kth = np.partition(scores, n - k)[n - k]
        above = np.flatnonzero(scores > kth)
        ties = np.flatnonzero(scores == kth)[: k - above.size]
        chosen = np.sort(np.concatenate([above, ties]))
    else:
        chosen = np.arange(n)
    best: Rows = chosen[scores[chosen] > -np.inf].astype(np.int32)
    return best


def candidate_mask(scores: Scores, *, block_size: int, top_blocks: int) -> Mask:
    """bool[n]: rows inside the best `top_blocks` blocks of `block_size` rows; the newest row's block is always kept."""
    n = scores.size
    n_blocks = -(-n // block_size)
    padded = np.full(n_blocks * block_size, -np.inf, np.float32)
    padded[:n] = scores
    block_score = padded.reshape(n_blocks, block_size).max(axis=1)
    block_score[(n - 1) // block_size] = np.inf
    keep = np.zeros(n_blocks, np.bool_)
    keep[best_of(block_score, top_blocks)] = True
    return np.repeat(keep, block_size)[:n]


def select_rows(scores: Scores, k: int, mask: Mask | None) -> Rows:
    """The rows an index layer attends to, ascending int32[<= k]; `mask` limits them to the candidate blocks.

    NaN scores rank below everything, so a broken score can select too little but never an invalid row.
    """
    usable = ~np.isnan(scores)
    if mask is not None:
        usable &= mask
    return best_of(np.where(usable, scores, np.float32(-np.inf)), k)
