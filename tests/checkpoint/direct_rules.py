"""O_DIRECT's rules on any file system: what tests put in place of `os.open` and `os.preadv`."""

import errno
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from ds41rt.checkpoint import direct

_FLAG = 1 << 30  # no system's flag


class Call(NamedTuple):
    path: str
    off: int
    address: int
    nbytes: int


class DirectRules:
    """A descriptor opened with O_DIRECT takes reads whose offset and length are multiples of `align`, and whose address
    is one of `align_address`.

    `refuse(call)` may return an errno for a call that keeps the rules, `give(call)` how many bytes it gets at most, and
    `after(call)` runs when its bytes are there. `calls` are the direct reads that were allowed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, align: int = 512) -> None:
        self.align = self.align_address = align
        self.open_errno = 0
        self.refuse: Callable[[Call], int] = lambda call: 0
        self.give: Callable[[Call], int] = lambda call: call.nbytes
        self.after: Callable[[Call], None] = lambda call: None
        self.calls: list[Call] = []
        self._paths: dict[int, str] = {}
        self._open, self._preadv, self._close = os.open, os.preadv, os.close
        monkeypatch.setattr(direct, "_O_DIRECT", _FLAG)
        monkeypatch.setattr(os, "open", self._fake_open)
        monkeypatch.setattr(os, "preadv", self._fake_preadv)
        monkeypatch.setattr(os, "close", self._fake_close)

    def _fake_open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if not flags & _FLAG:
            return self._open(path, flags, *args, **kwargs)
        if self.open_errno:
            raise OSError(self.open_errno, os.strerror(self.open_errno), str(path))
        fd = self._open(path, flags & ~_FLAG, *args, **kwargs)
        self._paths[fd] = str(path)
        return fd

    def _fake_close(self, fd: int) -> None:
        self._paths.pop(fd, None)
        self._close(fd)

    def _fake_preadv(self, fd: int, buffers: Sequence[Any], off: int) -> int:
        if fd not in self._paths:
            return self._preadv(fd, buffers, off)
        (buffer,) = buffers
        memory = np.frombuffer(buffer, np.uint8)
        call = Call(self._paths[fd], off, memory.ctypes.data, memory.size)
        unaligned = off % self.align or call.address % self.align_address or call.nbytes % self.align
        code = errno.EINVAL if unaligned or not call.nbytes else self.refuse(call)
        if code:
            raise OSError(code, os.strerror(code))
        self.calls.append(call)
        n = self._preadv(fd, [memory[: self.give(call)].data], off)
        self.after(call)
        return n
