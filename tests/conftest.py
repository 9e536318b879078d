"""What all tests share: synthetic checkpoints made once a session, the golden set, and a log that stays quiet."""

from collections.abc import Callable, Iterator
from pathlib import Path

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


@pytest.fixture(autouse=True)
def _unconfigured_log() -> Iterator[None]:
    """Every test starts with structlog unconfigured, so that events print nowhere; many leave it configured."""
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def _host_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU too, "auto" means the host backend; a test that wants the GPU asks for it by name."""
    monkeypatch.setenv("DS41RT_BACKEND", "host")
