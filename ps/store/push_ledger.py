"""Which pushes were applied: each exactly once.

Law: a push is (rank, incarnation, key, clock). The clocks of one sender and key
are consecutive, so one number per sender and key is enough. A push below the
number is completed. A push at the number is new or in progress. A push above the
number is too early. A higher incarnation permanently fences the lower ones of its
rank. Only completed pushes survive a restart. A push that was in progress is then
new, and its sender sends it again.

After RIFL (Lee et al., SOSP 2015) and Kafka's idempotent producer.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Collection, Mapping

from hubring.ps.core.types import Sender


class Standing(enum.Enum):
    """The state of a push in the ledger."""

    NEW = enum.auto()
    IN_PROGRESS = enum.auto()
    COMPLETED = enum.auto()
    GAP = enum.auto()
    """The clock is above the expected clock."""
    FENCED = enum.auto()
    """A higher incarnation of the rank exists."""


class Ledger:
    """One number per rank and key, one per rank, and the pushes in progress."""

    def __init__(self) -> None:
        self._incarnations: dict[int, int] = {}
        self._clocks: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._left: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._open: set[tuple[int, int]] = set()

    def clocks(self, key: int) -> Mapping[int, int]:
        """Returns the next expected clock of each rank."""
        return self._clocks[key]

    def saved(self, key: int) -> dict[int, int]:
        """Returns the clocks for a checkpoint: those of the live ranks, and of ranks that left.

        A rank that left resumes where it left, or with the slowest live rank if that is further.
        """
        clocks = self._clocks[key]
        slowest = min(clocks.values(), default=0)
        return {rank: max(clock, slowest) for rank, clock in self._left[key].items()} | clocks

    def classify(self, sender: Sender, key: int, clock: int) -> Standing:
        """Returns the state of a push; changes nothing."""
        rank, incarnation = sender
        if incarnation < self._incarnations.get(rank, 0):
            return Standing.FENCED
        expected = self._clocks[key].get(rank, 0)
        if clock != expected:
            return Standing.COMPLETED if clock < expected else Standing.GAP
        if (rank, key) in self._open and incarnation == self._incarnations[rank]:
            return Standing.IN_PROGRESS
        return Standing.NEW

    def expected(self, sender: Sender, key: int) -> int:
        """Returns the clock of the sender's next new push; a new incarnation continues its rank's clock."""
        return self._clocks[key].get(sender.rank, 0)

    def begin(self, sender: Sender, key: int) -> None:
        """Marks the expected push as in progress."""
        if sender.incarnation > self._incarnations.get(sender.rank, 0):
            self._fence_before(sender)
        self._open.add((sender.rank, key))

    def advance(self, sender: Sender, key: int, clock: int) -> None:
        """Marks all pushes below `clock` as completed.

        An applied push advances the clock by one. A dropped gradient or a late join advances
        it further, because the sender skips steps. A fenced sender changes nothing.
        """
        rank, incarnation = sender
        newest = self._incarnations.get(rank, 0)
        if incarnation < newest:
            return
        if incarnation > newest:
            self._fence_before(sender)
        self._open.discard((rank, key))
        self._clocks[key][rank] = clock

    def retain(self, ranks: Collection[int]) -> None:
        """Drops the clocks and pushes in progress of all other ranks; `saved` still has their clocks."""
        self._open = {(rank, key) for rank, key in self._open if rank in ranks}
        for key, clocks in self._clocks.items():
            self._left[key].update(clocks)
            self._clocks[key] = {rank: clock for rank, clock in clocks.items() if rank in ranks}

    def left(self, key: int) -> Mapping[int, int]:
        """Returns the clocks of the ranks that left."""
        return self._left[key]

    def restore(self, key: int, clocks: Mapping[int, int], left: Mapping[int, int] | None = None) -> None:
        """Continues the `clocks` and `left` of another ledger, or the `saved` clocks of a checkpoint."""
        self._clocks[key], self._left[key] = dict(clocks), dict(left or {})

    def _fence_before(self, sender: Sender) -> None:
        """Fences the lower incarnations of a rank and drops their pushes in progress."""
        self._incarnations[sender.rank] = sender.incarnation
        self._open = {(rank, key) for rank, key in self._open if rank != sender.rank}
