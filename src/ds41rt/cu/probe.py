"""Finding out whether there is a GPU: one `cuInit`, a typed answer, and what each device is.

The bindings come in as an argument: `ds41rt.cu.driver` alone imports them.
"""

import os
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ds41rt.cu.driver_errors import driver_text, to_status
from ds41rt.cu.result import CudaError, Status
from ds41rt.errors import UnsupportedError

# Calls that ds41rt does without where they are missing, in the form it uses: the CUDA version that brought it.
OPTIONAL_CALLS = {
    "cuStreamGetCaptureInfo": 12030,
    "cuGraphGetEdges": 12030,
    "cuFuncGetName": 12030,
    "cuFuncGetParamInfo": 12040,
    "cuFuncLoad": 12040,
    "cuEventElapsedTime": 12080,
    "cuLogsCurrent": 12090,
}

# The process that initialised CUDA. A forked child inherits the memory but not the driver's state.
_initialised_pid: int | None = None


class GpuState(Enum):
    """What the probe found. The first three mean that this machine has no usable GPU by nature, not by fault."""

    NO_BINDINGS = "the Python package cuda-bindings cannot be imported"
    NO_LIBRARY = "no driver library"
    NO_DEVICE = "no device"
    FAILED = "the driver did not start"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device. `shared_nbytes` is the most shared memory that a block can ask for; `integrated` says that it shares
    the host's memory."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    n_multiprocessors: int
    memory_nbytes: int
    shared_nbytes: int
    l2_nbytes: int
    integrated: bool


@dataclass(frozen=True, slots=True)
class Probe:
    """The answer: `detail` is the driver's own text, `driver_version` is `cuDriverGetVersion`'s (13000 = CUDA 13.0)."""

    state: GpuState
    detail: str = ""
    driver_version: int = 0
    devices: tuple[DeviceInfo, ...] = ()

    def __str__(self) -> str:
        return self.state.value + (f": {self.detail}" if self.detail else "")


def probe_driver(cu: Any) -> Probe:
    """Initialise the driver and list its devices.

    Raises `UnsupportedError` in a forked child of a process that had initialised CUDA, and `CudaError` when a driver
    that started cannot describe its devices.
    """
    global _initialised_pid
    check_fork()
    try:
        (code,) = cu.cuInit(0)
    except RuntimeError as e:
        if not _is_missing_library(e):
            raise
        return Probe(GpuState.NO_LIBRARY, str(e))
    except ValueError as e:
        # From 13.3 on the bindings parse an environment variable when they start.
        switch = "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM"
        return Probe(GpuState.FAILED, f"the bindings did not start ({e}); is {switch} set to something but 0 or 1?")
    if int(code) == Status.NO_DEVICE:
        return Probe(GpuState.NO_DEVICE, driver_text(cu, code))
    if code:
        return Probe(GpuState.FAILED, f"cuInit: {driver_text(cu, code)}")
    _initialised_pid = os.getpid()
    version = _value(cu, "cuDriverGetVersion")
    count = _value(cu, "cuDeviceGetCount")
    if count == 0:
        return Probe(GpuState.NO_DEVICE, "the driver lists no device", version)
    return Probe(GpuState.READY, "", version, tuple(_describe(cu, i) for i in range(count)))


def optional_calls(cu: Any) -> dict[str, bool]:
    """Which of `OPTIONAL_CALLS` this driver and these bindings have. For after `probe_driver`: the driver is asked."""
    found = {}
    for name, version in OPTIONAL_CALLS.items():
        code, address, *_ = cu.cuGetProcAddress(name.encode(), version, 0)
        found[name] = not code and bool(address) and hasattr(cu, name)
    return found


def check_fork() -> None:
    """Raise `UnsupportedError` in a forked child of the process that initialised CUDA."""
    if _initialised_pid is not None and _initialised_pid != os.getpid():
        raise UnsupportedError(
            f"process {os.getpid()} is a forked child of process {_initialised_pid}, which had initialised CUDA; "
            "a driver does not survive a fork: start workers with the multiprocessing method 'spawn'"
        )


def _describe(cu: Any, ordinal: int) -> DeviceInfo:
    device = _value(cu, "cuDeviceGet", ordinal)
    attributes = cu.CUdevice_attribute

    def attribute(name: str) -> int:
        return int(_value(cu, "cuDeviceGetAttribute", getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}"), device))

    return DeviceInfo(
        ordinal,
        _value(cu, "cuDeviceGetName", 256, device).split(b"\0")[0].decode(errors="replace"),
        (attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        attribute("MULTIPROCESSOR_COUNT"),
        int(_value(cu, "cuDeviceTotalMem", device)),
        attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        attribute("L2_CACHE_SIZE"),
        attribute("INTEGRATED") != 0,
    )


def _value(cu: Any, call: str, *args: Any) -> Any:
    code, value = getattr(cu, call)(*args)
    if code:
        raise CudaError(to_status(code), call, driver_text(cu, code))
    return value


def _is_missing_library(error: RuntimeError) -> bool:
    """True for exactly what the bindings raise when there is no driver library: a class of its own, or, before 13.4,
    a plain RuntimeError."""
    if type(error) is RuntimeError:
        return str(error).startswith("Failed to dlopen")
    return type(error).__name__ == "DynamicLibNotFoundError"
