"""A training script that runs fast and is easy to stop: a small regression.

    small.py STEPS [WIDTH] [hold FILE STEP]... [spoil RANK STEP FACTOR] [pace SECONDS]

With `hold`, every worker waits at STEP until FILE exists, so that a test can cause a fault at a known step.
With `spoil`, the loss of RANK in STEP is multiplied by FACTOR, for example nan or inf.
With `pace`, every step takes at least SECONDS.
"""

from __future__ import annotations

import sys
import time
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


def main() -> None:
    spare_compiler()
    arguments = sys.argv[1:]
    holds: dict[int, Path] = {}
    while "hold" in arguments:
        where = arguments.index("hold")
        holds[int(arguments[where + 2])] = Path(arguments[where + 1])
        del arguments[where : where + 3]
    spoiled, factor = (-1, -1), 1.0
    if "spoil" in arguments:
        where = arguments.index("spoil")
        spoiled = int(arguments[where + 1]), int(arguments[where + 2])
        factor = float(arguments[where + 3])
        del arguments[where : where + 4]
    pace = 0.0
    if "pace" in arguments:
        where = arguments.index("pace")
        pace = float(arguments[where + 1])
        del arguments[where : where + 2]
    steps = int(arguments[0])
    width = int(arguments[1]) if len(arguments) > 1 else 16
    hubring.init()
    model = network(width)
    optimizer = hubring.DistributedOptimizer(sgd(model), model)
    for step in range(optimizer.completed_steps, steps):
        if step in holds:
            print(f"holding at {step}", file=sys.stderr, flush=True)
            while not holds[step].exists():
                time.sleep(0.02)
        time.sleep(pace)
        loss = loss_of(model, step, hubring.rank(), width)
        if (hubring.rank(), step) == spoiled:
            loss = loss * factor
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hubring.report(loss=loss.item())


if __name__ == "__main__":
    main()
