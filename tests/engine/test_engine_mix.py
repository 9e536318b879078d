"""Random mixes of everything that may happen to an engine; every token must still be the one of the eager run.

The actions of a seed are drawn from it alone; a failure prints them.
"""

from random import Random
from typing import Any, cast

import pytest
from buffer_moves import movers
from engine_harness import Checkpoints, FailAt, ProbeBackend, Reference, Run, check_counters, out_of_memory, reference

from ds41rt.cu.backend import DeviceBuffer
from ds41rt.cu.result import CudaError
from ds41rt.errors import CacheError, CheckpointError


class Mix:
    """One engine and two sequences, and the actions."""

    def __init__(self, refs: tuple[Reference, Reference], rng: Random, backend: ProbeBackend) -> None:
        self.rng = rng
        self.keep: list[DeviceBuffer] = []
        self.run = Run(
            refs[0],
            backend=backend,
            mode=rng.choice(("step-graph", "step-graph", "eager")),
            slots=rng.choice((16, 17, 20, 28, 40, 64)),
            evict_random_pct=0.0,
            device_route_diag=rng.random() < 0.2,
        )
        self.texts = [(self.run.seq, refs[0]), (self.run.engine.new_sequence(), refs[1])]

    def act(self) -> str:
        """One action, then one token of either sequence, which is checked."""
        rng, run = self.rng, self.run
        which = rng.randrange(2)
        run.seq, run.ref = self.texts[which]
        if run.seq.position > run.ref.n_tokens - 2:
            run.seq.reset()
        name, action = rng.choice(
            (
                ("load", run.load),
                ("starve", self.starve),
                ("starve", self.starve),
                ("starve", self.starve),
                ("wrong slots", self.wrong_slots),
                ("lost entries", self.lost_entries),
                ("move", lambda: rng.choice(movers(run, self.keep))()),
                ("reset", run.seq.reset),
                ("new", lambda: self.new_sequence(which)),
                ("bake", self.bake),
                ("fail", self.fail),
                ("fail", self.fail),
                ("fail reads", self.fail_reads),
            )
        )
        action()
        run.step()
        return f"{name}({which})"

    def starve(self) -> None:
        picks = [(layer, expert) for layer, experts in enumerate(self.run.picks()) for expert in experts]
        if self.run.engine.cache.n_slots < 50:  # else there are not enough others to push them out
            self.run.starve(self.rng.sample(picks, self.rng.randint(0, len(picks))))

    def some_picks(self) -> list[tuple[int, int]]:
        picks = [(layer, expert) for layer, experts in enumerate(self.run.picks()) for expert in experts]
        return self.rng.sample(picks, 3)

    def wrong_slots(self) -> None:
        n_slots = self.run.engine.cache.n_slots
        self.run.engine.table.update()
        self.run.engine.table.apply([(*pick, self.rng.randint(1, n_slots)) for pick in self.some_picks()])

    def lost_entries(self) -> None:
        self.run.engine.table.update()
        self.run.engine.table.apply([(*pick, -1) for pick in self.some_picks()])

    def new_sequence(self, which: int) -> None:
        run = self.run
        run.seq.close()
        run.seq = run.engine.new_sequence()
        self.texts[which] = run.seq, run.ref

    def bake(self) -> None:
        """All graphs are captured again, if there are any."""
        bodies = self.run.engine.bodies
        bodies._baked = (*bodies._baked[:-1], self.rng.randrange(2**40))

    def fail(self) -> None:
        """A call fails or is interrupted; the caller steps the same token again."""
        error = self.rng.choice((out_of_memory, KeyboardInterrupt))()
        after = isinstance(error, KeyboardInterrupt) and self.rng.random() < 0.5
        creating = ("end_capture", "instantiate", "create_stream", "create_event") if after else ()
        failing = FailAt(self.rng.randrange(150), error, after=after, counts=lambda name, args: name not in creating)
        raised = self.run.try_step(failing)
        assert raised is None or raised is error

    def fail_reads(self) -> None:
        fetcher = self.run.engine._fetcher
        source, left = fetcher._source, self.rng.randrange(4)

        class Failing:
            def read_expert(self, layer: int, expert: int, out: Any, offset: int) -> None:
                nonlocal left
                left -= 1
                if left == -1:
                    raise CheckpointError("planted")
                source.read_expert(layer, expert, out, offset)

        fetcher._source = cast(Any, Failing())
        try:
            self.run.step()
        except CacheError:
            pass
        finally:
            fetcher._source = source

    def close(self) -> None:
        check_counters(self.run, undisturbed=False)
        self.run.check_table()
        self.run.engine.close()
        for buf in self.keep:
            self.run.backend.free(buf)


def mix(checkpoint: Checkpoints, seed: int, n_actions: int) -> None:
    rng = Random(seed)
    refs = reference(checkpoint("micro")), reference(checkpoint("micro"), 60, seed=8)
    schedule = rng.choice(("lazy", "eager", f"random:{seed}"))
    backend = ProbeBackend(schedule)
    done = [schedule]
    try:
        while len(done) < n_actions:
            one = Mix(refs, rng, backend)
            done.append(f"open {one.run.engine.settings.step_graph} {one.run.engine.cache.n_slots}")
            for _ in range(60):
                done.append(one.act())
            one.close()
            assert not any(backend.inner.live().values())
    except (AssertionError, CudaError) as error:
        raise AssertionError(f"seed {seed}, after {done}: {error}") from error
    finally:
        backend.hook = None
        backend.close()


@pytest.mark.parametrize("seed", range(8))
def test_random_mix(checkpoint: Checkpoints, seed: int) -> None:
    mix(checkpoint, seed, 60)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 120))
def test_long_random_mix(checkpoint: Checkpoints, seed: int) -> None:
    mix(checkpoint, seed, 1000)
