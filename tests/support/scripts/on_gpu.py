"""The small script with its model on the first GPU.

on_gpu.py STEPS FILE: rank 0 writes the final parameters to FILE.
"""

from __future__ import annotations

import sys

from safetensors.torch import save_file

import hubring
from tests.support.scripts.small import loss_of, network, sgd


def main() -> None:
    steps, file = int(sys.argv[1]), sys.argv[2]
    hubring.init()
    model = network(256).cuda()
    optimizer = hubring.DistributedOptimizer(sgd(model), model)
    for step in range(optimizer.completed_steps, steps):
        loss = loss_of(model, step, hubring.rank(), 256)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hubring.report(loss=loss.item())
    if hubring.rank() == 0:
        save_file({name: tensor.cpu() for name, tensor in model.state_dict().items()}, file)


if __name__ == "__main__":
    main()
