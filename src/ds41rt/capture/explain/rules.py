"""Why a capture fails: for each status code the rule that was broken and what to do; hints for what a line contains.

Knows no streams, no frames and no exceptions.
"""

import re
from typing import NamedTuple

from ds41rt.cu.result import Status


class Rule(NamedTuple):
    """`rule`: what must not happen in a capture. `fix`: what to do instead."""

    rule: str
    fix: str


_EVENT_FIX = "Record the event again inside the capture, or use separate events for captured and other work."
_LOST = Rule(
    "Work that ran earlier broke the device context. Captured work does not run, so it was work from before the "
    "capture or beside it; this line only was the first to be told.",
    "Run the same work without a capture and synchronise after each step (CUDA_LAUNCH_BLOCKING=1) to find it.",
)
RULES: dict[int, Rule] = {
    Status.INVALID_VALUE: Rule(
        "The driver refused the arguments of this call. In a capture this is also its answer to an event that was "
        "recorded in a capture which has ended or is invalid: such an event means nothing until it is recorded again.",
        f"Check addresses, sizes and handles of this call. {_EVENT_FIX}",
    ),
    Status.OUT_OF_MEMORY: Rule(
        "An allocation inside the capture found no memory.",
        "Allocate before the capture begins, or free memory before it.",
    ),
    Status.INVALID_HANDLE: Rule(
        "A stream, event or graph was used that does not exist, or not any more.",
        "Create it before the capture and keep it until the capture has ended.",
    ),
    Status.ILLEGAL_STATE: Rule(
        "A capture can begin only on a stream that does not capture, and end only once, on one that does.",
        "Pair every begin with one end on the same stream. Code that runs inside somebody's capture must neither begin "
        "nor end one on that stream.",
    ),
    Status.NOT_READY: Rule(
        "The answer means 'not finished yet' and breaks nothing by itself; captured work does not run in the capture.",
        "Do not poll inside a capture.",
    ),
    Status.NOT_PERMITTED: Rule(
        "The operation is not permitted here: some calls are barred while a stream captures.",
        "Make the call before the capture begins or after it has ended.",
    ),
    Status.NOT_SUPPORTED: Rule(
        "The operation cannot be put into a graph, or not on this driver.",
        "Leave it out of the capture: run it before, after, or between two graphs.",
    ),
    Status.STREAM_CAPTURE_UNSUPPORTED: Rule(
        "Nobody may wait for, or ask about, a stream that captures, nor for the whole device. In the capture modes "
        "'global' and 'thread_local' allocating, freeing, synchronising and querying are barred altogether, whatever "
        "stream they are about. An executable graph cannot be launched into a capture.",
        "Move this call before the capture or behind its end. Results exist only after a launch of the graph: read "
        "them then. Allocate before the capture.",
    ),
    Status.STREAM_CAPTURE_INVALIDATED: Rule(
        "An earlier call had already broken the capture; every call after it gets this code, so this line is not the "
        "cause.",
        "Look at the first failing call. If none is named before this one, it was made out of sight: in another "
        "thread, or by a library between two lines.",
    ),
    Status.STREAM_CAPTURE_MERGE: Rule(
        "Two captures that began separately cannot be joined into one: the event belongs to another capture.",
        "Begin one capture only and fork the other stream from it (record an event, let the other stream wait for it).",
    ),
    Status.STREAM_CAPTURE_UNMATCHED: Rule(
        "A capture has to be ended on the stream that began it, not on one that joined it.",
        "End it on the stream of the begin, after the other streams were joined back into that one.",
    ),
    Status.STREAM_CAPTURE_UNJOINED: Rule(
        "Every stream that was forked into the capture and got work has to be joined back into the first stream, after "
        "its last work, before the capture ends.",
        "After the last work on the side stream record an event there and let the capturing stream wait for it "
        "(PyTorch: capturing_stream.wait_stream(side_stream)).",
    ),
    Status.STREAM_CAPTURE_ISOLATION: Rule(
        "Captured work cannot depend on work outside of the capture: the event was recorded before the capture began, "
        "or on a stream that takes no part in it.",
        "Let the stream wait for that event before the capture begins, or record the event inside the capture. At "
        "replays the order has to come from waiting in front of the launch.",
    ),
    Status.STREAM_CAPTURE_IMPLICIT: Rule(
        "The legacy default stream waits for all blocking streams, so it cannot be used while one of those captures.",
        "Put the work on a stream of your own, created non-blocking (PyTorch: run it under torch.cuda.stream(...)).",
    ),
    Status.CAPTURED_EVENT: Rule(
        "An event that was last recorded in an open capture stands for a place in a graph: it cannot be queried, "
        "waited for by the host, or timed.",
        _EVENT_FIX,
    ),
    Status.STREAM_CAPTURE_WRONG_THREAD: Rule(
        "Except in the mode 'relaxed' a capture has to be ended in the thread that began it.",
        "Begin and end in the same thread, or begin in the mode 'relaxed'.",
    ),
    **dict.fromkeys((214, 700, 702, 710, 714, 715, 716, 717, 718, 719, 999), _LOST),
}
SILENT = Rule(
    "This line made the capture invalid, and the library that made the call did not pass the driver's code on.",
    "Look for a call in this line that waits, asks, allocates, frees, or uses the default stream or a stream outside "
    "of the capture, and move it out of the capture.",
)
OTHER = Rule(
    "The driver refused a call while the capture was open.",
    "Look the code up in the driver's documentation of this function.",
)
NOT_CUDA = Rule(
    "An exception that is none of CUDA's left the captured code; the driver had nothing against the capture so far.",
    "Fix the exception, and run explain again for what comes after this line.",
)
ENDED = Rule(
    "A capture can end only once, and explain ends the one that it began itself.",
    "Leave the end out of the captured code. Code that is to begin and end its own capture takes no arguments: run it "
    "with --self-capture (self_capture).",
)
EMPTY = Rule(
    "A graph holds the work that is put on the capturing stream, and on streams forked from it, while the capture is "
    "open. There was none, so a launch of the graph would do nothing.",
    "Put the work on the stream that is given (PyTorch: under torch.cuda.stream(torch.cuda.ExternalStream(stream))), "
    "where a backend is given through that one. Work on another stream ran, or was captured, elsewhere. A callable "
    "that only returns a coroutine or a generator has done nothing yet: let it run that.",
)

