"""Ctrl-C that waits: for work that must not be left half done and does not take long. Knows nothing of what is done."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """SIGINT that arrives in the block takes effect behind it, however often it came. In other threads than the main
    one, where Python delivers no signal, there is nothing to do."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is None:  # a handler that was not installed from Python cannot be put back
        yield
        return
    came = False

    def note(*_: object) -> None:
        nonlocal came
        came = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
