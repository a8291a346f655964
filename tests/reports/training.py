"""Scripts of public reports, and the topologies on which they must train as under torch in one process.

A script is a function of a `Job`. The reference runs it in one process with torch's own optimizer. That
process takes the batches of both ranks, and a step's loss is the mean of their losses. So it also gives the
values of `DistributedDataParallel` where ranks do different things: a parameter that one rank used has the
mean of that rank's gradient and zeros, and a parameter that no rank used has no gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hubring.ps.core.errors import HubringError
from hubring.workers.collectives import allreduce
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.support.training.ranks import HubRanks, LocalRanks, Ranks, RingRanks

RANKS = 2
STEPS = 4
RTOL, ATOL = 1e-5, 1e-6
"""Between the sum over all samples and the mean of the ranks' means, after STEPS steps in float32."""

_seeding = threading.Lock()
"""Ranks are threads, which share torch's generator."""

M = TypeVar("M")
Topology = type[Ranks]


class Hub(HubRanks):
    size = RANKS


class Aggregate(HubRanks):
    size = RANKS
    aggregate = True


class Ring(RingRanks):
    size = RANKS


TOPOLOGIES: dict[str, Topology] = {"hub": Hub, "aggregate": Aggregate, "ring": Ring, "alone": LocalRanks}


class Job:
    """One process of a training job, as a script sees it.

    Args:
        communicator: Connects the ranks. None in the reference.

    Attributes:
        ranks: The ranks whose batches this process takes: its own, or all if there is one process.
    """

    def __init__(self, communicator: Communicator | None) -> None:
        self._communicator = communicator
        single = communicator is None or communicator.size == 1
        self.ranks = list(range(RANKS)) if communicator is None or single else [communicator.rank]

    def parts(self, batch: Tensor) -> list[Tensor]:
        """The rows of the batch that each of `ranks` takes."""
        return [batch.chunk(RANKS)[rank] for rank in self.ranks]

    def loss(self, batch: Tensor, of_part: Callable[[Tensor], Tensor]) -> Tensor:
        return self.loss_by_rank(batch, lambda _, part: of_part(part))

    def loss_by_rank(self, batch: Tensor, of_part: Callable[[int, Tensor], Tensor]) -> Tensor:
        losses = [of_part(rank, part) for rank, part in zip(self.ranks, self.parts(batch), strict=True)]
        return torch.stack(losses).mean()

    def wrap(self, optimizer: Optimizer, model: nn.Module | None, **options: Any) -> Optimizer:
        """Returns the optimizer that steps with all ranks' gradients; in the reference torch's own."""
        if self._communicator is None:
            return optimizer
        options = {"bucket_bytes": 64, "timeout": 10.0, **options}
        return DistributedOptimizer(optimizer, model, communicator=self._communicator, **options)

    def mean_over_ranks(self, value: Tensor) -> Tensor:
        if self._communicator is None:
            return value
        return allreduce(value, communicator=self._communicator)


Script = Callable[[Job], Sequence[Tensor]]
"""Trains, and returns what must be as under torch."""


def topologies(on: str = " ".join(TOPOLOGIES)) -> pytest.MarkDecorator:
    """Runs a test on each of these topologies.

    `make test` runs them on a hub that steps, where most can go wrong, and `make test-full` on the others.
    """
    marks = {name: [pytest.mark.full] for name in TOPOLOGIES if name != "hub"}
    params = [pytest.param(TOPOLOGIES[name], id=name, marks=marks.get(name, [])) for name in on.split()]
    return pytest.mark.parametrize("topology", params)


def ends(topology: Topology, script: Script) -> list[list[Tensor]]:
    """What the script returns on each rank."""
    ranks = topology()
    try:
        return ranks.run(lambda communicator: list(script(Job(communicator))))
    finally:
        ranks.close()


def assert_as_torch(
    topology: Topology, script: Script, *, refusal: str = "", rtol: float = RTOL, atol: float = ATOL
) -> None:
    """Checks that all ranks end alike, bit for bit, and as the reference.

    Args:
        refusal: A pattern of the error message with which Hubring may refuse the script instead.
    """
    expected = list(script(Job(None)))
    try:
        first, *others = ends(topology, script)
    except HubringError as error:
        if not refusal:
            raise
        assert_matches(refusal, error)
        return
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True)), "ranks differ"
    torch.testing.assert_close(first, expected, rtol=rtol, atol=atol)


def assert_matches(pattern: str, error: HubringError) -> None:
    with pytest.raises(HubringError, match=pattern):
        raise error


def seeded(make: Callable[[], M]) -> M:
    """Makes a model whose random values are the same on all ranks and in the reference."""
    with _seeding:
        torch.manual_seed(0)
        return make()


def batches(rows: int = 8, width: int = 4, steps: int = STEPS) -> Tensor:
    return torch.randn(steps, rows, width, generator=torch.Generator().manual_seed(1))


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


def mlp() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)))


def square(model: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The loss of a part of a batch."""
    return lambda part: model(part).square().mean()


def step(job: Job, model: Callable[[Tensor], Tensor], optimizer: Optimizer, batch: Tensor) -> Tensor:
    """Takes an ordinary step and returns its loss."""
    optimizer.zero_grad()
    loss = job.loss(batch, square(model))
    loss.backward()
    optimizer.step()
    return loss.detach()
