"""What all tests share: synthetic checkpoints made once a session, the golden set, and a log that stays quiet."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import structlog

from ds41rt.checkpoint.synth import synthesize

SEED = 1


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """preset -> directory of that synthetic checkpoint; treat it as read-only."""
    made: dict[str, Path] = {}

    def get(preset: str) -> Path:
        if preset not in made:
            made[preset] = tmp_path_factory.mktemp("checkpoints") / preset
            synthesize(made[preset], preset, SEED)
        return made[preset]

    return get


@pytest.fixture(scope="session")
def golden() -> Path:
    """The golden set: `checkpoint/` and the values that an independent implementation got from it."""
    return Path(__file__).parent / "goldens" / "tiny-a"


def _drop(logger: Any, method: str, event: Any) -> NoReturn:
    raise structlog.DropEvent


@pytest.fixture(autouse=True)
def _quiet_log() -> Iterator[None]:
    """Events go nowhere (`structlog.testing.capture_logs` still sees them), whatever a test configures."""
    structlog.reset_defaults()
    structlog.configure(processors=[_drop])
    yield
    structlog.reset_defaults()
