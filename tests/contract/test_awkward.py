"""Inputs and models that are uneven or awkward: through the hub and around the ring as in one process.

In all of these one process takes what all ranks have together, with torch's own optimizer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hubring.ps.core.errors import ConfigError, RingBroken
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from hubring.workers.runtime.sampler import ShardedSampler
from tests.support.ranks import HubRanks, Ranks, RingRanks

STEPS = 4
RTOL, ATOL = 1e-5, 1e-6
"""Between one sum over all samples and the mean of the ranks' means, after STEPS steps in float32."""


class Hub(HubRanks):
    size = 2


class Aggregate(HubRanks):
    size = 2
    aggregate = True


class Ring(RingRanks):
    size = 2


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
    ranks = kind()
    try:
        first, *others = ranks.run(script)
    finally:
        ranks.close()
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
            parameter.uniform_(-0.5, 0.5, generator=generator)
    return module


def wrapped(
    optimizer: torch.optim.Optimizer, model: nn.Module, communicator: Communicator | None, **options: Any
) -> torch.optim.Optimizer:
    if communicator is None:
        return optimizer
    options = {"bucket_bytes": 64, **options}
    return DistributedOptimizer(optimizer, model, communicator=communicator, **options)


def momentum(model: nn.Module, communicator: Communicator | None, **options: Any) -> torch.optim.Optimizer:
    sgd = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1, momentum=0.9)
    return wrapped(sgd, model, communicator, **options)


def parts(batch: Tensor, communicator: Communicator | None) -> list[Tensor]:
    """This rank's half of a batch; of one process both."""
    halves = batch.chunk(2)
    return list(halves) if communicator is None else [halves[communicator.rank]]


def batches(rows: int = 8, width: int = 4) -> Tensor:
    return torch.randn(STEPS, rows, width, generator=torch.Generator().manual_seed(1))


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def mean(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).mean()


# Batches that are not alike


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
def test_a_parameter_that_all_skip_has_a_gradient_of_zeros_and_keeps_its_momentum(kind: type[Ranks]) -> None:
    """In one process that is set_to_none=False: torch leaves out what has no gradient, ranks cannot know."""

    def train(communicator: Communicator | None) -> list[Tensor]:
        model = made(Sometimes())
        optimizer = momentum(model, communicator)
        for step, batch in enumerate(batches()):
            optimizer.zero_grad(set_to_none=communicator is not None)
            mean([model(share, step == 0).square().mean() for share in parts(batch, communicator)]).backward()
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
    with pytest.raises(ConfigError, match="does not go with a GradScaler"):
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
    with pytest.raises(ConfigError, match="neither with cross_barrier=True nor with LBFGS"):
        wrapped(make(model.parameters()), model, LocalCommunicator(), uneven=True, cross_barrier=crossing)


# Parameters that are shared or left alone


