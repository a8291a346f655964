"""Changes everything that a script can change, in turn; alone with `plain`, otherwise as one of the ranks.

python -m tests.support.scripts.every_change plain FILE
ps-run -np 2 tests/support/scripts/every_change.py ranks FILE
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

import hubring

DEVICE = torch.device(os.environ.get("HUBRING_TEST_DEVICE", "cpu"))


class Model(nn.Module):
    """Two layers that always take part, one that sometimes does, and tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.register_buffer("mask", torch.ones(1, 4).expand(8, 4))
        self.both = True

    def forward(self, batch: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(batch))
        if self.both:
            hidden = hidden + self.sometimes(hidden)
        return self.tied(self.last(hidden))


def clamp(weight: Tensor) -> None:
    weight.data.clamp_(-0.2, 0.2)


def train(model: Model, optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer, shares: Any) -> None:
    """Takes ten steps, each with a change of another kind."""

    def backward(batch: Tensor) -> None:
        torch.stack([model(share).square().mean() for share in shares(batch)]).mean().backward()

    generator = torch.Generator().manual_seed(1)
    for number, batch in enumerate(torch.randn(10, 8, 4, generator=generator).to(DEVICE)):
        optimizer.zero_grad()
        model.both = number != 1  # no gradient: not stepped
        backward(batch)
        if number == 3:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        if number == 4:
            optimizer.param_groups.reverse()
        if number == 5:
            inner.register_step_post_hook(lambda *_: clamp(model.last.weight))
        if number == 6:
            model.sometimes.requires_grad_(False)
            model.sometimes.zero_grad()
        optimizer.step()
        if number == 7:
            for one in model.parameters():
                one.data.mul_(0.9)
            where = model.first.bias.detach()
            if where.is_cuda:
                where[0] = 0.25
            else:
                where.numpy()[0] = 0.25
        if number == 8:
            optimizer.load_state_dict(optimizer.state_dict())
            model.load_state_dict(model.state_dict())


def main(mode: str, file: str) -> None:
    """Trains, and writes the parameters and the optimizer's state to a file; with ranks, rank 0 does."""
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    own: list[dict[str, Any]] = [{"params": [*model.first.parameters()], "lr": 0.1}]
    own += [{"params": [*model.sometimes.parameters()]}]
    own += [{"params": [*model.last.parameters(), model.tied.bias], "lr": 0.2}]
    inner = torch.optim.SGD(own, lr=0.05, momentum=0.9, weight_decay=0.01)
    if mode == "plain":
        train(model, inner, inner, lambda batch: batch.chunk(2))
        rank = 0
        state = inner.state_dict()
    else:
        hubring.init()
        rank = hubring.rank()
        optimizer = hubring.DistributedOptimizer(inner, model, overlap=False)
        train(model, optimizer, inner, lambda batch: [batch.chunk(2)[rank]])
        state = optimizer.state_dict()
    if rank == 0:
        momenta = {place: one["momentum_buffer"] for place, one in state["state"].items()}
        torch.save({"parameters": dict(model.state_dict()), "momenta": momenta}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
