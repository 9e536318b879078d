"""What a careless or unlucky caller may do to an engine: interrupts, calls from inside a step, wrong handles."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from ds41rt.cu.host import HostBackend
from ds41rt.cu.result import CudaError, Status
from ds41rt.engine import Engine
from ds41rt.errors import CheckpointError, ConfigError, EngineBusyError, InputError, NotFiniteError

Checkpoints = Callable[[str], Path]


class Nosy:
    """An observer that calls back into the engine."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.errors: list[Exception] = []

    def selection(self, layer: int, rows: Any) -> None: ...

    def point(self, position: int, layer: int, part: str, addr: int, nbytes: int, stream: Any) -> None:
        if not self.errors:
            with pytest.raises(EngineBusyError, match="in the middle of a step") as e:
                self.call()
            self.errors.append(e.value)


def test_a_call_from_inside_a_step_is_refused(checkpoint: Checkpoints) -> None:
    with Engine.open(checkpoint("micro"), backend="host") as engine:
        seq = engine.new_sequence()
        want = engine.decode_step(seq, 5)
        seq.reset()
        for call in (engine.close, lambda: engine.decode_step(seq, 7), seq.close, engine.new_sequence):
            nosy = Nosy(call)
            engine.observe(nosy)
            seq.reset()
            assert np.array_equal(engine.decode_step(seq, 5), want)
            assert nosy.errors
            engine.stop_observing(nosy)


def test_another_thread_is_refused_and_never_waits(checkpoint: Checkpoints) -> None:
    with Engine.open(checkpoint("micro"), backend="host") as engine:
        seq = engine.new_sequence()
        seen: list[BaseException] = []

        def call() -> None:
            for attempt in (lambda: engine.decode_step(seq, 3), engine.close):
                try:
                    attempt()
                except EngineBusyError as e:
                    seen.append(e)

        class Waits(Nosy):
            def point(self, *args: Any) -> None:
                if not seen:
                    thread = threading.Thread(target=call)
                    thread.start()
                    thread.join(30)
                    assert not thread.is_alive()

        engine.observe(Waits(lambda: None))
        engine.decode_step(seq, 5)
        assert len(seen) == 2


def test_an_interrupt_between_calls_does_not_lock_the_engine(checkpoint: Checkpoints) -> None:
    with Engine.open(checkpoint("micro"), backend="host") as engine:
        seq = engine.new_sequence()
        engine._busy.acquire()  # as an interrupt leaves it that comes just after the lock was taken
        engine.decode_step(seq, 5)
        assert seq.position == 1


