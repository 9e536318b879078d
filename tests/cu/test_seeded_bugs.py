"""Twelve bugs that CUDA programs have, each seeded into a small program: found under every schedule, with names."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tiny_kernels import GATHER, SCALE, random_i32, upload

from ds41rt.cu.backend import HostBuffer, Stream
from ds41rt.cu.host import HostBackend
from ds41rt.cu.host.race_report import RaceError
from ds41rt.cu.result import CudaError, Status

HERE = "test_seeded_bugs.py:"


class Step:
    """A step of a tiny decoder: fetch an expert into a slot, compute with it through a table, read a header back."""

    def __init__(self, schedule: str) -> None:
        self.backend = backend = HostBackend(schedule, race_detection=True)
        self.main, self.fetch = backend.create_stream("compute"), backend.create_stream("fetch")
        self.fetched, self.computed = backend.create_event("fetched"), backend.create_event("computed")
        rng = np.random.default_rng(12)
        self.slot = backend.alloc("slot 5", 64)
        self.staging = backend.alloc_pinned("expert staging", 64)
        self.staging.array.view(np.int32)[:] = random_i32(rng, 16)
        self.header = backend.alloc_pinned("route header", 64)
        self.header.array[:] = 77
        self.out = backend.alloc("ffn out", 64)
        self.table = upload(backend, self.main, "slot table", np.array([self.slot.ptr], np.uint64))
        backend.copy_h2d(self.slot.ptr, self.staging, 64, self.main, label="warm up")
        backend.synchronize(self.main)
        args = {"table": self.table, "out": self.out.ptr, "n": 1, "width": 16}
        self.ffn = backend.prepare(GATHER, args, "L04.ffn")
        self.scale = backend.prepare(SCALE, {"x": self.out.ptr, "a": 3, "n": 16}, "L04.scale")

    def fetch_expert(self) -> None:
        self.backend.copy_h2d(self.slot.ptr, self.staging, 64, self.fetch, label="expert copy")

    def read_header(self) -> None:
        self.backend.copy_d2h(self.header, self.out.ptr, 64, self.main, label="header copy")

    def order(self, a: Stream, b: Stream) -> None:
        event = self.fetched if a == self.fetch else self.computed
        self.backend.record(event, a)
        self.backend.wait(b, event)

    def correct(self) -> list[int]:
        """The step as it should be."""
        backend = self.backend
        self.fetch_expert()
        self.order(self.fetch, self.main)
        backend.launch(self.ffn, self.main)
        backend.launch(self.scale, self.main)
        self.read_header()
        self.order(self.main, self.fetch)
        self.fetch_expert()
        backend.synchronize(self.main)
        backend.synchronize(self.fetch)
        values: list[int] = self.header.array.view(np.int32).tolist()
        self.staging.array[:] = 1
        return values


@pytest.fixture(params=["lazy", "eager", "random:1", "random:2"])
def step(request: pytest.FixtureRequest) -> Iterator[Step]:
    step = Step(request.param)
    yield step
    step.backend.close()


def races(step: Step, *parts: str) -> None:
    """The next synchronise reports a race and its text has all of `parts`; so does every later look at it."""
    with pytest.raises(RaceError) as info:
        step.backend.synchronize(step.main)
    for part in (*parts, HERE):
        assert part in str(info.value)
    assert set(info.value.races) <= set(step.backend.races)


def fails(status: Status, call: Any, *parts: str) -> None:
    with pytest.raises(CudaError) as info:
        call()
    assert info.value.status == status
    for part in parts:
        assert part in str(info.value)


def test_the_step_without_a_bug(step: Step) -> None:
    values = step.correct()
    assert values == (random_i32(np.random.default_rng(12), 16) * 3).tolist()
    assert not step.backend.races


def test_1_a_missing_event_wait(step: Step) -> None:
    step.backend.launch(step.scale, step.main)
    step.backend.record(step.computed, step.main)
    step.backend.copy_d2h(step.header, step.out.ptr, 64, step.fetch, label="header copy")
    races(step, "'L04.scale'", "'compute'", "'header copy'", "'fetch'", "'ffn out'", "0..64")


@pytest.mark.parametrize("behind_the_back", [True, False])
def test_2_a_pinned_buffer_rewritten_while_a_copy_still_reads_it(step: Step, behind_the_back: bool) -> None:
    step.fetch_expert()
    if behind_the_back:
        step.staging.array.data[8:12] = b"next"
    else:
        step.staging.array[8:12] = 5
    with pytest.raises(RaceError) as info:
        step.backend.synchronize(step.fetch)
    for part in ("'expert copy'", "'fetch'", "'expert staging'", "the host (write", "8..12", HERE):
        assert part in str(info.value)


def test_3_a_device_buffer_freed_while_a_kernel_is_queued(step: Step) -> None:
    step.backend.launch(step.scale, step.main)
    step.backend.free(step.out)
    races(step, "'L04.scale'", "'compute'", "the host (free", "'ffn out'")


def test_4_a_captured_copy_from_a_host_buffer_that_died(step: Step) -> None:
    backend = step.backend
    backend.begin_capture(step.main)
    backend.copy_h2d(step.slot.ptr, step.staging, 64, step.main, label="expert copy")
    graph_exec = backend.instantiate(backend.end_capture(step.main))
    backend.free_pinned(step.staging)

    def replay() -> None:
        backend.launch_graph(graph_exec, step.main)
        backend.synchronize(step.main)

    fails(Status.ILLEGAL_ADDRESS, replay, "'expert copy'", "'expert staging'", "which was freed")


def test_5_an_unjoined_fork(step: Step) -> None:
    backend = step.backend
    backend.begin_capture(step.main)
    backend.launch(step.scale, step.main)
    step.order(step.main, step.fetch)
    step.fetch_expert()
    fails(
        Status.STREAM_CAPTURE_UNJOINED, lambda: backend.end_capture(step.main), "'fetch'", "'compute'", "'expert copy'"
    )


def test_6_an_event_recorded_outside_the_capture(step: Step) -> None:
    backend = step.backend
    step.fetch_expert()
    backend.record(step.fetched, step.fetch)
    backend.begin_capture(step.main)
    fails(
        Status.STREAM_CAPTURE_ISOLATION,
        lambda: backend.wait(step.main, step.fetched),
        "'compute'",
        "'fetched'",
        "outside",
    )


def test_7_a_header_read_before_the_synchronise(step: Step) -> None:
    step.backend.launch(step.scale, step.main)
    step.read_header()
    assert len(step.header.array.view(np.int32)[:4].tolist()) == 4
    races(step, "'header copy'", "'compute'", "the host (read", "0..16 of 'route header'")


def test_8_a_slot_overwritten_while_its_expert_computes(step: Step) -> None:
    """The kernel reaches the slot through the table alone."""
    step.backend.launch(step.ffn, step.main)
    step.fetch_expert()
    with pytest.raises(RaceError) as info:
        step.backend.synchronize(step.main)
    for part in ("'L04.ffn'", "'compute'", "'expert copy'", "'fetch'", "'slot 5'", "span 0", "0..64", HERE):
        assert part in str(info.value)


def test_9_an_out_of_range_read_by_one_element(step: Step) -> None:
    backend = step.backend
    launch = backend.prepare(SCALE, {"x": step.out.ptr + 4, "a": 3, "n": 16}, "L04.scale")

    def run() -> None:
        backend.launch(launch, step.main)
        backend.synchronize(step.main)

    fails(Status.ILLEGAL_ADDRESS, run, "'L04.scale'", "(scale)", "'x'", "64 bytes", "offset 4 of 'ffn out'")


def test_10_a_double_end(step: Step) -> None:
    step.backend.begin_capture(step.main)
    step.backend.end_capture(step.main)
    fails(Status.ILLEGAL_STATE, lambda: step.backend.end_capture(step.main), "cuStreamEndCapture", "'compute'")


@pytest.mark.parametrize("ask", ["synchronize", "query_event", "synchronize_event"])
def test_11_a_query_on_a_capturing_stream(step: Step, ask: str) -> None:
    backend = step.backend
    backend.begin_capture(step.main)
    backend.launch(step.scale, step.main)
    backend.record(step.computed, step.main)
    if ask == "synchronize":
        fails(Status.STREAM_CAPTURE_UNSUPPORTED, lambda: backend.synchronize(step.main), "'compute'", "capturing")
    else:
        fails(Status.CAPTURED_EVENT, lambda: getattr(backend, ask)(step.computed), "'computed'", "capture")
    fails(Status.STREAM_CAPTURE_INVALIDATED, lambda: backend.end_capture(step.main), "'compute'", HERE)


def test_12_two_executables_over_the_same_buffers_on_unordered_streams(step: Step) -> None:
    backend, execs = step.backend, []
    for label in ("segment 1", "segment 2"):
        backend.begin_capture(step.main)
        backend.fill(step.out.ptr + 16, 7, 16, step.main, label=label)
        execs.append(backend.instantiate(backend.end_capture(step.main)))
    backend.launch_graph(execs[0], step.main)
    backend.launch_graph(execs[1], step.fetch)
    races(step, "'segment 1'", "'segment 2'", "on compute", "on fetch", "captured at", "16..32 of 'ffn out'")


def test_4_a_pageable_source_lives_as_long_as_its_graph(step: Step) -> None:
    """The other half of bug 4 cannot happen: a graph keeps a pageable array alive."""
    backend = step.backend
    page = random_i32(np.random.default_rng(1), 16)
    backend.begin_capture(step.main)
    backend.copy_h2d(step.out.ptr, HostBuffer.pageable("page", page.copy()), 64, step.main)
    graph_exec = backend.instantiate(backend.end_capture(step.main))
    backend.launch_graph(graph_exec, step.main)
    backend.synchronize(step.main)
    assert np.array_equal(backend.memory.bytes(step.out.ptr, 64).view(np.int32), page)
