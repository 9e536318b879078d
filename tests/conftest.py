"""What all tests share: synthetic checkpoints made once a session, the golden set, and a log that stays quiet.

Which backend the engine tests use is an option: `--backend host|cuda`. Without a GPU, tests that need one are skipped
for exactly that reason, unless DS41RT_REQUIRE_GPU=1 (as in `make test-gpu`) turns the skip into a failure.
"""

import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import structlog

from ds41rt.checkpoint.synth import synthesize
from ds41rt.cu.backend import probe_gpu
from ds41rt.cu.probe import GpuState, Probe

SEED = 1
REQUIRE_GPU = os.environ.get("DS41RT_REQUIRE_GPU", "0") == "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", choices=("host", "cuda"), default="host", help="what engine tests run on")


@cache
def _probe() -> Probe:
    return probe_gpu()


def need_gpu() -> None:
    """Skip where the machine has no GPU; fail where it has one that does not start, or where a GPU is required."""
    found = _probe()
    if found.state in (GpuState.NO_LIBRARY, GpuState.NO_DEVICE) and not REQUIRE_GPU:
        pytest.skip(f"no GPU here: {found}")
    if found.state is not GpuState.READY:
        pytest.fail(f"a GPU is needed: {found}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        need_gpu()


@pytest.fixture(scope="session")
def backend_name(request: pytest.FixtureRequest) -> str:
    """ "host" or "cuda", as the command line said; skips or fails like `need_gpu` for "cuda"."""
    name: str = request.config.getoption("--backend")
    if name == "cuda":
        need_gpu()
    return name


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


@pytest.fixture(autouse=True, scope="session")
def _interrupts_are_heard() -> Iterator[None]:
    """Ctrl-C is KeyboardInterrupt, also in a run that was started with SIGINT ignored, as in the background."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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