def test_wrong_handles(checkpoint: Checkpoints) -> None:
    with (
        Engine.open(checkpoint("micro"), backend="host") as one,
        Engine.open(checkpoint("micro"), backend="host") as two,
    ):
        mine, theirs = one.new_sequence(), two.new_sequence()
        with pytest.raises(InputError, match="another engine"):
            one.close_sequence(theirs)
        with pytest.raises(InputError, match="no sequence"):
            one.decode_step(None, 5)  # type: ignore[arg-type]  # on purpose
        two.decode_step(theirs, 5)
        one.decode_step(mine, 5)
    with pytest.raises(InputError, match="not both"):
        Engine.open(checkpoint("micro"), mode="eager", step_graph=True)
    with pytest.raises(ConfigError, match="max_contxt=3: there is no such setting; known are"):
        Engine.open(checkpoint("micro"), max_contxt=3)
    with pytest.raises(ConfigError, match="expert_cache_gib"):
        Engine.open(checkpoint("micro"), expert_cache_gib=1e300)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"expert_slots": "10"}, ConfigError, "expert_slots='10': give a whole number"),
        ({"expert_slots": 10.5}, ConfigError, "expert_slots=10.5: give a whole number"),
        ({"expert_slots": np.int64(9)}, ConfigError, r"expert_slots=np.int64\(9\): give a whole number"),
        ({"expert_slots": True}, ConfigError, "expert_slots=True: give a whole number"),
        ({"host_slots": "1"}, ConfigError, "host_slots='1': give a whole number"),
        ({"backend": 3}, InputError, "backend=3: give 'auto', 'host', 'cuda' or an open backend"),
        ({"schedule": 3}, InputError, "schedule=3: give 'lazy'"),
        ({"expert_slots": 9, "expert_cache_gib": 1.0}, InputError, "give expert_slots or expert_cache_gib, not both"),
        ({"host_slots": 0, "host_cache_gib": 0.0}, InputError, "give host_slots or host_cache_gib, not both"),
    ],
)
def test_wrong_arguments_of_open(
    checkpoint: Checkpoints, arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        Engine.open(checkpoint("micro"), **arguments)


def test_a_path_that_is_none() -> None:
    with pytest.raises(InputError, match="path=3: give the directory"):
        Engine.open(cast(Any, 3))


def test_slots_go_before_the_environments_budget(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS41RT_EXPERT_CACHE_GIB", "1")
    with Engine.open(checkpoint("micro"), expert_slots=9) as engine:
        assert engine.stats().expert_slots == 9


def test_wrong_arguments_of_an_open_engine(checkpoint: Checkpoints) -> None:
    with Engine.open(checkpoint("micro"), backend="host") as opened:
        engine: Any = opened
        seq = engine.new_sequence()
        for layer, experts, said in (
            (0, "x", "expert 'x': give an integer"),
            (0, [1, 1.5], "expert 1.5: give an integer"),
            ("0", [1], "layer '0': give an integer"),
            (0, 5, "experts 5: give a list"),
            (0, (e for e in [1]), "experts <generator"),
        ):
            with pytest.raises(InputError, match=said):
                engine.preload(layer, experts)
        for tokens, said in (((t for t in [1]), "tokens <generator"), (5, "tokens 5: give a list"), ("ab", "id 'a'")):
            with pytest.raises(InputError, match=said):
                engine.prefill(seq, tokens)
        with pytest.raises(InputError, match="None is no sequence"):
            engine.prefill(None, [1])
        engine.preload(0, np.arange(3))
        engine.prefill(seq, np.array([1, 2]))
        assert seq.position == 2


def test_names_for_people(checkpoint: Checkpoints) -> None:
    path = checkpoint("micro")
    for mode in ("eager", "step-graph", "adaptive"):
        with Engine.open(path, mode=cast(Any, mode), backend="host") as engine:
            assert repr(engine) == f"<Engine {path}, {mode}, host, open>"
            seq = engine.new_sequence()
            engine.decode_step(seq, 5)
            assert repr(seq) == "<DecodeSequence 1 at position 1>"
        assert repr(engine) == f"<Engine {path}, {mode}, host, closed>"
        assert repr(seq) == "<DecodeSequence 1 closed>"


def test_a_sequence_of_a_failed_engine_closes_quietly(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(position: int) -> None:
        raise CudaError(Status.ILLEGAL_ADDRESS, "cuSeeded", "seeded")

    backend = HostBackend()
    with Engine.open(checkpoint("micro"), backend=backend) as engine:
        monkeypatch.setattr(engine.machine, "run_token", lost)
        with pytest.raises(CudaError, match="seeded"), engine.new_sequence() as seq:
            engine.decode_step(seq, 5)
        assert seq.closed
    assert not any(backend.live().values())
    backend.close()


class Spoilt:
    """A source with one tensor full of NaN."""

    def __init__(self, source: Any, name: str) -> None:
        self._source = source
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(self, name: str) -> Any:
        values = self._source.read(name)
        return np.full_like(values, np.nan) if name == self._name else values

    def read_into(self, name: str, out: Any, offset: int = 0) -> None:
        self._source.read_into(name, out, offset)
        if name == self._name:
            out[:] = 0xFF


def test_weights_that_are_not_finite(checkpoint: Checkpoints) -> None:
    from ds41rt.checkpoint.checkpoint import Checkpoint
    from ds41rt.settings import Settings

    with Checkpoint.open(checkpoint("micro")) as source:
        with pytest.raises(CheckpointError, match=r"layers\.1\.ffn\.gate\.bias"):
            Engine(Spoilt(source, "layers.1.ffn.gate.bias"), Settings(backend="host"))
        for name in ("head.weight", "norm.weight"):
            with Engine(Spoilt(source, name), Settings(backend="host")) as engine:
                seq = engine.new_sequence()
                with pytest.raises(NotFiniteError, match="position 0: a logit is not finite"):
                    engine.decode_step(seq, 5)
                assert seq.position == 0


def test_progress_counts_the_bytes_that_are_loaded(checkpoint: Checkpoints) -> None:
    told: list[tuple[int, int]] = []
    with Engine.open(checkpoint("micro"), backend="host", progress=lambda done, total: told.append((done, total))) as e:
        total = sum(nbytes for _, nbytes in e._source.resident_tensors())
    assert {of for _, of in told} == {total}
    done = [n for n, _ in told]
    assert done == sorted(set(done))
    assert (done[0] > 0, done[-1]) == (True, total)
