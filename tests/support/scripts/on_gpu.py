"""The small script with its model on the first GPU.

on_gpu.py STEPS FILE: rank 0 writes the final parameters to FILE.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file

import hubring
from tests.support.scripts.small import network, sgd


def main() -> None:
    steps, file = int(sys.argv[1]), sys.argv[2]
    hubring.init()
    model = network(256).cuda()
    optimizer = hubring.DistributedOptimizer(sgd(model), model)
    for step in range(optimizer.completed_steps, steps):
        generator = torch.Generator().manual_seed(1000 * step + hubring.rank())
        x = torch.randn(8, 256, generator=generator).cuda()
        loss = ((model(x) - x.mean(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hubring.report(loss=loss.item())
    if hubring.rank() == 0:
        save_file({name: tensor.cpu() for name, tensor in model.state_dict().items()}, file)


if __name__ == "__main__":
    main()
