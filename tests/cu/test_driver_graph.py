"""What the graph reader makes of a driver's answers, on the fake driver: odd nodes, hidden contents, missing calls."""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_driver import FakeDriver, open_fake, write_ptx
from structlog.testing import capture_logs
from tiny_kernels import SCALE, random_i32, upload

from ds41rt.capture import diff, lint
from ds41rt.capture.dump import parse_dump
from ds41rt.capture.inspect import inspect_backend_graphs, inspect_graph
from ds41rt.cu import driver as driver_module
from ds41rt.cu import driver_errors
from ds41rt.cu.backend import Graph, HostBuffer, MemoryRange, foreign_graphs
from ds41rt.cu.driver import DriverBackend
from ds41rt.cu.graphinfo import CopyNode, FillNode, GraphInfo, KernelNode, Param
from ds41rt.cu.kernel import Geometry
from ds41rt.cu.result import CudaError, Status
from ds41rt.engine import Engine
from ds41rt.errors import InputError, UnsupportedError
from ds41rt.kernels.registry import SPECS
from ds41rt.tools.engine_dump import dump_checkpoint, dump_engine

GPU_SCALE = replace(SCALE, geometry=lambda s, n_sms: Geometry((2, 3, 1), 32, 64))
N = 8


class Rig:
    """A driver backend, and one graph: copy in, scale, fill, copy out to pinned memory."""

    def __init__(self, folder: Path) -> None:
        self.backend, self.cu = open_fake(folder, [GPU_SCALE])
        backend = self.backend
        self.stream = backend.create_stream("main")
        self.x = upload(backend, self.stream, "x", random_i32(np.random.default_rng(5), N))
        self.out = backend.alloc_pinned("out", 4 * N)
        self.page = np.arange(N, dtype=np.int32)
        self.scale = backend.prepare(GPU_SCALE, {"x": self.x, "a": 3, "n": N}, "L03.scale")

    def capture(self) -> Graph:
        backend = self.backend
        backend.begin_capture(self.stream)
        backend.copy_h2d(self.x, HostBuffer.pageable("page", self.page), 4 * N, self.stream, label="in")
        backend.launch(self.scale, self.stream)
        backend.fill(self.x, 7, 4, self.stream, label="clear")
        backend.copy_d2h(self.out, self.x, 4 * N, self.stream, label="out")
        return backend.end_capture(self.stream)

    def nodes(self, graph: Graph) -> list[int]:
        """The handles of a graph's nodes."""
        return self.cu._cuGraphGetNodes(graph, 100)[0][:4]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.backend.close()


