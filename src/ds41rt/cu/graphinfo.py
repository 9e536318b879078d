"""What is inside a graph, whatever backend it is of: nodes, edges, and every address that a replay will use again.

Plain results. Nothing here knows a driver, a model or what is right or wrong about a graph.
"""

from dataclasses import dataclass
from typing import Literal

from ds41rt.cu.kernel import KernelLaunch

Space = Literal["device", "pinned", "pageable", "unknown"]
Triple = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Param:
    """One kernel parameter: where it lies in the parameter block, and its bytes."""

    off: int
    value: bytes


@dataclass(frozen=True, slots=True)
class KernelNode:
    """What a replay will launch. `name` and `params` are None where the driver cannot tell, `grid` and `block` for a
    kernel without a device version."""

    name: str | None
    grid: Triple | None
    block: Triple | None
    shared_nbytes: int
    params: tuple[Param, ...] | None


@dataclass(frozen=True, slots=True)
class CopyNode:
    """A copy of `nbytes`; `src` and `dst` are addresses in their spaces, 0 for an array.

    A copy in several dimensions reaches further than it copies: `dst_reach` and `src_reach` are the bytes from the
    first to the last that it touches on either side; None where that is `nbytes`.
    """

    dst: int
    dst_space: Space
    src: int
    src_space: Space
    nbytes: int
    dst_reach: int | None = None
    src_reach: int | None = None


@dataclass(frozen=True, slots=True)
class FillNode:
    """`nbytes` from `dst` on, set to `value` in elements of `element_nbytes`; `reach` as for a copy."""

    dst: int
    value: int
    element_nbytes: int
    nbytes: int
    reach: int | None = None


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One node: its kind, the nodes (indices) that come before it, and its contents where we know the kind.

    Kinds: kernel, copy, fill, host, graph, empty, "wait event", "record event", alloc, free, other. The content of a
    node of kind "graph" is that graph, None where the driver does not show it.

    `label`, `stream` and `launch` are what the capturing call said; None for a node that this process did not capture
    through a backend.
    """

    index: int
    kind: str
    deps: tuple[int, ...]
    content: "KernelNode | CopyNode | FillNode | GraphInfo | None"
    label: str | None = None
    stream: str | None = None
    launch: KernelLaunch | None = None


@dataclass(frozen=True, slots=True)
class GraphInfo:
    """The nodes in the driver's order, which a dependency may contradict.

    `unavailable` are the driver's calls that would say more and are not there, by name.
    """

    nodes: tuple[GraphNode, ...]
    unavailable: tuple[str, ...] = ()

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """(before, after) pairs of node indices."""
        return tuple((dep, node.index) for node in self.nodes for dep in node.deps)
