"""Batches that are not alike: through the hub and around the ring."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hubring.ps.core.errors import ConfigError
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.reports.report import as_torch
from tests.reports.training import PARTS, Job, batches, mlp, prepared, values


@as_torch()
@pytest.mark.parametrize("counts", [(4, 2), (1, 4), (0, 3), (2, 2)])
def test_a_rank_that_joins_takes_part_with_zeros_until_all_have(
    job: Job, counts: tuple[int, int]
) -> list[Tensor]:
    model, optimizer = prepared(job, mlp(), uneven=True)
    halving = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for step, batch in enumerate(batches()[: max(counts[rank] for rank in job.ranks)]):
        optimizer.zero_grad()
        halves = [batch.chunk(PARTS)[rank] for rank in job.ranks if step < counts[rank]]
        sum(model(half).square().mean() / len(job.ranks) for half in halves).backward()
        optimizer.step()
        halving.step()
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.join()
        assert optimizer.completed_steps == max(counts)
    return values(model)


def test_join_without_uneven_names_the_missing_option() -> None:
    _, optimizer = prepared(Job(LocalCommunicator()), nn.Linear(4, 2))
    assert isinstance(optimizer, DistributedOptimizer)
    with pytest.raises(ConfigError, match=r"uneven=True"):
        optimizer.join()


def test_uneven_is_refused_beside_a_grad_scaler() -> None:
    model, optimizer = prepared(Job(LocalCommunicator()), nn.Linear(4, 2), uneven=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(4)).sum()).backward()
    with pytest.raises(ConfigError, match="does not support GradScaler"):
        scaler.step(optimizer)


@pytest.mark.parametrize("make", [torch.optim.LBFGS, partial(torch.optim.SGD, lr=0.1)])
def test_uneven_is_refused_beside_what_steps_otherwise(make: Any) -> None:
    model = nn.Linear(4, 2)
    crossing = make is not torch.optim.LBFGS
    with pytest.raises(ConfigError, match="remove uneven=True, cross_barrier=True or LBFGS"):
        Job(LocalCommunicator()).wrap(make(model.parameters()), model, uneven=True, cross_barrier=crossing)
