"""What an engine leaves behind when memory runs out, when Ctrl-C comes, and in a forked child: nothing."""

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from ds41rt.cu.backend import DeviceBuffer, GpuBackend, HostBuffer
from ds41rt.cu.host import HostBackend
from ds41rt.cu.result import CudaError, OutOfDeviceMemory, Status
from ds41rt.engine import Engine, Mode
from ds41rt.errors import UnsupportedError

TOKENS = (5, 17, 42, 99, 3, 250)
SLOTS = 30


@pytest.fixture(scope="module")
def micro(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("micro")


def decode(engine: Engine) -> bytes:
    """The logits of TOKENS, all bits."""
    with engine.new_sequence() as seq:
        return b"".join(engine.decode_step(seq, t).tobytes() for t in TOKENS)


# ---- memory


class Ledger(HostBackend):
    """Notes (name, nbytes) of every allocation in order; allocation number `fail_at` finds one byte too few."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.made: list[tuple[str, int]] = []
        self._fail_at = fail_at

    def alloc(self, name: str, nbytes: int) -> DeviceBuffer:
        if self._note(name, nbytes):
            self.memory.device_nbytes = self.memory.device_used + nbytes - 1
        return super().alloc(name, nbytes)

    def alloc_pinned(self, name: str, nbytes: int) -> HostBuffer:
        if self._note(name, nbytes):
            self.memory._pinned_nbytes = self.memory._pinned_used + nbytes - 1
        return super().alloc_pinned(name, nbytes)

    def _note(self, name: str, nbytes: int) -> bool:
        self.made.append((name, nbytes))
        return len(self.made) == self._fail_at


def test_every_allocation_fails_in_turn(micro: Path) -> None:
    """One byte too few for the k-th allocation, for every k: the error names it, and all before it is freed."""
    roomy = Ledger()
    with Engine.open(micro, mode="step-graph", backend=roomy, expert_slots=SLOTS) as engine, engine.new_sequence():
        assert engine.stats().tokens == 0
    assert len(roomy.made) > 100
    for k, (name, nbytes) in enumerate(roomy.made, start=1):
        if name == "pinned experts":
            continue  # a smaller ring will do: see tests/moe/test_fetch.py
        backend = Ledger(fail_at=k)
        with (
            pytest.raises(OutOfDeviceMemory) as failure,
            Engine.open(micro, mode="step-graph", backend=backend, expert_slots=SLOTS) as engine,
        ):
            engine.new_sequence()
        assert isinstance(failure.value, MemoryError)
        for said in (repr(name), f"{nbytes} bytes", f"{nbytes - 1} are free"):
            assert said in str(failure.value)
        assert backend.made == roomy.made[:k]
        assert backend.live() == dict.fromkeys(backend.live(), 0)


@pytest.mark.parametrize("mode", ["eager", "step-graph"])
def test_an_engine_after_one_that_did_not_fit(micro: Path, mode: Mode) -> None:
    """On the same backend, once it has room; and a sequence that does not fit leaves its engine in use."""
    roomy = Ledger()
    with Engine.open(micro, mode=mode, backend=roomy, expert_slots=SLOTS) as engine:
        needed = engine.stats().device_nbytes
        expected = decode(engine)
    backend = HostBackend(memory_nbytes=needed - 1)
    with pytest.raises(OutOfDeviceMemory):
        Engine.open(micro, mode=mode, backend=backend, expert_slots=SLOTS)
    backend.memory.device_nbytes = needed + 1
    with Engine.open(micro, mode=mode, backend=backend, expert_slots=SLOTS) as engine:
        with pytest.raises(OutOfDeviceMemory, match="sequence 1"):
            engine.new_sequence()
        assert engine.stats().device_nbytes == needed
        backend.memory.device_nbytes = 1 << 30
        assert decode(engine) == expected
    assert backend.live() == dict.fromkeys(backend.live(), 0)


# ---- failing and interrupted calls


class Troubled:
    """A host backend whose call number `hit_at` meets `trouble` instead. `sites` are the places that called it."""

    def __init__(self, inner: HostBackend, trouble: Callable[[], None]) -> None:
        self._inner = inner
        self._trouble = trouble
        self.sites: list[tuple[str, str, int]] = []
        self.hit_at: int | None = None

    @property
    def calls(self) -> int:
        return len(self.sites)

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._inner, name)
        if not callable(target):
            return target

        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            self.sites.append((name, caller.f_code.co_filename, caller.f_lineno))
            if self.calls == self.hit_at:
                self._trouble()
            return target(*args, **kwargs)

        return call


def refuse() -> None:
    raise CudaError(Status.INVALID_VALUE, "cuSeeded", "seeded")


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)  # a real one: Python's own handler raises KeyboardInterrupt


def open_on(backend: Troubled, directory: Path, mode: Mode) -> Engine:
    return Engine.open(directory, mode=mode, backend=cast(GpuBackend, backend), expert_slots=SLOTS)


@pytest.mark.parametrize("trouble", [refuse, interrupt])
def test_a_call_fails_at_every_place_of_a_load(micro: Path, trouble: Callable[[], None]) -> None:
    """The first and the last call from each line of code: all is freed, and the backend serves another engine."""
    quiet = Troubled(HostBackend(), trouble)
    with open_on(quiet, micro, "step-graph") as engine:
        loaded = list(quiet.sites)
        expected = decode(engine)
    places = [loaded.index(site) for site in set(loaded)]
    places += [len(loaded) - 1 - loaded[::-1].index(site) for site in set(loaded)]
    assert len(set(places)) > 30
    for index in sorted(set(places)):
        host = HostBackend()
        backend = Troubled(host, trouble)
        backend.hit_at = index + 1
        with pytest.raises((CudaError, KeyboardInterrupt)):
            open_on(backend, micro, "step-graph")
        assert backend.sites[index] == loaded[index]
        assert host.live() == dict.fromkeys(host.live(), 0), loaded[index]
        if index % 5 == 0:
            with Engine.open(micro, mode="step-graph", backend=host, expert_slots=SLOTS) as engine:
                assert decode(engine) == expected


def tenths(n: int) -> list[int]:
    return [1 + i * (n - 1) // 9 for i in range(10)]


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random:4"])
@pytest.mark.parametrize("mode", ["eager", "step-graph"])
def test_ctrl_c_at_ten_points_of_a_decode(micro: Path, mode: Mode, schedule: str) -> None:
    """The interrupt reaches the caller at once, the same token can be stepped again, and close frees everything."""
    quiet = Troubled(HostBackend(schedule), interrupt)
    with open_on(quiet, micro, mode) as engine, engine.new_sequence() as seq:
        loaded = quiet.calls
        expected = [engine.decode_step(seq, t) for t in TOKENS]
        stepped = quiet.calls - loaded
    for hit_at in tenths(stepped):
        host = HostBackend(schedule)
        backend = Troubled(host, interrupt)
        engine = open_on(backend, micro, mode)
        seq = engine.new_sequence()
        backend.hit_at = backend.calls + hit_at
        interrupted = 0
        for token, logits in zip(TOKENS, expected, strict=True):
            position = seq.position
            try:
                again = engine.decode_step(seq, token)
            except KeyboardInterrupt:
                interrupted += 1
                assert backend.calls <= backend.hit_at + 20  # it did not go on with the step
                assert seq.position == position
                again = engine.decode_step(seq, token)
            assert np.array_equal(again.view(np.uint32), logits.view(np.uint32))
        assert interrupted == 1
        engine.close()
        assert host.live() == dict.fromkeys(host.live(), 0)


# ---- processes and platforms

FORK = """
import os, sys
import ds41rt, ds41rt.cli
assert not [m for m in sys.modules if m.split(".")[0] == "cuda"], "importing ds41rt imported the CUDA bindings"
from ds41rt.engine import Engine

def decode():
    with Engine.open(sys.argv[1], expert_slots=30) as engine, engine.new_sequence() as seq:
        return engine.prefill(seq, [5, 17, 42]).tobytes()

here = decode()
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.close(reader)
    with os.fdopen(writer, "wb") as out:
        out.write(decode())
    os._exit(0)
os.close(writer)
with os.fdopen(reader, "rb") as pipe:
    there = pipe.read()
assert os.waitpid(child, 0)[1] == 0
assert here == there and here, "the forked child decoded something else"
assert not [m for m in sys.modules if m.split(".")[0] == "cuda"]
"""


def test_forked_child_decodes_on_the_host_backend(micro: Path) -> None:
    """Import initialises nothing and the host backend has nothing that a fork could break. (That a forked child of a
    process with a CUDA context is told to use spawn belongs to the CUDA backend's tests.)"""
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # Python 3.12 warns of a fork beside other threads
    command = [sys.executable, "-c", FORK, str(micro)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(("system", "machine"), [("win32", "AMD64"), ("linux", "riscv64"), ("freebsd14", "amd64")])
def test_unsupported_platform(micro: Path, monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(UnsupportedError) as refused:
        Engine.open(micro)
    for said in ("Linux", "x86-64", "aarch64", "macOS", system, machine.lower()):
        assert said in str(refused.value)


@pytest.mark.parametrize(
    ("system", "machine"), [("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"), ("darwin", "x86_64")]
)
def test_supported_platform(micro: Path, monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    Engine.open(micro, expert_slots=SLOTS).close()
