"""Explain, for captures that go through a backend: every code, at the right line, and nothing left behind."""

import contextlib
import functools
import gc
from collections.abc import AsyncIterator, Callable, Iterator

import numpy as np
import pytest
from explain_rig import Rig, assert_at, assert_first

from ds41rt.capture.explain import Explanation, explain
from ds41rt.capture.explain.rules import RULES
from ds41rt.cu.backend import GpuBackend, HostBuffer, Stream
from ds41rt.cu.host import HostBackend
from ds41rt.cu.result import CudaError, Status
from ds41rt.errors import InputError, UnsupportedError

Program = Callable[[Rig], object]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    gc.freeze()  # explain collects garbage: not all of this process's
    yield rig
    gc.unfreeze()
    rig.raw.close()


def run(rig: Rig, program: Program) -> Explanation:
    """Explain a program captured on `main`; whatever it did, the streams work afterwards and nothing is left."""
    before = rig.raw.live()

    def captured(backend: GpuBackend, stream: Stream) -> None:
        assert stream == rig.main
        rig.backend = backend
        program(rig)

    found = explain(captured, backend=rig.raw, stream=rig.main)
    assert {k: n for k, n in rig.raw.live().items() if k != "graphs"} == {
        k: n for k, n in before.items() if k != "graphs"
    }
    assert rig.works()
    return found


def forked(rig: Rig) -> None:
    rig.work(rig.main)
    rig.order(rig.main, rig.fork, rig.side)
    rig.work(rig.side)
    rig.order(rig.side, rig.join, rig.main)


def test_a_good_capture(rig: Rig) -> None:
    found = run(rig, forked)
    assert (found.ok, found.first, found.later, found.captures, found.n_nodes) == (True, None, (), 1, 2)
    assert "captured well, 1 graph of 2 nodes" in found.to_text()
    assert rig.raw.live()["graphs"] == 0


# ---- the codes of a capture; every program breaks it at the line marked HERE


def waits_for_the_capturing_stream(rig: Rig) -> None:
    rig.work(rig.main, "L07.norm")
    rig.backend.synchronize(rig.main)  # HERE


def launches_a_graph(rig: Rig) -> None:
    rig.raw.begin_capture(rig.side)
    graph_exec = rig.raw.instantiate(rig.raw.end_capture(rig.side))
    try:
        rig.backend.launch_graph(graph_exec, rig.main)  # HERE
    finally:
        rig.backend.destroy_exec(graph_exec)


def joins_two_captures(rig: Rig) -> None:
    rig.backend.begin_capture(rig.side)
    rig.work(rig.side)
    rig.backend.record(rig.join, rig.side)
    rig.work(rig.main)
    rig.backend.wait(rig.main, rig.join)  # HERE


def ends_on_the_wrong_stream(rig: Rig) -> None:
    forked(rig)
    rig.backend.end_capture(rig.side)  # HERE


def forgets_to_join(rig: Rig) -> None:
    rig.work(rig.main)
    rig.backend.record(rig.fork, rig.main)
    rig.backend.wait(rig.side, rig.fork)  # HERE
    rig.work(rig.side)


def waits_for_an_event_from_outside(rig: Rig) -> None:
    rig.raw.record(rig.join, rig.side)
    rig.work(rig.main)
    rig.backend.wait(rig.main, rig.join)  # HERE


def asks_a_captured_event(rig: Rig) -> None:
    rig.work(rig.main)
    rig.backend.record(rig.fork, rig.main)
    while not rig.backend.query_event(rig.fork):  # HERE
        pass


def ends_the_capture_that_explain_began(rig: Rig) -> None:
    rig.work(rig.main)
    rig.backend.destroy_graph(rig.backend.end_capture(rig.main))  # HERE


def begins_again(rig: Rig) -> None:
    rig.backend.begin_capture(rig.main)  # HERE


