"""The memory limit: the work that every row must do at least, in one process with all data.

There are no messages, no waiting and no other process. The process computes the mean of N gradients and the
step with the same loops as a shard, and in huge pages, like a shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hubring.ps.optim.blocks import BLOCK_BYTES, BlockSteps
from hubring.ps.optim.mean_and_step import optimizer_for
from hubring.ps.optim.zeros import zeros, zeros_like
from hubring.workers.bench.job import Job
from hubring.workers.bench.rows.model import on_server
from hubring.workers.bench.rows.row_member import Side


class Bound(Side):
    """`bound-memory`: all slices on one thread.

    `bound-memory-2` divides the slices between two processes, like two shards.
    """

    parts = 1
    """Number of processes that share the model."""

    def __init__(self, job: Job, rank: int) -> None:
        super().__init__(job, rank)
        torch.set_num_threads(1)
        self.ranks = range(job.size)
        numel = job.nbytes // 4
        share = -(-numel // self.parts)
        self._values = zeros(min(share, numel - rank * share), torch.float32)
        self._gradients = [zeros_like(self._values) for _ in self.ranks]
        self._slices = self._cut(job)

    def gradients(self, rank: int) -> Sequence[Tensor]:
        return [self._gradients[rank]]

    def values(self) -> Sequence[Tensor]:
        return [self._values]

    def step(self) -> None:
        for each in self._slices:
            each.step()

    def _cut(self, job: Job) -> list[Slice]:
        length = BLOCK_BYTES // 4
        scratch = torch.empty(length)
        given = zip(*(torch.split(gradient, length) for gradient in self._gradients), strict=True)
        pairs = zip(torch.split(self._values, length), given, strict=True)
        return [Slice(job.optimizer, values, list(gradients), scratch) for values, gradients in pairs]


class BoundOfTwo(Bound):
    """`bound-memory-2`."""

    parts = 2


class BoundCopy(Bound):
    """`bound-copy`: copies each slice for every worker immediately after the step."""

    def __init__(self, job: Job, rank: int) -> None:
        super().__init__(job, rank)
        self._copies = [zeros_like(self._values) for _ in self.ranks]
        length = BLOCK_BYTES // 4
        self._windows = list(zip(*(torch.split(copy, length) for copy in self._copies), strict=True))

    def values(self) -> Sequence[Tensor]:
        return self._copies

    def step(self) -> None:
        for each, windows in zip(self._slices, self._windows, strict=True):
            each.step()
            for window in windows:
                window.copy_(each.values)


class BoundCuda(Side):
    """`bound-cuda`: the whole model on one GPU, with the kernels of a shard."""

    def __init__(self, job: Job, rank: int) -> None:
        super().__init__(job, rank)
        self.ranks = range(job.size)
        self._values = torch.zeros(job.nbytes // 4, device=job.device)
        self._gradients = [torch.zeros_like(self._values) for _ in self.ranks]
        self._scratch = torch.empty_like(self._values)
        name, self._hyper = on_server(job.optimizer)
        self._steps = optimizer_for(name, torch.float32, self._values.device)

    def gradients(self, rank: int) -> Sequence[Tensor]:
        return [self._gradients[rank]]

    def values(self) -> Sequence[Tensor]:
        return [self._values]

    def step(self) -> None:
        self._steps.step(self._values, self._gradients, len(self.ranks), self._hyper, self._scratch)


class Slice:
    """One slice, its optimizer, and the ranks' gradients."""

    def __init__(self, optimizer: str, values: Tensor, gradients: list[Tensor], scratch: Tensor) -> None:
        self.values = values
        self._gradients = gradients
        self._scratch = scratch
        name, self._hyper = on_server(optimizer)
        self._steps = BlockSteps(name, values, finite=False)

    def step(self) -> None:
        """Steps with the mean of the gradients."""
        self._steps.step(self._gradients, self._hyper, self._scratch)
