"""How much memory this process may still take on the host, as the operating system tells it. Knows no experts."""

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
# (limit, use) of the control group that a container runs in, versions 2 and 1.
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def available_nbytes() -> int:
    """Bytes that can be allocated without swapping: Linux's MemAvailable, less where a container's limit is lower.

    Elsewhere half of the physical memory, or 0 if the system does not even tell that.
    """
    try:
        lines = _MEMINFO.read_text().splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return _half_of_physical()
    return min([1024 * kib, *(left for limit, use in _CGROUPS if (left := _left_in(limit, use)) is not None)])


def _left_in(limit: Path, use: Path) -> int | None:
    """What a control group has left; None if there is no such group, or it has no limit."""
    try:
        return max(0, int(limit.read_text()) - int(use.read_text()))
    except (OSError, ValueError):  # the limit may be the word "max"
        return None


def _half_of_physical() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):
        return 0