NATIVE: dict[Program, int] = {
    waits_for_the_capturing_stream: 900,
    launches_a_graph: 900,
    joins_two_captures: 902,
    ends_on_the_wrong_stream: 903,
    forgets_to_join: 904,
    waits_for_an_event_from_outside: 905,
    asks_a_captured_event: 907,
    ends_the_capture_that_explain_began: 401,
    begins_again: 401,
}


@pytest.mark.parametrize("program", NATIVE, ids=lambda p: p.__name__)
def test_every_code_of_the_host_backend(rig: Rig, program: Program) -> None:
    found = run(rig, program)
    assert_first(found, program, NATIVE[program])
    assert found.first is not None
    assert found.first.code_name == Status(NATIVE[program]).name
    assert f"({NATIVE[program]})" in found.first.what


def test_a_capture_that_the_program_ends_itself(rig: Rig) -> None:
    """It is said what the program did and what to do, not what explain's own end met behind it."""

    def program(rig: Rig) -> None:
        rig.work(rig.main)
        rig.backend.destroy_graph(rig.backend.end_capture(rig.main))  # HERE
        rig.work(rig.main, "L09.outside of any capture")

    found = run(rig, program)
    assert_first(found, program, 401)
    first = found.first
    assert first is not None
    assert first.what.startswith("the captured code ended the capture that explain began; ")
    assert "explain ends the one that it began itself" in first.rule
    assert "Leave the end out" in first.fix
    assert "--self-capture" in first.fix
    assert (first.before, first.after, first.label, first.layer) == ("ACTIVE", "NONE", None, None)
    assert "not capturing" not in found.to_text()


def test_a_second_end_in_the_program(rig: Rig) -> None:
    """The line is the call's that failed, and no capture is said to have been NONE."""

    def program(rig: Rig) -> None:
        rig.raw.destroy_graph(rig.raw.end_capture(rig.main))
        rig.backend.end_capture(rig.main)  # HERE

    found = run(rig, program)
    assert_first(found, program, 401)
    assert "  no capture was open there" in found.to_text().splitlines()
    assert "NONE" not in found.to_text()


def test_all_that_is_known_of_a_failure(rig: Rig) -> None:
    first = run(rig, waits_for_the_capturing_stream).first
    assert first is not None
    assert (first.call, first.stream, first.label, first.layer) == ("cuStreamSynchronize", "main", "L07.norm", 7)
    assert (first.before, first.after) == ("ACTIVE", "INVALIDATED")
    assert first.site is not None
    assert first.site.function == "waits_for_the_capturing_stream"
    assert first.site.text == "rig.backend.synchronize(rig.main)  # HERE"
    assert [s.function for s in first.stack] == ["waits_for_the_capturing_stream", "run.<locals>.captured"]
    assert "Nobody may wait for" in first.rule
    assert "Move this call" in first.fix


@pytest.mark.parametrize("status", [s for s in Status if 900 <= s <= 908], ids=lambda s: s.name)
def test_every_code_of_a_driver(rig: Rig, status: Status) -> None:
    """Codes that the model has no situation for, as 906 and 908, are planted."""

    def program(rig: Rig) -> None:
        rig.work(rig.main)
        rig.raw.faults.fail(1, status, "fill")
        rig.work(rig.main, "L11.router")  # HERE

    def caller(rig: Rig) -> None:
        program(rig)

    first = run(rig, caller).first
    assert first is not None
    assert (first.code, first.call, first.layer) == (status, "cuMemsetD8Async", 11)
    line = next(site for site in first.stack if site.function.endswith(".program"))
    assert_at(line, program)
    assert first.rule == RULES[status].rule


def test_the_first_call_is_named_and_not_the_cascade(rig: Rig) -> None:
    def program(rig: Rig) -> None:
        rig.raw.record(rig.join, rig.side)
        for stream, event in ((rig.main, rig.join), (rig.main, rig.fork)):
            try:
                rig.backend.wait(stream, event)  # HERE
            except CudaError:
                rig.work(rig.side)
        rig.work(rig.main)

    found = run(rig, program)
    assert_first(found, program, 905)
    assert [(f.code, f.call) for f in found.later] == [(901, "cuStreamWaitEvent"), (901, "cuMemsetD8Async")]
    answer, later = found.to_text().split("later errors")
    assert "905" in answer.splitlines()[1]
    assert "901" not in answer
    assert later.count("(901)") == 2


