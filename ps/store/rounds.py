"""The rounds of pushes of one store, and the reads that follow them, on a primary and on its standby.

Law: a primary forwards each round before it steps, and its standby applies the same step. Then the standby's
clocks equal the primary's, except that in lockstep modes it expects every live worker's next push in the
open round. A worker whose push the primary dropped learns this when it sends the push again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Protocol

from torch import Tensor

from hubring.ps.core.counters import Stats
from hubring.ps.core.messages import Change, ClosedRound, Coded, Contributor, Delivery, Push, Values
from hubring.ps.core.types import Hyper, HyperTable, Sender, View
from hubring.ps.optim.sums import finite_sum, summed
from hubring.ps.store.consistency import Consistency
from hubring.ps.store.key_state import Contribution, KeyEntry, Reader, Settled
from hubring.ps.store.parameter_memory import GpuMemory

log = logging.getLogger(__name__)


class LiveWorkers:
    """The live workers of one store, from the coordinator's last view.

    Attributes:
        live: Incarnations by rank.
        epoch: Epoch of the last view.
        founders: The ranks of the first view with members.
        finished: As `View.finished`.
    """

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.epoch = View().epoch
        self.founders: tuple[int, ...] = ()
        self.finished = ""

    def senders(self) -> list[Sender]:
        """Returns all live workers."""
        return [Sender(rank, incarnation) for rank, incarnation in self.live.items()]

    def update(self, view: View) -> tuple[list[Sender], list[Sender]] | None:
        """Applies a view; ignores a view older than the last and returns None.

        Returns:
            The workers that left, and those that joined: a rank with a new incarnation did both.
        """
        if view.epoch < self.epoch:
            return None
        before = self.live
        self.epoch, self.finished = view.epoch, view.finished
        self.live = {member.rank: member.incarnation for member in view.members}
        self.founders = self.founders or view.ranks
        left = [Sender(rank, one) for rank, one in before.items() if self.live.get(rank) != one]
        joined = [sender for sender in self.senders() if before.get(sender.rank) != sender.incarnation]
        return left, joined


class Replica(Protocol):
    """Where a primary forwards its changes."""

    def allocate(self, like: Tensor) -> Tensor:
        """Returns memory for the total of one round, with this tensor's length and dtype."""

    def append(self, change: Change) -> None:
        """Forwards a change. Its tensors stay as they are until the standby has acknowledged it."""


