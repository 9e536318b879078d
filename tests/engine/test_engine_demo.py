"""The demo tells the truth: one wrong byte in a snapshot, a slot or a header, and it prints no and exits with 1."""

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from ds41rt.cu.host import HostBackend
from ds41rt.engine import Engine
from ds41rt.tools import demo as demo_tool

ARGS = argparse.Namespace(tokens=24, json=False, backend="host", schedule="lazy")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller checkpoint; its own is decoded where the command line is tested."""
    monkeypatch.setattr(demo_tool, "PRESET", "micro")
    monkeypatch.setattr(demo_tool, "EXPERT_SLOTS", 20)
    monkeypatch.setattr(demo_tool, "PROMPT", (0, 17, 42, 99, 256, 201, 7))


def flip_before(patch: pytest.MonkeyPatch, engine: Engine, call: str, label: str, where: Callable[..., int]) -> None:
    """Before the first copy with this label, flip a bit of the byte at `where(dst, src)`."""
    backend = engine.backend
    assert isinstance(backend, HostBackend)
    copy, done = getattr(backend, call), False

    def flip(dst: Any, src: Any, *args: Any, **named: Any) -> None:
        nonlocal done
        if label in (*args, *named.values()) and not done:
            done = True
            backend.synchronize(engine.stream)
            backend.memory.bytes(where(dst, src), 1)[:] ^= 0x10
        copy(dst, src, *args, **named)

    patch.setattr(backend, call, flip)


def snapshot_byte(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    flip_before(patch, engine, "copy_d2d", "snapshot.restore", lambda dst, src: src + 1)


def slot_byte(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    """Of an expert in staging, on its way into its slot: the first one is staged in the pool's slot 1."""
    staged = engine.arena.slot_nbytes + 100
    flip_before(patch, engine, "copy_h2d", "expert.copy", lambda dst, src: src.device_ptr + staged)


def header_byte(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    """Of a weight: a wrong pick is noticed by the engine, and cured or refused."""
    weight = 4 * (1 + engine.config.top_k)
    flip_before(patch, engine, "copy_d2h", "route.header", lambda dst, src: src + weight + 2)


def test_untouched(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo_tool.demo(ARGS, lambda engine: None) == 0
    assert "bit-identical: yes (24 x 288 logits compared)" in capsys.readouterr().out


@pytest.mark.parametrize("plant", [snapshot_byte, slot_byte, header_byte])
def test_a_wrong_byte(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch, Engine], None],
) -> None:
    assert demo_tool.demo(ARGS, lambda engine: plant(monkeypatch, engine)) == 1
    assert "bit-identical: no (24 x 288 logits compared)" in capsys.readouterr().out
