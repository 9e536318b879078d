"""Strict JSON for the files beside the weights: UTF-8, no duplicate keys, no NaN, no runaway nesting.

Knows nothing of what the files mean.
"""

import json
from pathlib import Path
from typing import Any, NoReturn

from ds41rt.errors import CheckpointError


def parse_json(raw: bytes, what: str) -> Any:
    """The value of the JSON text `raw`; CheckpointError names `what` and the fault."""
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{what}: not valid JSON: {e}") from e


def load_json(path: Path) -> Any:
    """The JSON value in the file `path`; CheckpointError when it is missing, unreadable or invalid."""
    try:
        raw = path.read_bytes()
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read: {e.strerror}") from e
    return parse_json(raw, str(path))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [k for k, _ in pairs]
        raise ValueError(f"the key {next(k for k in names if names.count(k) > 1)!r} appears twice in one object")
    return out


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")
