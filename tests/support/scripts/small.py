"""A training script that runs fast and is easy to stop: a small regression.

    small.py STEPS [WIDTH] [hold FILE STEP]... [spoil RANK STEP FACTOR] [pace SECONDS] [every STEPS]

With `hold`, every worker waits at STEP until FILE exists, so that a test can cause a fault at a known step.
With `spoil`, the loss of RANK in STEP is multiplied by FACTOR, for example nan or inf.
With `pace`, every step takes at least SECONDS.
With `every`, workers step alone and are merged after STEPS, with Nesterov momentum.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import hubring
from tests.support.scripts.spare import spare_compiler


def network(width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(width, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def loss_of(model: torch.nn.Module, step: int, rank: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, width, generator=generator).to(next(model.parameters()).device)
    return ((model(x) - x.mean(1, keepdim=True)) ** 2).mean()


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def nesterov(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def taken(arguments: list[str], name: str, count: int) -> Iterator[list[str]]:
    """Takes each option of this name out of the arguments, and yields its values."""
    while name in arguments:
        where = arguments.index(name)
        yield arguments[where + 1 : where + 1 + count]
        del arguments[where : where + 1 + count]


def main() -> None:
    spare_compiler()
    arguments = sys.argv[1:]
    holds = {int(step): Path(file) for file, step in taken(arguments, "hold", 2)}
    spoils = {(int(rank), int(step)): float(factor) for rank, step, factor in taken(arguments, "spoil", 3)}
    pace = sum(float(seconds) for (seconds,) in taken(arguments, "pace", 1))
    every = sum(int(steps) for (steps,) in taken(arguments, "every", 1))
    steps = int(arguments[0])
    width = int(arguments[1]) if len(arguments) > 1 else 16
    hubring.init()
    model = network(width)
    optimizer: hubring.DistributedOptimizer | hubring.LocalOptimizer
    if every:
        alone = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = hubring.LocalOptimizer(alone, model, every=every, outer=nesterov)
    else:
        optimizer = hubring.DistributedOptimizer(sgd(model), model)
    for step in range(optimizer.completed_steps, steps):
        if step in holds:
            print(f"holding at {step}", file=sys.stderr, flush=True)
            while not holds[step].exists():
                time.sleep(0.02)
        time.sleep(pace)
        loss = loss_of(model, step, hubring.rank(), width)
        if (hubring.rank(), step) in spoils:
            loss = loss * spoils[hubring.rank(), step]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hubring.report(loss=loss.item())


if __name__ == "__main__":
    main()
