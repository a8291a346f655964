"""The rows that exchange through a library: Gloo, DistributedDataParallel, MPI, RPC, and Hubring itself.

The backward pass of DDP's row is one autograd function that returns prepared gradients, without computing or
copying. So the timed step contains only DDP's buckets, the allreduce, and the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hubring
from hubring.workers.bench.job import BenchJob
from hubring.workers.bench.member import (
    CODED_SLACK,
    ExpectedParameters,
    FlatRowMember,
    ResultCheck,
    RowMember,
    on_server,
    optimizer_of,
    views,
)
from hubring.workers.peers import rendezvous, rpc
from hubring.workers.peers.rendezvous import MpiWorld


class GlooMember(FlatRowMember):
    """Starts all buckets, so that Gloo's threads overlap them, and steps each bucket when it arrives."""

    def __init__(self, job: BenchJob, rank: int) -> None:
        rendezvous.join(job.seat(rank))
        super().__init__(job, rank)

    def step(self) -> None:
        works = [dist.all_reduce(bucket.gradients, async_op=True) for bucket in self._buckets]
        for work, bucket in zip(works, self._buckets, strict=True):
            assert work is not None
            work.wait()
            bucket.step()


class PreparedLoss(torch.autograd.Function):
    """A loss whose gradients are those that `source` returns: those of all parameters, in order."""

    @staticmethod
    def forward(ctx: Any, source: Callable[[], list[Tensor]], *parameters: Tensor) -> Tensor:
        ctx.source = source
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return (None, *ctx.source())


class Net(nn.Module):
    """The parameters of a shape, with a loss that costs nothing."""

    def __init__(self, job: BenchJob, source: Callable[[], list[Tensor]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(dims, device=job.device) for dims in job.tensors)
        self._source = source

    def forward(self) -> Tensor:
        """Returns the loss."""
        loss: Tensor = PreparedLoss.apply(self._source, *self.weights)  # type: ignore[no-untyped-call]
        return loss


class DdpMember(RowMember):
    """A member whose model DDP wraps."""

    backend: ClassVar[Literal["gloo", "hubring"]] = "gloo"

    def __init__(self, job: BenchJob, rank: int) -> None:
        if job.device == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        rendezvous.join(job.seat(rank, self.backend))
        super().__init__(job, rank)
        # autograd adopts a tensor only if it holds the sole reference, so each call returns new views.
        self._source = partial(views, torch.zeros(job.nbytes // 4, device=job.device), job.tensors)
        self._net = Net(job, self._source)
        self._ddp = wrap(self._net, job)
        self._optimizer = optimizer_of(job.optimizer, self._net.parameters())
        self._loss = torch.zeros(())

    def gradients(self, rank: int) -> Sequence[Tensor]:
        return [gradient.view(-1) for gradient in self._source()]

    def values(self) -> Sequence[Tensor]:
        return [parameter.detach().view(-1) for parameter in self._net.parameters()]

    def prepare(self) -> None:
        """Runs the forward pass."""
        self._optimizer.zero_grad()
        self._loss = self._ddp()

    def step(self) -> None:
        self._loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()


class DdpHubMember(DdpMember):
    """The same on the backend `hubring`, with a hub that rank 0 starts."""

    backend = "hubring"


def wrap(net: nn.Module, job: BenchJob) -> DistributedDataParallel:
    """Wraps a model with DDP's fastest settings: gradients are views of the buckets, which saves a copy."""
    return DistributedDataParallel(net, bucket_cap_mb=job.bucket_bytes / 2**20, gradient_as_bucket_view=True)


class MpiMember(FlatRowMember):
    """Reduces and steps the buckets one after another, in place."""

    def __init__(self, job: BenchJob, rank: int) -> None:
        super().__init__(job, rank)
        self._world = MpiWorld(job.seat(rank))

    def step(self) -> None:
        for bucket in self._buckets:
            self._world.sum(bucket.gradients)
            bucket.step()


class RpcMember(FlatRowMember):
    """A worker; the optimizer runs on the server."""

    def __init__(self, job: BenchJob, rank: int) -> None:
        super().__init__(job, rank, job.slice_bytes)
        self._client = rpc.RpcClient(job.seat(rank))
        name, self._hyper = on_server(job.optimizer)
        self._slices = [
            (number, rpc.own(bucket.gradients), bucket.values) for number, bucket in enumerate(self._buckets)
        ]
        for number, _, values in self._slices if rank == 0 else ():
            self._client.hold(number, values, name)
        self._client.gather(None)  # now the server has all slices

    def step(self) -> None:
        for answer in [self._client.push_pull(*one, self._hyper) for one in self._slices]:
            answer()

    def close(self) -> None:
        self._client.leave()


class HubringMember(RowMember):
    """Exchanges nothing during backward, which is not timed.

    With a hub the bucket size is the default, as in most scripts; with a ring it is the peers' size.

    Attributes:
        dtype: Of the model.
    """

    dtype = torch.float32

    def __init__(self, job: BenchJob, rank: int) -> None:
        super().__init__(job, rank)
        hubring.init()
        self._net = nn.ParameterList(
            torch.zeros(dims, dtype=self.dtype, device=job.device) for dims in job.tensors
        )
        local = optimizer_of(job.optimizer, self._net.parameters())
        most = None if hubring.topology() == "hub" else job.bucket_bytes
        self._optimizer = hubring.DistributedOptimizer(local, self._net, overlap=False, bucket_bytes=most)
        for parameter in self._net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.zero_grad(set_to_none=False)  # moves the gradients to where they are exchanged

    def gradients(self, rank: int) -> Sequence[Tensor]:
        return [gradient_of(parameter).view(-1) for parameter in self._net.parameters()]

    def values(self) -> Sequence[Tensor]:
        return [parameter.detach().view(-1) for parameter in self._net.parameters()]

    def step(self) -> None:
        self._optimizer.step()


class Bfloat16Member(HubringMember):
    """The same model in half of the memory. Its check allows for rounded gradients."""

    dtype = torch.bfloat16

    def _check_for(self, job: BenchJob) -> ResultCheck:
        return ExpectedParameters(job.optimizer, job.size, CODED_SLACK)


def gradient_of(parameter: Tensor) -> Tensor:
    """Returns a parameter's gradient."""
    assert parameter.grad is not None
    return parameter.grad
