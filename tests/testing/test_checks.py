"""The assertions of `ds41rt.testing`: each of them fails, with names, when there is something to say."""

import numpy as np
import pytest

from ds41rt.cu.host import HostBackend
from ds41rt.testing import assert_no_leaks, assert_no_open_capture, assert_no_races


def test_a_leak_is_named() -> None:
    backend = HostBackend()
    assert_no_leaks(backend)
    buf, host = backend.alloc("kv", 64), backend.alloc_pinned("ring", 128)
    stream, event = backend.create_stream("main"), backend.create_event("e")
    with pytest.raises(AssertionError, match=r"host backend: 2 buffers, 1 streams, 1 events; 'kv' \(64 .*'ring' \(128"):
        assert_no_leaks(backend)
    backend.free(buf)
    backend.free_pinned(host)
    backend.destroy_event(event)
    with pytest.raises(AssertionError, match=r"host backend: 1 streams$"):
        assert_no_leaks(backend)
    backend.destroy_stream(stream)
    assert_no_leaks(backend)


def test_an_open_capture_is_counted() -> None:
    backend = HostBackend()
    streams = [backend.create_stream(name) for name in "ab"]
    assert_no_open_capture(backend)
    for stream in streams:
        backend.begin_capture(stream)
    with pytest.raises(AssertionError, match="2 captures are still open"):
        assert_no_open_capture(backend)
    for stream in streams:
        backend.abort_capture(stream)
    assert_no_open_capture(backend)


def test_a_race_that_nobody_waited_for_is_named() -> None:
    backend = HostBackend(race_detection=True)
    a, b = backend.create_stream("a"), backend.create_stream("b")
    buf = backend.alloc("kv", 64)
    backend.fill(buf.ptr, int(np.random.default_rng(0).integers(256)), 64, a, label="clear")
    assert_no_races(backend)
    backend.fill(buf.ptr + 32, 7, 8, b, label="mark")
    with pytest.raises(AssertionError, match=r"(?s)'clear'.*'a'.*'kv'.*'mark'.*'b'"):
        assert_no_races(backend)
