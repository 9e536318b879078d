"""Pinned memory as race detection hands it out: an array that tells the detector when the host reads or writes it.

Seen: indexing, assignment, ufuncs, reductions, and the methods and functions below, on the array and all views of it.
Not seen: memory reached through the buffer protocol or a plain-array view (`memoryview`, `readinto`, `np.asarray`).
The detector compares the bytes of unfinished copies for that reason. This file must not know clocks.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ds41rt.cu.host.footprint import Bucket
    from ds41rt.cu.host.race import RaceDetector

_READERS = {np.concatenate, np.array_equal, np.stack}


class Watcher:
    """The allocation that a pinned array belongs to: its real address, its bucket, its detector."""

    __slots__ = ("_bucket", "_detector", "_host_ptr")

    def __init__(self, detector: "RaceDetector", bucket: "Bucket", host_ptr: int) -> None:
        self._detector = detector
        self._bucket = bucket
        self._host_ptr = host_ptr

    def busy(self) -> bool:
        return self._detector.busy(self._bucket)

    def used(self, array: NDArray[Any], write: bool) -> None:
        """The host reads or writes exactly the elements of `array`, a plain view of the allocation."""
        shift = self._bucket.start - self._host_ptr
        for addr, nbytes in _ranges(array):
            lo = addr + shift
            if self._bucket.start <= lo < self._bucket.end:
                self._detector.host_access(self._bucket, lo, lo + nbytes, write, "write" if write else "read")


def _ranges(array: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """(address, bytes) of the contiguous pieces of an array."""
    if array.flags.c_contiguous:
        if array.nbytes:
            yield array.__array_interface__["data"][0], array.nbytes
    else:
        for i in range(array.shape[0]):
            yield from _ranges(array[i : i + 1].reshape(array.shape[1:]) if array.ndim > 1 else array[i : i + 1])


class PinnedArray(np.ndarray[Any, Any]):
    """See the module; otherwise an ndarray. What is computed from it is a plain ndarray."""

    _watcher: Watcher | None

    def __array_finalize__(self, obj: Any) -> None:
        self._watcher = getattr(obj, "_watcher", None)

    def __getitem__(self, key: Any) -> Any:
        got = super().__getitem__(key)
        watcher = self._watcher
        if watcher is None or not watcher.busy():
            return got
        if isinstance(got, PinnedArray) and np.may_share_memory(got.view(np.ndarray), self.view(np.ndarray)):
            return got  # a view: nothing was read yet
        _touch(self, key, watcher, write=False)
        return got

    def __setitem__(self, key: Any, value: Any) -> None:
        watcher = self._watcher
        if watcher is not None and watcher.busy():
            _touch(self, key, watcher, write=True)
        super().__setitem__(key, value)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out")
        if out is not None:
            kwargs["out"] = tuple(_plain(o, write=True) for o in out)
        if method == "at":
            inputs = (_plain(inputs[0], write=True), *(_plain(i) for i in inputs[1:]))
        else:
            inputs = tuple(_plain(i) for i in inputs)
        result = getattr(ufunc, method)(*inputs, **kwargs)
        return out[0] if out is not None and len(out) == 1 else result

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is np.copyto:
            args = (_plain(args[0], write=True), *(_plain(a) for a in args[1:]))
        elif func in _READERS:
            args = tuple(type(a)(_plain(x) for x in a) if isinstance(a, list | tuple) else _plain(a) for a in args)
        else:
            return super().__array_function__(func, types, args, kwargs)
        return func(*args, **kwargs)

    def tolist(self) -> Any:
        return _plain(self).tolist()

    def tobytes(self, order: Any = "C") -> bytes:
        data: bytes = _plain(self).tobytes(order)
        return data

    def copy(self, order: Any = "C") -> Any:
        return _plain(self).copy(order)

    def astype(self, *args: Any, **kwargs: Any) -> Any:
        return _plain(self).astype(*args, **kwargs)

    def item(self, *args: Any) -> Any:
        return _plain(self).item(*args)

    def fill(self, value: Any) -> None:
        _plain(self, write=True).fill(value)


def watched(data: NDArray[np.uint8], watcher: Watcher) -> PinnedArray:
    """`data` as an array whose uses by the host `watcher` sees."""
    array = data.view(PinnedArray)
    array._watcher = watcher
    return array


def _plain(value: Any, write: bool = False) -> Any:
    """A use of all of `value` by the host; as a plain array."""
    if not isinstance(value, PinnedArray):
        return value
    plain = value.view(np.ndarray)
    watcher = value._watcher
    if watcher is not None and watcher.busy():
        watcher.used(plain, write)
    return plain


def _touch(array: PinnedArray, key: Any, watcher: Watcher, write: bool) -> None:
    """A use of `array[key]`, to the element."""
    plain = array.view(np.ndarray)
    if isinstance(key, tuple) and ... in key:
        part = plain[key]
    else:
        # with the ellipsis, a single element comes as a view too
        part = plain[(*key, ...)] if isinstance(key, tuple) else plain[key, ...]
    if np.may_share_memory(part, plain):
        watcher.used(part, write)
        return
    flat = np.arange(plain.size).reshape(plain.shape)[key].reshape(-1)
    for index in zip(*(i.tolist() for i in np.unravel_index(flat, plain.shape)), strict=True):
        element: Any = (*index, ...)
        watcher.used(plain[element], write)
