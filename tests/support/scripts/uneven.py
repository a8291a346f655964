"""A training script whose rank 1 leaves after half of the steps, and checks its parameters then.

    uneven.py STEPS WIDTH FILE

Rank 1 leaves once rank 0 has created FILE, just before a step that only rank 0 takes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import hubring
from tests.support.scripts.small import loss_of, network, sgd
from tests.support.scripts.spare import spare_compiler


def main() -> None:
    steps, width, file = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    spare_compiler()
    hubring.init()
    rank, half = hubring.rank(), steps // 2
    model = network(width)
    optimizer = hubring.DistributedOptimizer(sgd(model), model)
    for step in range(half if rank else steps):
        optimizer.zero_grad()
        loss_of(model, step, rank, width).backward()
        if step == half:
            file.touch()
        optimizer.step()
    if not rank:
        return
    optimizer.synchronize()
    last = [parameter.detach().clone() for parameter in model.parameters()]
    while not file.exists():
        time.sleep(0.02)
    hubring.shutdown()
    held = list(model.parameters())
    assert all(torch.equal(was, now) for was, now in zip(last, held, strict=True)), "moved on after the end"


if __name__ == "__main__":
    main()
