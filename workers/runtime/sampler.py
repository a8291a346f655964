"""Who trains on which sample.

The law: the union of all ranks' batches of B/N in step t is the batch of B that
one process with the same seed takes in step t.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from hubring.ps.core.errors import UsageError
from hubring.workers.runtime import context


class ShardedSampler(Sampler[int]):
    """Gives rank r every size-th sample, from r on, of an order that all ranks share.

    Every rank gets equally many, so a smaller last batch is equally small on all, and needs no
    weights: what is left over of the dataset's length by the size is dropped, other samples in
    each epoch when shuffling.

    Args:
        dataset: Only its length matters, and it must be the same on all ranks.
        shuffle: A new order each epoch, drawn from seed and epoch alone.
        seed: The same on all ranks.
        rank: None takes that of `hubring.init()`.
        size: Likewise.

    Raises:
        UsageError: Rank and size do not fit, or there are more ranks than samples.
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        self._length = len(dataset)
        self._rank = context.current().communicator.rank if rank is None else rank
        self._size = context.current().communicator.size if size is None else size
        if not 0 <= self._rank < self._size:
            raise UsageError(f"rank is {self._rank}; with size {self._size} it is 0 to {self._size - 1}")
        if self._length < self._size:
            raise UsageError(f"{self._length} samples cannot feed {self._size} ranks: start fewer workers")
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._skip = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order; call it before each epoch, or all epochs have the same one."""
        self._epoch = epoch

    def resume(self, samples: int) -> None:
        """Lets the next iteration, and only that, begin after so many of this rank's samples.

        Args:
            samples: Samples of this epoch that this rank has trained on: its batches times their size.

        Raises:
            UsageError: An epoch does not have so many.
        """
        if not 0 <= samples <= self._per_rank:
            raise UsageError(f"cannot resume after {samples} samples: a rank has {self._per_rank} an epoch")
        self._skip = samples

    def __iter__(self) -> Iterator[int]:
        """This rank's samples of the epoch, in the order to train on them."""
        skip, self._skip = self._skip, 0
        mine = self._order()[self._rank : self._per_rank * self._size : self._size]
        return iter(mine[skip:].tolist())

    def __len__(self) -> int:
        """How many samples the next iteration gives."""
        return self._per_rank - self._skip

    @property
    def _per_rank(self) -> int:
        return self._length // self._size

    def _order(self) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._length)
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        return torch.randperm(self._length, generator=generator)
