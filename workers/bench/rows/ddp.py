"""Peers `ddp-gloo` and `ddp-nccl`: DistributedDataParallel, as in most scripts.

The backward pass is one autograd function that returns prepared gradients, without computing or copying. So
the timed step contains only DDP's buckets, the allreduce, and the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hubring.workers.bench.job import Job
from hubring.workers.bench.rows.model import optimizer_of, views
from hubring.workers.bench.rows.row_member import Side
from hubring.workers.peers import process_group


class PreparedLoss(torch.autograd.Function):
    """A loss whose gradients are those of `source`."""

    @staticmethod
    def forward(ctx: Any, source: Source, *parameters: Tensor) -> Tensor:
        ctx.source = source
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return (None, *ctx.source.take())


class Source:
    """Prepared gradients. autograd adopts a tensor only if it holds the sole reference, so views are new."""

    def __init__(self, job: Job) -> None:
        self.flat = torch.zeros(job.nbytes // 4, device=job.device)
        self._dims = job.tensors

    def take(self) -> list[Tensor]:
        """Returns the gradients of all parameters, in order."""
        return views(self.flat, self._dims)


class Net(nn.Module):
    """The parameters of a shape, with a loss that costs nothing."""

    def __init__(self, job: Job, source: Source) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(dims, device=job.device) for dims in job.tensors)
        self._source = source

    def forward(self) -> Tensor:
        """Returns the loss."""
        loss: Tensor = PreparedLoss.apply(self._source, *self.weights)  # type: ignore[no-untyped-call]
        return loss


class Ddp(Side):
    """A member whose model DDP wraps."""

    def __init__(self, job: Job, rank: int) -> None:
        if job.device == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        process_group.join(job.seat(rank))
        super().__init__(job, rank)
        self._source = Source(job)
        self._net = Net(job, self._source)
        self._ddp = wrap(self._net, job)
        self._optimizer = optimizer_of(job.optimizer, self._net.parameters())
        self._loss = torch.zeros(())

    def gradients(self, rank: int) -> Sequence[Tensor]:
        return [gradient.view(-1) for gradient in self._source.take()]

    def values(self) -> Sequence[Tensor]:
        return [parameter.detach().view(-1) for parameter in self._net.parameters()]

    def prepare(self) -> None:
        """Runs the forward pass."""
        self._optimizer.zero_grad()
        self._loss = self._ddp()

    def step(self) -> None:
        self._loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def close(self) -> None:
        dist.destroy_process_group()


def wrap(net: nn.Module, job: Job) -> DistributedDataParallel:
    """Wraps a model with DDP's fastest settings: gradients are views of the buckets, which saves a copy."""
    return DistributedDataParallel(net, bucket_cap_mb=job.bucket_bytes / 2**20, gradient_as_bucket_view=True)
