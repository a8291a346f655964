"""Batches that are not alike: through the hub and around the ring."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hubring.ps.core.errors import ConfigError
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.contract.awkward import KINDS, assert_as_one, batches, made, momentum, values, wrapped
from tests.support.training.ranks import Ranks


@KINDS
@pytest.mark.parametrize("counts", [(4, 2), (1, 4), (0, 3), (2, 2)])
def test_a_rank_that_joins_takes_part_with_zeros_until_all_have(
    kind: type[Ranks], counts: tuple[int, int]
) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = made(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
        optimizer = momentum(model, communicator, uneven=True)
        halving = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        ranks = range(2) if communicator is None else [communicator.rank]
        steps = max(counts) if communicator is None else counts[communicator.rank]
        for step, batch in enumerate(batches()[:steps]):
            optimizer.zero_grad()
            halves = [batch.chunk(2)[rank] for rank in ranks if step < counts[rank]]
            sum(model(half).square().mean() / len(ranks) for half in halves).backward()
            optimizer.step()
            halving.step()
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.join()
            assert optimizer.completed_steps == max(counts)
        return values(model)

    assert_as_one(kind, train)


def test_join_without_uneven_names_the_missing_option() -> None:
    model = nn.Linear(4, 2)
    optimizer = momentum(model, LocalCommunicator())
    assert isinstance(optimizer, DistributedOptimizer)
    with pytest.raises(ConfigError, match=r"uneven=True"):
        optimizer.join()


def test_uneven_is_refused_beside_a_grad_scaler() -> None:
    model = nn.Linear(4, 2)
    optimizer = momentum(model, LocalCommunicator(), uneven=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(4)).sum()).backward()
    with pytest.raises(ConfigError, match="does not support GradScaler"):
        scaler.step(optimizer)


@pytest.mark.parametrize("make", [torch.optim.LBFGS, partial(torch.optim.SGD, lr=0.1)])
def test_uneven_is_refused_beside_what_steps_otherwise(make: Any) -> None:
    model = nn.Linear(4, 2)
    crossing = make is not torch.optim.LBFGS
    with pytest.raises(ConfigError, match="remove uneven=True, cross_barrier=True or LBFGS"):
        wrapped(make(model.parameters()), model, LocalCommunicator(), uneven=True, cross_barrier=crossing)
