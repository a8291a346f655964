"""Ranks whose gradients count unequally, as they are means of unequally many samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.contract.models import linear
from tests.reports.training import Job, momentum, prepared, take, values
from tests.support.training.ranks import AggregatingRanks, HubRanks, LocalRanks, Ranks, RingRanks

STEPS = 4


def batch_of(step: int) -> Tensor:
    return torch.randn(60, 3, generator=torch.Generator().manual_seed(step))


def parts_of(batch: Tensor, step: int, size: int) -> tuple[Tensor, ...]:
    """Divides a batch unequally, and differently in each step."""
    rows = [1 + (7 * rank + 5 * step) % 11 for rank in range(size - 1)]
    return torch.split(batch, [*rows, len(batch) - sum(rows)])


def trained_alone(*, clip: float = 0.0) -> list[Tensor]:
    model = linear(0)
    optimizer = momentum(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch_of(step)).square().mean().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("clip", [0.0, 0.05], ids=["", "clipped"])
def test_unequal_parts_of_a_batch_give_the_mean_over_all_samples(ranks: Ranks, clip: float) -> None:
    def train(communicator: Communicator) -> list[Tensor]:
        model = linear(communicator.rank)
        optimizer = DistributedOptimizer(momentum(model), model, communicator=communicator, bucket_bytes=8)
        for step in range(STEPS):
            part = parts_of(batch_of(step), step, communicator.size)[communicator.rank]
            optimizer.zero_grad()
            optimizer.weight = len(part)
            model(part).square().mean().backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        return values(model)

    first, *others = ranks.run(train)
    torch.testing.assert_close(first, trained_alone(clip=clip), rtol=1e-5, atol=1e-6)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize("options", [{"cross_barrier": True}, {"backward_passes_per_step": 2}], ids=str)
def test_weights_hold_however_gradients_are_exchanged(basic: Ranks, options: dict[str, Any]) -> None:
    passes = options.get("backward_passes_per_step", 1)

    def train(communicator: Communicator) -> list[Tensor]:
        model, optimizer = prepared(Job(communicator), linear(communicator.rank), **options)
        assert isinstance(optimizer, DistributedOptimizer)
        for step in range(STEPS):
            part = parts_of(batch_of(step), step, communicator.size)[communicator.rank]
            optimizer.zero_grad()
            optimizer.weight = len(part)
            for some in part.tensor_split(passes):
                (model(some).square().sum() / (2 * len(part))).backward()  # it has two outputs
            optimizer.step()
        optimizer.synchronize()
        return values(model)

    for ended in basic.run(train):
        torch.testing.assert_close(ended, trained_alone(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [HubRanks, AggregatingRanks, RingRanks])
def test_a_rank_that_joins_does_not_count(kind: type[Ranks]) -> None:
    def train(communicator: Communicator) -> list[Tensor]:
        model, optimizer = prepared(Job(communicator), linear(communicator.rank), uneven=True)
        assert isinstance(optimizer, DistributedOptimizer)
        for epoch in range(2):
            for step in range(1 + communicator.rank):
                optimizer.weight = weight_of(communicator.rank)
                take(optimizer, model(batch_of(step)[communicator.rank]).square().mean())
            optimizer.join()
            assert (optimizer.completed_steps, optimizer.weight) == (
                communicator.size * (1 + epoch),
                weight_of(communicator.rank),
            )
        return values(model)

    def weight_of(rank: int) -> int:
        return (3, 1, 5)[rank]

    model = linear(0)
    optimizer = momentum(model)
    for step in [*range(kind.size)] * 2:
        present = range(step, kind.size)
        losses = [weight_of(rank) * model(batch_of(step)[rank]).square().mean() for rank in present]
        take(optimizer, torch.stack(losses).sum() / sum(map(weight_of, present)))
    for ended in kind.run_once(train):
        torch.testing.assert_close(ended, values(model))


class CompressedHub(HubRanks):
    compress = "bf16"


class CompressedRing(RingRanks):
    compress = "bf16"


@pytest.mark.parametrize("kind", [CompressedHub, CompressedRing])
def test_compressed_gradients_are_weighted(kind: type[Ranks]) -> None:
    def train(communicator: Communicator) -> Tensor:
        parameter = torch.nn.Parameter(torch.zeros(64))
        inner = torch.optim.SGD([parameter], lr=1.0)
        optimizer = DistributedOptimizer(
            inner, named_parameters=[("w", parameter)], communicator=communicator
        )
        optimizer.weight = (1, 2, 5)[communicator.rank]
        take(optimizer, parameter.sum() * (8, 16, 32)[communicator.rank])
        return parameter.detach()

    weighted = (8 + 2 * 16 + 5 * 32) / 8  # all in bfloat16 without rounding
    for ended in kind.run_once(train):
        assert ended.tolist() == [-weighted] * 64


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_a_weight_that_is_no_number_of_samples_is_refused(weight: float) -> None:
    _, optimizer = prepared(Job(LocalCommunicator()), linear(0))
    assert isinstance(optimizer, DistributedOptimizer)
    with pytest.raises(ConfigError, match=r"optimizer\.weight is .*; it must be a finite number above 0"):
        optimizer.weight = weight
    assert optimizer.weight is None


@pytest.mark.parametrize("kind", [LocalRanks, AggregatingRanks, RingRanks])
def test_a_weight_that_comes_after_the_gradients_were_sent_is_refused(kind: type[Ranks]) -> None:
    def train(communicator: Communicator) -> None:
        model, optimizer = prepared(Job(communicator), linear(communicator.rank))
        assert isinstance(optimizer, DistributedOptimizer)
        optimizer.weight = torch.tensor(3)
        model(batch_of(0)).square().mean().backward()
        with pytest.raises(ConfigError, match="set it before backward"):
            optimizer.weight = 2
        optimizer.step()
        optimizer.weight = 2
        assert optimizer.weight == 2

    kind.run_once(train)
