"""The slot table on the simulated device against the cache and against a sequential model."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ds41rt.cu.backend import HostBuffer
from ds41rt.cu.host import HostBackend
from ds41rt.cu.result import CudaError, Status
from ds41rt.errors import InputError
from ds41rt.moe.cache import ExpertCache
from ds41rt.moe.changes import Triple
from ds41rt.moe.header import ABSENT, SLOT_TABLE_LAYERS
from ds41rt.moe.slots import SlotTable

SCHEDULES = ["lazy", "eager", *(f"random:{i}" for i in range(5))]
WORK = {"alloc", "alloc_pinned", "create_event", "prepare", "fill", "copy_h2d", "record", "launch", "synchronize_event"}


class Wiretap:
    """A host backend that notes every call of `WORK`, keeps the triples sent and fails the n-th call on demand."""

    def __init__(self, schedule: str = "lazy") -> None:
        self.real = HostBackend(schedule=schedule)
        self.calls: list[str] = []
        self.sent: list[list[Triple]] = []
        self.fail_at = -1

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.real, name)
        if name not in WORK:
            return method

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            if len(self.calls) == self.fail_at:
                raise CudaError(Status.INVALID_VALUE, name, "planted")
            if name == "copy_h2d":
                src: HostBuffer = args[1]
                words = src.array.view(np.int32)[: args[2] // 4].tolist()
                assert len(words) == 1 + 3 * words[0]
                self.sent.append([(words[i], words[i + 1], words[i + 2]) for i in range(1, len(words), 3)])
            return method(*args, **kwargs)

        return noted


class Rig:
    """A table with 5 layers, 24 experts, 30 slots and a small launch capacity, on a stream of its own."""

    def __init__(self, schedule: str = "lazy", capacity: int = 8) -> None:
        self.tap = Wiretap(schedule)
        backend: Any = self.tap
        self.stream = self.tap.real.create_stream("compute")
        self.cache = ExpertCache(5, 24, 30, seed=1)
        self.table = SlotTable(backend, self.cache, self.stream, capacity=capacity)

    def read(self) -> NDArray[np.int32]:
        out = np.full((SLOT_TABLE_LAYERS, 24), 12345, np.int32)
        self.tap.real.copy_d2h(HostBuffer.pageable("out", out), self.table.table.ptr, out.nbytes, self.stream)
        self.tap.real.synchronize(self.stream)
        return out

    def want(self) -> NDArray[np.int32]:
        table = np.full((SLOT_TABLE_LAYERS, 24), ABSENT, np.int32)
        for layer in range(5):
            for e in range(24):
                table[layer, e] = self.cache.slot_of(layer, e) or ABSENT
        return table

    def fetch(self, rng: random.Random) -> None:
        self.cache.begin_epoch()
        plan = self.cache.plan_fetch(rng.randrange(5), rng.sample(range(24), 6))
        for ticket in plan.tickets:
            if rng.random() < 0.9:
                self.cache.evict(ticket)
                if rng.random() < 0.9:
                    self.cache.commit(ticket)
        self.cache.abort(plan)


@pytest.fixture(params=SCHEDULES)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    r = Rig(request.param)
    yield r
    r.tap.real.synchronize(r.stream)
    r.table.close()
    r.table.close()
    assert r.tap.real.ledger() == ()
    assert r.tap.real.live()["events"] == 0


def test_starts_absent_everywhere(rig: Rig) -> None:
    assert (rig.read() == ABSENT).all()
    assert rig.table.row_ptr(3) == rig.table.table.ptr + 3 * 24 * 4


def test_follows_the_cache(rig: Rig) -> None:
    """Many updates between two synchronisations: the staging is reused while earlier copies may not have run."""
    rng = random.Random(4)
    for _ in range(60):
        for _ in range(rng.randrange(1, 12)):
            for _ in range(rng.randrange(1, 5)):
                rig.fetch(rng)
            rig.table.update()
            assert rig.cache.changes().triples == []
        assert np.array_equal(rig.read(), rig.want())
    assert max(len(sent) for sent in rig.tap.sent) == 8  # several chunks were needed


def test_random_batches_with_repeated_keys_equal_a_sequential_model(rig: Rig) -> None:
    rng = random.Random(8)
    model = np.full((SLOT_TABLE_LAYERS, 24), ABSENT, np.int32)
    for _ in range(120):
        batch = [
            (rng.randrange(5), rng.randrange(6), rng.choice((ABSENT, rng.randint(1, 30))))
            for _ in range(rng.randrange(0, 40))
        ]
        rig.table.apply(batch)
        for layer, e, slot in batch:
            model[layer, e] = slot
        if rng.random() < 0.2:
            assert np.array_equal(rig.read(), model)
    assert np.array_equal(rig.read(), model)
    for sent in rig.tap.sent:
        assert len({t[:2] for t in sent}) == len(sent), "one launch writes a key once"


def test_nothing_to_do_sends_nothing() -> None:
    rig = Rig()
    before = len(rig.tap.calls)
    rig.table.update()
    rig.table.apply([])
    assert len(rig.tap.calls) == before


@pytest.mark.parametrize(
    "bad", [(5, 0, 1), (-1, 0, 1), (0, 24, 1), (0, -1, 1), (0, 0, 0), (0, 0, 31), (0, 0, -2), (0, 0, 1 << 30 | 3)]
)
def test_triples_out_of_range_are_refused_before_anything_is_sent(bad: Triple) -> None:
    rig = Rig()
    before = len(rig.tap.calls)
    with pytest.raises(InputError, match="slot table"):
        rig.table.apply([(0, 1, 2)] * 20 + [bad])
    assert len(rig.tap.calls) == before
    assert (rig.read() == ABSENT).all()


def test_rewrite_layer_cures_lies_and_lost_entries() -> None:
    rig = Rig()
    rng = random.Random(3)
    for _ in range(20):
        rig.fetch(rng)
    rig.table.update()
    want = rig.want()
    lies = [(2, e, rng.choice((ABSENT, rng.randint(1, 30)))) for e in range(24)]
    rig.table.apply(lies)
    assert not np.array_equal(rig.read()[2], want[2])
    rig.table.rewrite_layer(2, range(0, 24, 2))
    got = rig.read()
    assert np.array_equal(got[2, ::2], want[2, ::2])
    assert got[2, 1::2].tolist() == [slot for _, e, slot in lies if e % 2]
    rig.table.rewrite_layer(2, range(1, 24, 2))
    assert np.array_equal(rig.read(), want)


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random:3"])
@pytest.mark.parametrize("k", range(1, 13))
def test_a_failed_update_stays_pending_and_its_repetition_is_right(schedule: str, k: int) -> None:
    """An update of three chunks has a wait, a copy, a record and a launch for each; the k-th of these calls fails."""
    rig = Rig(schedule, capacity=12)
    rng = random.Random(k)
    for _ in range(12):
        rig.fetch(rng)
        rig.table.update()
    while len(rig.cache.changes().triples) <= 24:
        rig.fetch(rng)
    pending = rig.cache.changes().triples
    assert len(pending) <= 36  # a fetch adds at most two for each of its six experts
    rig.tap.fail_at = len(rig.tap.calls) + k
    with pytest.raises(CudaError, match="planted"):
        rig.table.update()
    assert rig.cache.changes().triples == pending
    for _ in range(5):
        rig.fetch(rng)
        rig.table.update()
    assert rig.cache.changes().triples == []
    assert np.array_equal(rig.read(), rig.want())


def test_a_constructor_that_fails_leaves_nothing() -> None:
    n_calls = len(Rig().tap.calls)
    assert n_calls == 8
    for k in range(1, n_calls + 1):
        tap = Wiretap()
        backend: Any = tap
        stream = tap.real.create_stream("compute")
        tap.fail_at = k
        with pytest.raises(CudaError, match="planted"):
            SlotTable(backend, ExpertCache(5, 24, 30), stream)
        assert tap.real.ledger() == ()
        assert tap.real.live()["events"] == 0
        tap.real.synchronize(stream)  # and no enqueued work that uses the freed memory


def test_impossible_sizes_are_refused() -> None:
    backend = HostBackend()
    stream = backend.create_stream("compute")
    with pytest.raises(InputError, match="65 layers, at most 64"):
        SlotTable(backend, ExpertCache(65, 8, 8), stream)
    with pytest.raises(InputError, match="capacity must be at least 1, is 0"):
        SlotTable(backend, ExpertCache(1, 8, 8), stream, capacity=0)
    assert backend.ledger() == ()
