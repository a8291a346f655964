"""A training script that reports what a comparison measures: a small regression that starts fast.

measured.py STEPS SEED [GO]

With GO, several workers wait for that file before their last step.
"""

from __future__ import annotations

import os
import sys
import time

import torch

import hubring
from tests.support.scripts.spare import spare_compiler


def main() -> None:
    spare_compiler()
    steps, seed = map(int, sys.argv[1:3])
    hubring.init()
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 1)
    optimizer = hubring.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
    inputs = torch.randn(16, 4)
    for step in range(steps):
        while step == steps - 1 and hubring.size() > 1 and not all(map(os.path.exists, sys.argv[3:])):
            time.sleep(0.01)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        hubring.report(loss=loss.item(), samples=16)
        if hubring.rank() == 0 and step % 20 == 19:
            hubring.report(fit=loss.item())


if __name__ == "__main__":
    main()
