"""Explain, for captures whose calls nobody sees: the line of the user's code after which a stream's status changed.

The programs call the host backend directly, as others would call PyTorch; the backend's own frames count as library.
"""

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from explain_rig import Rig, assert_at, assert_first

from ds41rt.capture.explain import Explanation, explain
from ds41rt.cu.backend import CaptureStatus, GpuBackend, Stream
from ds41rt.cu.host import HostBackend
from ds41rt.cu.result import CudaError, Status
from ds41rt.errors import InputError

Program = Callable[[Rig], object]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    gc.freeze()  # explain collects garbage: not all of this process's
    yield rig
    gc.unfreeze()
    rig.raw.close()


def run(rig: Rig, program: Program, *, own: bool = False, known: bool = True) -> Explanation:
    """Explain a program that is captured on `main`, by explain or (`own`) by itself; the streams work afterwards.

    `known`: the handle of the side stream is registered.
    """
    before = rig.raw.live()
    streams = (rig.side,) if known else ()

    def captured(stream: int) -> None:
        assert stream == rig.main
        program(rig)

    def captures() -> None:
        rig.raw.begin_capture(rig.main)
        program(rig)
        rig.raw.destroy_graph(rig.raw.end_capture(rig.main))

    if own:
        found = explain(captures, backend=rig.raw, self_capture=True, streams=(rig.main, *streams))
    else:
        found = explain(captured, backend=rig.raw, stream=rig.main, streams=streams)
    assert rig.raw.live() == before
    assert rig.works()
    assert sys.gettrace() is None
    return found


@pytest.fixture(autouse=True)
def _no_tracer() -> Iterator[None]:
    """Coverage and debuggers trace too: explain has to put back what it found."""
    before = sys.gettrace()
    sys.settrace(None)
    callbacks = list(gc.callbacks)
    yield
    assert gc.callbacks == callbacks
    sys.settrace(before)


BOTH = pytest.mark.parametrize("own", [False, True], ids=["explain begins", "own capture"])


def good(rig: Rig) -> None:
    rig.work(rig.main)
    rig.order(rig.main, rig.fork, rig.side)
    rig.work(rig.side)
    rig.order(rig.side, rig.join, rig.main)


@BOTH
def test_a_good_capture(rig: Rig, own: bool) -> None:
    found = run(rig, good, own=own)
    assert (found.ok, found.captures, found.notes) == (True, 1, ())
    assert found.n_nodes == (None if own else 2)
    assert found.to_text().endswith("captured well, 1 graph" + ("" if own else " of 2 nodes in all"))


# ---- where a line can stand


def plain(rig: Rig) -> None:
    rig.work(rig.main)
    rig.raw.synchronize(rig.main)  # HERE


def over_several_lines(rig: Rig) -> None:
    print_nothing(
        rig.x.nbytes,
        rig.raw.synchronize(rig.main),  # HERE
        rig.x.ptr,
    )


def print_nothing(*values: object) -> None: ...


def in_a_nested_function(rig: Rig) -> None:
    def inner() -> None:
        rig.raw.synchronize(rig.main)  # HERE

    inner()
    rig.raw.capture_status(rig.main)


def in_a_comprehension(rig: Rig) -> None:
    events = [rig.fork, rig.join]
    _ = [
        rig.raw.synchronize(rig.main)  # HERE
        for _ in events
    ]


def in_a_lambda(rig: Rig) -> None:
    wait: Callable[[], None] = lambda: rig.raw.synchronize(rig.main)  # noqa: E731  # HERE
    functools.reduce(lambda _a, _b: wait(), (1, 2, 3), None)


