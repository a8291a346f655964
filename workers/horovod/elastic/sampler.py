"""Who trains on which sample, where the number of ranks may change within an epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from itertools import cycle, islice

from torch.utils.data import Sampler

from hubring.workers.horovod.world.ranks import rank, size


class ElasticSampler(Sampler[int]):
    """Deals out the samples that no rank has trained on yet in this epoch.

    Every rank gets equally many: where they do not divide, the first ones are
    given twice. It belongs into a `TorchState`, so that ranks that come know how
    far the epoch is.

    Args:
        dataset: Only its length matters, and it must be the same on all ranks.
        shuffle: A new order each epoch, drawn from seed and epoch alone.
        seed: The same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, of which nothing has been trained on; call it at the end of the one before."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Counts a batch that every rank has trained on."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """How far training is."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Goes on from there."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deals out the rest of the epoch among the ranks that there are now."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)  # noqa: S311
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """This rank's samples, in the order to train on them."""
        padded = islice(cycle(self.remaining_indices), self.total_size)
        self.indices = list(padded)[self.rank :: self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        """How many samples this rank has left."""
        return self.num_samples
