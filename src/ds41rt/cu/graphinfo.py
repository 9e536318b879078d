"""What is inside a CUDA graph: nodes, edges, and every address that a replay will use again.

The result types know no driver. The bindings come in as an argument, and where their generations differ (12.9 names the
newest form of a call with a suffix, 13 without one) the difference stays here.
"""

import ctypes
from dataclasses import dataclass
from typing import Any, Literal

from ds41rt.cu.driver_errors import Call, try_optional

# Kinds by the driver's node type numbers; a type that this list does not know is "other".
_KINDS = {
    0: "kernel",
    1: "copy",
    2: "fill",
    3: "host",
    4: "graph",
    5: "empty",
    6: "wait event",
    7: "record event",
    10: "alloc",
    11: "free",
}
Space = Literal["device", "pinned", "pageable"]


@dataclass(frozen=True, slots=True)
class Param:
    """One kernel parameter: where it lies in the parameter block, and its bytes."""

    off: int
    value: bytes


@dataclass(frozen=True, slots=True)
class KernelNode:
    """`name` is None, and `params` is None, where the driver cannot tell (before 12.3 and 12.4)."""

    name: str | None
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_nbytes: int
    params: tuple[Param, ...] | None


@dataclass(frozen=True, slots=True)
class CopyNode:
    """A linear copy; `src` and `dst` are addresses in their spaces. A copy that is not linear counts all its bytes."""

    dst: int
    dst_space: Space
    src: int
    src_space: Space
    nbytes: int


@dataclass(frozen=True, slots=True)
class FillNode:
    """`nbytes` from `dst` on, set to `value` in elements of `element_nbytes`."""

    dst: int
    value: int
    element_nbytes: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One node: its kind, the nodes (indices) that come before it, and its contents where we know the kind."""

    index: int
    kind: str
    deps: tuple[int, ...]
    content: KernelNode | CopyNode | FillNode | None


@dataclass(frozen=True, slots=True)
class GraphInfo:
    """The nodes in the driver's order, which a dependency may contradict."""

    nodes: tuple[GraphNode, ...]

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """(before, after) pairs of node indices."""
        return tuple((dep, node.index) for node in self.nodes for dep in node.deps)


def describe(cu: Any, call: Call, graph: Any) -> GraphInfo:
    """Take a `CUgraph` apart. `cu` is the bindings module; errors come from `call`."""
    (_, count) = call("cuGraphGetNodes", graph, 0)
    nodes = list(call("cuGraphGetNodes", graph, count)[0])[:count] if count else []
    index = {int(node): i for i, node in enumerate(nodes)}
    deps: list[list[int]] = [[] for _ in nodes]
    for before, after in _edges(cu, call, graph):
        deps[index[after]].append(index[before])
    return GraphInfo(tuple(_node(cu, call, i, node, tuple(sorted(deps[i]))) for i, node in enumerate(nodes)))


def _edges(cu: Any, call: Call, graph: Any) -> list[tuple[int, int]]:
    # The oldest form refuses graphs whose edges carry data, so take the newest one there is.
    name = "cuGraphGetEdges_v2" if hasattr(cu, "cuGraphGetEdges_v2") else "cuGraphGetEdges"
    count = call(name, graph, 0)[-1]
    if not count:
        return []
    before, after, *_ = call(name, graph, count)
    return [(int(a), int(b)) for a, b in zip(before[:count], after[:count], strict=True)]


def _node(cu: Any, call: Call, index: int, node: Any, deps: tuple[int, ...]) -> GraphNode:
    (kind_number,) = call("cuGraphNodeGetType", node)
    kind = _KINDS.get(int(kind_number), "other")
    content: KernelNode | CopyNode | FillNode | None = None
    if kind == "kernel":
        content = _kernel(cu, call("cuGraphKernelNodeGetParams", node)[0])
    elif kind == "copy":
        content = _copy(cu, call("cuGraphMemcpyNodeGetParams", node)[0])
    elif kind == "fill":
        content = _fill(call("cuGraphMemsetNodeGetParams", node)[0])
    return GraphNode(index, kind, deps, content)


def _kernel(cu: Any, raw: Any) -> KernelNode:
    # A node made from a library kernel has `kern` in place of `func`.
    handle, family = (raw.func, "cuFunc") if int(raw.func or 0) else (raw.kern, "cuKernel")
    name = try_optional(cu, f"{family}GetName", handle)
    return KernelNode(
        None if name is None else name[0].decode(errors="replace"),
        (raw.gridDimX, raw.gridDimY, raw.gridDimZ),
        (raw.blockDimX, raw.blockDimY, raw.blockDimZ),
        raw.sharedMemBytes,
        _params(cu, f"{family}GetParamInfo", handle, int(raw.kernelParams or 0)),
    )


def _params(cu: Any, probe: str, handle: Any, array: int) -> tuple[Param, ...] | None:
    """The parameters behind a `void **`; the driver says how many there are by refusing the next index."""
    params: list[Param] = []
    while (found := try_optional(cu, probe, handle, len(params))) is not None:
        off, nbytes = found
        if not array:
            return None
        value = ctypes.c_void_p.from_address(array + len(params) * ctypes.sizeof(ctypes.c_void_p)).value
        params.append(Param(off, ctypes.string_at(value or 0, nbytes)))
    return tuple(params) or None


def _copy(cu: Any, raw: Any) -> CopyNode:
    dst, dst_space = _place(cu, raw.dstMemoryType, raw.dstDevice, raw.dstHost)
    src, src_space = _place(cu, raw.srcMemoryType, raw.srcDevice, raw.srcHost)
    nbytes = raw.WidthInBytes * max(raw.Height, 1) * max(raw.Depth, 1)
    return CopyNode(dst + raw.dstXInBytes, dst_space, src + raw.srcXInBytes, src_space, nbytes)


def _place(cu: Any, memory_type: Any, device: Any, host: Any) -> tuple[int, Space]:
    """Address and space of a copy operand; a unified address is asked for what it is."""
    types = cu.CUmemorytype
    addr = int(host or 0) if memory_type == types.CU_MEMORYTYPE_HOST else int(device or 0)
    kind = try_optional(cu, "cuPointerGetAttribute", cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, addr)
    if kind is None:  # an address that the driver did not hand out
        return addr, "pageable"
    return addr, "pinned" if int(kind[0]) == int(types.CU_MEMORYTYPE_HOST) else "device"


def _fill(raw: Any) -> FillNode:
    return FillNode(int(raw.dst), raw.value, raw.elementSize, raw.width * raw.elementSize * max(raw.height, 1))
