"""Takes a driver's graph apart: nodes, edges, kernel names, the bytes of every parameter.

The graph may be anybody's, so nothing of a node is taken for granted: what the driver or the bindings cannot tell is
left out, and the result says which call was missing. The bindings come in as an argument; where their generations
differ (12.9 names the newest form of a call with a suffix, 13 without one) the difference stays here.
"""

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ds41rt.cu.driver_errors import Call, call_optional, is_missing
from ds41rt.cu.graphinfo import CopyNode, FillNode, GraphInfo, GraphNode, KernelNode, Param, Space
from ds41rt.cu.kernel import KernelLaunch
from ds41rt.cu.result import CudaError, Status

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
# What a driver answers for a node whose contents it does not show.
_HIDDEN = frozenset({Status.INVALID_VALUE, Status.NOT_SUPPORTED})
# The members of a launch's `extra` list.
_EXTRA_END, _EXTRA_POINTER, _EXTRA_SIZE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Captured:
    """What the call that captured a node said."""

    label: str
    stream: str
    launch: KernelLaunch | None = None


class GraphReader:
    """Reads graphs of one driver. `cu` is the bindings module; errors come from `call`.

    `captured` says what is known of nodes by their handle. `missing` collects the optional calls that are not there,
    beginning with those that were missing before.
    """

    def __init__(self, cu: Any, call: Call, captured: Mapping[int, Captured], missing: Iterable[str] = ()) -> None:
        self._cu = cu
        self._call = call
        self._captured = captured
        self.missing = set(missing)

    def read(self, graph: Any) -> GraphInfo:
        nodes = self._nodes(graph)
        return GraphInfo(nodes, tuple(sorted(self.missing)))

    def _nodes(self, graph: Any) -> tuple[GraphNode, ...]:
        call = self._call
        (_, count) = call("cuGraphGetNodes", graph, 0)
        handles = list(call("cuGraphGetNodes", graph, count)[0])[:count] if count else []
        index = {int(node): i for i, node in enumerate(handles)}
        deps: list[list[int]] = [[] for _ in handles]
        for before, after in self._edges(graph):
            deps[index[after]].append(index[before])
        return tuple(self._node(i, node, tuple(sorted(deps[i]))) for i, node in enumerate(handles))

    def _edges(self, graph: Any) -> list[tuple[int, int]]:
        # The oldest form refuses graphs whose edges carry data, so take the newest one there is.
        for name in ("cuGraphGetEdges_v2", "cuGraphGetEdges"):
            if not hasattr(self._cu, name):
                continue
            try:
                (*_, count) = self._call(name, graph, 0)
            except RuntimeError as e:
                if not is_missing(e):
                    raise
                continue
            if not count:
                return []
            before, after, *_ = self._call(name, graph, count)
            return [(int(a), int(b)) for a, b in zip(before[:count], after[:count], strict=True)]
        raise CudaError(Status.NOT_SUPPORTED, "cuGraphGetEdges", "the driver has no form of it")

    def _node(self, index: int, node: Any, deps: tuple[int, ...]) -> GraphNode:
        try:
            kind = _KINDS.get(int(self._call("cuGraphNodeGetType", node)[0]), "other")
        except ValueError:  # a type that is newer than the bindings
            kind = "other"
        known = self._captured.get(int(node))
        label, stream, launch = (known.label, known.stream, known.launch) if known else (None, None, None)
        return GraphNode(index, kind, deps, self._content(kind, node), label, stream, launch)

    def _content(self, kind: str, node: Any) -> KernelNode | CopyNode | FillNode | GraphInfo | None:
        if kind == "kernel":
            raw = self._shown("cuGraphKernelNodeGetParams", node)
            return None if raw is None else self._kernel(raw)
        if kind == "copy":
            raw = self._shown("cuGraphMemcpyNodeGetParams", node)
            return None if raw is None else self._copy(raw)
        if kind == "fill":
            raw = self._shown("cuGraphMemsetNodeGetParams", node)
            return None if raw is None else _fill(raw)
        if kind == "graph":
            raw = self._shown("cuGraphChildGraphNodeGetGraph", node)
            return None if raw is None else GraphInfo(self._nodes(raw))
        return None

    def _shown(self, name: str, node: Any) -> Any:
        """The result of a call about a node's contents, None if the driver keeps them to itself."""
        try:
            return self._call(name, node)[0]
        except CudaError as error:
            if error.status not in _HIDDEN:
                raise
            return None

    def _ask(self, name: str, *args: Any) -> tuple[Any, ...] | None:
        """An optional call's results, None if it refuses; one that is not there is noted."""
        found = call_optional(self._cu, name, *args)
        if found is None:
            self.missing.add(name)
            return None
        code, values = found
        return None if code else values

    # Kernels

    def _kernel(self, raw: Any) -> KernelNode:
        # A node made from a library kernel has `kern` in place of `func`.
        handle, family = (raw.func, "cuFunc") if int(raw.func or 0) else (raw.kern, "cuKernel")
        name = self._ask(f"{family}GetName", handle)
        return KernelNode(
            None if name is None or name[0] is None else name[0].decode(errors="replace"),
            (raw.gridDimX, raw.gridDimY, raw.gridDimZ),
            (raw.blockDimX, raw.blockDimY, raw.blockDimZ),
            raw.sharedMemBytes,
            self._params(f"{family}GetParamInfo", handle, int(raw.kernelParams or 0), int(raw.extra or 0)),
        )

    def _params(self, probe: str, handle: Any, array: int, extra: int) -> tuple[Param, ...] | None:
        """The parameters behind a `void **`, or in the block that `extra` names."""
        places: list[tuple[int, int]] = []
        # The driver says how many there are by refusing the next index.
        while (found := self._ask(probe, handle, len(places))) is not None:
            places.append((int(found[0]), int(found[1])))
        if not array and extra:
            block = _extra_block(extra)
            if block is None:
                return None
            # Without a layout the block as a whole is the parameter.
            return tuple(Param(off, block[off : off + nbytes]) for off, nbytes in places or [(0, len(block))])
        if not places:
            return () if not array and probe not in self.missing else None
        if not array:
            return None
        params = []
        for i, (off, nbytes) in enumerate(places):
            value = ctypes.c_void_p.from_address(array + i * ctypes.sizeof(ctypes.c_void_p)).value
            if not value:
                return None
            params.append(Param(off, ctypes.string_at(value, nbytes)))
        return tuple(params)

    # Copies and fills

    def _copy(self, raw: Any) -> CopyNode:
        height, depth = max(raw.Height, 1), max(raw.Depth, 1)
        nbytes = raw.WidthInBytes * height * depth

        def reach(pitch: int, slice_height: int) -> int | None:
            rows = (depth - 1) * (slice_height or height) + height - 1
            span = rows * pitch + raw.WidthInBytes
            return None if span == nbytes else int(span)

        dst, dst_space = self._place(raw, "dst")
        src, src_space = self._place(raw, "src")
        dst_reach, src_reach = reach(raw.dstPitch, raw.dstHeight), reach(raw.srcPitch, raw.srcHeight)
        return CopyNode(dst, dst_space, src, src_space, nbytes, dst_reach, src_reach)

    def _place(self, raw: Any, side: str) -> tuple[int, Space]:
        """Address and space of a copy operand; a unified address is asked for what it is."""
        types = self._cu.CUmemorytype
        try:
            memory_type = getattr(raw, f"{side}MemoryType")
        except ValueError:  # a type that is newer than the bindings
            return 0, "unknown"
        if memory_type == types.CU_MEMORYTYPE_ARRAY:  # has no address
            return 0, "unknown"
        on_host = memory_type == types.CU_MEMORYTYPE_HOST
        base = int(getattr(raw, f"{side}Host") or 0) if on_host else int(getattr(raw, f"{side}Device") or 0)
        rows = getattr(raw, f"{side}Y") + getattr(raw, f"{side}Z") * getattr(raw, f"{side}Height")
        addr = base + getattr(raw, f"{side}XInBytes") + rows * getattr(raw, f"{side}Pitch")
        asked = self._cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        found = self._ask("cuPointerGetAttribute", asked, addr)
        if found is not None:
            return addr, "pinned" if int(found[0]) == int(types.CU_MEMORYTYPE_HOST) else "device"
        if memory_type == types.CU_MEMORYTYPE_DEVICE:
            return addr, "device"
        # An address that the driver did not hand out is ordinary memory, if it was there to say so.
        return addr, "unknown" if "cuPointerGetAttribute" in self.missing else "pageable"


def _fill(raw: Any) -> FillNode:
    row, height = raw.width * raw.elementSize, max(raw.height, 1)
    span = (height - 1) * raw.pitch + row
    return FillNode(int(raw.dst), raw.value, raw.elementSize, row * height, None if span == row * height else span)


def _extra_block(extra: int) -> bytes | None:
    """The parameter block of a launch's `extra`: pairs of a key and a pointer, up to a key of 0."""
    start = nbytes = 0
    at = extra
    while (key := ctypes.c_void_p.from_address(at).value or 0) != _EXTRA_END:
        value = ctypes.c_void_p.from_address(at + 8).value or 0
        if key == _EXTRA_POINTER:
            start = value
        elif key == _EXTRA_SIZE:
            nbytes = ctypes.c_size_t.from_address(value).value if value else 0
        else:
            return None
        at += 16
    return ctypes.string_at(start, nbytes) if start and nbytes else None
