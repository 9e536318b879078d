"""What the exceptions of other CUDA libraries say: the status code behind one, and the function that failed.

Libraries agree on nothing but the names and texts of the codes, so those are looked for. Imports no such library.
"""

import re

from ds41rt.cu.result import CudaError, Status

# The runtime's names of codes, where they are not the driver's in another spelling. The numbers are the same.
_RUNTIME_NAMES = {
    "MemoryAllocation": Status.OUT_OF_MEMORY,
    "InvalidResourceHandle": Status.INVALID_HANDLE,
    "LaunchFailure": Status.LAUNCH_FAILED,
}
_RUNTIME_NAMES |= {"".join(word.capitalize() for word in status.name.split("_")): status for status in Status}
_DRIVER_NAMES = {status.name: status for status in Status}
# Texts of the codes that are only given while a stream captures.
_TEXTS = {
    "not permitted when stream is capturing": Status.STREAM_CAPTURE_UNSUPPORTED,
    "failed due to a previous error during capture": Status.STREAM_CAPTURE_INVALIDATED,
    "merge of separate capture sequences": Status.STREAM_CAPTURE_MERGE,
    "not ended in the same stream as it began": Status.STREAM_CAPTURE_UNMATCHED,
    "capturing stream has unjoined work": Status.STREAM_CAPTURE_UNJOINED,
    "dependency created on uncaptured work": Status.STREAM_CAPTURE_ISOLATION,
    "make the legacy stream depend on a capturing": Status.STREAM_CAPTURE_IMPLICIT,
    "event last recorded in a capturing stream": Status.CAPTURED_EVENT,
    "thread-local capture sequence from another thread": Status.STREAM_CAPTURE_WRONG_THREAD,
}
_NAME = re.compile(r"cudaError(?P<runtime>[A-Z]\w+)|CUDA_ERROR_(?P<driver>[A-Z_]+)")
_FUNCTION = re.compile(r"\b(cu(?:da)?[A-Z][a-z]\w+)")


def code_of(error: BaseException) -> int | None:
    """The CUDA status code behind an exception, None if there is none.

    Ours; an attribute that holds it (PyTorch: `error_code`, CuPy: `status`); the code's name or text in the message.
    """
    if isinstance(error, CudaError):
        return int(error.status)
    text = str(error)
    if "cuda" in f"{type(error).__module__}.{type(error).__name__} {text}".lower():
        for attribute in ("error_code", "status"):
            value = getattr(error, attribute, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return int(value)
    named = _NAME.search(text)
    found = None
    if named is not None:
        found = _RUNTIME_NAMES.get(named["runtime"]) if named["runtime"] else _DRIVER_NAMES.get(named["driver"])
    if found is None:
        found = next((status for part, status in _TEXTS.items() if part in text), None)
    return None if found is None else int(found)


def code_name(code: int) -> str:
    """The name of a code, "UNKNOWN" for one that we have no name for."""
    try:
        return Status(code).name
    except ValueError:
        return Status.UNKNOWN.name


def function_of(error: BaseException | None, *texts: str) -> str | None:
    """The CUDA function that the exception, or else the first of some texts that names one, speaks of."""
    if isinstance(error, CudaError):
        return error.call
    for text in ("" if error is None else str(error), *texts):
        for name in _FUNCTION.findall(text):
            if not name.startswith("cudaError"):
                return str(name)
    return None
