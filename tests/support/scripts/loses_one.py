"""A training on the worker's own device, in which one of three workers is killed.

loses_one.py STEPS FILE: rank 1 of three is killed in step LOST_IN. Rank 0 writes the last parameters to FILE.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from safetensors.torch import save_file

import hubring
from tests.support.scripts.small import network, sgd
from tests.support.scripts.spare import spare_compiler

LOST_IN, LOST, SIZE, WIDTH = 5, 1, 3, 256


def loss_of(model: torch.nn.Module, step: int, rank: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, WIDTH, generator=generator).to(device)
    return ((model(x) - x.mean(1, keepdim=True)) ** 2).mean()


def expected(steps: int) -> dict[str, torch.Tensor]:
    """Returns the final parameters of an undisturbed training by the same workers on the CPU."""
    model = network(WIDTH)
    optimizer = sgd(model)
    for step in range(steps):
        left = [0, 2] if step == LOST_IN else [0, 1]  # the members have their new ranks one step later
        ranks = range(SIZE) if step < LOST_IN else left
        optimizer.zero_grad()
        torch.stack([loss_of(model, step, rank, torch.device("cpu")) for rank in ranks]).mean().backward()
        optimizer.step()
    return dict(model.state_dict())


def main() -> None:
    spare_compiler()
    steps, file = int(sys.argv[1]), sys.argv[2]
    hubring.init()
    device = hubring.device()
    model = network(WIDTH).to(device)
    optimizer = hubring.DistributedOptimizer(sgd(model), model)
    for step in range(steps):
        if (step, hubring.rank(), hubring.size()) == (LOST_IN, LOST, SIZE):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss_of(model, step, hubring.rank(), device).backward()
        optimizer.step()
    if hubring.rank() == 0:
        save_file({name: tensor.cpu() for name, tensor in model.state_dict().items()}, file)


if __name__ == "__main__":
    main()
