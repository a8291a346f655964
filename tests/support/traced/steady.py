"""A training script with one bucket. Its ranks push one after another, and pause between steps.

steady.py STEPS FOLDER: all processes that are named in FOLDER record the last STEPS steps.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

import hubring

WARM_UP = 30
PAUSE_SECONDS = 0.02
"""Long enough for a shard to end its round, and for its next wait to sleep."""


def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def pause() -> None:
    time.sleep(PAUSE_SECONDS * (1 + hubring.rank()))


def start_recording(folder: Path) -> None:
    for file in folder.glob("*.pid"):
        with suppress(ProcessLookupError):
            os.kill(int(file.stem), signal.SIGPROF)


def main() -> None:
    steps, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.manual_seed(0)
    hubring.init()
    model = torch.nn.Linear(16, 8)
    optimizer = hubring.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
    torch.manual_seed(hubring.rank())
    for done in range(WARM_UP + steps):
        pause()
        if done == WARM_UP and hubring.rank() == 0:
            start_recording(folder)
        step(optimizer, model(torch.randn(4, 16)).square().mean())
    pause()


if __name__ == "__main__":
    main()
