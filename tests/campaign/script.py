"""The training script of a campaign: a ledger and a small network.

    script.py FOLDER NAME WORKERS STEPS PACE RELAYS [HOLDERS AT]...

RELAYS are PORT=RELAY with commas between them: the shards' ports, and those to connect to in their place.
HOLDERS are ranks with commas between them. Before step AT they write `held-AT-NAME` to FOLDER, and wait until
`go-AT` is there. Each step adds a line to `NAME.trail`; at the end the parameters go to `NAME.safetensors`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import hubring
from hubring.ps.transport import registry
from hubring.ps.transport.base import Connection, Transport
from hubring.ps.transport.registry import ShardAddress
from tests.campaign.ledger import ROWS
from tests.campaign.scenario import BEFORE_OPTIMIZER
from tests.support.scripts.spare import spare_compiler

HOLD_SECONDS = 130.0
"""Longer than any run."""


class Model(nn.Module):
    """The ledger, and a network whose gradient depends on its parameters."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ledger = nn.Parameter(torch.zeros(ROWS, workers))
        self.network = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(8, 16, generator=generator)
        error = self.network(inputs) - inputs.mean(1, keepdim=True)
        return error.square().mean() - self.ledger[step, rank]


def optimizer_of(model: Model) -> torch.optim.Optimizer:
    groups = [{"params": [model.ledger], "lr": 1.0}, {"params": model.network.parameters(), "momentum": 0.9}]
    return torch.optim.SGD(groups, lr=0.05)


def main() -> None:
    spare_compiler()
    folder, name, workers, steps, pace, relays, *holds = sys.argv[1:]
    connect_through(dict(each.split("=") for each in relays.split(",") if each))
    hubring.init()
    rank = hubring.rank()
    model = Model(int(workers))
    where = {int(at): Path(folder) for holders, at in pairs(holds) if str(rank) in holders.split(",")}
    if BEFORE_OPTIMIZER in where:
        hold(Path(folder), name, BEFORE_OPTIMIZER)
    optimizer = hubring.DistributedOptimizer(optimizer_of(model), model)
    with Path(folder, f"{name}.trail").open("w", buffering=1) as trail:
        before = model.ledger.detach().clone()
        for step in range(optimizer.completed_steps, int(steps)):
            if step in where:
                hold(where[step], name, step)
            began = time.monotonic()
            time.sleep(float(pace))
            optimizer.zero_grad()
            loss = model.loss(rank, step)
            loss.backward()
            optimizer.step()
            before = look(model.ledger.detach(), before, step, time.monotonic() - began, trail)
            hubring.report(loss=loss.item())
    save_file(model.state_dict(), Path(folder, f"{name}.safetensors"))


def connect_through(relays: dict[str, str]) -> None:
    """Connects to other ports in place of those of the shards."""
    dial = registry.dial_by

    def dial_relay(kind: Transport, shard: ShardAddress, timeout: float) -> Connection:
        addresses = {}
        for name, address in shard.addresses.items():
            host, colon, port = address.rpartition(":")
            addresses[name] = f"{host}{colon}{relays.get(port, port)}"
        return dial(kind, shard._replace(addresses=addresses), timeout)

    registry.dial_by = dial_relay


def pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    yield from zip(words[::2], words[1::2], strict=True)


def hold(folder: Path, name: str, step: int) -> None:
    (folder / f"held-{step}-{name}").touch()
    deadline = time.monotonic() + HOLD_SECONDS
    while not (folder / f"go-{step}").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no go-{step} after {HOLD_SECONDS:g} s: the campaign has ended")
        time.sleep(0.01)


def look(ledger: Tensor, before: Tensor, step: int, seconds: float, trail: TextIO) -> Tensor:
    """Writes what this worker sees after a step; returns a copy of the ledger."""
    line = {
        "step": step,
        "rank": hubring.rank(),
        "pid": os.getpid(),
        "seconds": seconds,
        "seen": (ledger != 0).sum(0).tolist(),
        "backward": int((ledger < before).sum()),
    }
    trail.write(json.dumps(line) + "\n")
    return ledger.clone()


if __name__ == "__main__":
    main()