def decorated(rig: Rig) -> None:
    def checked(call: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(call)
        def checking() -> None:
            assert rig.raw.capture_status(rig.main)
            call()

        return checking

    @functools.lru_cache
    @checked
    def step() -> None:
        rig.raw.synchronize(rig.main)  # HERE

    step()


def in_a_generator(rig: Rig) -> None:
    def steps() -> Iterator[int]:
        yield 1
        rig.raw.synchronize(rig.main)  # HERE
        yield 2

    for _ in steps():
        rig.raw.capture_status(rig.main)


def between_yields(rig: Rig) -> None:
    """The consumer's line, not the generator's."""

    def steps() -> Iterator[int]:
        yield 1
        yield 2

    for _ in steps():
        rig.raw.synchronize(rig.main)  # HERE


def at_the_exit_of_a_block(rig: Rig) -> None:
    @contextlib.contextmanager
    def timed() -> Iterator[None]:
        yield
        rig.raw.synchronize(rig.main)  # HERE

    with timed():
        rig.work(rig.main)


def in_the_head_of_a_loop(rig: Rig) -> None:
    while rig.raw.synchronize(rig.main) is None:  # HERE
        rig.work(rig.main)


class Model:
    """A method of an object, called through `__call__` as modules are."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    def __call__(self) -> None:
        self.rig.work(self.rig.main)
        self.forward()

    def forward(self) -> None:
        self.rig.raw.synchronize(self.rig.main)  # HERE


PLACES = (
    plain,
    over_several_lines,
    in_a_nested_function,
    in_a_comprehension,
    in_a_lambda,
    decorated,
    in_a_generator,
    between_yields,
    at_the_exit_of_a_block,
    in_the_head_of_a_loop,
)


@BOTH
@pytest.mark.parametrize("program", PLACES, ids=lambda p: p.__name__)
def test_the_line_wherever_it_stands(rig: Rig, program: Program, own: bool) -> None:
    found = run(rig, program, own=own)
    assert_first(found, program, 900)
    assert found.first is not None
    assert (found.first.call, found.first.stream) == ("cuStreamSynchronize", "main")
    assert (found.first.before, found.first.after) == ("ACTIVE", "INVALIDATED")


@BOTH
def test_a_method(rig: Rig, own: bool) -> None:
    found = run(rig, lambda rig: Model(rig)(), own=own)
    assert_first(found, Model, 900)
    assert found.first is not None
    assert found.first.site is not None
    assert found.first.site.function == "Model.forward"
    names = [site.function for site in found.first.stack]
    assert names.index("HostBackend.synchronize") < names.index("Model.forward") < names.index("Model.__call__")


def test_a_deleted_object(rig: Rig) -> None:
    """Before Python 3.13 a tracer keeps values alive until the line is over: then it is the line that is named."""

    class Guard:
        def __del__(self) -> None:
            with contextlib.suppress(CudaError):
                rig.raw.synchronize(rig.main)  # HERE

    def program(rig: Rig) -> None:
        guard = Guard()
        rig.work(rig.main)
        del guard  # HERE
        rig.work(rig.main)

    found = run(rig, program)
    if sys.version_info < (3, 13):
        assert_first(found, program, None)
    else:
        assert_first(found, Guard, 900)


def test_a_collected_finaliser_is_named_itself(rig: Rig) -> None:
    """Case 7: garbage that frees something in the middle of a capture."""

    class Owner:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            with contextlib.suppress(CudaError):
                rig.raw.synchronize(rig.main)  # HERE

    def program(rig: Rig) -> None:
        Owner()
        gc.collect()

    found = run(rig, program)
    assert_first(found, Owner, 900)
    assert found.first is not None
    assert [s.function.split(".")[-1] for s in found.first.stack if s.file == __file__] == [
        "__del__", "program", "captured",
    ]  # fmt: skip


# ---- every code, in a capture of either kind


def merge(rig: Rig) -> None:
    rig.raw.begin_capture(rig.side)
    rig.raw.record(rig.join, rig.side)
    try:
        rig.raw.wait(rig.main, rig.join)  # HERE
    finally:
        rig.raw.abort_capture(rig.side)


def unmatched(rig: Rig) -> None:
    good(rig)
    rig.raw.end_capture(rig.side)  # HERE


def unjoined(rig: Rig) -> None:
    rig.work(rig.main)
    rig.raw.record(rig.fork, rig.main)
    rig.raw.wait(rig.side, rig.fork)  # HERE
    rig.raw.fill(rig.x.ptr, 1, 64, rig.side)  # WORK
    rig.work(rig.main)


def isolated(rig: Rig) -> None:
    rig.raw.wait(rig.main, rig.join)  # HERE


def captured_event(rig: Rig) -> None:
    rig.raw.record(rig.fork, rig.main)
    rig.raw.synchronize_event(rig.fork)  # HERE


def begun_again(rig: Rig) -> None:
    rig.raw.begin_capture(rig.main)  # HERE


CODES: dict[Program, int] = {
    merge: 902,
    unmatched: 903,
    unjoined: 904,
    isolated: 905,
    captured_event: 907,
    begun_again: 401,
}


@BOTH
@pytest.mark.parametrize("program", CODES, ids=lambda p: p.__name__)
def test_every_code(rig: Rig, program: Program, own: bool) -> None:
    rig.raw.record(rig.join, rig.side)
    assert_first(run(rig, program, own=own), program, CODES[program])


@BOTH
@pytest.mark.parametrize("status", [Status.STREAM_CAPTURE_IMPLICIT, Status.STREAM_CAPTURE_WRONG_THREAD])
def test_codes_that_the_model_has_no_situation_for(rig: Rig, status: Status, own: bool) -> None:
    def program(rig: Rig) -> None:
        rig.raw.faults.fail(1, status, "fill")
        rig.raw.fill(rig.x.ptr, 1, 64, rig.main)  # HERE

    assert_first(run(rig, program, own=own), program, status)


@BOTH
def test_an_unjoined_fork(rig: Rig, own: bool) -> None:
    found = run(rig, unjoined, own=own)
    assert_first(found, unjoined, 904)
    assert found.first is not None
    assert found.first.stream == "side"
    assert_at(found.first.related[-1].site, unjoined, "WORK")
    assert [f.code for f in found.later] == [904]
    if own:
        assert found.first.related[0].what == "the capture was ended"
        assert found.later[0].site == found.first.related[0].site
    else:
        assert found.later[0].site is None


def test_a_fork_that_was_joined_too_early(rig: Rig) -> None:
    def program(rig: Rig) -> None:
        rig.raw.record(rig.fork, rig.main)
        rig.raw.wait(rig.side, rig.fork)  # HERE
        rig.work(rig.side)
        rig.order(rig.side, rig.join, rig.main)
        rig.raw.fill(rig.x.ptr, 1, 64, rig.side)  # WORK

    found = run(rig, program)
    assert_first(found, program, 904)
    assert found.first is not None
    assert_at(found.first.related[0].site, program, "WORK")


def test_a_fork_that_cannot_be_seen_leaves_the_end(rig: Rig) -> None:
    """Nobody told of the side stream: then the failing end is all there is, and not a wrong line."""
    found = run(rig, unjoined, known=False)
    assert found.first is not None
    assert (found.first.code, found.first.site, found.first.call) == (904, None, "cuStreamEndCapture")


# ---- errors on the way


def test_later_errors_are_listed_under_the_first(rig: Rig) -> None:
    def program(rig: Rig) -> None:
        for _ in range(2):
            with contextlib.suppress(CudaError):
                rig.raw.wait(rig.main, rig.join)  # HERE
        rig.work(rig.main)

    rig.raw.record(rig.join, rig.side)
    found = run(rig, program, own=True)
    assert_first(found, program, 905)
    assert [f.code for f in found.later] == [901, 901]


@BOTH
def test_an_exception_that_has_nothing_to_do_with_cuda(rig: Rig, own: bool) -> None:
    def program(rig: Rig) -> None:
        rig.work(rig.main)
        {"a": 1}["b"]  # HERE

    found = run(rig, program, own=own)
    assert_first(found, program, None)
    assert found.first is not None
    assert (found.first.what, found.first.call) == ("KeyError: 'b'", None)
    assert "none of CUDA's" in found.first.rule


@BOTH
def test_an_exception_after_the_capture_was_broken_is_a_later_one(rig: Rig, own: bool) -> None:
    def program(rig: Rig) -> None:
        with contextlib.suppress(CudaError):
            rig.raw.synchronize(rig.main)  # HERE
        raise ValueError("fed up")

    found = run(rig, program, own=own)
    assert_first(found, program, 900)
    assert [f.what for f in found.later] == ["ValueError: fed up"]


def test_a_harmless_error_is_only_noted(rig: Rig) -> None:
    def program(rig: Rig) -> None:
        with contextlib.suppress(CudaError):
            rig.raw.copy_d2d(rig.x.ptr, 1, 64, rig.main)
        rig.work(rig.main)

    found = run(rig, program)
    assert found.ok
    assert "INVALID_VALUE" in found.notes[0]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that is installed like a library. `sync` swallows the error; `raising` turns it into a text."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "swallowing.py").write_text(
        "from ds41rt.cu.result import Status\n\n\n"
        "def sync(rig):\n"
        "    try:\n"
        "        rig.raw.synchronize(rig.main)\n"
        "    except Exception:\n"
        "        return None\n\n\n"
        "def raising(rig, text):\n"
        "    inner(rig)\n"
        "    raise RuntimeError(text)\n\n\n"
        "def inner(rig):\n"  # as C code may: without a Python exception
        "    rig.raw._streams[rig.main].capture.invalidate(Status(900), 'cuThing', 'hidden')\n\n\n"
        "class graph:\n"
        "    def __init__(self, rig):\n"
        "        self.rig = rig\n\n"
        "    def __enter__(self):\n"
        "        self.rig.raw.begin_capture(self.rig.main)\n\n"
        "    def __exit__(self, *error):\n"
        "        try:\n"
        "            self.rig.raw.destroy_graph(self.rig.raw.end_capture(self.rig.main))\n"
        "        except Exception as e:\n"
        "            raise RuntimeError(f'CUDA error: {CODES[int(e.status)]}')\n\n\n"
        "def whole(rig, broken):\n"
        "    rig.raw.begin_capture(rig.main)\n"
        "    if broken:\n"
        "        rig.raw.synchronize(rig.main)\n"
        "    rig.raw.destroy_graph(rig.raw.end_capture(rig.main))\n\n\n"
        "CODES = {\n"
        "    901: 'operation failed due to a previous error during capture',\n"
        "    904: 'capturing stream has unjoined work',\n"
        "}\n\n\n"
        "class Tensor:\n"
        "    def __init__(self, rig):\n"
        "        self.rig = rig\n\n"
        "    def item(self):\n"
        "        self.rig.raw.synchronize(self.rig.main)\n"
    )
    monkeypatch.syspath_prepend(folder)
    module = __import__("swallowing")
    yield module
    del sys.modules["swallowing"]


def test_a_library_that_swallows_the_error(rig: Rig, library: Any) -> None:
    def program(rig: Rig) -> None:
        rig.work(rig.main)
        library.sync(rig)  # HERE
        rig.work(rig.main)

    found = run(rig, program)
    assert_first(found, program, 900)
    assert found.first is not None
    assert any(site.function == "sync" for site in found.first.stack)


def test_a_library_that_says_nothing_at_all(rig: Rig, library: Any) -> None:
    def program(rig: Rig) -> None:
        library.inner(rig)  # HERE
        rig.work(rig.main)

    found = run(rig, program)
    assert_first(found, program, None)
    assert found.first is not None
    assert "no error was raised" in found.first.what
    assert "did not pass the driver's code on" in found.first.rule
    assert [f.code for f in found.later] == [901]
    assert (found.first.before, found.first.after) == ("ACTIVE", "INVALIDATED")


@pytest.mark.parametrize(
    ("text", "code", "call"),
    [
        ("CUDA error: operation not permitted when stream is capturing", 900, None),
        ("cudaMemcpyAsync failed: cudaErrorStreamCaptureUnsupported", 900, "cudaMemcpyAsync"),
        ("CUDA_ERROR_STREAM_CAPTURE_IMPLICIT from cuLaunchKernel", 906, "cuLaunchKernel"),
        ("it did not work", None, None),
    ],
)
def test_what_a_library_says_belongs_to_what_it_did(
    rig: Rig, library: Any, text: str, code: int | None, call: str | None
) -> None:
    """The capture broke silently, and in the same line the library raises an error of its own."""

    def program(rig: Rig) -> None:
        library.raising(rig, text)  # HERE

    found = run(rig, program)
    assert_first(found, program, code)
    assert found.first is not None
    assert found.first.call == call
    if code is None:
        assert [f.what for f in found.later] == [f"RuntimeError: {text}"]
    else:
        assert found.first.what == f"RuntimeError: {text}"
        assert found.later == ()


def test_a_capture_that_a_block_of_the_library_ends(rig: Rig, library: Any) -> None:
    """As `with torch.cuda.graph(...)`: its exit raises a second error behind the first."""

    def breaks() -> None:
        with library.graph(rig):
            rig.work(rig.main)
            rig.raw.synchronize(rig.main)  # HERE
            rig.work(rig.main)

    def forgets() -> None:
        with library.graph(rig):
            rig.work(rig.main)
            rig.raw.record(rig.fork, rig.main)
            rig.raw.wait(rig.side, rig.fork)  # HERE
            rig.work(rig.side)

    def raises() -> None:
        with library.graph(rig):
            raise ValueError("of the user")  # HERE

    def good() -> None:
        with library.graph(rig):
            rig.work(rig.main)

    def found(captures: Callable[[], None]) -> Explanation:
        return explain(captures, backend=rig.raw, self_capture=True, streams=(rig.main, rig.side))

    assert_first(found(breaks), breaks, 900)
    # The end that the library made, and what it says about it.
    assert [f.code for f in found(breaks).later] == [901, 901]
    assert_first(found(forgets), forgets, 904)
    assert [f.what.partition(":")[0] for f in found(forgets).later] == ["cuStreamEndCapture", "RuntimeError"]
    assert_first(found(raises), raises, None)
    assert found(raises).later == ()
    assert found(good).captures == 1
    assert rig.works()


def test_a_later_error_is_not_taken_for_the_reason(rig: Rig, library: Any) -> None:
    """The line broke the capture without a word, and then says 901, as every call would."""

    def program(rig: Rig) -> None:
        library.raising(rig, "CUDA error: operation failed due to a previous error during capture")  # HERE

    found = run(rig, program)
    assert_first(found, program, None)
    assert [f.code for f in found.later] == [901]


def test_a_call_without_python_frames_before_a_call_of_the_users(rig: Rig) -> None:
    """What C code did before a function of the user's was called, in the same line, is not that function's doing."""

    def innocent() -> int:
        return int(rig.raw.capture_status(rig.main))

    in_c: Callable[..., object] = setattr

    def program(rig: Rig) -> None:
        capture = rig.raw._streams[rig.main].capture
        print_nothing(in_c(capture, "status", CaptureStatus.INVALIDATED), innocent())  # HERE

    assert_first(run(rig, program), program, None)


def test_hints_come_from_the_statement(rig: Rig, library: Any) -> None:
    tensor = library.Tensor(rig)

    def program(rig: Rig) -> None:
        rig.work(rig.main)
        if tensor.item() > 3:  # HERE
            rig.work(rig.main)

    found = run(rig, program)
    assert_first(found, program, 900)
    assert found.first is not None
    assert [hint.split()[0] for hint in found.first.hints] == ["Reading", "A"]
    assert "torch.where instead of if" in found.to_text()


# ---- streams that are found: nobody tells of the side stream in these


class TorchStream:
    """As PyTorch's streams say which one they are."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    @property
    def cuda_stream(self) -> int:
        return self._handle


class ProtocolStream:
    """As the `__cuda_stream__` protocol has it."""

    def __init__(self, handle: int) -> None:
        self.handle: int | None = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        if self.handle is None:
            raise RuntimeError("the stream was closed")
        return 0, self.handle


class Layers:
    def __init__(self, stream: object) -> None:
        self.side_stream = stream


STREAMS: dict[str, object] = {}
HOLDERS: dict[str, Callable[[object], object]] = {
    "itself": lambda stream: stream,
    "list": lambda stream: [None, stream],
    "tuple": lambda stream: (stream,),
    "dictionary": lambda stream: {"side": stream, "other": 3},
    "attribute": Layers,
}


@pytest.mark.parametrize("kind", [TorchStream, ProtocolStream])
@pytest.mark.parametrize("holder", HOLDERS)
def test_stream_objects_that_the_code_can_see(rig: Rig, holder: str, kind: type) -> None:
    """The object was made before, so that its own methods do not show it."""
    held = HOLDERS[holder](kind(rig.side))

    def program(rig: Rig) -> None:
        assert held is not None
        rig.raw.record(rig.fork, rig.main)
        rig.raw.wait(rig.side, rig.fork)  # HERE
        rig.work(rig.side)

    assert_first(run(rig, program, known=False), program, 904)


def test_a_stream_object_in_a_global_name(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STREAMS, "side", TorchStream(rig.side))
    assert_first(run(rig, unjoined, known=False), unjoined, 904)


def test_torchs_current_stream(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.main = rig.raw.create_stream("not the first")  # whose handle, 1, is the legacy stream's on a driver
    current = [rig.main]
    torch = ModuleType("torch.cuda")
    torch.is_initialized = lambda: True  # type: ignore[attr-defined]
    torch.current_stream = lambda: TorchStream(current[0])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.cuda", torch)

    def program(rig: Rig) -> None:
        rig.raw.record(rig.fork, rig.main)
        current[0] = rig.side
        rig.raw.wait(rig.side, rig.fork)  # HERE
        rig.work(rig.side)

    def captures() -> None:
        rig.raw.begin_capture(rig.main)
        program(rig)
        rig.raw.end_capture(rig.main)

    assert_first(explain(captures, backend=rig.raw, self_capture=True), program, 904)
    assert rig.works()
    torch.is_initialized = lambda: False  # type: ignore[attr-defined]

    def unseen() -> None:
        rig.raw.begin_capture(rig.main)
        rig.raw.destroy_graph(rig.raw.end_capture(rig.main))

    with pytest.raises(InputError, match="began no capture"):
        explain(unseen, backend=rig.raw, self_capture=True)


def test_the_legacy_stream_and_closed_streams_are_not_asked(rig: Rig) -> None:
    def program(rig: Rig) -> None:
        legacy, closing = TorchStream(0), ProtocolStream(rig.side)
        rig.work(rig.main)
        closing.handle = None
        rig.work(rig.main)
        assert legacy.cuda_stream == 0

    found = run(rig, program, known=False)
    assert (found.ok, found.n_nodes) == (True, 2)


# ---- captures of the callable's own


def test_a_capture_that_is_never_ended(rig: Rig) -> None:
    def captures() -> None:
        rig.work(rig.main)
        rig.raw.begin_capture(rig.main)  # HERE
        rig.work(rig.main)

    found = explain(captures, backend=rig.raw, self_capture=True, streams=(rig.main,))
    assert_first(found, captures, None)
    assert found.first is not None
    assert "never ended" in found.first.what
    assert rig.works()


def test_several_captures_of_which_one_fails(rig: Rig) -> None:
    def capture(broken: bool) -> None:
        rig.raw.begin_capture(rig.main)
        rig.work(rig.main)
        if broken:
            rig.raw.synchronize(rig.main)  # HERE
        rig.raw.destroy_graph(rig.raw.end_capture(rig.main))

    def captures(n_good: int = 3, broken: bool = False) -> None:
        for _ in range(n_good):
            capture(False)
        capture(broken)

    found = explain(captures, backend=rig.raw, self_capture=True, streams=(rig.main,))
    assert (found.ok, found.captures) == (True, 4)
    found = explain(functools.partial(captures, 2, True), backend=rig.raw, self_capture=True, streams=(rig.main,))
    assert_first(found, capture, 900)
    assert rig.works()


def test_a_capture_that_explain_began_and_the_callable_ended(rig: Rig) -> None:
    def program(rig: Rig) -> None:
        rig.work(rig.main)
        rig.raw.destroy_graph(rig.raw.end_capture(rig.main))  # HERE
        rig.work(rig.main)

    found = run(rig, program)
    assert_first(found, program, None)
    assert found.first is not None
    assert "ended the capture that explain began" in found.first.what
    assert "Leave the end out" in found.first.fix
    assert (found.first.before, found.first.after) == ("ACTIVE", "NONE")
    assert "only once" in found.first.rule


def test_a_capture_that_is_made_within_a_library(rig: Rig, library: Any) -> None:
    def captures() -> None:
        library.whole(rig, False)

    def broken() -> None:
        library.whole(rig, True)  # HERE

    def found(call: Callable[[], None]) -> Explanation:
        return explain(call, backend=rig.raw, self_capture=True, streams=(rig.main, rig.side))

    assert found(captures).captures == 1
    assert_first(found(broken), broken, 900)
    assert rig.works()


def test_other_captures_that_are_left_open_are_ended(rig: Rig) -> None:
    def program(rig: Rig) -> None:
        rig.raw.begin_capture(rig.side)
        raise ValueError("in between")  # HERE

    assert_first(run(rig, program), program, None)


def test_a_driver_that_fails_while_forks_are_looked_for(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the probe raises stays out of the user's code."""

    def fails(*args: object) -> list[int]:
        raise CudaError(Status.ILLEGAL_ADDRESS, "cuGraphGetEdges")

    monkeypatch.setattr("ds41rt.cu.host.probe.HostProbe.unjoined", fails)
    passed: list[bool] = []

    def program(rig: Rig) -> None:
        good(rig)
        passed.append(True)

    found = run(rig, program)
    assert passed == [True]
    assert found.first is not None
    assert (found.first.code, found.first.site) == (700, None)


def test_the_begin_fails(rig: Rig) -> None:
    rig.raw.begin_capture(rig.main)
    with pytest.raises(CudaError, match="already takes part"):
        explain(lambda stream: None, backend=rig.raw, stream=rig.main)


def test_an_interrupt_passes_through(rig: Rig) -> None:
    def program(rig: Rig) -> None:
        rig.order(rig.main, rig.fork, rig.side)
        raise KeyboardInterrupt

    for own in (False, True):
        with pytest.raises(KeyboardInterrupt):
            run(rig, program, own=own)
        assert sys.gettrace() is None
        assert rig.works()


def test_the_tracer_of_somebody_else_is_put_back(rig: Rig) -> None:
    def tracer(frame: Any, event: str, arg: Any) -> None:
        return None

    sys.settrace(tracer)
    try:
        explain(lambda stream: rig.work(rig.main), backend=rig.raw, stream=rig.main)
        after = sys.gettrace()
    finally:
        sys.settrace(None)
    assert after is tracer


def test_user_code_that_exits_is_a_failure() -> None:
    """With its line, and not a capture that went well."""

    def leaves(backend: GpuBackend, stream: Stream) -> None:
        raise SystemExit(0)

    backend = HostBackend()
    found = explain(leaves, backend=backend)
    assert not found.ok
    assert "SystemExit" in found.to_text()
    backend.close()
