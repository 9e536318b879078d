"""What the simulated device can be told to do: one command, the same object in a stream and in a graph node.

A command holds addresses and host buffers, never contents: it reads memory each time it runs. Whoever holds the
command keeps alive what it needs. This file must not know streams or schedules.
"""

import time
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ds41rt.cu.backend import HostBuffer
from ds41rt.cu.host.memory import AccessFault, Memory
from ds41rt.cu.kernel import Access

Kind = Literal["kernel", "h2d", "d2h", "d2d", "fill", "graph", "stamp"]
Space = Literal["device", "pinned", "pageable"]


@dataclass(frozen=True, slots=True)
class Operand:
    """One memory range that a command names directly: its role, address, size and access.

    `addr` is a device address, except in space "pageable", where it is a host address.
    """

    role: str
    addr: int
    nbytes: int
    access: Access
    space: Space = "device"


class Command(Protocol):
    """A unit of device work."""

    @property
    def kind(self) -> Kind: ...

    @property
    def label(self) -> str: ...

    def run(self, memory: Memory) -> None:
        """Do it now. Raises `AccessFault` naming the command."""

    def operands(self) -> tuple[Operand, ...]:
        """The ranges known without running; memory behind pointer tables is not among them."""


@dataclass(slots=True, eq=False)
class Copy:
    """`nbytes` between a device address and a host buffer (from `host_off` on), or between two device addresses."""

    kind: Literal["h2d", "d2h", "d2d"]
    label: str
    dst: int | HostBuffer
    src: int | HostBuffer
    nbytes: int
    host_off: int = 0

    def run(self, memory: Memory) -> None:
        role = "source"
        try:
            src = self._bytes(memory, self.src)
            role = "destination"
            self._bytes(memory, self.dst)[:] = src
        except AccessFault as fault:
            raise fault.inside(f"copy {self.label!r} ({self.kind}) {role}") from None

    def _bytes(self, memory: Memory, place: int | HostBuffer) -> NDArray[np.uint8]:
        if not isinstance(place, HostBuffer):
            return memory.bytes(place, self.nbytes)
        if place.pinned:
            return memory.bytes(place.device_ptr + self.host_off, self.nbytes)
        return place.array[self.host_off : self.host_off + self.nbytes]

    def operands(self) -> tuple[Operand, ...]:
        return self._operand("dst", self.dst, "w"), self._operand("src", self.src, "r")

    def _operand(self, role: str, place: int | HostBuffer, access: Access) -> Operand:
        if not isinstance(place, HostBuffer):
            return Operand(role, place, self.nbytes, access)
        if place.pinned:
            return Operand(role, place.device_ptr + self.host_off, self.nbytes, access, "pinned")
        return Operand(role, place.ptr + self.host_off, self.nbytes, access, "pageable")


@dataclass(slots=True, eq=False)
class Stamp:
    """Notes when it ran: one record of a timing event. `time_ns` is that of `time.perf_counter_ns`."""

    label: str
    time_ns: int = 0
    kind: Literal["stamp"] = "stamp"

    def run(self, memory: Memory) -> None:
        self.time_ns = time.perf_counter_ns()

    def operands(self) -> tuple[Operand, ...]:
        return ()


@dataclass(slots=True, eq=False)
class Fill:
    """`nbytes` times the same byte."""

    label: str
    dst: int
    byte: int
    nbytes: int
    kind: Literal["fill"] = "fill"

    def run(self, memory: Memory) -> None:
        try:
            memory.bytes(self.dst, self.nbytes)[:] = self.byte
        except AccessFault as fault:
            raise fault.inside(f"fill {self.label!r} destination") from None

    def operands(self) -> tuple[Operand, ...]:
        return (Operand("dst", self.dst, self.nbytes, "w"),)
