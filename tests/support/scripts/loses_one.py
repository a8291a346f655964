"""A training on the worker's own device, in which one of three workers is killed.

loses_one.py STEPS FILE: rank 1 of three is killed in step LOST_IN. Rank 0 writes the last parameters to FILE.
"""

from __future__ import annotations

import os
import signal
import sys

from safetensors.torch import save_file

import hubring
from tests.support.scripts.small import loss_of, network, sgd
from tests.support.scripts.spare import spare_compiler

LOST_IN, LOST, SIZE, WIDTH = 5, 1, 3, 256


def main() -> None:
    spare_compiler()
    steps, file = int(sys.argv[1]), sys.argv[2]
    hubring.init()
    model = network(WIDTH).to(hubring.device())
    optimizer = hubring.DistributedOptimizer(sgd(model), model)
    for step in range(steps):
        if (step, hubring.rank(), hubring.size()) == (LOST_IN, LOST, SIZE):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss_of(model, step, hubring.rank(), WIDTH).backward()
        optimizer.step()
    if hubring.rank() == 0:
        save_file({name: tensor.cpu() for name, tensor in model.state_dict().items()}, file)


if __name__ == "__main__":
    main()
