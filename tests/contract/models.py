"""Models that ranks attach and train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.bucketing import make_buckets
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.distributed import DistributedOptimizer


def linear(rank: int, outputs: int = 2) -> nn.Linear:
    model = nn.Linear(3, outputs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(rank + 1)
    return model


def attached(
    communicator: Communicator, model: nn.Module | None = None, bucket_bytes: int = 8
) -> list[Bucket]:
    model = model or linear(communicator.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    name = "SGD" if communicator.steps_on == "server" else ""
    buckets = make_buckets(optimizer, named, communicator.allocate, bucket_bytes, name)
    assert communicator.attach(buckets) == 0
    return buckets


def linear_of(inputs: int, outputs: int) -> nn.Linear:
    """Always the same values; torch's generator is shared by the ranks' threads."""
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(inputs))
    return layer


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def squares(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Returns the loss of a rank in a step."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))
    return (model(x) ** 2).mean()


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def train_two_groups(
    communicator: Communicator, make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
) -> list[torch.Tensor]:
    """Trains with half of every batch, or all; weights decay and biases do not, and the rate halves."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    generator = torch.Generator().manual_seed(communicator.rank)  # torch's own is shared by the threads
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator)
    groups = [
        {"params": [model[0].weight, model[2].weight], "weight_decay": 0.01},
        {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0, "lr": 0.02},
    ]
    optimizer = DistributedOptimizer(make(groups), model, communicator=communicator, bucket_bytes=64)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    data = torch.randn(8, 2, 4, 3, generator=torch.Generator().manual_seed(1))
    for both in data:
        share = both[communicator.rank] if communicator.size == 2 else both.flatten(0, 1)
        optimizer.zero_grad()
        (model(share) - share.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return [parameter.detach().clone() for parameter in model.parameters()]
