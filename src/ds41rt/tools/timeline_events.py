"""Recorded tokens as Trace Event JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Two processes: the host, with the step, the calls into the backend and every other thread on a track of its own, and the
device, with a track a stream. Arrows lead from a call to the work it began. Times are in microseconds from the start of
the first token.
"""

from collections.abc import Iterator
from typing import Any

from ds41rt.tools.timeline_backend import DeviceSpan, HostSpan, Token

HOST, DEVICE = 1, 2
_STEP, _DRIVER = "step", "driver"


def trace_events(tokens: list[Token], host_name: str, device_name: str) -> dict[str, Any]:
    """The whole file as a JSON-ready object."""
    return {"displayTimeUnit": "ms", "traceEvents": list(_events(tokens, host_name, device_name))}


def _events(tokens: list[Token], host_name: str, device_name: str) -> Iterator[dict[str, Any]]:
    tracks = list(dict.fromkeys([_STEP, _DRIVER, *(span.track for t in tokens for span in t.host)]))
    streams = list(dict.fromkeys(span.stream for t in tokens for span in t.device))
    names = {_STEP: "step", _DRIVER: "calls into the backend"}
    for pid, name, threads in ((HOST, host_name, tracks), (DEVICE, device_name, streams)):
        yield _named("process_name", pid, 0, name)
        for tid, thread in enumerate(threads, 1):
            label = names.get(thread, thread) if pid == HOST else f"stream {thread!r}"
            yield _named("thread_name", pid, tid, label)
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
    arrow = 0
    base = tokens[0].start_ns if tokens else 0
    for token in tokens:
        for span in token.host:
            yield _host_event(span, tracks.index(span.track) + 1, base, token)
        for work in token.device:
            arrow += 1
            tid = streams.index(work.stream) + 1
            event = _device_event(work, tid, base)
            yield event
            start = {"ph": "s", "pid": HOST, "tid": tracks.index(_DRIVER) + 1, "ts": _us(work.cause.start_ns, base)}
            yield {"name": "begins", "cat": "arrow", "id": arrow, **start}
            end = {"ph": "f", "bp": "e", "pid": DEVICE, "tid": tid, "ts": event["ts"]}
            yield {"name": "begins", "cat": "arrow", "id": arrow, **end}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _host_event(span: HostSpan, tid: int, base: int, token: Token) -> dict[str, Any]:
    args = {"position": token.position, **span.args}
    return {
        "ph": "X", "name": span.name, "cat": span.category, "pid": HOST, "tid": tid,
        "ts": _us(span.start_ns, base), "dur": _us(max(span.end_ns, span.start_ns), span.start_ns), "args": args,
    }  # fmt: skip


def _device_event(span: DeviceSpan, tid: int, base: int) -> dict[str, Any]:
    name = span.name if span.count == 1 else f"{span.name} to {span.last}"
    return {
        "ph": "X", "name": name, "cat": span.kind, "pid": DEVICE, "tid": tid,
        "ts": _us(span.start_ns, base), "dur": _us(max(span.end_ns, span.start_ns), span.start_ns),
        "args": {"count": span.count},
    }  # fmt: skip


def _us(end_ns: float, start_ns: float) -> float:
    return round((end_ns - start_ns) / 1000, 3)