@pytest.fixture
def foreign(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The fake driver in the place of the bindings."""
    monkeypatch.setattr(driver_module, "_bindings", lambda: rig.cu)
    return rig.cu


def kernel(info: GraphInfo) -> KernelNode:
    content = info.nodes[1].content
    assert isinstance(content, KernelNode)
    return content


@pytest.mark.parametrize("newest", [True, False])
def test_labels_come_from_either_form_of_the_call(rig: Rig, newest: bool) -> None:
    """12.9 calls the newest form cuStreamGetCaptureInfo_v3; 13 has it under the plain name."""
    cu: Any = rig.cu
    if newest:
        plain = cu._cuStreamGetCaptureInfo
        cu.missing.add("cuStreamGetCaptureInfo")
        cu.cuStreamGetCaptureInfo_v3 = lambda stream: (0, *plain(stream))
    info = rig.backend.describe_graph(rig.capture())
    assert [n.label for n in info.nodes] == ["in", "L03.scale", "clear", "out"]


def test_labels_last_until_the_graph_is_destroyed_and_belong_to_it_alone(rig: Rig) -> None:
    backend = rig.backend
    first = rig.capture()
    backend.begin_capture(rig.stream)
    backend.fill(rig.x, 1, 4, rig.stream, label="other")
    second = backend.end_capture(rig.stream)
    graph_exec = backend.instantiate(first)
    for _ in range(2):
        assert [n.label for n in backend.describe_graph(first).nodes] == ["in", "L03.scale", "clear", "out"]
        assert [n.label for n in backend.describe_graph(second).nodes] == ["other"]
    assert backend.describe_graph(first).nodes[1].launch is rig.scale
    backend.destroy_graph(first)
    backend.destroy_exec(graph_exec)
    assert [n.label for n in backend.describe_graph(second).nodes] == ["other"]


def test_a_call_that_captures_nothing_renames_nothing(rig: Rig) -> None:
    """Copies of no bytes may leave no node: the stream still stands at the one before."""
    backend, cu = rig.backend, rig.cu
    cu._cuMemsetD8Async = lambda *args: None if args[2] == 0 else FakeDriver._cuMemsetD8Async(cu, *args)  # type: ignore[method-assign] # a driver that skips empty work
    backend.begin_capture(rig.stream)
    backend.launch(rig.scale, rig.stream)
    backend.fill(rig.x, 1, 0, rig.stream, label="nothing")
    info = backend.describe_graph(backend.end_capture(rig.stream))
    assert [n.label for n in info.nodes] == ["L03.scale"]


def test_nothing_is_asked_outside_of_a_capture(rig: Rig) -> None:
    rig.cu.calls.clear()
    rig.backend.launch(rig.scale, rig.stream)
    rig.backend.fill(rig.x, 1, 4, rig.stream)
    rig.backend.copy_d2h(rig.out, rig.x, 16, rig.stream)
    assert rig.cu.names() == ["cuLaunchKernel", "cuMemsetD8Async", "cuMemcpyDtoHAsync"]


MISSING = {
    "cuFuncGetName": "names of kernels",
    "cuFuncGetParamInfo": "parameters of kernels",
    "cuPointerGetAttribute": "owners of memory",
    "cuStreamGetCaptureInfo": "labels",
}


@pytest.mark.parametrize("name", MISSING)
@pytest.mark.parametrize("how", ["missing", "unloadable"])
def test_each_optional_call_may_be_missing(rig: Rig, name: str, how: str) -> None:
    """The dump has everything else, and says what is not there."""
    getattr(rig.cu, how).add(name)
    graph = rig.capture()
    info = rig.backend.describe_graph(graph)
    assert name in info.unavailable
    dump = inspect_backend_graphs(rig.backend, {"graph": graph}, title="t")
    assert f"{MISSING[name]}" in dump.made_by["not available"]
    assert name in dump.made_by["not available"]
    assert parse_dump(dump.to_json(), "dump") == dump
    (nodes,) = (g.nodes for g in dump.graphs)
    assert [n.kind for n in nodes] == ["copy", "kernel", "fill", "copy"]
    assert [n.deps for n in nodes] == [(), (0,), (1,), (2,)]
    found = nodes[1].kernel
    assert found is not None
    if name == "cuStreamGetCaptureInfo":
        # Without the capture's word a kernel of ours is as good as anybody's.
        assert [n.label for n in nodes] == [None] * 4
        assert found.name == "ds41_scale"
        assert found.params is not None
        assert [p.name for p in found.params] == [None] * 3
        assert found.params[0].place is not None
        assert found.params[0].place.owner == "x"
    else:
        assert [n.label for n in nodes] == ["in", "L03.scale", "clear", "out"]
        assert found.name == "scale"
        assert [(p.name, p.type, p.value) for p in found.params or ()] == [
            ("x", "i32*", None), ("a", "i32", 3), ("n", "u32", N)
        ]  # fmt: skip
    assert found.grid == (2, 3, 1)
    copies = [n.copy_ for n in nodes if n.copy_ is not None]
    assert [c.dst.owner for c in copies] == ["x", "out (host address)"]
    unknown = name == "cuPointerGetAttribute"
    assert [c.src.space for c in copies] == ["unknown" if unknown else "pageable", "device"]
    assert dump.complete != unknown


def test_of_foreign_kernels_names_and_parameters_may_be_missing(rig: Rig, foreign: FakeDriver) -> None:
    graph = rig.capture()
    foreign.missing |= {"cuFuncGetName", "cuFuncGetParamInfo"}
    dump = inspect_graph(int(graph))
    found = dump.graphs[0].nodes[1].kernel
    assert found is not None
    assert (found.name, found.params, found.grid, found.shared_nbytes) == (None, None, (2, 3, 1), 64)
    assert dump.graphs[0].nodes[1].moved_nbytes is None
    said = dump.made_by["not available"]
    assert "cuFuncGetName" in said
    assert "cuFuncGetParamInfo" in said


def test_a_library_kernel_is_asked_by_its_own_calls(rig: Rig) -> None:
    """A node that has `kern` in place of `func`."""
    cu, graph = rig.cu, rig.capture()
    node = rig.nodes(graph)[1]
    raw = cu._cuGraphKernelNodeGetParams(node)
    function, raw.func, raw.kern = raw.func, 0, raw.func
    cu.answers["cuGraphKernelNodeGetParams", node] = raw
    cu._cuKernelGetName = cu._cuFuncGetName  # type: ignore[attr-defined] # the fake has no library kernels
    cu._cuKernelGetParamInfo = cu._cuFuncGetParamInfo  # type: ignore[attr-defined]
    info = rig.backend.describe_graph(graph)
    assert kernel(info).name == "ds41_scale"
    assert kernel(info).params == kernel_params(rig)
    assert ("cuKernelGetName", function) in cu.calls
    for name in ("cuKernelGetName", "cuKernelGetParamInfo"):
        cu.missing.add(name)
        assert name in rig.backend.describe_graph(graph).unavailable


def kernel_params(rig: Rig) -> tuple[Param, ...]:
    return (Param(0, rig.x.to_bytes(8, "little")), Param(8, b"\x03\0\0\0"), Param(12, N.to_bytes(4, "little")))


def test_parameters_may_stand_in_a_block(rig: Rig) -> None:
    """A launch with `extra`: one buffer, laid out as the driver says, or as a whole where it says nothing."""
    cu, graph = rig.cu, rig.capture()
    node = rig.nodes(graph)[1]
    block = ctypes.create_string_buffer(rig.x.to_bytes(8, "little") + b"\x03\0\0\0" + N.to_bytes(4, "little"), 16)
    nbytes = ctypes.c_size_t(16)
    extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(block), 2, ctypes.addressof(nbytes), 0)
    raw = cu._cuGraphKernelNodeGetParams(node)
    raw.kernelParams, raw.extra = 0, ctypes.addressof(extra)
    cu.answers["cuGraphKernelNodeGetParams", node] = raw
    assert kernel(rig.backend.describe_graph(graph)).params == kernel_params(rig)
    cu.missing.add("cuFuncGetParamInfo")
    assert kernel(rig.backend.describe_graph(graph)).params == (Param(0, block.raw),)
    extra[0] = 77  # a key that nobody knows
    assert kernel(rig.backend.describe_graph(graph)).params is None


@pytest.mark.parametrize(("array", "params"), [(0, ()), (1, None)])
def test_a_kernel_whose_first_parameter_is_refused(rig: Rig, array: int, params: tuple[()] | None) -> None:
    """Without an array it has none; with one nobody can say how long that is."""
    cu, graph = rig.cu, rig.capture()
    node = rig.nodes(graph)[1]
    raw = cu._cuGraphKernelNodeGetParams(node)
    raw.kernelParams *= array
    cu.answers["cuGraphKernelNodeGetParams", node] = raw
    cu.fail["cuFuncGetParamInfo"] = [1]
    assert kernel(rig.backend.describe_graph(graph)).params == params


@pytest.mark.parametrize("at", [0, 1, 2])
def test_contents_that_the_driver_keeps_to_itself_are_left_out(rig: Rig, at: int) -> None:
    cu, graph = rig.cu, rig.capture()
    call = ("cuGraphMemcpyNodeGetParams", "cuGraphKernelNodeGetParams", "cuGraphMemsetNodeGetParams")[at]
    for code in (Status.INVALID_VALUE, Status.NOT_SUPPORTED):
        cu.fail[call] = [code]
        info = rig.backend.describe_graph(graph)
        assert info.nodes[at].content is None
        assert info.nodes[3 - at].content is not None
    cu.fail[call] = [Status.INVALID_HANDLE]
    with pytest.raises(CudaError, match=call):
        rig.backend.describe_graph(graph)


def test_node_types_that_we_do_not_know_are_other(rig: Rig) -> None:
    cu, graph = rig.cu, rig.capture()
    first, second, third, _ = rig.nodes(graph)
    cu.node_types = {first: 13, second: 3, third: 10}
    assert [n.kind for n in rig.backend.describe_graph(graph).nodes] == ["other", "host", "alloc", "copy"]

    def newer_than_the_bindings(node: int) -> int:
        raise ValueError("99 is not a valid CUgraphNodeType")

    cu._cuGraphNodeGetType = newer_than_the_bindings  # type: ignore[method-assign]
    assert {n.kind for n in rig.backend.describe_graph(graph).nodes} == {"other"}


def test_a_child_graph_is_read_and_stands_before_its_node(rig: Rig) -> None:
    """in, [child: copy, kernel, fill, copy], fill, out: what follows the node follows the whole child."""
    cu, backend = rig.cu, rig.backend
    child, parent = rig.capture(), rig.capture()
    node = rig.nodes(parent)[1]
    cu.node_types[node] = 4
    assert backend.describe_graph(parent).nodes[1].content is None  # a driver that does not show it
    cu.answers["cuGraphChildGraphNodeGetGraph", node] = int(child)
    info = backend.describe_graph(parent)
    inner = info.nodes[1].content
    assert isinstance(inner, GraphInfo)
    assert [n.kind for n in inner.nodes] == ["copy", "kernel", "fill", "copy"]
    dump = inspect_backend_graphs(backend, {"parent": parent}, title="t")
    assert [(n.kind, n.deps) for n in dump.graphs[0].nodes] == [
        ("copy", ()),
        ("copy", (0,)), ("kernel", (1,)), ("fill", (2,)), ("copy", (3,)),
        ("graph", (4,)),
        ("fill", (5,)), ("copy", (6,)),
    ]  # fmt: skip


def memcpy(cu: FakeDriver, **fields: Any) -> SimpleNamespace:
    plain = {f"{side}{at}": 0 for side in ("dst", "src") for at in ("XInBytes", "Y", "Z", "Pitch", "Height", "Host")}
    known = {"dstMemoryType": cu.CUmemorytype(2), "srcMemoryType": cu.CUmemorytype(2), "Height": 1, "Depth": 1}
    return SimpleNamespace(**{**plain, **known, "dstDevice": 0, "srcDevice": 0, **fields})


def test_a_copy_in_three_dimensions(rig: Rig) -> None:
    cu, graph = rig.cu, rig.capture()
    big = rig.backend.alloc("big", 100_000)
    cu.answers["cuGraphMemcpyNodeGetParams", rig.nodes(graph)[0]] = memcpy(
        cu, WidthInBytes=40, Height=3, Depth=2, dstDevice=big.ptr, srcDevice=rig.x,
        dstXInBytes=8, dstY=1, dstZ=2, dstPitch=100, dstHeight=10, srcPitch=40, srcHeight=3,
    )  # fmt: skip
    copy = rig.backend.describe_graph(graph).nodes[0].content
    # 2 slices of 10 rows of 100 bytes, of which 3 x 40 are written; the source lies without gaps.
    first = big.ptr + 8 + 1 * 100 + 2 * 10 * 100
    assert copy == CopyNode(first, "device", rig.x, "device", 240, dst_reach=10 * 100 + 2 * 100 + 40)
    dump = inspect_backend_graphs(rig.backend, {"g": graph}, title="t")
    found = dump.graphs[0].nodes[0].copy_
    assert found is not None
    assert (found.nbytes, found.dst.nbytes, found.src.nbytes, found.dst.owner_off) == (240, 1240, 240, 2108)


def test_copies_of_arrays_and_of_unified_addresses(rig: Rig) -> None:
    cu, graph = rig.cu, rig.capture()
    node = rig.nodes(graph)[0]
    array, unified = cu.CUmemorytype(3), cu.CUmemorytype(4)
    answer = memcpy(cu, WidthInBytes=16, dstMemoryType=array, srcMemoryType=unified, srcDevice=rig.out.ptr)
    cu.answers["cuGraphMemcpyNodeGetParams", node] = answer
    assert rig.backend.describe_graph(graph).nodes[0].content == CopyNode(0, "unknown", rig.out.ptr, "pinned", 16)
    answer.srcDevice = rig.page.ctypes.data
    assert rig.backend.describe_graph(graph).nodes[0].content == CopyNode(
        0, "unknown", rig.page.ctypes.data, "pageable", 16
    )

    class Newer(SimpleNamespace):
        @property
        def dstMemoryType(self) -> Any:
            raise ValueError("9 is not a valid CUmemorytype")

    fields = vars(answer)
    del fields["dstMemoryType"]
    cu.answers["cuGraphMemcpyNodeGetParams", node] = Newer(**fields)
    found = rig.backend.describe_graph(graph).nodes[0].content
    assert isinstance(found, CopyNode)
    assert (found.dst, found.dst_space) == (0, "unknown")


def test_a_fill_of_rows(rig: Rig) -> None:
    cu, graph = rig.cu, rig.capture()
    cu.answers["cuGraphMemsetNodeGetParams", rig.nodes(graph)[2]] = SimpleNamespace(
        dst=rig.x, value=5, elementSize=2, width=3, height=4, pitch=8
    )
    assert rig.backend.describe_graph(graph).nodes[2].content == FillNode(rig.x, 5, 2, 24, 30)


@pytest.mark.parametrize("how", ["missing", "unloadable"])
def test_without_any_form_of_the_edges_there_is_no_graph(rig: Rig, how: str) -> None:
    graph = rig.capture()
    getattr(rig.cu, how).add("cuGraphGetEdges")
    with pytest.raises(CudaError, match=r"cuGraphGetEdges.*no form"):
        rig.backend.describe_graph(graph)


@pytest.mark.parametrize("how", ["missing", "unloadable"])
def test_the_newest_form_of_the_edges_goes_first(rig: Rig, how: str) -> None:
    cu: Any = rig.cu
    graph = rig.capture()

    def v2(graph: int, n: int) -> Any:
        if how == "unloadable":
            raise RuntimeError('Function "cuGraphGetEdges_v2" not found')
        return cu._invoke("cuGraphGetEdges", (graph, n))

    cu.cuGraphGetEdges_v2 = v2
    if how == "missing":
        cu.missing.add("cuGraphGetEdges")
    assert rig.backend.describe_graph(graph).edges == ((0, 1), (1, 2), (2, 3))


# Memory of whomever


def test_the_driver_knows_whose_memory_an_address_is(rig: Rig) -> None:
    assert rig.backend.find_allocation(rig.x + 5) == MemoryRange(rig.x, 4 * N, "device")
    assert rig.backend.find_allocation(rig.out.ptr + 31) == MemoryRange(rig.out.ptr, 32, "pinned")
    assert rig.backend.find_allocation(rig.x + 4 * N) is None
    rig.cu.missing.add("cuPointerGetAttribute")
    with pytest.raises(UnsupportedError, match="cuPointerGetAttribute"):
        rig.backend.find_allocation(rig.x)


def test_refused_questions_leave_nothing_in_the_next_error(rig: Rig) -> None:
    """A driver logs every refusal, and the reader learns the end of a list by one."""
    cu: Any = rig.cu
    graph = rig.capture()
    for name in ("_cuFuncGetParamInfo", "_cuPointerGetAttribute"):
        ask = getattr(cu, name)

        def logging(*args: Any, ask: Any = ask) -> Any:
            try:
                return ask(*args)
            except CudaError:
                cu.log.append("[driver] an invalid argument")
                raise

        setattr(cu, name, logging)
    for question in (lambda: rig.backend.describe_graph(graph), lambda: rig.backend.find_allocation(12345678)):
        n_lines = len(cu.log)
        question()
        assert len(cu.log) > n_lines
        cu.fail["cuMemAlloc"] = [2]
        with pytest.raises(MemoryError) as info:
            rig.backend.alloc("big", 100)
        assert "invalid argument" not in str(info.value)


def test_what_was_freed_is_remembered(rig: Rig) -> None:
    buf, host = rig.backend.alloc("gone", 64), rig.backend.alloc_pinned("gone too", 32)
    rig.backend.free(buf)
    rig.backend.free_pinned(host)
    assert [(b.name, b.ptr, b.nbytes) for b in rig.backend.freed()] == [
        ("gone", buf.ptr, 64), ("gone too", host.device_ptr, 32)
    ]  # fmt: skip


# Graphs of others


def test_a_foreign_graph_is_described_in_the_current_context(rig: Rig, foreign: FakeDriver) -> None:
    graph = rig.capture()
    before = foreign.retained
    with foreign_graphs() as driver:
        info = driver.describe(graph)
        assert driver.find_allocation(rig.x) == MemoryRange(rig.x, 4 * N, "device")
    assert foreign.retained == before
    assert foreign._current.context
    assert [n.label for n in info.nodes] == [None] * 4
    assert kernel(info).params == kernel_params(rig)


def test_without_a_context_the_one_that_is_in_use_is_borrowed(rig: Rig, foreign: FakeDriver) -> None:
    graph = rig.capture()
    foreign._current.context = None
    before = foreign.retained
    with foreign_graphs() as driver:
        assert foreign._current.context
        assert len(driver.describe(graph).nodes) == 4
    assert foreign._current.context is None
    assert foreign.retained == before
    foreign.fail["cuCtxSetCurrent"] = [2]
    with pytest.raises(CudaError, match="cuCtxSetCurrent"), foreign_graphs():
        pass
    assert foreign.retained == before
    foreign.devices, foreign.retained = 2, 1  # both are in use, as far as this driver tells
    with pytest.raises(InputError, match=r"2 devices are in use.*set_device"), foreign_graphs():
        pass
    foreign.devices, foreign.retained = 1, 0
    with pytest.raises(InputError, match="0 devices are in use"), foreign_graphs():
        pass
    foreign.retained = before
    foreign._current.context = 0xC0


def test_without_a_driver_there_is_nothing_to_look_at(foreign: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign.no_library = RuntimeError("Failed to dlopen libcuda.so.1")
    with pytest.raises(UnsupportedError, match="no driver library"):
        inspect_graph(0x1234)

    def not_installed() -> Any:
        raise ImportError("no module named cuda")

    monkeypatch.setattr(driver_module, "_bindings", not_installed)
    with pytest.raises(UnsupportedError, match="cuda-bindings"):
        inspect_graph(0x1234)


class CUgraphExec:  # as the bindings call it
    def __int__(self) -> int:
        return 0x77


class TorchGraph:
    """As much of torch.cuda.CUDAGraph as is looked at."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def raw_cuda_graph(self) -> int:
        if not self.handle:
            raise RuntimeError("You cannot access the raw cudaGraph_t instance unless keep_graph=true\nmore")
        return self.handle


def test_what_stands_for_a_graph(rig: Rig, foreign: FakeDriver) -> None:
    graph = rig.capture()
    for given in (int(graph), np.int64(graph), TorchGraph(graph)):
        assert len(inspect_graph(given).graphs[0].nodes) == 4
    wrong: list[tuple[Any, str]] = [
        (CUgraphExec(), r"CUgraphExec.*cannot be taken apart.*keep_graph=True"),
        (TorchGraph(0), r"keep_graph=True.*You cannot access"),
        (0x5A5A, r"0x5a5a is no graph.*CUgraphExec"),
        ("graph", "'graph' is no graph"),
        (1.5, "is no graph"),
        (True, "is no graph"),
        (0, "no handle"),
        (-5, "no handle"),
    ]
    for given, said in wrong:
        with pytest.raises(InputError, match=said):
            inspect_graph(given)
    foreign.fail["cuGraphGetNodes"] = [Status.LAUNCH_FAILED]
    with pytest.raises(CudaError, match="cuGraphGetNodes"):
        inspect_graph(int(graph))


def test_registered_ranges_name_foreign_pointers_before_the_driver_does(rig: Rig, foreign: FakeDriver) -> None:
    graph = rig.capture()

    class Tensor:
        nbytes = 4 * N

        def data_ptr(self) -> int:
            return rig.x

    plain = inspect_graph(int(graph))
    assert {(r.name, r.source) for r in plain.ranges} == {
        ("device allocation 1", "driver"), ("pinned allocation 1", "driver")
    }  # fmt: skip
    for given in (Tensor(), (rig.x, 4 * N)):
        dump = inspect_graph(int(graph), ranges={"weights": given}, name="model")
        assert dump.graphs[0].name == "model"
        (x,) = [place for _, place in dump.graphs[0].nodes[1].places]
        assert (x.owner, x.owner_off, x.space, x.access) == ("weights", 0, "device", None)
    for bad in ((rig.x,), "text", (1.5, 2), (-1, 5)):
        with pytest.raises(InputError, match="range 'weights'"):
            inspect_graph(int(graph), ranges={"weights": bad})


def test_an_engine_s_dump_is_that_of_the_host_backend(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Names, parameters, launch shapes, edges: all but where memory lies."""
    host, _ = dump_checkpoint(checkpoint("micro"), tokens=3, backend="host")
    cu = FakeDriver(SPECS)
    backend = DriverBackend(bindings=cu, ptx_folder=write_ptx(tmp_path, SPECS))
    with (
        Engine.open(checkpoint("micro"), mode="step-graph", backend=backend, capture_watch=True) as engine,
        engine.new_sequence() as seq,
    ):
        engine.prefill(seq, [5, 17, 3])
        dump = dump_engine(engine, [seq])
    found = diff(host, dump)
    assert [(c.node, c.what, c.before, c.after) for g in found.graphs for c in g.changed] == []
    assert not found.graphs
    assert "not available" not in dump.made_by
    assert lint(dump) == []
    backend.close()


def test_an_engine_refuses_a_graph_that_owns_memory(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """The driver says that the third node of each graph allocates: the step stays eager."""
    cu: Any = FakeDriver(SPECS)
    backend = DriverBackend(bindings=cu, ptx_folder=write_ptx(tmp_path, SPECS))
    get_type = cu._cuGraphNodeGetType
    cu._cuGraphNodeGetType = lambda node: 10 if cu._nodes[node].deps == (1,) else get_type(node)
    with (
        capture_logs() as logs,
        Engine.open(checkpoint("micro"), mode="step-graph", backend=backend) as engine,
        engine.new_sequence() as seq,
    ):
        engine.prefill(seq, [5, 17, 3, 8])
        assert (engine.stats().captures, engine.stats().replays) == (0, 0)
        assert (backend.live()["graphs"], backend.live()["graph_execs"]) == (0, 0)
    (warning,) = [e for e in logs if e["log_level"] == "warning"]
    for part in ("would alloc memory", "node 2, 'L0", "allocate before the capture"):
        assert part in warning["error"]
    backend.close()


def test_only_a_missing_symbol_counts_as_missing() -> None:
    class Broken:
        def cuFuncGetName(self, function: int) -> Any:
            raise RuntimeError("the stack is corrupt")

    with pytest.raises(RuntimeError, match="corrupt"):
        driver_errors.call_optional(Broken(), "cuFuncGetName", 1)
    assert driver_errors.call_optional(Broken(), "cuFuncGetParamInfo", 1) is None
