"""Peers `ddp-gloo` and `ddp-nccl`: DistributedDataParallel, as nearly every script has it.

The backward pass is one autograd function that hands out gradients made before,
without computing or copying, so that its time is DDP's own: into the buckets,
around the ring, and the optimizer.
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


class HandOut(torch.autograd.Function):
    """A loss whose gradient is whatever `source` holds."""

    @staticmethod
    def forward(ctx: Any, source: Source, *parameters: Tensor) -> Tensor:
        ctx.source = source
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return (None, *ctx.source.take())


class Source:
    """Gradients made before; autograd adopts a tensor only if nobody else holds it, so views are fresh."""

    def __init__(self, job: Job) -> None:
        self.flat = torch.zeros(job.nbytes // 4, device=job.device)
        self._dims = job.tensors

    def take(self) -> list[Tensor]:
        """Every parameter's gradient, in order."""
        return views(self.flat, self._dims)


class Net(nn.Module):
    """Parameters of a shape, whose loss costs nothing."""

    def __init__(self, job: Job, source: Source) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(dims, device=job.device) for dims in job.tensors)
        self._source = source

    def forward(self) -> Tensor:
        """The loss."""
        loss: Tensor = HandOut.apply(self._source, *self.weights)  # type: ignore[no-untyped-call]
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
        """The forward pass."""
        self._optimizer.zero_grad()
        self._loss = self._ddp()

    def step(self) -> None:
        self._loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def close(self) -> None:
        dist.destroy_process_group()


def wrap(net: nn.Module, job: Job) -> DistributedDataParallel:
    """DDP at its best: gradients stay in the buckets, its own way to save a copy."""
    return DistributedDataParallel(net, bucket_cap_mb=job.bucket_bytes / 2**20, gradient_as_bucket_view=True)
