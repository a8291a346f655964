"""How the samples of an epoch are dealt while ranks are lost and enter.

Law: every sample of an epoch is dealt once, except for a remainder smaller than the number of ranks. A rank
keeps what it has drawn, and trains on it. What a lost rank had drawn and not trained on is dealt again, with
all that no rank had drawn. All ranks have equal shares, so that they take the same steps. A newcomer begins
behind what the others have trained on; the samples before that are only there to be counted. All ranks have
the same batches: where one has found an end, before more was dealt, the others and newcomers find one too.
"""

from __future__ import annotations

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
    order = torch.arange(length)
    taken = torch.zeros(length, dtype=torch.bool)
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