def test_a_caught_error_that_broke_the_capture_counts(rig: Rig) -> None:
    def program(rig: Rig) -> None:
        with contextlib.suppress(CudaError):
            rig.backend.synchronize(rig.main)  # HERE

    found = run(rig, program)
    assert_first(found, program, 900)
    assert [(f.code, f.call, f.site) for f in found.later] == [(901, "cuStreamEndCapture", None)]


def test_a_caught_error_that_broke_nothing_does_not_count(rig: Rig) -> None:
    def harmless(rig: Rig) -> None:
        with pytest.raises(CudaError):
            rig.backend.copy_d2d(rig.x.ptr, 1, 64, rig.main, "from nowhere")
        rig.work(rig.main)

    found = run(rig, harmless)
    assert (found.ok, found.n_nodes) == (True, 1)
    assert len(found.notes) == 1
    assert "broke nothing" in found.notes[0]
    assert "'from nowhere'" in found.notes[0]

    def program(rig: Rig) -> None:
        harmless(rig)
        rig.backend.synchronize(rig.main)  # HERE

    assert_first(run(rig, program), program, 900)


def test_an_exception_that_has_nothing_to_do_with_cuda(rig: Rig) -> None:
    def deeper(values: list[int]) -> int:
        return sum(1 // value for value in values)  # HERE

    def program(rig: Rig) -> None:
        rig.work(rig.main)
        deeper([1, 0])

    found = run(rig, program)
    assert_first(found, deeper, None)
    assert found.first is not None
    assert found.first.what == "ZeroDivisionError: integer division or modulo by zero"
    assert (found.first.before, found.first.after) == ("ACTIVE", "ACTIVE")
    assert found.first.hints == ()
    assert "none of CUDA's" in found.first.rule


def test_the_cause_of_an_exception_comes_first(rig: Rig) -> None:
    def program(rig: Rig) -> None:
        try:
            rig.backend.copy_d2d(rig.x.ptr, 1, 64, rig.main)  # HERE
        except CudaError as e:
            raise ValueError("could not copy") from e

    assert_first(run(rig, program), program, 1)


def test_an_allocation_in_a_relaxed_capture_is_allowed_and_one_that_fails_is_named(rig: Rig) -> None:
    def allocates(rig: Rig) -> None:
        rig.work(rig.main, "L03.ffn_in")
        rig.backend.free(rig.backend.alloc("scratch", 256))  # HERE

    assert run(rig, allocates).ok
    rig.raw.faults.out_of_memory(1)
    found = run(rig, allocates)
    assert_first(found, allocates, 2)
    assert found.first is not None
    assert (found.first.call, found.first.layer, found.first.stream) == ("cuMemAlloc", 3, None)


def test_the_layer_of_a_call_without_a_label(rig: Rig) -> None:
    """That of the last labelled work in the capture, or else of the next one."""

    def event_fails(rig: Rig) -> None:
        rig.work(rig.main, "L02.embed")
        rig.raw.faults.fail(1, Status.UNKNOWN, "record")
        rig.backend.record(rig.fork, rig.main)

    def before_all_work(rig: Rig) -> None:
        rig.raw.faults.fail(1, Status.LAUNCH_OUT_OF_RESOURCES, "record")
        with pytest.raises(CudaError):
            rig.backend.record(rig.fork, rig.main)
        rig.work(rig.main, "L05.attn_in")
        rig.backend.synchronize(rig.main)

    rig.raw.faults.fail(1, Status.NOT_SUPPORTED, "record")

    def one(backend: GpuBackend, stream: Stream) -> None:
        backend.fill(rig.x.ptr, 1, 64, stream, "L02.embed")
        backend.record(rig.fork, stream)

    first = explain(one, backend=rig.raw).first
    assert first is not None
    assert (first.code, first.label, first.layer) == (801, "L02.embed", 2)
    found = run(rig, before_all_work)
    assert found.first is not None
    assert found.first.code == 900
    rig.raw.faults.fail(1, Status.NOT_SUPPORTED, "begin_capture")
    found = explain(one, backend=rig.raw)
    assert found.first is not None
    assert (found.first.call, found.first.site, found.first.layer) == ("cuStreamBeginCapture", None, None)


def test_a_capture_that_was_broken_out_of_sight(rig: Rig) -> None:
    """By a call that did not go through the backend: the next one is told, and the answer says that it is innocent."""

    def program(rig: Rig) -> None:
        rig.work(rig.main)
        with contextlib.suppress(CudaError):
            rig.raw.synchronize(rig.main)
        rig.backend.fill(rig.x.ptr, int(rig.x.nbytes), 64, rig.main)  # HERE

    found = run(rig, program)
    assert_first(found, program, 901)
    assert found.first is not None
    assert (found.first.before, found.first.after) == ("INVALIDATED", "INVALIDATED")
    assert "this line is not the cause" in found.first.rule
    assert found.first.hints == ()  # what the line contains has nothing to do with it

    def ends(rig: Rig) -> None:
        rig.work(rig.main)
        rig.raw.destroy_graph(rig.raw.end_capture(rig.main))
        rig.backend.synchronize(rig.main)

    found = run(rig, ends)
    assert found.first is not None
    assert (found.first.code, found.first.call) == (401, "cuStreamEndCapture")


# ---- unjoined forks


def test_the_fork_and_the_last_work_behind_it(rig: Rig) -> None:
    def program(rig: Rig) -> None:
        rig.backend.record(rig.fork, rig.main)
        rig.backend.wait(rig.side, rig.fork)  # HERE
        rig.work(rig.side)
        rig.order(rig.side, rig.join, rig.main)
        rig.backend.fill(rig.x.ptr, 2, 64, rig.side)  # WORK

    found = run(rig, program)
    assert_first(found, program, 904)
    assert found.first is not None
    assert found.first.stream == "side"
    assert "'side' was forked into the capture here" in found.first.what
    (work,) = found.first.related
    assert "last work on stream 'side'" in work.what
    assert_at(work.site, program, "WORK")
    assert [(f.code, f.site) for f in found.later] == [(904, None)]


def test_of_several_forks_the_unjoined_ones_are_named(rig: Rig) -> None:
    third, fourth = rig.raw.create_stream("third"), rig.raw.create_stream("fourth")

    def program(rig: Rig) -> None:
        rig.backend.record(rig.fork, rig.main)
        rig.backend.wait(rig.side, rig.fork)
        rig.work(rig.side)
        rig.backend.wait(third, rig.fork)  # HERE
        rig.work(third)
        rig.backend.wait(fourth, rig.fork)  # OTHER
        rig.work(fourth)
        rig.order(rig.side, rig.join, rig.main)

    found = run(rig, program)
    assert_first(found, program, 904)
    assert [f.stream for f in (found.first, *found.later) if f is not None] == ["third", "fourth", "main"]
    assert_at(found.later[0].site, program, "OTHER")


def test_a_fork_without_work_needs_no_join(rig: Rig) -> None:
    def program(rig: Rig) -> None:
        rig.work(rig.main)
        rig.order(rig.main, rig.fork, rig.side)

    assert run(rig, program).ok


def test_a_forked_stream_that_was_destroyed(rig: Rig) -> None:
    def program(backend: GpuBackend, stream: Stream) -> None:
        third = backend.create_stream("third")
        backend.record(rig.fork, stream)
        backend.wait(third, rig.fork)  # HERE
        backend.fill(rig.x.ptr, 1, 64, third)
        backend.destroy_stream(third)

    assert_first(explain(program, backend=rig.raw), program, 904)


# ---- captures without work


def test_a_capture_of_nothing_is_no_success(rig: Rig) -> None:
    """Work on another stream ran at once; the graph does nothing."""
    found = run(rig, lambda rig: rig.work(rig.side))
    assert (found.ok, found.captures, found.n_nodes, found.later) == (False, 0, 0, ())
    assert found.first is not None
    assert (found.first.code, found.first.site, found.first.stack) == (None, None, ())
    assert (found.first.before, found.first.after) == ("ACTIVE", "NONE")
    text = found.to_text()
    assert "the capture failed\n  what:  nothing was captured: the graph has no nodes\n" in text
    assert "Work on another stream ran" in text
    # An error that was caught and broke nothing stays a note.
    caught = run(rig, caught_and_empty)
    assert not caught.ok
    assert "nothing was captured" in caught.to_text()
    assert len(caught.notes) == 1


def caught_and_empty(rig: Rig) -> None:
    with contextlib.suppress(CudaError):
        rig.backend.copy_d2d(rig.x.ptr, 1, 64, rig.main)


def test_captures_that_the_callable_makes_itself_count(rig: Rig) -> None:
    """The given stream stays empty: said, and no failure while another graph has nodes."""

    def own(backend: GpuBackend, n: int) -> None:
        backend.begin_capture(rig.side)
        for _ in range(n):
            backend.fill(rig.x.ptr, 1, 64, rig.side)
        rig.raw.destroy_graph(backend.end_capture(rig.side))

    def program(backend: GpuBackend, stream: Stream) -> None:
        own(backend, 2)
        own(backend, 1)

    found = explain(program, backend=rig.raw)
    assert (found.ok, found.captures, found.n_nodes) == (True, 3, 3)
    assert found.notes == (
        "the capture on the given stream stayed empty; the nodes are of captures that it made itself",
    )

    def both(backend: GpuBackend, stream: Stream) -> None:
        own(backend, 1)
        backend.fill(rig.x.ptr, 1, 64, stream)

    assert explain(both, backend=rig.raw).notes == ()
    assert not explain(lambda backend, stream: own(backend, 0), backend=rig.raw).ok


def test_what_a_call_would_not_run_is_refused(rig: Rig, recwarn: pytest.WarningsRecorder) -> None:
    async def later(backend: GpuBackend, stream: Stream) -> None:
        raise AssertionError

    def generator(backend: GpuBackend, stream: Stream) -> Iterator[None]:
        yield

    async def both(backend: GpuBackend, stream: Stream) -> AsyncIterator[None]:
        yield

    class Later:
        async def __call__(self, backend: GpuBackend, stream: Stream) -> None:
            raise AssertionError

    for call, name, made in (
        (later, "later", "a coroutine"),
        (functools.partial(later), "an object of functools:partial", "a coroutine"),
        (Later(), r"an object of test_explain_backend:.*\.Later", "a coroutine"),
        (generator, "generator", "a generator"),
        (both, "both", "an asynchronous generator"),
    ):
        with pytest.raises(InputError, match=f"{name}: a call of it only makes {made}, and runs nothing"):
            explain(call, backend=rig.raw)

    async def own() -> None:
        raise AssertionError

    with pytest.raises(InputError, match="own: a call of it only makes a coroutine"):
        explain(own, backend=rig.raw, self_capture=True)
    gc.collect()
    assert not recwarn.list
    assert rig.works()


def test_an_object_is_named_by_its_type(rig: Rig) -> None:
    class Step:
        def __call__(self, backend: GpuBackend, stream: Stream) -> None:
            backend.fill(rig.x.ptr, 1, 64, stream)

    text = explain(Step(), backend=rig.raw).to_text()
    assert text.startswith("an object of test_explain_backend:test_an_object")
    assert text.endswith("Step: captured well, 1 graph of 1 node in all")


# ---- what is left behind


def test_a_lost_context(rig: Rig) -> None:
    def program(backend: GpuBackend, stream: Stream) -> None:
        backend.fill(rig.x.ptr, 1, 64, stream)
        rig.raw.faults.fail(1, Status.ILLEGAL_ADDRESS, "fill")
        backend.fill(rig.x.ptr, 1, 64, stream)  # HERE

    found = explain(program, backend=rig.raw)
    assert_first(found, program, 700)
    assert any("not cleaned up" in note for note in found.notes)
    assert "note: not cleaned up" in found.to_text()


def test_an_interrupt_passes_through(rig: Rig) -> None:
    def program(rig: Rig) -> None:
        forgets_to_join(rig)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(rig, program)
    assert rig.works()


def test_captures_that_the_program_left_open_are_ended(rig: Rig) -> None:
    def program(rig: Rig) -> None:
        rig.backend.begin_capture(rig.side)
        rig.backend.begin_capture(rig.side)  # HERE

    assert_first(run(rig, program), program, 401)


def test_a_backend_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[HostBackend] = []

    def opened(name: str) -> tuple[HostBackend, str]:
        assert name == "auto"
        made.append(HostBackend())
        return made[0], "for the test"

    monkeypatch.setattr("ds41rt.capture.explain.run.open_backend", opened)

    def program(backend: GpuBackend, stream: Stream) -> None:
        backend.fill(backend.alloc("y", 8).ptr, 1, 8, stream)

    assert explain(program).n_nodes == 1
    assert not any(made[0].live().values())
    with pytest.raises(CudaError, match="closed"):
        made[0].create_stream("late")


def test_garbage_from_before_does_not_disturb(rig: Rig) -> None:
    """A cycle that owns a buffer is collected before the capture, not in it."""
    freed: list[bool] = []

    class Owner:
        def __init__(self) -> None:
            self.me = self
            self.buf = rig.raw.alloc("owned", 64)

        def __del__(self) -> None:
            rig.raw.free(self.buf)
            freed.append(True)

    def program(backend: GpuBackend, stream: Stream) -> None:
        assert freed == [True]
        backend.fill(rig.x.ptr, 1, 64, stream)

    gc.disable()
    try:
        Owner()
        assert explain(program, backend=rig.raw).ok
    finally:
        gc.enable()


# ---- wrong use


def test_what_is_refused(rig: Rig) -> None:
    def two(backend: GpuBackend, stream: Stream) -> None:
        backend.fill(rig.x.ptr, 1, 64, stream)

    def none() -> None: ...
    def three(a: int, b: int, c: int) -> None: ...
    def keyword(a: int, *, b: int) -> None: ...
    def optional(backend: GpuBackend, stream: Stream, more: int = 0, *rest: int, **named: int) -> None:
        two(backend, stream)

    for wrong, words in ((none, "takes nothing"), (three, "takes a, b, c"), (keyword, "takes a, b")):
        with pytest.raises(InputError, match=words):
            explain(wrong, backend=rig.raw)
    with pytest.raises(InputError, match="takes backend, stream"):
        explain(two, backend=rig.raw, self_capture=True)
    with pytest.raises(InputError, match="'global'"):
        explain(two, backend=rig.raw, mode="global")
    with pytest.raises(InputError, match="leave them out"):
        explain(none, backend=rig.raw, self_capture=True, stream=rig.main)
    with pytest.raises(InputError, match="cannot be seen"):
        explain(dict, backend=rig.raw)
    with pytest.raises(UnsupportedError, match="relaxed mode alone"):
        explain(lambda stream: None, backend=rig.raw, mode="global")
    assert explain(optional, backend=rig.raw).ok
    assert explain(two, backend=rig.raw, mode="relaxed").ok
    assert rig.works()


def test_the_answer_as_data(rig: Rig) -> None:
    page = HostBuffer.pageable("page", np.random.default_rng(4).integers(0, 99, 16, dtype=np.int32))

    def program(rig: Rig) -> None:
        rig.backend.copy_h2d(rig.x.ptr, page, 64, rig.main, label="L09.upload")
        rig.backend.synchronize(rig.main)

    data = run(rig, program).as_dict()
    assert data["ok"] is False
    assert data["first"]["code"] == 900
    assert data["first"]["site"]["function"].endswith("program")
    assert data["first"]["layer"] == 9
    assert data["later"] == ()
