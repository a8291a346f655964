"""A training script whose parameters and gradients are bytes that a test knows: marked.py STEPS."""

from __future__ import annotations

import sys

import torch

import hubring

NUMEL = 1024


def mark(seed: int) -> torch.Tensor:
    """Returns the values of the parameter (seed 1), which never change, or of a gradient (seed 2)."""
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


class Marked(torch.nn.Module):
    """One parameter without a gradient, and one whose gradient is always the same."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.nn.Parameter(mark(1))
        self.moved = torch.nn.Parameter(torch.zeros(NUMEL))

    def forward(self) -> torch.Tensor:
        return (self.moved * mark(2)).sum() + 0 * self.kept.sum()


def main() -> None:
    hubring.init()
    model = Marked()
    optimizer = hubring.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    for _ in range(optimizer.completed_steps, int(sys.argv[1])):
        optimizer.zero_grad()
        loss = model()
        loss.backward()
        optimizer.step()
    hubring.report(loss=loss.item())


if __name__ == "__main__":
    main()
