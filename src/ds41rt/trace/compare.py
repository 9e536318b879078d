"""Where two traces part: the first position, and at it the first part in the order in which a step computes them.

The rule. What one half of a layer takes over from the halves before it is observed in full: the streams and the mix
that enter the layer, what its attention half leaves for its ffn half, and the rows that it writes for later positions.
So if every part before one agrees, the computation between was given equal inputs (equal weights and caches assumed)
and made different outputs: it is the one at fault. Which one is read off the part:

    what enters layer 0                              the embedding
    engram rows; streams after engram                engram, of that layer (without engram: its attention half)
    mixes, ring, pool, comp, key, selection,
    attn_out of layer L                              the attention half of layer L
    picks and weights of layer L; what enters L + 1
    (after the last layer: what leaves it)           the ffn half of layer L
    hidden                                           the final collapse
    logits                                           the head

Two things this cannot see: a stray write into a row of an *earlier* position counts where the row is read, and a wrong
expert in the arena counts for the ffn half that runs on it. This file must not know how traces are made or printed.
"""

from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ds41rt.config import ModelConfig
from ds41rt.errors import InputError
from ds41rt.trace.file import PARTS, Trace, selection_name

Half = Literal["embedding", "engram", "attention", "ffn", "collapse", "head"]


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison at a position: row `row` of an array, and what is at fault if it is the first that differs.

    `layer` is None for what belongs to no layer.
    """

    array: str
    row: int
    layer: int | None
    half: Half

    @property
    def part(self) -> str:
        """The name of the part, or of the array if it is not a hash."""
        return self.array.removesuffix("_hash")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first one: `index` is the row of the arrays, `position` the position of the text that it stands for."""

    index: int
    position: int
    check: Check

    def __str__(self) -> str:
        return f"position {self.position}, {place(self.check)}: {what(self.check)}"


@dataclass(frozen=True, slots=True)
class Values:
    """How the values of one part differ: the first place, how many, the largest difference (None: not a number)."""

    n_values: int
    n_differ: int
    largest: float | None
    first: tuple[int, ...]
    around: list[tuple[tuple[int, ...], float, float]]


def place(check: Check) -> str:
    names = {
        "embedding": "the embedding",
        "engram": f"engram of layer {check.layer}",
        "attention": f"attention half of layer {check.layer}",
        "ffn": f"ffn half of layer {check.layer}",
        "collapse": "the final collapse",
        "head": "the head",
    }
    return names[check.half]


def what(check: Check) -> str:
    """What differs, in words."""
    if check.part in PARTS:
        name = PARTS[check.part].what
        return f"{name} that leave layer {check.layer}" if (check.part, check.half) == ("streams_in", "ffn") else name
    return {"expert_ids": "the experts", "expert_weights": "the weights of the experts"}.get(
        check.part, "the selected rows"
    )


def checks(cfg: ModelConfig) -> list[Check]:
    """All comparisons of one position, in the order in which a step computes what they compare."""
    found: list[Check] = []
    for layer in range(cfg.n_layers + 1):
        for part in ("streams_in", "mix_in"):
            source: tuple[int | None, Half] = (layer - 1, "ffn") if layer else (None, "embedding")
            found.append(Check(f"{part}_hash", layer, *source))
        if layer == cfg.n_layers:
            break
        engram: Half = "engram" if layer in cfg.engram_layers else "attention"
        found += [Check(f"{part}_hash", layer, layer, engram) for part in ("engram_rows", "streams")]
        for part in ("mixes", "ring", "pool", "comp", "key"):
            found.append(Check(f"{part}_hash", layer, layer, "attention"))
        if layer in cfg.index_source_layers:
            found.append(Check(selection_name(layer), 0, layer, "attention"))
        found.append(Check("attn_out_hash", layer, layer, "attention"))
        found += [Check(array, layer, layer, "ffn") for array in ("expert_ids", "expert_weights")]
    found += [Check("hidden_hash", 0, None, "collapse"), Check("logits_hash", 0, None, "head")]
    return found


