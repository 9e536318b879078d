"""A stand-in for `cuda.bindings.driver`: the same call forms and tuples, over the host backend's simulated device.

`DriverBackend` runs on it unchanged, whole engines included. Kernels are found by entry name and get their arguments
from the parameter bytes that a launch points to, as a driver would read them. Tests plant faults with `fail`, hide
symbols with `missing` (no attribute) and `unloadable` (there, but the driver lacks it), and read `calls`.
"""

import ctypes
import json
import struct
import sys
import threading
from collections.abc import Iterable
from enum import IntEnum
from hashlib import sha256
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ds41rt.cu.backend import Event, Graph, GraphExec, HostBuffer, Stream
from ds41rt.cu.driver import DriverBackend
from ds41rt.cu.host import HostBackend
from ds41rt.cu.host.command import Copy, Fill
from ds41rt.cu.kernel import KernelSpec, Pointer
from ds41rt.cu.ptx import entry_name, entry_types
from ds41rt.cu.result import CudaError, Status

PTX_TEXT = "//\n.version {isa}\n.target {target}\n.address_size 64\n"
# Calls by how many values they return after their status.
_CALLS = {
    0: """cuInit cuCtxSetCurrent cuCtxSynchronize cuDevicePrimaryCtxRelease cuMemFree cuMemFreeHost
          cuStreamDestroy cuStreamSynchronize cuStreamWaitEvent cuStreamBeginCapture
          cuEventDestroy cuEventRecord cuEventQuery cuEventSynchronize
          cuMemcpyHtoDAsync cuMemcpyDtoHAsync cuMemcpyDtoDAsync cuMemsetD8Async
          cuModuleUnload cuFuncLoad cuFuncSetAttribute cuLaunchKernel
          cuGraphLaunch cuGraphDestroy cuGraphExecDestroy""",
    1: """cuDriverGetVersion cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceTotalMem cuDeviceGetAttribute
          cuGetErrorName cuGetErrorString cuDevicePrimaryCtxRetain cuMemAlloc cuMemHostAlloc
          cuMemHostGetDevicePointer cuPointerGetAttribute cuStreamCreate cuStreamIsCapturing cuStreamEndCapture
          cuEventCreate cuEventElapsedTime cuModuleLoadData cuModuleGetFunction cuFuncGetAttribute
          cuFuncGetName cuKernelGetName cuGraphInstantiate cuGraphNodeGetType cuGraphKernelNodeGetParams
          cuGraphMemcpyNodeGetParams cuGraphMemsetNodeGetParams cuGraphChildGraphNodeGetGraph cuCtxGetCurrent
          cuLogsCurrent""",
    2: """cuDevicePrimaryCtxGetState cuMemGetInfo cuFuncGetParamInfo cuKernelGetParamInfo cuGraphGetNodes
          cuLogsDumpToMemory cuGetProcAddress""",
    4: "cuGraphGetEdges",
    6: "cuStreamGetCaptureInfo",
}
OUTPUTS = {name: n for n, names in _CALLS.items() for name in names.split()}
# Calls that only a capture in relaxed mode allows, whatever they are about.
_BARRED = frozenset(
    {
        "cuMemAlloc",
        "cuMemFree",
        "cuMemHostAlloc",
        "cuMemFreeHost",
        "cuEventQuery",
        "cuEventSynchronize",
        "cuStreamSynchronize",
    }
)
# Calls that need no current context.
_GLOBAL = ("cuInit", "cuDriver", "cuDevice", "cuGetError", "cuGetProc", "cuCtxSetCurrent", "cuCtxGetCurrent", "cuLogs")


def write_ptx(folder: Path, specs: Iterable[KernelSpec], isa: str = "8.4", target: str = "sm_80") -> Path:
    """A PTX folder with one module whose entries are those of `specs`; the text has a header and nothing else."""
    text = PTX_TEXT.format(isa=isa, target=target)
    (folder / target).mkdir(parents=True)
    (folder / target / "all.ptx").write_text(text)
    entries = {entry_name(s): list(entry_types(s)) for s in specs}
    modules = {"all": {"ptx_sha256": sha256(text.encode()).hexdigest(), "sources": {}, "entries": entries}}
    tiers = [{"name": target, "target": target, "isa": isa, "options": [], "modules": modules}]
    (folder / "manifest.json").write_text(json.dumps({"toolchain": {"nvrtc": "0"}, "tiers": tiers}))
    return folder


