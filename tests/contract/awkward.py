"""Scripts that train on every kind of ranks and as one process, and what they must end in."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.support.training.ranks import HubRanks, Ranks, RingRanks

DEVICE = torch.device(os.environ.get("HUBRING_TEST_DEVICE", "cpu"))
"""Of the models and batches; `make gpu` sets it."""
SIZE = 2 if DEVICE.type == "cpu" else 1
"""Ranks. torch runs all backward passes on a GPU in one thread, where ranks would wait for each other."""
NUMPY = ["numpy"] if DEVICE.type == "cpu" else []
"""Ways to change tensors that the device has."""
STEPS = 4
RTOL, ATOL = 1e-5, 1e-6
"""Between one sum over all samples and the mean of the ranks' means, after STEPS steps in float32."""


class Hub(HubRanks):
    size = SIZE


class Aggregate(HubRanks):
    size = SIZE
    aggregate = True


class Ring(RingRanks):
    size = SIZE


ALL = {"hub": Hub, "aggregate": Aggregate, "ring": Ring}
KINDS = pytest.mark.parametrize("kind", ALL.values(), ids=ALL)
STEPPING_HERE = pytest.mark.parametrize("kind", [Aggregate, Ring], ids=["aggregate", "ring"])

M = TypeVar("M", bound=nn.Module)
Script = Callable[[Communicator | None], list[Tensor]]
"""Trains as a rank, or as the one process that there is; returns parameters."""
Loss = Any
"""A tensor; torch's types want a float of a closure."""


def ends(kind: type[Ranks], script: Script) -> list[Tensor]:
    """What all ranks end with, bit for bit."""
    first, *others = kind.run_once(script)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
    return first


def assert_as_one(kind: type[Ranks], script: Script, rtol: float = RTOL, atol: float = ATOL) -> None:
    torch.testing.assert_close(ends(kind, script), script(None), rtol=rtol, atol=atol)


def made(module: M) -> M:
    """The module with values of its own, as ranks are threads that share torch's generator."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.empty(parameter.shape).uniform_(-0.5, 0.5, generator=generator))
    return module.to(DEVICE)


def wrapped(
    optimizer: torch.optim.Optimizer, model: nn.Module, communicator: Communicator | None, **options: Any
) -> torch.optim.Optimizer:
    if communicator is None:
        return optimizer
    options = {"bucket_bytes": 64, **options}
    return DistributedOptimizer(optimizer, model, communicator=communicator, **options)


def momentum(model: nn.Module, communicator: Communicator | None, **options: Any) -> torch.optim.Optimizer:
    own = [one for one in model.parameters() if one.requires_grad]
    # One after the other, on a GPU too: parameters that share memory are stepped twice.
    sgd = torch.optim.SGD(own, lr=0.1, momentum=0.9, foreach=False)
    return wrapped(sgd, model, communicator, **options)


def parts(batch: Tensor, communicator: Communicator | None) -> list[Tensor]:
    """This rank's half of a batch; of one process or rank both."""
    halves = batch.chunk(2)
    return list(halves) if communicator is None or communicator.size == 1 else [halves[communicator.rank]]


def batches(rows: int = 8, width: int = 4) -> Tensor:
    return torch.randn(STEPS, rows, width, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def mean(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).mean()


def layers() -> Any:
    """Two layers; a `Sequential`, whose layers torch types as tensors or modules."""
    return made(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, communicator: Communicator | None
) -> None:
    optimizer.zero_grad()
    backward(model, batch, communicator)
    optimizer.step()


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, communicator: Communicator | None
) -> list[Tensor]:
    """Steps with every batch; returns the parameters."""
    for batch in batches():
        step(model, optimizer, batch, communicator)
    return values(model)


def backward(model: nn.Module, batch: Tensor, communicator: Communicator | None) -> None:
    mean([model(share).square().mean() for share in parts(batch, communicator)]).backward()


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda own: torch.optim.AdamW(own, lr=0.05, weight_decay=0.1),
    "adagrad": lambda own: torch.optim.Adagrad(own, lr=0.1, lr_decay=0.1),
    "rmsprop": lambda own: torch.optim.RMSprop(own, lr=0.01, momentum=0.9),
}
