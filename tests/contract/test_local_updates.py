"""Workers that step alone and merge: each rule beside one process that plays all workers."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from hubring.ps.core.errors import ConfigError
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.optimizer.local_updates import MEAN, LocalOptimizer, Outer
from tests.contract.models import linear
from tests.reports.training import adam, take, values
from tests.support.training.ranks import Ranks

NESTEROV: Outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
STEPS = 12


def batch_of(step: int, rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def replayed(size: int, outer: Outer, intervals: list[int], weights: list[float]) -> list[Tensor]:
    """One process that plays all workers, from the papers' formulas."""
    merged = linear(0)
    outer_optimizer = outer(list(merged.parameters()))
    workers = [deepcopy(merged) for _ in range(size)]
    optimizers = [adam(worker) for worker in workers]
    steps = iter(range(STEPS))
    for interval in intervals:
        for step in [next(steps) for _ in range(interval)]:
            for rank, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
                take(optimizer, worker(batch_of(step, rank)).square().mean())
        with torch.no_grad():
            for place, parameter in enumerate(merged.parameters()):
                moved = [parameter - values(worker)[place] for worker in workers]
                shares = [weight / sum(weights[:size]) for weight in weights[:size]]
                parameter.grad = torch.stack([s * one for s, one in zip(shares, moved, strict=True)]).sum(0)
            outer_optimizer.step()
            for worker in workers:
                worker.load_state_dict(merged.state_dict())
    return values(merged)


def after(merges: int) -> int:
    """Post-local: every step at first."""
    return 1 if merges < 4 else 4


@pytest.mark.parametrize(
    ("outer", "every", "intervals", "weights"),
    [
        (MEAN, 4, [4, 4, 4], [1, 1, 1]),
        (NESTEROV, 4, [4, 4, 4], [1, 1, 1]),
        (NESTEROV, 3, [3, 3, 3, 3], [5, 1, 2]),
        (MEAN, after, [1, 1, 1, 1, 4, 4], [1, 1, 1]),
    ],
    ids=["local-sgd", "diloco", "weighted", "post-local"],
)
def test_each_rule_is_that_of_its_paper(
    basic: Ranks,
    outer: Outer,
    every: int | Callable[[int], int],
    intervals: list[int],
    weights: list[float],
) -> None:
    def train(communicator: Communicator) -> list[Tensor]:
        model, rank = linear(communicator.rank), communicator.rank
        optimizer = LocalOptimizer(
            adam(model), model, every=every, outer=outer, communicator=communicator, bucket_bytes=8
        )
        if len(set(weights)) > 1:
            optimizer.weight = weights[rank]
        for step in range(STEPS):
            take(optimizer, model(batch_of(step, rank)).square().mean())
        assert (optimizer.completed_steps, optimizer.outer.completed_steps) == (STEPS, len(intervals))
        return values(model)

    ended = basic.run(train)
    for each in ended:
        torch.testing.assert_close(
            each, replayed(basic.size, outer, intervals, weights), rtol=1e-5, atol=1e-6
        )


def test_buffers_and_frozen_parameters_begin_as_rank_0s_and_buffers_stay_the_workers(basic: Ranks) -> None:
    def train(communicator: Communicator) -> tuple[list[Tensor], list[Tensor]]:
        rank = communicator.rank
        norm = nn.BatchNorm1d(3).requires_grad_(False)
        norm.weight.fill_(1.0 + rank)
        model = nn.Sequential(norm, linear(rank))
        trained = [one for one in model.parameters() if one.requires_grad]
        inner = torch.optim.SGD(trained, lr=0.1)
        optimizer = LocalOptimizer(inner, model, every=2, communicator=communicator, bucket_bytes=8)
        for step in range(2):
            take(inner, model(batch_of(step, rank)).square().mean())  # as a framework may step it
        assert optimizer.completed_steps == 2
        return values(model), [one.clone() for one in model.buffers()]

    (first, own), *others = basic.run(train)
    assert first[0].tolist() == [1.0] * 3
    for parameters, buffers in others:
        assert all(torch.equal(one, two) for one, two in zip(parameters, first, strict=True))
        assert not torch.equal(buffers[0], own[0]), "each worker's statistics are of its own samples"


def test_refresh_drops_the_steps_since_the_last_merge() -> None:
    model = linear(0)
    optimizer = LocalOptimizer(adam(model), model, every=2, communicator=LocalCommunicator())
    ended = []
    for step in range(3):
        take(optimizer, model(batch_of(step, 0)).square().mean())
        ended.append(values(model))
    optimizer.refresh()
    assert all(torch.equal(one, two) for one, two in zip(values(model), ended[1], strict=True))


@pytest.mark.parametrize(
    ("every", "says"),
    [
        (0, "every is 0 after 0 merges; pass a whole number"),
        (2.5, "every is 2.5 after 0 merges"),
        (lambda merges: -merges, "every is 0 after 0"),
    ],
)
def test_no_steps_between_merges_are_refused(every: int | Callable[[int], int], says: str) -> None:
    model = linear(0)
    with pytest.raises(ConfigError, match=says):
        LocalOptimizer(adam(model), model, every=every, communicator=LocalCommunicator())


def test_parameters_of_another_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"use model\.parameters"):
        LocalOptimizer(adam(linear(0)), linear(0), every=2, communicator=LocalCommunicator())


def test_parameters_that_come_later_are_refused_at_the_next_merge() -> None:
    model = linear(0)
    inner = torch.optim.SGD([model.weight], lr=0.1)
    optimizer = LocalOptimizer(inner, model, every=1, communicator=LocalCommunicator())
    inner.add_param_group({"params": [model.bias]})
    with pytest.raises(ConfigError, match="got other parameters"):
        take(optimizer, model(batch_of(0, 0)).square().mean())


def test_the_rest_of_the_steps_is_merged_once() -> None:
    model = linear(0)
    optimizer = LocalOptimizer(adam(model), model, every=2, outer=NESTEROV, communicator=LocalCommunicator())
    for step in range(3):
        take(optimizer, model(batch_of(step, 0)).square().mean())
    for _ in range(2):
        optimizer.merge()
        assert optimizer.outer.completed_steps == 2
