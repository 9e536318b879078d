"""Finds the streams that a frame can see: objects of any library that say which driver stream they stand for.

Types are asked, not objects: an attribute of an unknown object may compute something, or call the driver.
"""

import sys
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

from ds41rt.capture.explain.sources import Owner

# The legacy stream: it never captures, and asking about it while a blocking stream does is an error.
_LEGACY = frozenset({0, 1})
# What of a list or dictionary is looked at.
_MOST_ITEMS = 64


class StreamObjects:
    """Handles of the stream objects seen so far, the user's first.

    Keeps every stream object alive, so that no handle is asked about after its stream was destroyed by a finaliser. One
    that was closed by hand says so itself: its handle is read anew each time.
    """

    def __init__(self, owner: Owner, handles: tuple[int, ...]) -> None:
        self._owner = owner
        self._given = handles
        self._objects: list[Any] = []
        self._is_stream: dict[type, str | None] = {}

    def look(self, frame: FrameType) -> None:
        """Remember the streams among the frame's local and global names, in containers and in attributes of objects
        that are instances of the user's classes."""
        known = set(self.handles())
        for value in (*frame.f_locals.values(), *frame.f_globals.values()):
            for item in self._reached(value):
                if self._attribute(type(item)) is not None:
                    self._add(item, known)

    def look_at_torch(self) -> None:
        """Remember PyTorch's current stream, if PyTorch is in use."""
        cuda: Any = sys.modules.get("torch.cuda")
        if cuda is not None:
            with suppress(Exception):  # it may be in the middle of its import, or have lost its device
                if cuda.is_initialized():
                    self._add(cuda.current_stream(), set(self.handles()))

    def handles(self) -> list[int]:
        found = dict.fromkeys(self._given)
        for item in self._objects:
            handle = self._handle(item)
            if handle not in _LEGACY:
                found[handle] = None
        return list(found)

    def _add(self, item: Any, known: set[int]) -> None:
        handle = self._handle(item)
        if handle not in known and handle not in _LEGACY:
            known.add(handle)
            self._objects.append(item)

    def _reached(self, value: Any) -> Iterable[Any]:
        kind = type(value)
        if issubclass(kind, list | tuple | set | frozenset):
            return tuple(value) if len(value) <= _MOST_ITEMS else ()
        if kind is dict:
            return tuple(value.values()) if len(value) <= _MOST_ITEMS else ()
        return (value, *vars(value).values()) if self._is_users(kind) else (value,)

    def _is_users(self, kind: type) -> bool:
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        return kind.__dictoffset__ != 0 and file is not None and self._owner.is_users(file)

    def _attribute(self, kind: type) -> str | None:
        """How instances of a type say which stream they are, None if they are none."""
        if kind not in self._is_stream:
            names = {name for base in kind.__mro__ for name in vars(base)}
            self._is_stream[kind] = next((n for n in ("cuda_stream", "__cuda_stream__") if n in names), None)
        return self._is_stream[kind]

    def _handle(self, item: Any) -> int:
        """0 for a stream that cannot say which one it is: it was closed, or is only being made."""
        with suppress(Exception):  # this is somebody's code, and runs in the middle of somebody's line
            if self._attribute(type(item)) == "cuda_stream":
                return int(item.cuda_stream)
            _version, handle = item.__cuda_stream__()
            return int(handle)
        return 0
