"""Where the engram tables keep an n-gram: bucket primes, offsets, multipliers, and the hash over them.

Pure integer arithmetic on token ids; knows neither files nor devices.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

import numpy as np
from numpy.typing import NDArray

from ds41rt.config import ModelConfig

# Seed stride between layers of the published multipliers.
_SEED_STRIDE = 10007


@dataclass(frozen=True, slots=True, eq=False)
class EngramConstants:
    """Hash constants of one engram layer; columns run over n-gram sizes 2..max, heads inside a size.

    `primes`, `offsets` int64[n_cols]: bucket count and first row of each column. `multipliers` int64[max_ngram]:
    one per look-back. `n_rows`: the table's size. `heads`: columns per n-gram size.
    """

    layer: int
    primes: NDArray[np.int64]
    offsets: NDArray[np.int64]
    multipliers: NDArray[np.int64]
    heads: int

    @property
    def n_rows(self) -> int:
        return int(self.primes.sum())


def engram_constants(cfg: ModelConfig) -> tuple[EngramConstants, ...]:
    """The constants of every engram layer, in the order of `cfg.engram_layers`."""
    return build_constants(
        cfg.engram_layers, cfg.engram_vocab_size, cfg.engram_max_ngram, cfg.engram_heads, cfg.engram_compressed_vocab
    )


def build_constants(
    layers: tuple[int, ...], vocab_size: int, max_ngram: int, heads: int, compressed_vocab: int
) -> tuple[EngramConstants, ...]:
    """As `engram_constants`, from the five numbers alone.

    Every (layer, size) asks for the smallest primes from `vocab_size` on that no earlier column has, so the columns of
    all layers together are consecutive primes. Multipliers are odd and small enough that no product reaches 2**63.
    """
    n_cols = (max_ngram - 1) * heads
    supply = _primes_from(vocab_size)
    bound = (2**63 - 1) // compressed_vocab // 2
    out = []
    for layer in layers:
        primes = np.array(list(islice(supply, n_cols)), np.int64)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(primes)[:-1]])
        rng = np.random.Generator(np.random.PCG64(_SEED_STRIDE * layer))
        multipliers = np.array([2 * int(rng.integers(0, bound)) + 1 for _ in range(max_ngram)], np.int64)
        out.append(EngramConstants(layer, primes, offsets, multipliers, heads))
    return tuple(out)


def engram_rows(t: NDArray[np.int64], constants: EngramConstants) -> NDArray[np.int64]:
    """Table rows int64[..., n_cols] for compressed ids `t` int64[..., max_ngram], the current token first."""
    mixed = np.bitwise_xor.accumulate(t * constants.multipliers, axis=-1)[..., 1:]
    return np.repeat(mixed, constants.heads, axis=-1) % constants.primes + constants.offsets


def _primes_from(start: int) -> Iterator[int]:
    return (n for n in count(start) if _is_prime(n))


def _is_prime(n: int) -> bool:
    """Trial division: the published buckets are near 16 million, 4,000 divisions at most."""
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))
