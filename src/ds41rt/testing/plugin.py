"""The pytest plugin behind `ds41rt.testing`: the fixtures `gpu` and `host_gpu`, and two options.

`gpu` is a backend: the simulated device under the schedules lazy, eager and a few random ones, and the real device
where a driver is present. `host_gpu` is the simulated device alone, for tests that inject faults. Both are checked when
the test ends (no open capture, no race) and closed.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ds41rt.cu.backend import open_backend, probe_gpu
from ds41rt.cu.host import HostBackend
from ds41rt.cu.probe import GpuState
from ds41rt.errors import UnsupportedError
from ds41rt.testing.checks import CountingBackend, assert_no_leaks, assert_no_open_capture, assert_no_races

_SEEDS = 3
# A machine in one of these states has no GPU by nature; any other one that cannot be used is a fault to report.
_NO_GPU = (GpuState.NO_BINDINGS, GpuState.NO_LIBRARY, GpuState.NO_DEVICE)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ds41rt")
    group.addoption("--gpu-seeds", type=int, default=_SEEDS, help="random schedules for the gpu fixtures, default 3")
    group.addoption(
        "--gpu-device",
        choices=("auto", "always", "never"),
        default="auto",
        help="whether the fixture gpu includes the real device; auto: where there is one",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    config = metafunc.config
    # A plugin that a test module asks for comes too late for the command line: its options have their defaults then.
    schedules = ["lazy", "eager", *(f"random:{seed}" for seed in range(config.getoption("--gpu-seeds", _SEEDS)))]
    if "host_gpu" in metafunc.fixturenames:
        metafunc.parametrize("host_gpu", schedules, indirect=True)
    if "gpu" in metafunc.fixturenames:
        device = _device_wanted(config.getoption("--gpu-device", "auto"))
        metafunc.parametrize("gpu", [*schedules, *(["cuda"] if device else [])], indirect=True)


def _device_wanted(option: str) -> bool:
    return option == "always" or (option == "auto" and probe_gpu().state not in _NO_GPU)


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[CountingBackend]:
    """A backend for the test: simulated under one of the schedules, or real."""
    if request.param != "cuda":
        with _checked(HostBackend(request.param, race_detection=True)) as backend:
            yield backend
        return
    try:
        real, _ = open_backend("cuda")
    except UnsupportedError as error:
        pytest.fail(f"the real device was asked for: {error}")
    with _checked(real) as backend:  # type: ignore[arg-type] # the driver backend counts its objects too
        yield backend


@pytest.fixture
def host_gpu(request: pytest.FixtureRequest) -> Iterator[HostBackend]:
    """The simulated device under one of the schedules; its `faults` make calls fail."""
    backend = HostBackend(request.param, race_detection=True)
    with _checked(backend):
        yield backend


@contextmanager
def _checked(backend: CountingBackend) -> Iterator[CountingBackend]:
    """Lend the backend to a test, check what the test left, and close it."""
    try:
        yield backend
        assert_no_open_capture(backend)
        assert_no_races(backend)
    finally:
        backend.close()
    assert_no_leaks(backend)
