"""Distributes samples over ranks.

Invariant: in step t, the union of all ranks' batches, of B/N samples or of each rank's share of B, is the
batch of B samples that one process with the same seed takes in step t.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from hubring.ps.core.errors import UsageError
from hubring.workers.runtime import context


class ShardedSampler(Sampler[int]):
    """Gives rank r every size-th sample, starting at r, of an order that all ranks share.

    Every rank gets the same number of samples, so the last batch is equally small on all ranks
    and needs no weights. The remainder, len(dataset) % size samples, is dropped. With `shuffle`,
    each epoch drops other samples.

    With `shares`, rank r gets shares[r] of every sum(shares) samples. Batches of `b * sampler.share` samples
    keep all ranks in step, and `optimizer.weight` the mean exact.

    On a ring with `--min-workers` the rest of an epoch is dealt again when ranks are lost or enter
    (`hubring.workers.communicators.ring.healing.samples`), unless `rank` and `size` are given.

    Args:
        dataset: Only its length is used. It must be the same on all ranks.
        shuffle: Use a new order each epoch, computed from `seed` and the epoch.
        seed: Must be the same on all ranks.
        rank: None uses the rank of `hubring.init()`.
        size: None uses the size of `hubring.init()`.
        shares: Whole numbers of at least 1, in rank order, for workers of unlike speeds; None: all alike.

    Attributes:
        share: This rank's share; 1 without `shares`.

    Raises:
        UsageError: `dataset` is a DataLoader or has no length, `rank` is not below `size`, `shares` do not
            fit the ranks, or there are more ranks than samples.
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        size: int | None = None,
        shares: Sequence[int] | None = None,
    ) -> None:
        if isinstance(dataset, DataLoader | IterableDataset) or not hasattr(dataset, "__len__"):
            raise UsageError(
                f"the dataset is a {type(dataset).__name__}, whose samples have no numbers: pass the dataset"
                " that the DataLoader reads, or let each rank read its own samples, by hubring.rank() and"
                " hubring.size()"
            )
        self._length = len(dataset)
        follows = rank is None and size is None
        members = context.current().communicator.members if follows else None
        self._rank = context.current().communicator.rank if rank is None else rank
        self._size = context.current().communicator.size if size is None else size
        if not 0 <= self._rank < self._size:
            raise UsageError(f"rank is {self._rank}; with size {self._size} it must be 0 to {self._size - 1}")
        given = [1] * self._size if shares is None else list(shares)
        if len(given) != self._size or not all(isinstance(one, int) and one > 0 for one in given):
            raise UsageError(
                f"shares are {given}; pass a whole number of at least 1 for each of the {self._size} ranks"
            )
        if shares is not None and members is not None:
            raise UsageError(
                "a ring with --min-workers deals all ranks alike: remove shares or --min-workers"
            )
        self._whole, self.share = sum(given), given[self._rank]
        self._before = sum(given[: self._rank])
        if self._length < self._whole:
            raise UsageError(
                f"the dataset has {self._length} samples, and {self._size} ranks need {self._whole} or more:"
                " start fewer workers, or make their shares smaller"
            )
        self._turns = self._length // self._whole
        self._samples = None if members is None else members.deal(self._length, self._order)
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._skip = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch for shuffling. Call it before each epoch; otherwise the order does not change."""
        self._epoch = epoch

    def resume(self, samples: int) -> None:
        """Makes the next iteration, and only that one, skip this rank's first `samples` samples.

        Args:
            samples: Samples of this epoch that this rank has trained on: its batches times the batch size.

        Raises:
            UsageError: `samples` is negative or exceeds this rank's samples in an epoch.
        """
        if not 0 <= samples <= self._per_rank:
            raise UsageError(
                f"cannot resume after {samples} samples: a rank has {self._per_rank} an epoch;"
                f" pass 0 to {self._per_rank}"
            )
        self._skip = samples

    def __iter__(self) -> Iterator[int]:
        """Yields this rank's samples of the epoch."""
        skip, self._skip = self._skip, 0
        if self._samples is not None:
            return self._samples.begin(self._epoch, skip)
        turns = self._order(self._epoch)[: self._turns * self._whole].view(self._turns, self._whole)
        mine = turns[:, self._before : self._before + self.share].flatten()
        return iter(mine[skip:].tolist())

    def __len__(self) -> int:
        """Returns the number of samples in the next iteration."""
        if self._samples is not None:
            return self._samples.count(self._skip)
        return self._per_rank - self._skip

    @property
    def shard(self) -> tuple[int, ...]:
        """The epoch that was set, whether it shuffles, the rank, the size, and the data set's samples."""
        return self._epoch, int(self._shuffle), self._rank, self._size, self._length

    @property
    def _per_rank(self) -> int:
        return self._turns * self.share

    def _order(self, epoch: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._length, device="cpu")
        generator = torch.Generator().manual_seed(self._seed + epoch)
        return torch.randperm(self._length, generator=generator, device="cpu")
