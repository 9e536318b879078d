"""Large reads that leave nothing in the page cache: their bytes are kept elsewhere, cached pages would only cost.

Where the file system allows it, a file is read with O_DIRECT in windows aligned in file space, and a window's bytes
outside the wanted range are thrown away. Elsewhere it is read through the page cache, and the pages are dropped. Knows
shards and byte ranges; must not know experts, devices, or who calls from which thread.
"""

import errno
import mmap
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from ds41rt.checkpoint.safetensors import Shard
from ds41rt.errors import CheckpointError, CheckpointReadError, InputError, UnsupportedError
from ds41rt.log import Logger

log = Logger("ds41rt.checkpoint")
DirectReads = Literal["auto", "on", "off"]

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)  # 0: the platform has none
# Of offset, length and address; the first that a file's own file system accepts is used for it.
_ALIGNMENTS = (4096, 16384, 65536)
_BOUNCE_NBYTES = 2 << 20
# What to ask for at once: one system call, wherever it begins and ends, and no small request behind the large ones.
PART_NBYTES = _BOUNCE_NBYTES - 2 * _ALIGNMENTS[-1]
# How the system says that this read cannot be direct, while another way may work. EFAULT: memory that a device driver
# mapped may be no target of direct reads.
_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT}


class _Bounce(threading.local):
    """An aligned buffer per thread, made at its first use there, freed with the thread or with the reader."""

    def __init__(self) -> None:
        most = _ALIGNMENTS[-1]
        # private, so that a forked child cannot write into it
        memory = mmap.mmap(-1, _BOUNCE_NBYTES + most, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        raw = np.frombuffer(memory, np.uint8)
        begin = -raw.ctypes.data % most
        self.array = raw[begin : begin + _BOUNCE_NBYTES]


class _DirectFile(NamedTuple):
    fd: int
    align: int


class DirectReader:
    """Reads byte ranges of open shards into the caller's memory; any number of threads at once.

    "auto" reads a file directly where that works, which is tried once per file here, and logs one line where it does
    not. "on" raises `UnsupportedError` naming the file instead. "off" reads through the page cache.
    """

    def __init__(self, shards: Iterable[Shard], mode: DirectReads) -> None:
        if mode not in get_args(DirectReads):
            raise InputError(f"direct_reads {mode!r} is unknown; use auto, on or off")
        self._mode = mode
        self._bounce = _Bounce()
        self._fds: list[int] = []
        self._files: dict[Shard, _DirectFile] = {}
        refused: list[tuple[Shard, OSError]] = []
        try:
            for shard in () if mode == "off" else shards:
                try:
                    self._files[shard] = self._open(shard)
                except OSError as e:
                    if mode == "on":
                        raise UnsupportedError(
                            f"{shard.path}: cannot be read directly ({e.strerror}); use direct_reads auto or off"
                        ) from e
                    refused.append((shard, e))
        except BaseException:
            self.close()
            raise
        if refused:
            shard, why = refused[0]
            log.info("no direct reads", n_files=len(refused), first=str(shard.path), why=why.strerror)

    def is_direct(self, shard: Shard) -> bool:
        """Whether this file is read past the page cache, as far as is known by now."""
        return shard in self._files

    def read(self, shard: Shard, off: int, out: NDArray[np.uint8], what: str) -> None:
        """Fill the contiguous uint8 array `out` from file offset `off`; `what` names the bytes in errors.

        Raises `CheckpointError` naming file, offset and missing bytes if the file has been cut, and
        `CheckpointReadError` if the system fails to read. `out` is undefined then.
        """
        file = self._files.get(shard)
        done = 0
        if file is not None:
            try:
                done = self._read_direct(file, off, out)
            except OSError as e:
                where = f"{shard.path}: {what}: direct read of {out.size} bytes at offset {off}"
                if e.errno not in _REFUSALS:
                    raise CheckpointReadError(f"{where} failed: {e.strerror}") from e
                if self._mode == "on":
                    raise CheckpointReadError(f"{where} refused: {e.strerror}; use direct_reads auto or off") from e
                # Other threads may be in the middle of a read with this descriptor: it is closed with the reader.
                if self._files.pop(shard, None) is not None:
                    log.warning("direct reads given up", file=str(shard.path), off=off, why=e.strerror)
        if done < out.size:
            self._read_cached(shard, off + done, out[done:], what)

    def close(self) -> None:
        """Close what was opened here, not the shards; a second call does nothing. No read may be in flight."""
        self._files.clear()
        while self._fds:
            os.close(self._fds.pop())

    def _open(self, shard: Shard) -> _DirectFile:
        """A second descriptor for direct reads; `OSError` where the file cannot be read that way."""
        if not _O_DIRECT:
            raise OSError(errno.EOPNOTSUPP, "this platform has no O_DIRECT")
        fd = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC | _O_DIRECT)
        self._fds.append(fd)
        if not os.path.samestat(os.fstat(fd), os.fstat(shard.fd)):
            raise CheckpointError(f"{shard.path}: was replaced while the checkpoint was being opened; open it again")
        return _DirectFile(fd, self._find_alignment(fd))

    def _find_alignment(self, fd: int) -> int:
        """The smallest alignment that works. Some file systems accept O_DIRECT at open and refuse every read."""
        refusal = OSError()
        for align in _ALIGNMENTS:
            window = self._bounce.array[align : 2 * align]  # its address is aligned to this and to little more
            try:
                os.preadv(fd, [window.data], 0)
            except OSError as e:
                refusal = e
            else:
                return align
        raise refusal

    def _read_direct(self, file: _DirectFile, off: int, out: NDArray[np.uint8]) -> int:
        """Returns how many bytes were read: fewer than asked at the end of the file, or where a read came back short.

        `os.preadv` restarts interrupted calls itself, and like large copies it lets other threads run.
        """
        align, address, want = file.align, out.ctypes.data, out.size
        done = 0
        while done < want:
            outside = (off + done) % align  # bytes of the window before the wanted ones
            if outside == 0 and (address + done) % align == 0 and want - done >= align:
                whole = (want - done) // align * align
                got = os.preadv(file.fd, [out[done : done + whole].data], off + done)
            else:
                bounce = self._bounce.array
                window = bounce[: min(bounce.size, -(-(outside + want - done) // align) * align)]
                n = os.preadv(file.fd, [window.data], off + done - outside)
                got = min(n - outside, want - done)
                if got > 0:
                    out[done : done + got] = window[outside : outside + got]
            if got <= 0:
                break
            done += got
        return done

    def _read_cached(self, shard: Shard, off: int, out: NDArray[np.uint8], what: str) -> None:
        shard.read_at(off, out, what)
        if hasattr(os, "posix_fadvise"):
            # Whole pages: the system keeps those of which only a part is named.
            begin = off - off % mmap.PAGESIZE
            end = -(-(off + out.size) // mmap.PAGESIZE) * mmap.PAGESIZE
            with suppress(OSError):  # the bytes are there; advice that is not taken changes nothing
                os.posix_fadvise(shard.fd, begin, end - begin, os.POSIX_FADV_DONTNEED)
