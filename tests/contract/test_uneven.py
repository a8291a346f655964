"""Batches that are not alike and gradients that are missing: through the hub and around the ring."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hubring.ps.core.errors import ConfigError, RingBroken
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from hubring.workers.runtime.sampler import ShardedSampler
from tests.contract.awkward import (
    ATOL,
    KINDS,
    RTOL,
    STEPS,
    Ring,
    assert_as_one,
    batches,
    ends,
    made,
    mean,
    momentum,
    parts,
    values,
    wrapped,
)
from tests.support.training.ranks import Ranks


@KINDS
def test_a_smaller_last_batch_that_all_ranks_have_is_as_in_one_process(kind: type[Ranks]) -> None:
    """Of 14 samples each of two ranks has 7: batches of 3, 3 and 1, which are 6, 6 and 2 of one process."""
    samples = TensorDataset(torch.randn(14, 4, generator=torch.Generator().manual_seed(2)))

    def train(communicator: Communicator | None) -> list[Tensor]:
        rank, size = (0, 1) if communicator is None else (communicator.rank, communicator.size)
        sampler = ShardedSampler(samples, rank=rank, size=size)
        model = made(nn.Linear(4, 2))
        optimizer = momentum(model, communicator)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for (batch,) in DataLoader(samples, batch_size=6 // size, sampler=sampler):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
        return values(model)

    assert_as_one(kind, train)


def uneven(communicator: Communicator | None, *, weighted: bool) -> list[Tensor]:
    """Rank 0 has three samples of every four, rank 1 the fourth."""
    model = made(nn.Linear(4, 2))
    optimizer = momentum(model, communicator)
    for batch in batches(rows=4):
        mine = batch if communicator is None else batch[:3] if communicator.rank == 0 else batch[3:]
        size = 1 if communicator is None else communicator.size
        weight = len(mine) * size / len(batch) if weighted else 1.0
        optimizer.zero_grad()
        (model(mine).square().mean() * weight).backward()
        optimizer.step()
    return values(model)


@KINDS
def test_batches_that_differ_by_rank_weigh_by_their_samples(kind: type[Ranks]) -> None:
    assert_as_one(kind, partial(uneven, weighted=True))


@KINDS
def test_without_weights_ranks_count_alike_however_few_samples_they_have(kind: type[Ranks]) -> None:
    ended, expected = ends(kind, partial(uneven, weighted=False)), uneven(None, weighted=False)
    assert not any(torch.allclose(one, two, RTOL, ATOL) for one, two in zip(ended, expected, strict=True))


# Gradients that are missing


class Sometimes(nn.Module):
    """A layer that always counts, and one that counts where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, batch: Tensor, both: bool) -> Tensor:
        return self.always(batch) + (self.sometimes(batch) if both else 0)


@KINDS
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_parameter_that_one_rank_skips_counts_there_as_zeros(kind: type[Ranks], set_to_none: bool) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = made(Sometimes())
        optimizer = momentum(model, communicator)
        for step, batch in enumerate(batches()):
            model.zero_grad(set_to_none=set_to_none)
            uses = [True, step % 2 == 0]
            if communicator is not None:
                uses = [uses[communicator.rank]]
            shares = zip(parts(batch, communicator), uses, strict=True)
            mean([model(share, both).square().mean() for share, both in shares]).backward()
            optimizer.step()
        return values(model)

    assert_as_one(kind, train)


@KINDS
def test_a_rank_without_a_gradient_counts_as_zeros(kind: type[Ranks]) -> None:
    """Rank 1 has nothing to train on in every second step, and calls step() all the same."""

    def train(communicator: Communicator | None) -> list[Tensor]:
        model = made(nn.Linear(4, 2))
        optimizer = momentum(model, communicator)
        for step, batch in enumerate(batches()):
            optimizer.zero_grad()
            halves = list(batch.chunk(2)[: 2 - step % 2])
            if communicator is not None:
                halves = halves[communicator.rank :][:1]
            divisor = 2 if communicator is None else 1
            for half in halves:
                (model(half).square().mean() / divisor).backward()
            optimizer.step()
        return values(model)

    assert_as_one(kind, train)


@KINDS
def test_a_step_without_any_gradient_leaves_parameters_without_momentum_alone(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = made(nn.Linear(4, 2))
        optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1), model, communicator)
        optimizer.step()
        return values(model)

    assert_as_one(kind, train, rtol=0, atol=0)


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


def test_who_joins_without_having_said_so_is_told_what_to_do() -> None:
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


def test_a_ring_that_a_rank_leaves_early_ends_with_an_error_and_not_with_a_hang() -> None:
    def train(communicator: Communicator) -> None:
        model = made(nn.Linear(4, 2))
        optimizer = momentum(model, communicator)
        for batch in batches()[: STEPS - 2 * communicator.rank]:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    ranks = Ring()
    with pytest.raises(RingBroken):
        ranks.run(train)
    ranks.close()


@pytest.mark.parametrize("make", [torch.optim.LBFGS, partial(torch.optim.SGD, lr=0.1)])
def test_uneven_is_refused_beside_what_steps_otherwise(make: Any) -> None:
    model = nn.Linear(4, 2)
    crossing = make is not torch.optim.LBFGS
    with pytest.raises(ConfigError, match="remove uneven=True, cross_barrier=True or LBFGS"):
        wrapped(make(model.parameters()), model, LocalCommunicator(), uneven=True, cross_barrier=crossing)
