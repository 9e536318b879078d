"""What a command touches, in the form that race detection compares: byte ranges by allocation.

Known before it runs are the ranges that it names; those behind pointer tables are added at each run. This file must not
know clocks or streams.
"""

from collections.abc import Callable, Iterator
from types import CodeType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds41rt.cu.backend import HostBuffer
from ds41rt.cu.call_site import calling_frame
from ds41rt.cu.host.command import Command, Copy
from ds41rt.cu.host.graph import GraphLaunch, ancestors
from ds41rt.cu.host.kernels import HostLaunch

if TYPE_CHECKING:
    from ds41rt.cu.host.race import Record

Site = tuple[CodeType, int]


def call_site() -> Site:
    """The innermost frame outside of `ds41rt.cu` and NumPy; `site_text` looks up the line when it is wanted."""
    frame = calling_frame()
    return frame.f_code, frame.f_lasti


def site_text(site: Site) -> str:
    code, offset = site
    lines = (line for start, end, line in code.co_lines() if start <= offset < end and line is not None)
    return f"{code.co_filename}:{next(lines, code.co_firstlineno)}"


class Bucket:
    """One allocation and the accesses to it that later ones may still race with, by thread, ascending by number.

    `host` says that the host can see this memory, `data` are its bytes if they are one array.
    """

    __slots__ = ("data", "end", "host", "name", "records", "start")

    def __init__(self, name: str, start: int, end: int, data: NDArray[np.uint8] | None) -> None:
        self.name = name
        self.start = start
        self.end = end
        self.data = data
        self.host = data is not None
        self.records: dict[int, list[Record]] = {}


class Part(NamedTuple):
    """One access: addresses lo..hi of `owner`, by parameter `role` of graph node `leaf` (-1: not in a graph)."""

    lo: int
    hi: int
    write: bool
    role: str
    owner: Bucket | HostBuffer
    leaf: int

    def meets(self, other: "Part") -> bool:
        return self.lo < other.hi and other.lo < self.hi and (self.write or other.write)


class Spot(NamedTuple):
    """What one operation does to one allocation: the parts, and the range and access that cover them."""

    bucket: Bucket
    lo: int
    hi: int
    write: bool
    parts: tuple[Part, ...]


class Leaf(NamedTuple):
    """A graph node for reports, and the other nodes that no edge orders with it."""

    kind: str
    label: str
    stream: str
    site: Site | None
    parts: tuple[tuple[Bucket, Part], ...]
    unordered: tuple[int, ...]


class Footprint(NamedTuple):
    """Everything about a command's accesses that is known without running it."""

    spots: tuple[Spot, ...]
    # Reads of memory that the host can change behind the backend's back: the part and its bytes.
    host_reads: tuple[tuple[Part, NDArray[np.uint8]], ...]
    n_indirect: int
    leaves: tuple[Leaf, ...]
    internal: tuple[tuple[Part, Part], ...]


Find = Callable[[int], Bucket | None]


def trace(command: Command, find: Find, pageable: Bucket) -> tuple[Footprint, bool]:
    """A fresh footprint, and False if an address in it is not allocated (yet)."""
    if not isinstance(command, GraphLaunch):
        placed, complete = _parts(command, -1, find, pageable)
        internal = tuple(_overlap_in(command, placed))
        n_indirect = int(isinstance(command, HostLaunch) and command.has_indirect)
        return Footprint(spots_of(placed), _host_reads(placed), n_indirect, (), internal), complete
    nodes, before = command.nodes, ancestors(command.nodes)
    unordered: list[list[int]] = [[] for _ in nodes]
    for j, earlier in enumerate(before):
        missing = ~earlier & ((1 << j) - 1)
        while missing:
            i = (missing & -missing).bit_length() - 1
            missing &= missing - 1
            unordered[i].append(j)
            unordered[j].append(i)
    complete = True
    leaves: list[Leaf] = []
    by_leaf: list[list[tuple[Bucket, Part]]] = []
    internals: list[tuple[Part, Part]] = []
    for j, node in enumerate(nodes):
        command = node.command
        placed, ok = _parts(command, j, find, pageable)
        complete &= ok
        by_leaf.append(placed)
        internals += _overlap_in(command, placed)
        for i in unordered[j]:
            if i < j:
                internals += [(a, b) for p, a in by_leaf[i] for q, b in placed if p is q and a.meets(b)]
        # No table leads to pageable memory, and a leaf, which reports hold, must not keep it alive.
        parts = tuple((bucket, part) for bucket, part in placed if bucket is not pageable)
        leaves.append(Leaf(command.kind, command.label, node.stream, node.site, parts, tuple(unordered[j])))
    all_parts = [pair for placed in by_leaf for pair in placed]
    n_indirect = sum(isinstance(node.command, HostLaunch) and node.command.has_indirect for node in nodes)
    return Footprint(spots_of(all_parts), _host_reads(all_parts), n_indirect, tuple(leaves), tuple(internals)), complete


def _parts(command: Command, leaf: int, find: Find, pageable: Bucket) -> tuple[list[tuple[Bucket, Part]], bool]:
    placed: list[tuple[Bucket, Part]] = []
    complete = True
    for operand in command.operands():
        lo, hi, write = operand.addr, operand.addr + operand.nbytes, operand.access != "r"
        if operand.space == "pageable":
            assert isinstance(command, Copy)
            owner = command.dst if write else command.src
            assert isinstance(owner, HostBuffer)
            bucket: Bucket | None = pageable
            part = Part(lo, hi, write, operand.role, owner, leaf)
        else:
            bucket = find(lo)
            if bucket is None:
                complete = False
                continue
            part = Part(lo, hi, write, operand.role, bucket, leaf)
        if operand.nbytes and bucket is not None:
            placed.append((bucket, part))
    return placed, complete


def spots_of(placed: list[tuple[Bucket, Part]]) -> tuple[Spot, ...]:
    by_bucket: dict[int, tuple[Bucket, list[Part]]] = {}
    for bucket, part in placed:
        by_bucket.setdefault(bucket.start, (bucket, []))[1].append(part)
    return tuple(
        Spot(b, min(p.lo for p in parts), max(p.hi for p in parts), any(p.write for p in parts), tuple(parts))
        for b, parts in by_bucket.values()
    )


def _host_reads(placed: list[tuple[Bucket, Part]]) -> tuple[tuple[Part, NDArray[np.uint8]], ...]:
    """Plain reads of host memory that nothing in the same command writes, with the bytes they read."""
    found = []
    for bucket, part in placed:
        if part.write or any(q is bucket and p.meets(part) for q, p in placed):
            continue
        if isinstance(part.owner, HostBuffer):
            start = part.lo - part.owner.ptr
            array = part.owner.array[start : start + part.hi - part.lo]
            if array.flags.writeable:
                found.append((part, array))
        elif bucket.data is not None:
            found.append((part, bucket.data[part.lo - bucket.start : part.hi - bucket.start]))
    return tuple(found)


def _overlap_in(command: Command, placed: list[tuple[Bucket, Part]]) -> Iterator[tuple[Part, Part]]:
    """The source and destination of one copy that overlap: no order of the bytes is defined."""
    if isinstance(command, Copy) and len(placed) == 2:
        (p, a), (q, b) = placed
        if p is q and a.meets(b):
            yield a, b
