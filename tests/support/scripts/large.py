"""A training script whose model is nearly all of the hub's memory.

    large.py MEGABYTES STEPS FILE

One flat parameter, SGD with momentum. After the steps, every worker waits until FILE exists.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import hubring
from tests.support.scripts.spare import spare_compiler


def main() -> None:
    spare_compiler()
    megabytes, steps, file = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    hubring.init()
    weight = torch.nn.Parameter(torch.zeros(megabytes * 2**18))
    sgd = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer = hubring.DistributedOptimizer(sgd, named_parameters=[("weight", weight)])
    weight.grad = torch.ones_like(weight)
    for _ in range(steps):
        optimizer.step()
    print("holding", file=sys.stderr, flush=True)
    while not file.exists():
        time.sleep(0.02)


if __name__ == "__main__":
    main()
