"""Dumps to look at and to test with: a whole step of the released shapes, a foreign graph, a hostile one.

The kernels of the step are a table, with the names, shapes and forks that an engine captures, so that a change of the
kernels leaves these dumps alone.
"""

import random
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds41rt.capture.dump import Copy, Dump, Fill, Graph, Kernel, Node, Param, Place, Range, ReadBack

SEGMENTS = ((0, 2), (2, 8), (8, 14), (14, 20), (20, 24), (24, 28), (28, 32), (32, 36), (36, 40))
ENGRAM_LAYERS = (1, 14)
SAVED_NBYTES = 51296

# Bytes of the engine's own buffers; a weight says its bytes where it is named.
_BUFFERS = {
    "expert arena": 96_276_418_560,
    "route headers": 4864,
    "slot table": 98304,
    "engram rows": 16384,
    "sequence block": 24576,
    "saved block": SAVED_NBYTES,
    "snapshots": 40 * 51456,
    "pre_prev": 16,
    "hidden": 10240,
    "normed": 10240,
    "mix workspace": 66048,
    "engram kv": 51200,
    "q_a": 2560,
    "q_r": 2560,
    "kv": 1024,
    "q": 65536,
    "scores": 163840,
    "o": 65536,
    "u": 16384,
    "router logits": 1536,
    "plan block": 192,
    "expert hidden": 27648,
    "expert out": 61440,
    "shared hidden": 4608,
    "shared out": 10240,
    "moe out": 10240,
}


@dataclass(frozen=True)
class _Launch:
    """A kernel of the table: its parameters are (name, type, value) or (name, type, access, place)."""

    kernel: str
    n_blocks: int
    shared_nbytes: int
    behind_nbytes: int
    params: list[list[str]] = field(default_factory=list)