class Knot(nn.Module):
    """One layer is used twice, one is frozen, and the first and the last have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.frozen, self.last = (nn.Linear(4, 4) for _ in range(4))
        self.frozen.requires_grad_(False)
        self.last.weight = self.first.weight

    def forward(self, batch: Tensor) -> Tensor:
        return self.last(self.frozen(self.twice(torch.tanh(self.twice(self.first(batch))))))


@KINDS
@pytest.mark.parametrize("set_to_none", [True, False])
def test_tied_frozen_and_twice_used_parameters_train_as_in_one_process(
    kind: type[Ranks], set_to_none: bool
) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = made(Knot())
        frozen = model.frozen.weight.detach().clone()
        optimizer = momentum(model, communicator)
        for batch in batches():
            optimizer.zero_grad(set_to_none=set_to_none)
            mean([model(share).square().mean() for share in parts(batch, communicator)]).backward()
            optimizer.step()
        assert torch.equal(model.frozen.weight, frozen)
        assert model.last.weight is model.first.weight
        return values(model)

    assert_as_one(kind, train)


@KINDS
def test_normalisation_sees_each_ranks_own_batch_and_keeps_its_own_statistics(kind: type[Ranks]) -> None:
    """As DDP without SyncBatchNorm: parameters are everybody's, running mean and variance a rank's own."""
    statistics: dict[int, Tensor] = {}

    def train(communicator: Communicator | None) -> list[Tensor]:
        model = made(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
        optimizer = momentum(model, communicator)
        for batch in batches():
            optimizer.zero_grad()
            mean([model(share).square().mean() for share in parts(batch, communicator)]).backward()
            optimizer.step()
        if communicator is not None:
            statistics[communicator.rank] = model.get_buffer("0.running_mean").clone()
        return values(model)

    assert_as_one(kind, train)
    for rank, kept in statistics.items():
        own = nn.BatchNorm1d(4)
        for batch in batches():
            own(batch.chunk(2)[rank])
        torch.testing.assert_close(kept, own.running_mean)


# Steps that are not alike


@KINDS
def test_a_closure_is_called_once_and_its_gradient_is_everybodys(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = made(nn.Linear(4, 2))
        optimizer = momentum(model, communicator)
        calls = 0
        for batch in batches():

            def closure(batch: Tensor = batch) -> Loss:
                nonlocal calls
                calls += 1
                optimizer.zero_grad()
                loss = mean([model(share).square().mean() for share in parts(batch, communicator)])
                loss.backward()
                return loss

            optimizer.step(closure)
        assert calls == STEPS
        return values(model)

    assert_as_one(kind, train)


@STEPPING_HERE
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_asks_all_ranks_and_decides_by_their_mean_loss(kind: type[Ranks], search: str | None) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = made(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
        lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=search)
        optimizer = wrapped(lbfgs, model, communicator)
        losses: list[Loss] = []
        for batch in batches():

            def closure(batch: Tensor = batch) -> Loss:
                optimizer.zero_grad()
                loss = mean([(model(share) - 1).square().mean() for share in parts(batch, communicator)])
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))
        if isinstance(optimizer, DistributedOptimizer):
            assert optimizer.completed_steps == STEPS
        return [*values(model), torch.stack(losses).detach()]

    # A quasi-Newton step divides by small differences, so rounding grows more than elsewhere.
    assert_as_one(kind, train, rtol=1e-3, atol=1e-4)


def test_lbfgs_is_refused_by_a_hub_that_is_to_step() -> None:
    ranks = Hub()

    def make(communicator: Communicator) -> None:
        model = nn.Linear(4, 2)
        wrapped(torch.optim.LBFGS(model.parameters()), model, communicator)

    with pytest.raises(ConfigError, match="LBFGS"):
        ranks.run(make)
    ranks.close()


@pytest.fixture
def compiler_forgets() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("compiler_forgets")
@KINDS
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_trains_as_in_one_process(kind: type[Ranks], backend: str) -> None:
    compiling = threading.Lock()

    def train(communicator: Communicator | None) -> list[Tensor]:
        plain = made(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
        model: Any = torch.compile(plain, backend=backend)
        optimizer = momentum(model, communicator)
        for batch in batches():
            optimizer.zero_grad()
            with compiling:
                loss = mean([model(share).square().mean() for share in parts(batch, communicator)])
            loss.backward()
            optimizer.step()
        return values(plain)

    assert_as_one(kind, train)


# Several optimizers


def adversaries(communicator: Communicator | None) -> list[Tensor]:
    """One model steps twice where the other steps once, whose gradients come through the first."""
    judge, forger = made(nn.Linear(4, 1)), made(nn.Linear(4, 4))
    judging, forging = momentum(judge, communicator), momentum(forger, communicator)
    for step, batch in enumerate(batches()):
        shares = parts(batch, communicator)
        judging.zero_grad()
        mean([(judge(share) - judge(forger(share).detach())).mean() for share in shares]).backward()
        judging.step()
        if step % 2:
            forging.zero_grad()
            mean([judge(forger(share)).square().mean() for share in shares]).backward()
            forging.step()
    return [*values(judge), *values(forger)]


@STEPPING_HERE
def test_several_optimizers_train_as_in_one_process(kind: type[Ranks]) -> None:
    assert_as_one(kind, adversaries)


def test_a_hub_that_steps_refuses_a_second_optimizer_and_says_what_to_do() -> None:
    ranks = Hub()
    with pytest.raises(ConfigError, match=r"this is the second: .* hubring\.init\(aggregate=True\)"):
        ranks.run(adversaries)
    ranks.close()