def first_difference(a: Trace, b: Trace) -> Difference | None:
    """None if the traces agree in everything.

    Raises `InputError` where they cannot be compared: another model, other positions, another text, or one that ends
    earlier although all of it agrees.
    """
    _same_model(a, b)
    n = min(a.n_positions, b.n_positions)
    differs = np.zeros(n, bool)
    all_checks = checks(a.config)
    for array in {check.array for check in all_checks}:
        differs |= (_bytes(a, array, n) != _bytes(b, array, n)).any(axis=1)
    index = int(differs.argmax()) if differs.any() else n
    _same_text(a, b, min(index + 1, n))
    if index == n:
        if a.n_positions != b.n_positions:
            raise InputError(
                f"{a.where} has {a.n_positions} positions and {b.where} {b.n_positions}: they agree as far as both go; "
                "trace the same number of positions"
            )
        return None
    position = int(a.arrays["positions"][index])
    first = next(check for check in all_checks if not np.array_equal(row(a, index, check), row(b, index, check)))
    return Difference(index, position, first)


def row(trace: Trace, index: int, check: Check) -> NDArray[Any]:
    """What `check` compares, as bits: floats become integers, so that equal means equal."""
    found = trace.arrays[check.array][index]
    if not check.array.startswith("index_topk"):
        found = found[check.row]
    return np.atleast_1d(found).view(np.int32) if found.dtype == np.float32 else np.atleast_1d(found)


def values(a: Trace, b: Trace, difference: Difference, *, reach: int = 3) -> Values | None:
    """How the part itself differs, with `reach` neighbours on either side; None unless both traces kept values.

    Raises `InputError` if the kept values are equal, which hashes that differ rule out.
    """
    check = difference.check
    sides = [t.arrays.get(f"values.{check.part}") for t in (a, b)]
    if check.part not in PARTS or any(side is None for side in sides):
        return None
    part = PARTS[check.part]
    raw = [np.asarray(side)[difference.index, check.row] for side in sides]
    x, y = (r.view(ml_dtypes.bfloat16) if part.kind == "bf16" else r for r in raw)
    x, y = x.astype(np.float64), y.astype(np.float64)
    differ = np.flatnonzero(raw[0].view(f"u{raw[0].itemsize}") != raw[1].view(f"u{raw[1].itemsize}"))
    if not differ.size:
        raise InputError(f"{a.where} or {b.where} is damaged: at {difference} the hashes differ, the values do not")
    with np.errstate(invalid="ignore"):  # infinities
        largest = float(np.abs(x[differ] - y[differ]).max())
    shape, at = part.shape(a.config), int(differ[0])
    around = [
        (tuple(int(k) for k in np.unravel_index(i, shape)), float(x[i]), float(y[i]))
        for i in range(max(at - reach, 0), min(at + reach + 1, x.size))
    ]
    first = tuple(int(k) for k in np.unravel_index(at, shape))
    return Values(x.size, differ.size, largest if np.isfinite(largest) else None, first, around)


def _bytes(trace: Trace, array: str, n: int) -> NDArray[np.uint8]:
    """The first `n` positions as bytes [n, bytes a position]: not-a-number is equal to itself, 0 is not -0."""
    rows = np.ascontiguousarray(trace.arrays[array][:n])
    return rows.reshape(n, rows[:1].size if n else 0).view(np.uint8)


def _same_model(a: Trace, b: Trace) -> None:
    x, y = a.config.model_dump(), b.config.model_dump()
    other = [f"{name} {x[name]} and {y[name]}" for name in x if x[name] != y[name]]
    if other:
        raise InputError(f"{a.where} and {b.where} are of different models: {'; '.join(other)}")


def _same_text(a: Trace, b: Trace, n: int) -> None:
    """Up to the first difference the same tokens stand at the same positions."""
    for name, noun in (("positions", "position"), ("tokens", "token")):
        x, y = a.arrays[name][:n], b.arrays[name][:n]
        if not np.array_equal(x, y):
            at = int((x != y).argmax())
            raise InputError(
                f"{a.where} and {b.where} are of different texts: {noun} {x[at]} and {y[at]} as number {at}, "
                "although everything before it agrees"
            )
