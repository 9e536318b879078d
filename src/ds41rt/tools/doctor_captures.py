"""The doctor's section on captures: everything in the environment and the driver that changes what a capture does.

Each finding says what a thing is set to, what that does to captures, and, where something should be done, what. Knows
the environment as a mapping and the driver as a table of calls, so that any machine can be examined anywhere.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ds41rt.cu.probe import OPTIONAL_CALLS
from ds41rt.cu.ptx import cuda_version
from ds41rt.errors import ConfigError
from ds41rt.settings import PREFIX, Settings

# What loads a profiler, a sanitizer or a debugger into the process together with the driver.
_INJECTION = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")
_INJECTION_PREFIXES = ("NV_SANITIZER_", "NV_NSIGHT_INJECTION", "NSYS_", "QUADD_INJECTION")
_INJECTED_LIBRARIES = ("sanitizer", "TreeLauncher", "ToolsInjection")

_CALLS = {
    "cuStreamGetCaptureInfo": "tells which call made a node, and what a failed capture had recorded",
    "cuGraphGetEdges": "reads the order of a captured graph's nodes",
    "cuFuncGetName": "names the kernels in a captured graph",
    "cuFuncGetParamInfo": "reads the parameters that a captured kernel has baked",
    "cuFuncLoad": "loads a kernel before it is captured, also under lazy loading",
    "cuEventElapsedTime": "gives the device times of `ds41rt timeline`",
    "cuLogsCurrent": "adds the driver's own words to the error of a failed capture",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that affects captures. `next` is what to do about it, None where it is as it should be."""

    name: str
    value: str
    effect: str
    next: str | None = None


def examine_captures(env: Mapping[str, str], default_stream: str, calls: Mapping[str, bool] | None) -> list[Finding]:
    """All findings, in a fixed order. `default_stream` is "legacy", "per-thread" or "" (not known); `calls` are those
    of `cu.probe.optional_calls`, None where no driver could be asked."""
    found = [_default_stream(default_stream)]
    for examine in (_module_loading, _launch_blocking, _connections, _exceptions, _injection, _torch_caching, _torch):
        found.append(examine(env))
    return [*found, *_own_switches(env), *_optional_calls(calls)]


def _default_stream(kind: str) -> Finding:
    effect = (
        "ds41rt captures on streams of its own that do not block: work on either default stream leaves them alone. "
        "A capture of another library on a blocking stream is lost as soon as anything uses the legacy stream"
    )
    return Finding("default stream", kind or "unknown", effect)


def _setting(name: str, unset: str, examine: Callable[[str], tuple[str, str | None]]) -> Callable[..., Finding]:
    """A finding about one variable: `unset` is its effect when it is not there, `examine` gives (effect, next)."""

    def finding(env: Mapping[str, str]) -> Finding:
        value = env.get(name)
        return Finding(name, "not set", unset) if value is None else Finding(name, repr(value), *examine(value))

    return finding


def _of_module_loading(value: str) -> tuple[str, str | None]:
    known = {
        "LAZY": "a kernel's code is loaded when it is first used",
        "EAGER": "all code is loaded with its module: opening takes longer, and nothing is loaded in a capture",
        "DEFAULT": "the driver's default: lazy since CUDA 12.2",
    }
    if value.upper() in known:
        return known[value.upper()], None
    return "is not a loading mode: what the driver makes of it is not known", "set it to LAZY or EAGER, or unset it"


_module_loading = _setting(
    "CUDA_MODULE_LOADING",
    "kernels are loaded when they are first used; ds41rt loads each of its own before any capture, other libraries "
    "should run once before they capture",
    _of_module_loading,
)


def _of_launch_blocking(value: str) -> tuple[str, str | None]:
    if value.strip() in ("", "0"):
        return "off: launches return at once", None
    return (
        "every launch waits for its end, a graph's too: missing waits and races do not show, and times mean nothing",
        "unset it, except to find the launch that fails",
    )


_launch_blocking = _setting("CUDA_LAUNCH_BLOCKING", "launches return at once", _of_launch_blocking)


def _of_connections(value: str) -> tuple[str, str | None]:
    if value.isascii() and value.isdigit() and 1 <= int(value) <= 32:
        if int(value) > 1:
            return f"streams share {value} queues to the device", None
        return (
            "all streams share one queue: a fork inside a capture, as that of the shared expert, may run one branch "
            "after the other",
            "unset it, or set it to 8 or more",
        )
    return "is not a number from 1 to 32: what the driver makes of it is not known", "set it to 8, or unset it"


