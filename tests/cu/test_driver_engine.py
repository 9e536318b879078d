"""Whole engines on the driver backend: every call it makes, in every order a step makes them, on the fake driver.

The kernels run through their references, so the logits have to be those of the host backend, bit for bit.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fake_driver import FakeDriver, write_ptx

from ds41rt.cu.driver import DriverBackend
from ds41rt.cu.host import HostBackend
from ds41rt.engine import Engine, Mode
from ds41rt.kernels.registry import SPECS
from ds41rt.tools.decode import Run, greedy

PROMPT, NEW = [5, 17, 3, 250], 12
# Fewer than the experts of the preset, so that some tokens fall.
SLOTS = 40


def _run(checkpoint: Path, backend: HostBackend | DriverBackend, mode: Mode) -> Run:
    with (
        Engine.open(checkpoint, mode=mode, backend=backend, expert_slots=SLOTS) as engine,
        engine.new_sequence() as seq,
    ):
        return greedy(engine, seq, PROMPT, NEW, ignore_eos=True, keep_logits=True)


@pytest.mark.parametrize("mode", ["eager", "step-graph"])
@pytest.mark.parametrize("schedule", ["lazy", "random:3"])
def test_an_engine_decodes_as_on_the_host_backend(
    checkpoint: Callable[[str], Path], tmp_path: Path, mode: Mode, schedule: str
) -> None:
    path = checkpoint("micro")
    want = _run(path, HostBackend(), "eager")
    cu = FakeDriver(SPECS, schedule=schedule)
    backend = DriverBackend(bindings=cu, ptx_folder=write_ptx(tmp_path, SPECS))
    got = _run(path, backend, mode)
    assert got.tokens == want.tokens
    assert want.logits is not None
    assert got.logits is not None
    assert np.array_equal(got.logits.view(np.uint32), want.logits.view(np.uint32))
    if mode == "step-graph":
        assert got.stats.captures > 0
        assert got.stats.replays > 0
        assert sum(got.stats.falls.values()) > 0
        assert "cuGraphLaunch" in cu.names()
    assert not any(backend.live().values())
    assert not [call for call in cu.names() if call in ("cuMemcpyHtoD", "cuMemcpyDtoH", "cuCtxSynchronize")]
    backend.close()
    assert not any(cu.host.live().values())
    assert (cu.modules, cu.retained) == (0, 0)


def test_a_sticky_error_in_a_step_closes_the_engine_and_gives_everything_back(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    cu = FakeDriver(SPECS)
    backend = DriverBackend(bindings=cu, ptx_folder=write_ptx(tmp_path, SPECS))
    with Engine.open(checkpoint("micro"), mode="step-graph", backend=backend, expert_slots=SLOTS) as engine:
        seq = engine.new_sequence()
        for token in PROMPT:
            engine.decode_step(seq, token)
        cu.fail["cuGraphLaunch"] = [700]
        with pytest.raises(Exception, match="ILLEGAL_ADDRESS"):
            engine.decode_step(seq, 9)
        with pytest.raises(Exception, match="ILLEGAL_ADDRESS"):
            engine.decode_step(seq, 9)
    backend.close()
    assert not any(cu.host.live().values())
    assert (cu.modules, cu.retained) == (0, 0)


def test_an_allocation_that_fails_while_an_engine_opens_leaves_nothing(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """`cuMemAlloc` fails at the k-th allocation: the error names the buffer, and the next engine works."""
    cu = FakeDriver(SPECS)
    backend = DriverBackend(bindings=cu, ptx_folder=write_ptx(tmp_path, SPECS))
    path = checkpoint("micro")
    texts: list[str] = []

    def opens() -> bool:
        """Whether an engine opened; its error otherwise goes to `texts`."""
        try:
            Engine.open(path, mode="step-graph", backend=backend, expert_slots=SLOTS).close()
        except MemoryError as e:
            texts.append(str(e))
            return False
        return True

    k = 0
    cu.fail["cuMemAlloc"] = [2]
    while not opens():
        assert not any(backend.live().values())
        k += 1
        cu.fail["cuMemAlloc"] = [0] * k + [2]
    assert all("device buffer '" in text and "free of" in text for text in texts)
    assert k > 10
    backend.close()
    assert not any(cu.host.live().values())
