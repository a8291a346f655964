"""Which pushes were applied: each exactly once.

Law: the clocks of one rank and key are consecutive, so one number per rank and key
is enough. A push below the number is completed. A push at the number is in progress
if the open round has it, and else new. A push above the number is too early. A new
incarnation continues its rank's clock; the store refuses earlier ones before
(`LiveWorkers`). Only completed pushes survive a restart. A push that was in progress
is then new, and its sender sends it again.

After RIFL (Lee et al., SOSP 2015) and Kafka's idempotent producer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping


class Ledger:
    """One number per rank and key."""

    def __init__(self) -> None:
        self._clocks: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._left: defaultdict[int, dict[int, int]] = defaultdict(dict)

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

    def expected(self, rank: int, key: int) -> int:
        """Returns the clock of the rank's next new push."""
        return self._clocks[key].get(rank, 0)

    def advance(self, rank: int, key: int, clock: int) -> None:
        """Marks all pushes below `clock` as completed.

        An applied push advances the clock by one. A dropped gradient or a late join advances
        it further, because the sender skips steps.
        """
        self._clocks[key][rank] = clock

    def retain(self, ranks: Collection[int]) -> None:
        """Drops the clocks of all other ranks; `saved` still has them."""
        for key, clocks in self._clocks.items():
            self._left[key].update(clocks)
            self._clocks[key] = {rank: clock for rank, clock in clocks.items() if rank in ranks}

    def left(self, key: int) -> Mapping[int, int]:
        """Returns the clocks of the ranks that left."""
        return self._left[key]

    def restore(self, key: int, clocks: Mapping[int, int], left: Mapping[int, int] | None = None) -> None:
        """Continues the `clocks` and `left` of another ledger, or the `saved` clocks of a checkpoint."""
        self._clocks[key], self._left[key] = dict(clocks), dict(left or {})
