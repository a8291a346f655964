"""Models and steps that are awkward: they train as in one process, or are refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hubring.workers.collectives import allreduce
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.contract.awkward import (
    KINDS,
    STEPPING_HERE,
    STEPS,
    Aggregate,
    Hub,
    Loss,
    Ring,
    assert_as_one,
    batches,
    layers,
    made,
    mean,
    momentum,
    parts,
    values,
    wrapped,
)
from tests.support.training.ranks import Ranks


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


@pytest.mark.differing
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


@pytest.fixture
def compiler_forgets() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("compiler_forgets")
@KINDS
def test_a_compiled_model_trains_as_in_one_process(kind: type[Ranks]) -> None:
    compiling = threading.Lock()

    def train(communicator: Communicator | None) -> list[Tensor]:
        plain = made(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
        model: Any = torch.compile(plain, backend="eager")
        optimizer = momentum(model, communicator)
        for batch in batches():
            optimizer.zero_grad()
            with compiling:
                loss = mean([model(share).square().mean() for share in parts(batch, communicator)])
            loss.backward()
            optimizer.step()
        return values(plain)

    assert_as_one(kind, train)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own
@pytest.mark.usefixtures("compiler_forgets")
@pytest.mark.parametrize(
    ("kind", "part"),
    [
        (Hub, "all"),
        (Ring, "function"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                *((Hub, "function"), (Hub, "step"), (Aggregate, "all"), (Ring, "all"), (Ring, "step")),
            ]
        ),
    ],
)
def test_a_compiled_step_runs_the_exchange_as_it_is(kind: type[Ranks], part: str) -> None:
    """A script compiles `optimizer.step`, a function that calls it, or all of a training step."""
    compiled = partial(torch.compile, backend="aot_eager")

    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator)
        step: Any = optimizer.step if part != "function" else lambda: optimizer.step()
        step = step if part == "all" else compiled(step)

        def whole(batch: Tensor) -> None:
            optimizer.zero_grad()
            mean([model(share).square().mean() for share in parts(batch, communicator)]).backward()
            step()
            hubring_mean = None if communicator is None else allreduce(batch, communicator=communicator)
            assert hubring_mean is None or torch.equal(hubring_mean, batch)

        whole = compiled(whole) if part == "all" else whole
        for batch in batches():
            whole(batch)
        return values(model)

    assert_as_one(kind, train)
