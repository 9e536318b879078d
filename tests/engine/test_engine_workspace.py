"""The workspace of the mixing kernels: a device counts blocks in its first word, from zero on."""

from engine_harness import Checkpoints

from ds41rt.cu.host import HostBackend
from ds41rt.engine import Engine


def test_the_mix_workspace_is_zero_before_the_first_step(checkpoint: Checkpoints) -> None:
    backend = HostBackend()
    with Engine.open(checkpoint("micro"), backend=backend) as engine:
        work = engine.buffers.mix_work
        assert not backend.memory.bytes(work.ptr, work.nbytes).any()
    backend.close()
