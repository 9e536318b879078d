"""Race detection on the simulated device: vector clocks over the byte ranges that operations touch.

Two operations are ordered if their streams, events, the host's waits or a graph's edges say so, whatever the schedule
did: the clocks are set when work is enqueued, and only ranges behind pointer tables are added when a kernel executes.
Every conflicting pair is found when the second of its two accesses becomes known. This file must not know schedules,
captures or status codes.

A clock maps a thread (a stream's handle, or `HOST`) to the number of its operations that are known to be complete.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds41rt.cu.backend import DeviceBuffer, HostBuffer
from ds41rt.cu.host.command import Command
from ds41rt.cu.host.footprint import Bucket, Footprint, Part, Site, Spot, call_site, site_text, spots_of, trace
from ds41rt.cu.host.graph import GraphLaunch
from ds41rt.cu.host.kernels import HostLaunch
from ds41rt.cu.host.memory import Memory
from ds41rt.cu.host.race_report import Access, Race
from ds41rt.cu.kernel import Span

Clock = dict[int, int]

# The host is a thread like the streams; their handles start at 1.
HOST = 0
# A bucket's list is pruned each time it has grown by this many records.
_PRUNE_EVERY = 64


def _merged(a: Clock, b: Clock) -> Clock:
    out = dict(a)
    for thread, seq in b.items():
        if seq > out.get(thread, 0):
            out[thread] = seq
    return out


class StreamClock:
    """A stream as a thread: the number of its last operation and what is complete before its next one."""

    __slots__ = ("host", "name", "seen", "seq", "thread")

    def __init__(self, name: str, thread: int) -> None:
        self.name = name
        self.thread = thread
        self.seq = 0
        self.seen: Clock = {}
        self.host: Clock = {}

    def join(self, other: Clock) -> None:
        self.seen = _merged(self.seen, other)

    def now(self) -> Clock:
        """What is complete once all work enqueued so far is."""
        return {**self.seen, self.thread: self.seq} if self.seq else self.seen


class Work:
    """One enqueued operation: thread, number, and the clock before it. `index` counts all of a backend's operations."""

    __slots__ = (
        "index",
        "kind",
        "label",
        "leaves",
        "resolved",
        "seen",
        "seq",
        "site",
        "stream",
        "thread",
        "unresolved",
    )

    def __init__(self, index: int, kind: str, label: str, clock: StreamClock, site: Site, footprint: Footprint) -> None:
        self.index = index
        self.kind = kind
        self.label = label
        self.thread = clock.thread
        self.stream = clock.name
        self.seq = clock.seq
        self.seen = clock.seen
        self.site = site
        self.leaves = footprint.leaves
        self.unresolved = footprint.n_indirect
        # Ranges behind pointer tables, by graph node.
        self.resolved: dict[int, list[tuple[Bucket, Part]]] = {}


class HostWork:
    """One access by the host."""

    __slots__ = ("label", "seen", "seq", "site", "thread")

    def __init__(self, label: str, seq: int, seen: Clock, site: Site) -> None:
        self.label = label
        self.seq = seq
        self.seen = seen
        self.site = site
        self.thread = HOST


class Record(NamedTuple):
    seq: int
    work: Work | HostWork
    spot: Spot


class _Watch(NamedTuple):
    """Bytes that an operation reads, as they were when it was enqueued."""

    work: Work
    part: Part
    array: NDArray[np.uint8]
    before: bytes


def _seq(record: Record) -> int:
    return record.seq