COLLECTED = (
    "Python's garbage collector ran during this line: a finaliser of some unrelated object, which frees or unloads "
    "something, may have made the call. Collect before the capture (gc.collect()) and pause the collector in it."
)


def rule_of(code: int | None) -> Rule:
    """The rule for a status code; None is a line that broke the capture without a code."""
    return SILENT if code is None else RULES.get(code, OTHER)


# (pattern in the text of a statement that broke a capture, what that means)
_HINTS = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (
            r"\.item\(|\.tolist\(|\bbool\(|\bfloat\(|\bint\(",
            "Reading a value of a CUDA tensor waits for the device. Keep it on the device (torch.where instead of if), "
            "or read it after the graph was launched.",
        ),
        (
            r"\.cpu\(|\.numpy\(|\.to\(\s*['\"]cpu",
            "A copy to the host waits for the device. Copy into a pinned tensor with non_blocking=True, and read it "
            "after a launch of the graph and a synchronise.",
        ),
        (r"\bprint\(|\brepr\(|\bstr\(", "Printing a CUDA tensor reads its values and so waits for the device."),
        (
            r"^\s*(if|elif|while|assert)\b",
            "A condition on a CUDA tensor reads its value and so waits for the device; a graph has no branches.",
        ),
        (
            r"(?i)synchronize\(|query\(|elapsed_?time\(",
            "Waiting and asking have no place in a capture: nothing runs before the graph is launched.",
        ),
        (
            r"nonzero\(|masked_select\(|unique\(|\[[^\]]*[<>=]=?[^\]]*\]",
            "A result whose size depends on values has to wait for them.",
        ),
        (
            r"\b(empty|zeros|ones|full|rand\w*|arange|tensor)(_like)?\(|\.clone\(|\.contiguous\(|[aA]lloc",
            "An allocation. PyTorch serves the capturing stream from the private pool of the graph; on any other "
            "stream, or with caching off, it may call cudaMalloc, which the modes global and thread_local bar. "
            "Allocate before the capture and use out= arguments, or allocate on the capturing stream in "
            "torch.cuda.graph.",
        ),
        (
            r"empty_cache\(|\bdel\b|cuMemFree|cudaFree",
            "Freeing device memory is barred in the modes global and thread_local. Free after the capture.",
        ),
        (
            r"wait_stream\(|wait_event\(",
            "PyTorch: fork with side.wait_stream(capturing) and join with capturing.wait_stream(side), both inside the "
            "capture.",
        ),
        (
            r"backward\(",
            "Gradients are computed on the streams of the forward pass: run forward and backward on the capturing "
            "stream, after a warm-up on a side stream.",
        ),
    )
)


def hints(statement: str) -> tuple[str, ...]:
    """What is known of things that the text of a failing statement contains."""
    return tuple(text for pattern, text in _HINTS if pattern.search(statement))