_connections = _setting(
    "CUDA_DEVICE_MAX_CONNECTIONS", "streams share as many queues to the device as the driver chooses", _of_connections
)


def _of_exceptions(value: str) -> tuple[str, str | None]:
    if value.strip() in ("", "0"):
        return "off: an error on the device is reported", None
    return "an error on the device makes the process wait for a debugger: it looks as if a replay hung", "unset it"


_exceptions = _setting("CUDA_DEVICE_WAITS_ON_EXCEPTION", "an error on the device is reported", _of_exceptions)


def _injection(env: Mapping[str, str]) -> Finding:
    names = [name for name in _INJECTION if env.get(name)]
    names += sorted(name for name in env if name.startswith(_INJECTION_PREFIXES))
    if any(part in env.get("LD_PRELOAD", "") for part in _INJECTED_LIBRARIES):
        names.append("LD_PRELOAD")
    if not names:
        return Finding("profiler or sanitizer", "none", "nothing is loaded into the process together with the driver")
    return Finding(
        "profiler or sanitizer",
        ", ".join(names),
        "a tool is loaded together with the driver: it may add work and allocations to captures, run streams one after "
        "the other, and make a capture fail that works without it",
        "compare with a run without the tool before you believe a time or a failed capture",
    )


# PyTorch looks whether the variable exists: what it is set to does not matter.
_torch_caching = _setting(
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "PyTorch beside ds41rt keeps its memory pool, which its captures need",
    lambda value: (
        "whatever its value, PyTorch allocates and frees at every tensor: that ends captures in global mode, PyTorch's "
        "own among them; those of ds41rt are in relaxed mode and go on",
        "unset it (0 does not switch it off)",
    ),
)


def _torch(env: Mapping[str, str]) -> Finding:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    given = {name: env[name] for name in names if name in env}
    value = ", ".join(f"{name}={text!r}" for name, text in given.items()) or "not set"
    if any("cudamallocasync" in text.replace(" ", "").lower() for text in given.values()):
        return Finding(
            "PyTorch's allocator",
            value,
            "tensors made inside a capture become allocation nodes of the graph, whose memory no other graph may use",
            "remove backend:cudaMallocAsync where PyTorch's graphs are to be inspected or shared",
        )
    return Finding("PyTorch's allocator", value, "tensors made inside a capture come from a pool that the graph keeps")


def _own_switches(env: Mapping[str, str]) -> list[Finding]:
    try:
        settings = Settings.from_env(env)
    except ConfigError as e:
        return [Finding(f"{PREFIX} settings", "refused", str(e), "do what it says: no engine opens until then")]
    route_next = "unset it to get graphs" if settings.step_graph and not settings.device_route else None
    return [
        Finding(
            f"{PREFIX}STEP_GRAPH",
            str(settings.step_graph),
            "graph segments are captured and replayed"
            if settings.step_graph
            else "nothing is captured unless an engine is opened with mode step-graph",
        ),
        Finding(
            f"{PREFIX}DEVICE_ROUTE",
            str(settings.device_route),
            "experts are chosen on the device, which a graph needs"
            if settings.device_route
            else "experts are chosen on the host: nothing can be captured, every step is eager",
            route_next,
        ),
        *(
            Finding(
                f"{PREFIX}{name}", str(on), meaning_on if on else meaning_off, "unset it to measure" if on else None
            )
            for name, on, meaning_on, meaning_off in (
                (
                    "TRACE",
                    settings.trace,
                    "every part of every layer is read back and hashed: slow, and graphs hold copies that they do not "
                    "hold else",
                    "graphs hold what the step needs and nothing else",
                ),
                (
                    "DEVICE_ROUTE_DIAG",
                    settings.device_route_diag,
                    "routing outside of replays is checked on the host, with two more read-backs a layer",
                    "routing on the device is believed",
                ),
                (
                    "CAPTURE_WATCH",
                    settings.capture_watch,
                    "before every replay the graph's baked pointers are compared with the ledger, a stale one is "
                    "refused: slow",
                    "a replay is not checked for baked pointers that went stale",
                ),
            )
        ),
    ]


def _optional_calls(calls: Mapping[str, bool] | None) -> list[Finding]:
    found = []
    for name, version in OPTIONAL_CALLS.items():
        there = None if calls is None else calls[name]
        state = {True: "there", False: "missing", None: "unknown: no driver was asked"}[there]
        step = "a driver for CUDA {}.{} or newer has it".format(*cuda_version(version)) if there is False else None
        found.append(Finding(name, state, _CALLS[name], step))
    return found
