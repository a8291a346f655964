"""Which pushes were applied: each one exactly once.

Law: a push is (rank, incarnation, key, clock). The clocks of one sender and key
are consecutive, so one number tells them all apart: below it everything is
completed, at it a push is new or in progress, above it a push comes too early.
A higher incarnation fences the lower ones of its rank for good. Only completed
pushes outlive a restart: what was in progress is then new, and is pushed again.

After RIFL (Lee et al., SOSP 2015) and Kafka's idempotent producer.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Collection, Mapping

from hubring.ps.core.types import Sender


class Standing(enum.Enum):
    """What the ledger knows of a push."""

    NEW = enum.auto()
    IN_PROGRESS = enum.auto()
    COMPLETED = enum.auto()
    GAP = enum.auto()
    """Its clock is beyond the one expected."""
    FENCED = enum.auto()
    """A later life of this rank has been heard of."""


class Ledger:
    """One number per rank and key, one per rank, and the pushes in progress."""

    def __init__(self) -> None:
        self._incarnations: dict[int, int] = {}
        self._clocks: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._open: set[tuple[int, int]] = set()

    def clocks(self, key: int) -> Mapping[int, int]:
        """Per rank the clock expected next."""
        return self._clocks[key]

    def classify(self, sender: Sender, key: int, clock: int) -> Standing:
        """Where a push stands; changes nothing."""
        rank, incarnation = sender
        if incarnation < self._incarnations.get(rank, 0):
            return Standing.FENCED
        expected = self.expected(sender, key)
        if clock != expected:
            return Standing.COMPLETED if clock < expected else Standing.GAP
        if (rank, key) in self._open and incarnation == self._incarnations[rank]:
            return Standing.IN_PROGRESS
        return Standing.NEW

    def expected(self, sender: Sender, key: int) -> int:
        """The clock that the sender's next new push must bear; a new life goes on where its rank stood."""
        return self._clocks[key].get(sender.rank, 0)

    def begin(self, sender: Sender, key: int) -> None:
        """The expected push has arrived and will count."""
        self._hear_of(sender)
        self._open.add((sender.rank, key))

    def advance(self, sender: Sender, key: int, clock: int) -> None:
        """Whatever is below `clock` counts as completed.

        By one when a push was applied; further where a sender skips steps, because its
        gradient was dropped or because it joined late. A fenced sender changes nothing.
        """
        if sender.incarnation < self._incarnations.get(sender.rank, 0):
            return
        self._hear_of(sender)
        self._open.discard((sender.rank, key))
        self._clocks[key][sender.rank] = clock

    def retain(self, ranks: Collection[int]) -> None:
        """Forgets the clocks of all other ranks, and what they have in progress; their fences stay."""
        self._open = {(rank, key) for rank, key in self._open if rank in ranks}
        for key, clocks in self._clocks.items():
            self._clocks[key] = {rank: clock for rank, clock in clocks.items() if rank in ranks}

    def restore(self, key: int, clocks: Mapping[int, int]) -> None:
        """Takes over what `clocks(key)` was when a checkpoint was made."""
        self._clocks[key] = dict(clocks)

    def _hear_of(self, sender: Sender) -> None:
        """Fences the earlier lives of a rank; what they had in progress will never complete."""
        if sender.incarnation > self._incarnations.get(sender.rank, 0):
            self._incarnations[sender.rank] = sender.incarnation
            self._open = {(rank, key) for rank, key in self._open if rank != sender.rank}
