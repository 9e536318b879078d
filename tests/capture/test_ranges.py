"""Which range names an address, and what happens where nobody can be asked."""

from types import SimpleNamespace

import numpy as np
import pytest

from ds41rt.capture.dump import Place, Range, Space
from ds41rt.capture.ranges import Names, caller_ranges, ledger_ranges
from ds41rt.cu.backend import DeviceBuffer, MemoryRange
from ds41rt.cu.host import HostBackend
from ds41rt.errors import InputError, UnsupportedError

BASE = 0x7F00_0000_0000


def known(name: str, off: int, nbytes: int, source: str = "ledger", freed: bool = False) -> Range:
    return Range.model_validate(
        {"name": name, "addr": BASE + off, "nbytes": nbytes, "space": "device", "source": source, "freed": freed}
    )


def owner(names: Names, off: int, nbytes: int = 1) -> str | None:
    return names.place(BASE + off, nbytes, "r").owner


def test_the_most_telling_range_names_an_address() -> None:
    names = Names(
        [
            known("whole", 0, 1000),
            known("part", 100, 100, "caller"),
            known("part of the part", 150, 10, "caller"),
            known("former", 0, 5000, freed=True),
            known("small and former", 20, 10, freed=True),
            known("other", 1000, 500),
        ]
    )
    assert [owner(names, off) for off in (0, 25, 100, 149, 150, 159, 160, 199, 200, 999)] == [
        "whole", "whole", "part", "part", "part of the part", "part of the part", "part", "part", "whole", "whole"
    ]  # fmt: skip
    assert [owner(names, off) for off in (1000, 1499, 1500, 4999, 5000, -1)] == [
        "other", "other", "former", "former", None, None
    ]  # fmt: skip
    # What fits no part belongs to the allocation; what fits nothing is measured against the largest live range.
    assert owner(names, 155, 5) == "part of the part"
    assert owner(names, 155, 6) == "part"
    assert owner(names, 155, 46) == "whole"
    assert owner(names, 155, 845) == "whole"
    assert owner(names, 1400, 101) == "former"
    assert owner(Names([known("whole", 0, 1000), known("part", 100, 100, "caller")]), 150, 2000) == "whole"


def test_against_a_search_through_all_ranges() -> None:
    """Random nested and overlapping ranges: the index finds what a plain search finds."""
    rng = np.random.default_rng(11)
    ranges = [
        known(f"r{i}", int(rng.integers(0, 1000)), int(rng.integers(0, 300)), str(rng.choice(["ledger", "caller"])))
        for i in range(60)
    ]
    names = Names(ranges)
    seen = set()
    for _ in range(2000):
        off, nbytes = int(rng.integers(-5, 1400)), int(rng.integers(1, 50))
        holding = [
            r for r in ranges if r.addr <= BASE + off and BASE + off + nbytes <= r.addr + r.nbytes and r.nbytes
        ]  # fmt: skip
        around = [r for r in ranges if r.addr <= BASE + off < r.addr + r.nbytes]
        found = owner(names, off, nbytes)
        seen.add(found)
        if holding:
            best = min((r.source != "caller", r.nbytes) for r in holding)
            assert found in {r.name for r in holding if (r.source != "caller", r.nbytes) == best}
        elif around:
            assert found in {r.name for r in around if r.nbytes == max(x.nbytes for x in around)}
        else:
            assert found is None
    assert len(seen) > 20


def test_the_driver_is_asked_where_no_range_is_and_only_once() -> None:
    asked: list[int] = []

    def ask(addr: int) -> MemoryRange | None:
        asked.append(addr - BASE)
        spaces: dict[int, Space] = {0: "device", 1: "pinned", 2: "device"}
        at = (addr - BASE) // 1000
        return MemoryRange(BASE + 1000 * at, 1000, spaces[at]) if at in spaces else None

    names = Names([known("ours", 0, 100)], ask)
    assert [owner(names, off) for off in (50, 2500, 2900, 1001, 100, 200, 5000, 5000)] == [
        "ours", "device allocation 1", "device allocation 1", "pinned allocation 1", "device allocation 2",
        "device allocation 2", None, None,
    ]  # fmt: skip
    assert asked == [2500, 1001, 100, 5000]
    assert names.place(BASE + 1001, 4, "w") == Place(
        addr=BASE + 1001, nbytes=4, space="pinned", owner="pinned allocation 1", owner_off=1, access="w"
    )
    assert names.complete
    assert [(r.name, r.source) for r in names.ranges()] == [
        ("device allocation 2", "driver"), ("ours", "ledger"), ("pinned allocation 1", "driver"),
        ("device allocation 1", "driver"),
    ]  # fmt: skip


