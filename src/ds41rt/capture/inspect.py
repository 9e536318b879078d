"""From a graph to a dump: every node with its parameters, and every address with the name of its owner.

Works on what `cu.graphinfo` says, for graphs of both backends and for others' graphs alike. Of a kernel that was
prepared by a backend the declaration gives names, types, sizes and access; of any other the bytes are all there is, and
words that are addresses of known memory are taken for pointers.
"""

import re
import struct
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from ds41rt import __version__
from ds41rt.capture.dump import Copy, Dump, Fill, Graph, Kernel, Node, Param, Range, ReadBack
from ds41rt.capture.ranges import Names, caller_ranges, ledger_ranges
from ds41rt.cu.backend import GpuBackend, foreign_graphs
from ds41rt.cu.backend import Graph as GraphHandle
from ds41rt.cu.graphinfo import CopyNode, FillNode, GraphInfo, GraphNode, KernelNode
from ds41rt.cu.kernel import SCALAR_FORMATS, KernelLaunch, Pointer, launch_nbytes, parameter_block
from ds41rt.cu.result import CudaError, Status
from ds41rt.errors import InputError

# Labels of a layer's work begin with the layer: "L04.attn_in".
_LAYER = re.compile(r"L(\d+)\.")
_TYPES = {"bfloat16": "bf16", "float32": "f32", "int32": "i32", "uint64": "u64", "uint8": "u8"}
# What a call that older drivers lack would have told.
_TELLS = {
    "cuFuncGetName": "names of kernels",
    "cuKernelGetName": "names of library kernels",
    "cuFuncGetParamInfo": "parameters of kernels that ds41rt does not know",
    "cuKernelGetParamInfo": "parameters of library kernels",
    "cuPointerGetAttribute": "owners of memory that nobody registered",
    "cuStreamGetCaptureInfo": "labels and streams",
}


def inspect_graph(graph: Any, *, ranges: Mapping[str, Any] | None = None, name: str = "graph") -> Dump:
    """The dump of a graph that was captured by anybody in this process.

    `graph` is a raw `CUgraph` handle (an int, or the object of the CUDA bindings), or a `torch.cuda.CUDAGraph` made
    with `keep_graph=True`. `ranges` names memory: (address, bytes) or a tensor, by name. The graph has to stay alive
    during the call.

    Raises `InputError` for what is no such graph, `UnsupportedError` where there is no driver, and `CudaError` from the
    driver.
    """
    handle = _handle(graph)
    with foreign_graphs() as driver:
        try:
            info = driver.describe(handle)
        except CudaError as e:
            if e.status not in (Status.INVALID_VALUE, Status.INVALID_HANDLE):
                raise
            raise InputError(
                f"{handle:#x} is no graph that the driver can describe ({e}); an executable graph (CUgraphExec) cannot "
                "be taken apart: pass the CUgraph that it was made from"
            ) from e
        names = Names(caller_ranges(ranges or {}, driver.find_allocation), driver.find_allocation)
        return make_dump(name, [dump_graph(name, info, names)], names, "driver", unavailable=[info])


def inspect_backend_graphs(
    backend: GpuBackend, graphs: Mapping[str, GraphHandle], *, ranges: Mapping[str, Any] | None = None, title: str
) -> Dump:
    """The dump of graphs that `backend` captured, by the name each shall have, with names from its ledger."""
    names = backend_names(backend, caller_ranges(ranges or {}, backend.find_allocation))
    infos = {name: backend.describe_graph(graph) for name, graph in graphs.items()}
    dumped = [dump_graph(name, info, names) for name, info in infos.items()]
    return make_dump(title, dumped, names, backend.name, device=backend.device_name, unavailable=infos.values())


def backend_names(backend: GpuBackend, extra: Iterable[Range] = ()) -> Names:
    """Names from `extra`, the ledger of a backend, and the driver behind it."""
    return Names([*extra, *ledger_ranges(backend)], backend.find_allocation)


def make_dump(
    title: str,
    graphs: Iterable[Graph],
    names: Names,
    backend: str,
    *,
    device: str | None = None,
    unavailable: Iterable[GraphInfo] = (),
) -> Dump:
    """Graphs dumped with `names` as one dump; what the driver could not say is noted in it."""
    missing = sorted({call for info in unavailable for call in info.unavailable})
    if not names.complete and "cuPointerGetAttribute" not in missing:
        missing.append("cuPointerGetAttribute")
    made_by = {"ds41rt": __version__, "backend": backend}
    if device is not None:
        made_by["device"] = device
    if missing:
        made_by["not available"] = "; ".join(f"{_TELLS.get(call, 'more')} ({call})" for call in missing)
    return Dump(
        title=title, made_by=made_by, graphs=tuple(graphs), ranges=names.ranges(), complete=names.complete
    )  # fmt: skip


def dump_graph(
    name: str,
    info: GraphInfo,
    names: Names,
    *,
    layers: tuple[int, int] | None = None,
    moe_layers: tuple[int, ...] = (),
    reads_back: tuple[ReadBack, ...] = (),
) -> Graph:
    """One graph as part of a dump. A child graph's nodes stand before the node that holds it, and run before it: that
    node is left as the point where they are joined."""
    nodes: list[Node] = []
    _add(info, names, nodes, ())
    return Graph(name=name, nodes=tuple(nodes), layers=layers, moe_layers=moe_layers, reads_back=reads_back)


