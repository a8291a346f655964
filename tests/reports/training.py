"""What the scripts of public reports share: a job, batches, models, optimizers and ordinary steps."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hubring.workers.collectives import allreduce
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.distributed import DistributedOptimizer

DEVICE = torch.device(os.environ.get("HUBRING_TEST_DEVICE", "cpu"))
"""Of the models and batches; `make gpu` sets it."""
SIZE = 2 if DEVICE.type == "cpu" else 1
"""Ranks. torch runs all backward passes on a GPU in one thread, where ranks would wait for each other."""
PARTS = 2
"""Of a batch."""
STEPS = 4

_seeding = threading.Lock()
"""Ranks are threads, which share torch's generator."""

M = TypeVar("M", bound=Any)


class Job:
    """One process of a training job, as a script sees it.

    Args:
        communicator: Connects the ranks. None in the reference.

    Attributes:
        communicator: As given.
        ranks: The ranks whose batches this process takes: its own, or all if there is one process.
    """

    def __init__(self, communicator: Communicator | None) -> None:
        self.communicator = communicator
        single = communicator is None or communicator.size == 1
        self.ranks = list(range(PARTS)) if communicator is None or single else [communicator.rank]

    def parts(self, batch: Tensor) -> list[Tensor]:
        """The rows of the batch that each of `ranks` takes."""
        return [batch.chunk(PARTS)[rank] for rank in self.ranks]

    def loss(self, batch: Tensor, of_part: Callable[[Tensor], Tensor]) -> Tensor:
        return self.loss_by_rank(batch, lambda _, part: of_part(part))

    def loss_by_rank(self, batch: Tensor, of_part: Callable[[int, Tensor], Tensor]) -> Tensor:
        losses = [of_part(rank, part) for rank, part in zip(self.ranks, self.parts(batch), strict=True)]
        return torch.stack(losses).mean()

    def wrap(self, optimizer: Optimizer, model: nn.Module | None, **options: Any) -> Optimizer:
        """Returns the optimizer that steps with all ranks' gradients; in the reference torch's own."""
        if self.communicator is None:
            return optimizer
        options = {"bucket_bytes": 64, "timeout": 10.0, **options}
        return DistributedOptimizer(optimizer, model, communicator=self.communicator, **options)

    def step(self, optimizer: Optimizer, batch: Tensor, of_part: Callable[[Tensor], Tensor]) -> Tensor:
        """Takes a step with the mean of the parts' losses, and returns that."""
        loss = self.closure(optimizer, batch, of_part)()
        optimizer.step()
        return loss.detach()

    def closure(self, optimizer: Optimizer, batch: Tensor, of_part: Callable[[Tensor], Tensor]) -> Any:
        """Returns what a script gives to `step`: it clears gradients, runs a backward, returns the loss."""

        def evaluate() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch, of_part)
            loss.backward()
            return loss

        return evaluate

    def mean_over_ranks(self, value: Tensor) -> Tensor:
        if self.communicator is None:
            return value
        return allreduce(value, communicator=self.communicator)


def seeded(make: Callable[[], M]) -> M:
    """Makes a model whose random values are the same on all ranks and in the reference."""
    with _seeding:
        torch.manual_seed(0)
        return make()


def batches(rows: int = 8, width: int = 4, steps: int = STEPS) -> Tensor:
    return torch.randn(steps, rows, width, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def values(*models: nn.Module) -> list[Tensor]:
    return [one.detach().clone() for model in models for one in model.parameters()]


def momentum(model: nn.Module, **options: Any) -> torch.optim.SGD:
    """SGD with momentum and weight decay, which move a parameter even if its gradient is zero."""
    return torch.optim.SGD(
        model.parameters(), **{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, **options}
    )


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.05)


OPTIMIZERS = pytest.mark.parametrize("make", [momentum, adam], ids=["sgd", "adam"])


def mlp(hidden: int = 5) -> Any:
    """Two layers; a `Sequential`, whose layers torch types as tensors or modules."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 2)))
    return model.to(DEVICE)


def square(model: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The loss of a part of a batch."""
    return lambda part: model(part).square().mean()


def prepared(
    job: Job, model: M, make: Callable[[M], Optimizer] = momentum, **options: Any
) -> tuple[M, Optimizer]:
    """The model and its wrapped optimizer."""
    return model, job.wrap(make(model), model, **options)


def take(optimizer: Optimizer, loss: Tensor) -> None:
    """Takes a step with the gradients of this loss alone."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def backward(job: Job, model: Callable[[Tensor], Tensor], optimizer: Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    job.loss(batch, square(model)).backward()


def step(job: Job, model: Callable[[Tensor], Tensor], optimizer: Optimizer, batch: Tensor) -> Tensor:
    """Takes an ordinary step and returns its loss."""
    return job.step(optimizer, batch, square(model))


def trained(
    job: Job,
    model: nn.Module,
    optimizer: Optimizer,
    forward: Callable[[Tensor], Tensor] | None = None,
    *,
    start: int = 0,
    stop: int = STEPS,
    before: Callable[[int], object] = lambda turn: None,
    after: Callable[[], object] = lambda: None,
) -> list[Tensor]:
    """Takes ordinary steps, and returns parameters.

    Args:
        job: The job.
        model: The model.
        optimizer: Its optimizer.
        forward: Calls the model, if it is called otherwise.
        start: The first batch.
        stop: The end of the batches.
        before: What the script does between a backward and its step, whose number it gets.
        after: What it does after each step.
    """
    for turn, batch in enumerate(batches()[start:stop]):
        backward(job, forward or model, optimizer, batch)
        before(turn)
        optimizer.step()
        after()
    return values(model)


def trained_by(
    job: Job, model: nn.Module, optimizer: Optimizer, of_part: Callable[[Tensor], Tensor], data: Tensor
) -> list[Tensor]:
    """Takes steps with a loss of its own on some batches; returns parameters."""
    for batch in data:
        job.step(optimizer, batch, of_part)
    return values(model)
