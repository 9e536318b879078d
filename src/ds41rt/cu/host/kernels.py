"""Kernels on the simulated device: a prepared launch whose arrays are built from the declaration alone.

Running a launch calls the NumPy reference with those arrays. This file must not know streams or captures.
"""

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ds41rt.cu.host.command import Operand
from ds41rt.cu.host.memory import AccessFault, Memory
from ds41rt.cu.kernel import KernelLaunch, KernelSpec, Pointer, ordered_args

if TYPE_CHECKING:
    from ds41rt.cu.host.footprint import Footprint


class HostLaunch(KernelLaunch):
    """A `KernelLaunch` of the host backend; also a `Command`.

    Shapes are computed once. The arrays of the direct pointers are kept until something is freed; spans are resolved
    at every run, because the tables they come from are device memory.
    """

    __slots__ = ("_epoch", "_indirect", "_pointers", "_reference", "_values", "footprint", "has_indirect", "memory")

    kind: Literal["kernel"] = "kernel"

    def __init__(self, memory: Memory, spec: KernelSpec, args: Mapping[str, int | float], label: str) -> None:
        super().__init__(spec, ordered_args(spec, args), label)
        self.memory = memory
        self._reference = spec.reference
        self._indirect = spec.indirect
        self.has_indirect = spec.indirect is not None
        self.footprint: Footprint | None = None
        scalars = spec.scalars(args)
        self._pointers = [(i, p, p.shape(scalars)) for i, p in enumerate(spec.params) if isinstance(p, Pointer)]
        for _, p, shape in self._pointers:
            if any(n < 0 for n in shape):
                raise ValueError(f"kernel {spec.name} ({label!r}): {p.name} has a negative dimension: {shape}")
        # The reference's positional arguments: scalars as they are, arrays put in by _bind.
        self._values: list[Any] = list(self.args)
        self._epoch = -1

    def run(self, memory: Memory) -> None:
        try:
            if self._epoch != memory.epoch:
                self._bind(memory)
            with np.errstate(all="ignore"):  # no device warns of an overflow
                if self._indirect is None:
                    self._reference(*self._values)
                else:
                    self._reference(*self._values, self._resolve(memory))
        except AccessFault:
            raise
        except BaseException as exc:
            exc.add_note(f"while the host backend ran kernel {self.label!r} ({self.spec.name})")
            raise

    def operands(self) -> tuple[Operand, ...]:
        return tuple(
            Operand(p.name, int(self.args[i]), prod(shape) * p.dtype.itemsize, p.access)
            for i, p, shape in self._pointers
            if prod(shape)
        )

    def _bind(self, memory: Memory) -> None:
        for i, p, shape in self._pointers:
            if not prod(shape):
                self._values[i] = None
                continue
            try:
                self._values[i] = memory.view(int(self.args[i]), p.dtype, shape, p.access != "r")
            except AccessFault as fault:
                raise fault.inside(f"{self._where()} parameter {p.name!r}") from None
        self._epoch = memory.epoch

    def _resolve(self, memory: Memory) -> list[Any]:
        assert self._indirect is not None
        spans = self._indirect(*self._values)
        if memory.on_spans is not None:
            memory.on_spans(spans)
        try:
            return [memory.view(s.addr, s.dtype, s.shape, s.access != "r") for s in spans]
        except AccessFault as fault:
            raise fault.inside(f"{self._where()} indirect span") from None

    def _where(self) -> str:
        return f"kernel {self.label!r} ({self.spec.name})"
