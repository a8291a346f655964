"""Models that ranks attach and train."""

from __future__ import annotations

import torch
from torch import nn

from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.bucketing import make_buckets
from hubring.workers.communicators.base import Communicator


def linear(rank: int, outputs: int = 2) -> nn.Linear:
    model = nn.Linear(3, outputs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(rank + 1)
    return model


def attached(
    communicator: Communicator, model: nn.Module | None = None, bucket_bytes: int = 8, step: int = 0
) -> list[Bucket]:
    model = model or linear(communicator.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    name = "SGD" if communicator.steps_on == "server" else ""
    buckets = make_buckets(optimizer, named, communicator.allocate, bucket_bytes, name)
    assert communicator.attach(buckets) == step
    return buckets


def squares(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Returns the loss of a rank in a step."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))
    return (model(x) ** 2).mean()
