"""What the members of a ring train while some are killed: script.py STOP TRAIL SAMPLES BATCH.

The ledger has a slot for each sample of each epoch. A sample that is trained on leaves one part of the mean
in its slot: 1/n with n members. Training ends with the epoch in which the file STOP exists. TRAIL gets a line
for each step: the step, the number of members, and the time.
"""

from __future__ import annotations

import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hubring
from tests.support.scripts.spare import spare_compiler

MOST_EPOCHS = 1000
STEP_SECONDS = 0.02


class Network(nn.Module):
    """A ledger beside a small network.

    Args:
        samples: Samples in an epoch.
    """

    def __init__(self, samples: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.ledger = nn.Parameter(torch.zeros(MOST_EPOCHS, samples))

    def forward(self, epoch: int, ids: torch.Tensor) -> torch.Tensor:
        x = torch.randn(len(ids), 8, generator=torch.Generator().manual_seed(int(ids[0])))
        return self.layers(x).square().mean() - self.ledger[epoch, ids].sum()


def main() -> None:
    spare_compiler()
    stop, trail = Path(sys.argv[1]), Path(sys.argv[2])
    samples, batch = int(sys.argv[3]), int(sys.argv[4])
    hubring.init()
    model = Network(samples)
    groups: list[dict[str, Any]] = [
        {"params": model.layers.parameters(), "lr": 0.01, "momentum": 0.9},
        {"params": [model.ledger]},
    ]
    optimizer = hubring.DistributedOptimizer(torch.optim.SGD(groups, lr=1.0), model)
    sampler = hubring.ShardedSampler(range(samples), seed=5)
    loader = DataLoader(TensorDataset(torch.arange(samples)), batch_size=batch, sampler=sampler)
    done, step, epoch = optimizer.completed_steps, 0, 0
    with trail.open("w", buffering=1) as lines:
        while step < done or not stops(stop):
            sampler.set_epoch(epoch)
            for (ids,) in loader:
                step += 1
                if step <= done:
                    continue
                optimizer.zero_grad()
                model(epoch, ids).backward()
                time.sleep(STEP_SECONDS)
                optimizer.step()
                lines.write(f"{step} {hubring.size()} {time.time():.4f}\n")
            epoch += 1
    values = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    digest = sha256(values.numpy().tobytes()).hexdigest()
    hubring.report(digest=digest, epochs=epoch, trained=float(model.ledger.detach()[:epoch].ne(0).sum()))


def stops(stop: Path) -> bool:
    """Whether some member has seen the file; all members agree."""
    seen = torch.tensor([float(stop.exists())])
    return bool(hubring.allreduce(seen, hubring.ReduceOp.MAX, "stop"))


if __name__ == "__main__":
    main()
