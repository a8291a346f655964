"""Two groups of parameters that two ranks train, each with half of every batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.support.training.ranks import AggregatingRanks, HubRanks, RingRanks

RTOL, ATOL = 1e-5, 1e-6
"""Between one sum over the doubled batch and the mean of two means, after STEPS steps in float32."""

STEPS = 8


class TwoOnAHub(HubRanks):
    size = 2


class TwoAggregating(AggregatingRanks):
    size = 2


class TwoOnARing(RingRanks):
    size = 2


def momentum_sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01)


def train_two_groups(
    communicator: Communicator, make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
) -> list[torch.Tensor]:
    """Weights decay and biases do not; the learning rate halves every three steps."""
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
    data = torch.randn(STEPS, 2, 4, 3, generator=torch.Generator().manual_seed(1))
    for both in data:
        share = both[communicator.rank] if communicator.size == 2 else both.flatten(0, 1)
        optimizer.zero_grad()
        (model(share) - share.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return [parameter.detach().clone() for parameter in model.parameters()]