class PushRounds:
    """The rounds of one store.

    Args:
        consistency: Whether the keys move in lockstep, which workers may read, and whether gradients must be
            finite.
        workers: The live workers.
        stats: Counts the pushes that are applied.
        gpu: The memory of the values; None if they are in host memory.
        replica: Where to forward each round; None without a standby. Can be replaced.
    """

    def __init__(
        self,
        consistency: Consistency,
        workers: LiveWorkers,
        stats: Stats,
        gpu: GpuMemory | None,
        replica: Replica | None,
    ) -> None:
        self._consistency = consistency
        self._stable = consistency.stable
        self._workers = workers
        self._stats = stats
        self._gpu = gpu
        self.replica = replica
        self._options_differ = False
        """Whether ranks in lockstep have sent different hyperparameters in one round."""

    # Rounds.

    def close(self, entry: KeyEntry, scratch: Tensor) -> None:
        """Closes the open round of a key. Raises as `KeyEntry.gather` and `KeyEntry.step`."""
        before = entry.version
        contributors = [
            Contributor(rank, one.push.clock, before - entry.read[rank])
            for rank, one in sorted((entry.contributions | entry.covered).items())
        ]
        contributions, gradients, count, absent, excused = entry.gather(scratch)
        # Ranks should agree on the hyperparameters. If not, use the lowest rank's, so that reruns are equal.
        hyper = contributions[0].push.hyper
        if self.replica is not None:  # from here on only a NonFinite can keep the round from closing
            total, ranks = self._total(entry, gradients, scratch, self.replica), tuple(sorted(excused))
            by = tuple(contributors)
            self.replica.append(ClosedRound(entry.key, before, total, count, hyper, by, absent, ranks))
        entry.step(gradients, hyper, absent, scratch, count)
        for rank, clock, staleness in contributors:
            entry.clocks[rank] = clock + 1
            settled = Settled(clock, staleness, absent)
            if (own := entry.contributions.get(rank)) is not None:
                entry.settle(own.push, own.tickets, settled)
            else:  # covered: another rank passes the answer on
                entry.note_settled(rank, settled)
        entry.contributions.clear()
        entry.covered.clear()
        self._count(entry, before, contributors)
        if self._consistency.lockstep and not self._options_differ:
            self._compare_options(entry, contributions)

    def apply(self, entry: KeyEntry, done: ClosedRound, scratch: Tensor) -> None:
        """Applies a round that the primary closed."""
        before = entry.version
        assert before == done.version, f"key {entry.key}: round {done.version} after version {before}"
        entry.apply(done, scratch)
        for rank, clock, staleness in done.contributors:
            entry.clocks[rank] = clock + 1
            entry.note_settled(rank, Settled(clock, staleness, done.absent))
        self.follow(entry)
        self._stats.pushes += len(done.contributors)
        self._count(entry, before, done.contributors)

    def follow(self, entry: KeyEntry) -> None:
        """In lockstep, expects every worker in the open round: the primary may have let it go on there.

        No clock in lockstep is beyond the version.
        """
        if self._consistency.lockstep:
            for rank in self._workers.live:
                entry.clocks[rank] = entry.read[rank] = entry.version

    def _total(self, entry: KeyEntry, gradients: list[Tensor], scratch: Tensor, replica: Replica) -> Tensor:
        """Returns the sum of the gradients.

        Raises:
            NonFinite: The sum is not finite, and the optimizer would refuse it. Nothing has changed.
        """
        sums = finite_sum if self._consistency.finite and not entry.averages else summed
        if len(gradients) > 1:
            return sums(gradients, replica.allocate(scratch[: entry.values.numel()]))
        total = sums(gradients, gradients[0])
        # A mean is in the scratch memory of the store.
        in_scratch = total.data_ptr() == scratch.data_ptr()
        return replica.allocate(total).copy_(total) if in_scratch else total

    def _count(self, entry: KeyEntry, before: int, contributors: Collection[Contributor]) -> None:
        ranks: tuple[int, ...] = ()
        for one in contributors:
            self._stats.staleness[one.staleness] += 1
            ranks += (one.rank,)
        if self._consistency.lockstep and ranks != self._workers.founders:
            self._stats.note_partial(entry.key, before, ranks)

    def _compare_options(self, entry: KeyEntry, contributions: Sequence[Contribution]) -> None:
        """Warns once if ranks send different hyperparameters. Those of the lowest rank count."""
        first = contributions[0].push
        for contribution in contributions:
            if contribution.push.hyper != first.hyper:
                self._options_differ = True
                log.warning("%s", _difference(entry, first, contribution.push))
                return

    # Reads.

    def answer(self, entry: KeyEntry) -> list[Delivery]:
        """Answers all readers that the policy allows to read."""
        deliveries = list[Delivery]()
        for rank in tuple(entry.readers):
            if self._consistency.may_read(entry.clocks[rank], entry.clocks.values()):
                deliveries += self.reply(entry, entry.readers.pop(rank))
        return deliveries

    def reply(self, entry: KeyEntry, reader: Reader) -> list[Delivery]:
        """Answers all tries of one reader with the values as they are."""
        rank, clock, version = reader.sender.rank, reader.clock, entry.version
        contributes = rank in entry.contributions or rank in entry.covered
        if self._consistency.lockstep or clock is None:
            if self._consistency.lockstep and not contributes:
                # Rounds may have closed without this worker, so it continues with the open round.
                entry.clocks[rank] = version
            clock = entry.clocks[rank]
        entry.read[rank] = version
        # Parameters are uncompressed, a mean has the gradients' codec.
        sent: Tensor | Coded = entry.values if entry.coded is None else entry.coded.latest
        if self._gpu is not None:
            sent = self._gpu.show(entry.values) if reader.shown else self._gpu.send(entry.values)
        values = Values(
            key=entry.key,
            values=sent,
            clock=clock,
            version=version,
            staleness=reader.staleness,
            drain=version >= entry.drain_from,
            # The next update needs a gradient from every live worker, and this worker has not sent
            # its gradient yet. Until it does, the values do not change. A worker that is removed
            # meanwhile may see later bytes, but it is fenced, so its results do not count. With
            # backup workers, or in asynchronous modes, other workers can update without it.
            stable=self._stable and not contributes,
            absent=reader.absent,
            saved=version == entry.saved_at,
        )
        return [Delivery(ticket, values) for ticket in reader.tickets]


def _difference(entry: KeyEntry, first: Push, other: Push) -> str:
    pairs = zip(_of_each(entry, first), _of_each(entry, other), strict=True)
    held, there = next(pair for pair in pairs if pair[0] != pair[1])
    names = sorted(held.keys() | there.keys())
    name = next(name for name in names if held.get(name) != there.get(name))
    rank = first.sender.rank
    return (
        f"rank {rank} has {name}={held.get(name)} in step {first.clock + 1}, and rank"
        f" {other.sender.rank} has {name}={there.get(name)}; the hub steps with those of rank {rank}."
        " Set the same on all ranks; average a scheduler's metric over the ranks with hubring.allreduce first"
    )


def _of_each(entry: KeyEntry, push: Push) -> list[Hyper]:
    """Returns the hyperparameters of each of the slice's parameters."""
    hyper = push.hyper
    if isinstance(hyper, HyperTable):
        return [hyper.rows[row] for row in hyper.row_of]
    return [hyper] * len(entry.parts)
