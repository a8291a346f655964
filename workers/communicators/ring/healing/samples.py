"""How the samples of an epoch are dealt while ranks are lost and enter, and where each sampler is in them.

Law: every sample of an epoch is dealt once, except for a remainder smaller than the number of ranks. A rank
keeps what it has drawn, and trains on it. What a lost rank had drawn and not trained on is dealt again, with
all that no rank had drawn. All ranks have equal shares, so that they take the same steps. A newcomer begins
behind what the others have trained on; the samples before that are only there to be counted. All ranks have
the same batches: where one has found an end, before more was dealt, the others and newcomers find one too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Change(NamedTuple):
    """A change of the ranks within an epoch.

    Attributes:
        trained: How many samples of its share each rank had trained on.
        drawn: How many samples of its share a rank had drawn at most.
        stays: The ranks before the change that stay, by rank after it.
        size: Ranks after the change; the last ones are newcomers.
        ends: How often a rank had found the end of its share behind the `drawn` samples.
    """

    trained: int
    drawn: int
    stays: tuple[int, ...]
    size: int
    ends: int = 0


class Epoch(NamedTuple):
    """One iteration over a dataset.

    Attributes:
        epoch: Selects the order of the samples.
        size: Ranks at its begin.
        changes: In order.
    """

    epoch: int
    size: int
    changes: tuple[Change, ...] = ()

    @property
    def last_size(self) -> int:
        """Ranks after the last change."""
        return self.changes[-1].size if self.changes else self.size

    def ends(self, drawn: int) -> int:
        """Returns how often every rank finds an end behind its first `drawn` samples, though more follow."""
        return max((change.ends for change in self.changes if change.drawn == drawn), default=0)


def shares(length: int, epoch: Epoch) -> list[Tensor]:
    """Returns the share of each rank after the last change.

    Args:
        length: Samples in the dataset.
        epoch: The epoch and its changes so far.

    Returns:
        int64 positions in the epoch's order, equally many for each rank.
    """
    order = torch.arange(length, device="cpu")
    taken = torch.zeros(length, dtype=torch.bool, device="cpu")
    dealt = _dealt(order, epoch.size)
    for trained, drawn, stays, size, _ in epoch.changes:
        for rank, share in enumerate(dealt):
            taken[share[: drawn if rank in stays else trained]] = True
        rest, ahead, new = order[~taken], drawn - trained, size - len(stays)
        # The others have drawn some samples beyond the last step, so a newcomer first gets as many. Where too
        # few are left, it repeats samples.
        first, rest = torch.cat([rest, order])[: new * ahead], rest[new * ahead :]
        counted = dealt[stays[0]][:trained]
        begun = [dealt[rank][:drawn] for rank in stays]
        begun += [torch.cat([counted, first[place::new]]) for place in range(new)]
        dealt = [torch.cat(pair) for pair in zip(begun, _dealt(rest, size), strict=True)]
    return dealt


def _dealt(samples: Tensor, size: int) -> list[Tensor]:
    each = len(samples) // size
    return [samples[rank : each * size : size] for rank in range(size)]


class Position(NamedTuple):
    """How far a member is in the samples of one sampler.

    Attributes:
        iteration: Counts the iterations over the dataset, from 1; 0 before the first.
        epoch: The iteration as it began.
        trained: Samples of the member's share up to its last complete exchange.
        drawn: Samples of the share that it has drawn.
        per_step: Samples of the share in one step; 0 if not known yet.
        ends: Times the end of the share was reported since the last sample.
    """

    iteration: int = 0
    epoch: Epoch = Epoch(0, 1)
    trained: int = 0
    drawn: int = 0
    per_step: int = 0
    ends: int = 0


class Samples:
    """Draws one member's samples.

    Args:
        length: Samples in the dataset.
        order: Returns the order of the samples in an epoch.

    Attributes:
        rank: The member's rank in the ring's current generation.
        size: Members of the current generation.
    """

    def __init__(self, length: int, order: Callable[[int], Tensor]) -> None:
        self.rank, self.size = 0, 1
        self._length, self._order = length, order
        self._epochs: dict[int, Epoch] = {}
        """By iteration: those that have changes, and the current one."""
        self._iteration = 0
        self._share: list[int] = []
        self._drawn = self._ends = self._trained_before = self._steps = self._first = self._per_step = 0
        self._last_step = -1
        self._changed = threading.Condition()
        self._frozen = False

    def begin(self, epoch: int, skip: int) -> Iterator[int]:
        """Begins an iteration behind the first `skip` samples of this member's share."""
        with self._changed:
            self._await_thaw()
            self._iteration += 1
            known = self._epochs[self._iteration] = self._epoch_of(self._iteration, epoch)
            self._forget_plain_epochs()
            self._deal(known)
            trained = known.changes[-1].trained if known.changes else 0  # a newcomer begins behind these
            self._trained_before, self._steps, self._first, self._drawn = max(skip, trained), 0, 0, skip
            self._ends = 0
            return _Draws(self, self._iteration, self._order(epoch), skip)

    def count(self, skip: int) -> int:
        """Returns how many samples the next iteration has."""
        with self._changed:
            known = self._epoch_of(self._iteration + 1, 0)
            return len(shares(self._length, known)[0]) - skip

    def draw(self, iteration: int, drawn: int) -> int | None:
        """Returns the position in the order of the sample behind the first `drawn` ones; None at the end."""
        with self._changed:
            self._await_thaw()
            if iteration != self._iteration:
                return None
            if drawn >= len(self._share) or self._ends < self._epochs[iteration].ends(drawn):
                self._ends += 1
                return None
            self._drawn, self._ends = drawn + 1, 0
            return self._share[drawn]

    def _await_thaw(self) -> None:
        self._changed.wait_for(lambda: not self._frozen)

    def _epoch_of(self, iteration: int, epoch: int) -> Epoch:
        """Returns an iteration as it is known, or as it follows from those before."""
        if iteration in self._epochs:
            return self._epochs[iteration]
        before = max((each for each in self._epochs if each < iteration), default=None)
        return Epoch(epoch, self.size if before is None else self._epochs[before].last_size)

    def _forget_plain_epochs(self) -> None:
        """Forgets iterations without changes that follow from those before."""
        _, *others = sorted(self._epochs)
        for iteration in others:
            known = self._epochs.pop(iteration)
            follows = known == self._epoch_of(iteration, known.epoch) and not known.changes
            if not follows or iteration >= self._iteration:
                self._epochs[iteration] = known

    def _deal(self, epoch: Epoch) -> None:
        dealt = shares(self._length, epoch)
        # A newcomer counts the samples of epochs before its own in the first member's share.
        self._share = dealt[self.rank if self.rank < len(dealt) else 0].tolist()

    def exchanged(self, step: int) -> None:
        """Learns that the exchange of a step is complete, `step` being the steps before it."""
        with self._changed:
            if step <= self._last_step:  # another optimizer's exchange in the same step
                return
            self._last_step = step
            self._steps += 1
            if self._steps == 1:
                self._first = self._drawn
            elif self._steps == 2 and self._drawn > self._first:
                self._per_step = self._drawn - self._first

    # Changes of the members.

    def freeze(self, step: int) -> Position:
        """Stops drawing until `change` or `thaw`, and returns the position after `step` completed steps."""
        with self._changed:
            self._frozen = True
            steps = self._steps + (step - 1 > self._last_step)  # one may be complete that is not noted yet
            per_step = self._per_step or (self._first or self._drawn) - self._trained_before
            before = self._trained_before
            trained = min(before + steps * per_step, max(before, self._drawn))
            epoch = self._epoch_of(self._iteration, 0)
            return Position(self._iteration, epoch, trained, self._drawn, self._per_step, self._ends)

    def thaw(self) -> None:
        """Draws on."""
        with self._changed:
            self._frozen = False
            self._changed.notify_all()

    def change(self, positions: Sequence[Position], stays: tuple[int, ...], rank: int, size: int) -> None:
        """Deals the samples to other members. They are drawn after `thaw`.

        Args:
            positions: Those of the members that stay.
            stays: Their ranks before the change, by rank after it.
            rank: This member's rank after the change.
            size: Members after the change; the last ones are newcomers.
        """
        with self._changed:
            newest = max((position.iteration for position in positions), default=0)
            here = [position for position in positions if position.iteration == newest]
            self._per_step = self._per_step or max((position.per_step for position in here), default=0)
            self.rank, self.size = rank, size
            if newest:
                trained = max(position.trained for position in here)
                drawn = max(position.drawn for position in here)
                epoch = here[0].epoch
                ends = max(position.ends for position in here if position.drawn == drawn)
                change = Change(trained, drawn, stays, size, ends)
                self._epochs[newest] = epoch._replace(changes=(*epoch.changes, change))
                if newest == self._iteration:
                    self._deal(self._epochs[newest])

    @property
    def history(self) -> dict[int, Epoch]:
        """The epochs by iteration, for newcomers."""
        return dict(self._epochs)

    def follow(self, history: dict[int, Epoch], step: int) -> None:
        """Learns the epochs before this member entered, after `step` steps."""
        with self._changed:
            self._epochs, self._last_step = {**history, **self._epochs}, step - 1


class _Draws(Iterator[int]):
    """The samples of one iteration.

    It goes on behind its end if samples are dealt again: a loader asks once more after a smaller last batch.
    """

    def __init__(self, samples: Samples, iteration: int, order: Tensor, drawn: int) -> None:
        self._samples, self._iteration, self._order, self._drawn = samples, iteration, order, drawn

    def __next__(self) -> int:
        position = self._samples.draw(self._iteration, self._drawn)
        if position is None:
            raise StopIteration
        self._drawn += 1
        return int(self._order[position])
