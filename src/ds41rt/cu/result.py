"""Status codes of the CUDA driver API that ds41rt meets, and the one place where a code becomes an exception.

Both backends raise these. This file must not import `cuda.bindings`: the numbers are part of the driver's ABI.
"""

from enum import IntEnum

from ds41rt.errors import Ds41Error


class Status(IntEnum):
    """`CUresult` values, under the driver's own names less the `CUDA_ERROR_` prefix."""

    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    NOT_INITIALIZED = 3
    DEINITIALIZED = 4
    NO_DEVICE = 100
    INVALID_DEVICE = 101
    INVALID_IMAGE = 200
    INVALID_CONTEXT = 201
    NO_BINARY_FOR_GPU = 209
    INVALID_PTX = 218
    UNSUPPORTED_PTX_VERSION = 222
    INVALID_SOURCE = 300
    FILE_NOT_FOUND = 301
    INVALID_HANDLE = 400
    ILLEGAL_STATE = 401
    NOT_FOUND = 500
    NOT_READY = 600
    ILLEGAL_ADDRESS = 700
    LAUNCH_OUT_OF_RESOURCES = 701
    LAUNCH_TIMEOUT = 702
    HOST_MEMORY_ALREADY_REGISTERED = 712
    MISALIGNED_ADDRESS = 716
    LAUNCH_FAILED = 719
    NOT_PERMITTED = 800
    NOT_SUPPORTED = 801
    STREAM_CAPTURE_UNSUPPORTED = 900
    STREAM_CAPTURE_INVALIDATED = 901
    STREAM_CAPTURE_MERGE = 902
    STREAM_CAPTURE_UNMATCHED = 903
    STREAM_CAPTURE_UNJOINED = 904
    STREAM_CAPTURE_ISOLATION = 905
    STREAM_CAPTURE_IMPLICIT = 906
    CAPTURED_EVENT = 907
    STREAM_CAPTURE_WRONG_THREAD = 908
    UNKNOWN = 999


# After one of these every further call of the context fails with the same code.
STICKY = frozenset(
    {Status.ILLEGAL_ADDRESS, Status.MISALIGNED_ADDRESS, Status.LAUNCH_FAILED, Status.LAUNCH_TIMEOUT, Status.UNKNOWN}
)


class CudaError(Ds41Error):
    """A driver call failed.

    `status` is the code, `call` the driver function's name, `detail` says which object was involved. `driver_log` are
    the driver's own lines about it, "" where it wrote none; they are part of `detail`.
    """

    driver_log = ""

    def __init__(self, status: Status, call: str, detail: str = "") -> None:
        self.status = status
        self.call = call
        self.detail = detail
        super().__init__(f"{call}: {status.name} ({int(status)})" + (f": {detail}" if detail else ""))

    @property
    def sticky(self) -> bool:
        """True when the context is lost: only closing the backend helps."""
        return self.status in STICKY


class OutOfDeviceMemory(CudaError, MemoryError):
    """A device or pinned allocation failed; the message names the buffer, its size and what is free."""

    def __init__(self, call: str, detail: str) -> None:
        super().__init__(Status.OUT_OF_MEMORY, call, detail)
