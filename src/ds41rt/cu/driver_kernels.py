"""Kernels on a real device: PTX modules loaded once, launches checked and packed once.

Loading happens in `prepare`, never inside a capture: a load may break it, and the first use of a PTX file may compile
it. The driver comes in as a `Call`. This file must not know streams.
"""

import ctypes
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ds41rt.cu import ptx
from ds41rt.cu.driver_errors import Call, try_optional
from ds41rt.cu.kernel import SCALAR_FORMATS, Geometry, KernelLaunch, KernelSpec, Scalar, ordered_args
from ds41rt.cu.probe import DeviceInfo
from ds41rt.cu.result import CudaError, Status
from ds41rt.errors import UnsupportedError

# Dynamic shared memory beyond this has to be asked for, function by function.
_SHARED_DEFAULT_NBYTES = 48 << 10


class _Function:
    """A loaded kernel and its limits; `dynamic_nbytes` is the dynamic shared memory granted so far."""

    __slots__ = ("dynamic_nbytes", "max_threads", "raw", "static_nbytes")

    def __init__(self, raw: Any, max_threads: int, static_nbytes: int) -> None:
        self.raw = raw
        self.max_threads = max_threads
        self.static_nbytes = static_nbytes
        self.dynamic_nbytes = max(_SHARED_DEFAULT_NBYTES - static_nbytes, 0)


class DriverLaunch(KernelLaunch):
    """A launch with everything packed: `start(stream, params, 0)` is the driver call.

    `params` is the address of the array of pointers to the values. Each value has eight bytes of its own, of which the
    driver reads as many as the parameter has (little-endian).
    """

    __slots__ = ("geometry", "owner", "params", "pointers", "start", "values")

    def __init__(
        self,
        owner: "Kernels",
        spec: KernelSpec,
        args: tuple[int | float, ...],
        label: str,
        geometry: Geometry,
        function: Any,
    ) -> None:
        super().__init__(spec, args, label)
        self.owner = owner
        self.geometry = geometry
        self.values = ctypes.create_string_buffer(8 * len(args))
        for i, (param, value) in enumerate(zip(spec.params, args, strict=True)):
            kind = param.ctype if isinstance(param, Scalar) else "u64"
            struct.pack_into(SCALAR_FORMATS[kind], self.values, 8 * i, value)
        base = ctypes.addressof(self.values)
        self.pointers = (ctypes.c_uint64 * len(args))(*(base + 8 * i for i in range(len(args))))
        self.params = ctypes.addressof(self.pointers)
        x, y, z = geometry.grid
        self.start = partial(owner.cu.cuLaunchKernel, function, x, y, z, geometry.block, 1, 1, geometry.shared_nbytes)


class Kernels:
    """The PTX modules of one context and the functions taken from them."""

    def __init__(self, cu: Any, call: Call, device: DeviceInfo, driver_version: int, selection: ptx.Selection) -> None:
        self.cu = cu
        # By file, or by text for kernels that bring their own.
        self.modules: dict[Path | str, Any] = {}
        self._call = call
        self._device = device
        self._driver_version = driver_version
        self._selection = selection
        self._functions: dict[tuple[str, str | None], _Function] = {}

    def prepare(
        self, spec: KernelSpec, args: Mapping[str, int | float], label: str, *, capturing: bool
    ) -> DriverLaunch:
        """Load the kernel if need be, check the launch against the device, pack it.

        Raises TypeError or ValueError for wrong arguments, `UnsupportedError` for a kernel without a device version or
        a launch that does not fit the device, and `CudaError`, also when `capturing` and the kernel is not loaded yet.
        """
        values = ordered_args(spec, args)
        what = f"kernel {spec.name} ({label!r})"
        if spec.geometry is None:
            raise UnsupportedError(f"{what} has no device version; use --backend host")
        geometry = spec.geometry(spec.scalars(args), self._device.n_multiprocessors)
        function = self._functions.get((spec.name, spec.ptx)) or self._load(spec, capturing)
        self._check(what, geometry, function)
        if geometry.shared_nbytes > function.dynamic_nbytes:
            attribute = self.cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", function.raw, attribute, geometry.shared_nbytes, detail=what)
            function.dynamic_nbytes = geometry.shared_nbytes
        return DriverLaunch(self, spec, values, label, geometry, function.raw)

    def clear(self) -> None:
        self.modules.clear()
        self._functions.clear()

    def _load(self, spec: KernelSpec, capturing: bool) -> _Function:
        entry = ptx.entry_name(spec)
        key, where, has = self._find(spec, entry)
        want = ptx.entry_types(spec)
        if has != want:
            do = "run `make ptx`" if spec.ptx is None else "make them agree"
            raise UnsupportedError(
                f"kernel {spec.name} declares ({', '.join(want)}), PTX {where} has ({', '.join(has)}): {do}"
            )
        if capturing:
            detail = f"kernel {spec.name} is not loaded yet and a capture is open; prepare it before the capture begins"
            raise CudaError(Status.STREAM_CAPTURE_UNSUPPORTED, "cuModuleLoadData", detail)
        if key not in self.modules:
            text = self._selection.entries[entry].read() if spec.ptx is None else spec.ptx.encode()
            (raw,) = self._call("cuModuleLoadData", text + b"\0", detail=f"PTX {where}")
            self.modules[key] = raw
        (raw,) = self._call("cuModuleGetFunction", self.modules[key], entry.encode(), detail=f"entry {entry}")
        # Modules load lazily by default: without this (CUDA 12.4) a first launch inside a capture would load there.
        try_optional(self.cu, "cuFuncLoad", raw)
        attributes = self.cu.CUfunction_attribute
        (threads,) = self._call("cuFuncGetAttribute", attributes.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, raw)
        (static,) = self._call("cuFuncGetAttribute", attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, raw)
        function = self._functions[spec.name, spec.ptx] = _Function(raw, int(threads), int(static))
        return function

    def _find(self, spec: KernelSpec, entry: str) -> tuple[Path | str, str, tuple[str, ...]]:
        """The module that has a kernel: its key, its name for people, and the entry's parameter types."""
        if spec.ptx is not None:
            entries = ptx.judge_text(spec, self._driver_version, self._device.capability)
            if entry not in entries:
                raise UnsupportedError(
                    f"kernel {spec.name}: its PTX text has no entry {entry}, it has {sorted(entries)}"
                )
            return spec.ptx, f"text of kernel {spec.name} ({len(spec.ptx)} characters)", entries[entry]
        module = self._selection.entries.get(entry)
        if module is None:
            reasons = "; ".join(v.reason for v in self._selection.verdicts)
            raise UnsupportedError(f"kernel {spec.name}: no PTX for this device has an entry {entry} ({reasons})")
        return module.path, str(module.path), module.entries[entry]

    def _check(self, what: str, geometry: Geometry, function: _Function) -> None:
        """A launch that cannot work is refused when it is prepared, not somewhere in a step."""
        x, y, z = geometry.grid
        if not (0 < x < 2**31 and 0 < y < 2**16 and 0 < z < 2**16):
            raise ValueError(f"{what}: a grid of {geometry.grid} blocks cannot be launched")
        if not 0 < geometry.block <= function.max_threads:
            text = f"{what}: blocks of {geometry.block} threads, but device {self._device.name} allows 1 to"
            raise UnsupportedError(f"{text} {function.max_threads} for this kernel")
        shared = function.static_nbytes + geometry.shared_nbytes
        if shared > self._device.shared_nbytes:
            text = f"{what}: {shared} bytes of shared memory a block, but device {self._device.name} has"
            raise UnsupportedError(f"{text} {self._device.shared_nbytes}")
