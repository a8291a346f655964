"""A script whose model has more state than its trained parameters: own_state.py FOLDER HOW [clips] [thaws].

Its buffers are BatchNorm's statistics and one that differs by rank. Its frozen layer is another one in each
life of the job, so only a checkpoint can bring it back. In the first life, rank 1 asks for a stop at step 20
(HOW is "stop"), or kills itself after that as soon as there is a checkpoint ("kill"). Each rank writes its
`state_dict()` to FOLDER: at the end, or, with "hold RANK", in its later life before its first step. Then no
rank ends, and that rank waits at step 20 to be killed. With "clips", the script clips gradients. With
"thaws", the last layer is frozen until step 10.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

import hubring
from tests.support.scripts.spare import spare_compiler

STEPS = 80
THAW, BEGIN = 10, 20


class Model(torch.nn.Module):
    """A small network; `seen` sums what this rank has seen."""

    def __init__(self, life: int) -> None:
        super().__init__()
        torch.manual_seed(life)
        self.frozen = torch.nn.Linear(16, 16).requires_grad_(False)
        torch.manual_seed(0)
        self.first, self.norm = torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16)
        self.last = torch.nn.Linear(16, 1)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a prediction."""
        assert isinstance(self.seen, torch.Tensor)
        if self.training:
            self.seen += x.sum(0)
        result: torch.Tensor = self.last(self.norm(self.first(self.frozen(x))).tanh())
        return result


def main() -> None:
    spare_compiler()
    folder, how, words = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    hubring.init()
    rank = hubring.rank()
    lived = folder / f"lived-{rank}"
    life = int(lived.exists())
    lived.touch()
    model = Model(life)
    model.last.requires_grad_("thaws" not in words)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hubring.DistributedOptimizer(sgd, model)
    if how.startswith("hold") and life:
        torch.save(model.state_dict(), folder / f"rank-{rank}.pt")
        (folder / "saved").touch()
    steps = 10**9 if how.startswith("hold") else STEPS
    for step in range(optimizer.completed_steps, steps):
        if how == f"hold {rank}" and life == 0 and step == BEGIN:
            (folder / "holding").touch()
            time.sleep(600)
        if life == 0 and rank == 1 and step >= BEGIN:
            if how == "stop" and step == BEGIN:
                os.kill(os.getpid(), signal.SIGUSR1)
            if how == "kill":
                die_once_saved(folder)
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(8, 16, generator=generator)
        if "thaws" in words:
            model.last.requires_grad_(step >= THAW)
        optimizer.zero_grad()
        ((model(x) - x.mean(1, keepdim=True)) ** 2).mean().backward()
        if "clips" in words:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    torch.save(model.state_dict(), folder / f"rank-{rank}.pt")


def die_once_saved(folder: Path) -> None:
    """Looks for a checkpoint for a moment, as later steps do: a hub saves a step that is not over yet."""
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        if [*folder.glob("saved/*-step-*"), *folder.glob("saved/workers/*-step-*")]:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)


if __name__ == "__main__":
    main()
