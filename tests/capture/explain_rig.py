"""A host backend with two streams, two events and a buffer to fill, and the lines of programs by the marks in them."""

import inspect
from collections.abc import Callable
from typing import Any

from ds41rt.capture.explain import Explanation, Site
from ds41rt.cu.backend import CaptureStatus, Event, GpuBackend, Stream
from ds41rt.cu.host import HostBackend


class Rig:
    """Programs use `backend`, which a test may wrap; `raw` stays what it is."""

    def __init__(self, raw: Any = None) -> None:
        self.raw: Any = HostBackend() if raw is None else raw
        self.backend: GpuBackend = self.raw
        self.main, self.side = self.raw.create_stream("main"), self.raw.create_stream("side")
        self.fork, self.join = self.raw.create_event("fork"), self.raw.create_event("join")
        self.x = self.raw.alloc("x", 64)

    def work(self, stream: Stream, label: str = "work") -> None:
        self.backend.fill(self.x.ptr, 7, 64, stream, label)

    def order(self, before: Stream, event: Event, after: Stream) -> None:
        self.backend.record(event, before)
        self.backend.wait(after, event)

    def works(self) -> bool:
        """Nothing captures, and a fresh forked capture on both streams succeeds."""
        probe = self.raw.capture_probe()
        if any(probe.info(s).status is not CaptureStatus.NONE for s in (self.main, self.side)):
            return False
        self.backend = self.raw
        for first, second in ((self.main, self.side), (self.side, self.main)):
            self.raw.synchronize(first)
            self.raw.begin_capture(first)
            self.work(first)
            self.order(first, self.fork, second)
            self.work(second)
            self.order(second, self.join, first)
            self.raw.destroy_graph(self.raw.end_capture(first))
        return True


def line_of(program: Callable[..., object], mark: str = "HERE") -> int:
    """The line of a program that ends with a comment with this mark."""
    lines, first = inspect.getsourcelines(program)
    found = [first + i for i, line in enumerate(lines) if line.rstrip().endswith(f"# {mark}")]
    assert len(found) == 1, (mark, lines)
    return found[0]


def assert_at(site: Site | None, program: Callable[..., object], mark: str = "HERE") -> None:
    """The site is the marked line of the program."""
    assert site is not None
    want = (inspect.getsourcefile(program), line_of(program, mark))
    assert (site.file, site.line) == want, site


def assert_first(found: Explanation, program: Callable[..., object], code: int | None, mark: str = "HERE") -> None:
    """The first failure has this code, and is at the marked line of the program."""
    assert not found.ok
    assert found.first is not None
    assert found.first.code == code, found.to_text()
    assert_at(found.first.site, program, mark)
