"""Fault injection for tests: calls that fail, memory that runs out, streams that lag. Nothing else uses it.

This file must not know commands or clocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ds41rt.cu.host.stream import StreamState
from ds41rt.cu.result import CudaError, OutOfDeviceMemory, Status
from ds41rt.errors import InputError

# The protocol's methods by the driver call that they make. `abort_capture` makes the same one as `end_capture`.
CALLS = {
    "alloc": "cuMemAlloc",
    "free": "cuMemFree",
    "alloc_pinned": "cuMemHostAlloc",
    "free_pinned": "cuMemFreeHost",
    "memory_info": "cuMemGetInfo",
    "create_stream": "cuStreamCreate",
    "destroy_stream": "cuStreamDestroy",
    "synchronize": "cuStreamSynchronize",
    "create_event": "cuEventCreate",
    "destroy_event": "cuEventDestroy",
    "record": "cuEventRecord",
    "wait": "cuStreamWaitEvent",
    "query_event": "cuEventQuery",
    "synchronize_event": "cuEventSynchronize",
    "elapsed_us": "cuEventElapsedTime",
    "copy_h2d": "cuMemcpyHtoDAsync",
    "copy_d2h": "cuMemcpyDtoHAsync",
    "copy_d2d": "cuMemcpyDtoDAsync",
    "fill": "cuMemsetD8Async",
    "prepare": "cuModuleGetFunction",
    "launch": "cuLaunchKernel",
    "begin_capture": "cuStreamBeginCapture",
    "capture_status": "cuStreamIsCapturing",
    "end_capture": "cuStreamEndCapture",
    "instantiate": "cuGraphInstantiate",
    "launch_graph": "cuGraphLaunch",
    "destroy_graph": "cuGraphDestroy",
    "destroy_exec": "cuGraphExecDestroy",
}
_ALLOCATIONS = frozenset({"cuMemAlloc", "cuMemHostAlloc"})


@dataclass(slots=True)
class _Planted:
    calls: frozenset[str] | None
    left: int
    status: Status


class Faults:
    """The faults of one backend. Each planted failure strikes once; its call has no effect.

    A sticky status loses the context, as a real one does. `fired` lists the driver calls that failed so far.
    """

    def __init__(self, streams: Mapping[int, StreamState], slow: set[int]) -> None:
        self.fired: list[str] = []
        self._planted: list[_Planted] = []
        self._streams = streams
        self._slow = slow
        self._slow_names: set[str] = set()

    def fail(self, n: int, status: Status, method: str | None = None) -> None:
        """Fail the n-th call from now on (1 is the next one), of all calls or of one method of the protocol.

        Raises `InputError` for n below 1, an unknown method or status 0.
        """
        if method is not None and method not in CALLS:
            raise InputError(f"method {method!r} makes no driver call that can fail; known: {', '.join(CALLS)}")
        self._plant(n, status, None if method is None else frozenset({CALLS[method]}))

    def out_of_memory(self, k: int) -> None:
        """Fail the k-th allocation from now on, device or pinned, with `OutOfDeviceMemory`."""
        self._plant(k, Status.OUT_OF_MEMORY, _ALLOCATIONS)

    def slow_stream(self, name: str) -> None:
        """Let streams of this name, present and future, run only when something that is waited for needs them."""
        self._slow_names.add(name)
        self._slow.update(handle for handle, state in self._streams.items() if state.name == name)

    def clear(self) -> None:
        """Drop what did not strike yet, and let slow streams run as others do."""
        self._planted.clear()
        self._slow_names.clear()
        self._slow.clear()

    def _plant(self, n: int, status: Status, calls: frozenset[str] | None) -> None:
        if n < 1:
            raise InputError(f"a fault can strike at call 1 or later, not at {n}")
        if not status:
            raise InputError("SUCCESS is no fault; give the status that the call shall fail with")
        self._planted.append(_Planted(calls, n, status))

    # For the backend

    def strike(self, call: str) -> CudaError | None:
        """The error that this call shall raise, if any."""
        if not self._planted:
            return None
        hit = None
        for planted in self._planted:
            if planted.calls is None or call in planted.calls:
                planted.left -= 1
                if planted.left == 0:
                    hit = planted
        self._planted = [p for p in self._planted if p.left > 0]
        if hit is None:
            return None
        self.fired.append(call)
        if hit.status is Status.OUT_OF_MEMORY:
            return OutOfDeviceMemory(call, "planted by fault injection")
        return CudaError(hit.status, call, "planted by fault injection")

    def stream_created(self, handle: int, name: str) -> None:
        if name in self._slow_names:
            self._slow.add(handle)
