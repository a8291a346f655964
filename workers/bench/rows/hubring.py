"""Hubring's rows, `hub-*` and `ring*`: a script's `optimizer.step()` with any topology."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import hubring
from hubring.workers.bench.job import Job
from hubring.workers.bench.rows.model import optimizer_of
from hubring.workers.bench.rows.row_member import Side


class Hubring(Side):
    """Exchanges nothing during backward, which is not timed.

    With a hub the bucket size is the default, as in most scripts; with a ring it is the peers' size.
    """

    def __init__(self, job: Job, rank: int) -> None:
        super().__init__(job, rank)
        hubring.init()
        self._net = nn.ParameterList(torch.zeros(dims, device=job.device) for dims in job.tensors)
        local = optimizer_of(job.optimizer, self._net.parameters())
        bucket_bytes = None if hubring.topology() == "hub" else job.bucket_bytes
        self._optimizer = hubring.DistributedOptimizer(
            local, self._net, overlap=False, bucket_bytes=bucket_bytes
        )
        for parameter in self._net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.zero_grad(set_to_none=False)  # moves the gradients to where they are exchanged

    def gradients(self, rank: int) -> Sequence[Tensor]:
        return [gradient_of(parameter).view(-1) for parameter in self._net.parameters()]

    def values(self) -> Sequence[Tensor]:
        return [parameter.detach().view(-1) for parameter in self._net.parameters()]

    def step(self) -> None:
        self._optimizer.step()


def gradient_of(parameter: Tensor) -> Tensor:
    """Returns a parameter's gradient."""
    assert parameter.grad is not None
    return parameter.grad
