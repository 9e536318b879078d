"""How many slots each tier gets: asked for, by default, and where it is refused."""

from pathlib import Path
from typing import Any

import pytest

from ds41rt.errors import ConfigError
from ds41rt.moe import host_memory
from ds41rt.moe.budget import Asked, Budget, Memory, plan_budget

SLOT = 1 << 20
ALL, TOP_K = 1000, 6
GIB = 1 << 30


def plan(asked: Asked, free: int = 100, available: int = 3000, sequences: int = 8, unified: bool = False) -> Budget:
    """`free`, `available` and `sequences` in slots."""
    memory = Memory(free * SLOT, sequences * SLOT, available * SLOT, unified)
    return plan_budget(asked, memory, n_experts=ALL, top_k=TOP_K, slot_nbytes=SLOT)


def slots(budget: Budget) -> tuple[int, int]:
    return budget.device_slots, budget.host_slots


@pytest.mark.parametrize(
    ("asked", "want"),
    [
        (Asked(expert_slots=20), (20, 0)),  # nothing about the host: none
        (Asked(expert_slots=20, host_slots=7), (20, 7)),
        (Asked(expert_slots=0, host_slots=6), (0, 6)),
        (Asked(expert_slots=5000), (ALL, 0)),
        (Asked(expert_slots=900, host_slots=500), (900, 100)),
        (Asked(expert_slots=20, host_cache_gib=10 / 1024), (20, 10)),
        (Asked(expert_slots=20, expert_cache_gib=1.0), (20, 0)),  # slots count for more
        (Asked(expert_cache_gib=21 / 1024), (20, 980)),  # slot 0 is reserved
        (Asked(expert_cache_gib=21 / 1024, host_cache_gib=0.0), (20, 0)),
        (Asked(expert_cache_gib=0.0, host_cache_gib=10 / 1024), (0, 10)),
        (Asked(expert_cache_gib=0.0), (0, ALL)),
        (Asked(host_slots=4, host_cache_gib=1.0), (72, 4)),
    ],
)
def test_as_asked(asked: Asked, want: tuple[int, int]) -> None:
    """By default the device takes 100 slots less 8 for sequences, an eighth (12.5) in reserve, slot 0, 6 for copies."""
    assert slots(plan(asked)) == want


def test_the_default_leaves_room_and_puts_the_rest_on_the_host() -> None:
    assert slots(plan(Asked())) == (72, ALL - 72)
    assert slots(plan(Asked(), available=600)) == (72, 300)  # half of what is available
    assert slots(plan(Asked(), available=0)) == (72, 0)
    assert slots(plan(Asked(), free=8000)) == (ALL, 0)  # everything fits: no host tier
    # the reserve is never more than half a GiB
    memory = Memory(40 * GIB, 0, 0, False)
    budget = plan_budget(Asked(), memory, n_experts=10**6, top_k=TOP_K, slot_nbytes=SLOT)
    assert budget.device_slots == 40 * 1024 - 512 - 1 - TOP_K
    assert str(40 * GIB) in budget.device_reason


def test_one_memory_for_both() -> None:
    """No second tier by default, and no more than the host has; what is asked for is given."""
    assert slots(plan(Asked(), unified=True)) == (78, 0)
    assert slots(plan(Asked(), available=40, unified=True)) == (40 - 8 - 5 - 1, 0)
    assert slots(plan(Asked(host_slots=9), unified=True)) == (78, 9)


@pytest.mark.parametrize(
    ("asked", "numbers"),
    [
        (Asked(expert_slots=5), ["5 expert slots", "working set of 6"]),
        (Asked(expert_slots=0), ["0 expert slots"]),
        (Asked(expert_slots=2, host_slots=3), ["2 expert slots and 3 host slots"]),
        (Asked(expert_cache_gib=1e-9, host_cache_gib=0.0), ["0 expert slots", "1e-09 GiB", "DS41RT_EXPERT_CACHE_GIB"]),
        (Asked(host_cache_gib=5 / 1024, expert_cache_gib=0.0), ["0 expert slots and 5 host slots", f"{SLOT} bytes"]),
        (Asked(expert_slots=-1), ["-1 expert slots"]),
        (Asked(expert_slots=8, host_slots=-1), ["-1 host slots: there cannot"]),
    ],
)
def test_too_little_is_refused_with_numbers(asked: Asked, numbers: list[str]) -> None:
    with pytest.raises(ConfigError) as info:
        plan(asked)
    assert all(number in str(info.value) for number in numbers), info.value


# ---- what the host has


class Files:
    """A machine's files, in a folder."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        patch.setattr(host_memory, "_MEMINFO", folder / "meminfo")
        names = (("max", "current"), ("limit", "usage"))
        patch.setattr(host_memory, "_CGROUPS", tuple((folder / a, folder / b) for a, b in names))

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / name).write_text(text)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    return Files(tmp_path, monkeypatch)


MEMINFO = "MemTotal:       24684096 kB\nMemFree:        1 kB\nMemAvailable:   2048 kB\nBuffers: 5 kB\n"


def test_what_linux_says(files: Files) -> None:
    files.write(meminfo=MEMINFO)
    assert host_memory.available_nbytes() == 2 << 20


@pytest.mark.parametrize(
    ("group", "want"),
    [
        ({"max": "1500000\n", "current": "500000\n"}, 1_000_000),
        ({"max": "max\n", "current": "500000\n"}, 2 << 20),
        ({"max": "100\n", "current": "500000\n"}, 0),
        ({"limit": "9223372036854771712\n", "usage": "5\n"}, 2 << 20),
        ({"limit": "1000\n", "usage": "1\n"}, 999),
    ],
)
def test_a_container_may_have_less(files: Files, group: dict[str, str], want: int) -> None:
    files.write(meminfo=MEMINFO, **group)
    assert host_memory.available_nbytes() == want


def test_elsewhere_half_of_the_physical_memory(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr("os.sysconf", values.__getitem__)
    assert host_memory.available_nbytes() == 1000 * 4096 // 2

    def unknown(name: str) -> Any:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr("os.sysconf", unknown)
    assert host_memory.available_nbytes() == 0


def test_this_machine_has_some() -> None:
    assert host_memory.available_nbytes() > 1 << 20