def _read_launches() -> dict[str, _Launch]:
    found: dict[str, _Launch] = {}
    for line in (Path(__file__).parent / "step_kernels.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            name, ctype, rest = line.split(maxsplit=2)
            list(found.values())[-1].params.append([name, ctype, *rest.split(maxsplit=1)])
        elif line and not line.startswith("#"):
            label, _, rest = line.partition(" = ")
            kernel, *numbers = rest.split(", ")
            n_blocks, shared, behind = map(int, numbers)
            found[label] = _Launch(kernel, n_blocks, shared, behind)
    return found


_LAUNCHES = _read_launches()


@dataclass
class _Writer:
    """Writes a step down, graph by graph, and the memory that it names."""

    ranges: dict[str, Range] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    side: tuple[int, ...] = ()  # the side stream's last node: a capture ties the stream's next work to it

    def __post_init__(self) -> None:
        addr = 0x7F2A_0000_0000
        for name, nbytes in _BUFFERS.items():
            self.ranges[name] = Range(name=name, addr=addr, nbytes=nbytes, space="device", source="ledger")
            addr += -(-nbytes // 4096) * 4096

    def graph(self, first: int, end: int) -> Graph:
        self.nodes, self.side = [], ()
        for layer in range(first, end):
            if layer != first or first == 0:
                self._attn_in(layer)
                for name in ("qkv_a", "q_b", "attn_score", "attn_value", "wo_a", "wo_b"):
                    self._launch(layer, name)
            self._snapshot(layer)
            fork = self._launch(layer, "ffn_in")
            self._launch(layer, "shared_gate_up", stream="side", deps=(*self.side, fork))
            self.side = (self._launch(layer, "shared_down", stream="side"),)
            self._launch(layer, "router", deps=(fork,))
            for name in ("route_select", "expert_gate_up"):
                self._launch(layer, name)
            self._launch(layer, "combine", deps=(*self.side, self._launch(layer, "expert_down")))
        if end < 40:
            self._attn_in(end)
        else:
            self._launch(39, "final_collapse")
        reads = (ReadBack(what="routing headers", nbytes=4864, place=self._place(0, "route headers", "r")),)
        layers = tuple(range(first, end))
        return Graph(
            name=f"{first}..{end}", nodes=tuple(self.nodes), layers=(first, end), moe_layers=layers, reads_back=reads
        )

    def _attn_in(self, layer: int) -> None:
        names = ["embed"] if layer == 0 else []
        names += ["engram_kv", "engram_apply"] if layer in ENGRAM_LAYERS else []
        for name in (*names, "attn_in"):
            self._launch(layer, name)

    def _snapshot(self, layer: int) -> None:
        copy = Copy(
            dst=self._place(layer, f"snapshots+{layer * 51456}/{SAVED_NBYTES}", "w"),
            src=self._place(layer, "saved block", "r"),
            nbytes=SAVED_NBYTES,
        )
        self._add(layer, "snapshot", "capture", None, kind="copy", copy=copy, moved_nbytes=2 * SAVED_NBYTES)

    def _launch(self, layer: int, name: str, *, stream: str = "capture", deps: tuple[int, ...] | None = None) -> int:
        launch = _LAUNCHES[name]
        params: list[Param] = []
        moved = launch.behind_nbytes
        for said in launch.params:
            param = self._param(layer, said, params)
            params.append(param)
            if param.place is not None:
                moved += (param.place.nbytes or 0) * (2 if param.place.access == "rw" else 1)
        kernel = Kernel(
            name=launch.kernel,
            grid=(launch.n_blocks, 1, 1),
            block=(256, 1, 1),
            shared_nbytes=launch.shared_nbytes,
            params=tuple(params),
            reads_through=launch.behind_nbytes > 0,
        )
        return self._add(layer, name, stream, deps, kind="kernel", kernel=kernel, moved_nbytes=moved)

    def _param(self, layer: int, said: list[str], before: list[Param]) -> Param:
        name, ctype, *meaning = said
        nbytes = 8 if len(meaning) == 2 or ctype == "u64" else 4
        off = before[-1].off + before[-1].nbytes if before else 0
        off = -(-off // nbytes) * nbytes
        if len(meaning) == 2:
            place = self._place(layer, meaning[1], meaning[0])
            raw = place.addr.to_bytes(8, "little").hex()
            return Param(off=off, raw=raw, name=name, type=f"{ctype}*", place=place)
        value = float(meaning[0]) if ctype == "f32" else int(meaning[0])
        raw = struct.pack({"f32": "<f", "u32": "<I", "u64": "<Q"}[ctype], value).hex()
        return Param(off=off, raw=raw, name=name, type=ctype, value=value)

    def _place(self, layer: int, said: str, access: Any) -> Place:
        """What `name`, `name+off/nbytes` or `@weight/nbytes` says; an offset may be by layer."""
        said = said.format(ring=1024 + 8 * layer, slot=1536 * layer, header=76 * layer)
        where, _, size = said.partition("/")
        name, _, off_text = where.partition("+")
        if name.startswith("@"):
            name = f"layers.{layer}.{name[1:]}"
            if name not in self.ranges:
                addr = 0x7E00_0000_0000 + (len(self.ranges) << 28)
                self.ranges[name] = Range(name=name, addr=addr, nbytes=int(size), space="device", source="ledger")
        owner, off = self.ranges[name], int(off_text or 0)
        nbytes = int(size or owner.nbytes)
        return Place(addr=owner.addr + off, nbytes=nbytes, space="device", owner=name, owner_off=off, access=access)

    def _add(self, layer: int, name: str, stream: str, deps: tuple[int, ...] | None, **content: Any) -> int:
        index = len(self.nodes)
        if deps is None:
            deps = (index - 1,) if index else ()
        label = f"L{layer:02d}.{name}"
        self.nodes.append(Node(index=index, deps=deps, label=label, stream=stream, layer=layer, **content))
        return index


def whole_step() -> Dump:
    """Nine segments, 40 layers of 16 nodes but for the attention that runs between segments."""
    writer = _Writer()
    graphs = tuple(writer.graph(first, end) for first, end in SEGMENTS)
    made_by = {"ds41rt": "0.1.0", "device": "made up, 132 multiprocessors", "model": "the released shapes"}
    return Dump(title="A whole step", made_by=made_by, graphs=graphs, ranges=tuple(writer.ranges.values()))


_FOREIGN_KERNELS = (
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIN3c108BFloat16EEESt5arrayIPcLm3EEEEviT0_T1_",
    "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIN3c108BFloat16ENS0_7MeanOpsIS4_fffEEjfLi4ELi4EEEEEvT1_",
    "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<c10::BFloat16, c10::BFloat16, "
    "c10::BFloat16, at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(int)",
    "_ZN7cutlass7Kernel2I66cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_64x2_tn_alignEEvNT_6ParamsE",
    "nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3",
    "_ZN48_GLOBAL__N__dcb4b1a2_17_SoftMax_cu_5f8e4b2a_112320softmax_warp_forwardIfffLi7ELb0ELb0EEEvPT0_PKT_iiiPKbib",
)


def foreign_graph(n_nodes: int = 420, seed: int = 7) -> Dump:
    """One graph as another runtime captured it: mangled names, no labels, streams, layers or parameter names."""
    rng = random.Random(seed)
    pool = Range(name="driver 0x7ffe40000000", addr=0x7FFE_4000_0000, nbytes=1 << 31, space="device", source="driver")
    inputs = Range(name="static_input", addr=0x7FFE_C000_0000, nbytes=10240, space="device", source="caller")

    def place(nbytes: int | None = None) -> Place:
        owner = rng.choice((pool, pool, pool, inputs, None))
        if owner is None:
            return Place(addr=0x5555_0000_0000 + 256 * rng.randrange(1 << 16), nbytes=nbytes)
        off = 256 * rng.randrange(owner.nbytes // 256)
        return Place(addr=owner.addr + off, nbytes=nbytes, space="device", owner=owner.name, owner_off=off)

    def kernel() -> Kernel:
        grid = (rng.randrange(1, 500), rng.choice((1, 1, 8)), 1)
        if rng.random() < 0.1:
            return Kernel(name=rng.choice(_FOREIGN_KERNELS), grid=grid, block=(128, 1, 1))
        params: list[Param] = []
        off = 0
        for _ in range(rng.randrange(1, 6)):
            nbytes = rng.choice((4, 8, 8, 8, 216))
            off = -(-off // min(nbytes, 8)) * min(nbytes, 8)
            raw = rng.randbytes(nbytes)
            guess = place() if nbytes == 8 else None
            inside: tuple[Any, ...] = ()
            if nbytes == 216:
                inside = ({"off": 8, "place": place()}, {"off": 64, "place": place()})
            if guess is not None:
                raw = guess.addr.to_bytes(8, "little")
            known = guess if guess is not None and guess.owner else None
            params.append(Param.model_validate({"off": off, "raw": raw.hex(), "place": known, "inside": inside}))
            off += nbytes
        name = rng.choice(_FOREIGN_KERNELS)
        return Kernel(
            name=name, grid=grid, block=(128, 1, 1), shared_nbytes=rng.choice((0, 49152)), params=tuple(params)
        )

    nodes: list[Node] = []
    for i in range(n_nodes):
        deps: tuple[int, ...] = (i - 1,) if i else ()
        if i > 2 and i % 60 in (21, 22):  # two nodes beside each other, both behind the one before them
            deps = (i - i % 60 + 20,)
        elif i % 60 == 23:
            deps = (i - 2, i - 1)
        draw, nbytes = rng.random(), 4 * rng.randrange(1, 5000)
        if draw < 0.08:
            fill = Fill(dst=place(nbytes), value=0, element_nbytes=4, nbytes=nbytes)
            nodes.append(Node(index=i, kind="fill", deps=deps, fill=fill, moved_nbytes=nbytes))
        elif draw < 0.13:
            copy = Copy(dst=place(nbytes), src=place(nbytes), nbytes=nbytes)
            nodes.append(Node(index=i, kind="copy", deps=deps, copy=copy, moved_nbytes=2 * nbytes))
        elif draw < 0.14:
            nodes.append(Node(index=i, kind=rng.choice(("empty", "host", "alloc")), deps=deps))
        else:
            nodes.append(Node(index=i, kind="kernel", deps=deps, kernel=kernel()))
    graph = Graph(name="decode", nodes=tuple(nodes))
    return Dump(
        title="torch.cuda.CUDAGraph",
        made_by={"driver": "13000"},
        graphs=(graph,),
        ranges=(pool, inputs),
        complete=False,
    )


HOSTILE = "</script><img src=x onerror=alert(1)>'\"&amp; @@SCRIPT@@ \u2028 \x00"


def hostile() -> Dump:
    """Every text of a dump tries to get out of its place, and every address is at the upper end."""
    top = 2**64 - 4096
    place = Place(addr=top + 1, nbytes=2**63, space="device", owner=HOSTILE, owner_off=1, access="rw")
    param = Param(off=0, raw="ff" * 8, name=HOSTILE, type=HOSTILE, place=place)
    big = Param(off=8, raw="ff" * 8, name="big", type="u64", value=2**64 - 1)
    kernel = Kernel(name=HOSTILE, grid=(1, 1, 1), block=(32, 1, 1), params=(param, big))
    node = Node(index=0, kind=HOSTILE, label=HOSTILE, stream=HOSTILE, layer=0, moved_nbytes=2**60 + 1, kernel=kernel)
    graph = Graph(name=HOSTILE, nodes=(node,), reads_back=(ReadBack(what=HOSTILE, nbytes=4, place=place),))
    ranges = (Range(name=HOSTILE, addr=top, nbytes=4095, space="device", source="caller", freed=True),)
    return Dump(title=HOSTILE, made_by={HOSTILE: HOSTILE}, graphs=(graph,), ranges=ranges)
