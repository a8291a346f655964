"""A sampler for jobs whose number of ranks can change within an epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from itertools import cycle, islice

from torch.utils.data import Sampler

from hubring.workers.horovod.basics import rank, size


class ElasticSampler(Sampler[int]):
    """Divides the samples that no rank has trained on in this epoch among the ranks.

    Every rank gets the same number of samples: if they do not divide evenly, the first samples are used
    twice. Put the sampler into a `TorchState`, so that a new rank knows how far the epoch is.

    Args:
        dataset: Only its length is used; the length must be the same on all ranks.
        shuffle: Whether each epoch has a new order, which depends only on seed and epoch.
        seed: Seed of the order; the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Starts an epoch from its first sample. Call this at the end of the previous epoch."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records a batch that every rank has trained on."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Returns the progress in the epoch."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continues from this progress."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divides the rest of the epoch among the current ranks."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)  # noqa: S311
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Iterates over this rank's samples."""
        padded = islice(cycle(self.remaining_indices), self.total_size)
        self.indices = list(padded)[self.rank :: self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        """Number of samples left for this rank."""
        return self.num_samples
