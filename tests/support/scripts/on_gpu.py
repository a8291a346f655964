"""The small script with its model on the first GPU.

on_gpu.py STEPS FILE: rank 0 writes its last parameters to FILE.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file

import workers
from tests.system.small import network, sgd


def main() -> None:
    steps, file = int(sys.argv[1]), sys.argv[2]
    workers.init()
    model = network(256).cuda()
    optimizer = workers.DistributedOptimizer(sgd(model), model)
    for step in range(optimizer.completed_steps, steps):
        generator = torch.Generator().manual_seed(1000 * step + workers.rank())
        x = torch.randn(8, 256, generator=generator).cuda()
        loss = ((model(x) - x.mean(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        workers.report(loss=loss.item())
    if workers.rank() == 0:
        save_file({name: tensor.cpu() for name, tensor in model.state_dict().items()}, file)


if __name__ == "__main__":
    main()