class RaceDetector:
    """The clocks and access history of one backend.

    `races` lists every conflicting pair found so far, `take` those that were not handed out yet.
    """

    def __init__(self, memory: Memory) -> None:
        self.races: list[Race] = []
        self.host: Clock = {}
        self._memory = memory
        self._n_taken = 0
        self._n_work = 0
        self._n_host = 0
        # Allocations, ascending by address, and all pageable memory, whose addresses are the host's.
        self._starts: list[int] = []
        self._buckets: list[Bucket] = []
        self._pageable = Bucket("pageable memory", 0, 1 << 64, None)
        self._pageable.host = True
        self._dead: list[Bucket] = []
        # Work whose ranges behind pointer tables are not all known yet.
        self._pending: dict[int, Work] = {}
        self._watches: list[_Watch] = []

    # Memory

    def allocated(self, buf: DeviceBuffer | HostBuffer, data: NDArray[np.uint8] | None) -> Bucket:
        start = buf.ptr if isinstance(buf, DeviceBuffer) else buf.device_ptr
        bucket = Bucket(buf.name, start, start + buf.nbytes, data)
        self._starts.append(start)
        self._buckets.append(bucket)
        return bucket

    def freed(self, buf: DeviceBuffer | HostBuffer) -> None:
        """The host takes an allocation away: a write of all of it."""
        start = buf.ptr if isinstance(buf, DeviceBuffer) else buf.device_ptr
        bucket = self._buckets[bisect_left(self._starts, start)]
        self.host_access(bucket, bucket.start, bucket.end, True, "free")
        if self._pending:
            self._dead.append(bucket)
        else:
            self._forget(bucket)

    def _forget(self, bucket: Bucket) -> None:
        index = bisect_left(self._starts, bucket.start)
        del self._starts[index], self._buckets[index]

    def _find(self, addr: int) -> Bucket | None:
        index = bisect_right(self._starts, addr) - 1
        if index >= 0 and addr < self._buckets[index].end:
            return self._buckets[index]
        return None

    # Order

    def wait_host(self, clock: Clock) -> None:
        """The host has waited for what `clock` says."""
        known = self.host
        if any(seq > known.get(thread, 0) for thread, seq in clock.items()):
            self.host = _merged(known, clock)
            self._retire()

    def enqueue(self, clock: StreamClock, command: Command) -> Work:
        """A command was enqueued outside of a capture: order it, and hold it against what is on its way."""
        if clock.host is not self.host:
            clock.join(self.host)
            clock.host = self.host
        clock.seq += 1
        self._n_work += 1
        footprint = self._footprint(command)
        work = Work(self._n_work, command.kind, command.label, clock, call_site(), footprint)
        if footprint.n_indirect:
            self._pending[work.index] = work
        for a, b in footprint.internal:
            self._report(work, a, work, b)
        for spot in footprint.spots:
            self._add(work, spot)
        for part, array in footprint.host_reads:
            if not self._being_written(work, part):
                self._watches.append(_Watch(work, part, array, array.tobytes()))
        return work

    # Accesses

    def spans(self, spans: Sequence[Span]) -> None:
        """The running kernel has resolved its pointer tables."""
        work, leaf = self._memory.running, self._memory.leaf
        if work is None:
            return
        if not work.leaves:
            leaf = -1
        if leaf in work.resolved:
            return  # interrupted before, and running again
        found = work.resolved[leaf] = []
        bucket: Bucket | None = None
        for i, span in enumerate(spans):
            lo = int(span.addr)
            hi = lo + span.dtype.itemsize * int(prod(span.shape))
            if bucket is None or not bucket.start <= lo < bucket.end:
                bucket = self._find(lo)
            if bucket is not None and lo < hi:
                found.append((bucket, Part(lo, hi, span.access != "r", f"span {i}", bucket, leaf)))
        for spot in spots_of(found):
            self._add(work, spot)
        if work.leaves:
            self._compare_inside(work, leaf, found)
        work.unresolved -= 1
        if not work.unresolved:
            del self._pending[work.index]
            if not self._pending and self._dead:
                for bucket in self._dead:
                    self._forget(bucket)
                self._dead.clear()

    def busy(self, bucket: Bucket) -> bool:
        """True if the host has not waited for everything that was enqueued over this allocation."""
        known = self.host
        return bool(self._pending) or any(
            records[-1].seq > known.get(thread, 0) for thread, records in bucket.records.items() if records
        )

    def host_access(self, bucket: Bucket, lo: int, hi: int, write: bool, label: str) -> None:
        """The host reads, writes or frees addresses lo..hi now."""
        part = Part(lo, hi, write, "", bucket, -1)
        spot = Spot(bucket, lo, hi, write, (part,))
        work = HostWork(label, self._n_host + 1, self.host, call_site())
        for thread, theirs in bucket.records.items():
            if thread != HOST:
                self._compare(work, spot, theirs, self.host.get(thread, 0))
        if write and self._watches:
            self._unwatch(spot.parts)
        if self._pending:
            self._n_host += 1
            self.host = {**self.host, HOST: self._n_host}
            mine = bucket.records.setdefault(HOST, [])
            mine.append(Record(self._n_host, work, spot))
            if len(mine) % _PRUNE_EVERY == 0:
                self._prune(HOST, mine)

    @property
    def fresh(self) -> bool:
        """True if there are races to hand out."""
        return len(self.races) > self._n_taken

    def take(self) -> list[Race]:
        """Races that were not handed out yet."""
        new = self.races[self._n_taken :]
        self._n_taken = len(self.races)
        return new

    # Inside

    def _add(self, work: Work, spot: Spot) -> None:
        """Compare with what other threads did to the allocation, and remember."""
        records, thread = spot.bucket.records, work.thread
        mine = records.get(thread)
        if mine is None:
            mine = records[thread] = []
        if len(records) > 1:
            for other, theirs in records.items():
                if other != thread and theirs:
                    known = work.seen.get(other, 0)
                    if theirs[-1].seq > known:
                        self._compare(work, spot, theirs, known)
        record = Record(work.seq, work, spot)
        if mine and mine[-1].seq > work.seq:
            insort(mine, record, key=_seq)
        else:
            mine.append(record)
        if len(mine) % _PRUNE_EVERY == 0:
            self._prune(thread, mine)
        if spot.write and spot.bucket.host and self._watches:
            self._unwatch(spot.parts)

    def _compare(self, work: Work | HostWork, spot: Spot, theirs: list[Record], known: int) -> None:
        """Report what of another thread's records overlaps `spot` and is ordered neither before nor after `work`."""
        for record in reversed(theirs):
            if record.seq <= known:
                return
            other = record.spot
            if spot.lo >= other.hi or other.lo >= spot.hi or not (spot.write or other.write):
                continue
            if record.work.seen.get(work.thread, 0) >= work.seq:
                continue
            for a in spot.parts:
                for b in other.parts:
                    if a.meets(b):
                        self._report(work, a, record.work, b)

    def _compare_inside(self, work: Work, leaf: int, found: list[tuple[Bucket, Part]]) -> None:
        """Hold the resolved ranges of one graph node against the nodes of the same launch that no edge orders."""
        for other in work.leaves[leaf].unordered:
            for bucket, a in found:
                for their_bucket, b in (*work.leaves[other].parts, *work.resolved.get(other, ())):
                    if bucket is their_bucket and a.meets(b):
                        self._report(work, a, work, b)

    def _report(self, work_a: Work | HostWork, a: Part, work_b: Work | HostWork, b: Part) -> None:
        one, two = self._access(work_a, a), self._access(work_b, b)
        if (two.op, two.node) < (one.op, one.node):
            one, two, a, b = two, one, b, a
        base = a.owner.start if isinstance(a.owner, Bucket) else a.owner.ptr
        self.races.append(Race(one, two, max(a.lo, b.lo) - base, min(a.hi, b.hi) - base))

    @staticmethod
    def _access(work: Work | HostWork, part: Part) -> Access:
        owner = part.owner
        base = owner.start if isinstance(owner, Bucket) else owner.ptr
        lo, hi = part.lo - base, part.hi - base
        if isinstance(work, HostWork):
            site = site_text(work.site)
            return Access(1 << 62, -1, "host", work.label, "host", owner.name, lo, hi, part.write, "", site)
        kind, label, stream, site = work.kind, work.label, work.stream, site_text(work.site)
        if part.leaf >= 0:
            leaf = work.leaves[part.leaf]
            kind, label, stream = leaf.kind, leaf.label, f"{leaf.stream} in {work.label} on {work.stream}"
            if leaf.site is not None:
                site = f"{site}, captured at {site_text(leaf.site)}"
        return Access(work.index, part.leaf, kind, label, stream, owner.name, lo, hi, part.write, part.role, site)

    def _being_written(self, work: Work, part: Part) -> bool:
        """True if a device write to these bytes is on its way: what is there now is not what `work` will read."""
        bucket = part.owner if isinstance(part.owner, Bucket) else self._pageable
        for thread, records in bucket.records.items():
            known = self.host.get(thread, 0)
            for record in reversed(records):
                if record.seq <= known:
                    break
                if (
                    record.spot.write
                    and record.work is not work
                    and any(p.write and p.meets(part) for p in record.spot.parts)
                ):
                    return True
        return False

    def _unwatch(self, parts: Sequence[Part]) -> None:
        self._watches = [w for w in self._watches if not any(p.write and p.meets(w.part) for p in parts)]

    def _retire(self) -> None:
        """The host's clock has advanced: look at the bytes behind completed reads and let go of what they held."""
        if self._watches:
            known, kept = self.host, []
            for watch in self._watches:
                if watch.work.seq > known.get(watch.work.thread, 0):
                    kept.append(watch)
                elif watch.array.tobytes() != watch.before:
                    changed = np.flatnonzero(watch.array != np.frombuffer(watch.before, np.uint8))
                    lo, hi = watch.part.lo + int(changed[0]), watch.part.lo + int(changed[-1]) + 1
                    part = watch.part._replace(lo=lo, hi=hi, write=True)
                    host = HostWork("write found at the synchronise", 0, known, call_site())
                    self._report(host, part, watch.work, watch.part)
            self._watches = kept
        for thread, records in self._pageable.records.items():
            self._prune(thread, records)

    def _prune(self, thread: int, records: list[Record]) -> None:
        """Drop what no later access can race with: the host has waited for it, and so has all pending work."""
        bound = self._n_host if thread == HOST else self.host.get(thread, 0)
        for work in self._pending.values():
            if work.thread != thread:
                bound = min(bound, work.seen.get(thread, 0))
        del records[: bisect_right(records, bound, key=_seq)]

    # Footprints

    def _footprint(self, command: Command) -> Footprint:
        """The command's footprint; kept with kernels and graphs, which are enqueued again and again."""
        if isinstance(command, HostLaunch | GraphLaunch):
            kept = command.footprint
            if kept is None:
                kept, complete = trace(command, self._find, self._pageable)
                if complete:
                    command.footprint = kept
            return kept
        return trace(command, self._find, self._pageable)[0]
