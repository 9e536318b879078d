"""A backend that checks every kernel launch against the kernel's NumPy reference, on the memory the launch sees.

Wrap any backend, open an engine on it, decode: each launch is run alone, with its outputs poisoned, and what it wrote
is compared with what the reference writes from the same inputs. Captured launches pass unchecked (they are the same
objects). Slow and thorough: it tests the kernels on the data, shapes and wiring that decoding gives them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41rt.cu.backend import CaptureStatus, GpuBackend, HostBuffer, Stream
from ds41rt.cu.kernel import BF16, F32, KernelLaunch, Pointer, Span

POISON = 0x7F  # bf16 0x7F7F and f32 0x7F7F7F7F are huge, never a result
EPS = float(np.finfo(np.float32).eps)
# bf16 results: one unit in the last place, with room for this share of values further off.
BF16_OUTLIERS = 0.005
# Outputs that must agree in every bit: integers, pointers, copies, and floats whose every operation is prescribed.
EXACT_KERNELS = {"embed_expand", "route_select", "slot_table_set", "read_sum", "sqrt_softplus_hash"}
# float32 sums: the reference on absolute values bounds the products.
SUMS = {
    ("router_logits", "logits"): ("normed", "w"),
    ("comp_proj", "kv"): ("normed", "wkv"),
    ("comp_proj", "gate"): ("normed", "wgate"),
    ("attn_score", "scores"): ("q", "spans"),
    ("head", "logits"): ("hidden", "norm_w", "w"),
}
# float32 values of order one that go through exp, sums and divisions: absolute.
ABSOLUTE = {"pre_out": 2e-6, "post": 4e-6, "comb": 2e-6, "pre_prev": 0.0, "gate": 2e-6, "weight_dev": 0.0}


@dataclass(slots=True)
class Finding:
    """One output of one launch that is not what it should be."""

    label: str
    kernel: str
    output: str
    what: str


@dataclass(slots=True)
class Tally:
    """Checked launches by kernel, and per output the worst error (ulps or units of the bound) and the share of values
    beyond one ulp."""

    launches: dict[str, int] = field(default_factory=dict)
    worst: dict[tuple[str, str], float] = field(default_factory=dict)
    outliers: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)


def bf16_ulps(got: NDArray[Any], want: NDArray[Any]) -> NDArray[np.int64]:
    """Distance in representable bf16 values; +0 and -0 are the same value."""

    def ordered(x: NDArray[Any]) -> NDArray[np.int64]:
        bits = x.view(np.uint16).astype(np.int64)
        return np.where(bits & 0x8000, -(bits & 0x7FFF), bits)

    distance: NDArray[np.int64] = np.abs(ordered(got) - ordered(want))
    return distance


class CheckedBackend:
    """Everything but `launch` goes straight to the wrapped backend. `findings` is empty when all is well."""

    def __init__(self, backend: GpuBackend, *, limit: int | None = None) -> None:
        """`limit`: check a kernel at most so often until `again` is called (None: always)."""
        self._raw = backend
        self._limit = limit
        self._checked: dict[str, int] = {}
        self.findings: list[Finding] = []
        self.tally = Tally()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def again(self) -> None:
        """Start counting towards the limit anew."""
        self._checked.clear()

    def _read(self, addr: int, dtype: np.dtype[Any], shape: tuple[int, ...], stream: Stream) -> NDArray[Any]:
        out = np.empty(shape, dtype)
        if out.size:
            self._raw.copy_d2h(HostBuffer.pageable("checked", out), addr, out.nbytes, stream)
            self._raw.synchronize(stream)
        return out

    def launch(self, launch: KernelLaunch, stream: Stream) -> None:
        raw, spec = self._raw, launch.spec
        done = self._checked.get(spec.name, 0)
        if raw.capture_status(stream) is not CaptureStatus.NONE or done == self._limit:
            raw.launch(launch, stream)
            return
        self._checked[spec.name] = done + 1
        raw.synchronize(stream)
        args = dict(zip((p.name for p in spec.params), launch.args, strict=True))
        scalars = spec.scalars(args)
        places: dict[str, Span] = {}
        values: list[Any] = []
        for p in spec.params:
            if not isinstance(p, Pointer):
                values.append(args[p.name])
                continue
            shape = p.shape(scalars)
            if not np.prod(shape):
                values.append(None)
                continue
            places[p.name] = Span(int(args[p.name]), p.dtype, shape, p.access)
            values.append(self._read(int(args[p.name]), p.dtype, shape, stream))
        spans: list[Span] = []
        if spec.indirect is not None:
            spans = list(spec.indirect(*values))
            values.append([self._read(s.addr, s.dtype, s.shape, stream) for s in spans])
        outputs = {n: s for n, s in places.items() if s.access != "r"}
        outputs |= {f"span {i}": s for i, s in enumerate(spans) if s.access != "r"}
        for s in outputs.values():
            if s.access == "w":
                raw.fill(s.addr, POISON, int(np.prod(s.shape)) * s.dtype.itemsize, stream)
        raw.launch(launch, stream)
        raw.synchronize(stream)
        got = {n: self._read(s.addr, s.dtype, s.shape, stream) for n, s in outputs.items()}
        names = [p.name for p in spec.params] + (["spans"] if spec.indirect is not None else [])
        bound = self._bounds(spec.name, spec.reference, names, values, outputs)
        with np.errstate(all="ignore"):
            spec.reference(*values)
        by_name = dict(zip(names, values, strict=True))
        self.tally.launches[spec.name] = self.tally.launches.get(spec.name, 0) + 1
        for name in outputs:
            want = values[-1][int(name[5:])] if name.startswith("span ") else by_name[name]
            if name == "work":
                continue
            problem = self._compare(spec.name, name, got[name], want, bound.get(name))
            if problem:
                self.findings.append(Finding(launch.label, spec.name, name, problem))

    def _bounds(
        self, kernel: str, reference: Callable[..., None], names: list[str], values: list[Any], outputs: dict[str, Span]
    ) -> dict[str, NDArray[Any]]:
        """sum |products| of the float32 sums that this kernel writes: its reference on absolute values."""
        wanted = {out: operands for (k, out), operands in SUMS.items() if k == kernel and out in outputs}
        if not wanted:
            return {}
        copies: list[Any] = []
        for name, value in zip(names, values, strict=True):
            if isinstance(value, list):
                copies.append([np.abs(v) if v.dtype in (BF16, F32) else v.copy() for v in value])
            elif isinstance(value, np.ndarray):
                floats = any(name in operands for operands in wanted.values()) and value.dtype in (BF16, F32)
                copies.append(np.abs(value) if floats else value.copy())
            else:
                copies.append(value)
        with np.errstate(all="ignore"):
            reference(*copies)
        return {out: copies[names.index(out)] for out in wanted}

    def _compare(
        self, kernel: str, name: str, got: NDArray[Any], want: NDArray[Any], bound: NDArray[Any] | None
    ) -> str | None:
        key = (kernel, name)
        if kernel in EXACT_KERNELS or want.dtype not in (BF16, F32):
            wrong = got.reshape(-1).view(np.uint8) != want.reshape(-1).view(np.uint8)
            self.tally.worst[key] = max(self.tally.worst.get(key, 0.0), float(wrong.any()))
            return f"{int(wrong.sum())} of {wrong.size} bytes differ" if wrong.any() else None
        nan = np.isnan(want.astype(np.float32))
        if (np.isnan(got.astype(np.float32)) != nan).any():
            return "not-a-number in other places than the reference has it"
        if want.dtype == BF16:
            ulps = bf16_ulps(got, want)[~nan]
            far = int((ulps > 1).sum())
            seen, total = self.tally.outliers.get(key, (0, 0))
            self.tally.outliers[key] = (seen + far, total + ulps.size)
            self.tally.worst[key] = max(self.tally.worst.get(key, 0.0), float(ulps.max(initial=0)))
            # One value may be off in a small output, where the share allows none.
            if far > max(1, BF16_OUTLIERS * ulps.size):
                return f"{far} of {ulps.size} values are more than one bf16 ulp off (worst {int(ulps.max())})"
            return None
        finite = np.isfinite(want)
        if not np.array_equal(got[~finite & ~nan], want[~finite & ~nan]):
            return "infinities differ"
        error = np.abs(got[finite].astype(np.float64) - want[finite])
        if bound is not None:
            limit = 4 * EPS * bound[finite].astype(np.float64) + 1e-30
        elif name in ABSOLUTE:
            limit = np.full(error.shape, ABSOLUTE[name] + 1e-12)
        else:
            limit = np.maximum(np.abs(want[finite]) * 2.0**-8, 1e-30)  # bf16 values held as float32
            error = np.where(error <= np.abs(want[finite]) * 2.0**-7, error, np.inf)
        ratio = float((error / limit).max(initial=0.0))
        self.tally.worst[key] = max(self.tally.worst.get(key, 0.0), ratio)
        share = float((error > limit).mean()) if error.size else 0.0
        allowed = 0.0 if bound is not None or name in ABSOLUTE else BF16_OUTLIERS
        if share > allowed:
            at = int((error / limit).argmax())
            return f"error {error[at]:.3e} is {ratio:.1f} times the bound ({100 * share:.2f} % of values beyond it)"
        return None
