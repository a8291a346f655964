"""Closes rounds of pushes, on a primary and on its standby.

Law: a primary forwards each round before it steps, and its standby applies the same step. Then the standby's
ledger equals the primary's, except that in lockstep modes it expects every live worker's next push in the
open round. A worker whose push the primary dropped learns this when it sends the push again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from torch import Tensor

from hubring.ps.core.counters import Stats
from hubring.ps.core.messages import Change, Contributor, Round
from hubring.ps.core.types import Sender
from hubring.ps.optim.sums import finite_sum, summed
from hubring.ps.store.consistency import Consistency
from hubring.ps.store.key_state import Contribution, Entry, Settled
from hubring.ps.store.live_workers import LiveWorkers
from hubring.ps.store.option_check import OptionCheck
from hubring.ps.store.push_ledger import Ledger


class Replica(Protocol):
    """Where a primary forwards its changes."""

    def allocate(self, like: Tensor) -> Tensor:
        """Returns memory for the total of one round, with the layout of a key's values."""

    def append(self, change: Change) -> None:
        """Forwards a change. Its tensors stay as they are until the standby has acknowledged it."""


class PushRounds:
    """The rounds of one store.

    Args:
        consistency: Whether the keys move in lockstep, and whether gradients must be finite.
        workers: The live workers.
        ledger: Learns which pushes are applied.
        stats: Counts them.
        replica: Where to forward each round; None without a standby. Can be replaced.
    """

    def __init__(
        self,
        consistency: Consistency,
        workers: LiveWorkers,
        ledger: Ledger,
        stats: Stats,
        replica: Replica | None,
    ) -> None:
        self._consistency = consistency
        self._workers = workers
        self._ledger = ledger
        self._stats = stats
        self.replica = replica
        self._options = OptionCheck()

    def close(self, entry: Entry, scratch: Tensor) -> None:
        """Closes the open round of a key. Raises as `Entry.close`."""
        before = entry.version

        def forward(
            contributions: list[Contribution],
            gradients: list[Tensor],
            absent: tuple[int, ...],
            excused: Collection[int],
        ) -> None:
            assert self.replica is not None
            total = self._total(entry, gradients, self.replica)
            contributors = tuple(_contributor(entry, before, each) for each in contributions)
            hyper, ranks = contributions[0].push.hyper, tuple(sorted(excused))
            done = Round(entry.key, before, total, len(gradients), hyper, contributors, absent, ranks)
            self.replica.append(done)

        contributions, absent = entry.close(scratch, None if self.replica is None else forward)
        contributors = [_contributor(entry, before, each) for each in contributions]
        for one, (push, tickets, _) in zip(contributors, contributions, strict=True):
            self._ledger.advance(push.sender, entry.key, push.clock + 1)
            entry.settle(push, tickets, Settled(push.clock, one.staleness, absent))
        self._count(entry, before, contributors)
        if self._consistency.lockstep:
            self._options.compare([push for push, *_ in contributions])

    def apply(self, entry: Entry, done: Round, scratch: Tensor) -> None:
        """Applies a round that the primary closed."""
        before = entry.version
        assert before == done.version, f"key {entry.key}: round {done.version} after version {before}"
        entry.apply(done, scratch)
        for rank, clock, staleness in done.contributors:
            self._ledger.advance(Sender(rank, self._workers.live[rank]), entry.key, clock + 1)
            entry.settled[rank] = Settled(clock, staleness, done.absent)
            entry.late.discard(rank)
            entry.read[rank] = entry.version
        if self._consistency.lockstep:
            for sender in self._workers.senders():
                self._ledger.advance(sender, entry.key, entry.version)
                entry.read[sender.rank] = entry.version
        self._stats.pushes += len(done.contributors)
        self._count(entry, before, done.contributors)

    def _total(self, entry: Entry, gradients: list[Tensor], replica: Replica) -> Tensor:
        """Returns the sum of the gradients.

        Raises:
            NonFinite: The sum is not finite, and the optimizer would refuse it. Nothing has changed.
        """
        sums = finite_sum if self._consistency.finite and not entry.averages else summed
        if len(gradients) > 1:
            return sums(gradients, replica.allocate(entry.values))
        total = sums(gradients, gradients[0])
        # The mean of compressed gradients is in the scratch memory of the store.
        return total if entry.codec is None else replica.allocate(entry.values).copy_(total)

    def _count(self, entry: Entry, before: int, contributors: Collection[Contributor]) -> None:
        for one in contributors:
            self._stats.staleness[one.staleness] += 1
        ranks = tuple(one.rank for one in contributors)
        if self._consistency.lockstep and ranks != self._workers.founders:
            self._stats.note_partial(entry.key, before, ranks)


def _contributor(entry: Entry, before: int, contribution: Contribution) -> Contributor:
    """Returns the sender of a push that is applied to version `before` of the key."""
    push = contribution.push
    return Contributor(push.sender.rank, push.clock, before - entry.read[push.sender.rank])