def open_fake(folder: Path, specs: Iterable[KernelSpec] = (), **options: Any) -> tuple[DriverBackend, "FakeDriver"]:
    """A `DriverBackend` on a fresh fake driver whose PTX, written to `folder`, has the kernels `specs`."""
    specs = tuple(specs)
    cu = FakeDriver(specs, **options)
    return DriverBackend(bindings=cu, ptx_folder=write_ptx(folder, specs)), cu


class FakeDriver:
    """See the module's docstring. `specs` are the kernels that its modules contain."""

    CUstreamCaptureMode = IntEnum(
        "CUstreamCaptureMode",
        {
            "CU_STREAM_CAPTURE_MODE_GLOBAL": 0,
            "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL": 1,
            "CU_STREAM_CAPTURE_MODE_RELAXED": 2,
        },
    )
    CUdevice_attribute = IntEnum(
        "CUdevice_attribute",
        {
            "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 16,
            "CU_DEVICE_ATTRIBUTE_INTEGRATED": 18,
            "CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE": 38,
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 75,
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 76,
            "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 97,
        },
    )
    CUfunction_attribute = IntEnum(
        "CUfunction_attribute",
        {
            "CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK": 0,
            "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES": 1,
            "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": 8,
        },
    )
    CUpointer_attribute = IntEnum(
        "CUpointer_attribute",
        {
            "CU_POINTER_ATTRIBUTE_MEMORY_TYPE": 2,
            "CU_POINTER_ATTRIBUTE_RANGE_START_ADDR": 11,
            "CU_POINTER_ATTRIBUTE_RANGE_SIZE": 12,
        },
    )
    CUmemorytype = IntEnum(
        "CUmemorytype",
        {
            "CU_MEMORYTYPE_HOST": 1,
            "CU_MEMORYTYPE_DEVICE": 2,
            "CU_MEMORYTYPE_ARRAY": 3,
            "CU_MEMORYTYPE_UNIFIED": 4,
        },
    )
    CUgraph = int

    def __init__(
        self,
        specs: Iterable[KernelSpec] = (),
        *,
        schedule: str = "lazy",
        version: int = 13000,
        capability: tuple[int, int] = (9, 0),
        devices: int = 1,
        memory_nbytes: int = 1 << 33,
        pinned_nbytes: int = 1 << 33,
    ) -> None:
        self.host = HostBackend(schedule, memory_nbytes=memory_nbytes, pinned_nbytes=pinned_nbytes)
        self.version = version
        self.devices = devices
        self.no_library: BaseException | None = None
        self.attributes = {16: 132, 18: 0, 38: 60 << 20, 75: capability[0], 76: capability[1], 97: 227 << 10}
        self.function_attributes = {0: 1024, 1: 0}
        self.calls: list[tuple[Any, ...]] = []
        self.fail: dict[str, list[int]] = {}  # call -> codes of its next calls (0: let it through)
        self.missing: set[str] = set()
        self.unloadable: set[str] = set()
        self.log: list[str] = []
        self.untraced = False  # a tracer of Python code sees nothing of what a call does inside
        self.retained = 0
        self.modules = 0
        self.launches: list[tuple[Any, ...]] = []
        self._specs = {entry_name(s): s for s in specs}
        self._functions: dict[int, KernelSpec] = {}
        self._buffers: dict[int, Any] = {}
        self._handles = count(0x5000)
        self._nodes: dict[int, Any] = {}
        self._node_handles: dict[int, int] = {}
        # What tests plant: a node type number by node, and what a call answers about a node or a function.
        self.node_types: dict[int, int] = {}
        self.answers: dict[tuple[str, int], Any] = {}
        self._captured: dict[int, tuple[Any, ...]] = {}
        self._keep: list[Any] = []
        self._current = threading.local()
        self._strict: list[tuple[Any, int]] = []  # open captures in other modes than relaxed, and the thread of each

    def names(self) -> list[str]:
        """The calls so far, names alone."""
        return [call[0] for call in self.calls]

    def __getattr__(self, name: str) -> Any:
        if name in OUTPUTS and name not in self.missing:
            return lambda *args: self._invoke(name, args)
        if name not in OUTPUTS and name.startswith("cu") and not name.endswith(("_v2", "_v3")):
            raise AssertionError(f"the fake driver knows no {name}")
        raise AttributeError(f"module 'cuda.bindings.driver' has no attribute {name!r}")

    def _invoke(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        tracer = sys.gettrace() if self.untraced else None
        if tracer is None:
            return self._answer(name, args)
        sys.settrace(None)
        try:
            return self._answer(name, args)
        finally:
            sys.settrace(tracer)

    def _answer(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name in self.unloadable:
            raise RuntimeError(f'Function "{name}" not found')
        self.calls.append((name, *args))
        nothing = (None,) * OUTPUTS[name]
        if self.fail.get(name) and (code := self.fail[name].pop(0)):
            return (code, *nothing)
        if not name.startswith(_GLOBAL) and not getattr(self._current, "context", None):
            return (Status.INVALID_CONTEXT, *nothing)
        planted = self.answers.get((name, int(args[0]))) if args and isinstance(args[0], int) else None
        try:
            self._bar(name)
            result = getattr(self, f"_{name}")(*args) if planted is None else planted
        except CudaError as error:
            return (error.status, *nothing)
        values = result if isinstance(result, tuple) else () if result is None else (result,)
        assert len(values) == OUTPUTS[name]
        return (0, *values)

    # Start and device

    def _cuInit(self, flags: int) -> None:
        if self.no_library is not None:
            raise self.no_library

    def _cuDriverGetVersion(self) -> int:
        return self.version

    def _cuDeviceGetCount(self) -> int:
        return self.devices

    def _cuDeviceGet(self, ordinal: int) -> int:
        return ordinal

    def _cuDeviceGetName(self, nbytes: int, device: int) -> bytes:
        return b"Fake GPU\0\0"

    def _cuDeviceTotalMem(self, device: int) -> int:
        return self.host.memory.device_nbytes

    def _cuDeviceGetAttribute(self, attribute: int, device: int) -> int:
        return self.attributes[attribute]

    def _cuGetErrorName(self, code: int) -> bytes:
        return f"CUDA_ERROR_{Status(code).name}".encode() if code in list(Status) else b"CUDA_ERROR_STRANGE"

    def _cuGetErrorString(self, code: int) -> bytes:
        return b"what the driver says"

    def _cuDevicePrimaryCtxRetain(self, device: int) -> int:
        self.retained += 1
        return 0xC0

    def _cuDevicePrimaryCtxRelease(self, device: int) -> None:
        self.retained -= 1

    def _cuDevicePrimaryCtxGetState(self, device: int) -> tuple[int, int]:
        return 0, int(self.retained > 0)

    def _cuCtxSetCurrent(self, context: int | None) -> None:
        self._current.context = context

    def _cuCtxGetCurrent(self) -> int:
        return getattr(self._current, "context", None) or 0

    def _cuCtxSynchronize(self) -> None:
        for stream in list(self.host._streams):
            self.host.synchronize(Stream(stream))

    # Memory

    def _cuMemAlloc(self, nbytes: int) -> int:
        buf = self.host.alloc("d", nbytes)
        self._buffers[buf.ptr] = buf
        return buf.ptr

    def _cuMemFree(self, ptr: int) -> None:
        self.host.free(self._buffers.pop(ptr))

    def _cuMemHostAlloc(self, nbytes: int, flags: int) -> int:
        buf = self.host.alloc_pinned("h", nbytes)
        self._buffers[buf.ptr] = buf
        return buf.ptr

    def _cuMemHostGetDevicePointer(self, ptr: int, flags: int) -> int:
        return int(self._buffers[ptr].device_ptr)

    def _cuMemFreeHost(self, ptr: int) -> None:
        self.host.free_pinned(self._buffers.pop(ptr))

    def _cuMemGetInfo(self) -> tuple[int, int]:
        return self.host.memory_info()

    def _operand(self, ptr: int, nbytes: int) -> tuple[HostBuffer, int]:
        """The pinned buffer that contains a host address, and the offset in it; else the bytes as pageable memory."""
        for buf in self._buffers.values():
            if isinstance(buf, HostBuffer) and buf.ptr <= ptr and ptr + nbytes <= buf.ptr + buf.nbytes:
                return buf, ptr - buf.ptr
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(ptr))
        return HostBuffer("pageable", ptr, nbytes, raw, False), 0

    def _cuMemcpyHtoDAsync(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        buf, off = self._operand(src, nbytes)
        self.host.copy_h2d(dst, buf, nbytes, Stream(stream), off)

    def _cuMemcpyDtoHAsync(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        buf, off = self._operand(dst, nbytes)
        self.host.copy_d2h(buf, src, nbytes, Stream(stream), off)

    def _cuMemcpyDtoDAsync(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self.host.copy_d2d(dst, src, nbytes, Stream(stream))

    def _cuMemsetD8Async(self, dst: int, byte: int, nbytes: int, stream: int) -> None:
        self.host.fill(dst, byte, nbytes, Stream(stream))

    def _cuPointerGetAttribute(self, attribute: int, ptr: int) -> int:
        for buf in self._buffers.values():
            for start in (buf.ptr, getattr(buf, "device_ptr", buf.ptr)):
                if start <= ptr < start + buf.nbytes:
                    kind = 1 if isinstance(buf, HostBuffer) else 2
                    return int({2: kind, 11: start, 12: buf.nbytes}[int(attribute)])
        raise CudaError(Status.INVALID_VALUE, "cuPointerGetAttribute")

    def _cuGetProcAddress(self, name: bytes, version: int, flags: int) -> tuple[int, int]:
        """As the driver does: success without an address for what it lacks."""
        if version > self.version:
            raise CudaError(Status.INVALID_VALUE, "cuGetProcAddress")
        found = name.decode() in OUTPUTS and name.decode() not in self.unloadable
        return (0x1000, 0) if found else (0, 1)

    # Streams, events, capture

    def _cuStreamCreate(self, flags: int) -> int:
        assert flags == 1  # non-blocking
        return self.host.create_stream("s")

    def _cuStreamDestroy(self, stream: int) -> None:
        self.host.destroy_stream(Stream(stream))

    def _cuStreamSynchronize(self, stream: int) -> None:
        self.host.synchronize(Stream(stream))

    def _cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        self.host.wait(Stream(stream), Event(event))

    def _cuStreamIsCapturing(self, stream: int) -> int:
        return self.host.capture_status(Stream(stream))

    def _cuStreamBeginCapture(self, stream: int, mode: int) -> None:
        assert isinstance(mode, self.CUstreamCaptureMode)
        self.host.begin_capture(Stream(stream))
        if mode != self.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED:
            self._strict.append((self.host._streams[stream].capture, threading.get_ident()))

    def _cuStreamEndCapture(self, stream: int) -> int:
        capture = self.host._streams[stream].capture
        if any(c is capture and thread != threading.get_ident() for c, thread in self._strict):
            self.host.abort_capture(Stream(stream))  # as recorded: it has ended all the same
            raise CudaError(Status.STREAM_CAPTURE_WRONG_THREAD, "cuStreamEndCapture")
        return self.host.end_capture(Stream(stream))

    def _bar(self, name: str) -> None:
        """What the modes global and thread_local do not allow while a capture in one of them is open."""
        self._strict = [(c, thread) for c, thread in self._strict if c.status]
        if self._strict and name in _BARRED:
            raise self._strict[0][0].invalidate(Status.STREAM_CAPTURE_UNSUPPORTED, name, "barred by the mode")

    def _cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
        state = self.host._streams[stream]
        capture = state.capture
        if capture is None or capture.status != 1:
            return (0 if capture is None else int(capture.status), 0, None, None, None, 0)
        nodes = [self._handle(capture.nodes[i]) for i in state.frontier]
        return (1, id(capture), id(capture), nodes, [None] * len(nodes), len(nodes))

    def _cuEventCreate(self, flags: int) -> int:
        return self.host.create_event("e", timing=flags != 2)

    def _cuEventDestroy(self, event: int) -> None:
        self.host.destroy_event(Event(event))

    def _cuEventRecord(self, event: int, stream: int) -> None:
        self.host.record(Event(event), Stream(stream))

    def _cuEventQuery(self, event: int) -> None:
        if not self.host.query_event(Event(event)):
            raise CudaError(Status.NOT_READY, "cuEventQuery")

    def _cuEventSynchronize(self, event: int) -> None:
        self.host.synchronize_event(Event(event))

    def _cuEventElapsedTime(self, start: int, end: int) -> float:
        return self.host.elapsed_us(Event(start), Event(end)) / 1000

    # Kernels

    def _cuModuleLoadData(self, image: bytes) -> int:
        assert image.endswith(b"\0")
        self.modules += 1
        return next(self._handles)

    def _cuModuleUnload(self, module: int) -> None:
        self.modules -= 1

    def _cuModuleGetFunction(self, module: int, name: bytes) -> int:
        spec = self._specs.get(name.decode())
        if spec is None:
            raise CudaError(Status.NOT_FOUND, "cuModuleGetFunction")
        handle = next(self._handles)
        self._functions[handle] = spec
        return handle

    def _cuFuncLoad(self, function: int) -> None:
        pass

    def _cuFuncGetAttribute(self, attribute: int, function: int) -> int:
        return self.function_attributes[attribute]

    def _cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> None:
        pass

    def _cuFuncGetName(self, function: int) -> bytes:
        return entry_name(self._functions[function]).encode()

    def _cuFuncGetParamInfo(self, function: int, index: int) -> tuple[int, int]:
        offsets = param_layout(self._functions[function])
        if index >= len(offsets):
            raise CudaError(Status.INVALID_VALUE, "cuFuncGetParamInfo")
        return offsets[index]

    def _cuLaunchKernel(self, function: int, *rest: Any) -> None:
        *geometry, stream, params, extra = rest
        assert extra == 0
        spec = self._functions[function]
        values = read_params(spec, params)
        self.launches.append((entry_name(spec), tuple(geometry), values))
        launch = self.host.prepare(spec, {p.name: v for p, v in zip(spec.params, values, strict=True)}, spec.name)
        self.host.launch(launch, Stream(stream))
        if self.host.capture_status(Stream(stream)):
            self._captured[id(launch)] = (launch, function, geometry, values)

    # Graphs

    def _cuGraphInstantiate(self, graph: int, flags: int) -> int:
        return self.host.instantiate(Graph(graph))

    def _cuGraphLaunch(self, graph_exec: int, stream: int) -> None:
        self.host.launch_graph(GraphExec(graph_exec), Stream(stream))

    def _cuGraphDestroy(self, graph: int) -> None:
        self.host.destroy_graph(Graph(graph))

    def _cuGraphExecDestroy(self, graph_exec: int) -> None:
        self.host.destroy_exec(GraphExec(graph_exec))

    def _handle(self, node: Any) -> int:
        """A node's handle, for as long as the fake driver lives."""
        if id(node) not in self._node_handles:
            self._node_handles[id(node)] = handle = next(self._handles)
            self._nodes[handle] = node
        return self._node_handles[id(node)]

    def _members(self, graph: int) -> list[Any]:
        """The nodes of a graph, or of the open capture that has this id."""
        for state in self.host._streams.values():
            if state.capture is not None and id(state.capture) == graph:
                return state.capture.nodes
        if graph not in self.host._graphs:
            raise CudaError(Status.INVALID_VALUE, "cuGraphGetNodes")
        return list(self.host._graphs[graph])

    def _cuGraphGetNodes(self, graph: int, n: int) -> tuple[list[int], int]:
        handles = [self._handle(node) for node in self._members(graph)]
        return (handles[:n] + [0] * (n - len(handles))) if n else [], len(handles)

    def _cuGraphGetEdges(self, graph: int, n: int) -> tuple[list[int], list[int], list[None], int]:
        nodes = self._members(graph)
        pairs = [(self._handle(nodes[dep]), self._handle(node)) for node in nodes for dep in node.deps]
        if not n:
            return [], [], [], len(pairs)
        return [a for a, _ in pairs], [b for _, b in pairs], [None] * n, len(pairs)

    def _cuGraphNodeGetType(self, node: int) -> int:
        kind = {"kernel": 0, "h2d": 1, "d2h": 1, "d2d": 1, "fill": 2}[self._nodes[node].command.kind]
        return self.node_types.get(node, kind)

    def _cuGraphChildGraphNodeGetGraph(self, node: int) -> int:
        raise CudaError(Status.INVALID_VALUE, "cuGraphChildGraphNodeGetGraph")

    def _cuGraphKernelNodeGetParams(self, node: int) -> SimpleNamespace:
        _, function, (x, y, z, bx, by, bz, shared), values = self._captured[id(self._nodes[node].command)]
        spec = self._functions[function]
        slots = []
        for param, value in zip(spec.params, values, strict=True):
            slots.append(ctypes.create_string_buffer(struct.pack(_format(param), value)))
        array = (ctypes.c_void_p * len(slots))(*(ctypes.addressof(b) for b in slots))
        self._keep += [slots, array]
        return SimpleNamespace(
            func=function,
            kern=0,
            gridDimX=x,
            gridDimY=y,
            gridDimZ=z,
            blockDimX=bx,
            blockDimY=by,
            blockDimZ=bz,
            sharedMemBytes=shared,
            kernelParams=ctypes.addressof(array),
            extra=0,
        )

    def _cuGraphMemcpyNodeGetParams(self, node: int) -> SimpleNamespace:
        command = self._nodes[node].command
        assert isinstance(command, Copy)

        def place(which: str, operand: int | HostBuffer) -> dict[str, Any]:
            host = isinstance(operand, HostBuffer)
            return {
                f"{which}MemoryType": self.CUmemorytype(1 if host else 2),
                f"{which}Device": 0 if host else operand,
                f"{which}Host": operand.ptr + command.host_off if isinstance(operand, HostBuffer) else 0,
                **{f"{which}{at}": 0 for at in ("XInBytes", "Y", "Z", "Pitch", "Height")},
            }

        return SimpleNamespace(
            **place("dst", command.dst), **place("src", command.src), WidthInBytes=command.nbytes, Height=1, Depth=1
        )

    def _cuGraphMemsetNodeGetParams(self, node: int) -> SimpleNamespace:
        command = self._nodes[node].command
        assert isinstance(command, Fill)
        return SimpleNamespace(
            dst=command.dst, value=command.byte, elementSize=1, width=command.nbytes, height=1, pitch=0
        )

    # The driver's log: an iterator is the number of lines already read.

    def _cuLogsCurrent(self, flags: int) -> int:
        return len(self.log)

    def _cuLogsDumpToMemory(self, at: int, buffer: bytearray, nbytes: int, flags: int) -> tuple[int, int]:
        assert len(buffer) == nbytes
        text = "\n".join(self.log[at:]).encode()
        buffer[: len(text)] = text
        return len(self.log), len(text)


def _format(param: Any) -> str:
    return "<Q" if isinstance(param, Pointer) else {"u32": "<I", "i32": "<i", "u64": "<Q", "f32": "<f"}[param.ctype]


def read_params(spec: KernelSpec, array: int) -> tuple[int | float, ...]:
    """The arguments behind a `void **`, read as the driver reads them: as many bytes as each parameter has."""
    values = []
    for i, param in enumerate(spec.params):
        fmt = _format(param)
        addr = ctypes.c_void_p.from_address(array + 8 * i).value
        assert addr is not None
        values.append(struct.unpack(fmt, ctypes.string_at(addr, struct.calcsize(fmt)))[0])
    return tuple(values)


def param_layout(spec: KernelSpec) -> list[tuple[int, int]]:
    """(offset, size) of each parameter in a device's parameter block: natural alignment."""
    layout, off = [], 0
    for param in spec.params:
        size = struct.calcsize(_format(param))
        off = -(-off // size) * size
        layout.append((off, size))
        off += size
    return layout
