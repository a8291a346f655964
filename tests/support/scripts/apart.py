"""A training whose ranks part after four steps, in the way that the first argument names."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

import hubring
from tests.support.scripts.small import loss_of, network, sgd
from tests.support.scripts.spare import spare_compiler

WIDTH = 16


def main() -> None:
    spare_compiler()
    hubring.init()
    rank, model = hubring.rank(), network(WIDTH)
    optimizer = hubring.DistributedOptimizer(sgd(model), model)

    def backward() -> None:
        loss_of(model, 0, rank, WIDTH).backward()

    def step() -> None:
        optimizer.zero_grad()
        backward()
        optimizer.step()

    def two(first: Callable[[], object], second: Callable[[], object]) -> None:
        (second if rank else first)()

    for _ in range(4):
        step()
    match sys.argv[1]:
        case "barrier":
            two(step, hubring.barrier)
        case "names":
            hubring.allreduce(torch.ones(2), name=f"sum {rank}")
        case "loop":
            two(step, lambda: None)
            hubring.barrier()
        case "optimizer":
            two(lambda: hubring.DistributedOptimizer(sgd(other := network(WIDTH)), other), hubring.barrier)
        case "backward":
            two(backward, lambda: None)
            for _ in range(3):
                step()


if __name__ == "__main__":
    main()
