"""What the device slot table does not know yet: one entry a key, the last, in the order of the changes."""

from dataclasses import dataclass

Triple = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class SlotChanges:
    """A snapshot of the log: (layer, expert, slot code or -1), one a key, oldest first."""

    triples: list[Triple]
    mark: int


class ChangeLog:
    """Bounded by the number of keys, even if nobody reads it. A key is layer * n_experts + expert."""

    def __init__(self, n_experts: int) -> None:
        self._n_experts = n_experts
        self._last: dict[int, tuple[int, int]] = {}  # key -> (serial, code or -1), ascending serials
        self._serial = 0

    def add(self, key: int, code: int) -> None:
        # Re-inserting keeps the serials ascending.
        self._last.pop(key, None)
        self._serial += 1
        self._last[key] = (self._serial, code)

    def changes(self) -> SlotChanges:
        """What is pending. Nothing is forgotten before `applied`."""
        n = self._n_experts
        return SlotChanges([(key // n, key % n, code) for key, (_, code) in self._last.items()], self._serial)

    def applied(self, changes: SlotChanges) -> None:
        """The table update of this snapshot was accepted: forget what has not changed since it was taken."""
        done = []
        for key, (serial, _) in self._last.items():
            if serial > changes.mark:
                break
            done.append(key)
        for key in done:
            del self._last[key]