def _add(info: GraphInfo, names: Names, nodes: list[Node], before: tuple[int, ...]) -> tuple[int, ...]:
    """Append the nodes of a graph that begins after `before`; returns the nodes that nothing in it comes after."""
    # Where each node will stand: a node behind its child graph's nodes.
    at: dict[int, int] = {}
    n = len(nodes)
    for node in info.nodes:
        n += _size(node)
        at[node.index] = n - 1
    for node in info.nodes:
        deps = tuple(at[dep] for dep in node.deps) or before
        if isinstance(node.content, GraphInfo) and node.content.nodes:
            deps = _add(node.content, names, nodes, deps)
        nodes.append(_node(len(nodes), node, deps, names))
    needed = {dep for node in info.nodes for dep in node.deps}
    return tuple(at[node.index] for node in info.nodes if node.index not in needed)


def _size(node: GraphNode) -> int:
    return 1 + (sum(map(_size, node.content.nodes)) if isinstance(node.content, GraphInfo) else 0)


def _node(index: int, node: GraphNode, deps: tuple[int, ...], names: Names) -> Node:
    kernel = copy = fill = None
    moved = None
    content = node.content
    if isinstance(content, KernelNode):
        kernel = _kernel(content, node.launch, names)
        moved = None if node.launch is None else launch_nbytes(node.launch)
    elif isinstance(content, CopyNode):
        dst = names.place(content.dst, content.dst_reach or content.nbytes, "w", content.dst_space)
        src = names.place(content.src, content.src_reach or content.nbytes, "r", content.src_space)
        copy = Copy(dst=dst, src=src, nbytes=content.nbytes)
        moved = content.nbytes
    elif isinstance(content, FillNode):
        dst = names.place(content.dst, content.reach or content.nbytes, "w", "device")
        fill = Fill(dst=dst, value=content.value, element_nbytes=content.element_nbytes, nbytes=content.nbytes)
        moved = content.nbytes
    layer = _LAYER.match(node.label or "")
    return Node(
        index=index, kind=node.kind, deps=deps, label=node.label, stream=node.stream,
        layer=int(layer[1]) if layer else None, moved_nbytes=moved, kernel=kernel, copy=copy, fill=fill,
    )  # fmt: skip


def _kernel(content: KernelNode, launch: KernelLaunch | None, names: Names) -> Kernel:
    params: tuple[Param, ...] | None = None
    if launch is not None:
        params = _declared_params(content, launch, names)
    elif content.params is not None:
        params = tuple(_found_param(p.off, p.value, names) for p in content.params)
    return Kernel(
        name=content.name if launch is None else launch.spec.name,
        grid=content.grid,
        block=content.block,
        shared_nbytes=content.shared_nbytes,
        params=params,
        reads_through=launch is not None and launch.spec.indirect is not None,
    )


def _found_param(off: int, raw: bytes, names: Names) -> Param:
    if len(raw) == 8:
        return Param(off=off, raw=raw.hex(), place=names.guess(int.from_bytes(raw, "little")))
    return Param(off=off, raw=raw.hex(), inside=names.inside(raw, off))


def _declared_params(content: KernelNode, launch: KernelLaunch, names: Names) -> tuple[Param, ...]:
    spec = launch.spec
    found = content.params
    # What the graph holds goes before what was asked for, wherever the driver shows it.
    block = parameter_block(launch) if found is None else tuple((p.off, p.value) for p in found)
    if len(block) != len(spec.params):
        raise InputError(
            f"kernel {spec.name} ({launch.label!r}) has {len(block)} parameters in the graph and {len(spec.params)} in "
            "its declaration"
        )
    formats = [SCALAR_FORMATS["u64" if isinstance(p, Pointer) else p.ctype] for p in spec.params]
    values = [struct.unpack(fmt, raw)[0] for fmt, (_, raw) in zip(formats, block, strict=True)]
    scalars = spec.scalars({p.name: value for p, value in zip(spec.params, values, strict=True)})
    params = []
    for p, value, (off, raw) in zip(spec.params, values, block, strict=True):
        if isinstance(p, Pointer):
            nbytes = prod(p.shape(scalars)) * p.dtype.itemsize
            place = names.place(value, nbytes, p.access, "unknown") if nbytes else None
            known: dict[str, Any] = {"type": f"{_TYPES.get(p.dtype.name, p.dtype.name)}*", "place": place}
            if place is None:  # this launch does not use it
                known["value"] = value
        else:
            known = {"type": p.ctype, "value": value}
            if p.ctype == "u64":  # a base address may travel as a number
                known["place"] = names.guess(value)
        params.append(Param(off=off, raw=raw.hex(), name=p.name, **known))
    return tuple(params)


def _handle(graph: Any) -> int:
    """The raw handle of whatever stands for a graph."""
    kind = type(graph).__name__
    if kind in ("CUgraphExec", "cudaGraphExec_t"):
        raise InputError(
            "an executable graph (CUgraphExec) cannot be taken apart by the driver: pass the CUgraph it was made from "
            "(torch: CUDAGraph(keep_graph=True))"
        )
    if hasattr(graph, "raw_cuda_graph"):
        try:
            graph = graph.raw_cuda_graph()
        except RuntimeError as e:
            raise InputError(
                "this torch.cuda.CUDAGraph has no graph to look at: make it with keep_graph=True, and capture into it "
                f"first ({str(e).splitlines()[0]})"
            ) from e
    if isinstance(graph, bool) or not hasattr(graph, "__int__") or isinstance(graph, float):
        raise InputError(f"{graph!r} is no graph; pass a CUgraph handle, or a torch.cuda.CUDAGraph(keep_graph=True)")
    handle = int(graph)
    if handle <= 0:
        raise InputError(f"{handle:#x} is no handle of a graph")
    return handle
