"""What belongs to a sequence is reached through the sequence block: buffers move and sequences alternate, and no graph
is captured again. What an engine's graphs bake is theirs: when it changes they are."""

from collections.abc import Callable
from pathlib import Path

import pytest
from buffer_moves import movers
from engine_harness import SCHEDULES, Checkpoints, Run, check_counters, reference

from ds41rt.attn.sequence import SequenceBuffers
from ds41rt.cu.backend import DeviceBuffer
from ds41rt.cu.graphinfo import CopyNode, GraphNode, KernelNode


def move_each_before_each_layer(run: Run, keep: list[DeviceBuffer]) -> None:
    """One token for each pair of a buffer and the layer before whose step it moves."""
    machine = run.engine.machine
    step_seg = machine.step_seg
    run.steps(12)  # graphs are captured, rings are full, rows are selected
    for layer in range(run.engine.config.n_layers):
        for move in movers(run, keep):

            def moving(idx: int, layer: int = layer, move: Callable[[], None] = move) -> None:
                if idx == layer:
                    move()
                step_seg(idx)

            machine.step_seg = moving  # type: ignore[method-assign] # moves a buffer in mid-token
            run.step()
    machine.step_seg = step_seg  # type: ignore[method-assign]


def free(run: Run, keep: list[DeviceBuffer]) -> None:
    for buf in keep:
        run.backend.free(buf)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", ["step-graph", "eager"])
def test_each_buffer_moves_before_each_layer(checkpoint: Checkpoints, mode: str, schedule: str) -> None:
    keep: list[DeviceBuffer] = []
    with Run(reference(checkpoint("micro")), mode=mode, slots=30, schedule=schedule) as run:
        move_each_before_each_layer(run, keep)
        run.steps(10)
        stats = check_counters(run, undisturbed=mode == "step-graph")
        assert stats.recaptures == 0
        assert (stats.clean_replays > 0) == (mode == "step-graph")
        free(run, keep)


def test_each_buffer_of_a_larger_model_moves_before_each_layer(golden: Path) -> None:
    """Both compression ratios, and two KV sources."""
    keep: list[DeviceBuffer] = []
    with Run(reference(golden / "checkpoint", 200), slots=2500) as run:
        move_each_before_each_layer(run, keep)
        assert check_counters(run).clean_replays > 0
        free(run, keep)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("slots", [12, 40])
def test_two_sequences_alternate(checkpoint: Checkpoints, slots: int, schedule: str) -> None:
    """Token by token, then in irregular turns: each equals its solo run, and no graph is captured again."""
    one, two = reference(checkpoint("micro")), reference(checkpoint("micro"), 60, seed=8)
    with Run(one, slots=slots, schedule=schedule) as run, run.engine.new_sequence() as other:
        for _ in range(30):
            run.step()
            run.step(other, two)
        for turn in (3, 1, 4, 1, 5):
            for _ in range(turn):
                run.step()
            for _ in range(turn):
                run.step(other, two)
        stats = run.stats()
        assert (stats.captures, stats.recaptures) == (len(run.engine.machine.owners), 0)
        assert stats.clean_replays > 0
        assert sum(stats.falls.values()) > 0
        check_counters(run, undisturbed=False)


def test_one_sequence_is_reset_and_one_is_closed_while_another_goes_on(checkpoint: Checkpoints) -> None:
    """A reused sequence reads nothing of its former text, whatever position it had reached."""
    one, two = reference(checkpoint("micro")), reference(checkpoint("micro"), 60, seed=8)
    with Run(one, slots=30) as run:
        other = run.engine.new_sequence()
        for length in (1, 2, 3, 8, 25):
            for _ in range(length):
                run.step(other, two)
                run.step()
            other.reset()
            for _ in range(length):
                run.step(other, one)
            other.reset()
        run.step(other, two)
        other.close()
        buffers = run.live()["buffers"]
        with run.engine.new_sequence() as third:
            for _ in range(10):
                run.step(third, two)
                run.step()
        assert run.live()["buffers"] == buffers
        stats = run.stats()
        assert (stats.captures, stats.recaptures) == (len(run.engine.machine.owners), 0)


def test_a_baked_buffer_that_moved_is_captured_again(checkpoint: Checkpoints) -> None:
    """Whichever of the baked addresses changes: all graphs are dropped before the next launch, and made again."""
    with Run(reference(checkpoint("micro")), slots=40) as run:
        bodies, n_segments = run.engine.bodies, len(run.engine.machine.owners)
        run.steps(3)
        launched: list[int] = []
        for i, address in enumerate(bodies.baked()):
            old = {graph.graph_exec for graph in run.engine.machine.seg.graphs if graph is not None}
            bodies._baked = (*bodies._baked[:i], address + 0x1000, *bodies._baked[i + 1 :])
            launched.clear()

            def hook(name: str, args: tuple[int, ...], call: Callable[[], None]) -> None:
                if name == "launch_graph":
                    launched.append(args[0])
                return call()

            with run.hooked(hook):
                run.step()
                assert launched == []
                run.step()
            assert len(launched) == n_segments
            assert not old & set(launched)
            assert run.stats().recaptures == n_segments * (i + 1)
            assert run.live()["graph_execs"] == n_segments


def test_every_address_in_a_graph_is_baked_or_of_the_engine(checkpoint: Checkpoints) -> None:
    """No node names memory of a sequence or of the host, and all nodes are kernels and device copies."""
    with Run(reference(checkpoint("micro"))) as run:
        nodes: list[GraphNode] = []

        def hook(name: str, args: tuple[int, ...], call: Callable[[], None]) -> None:
            if name == "instantiate":
                nodes.extend(run.backend.describe_graph(args[0]).nodes)  # type: ignore[arg-type] # a graph handle
            return call()

        with run.hooked(hook):
            run.steps(2)
        assert len(nodes) > 50
        assert {node.kind for node in nodes} == {"kernel", "copy"}
        addresses: list[int] = []
        for node in nodes:
            if isinstance(node.content, CopyNode):
                assert (node.content.dst_space, node.content.src_space) == ("device", "device")
                addresses += [node.content.dst, node.content.src]
            else:
                assert isinstance(node.content, KernelNode)
                assert node.content.params is not None
                addresses += [int.from_bytes(p.value, "little") for p in node.content.params if len(p.value) == 8]
        # kernels read pinned experts in place, and the address they count from is baked
        pinned = [b for b in run.backend.ledger() if hasattr(b, "pinned") and b.name != "pinned experts"]
        of_sequences = list(run.seq.step.buffers._owned)
        assert pinned
        assert of_sequences
        for buf in (*pinned, *of_sequences):
            ptr = getattr(buf, "device_ptr", buf.ptr)
            for addr in addresses:
                assert not ptr <= addr < ptr + buf.nbytes, f"{addr:#x} lies in {buf.name}"


def test_a_sequence_that_does_not_fit_changes_nothing(checkpoint: Checkpoints) -> None:
    with Run(reference(checkpoint("micro")), slots=40) as run:
        run.steps(5)
        before = run.live()
        alloc = SequenceBuffers._alloc
        n = 0

        def failing(self: SequenceBuffers, name: str, nbytes: int) -> DeviceBuffer:
            nonlocal n
            n += 1
            if n == 3:
                raise MemoryError(name)
            return alloc(self, name, nbytes)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SequenceBuffers, "_alloc", failing)
            with pytest.raises(MemoryError):
                run.engine.new_sequence()
        assert run.live() == before
        run.steps(5)
        check_counters(run)