def test_where_nobody_can_be_asked_the_names_are_not_complete() -> None:
    def cannot(addr: int) -> MemoryRange | None:
        raise UnsupportedError("no such call")

    names = Names([known("ours", 0, 100)], cannot)
    assert owner(names, 50) == "ours"
    assert names.complete
    assert owner(names, 150) is None
    assert not names.complete
    assert [r.space for r in caller_ranges({"x": (BASE, 4)}, cannot)] == ["unknown"]


def test_the_driver_says_what_memory_a_registered_range_is_in() -> None:
    def ask(addr: int) -> MemoryRange | None:
        return MemoryRange(BASE, 100, "pinned") if addr == BASE else None

    ranges = caller_ranges({"x": (BASE, 4), "y": (BASE + 5000, 4)}, ask)
    assert [(r.name, r.space) for r in ranges] == [("x", "pinned"), ("y", "unknown")]
    assert Names(ranges).place(BASE + 5000, 4, "r", "device").space == "device"
    tensor = SimpleNamespace(data_ptr=lambda: BASE, nbytes=12)
    assert [(r.addr, r.nbytes) for r in caller_ranges({"t": tensor})] == [(BASE, 12)]
    with pytest.raises(InputError, match=r"range 't'.*None"):
        caller_ranges({"t": None})


@pytest.mark.parametrize("word", [0, 1, 4096, 65535, (1 << 57), (1 << 64) - 1])
def test_numbers_are_no_addresses(word: int) -> None:
    everything = Range(name="everything", addr=0, nbytes=1 << 64, space="device", source="caller")
    assert Names([everything]).guess(word) is None
    assert Names([everything]).guess(1 << 20) is not None


def test_the_same_number_in_ordinary_memory_is_another_place() -> None:
    assert Names([known("ours", 0, 100)]).place(BASE, 4, "r", "pageable").owner is None


def test_a_ledger_with_both_kinds_of_memory() -> None:
    backend = HostBackend()
    device, host = backend.alloc("d", 100), backend.alloc_pinned("h", 50)
    for _ in range(3):
        backend.free(backend.alloc("gone", 10))
    found = {(r.name, r.addr, r.nbytes, r.space, r.freed) for r in ledger_ranges(backend) if r.name != "gone"}
    assert found == {
        ("d", device.ptr, 100, "device", False),
        ("h", host.device_ptr, 50, "pinned", False),
        ("h (host address)", host.ptr, 50, "pinned", False),
    }
    assert sum(r.freed for r in ledger_ranges(backend)) == 3
    names = Names(ledger_ranges(backend))
    assert names.place(host.ptr + 1, 4, "r").owner == "h (host address)"
    assert [r.name for r in names.ranges()] == sorted(["d", "h", "h (host address)"], key=lambda n: {
        "d": device.ptr, "h": host.device_ptr, "h (host address)": host.ptr
    }[n])  # fmt: skip
    backend.close()


def test_an_address_that_was_given_out_again_and_again_is_the_last_owner_s() -> None:
    class Reusing(HostBackend):
        def freed(self) -> tuple[DeviceBuffer, ...]:
            return (DeviceBuffer("first", BASE, 10), DeviceBuffer("last", BASE, 20))

    backend = Reusing()
    assert [(r.name, r.nbytes) for r in ledger_ranges(backend)] == [("last", 20)]
    backend.close()


def test_host_backend_finds_allocations() -> None:
    backend = HostBackend()
    device, host = backend.alloc("d", 100), backend.alloc_pinned("h", 50)
    assert backend.find_allocation(device.ptr + 99) == MemoryRange(device.ptr, 100, "device")
    assert backend.find_allocation(host.device_ptr) == MemoryRange(host.device_ptr, 50, "pinned")
    for nowhere in (0, device.ptr - 1, device.ptr + 100, host.device_ptr + 50):
        assert backend.find_allocation(nowhere) is None
    backend.free(device)
    assert backend.find_allocation(device.ptr) is None
    assert [(b.name, b.ptr, b.nbytes) for b in backend.freed()] == [("d", device.ptr, 100)]
    backend.close()
