"""`ds41rt capture explain`: run a capture, an engine's or a Python callable's, and name the call that broke it."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path

from ds41rt.capture.explain import Explanation, explain, from_recording, takes
from ds41rt.cu.backend import GpuBackend, open_backend
from ds41rt.cu.call_site import Frame
from ds41rt.cu.recording import RecordingBackend
from ds41rt.engine import Engine, configured_backend
from ds41rt.errors import Ds41Error, InputError, UnsupportedError
from ds41rt.tools.progress import ProgressBar

# Position 0 runs eagerly, the next token captures every segment, the one after it replays them.
_N_TOKENS = 3


def explain_engine(backend: GpuBackend, path: Path, expert_slots: int | None = None) -> Explanation:
    """Let an engine capture its step segments on `backend`, and explain the outcome.

    Raises what opening the engine raises, `UnsupportedError` where it captures nothing, and `Ds41Error` for a capture
    that failed although every call was well.
    """
    recorder = RecordingBackend(backend)
    notes: list[str] = []
    left: Exception | None = None
    with ExitStack() as stack:
        bar = stack.enter_context(ProgressBar("loading"))
        engine = stack.enter_context(
            Engine.open(path, mode="step-graph", backend=recorder.as_backend, expert_slots=expert_slots, progress=bar)
        )
        if not engine.machine.step_graph:
            why = "layer 0 needs the host" if engine.device_route else "experts are routed on the host"
            raise UnsupportedError(f"{path}: the engine captures nothing here, there is nothing to explain: {why}")
        seq = stack.enter_context(engine.new_sequence())
        token = next(t for t in range(engine.config.vocab) if t != engine.config.image_token)
        try:
            for _ in range(_N_TOKENS):
                engine.decode_step(seq, token)
        except Ds41Error as error:
            left = error
        seg = engine.machine.seg
        failed = left is not None or seg.capture_failures > 0
        if seg.capture_failures and left is None:
            notes.append("the engine goes on without graphs: its tokens are right, and slower")
    if failed and left is None and not recorder.troubles:
        raise Ds41Error(f"{path}: a capture failed, and no call to the backend did; the warning says why")
    return from_recording(
        f"engine of {path}", recorder, left, _is_engines, notes, failed=failed, first_counts=left is None
    )


def _is_engines(frame: Frame) -> bool:
    return frame.module.startswith("ds41rt.") and not frame.module.startswith("ds41rt.capture.")


@contextmanager
def _importable(folder: str) -> Iterator[None]:
    """As `python -m` does: what lies in the working directory can be imported, also while the callable runs."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _load(text: str) -> Callable[..., object]:
    """The callable "module:function". Raises `InputError` saying what is missing."""
    name, colon, function = text.partition(":")
    if not (name and colon and function):
        raise InputError(f"--call {text!r}: give module:function, for example model:step")
    try:
        found: object = import_module(name)
    except (Exception, SystemExit) as e:
        raise InputError(f"--call {text!r}: module {name!r} cannot be imported: {type(e).__name__}: {e}") from e
    for part in function.split("."):
        if not hasattr(found, part):
            raise InputError(f"--call {text!r}: {name!r} has no {function!r}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"--call {text!r}: is of type {type(found).__name__} and cannot be called")
    return found


def _explain_call(args: argparse.Namespace) -> Explanation:
    # What the module and the callable print is no result of ours.
    with _importable(os.getcwd()), redirect_stdout(sys.stderr):
        call = _load(args.call)
        name = configured_backend(args.backend)
        if takes(call, args.self_capture) < 2:
            if args.backend == "host" or args.schedule != "lazy":
                raise InputError(
                    f"--call {args.call}: takes no backend, so its capture is one of the CUDA driver; leave --backend "
                    "host and --schedule out, or let it take the backend and the stream"
                )
            name = "cuda"
        backend, _ = open_backend(name, schedule=args.schedule)
        try:
            return explain(call, backend=backend, mode=args.capture_mode, self_capture=args.self_capture)
        finally:
            backend.close()


def capture_explain(args: argparse.Namespace) -> int:
    if args.call is None and (args.self_capture or args.capture_mode is not None):
        raise InputError("--self-capture and --capture-mode go with --call; an engine makes its captures its own way")
    if args.call is not None and args.expert_slots is not None:
        raise InputError("--expert-slots goes with a CHECKPOINT, not with --call")
    if args.call is not None:
        found = _explain_call(args)
    else:
        backend, _ = open_backend(configured_backend(args.backend), schedule=args.schedule)
        try:
            found = explain_engine(backend, args.checkpoint, args.expert_slots)
        finally:
            backend.close()
    print(json.dumps(found.as_dict()) if args.json else found.to_text())
    return 0 if found.ok else 1
