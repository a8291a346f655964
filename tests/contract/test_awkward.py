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
from tests.contract.awkward import (
    KINDS,
    Aggregate,
    Hub,
    Ring,
    assert_as_one,
    backward,
    batches,
    layers,
    made,
    mean,
    momentum,
    parts,
    steps,
    values,
)
from tests.support.training.ranks import Ranks


@pytest.mark.differing
@KINDS
def test_normalisation_sees_each_ranks_own_batch_and_keeps_its_own_statistics(kind: type[Ranks]) -> None:
    """As DDP without SyncBatchNorm: parameters are everybody's, running mean and variance a rank's own."""
    statistics: dict[int, Tensor] = {}

    def train(communicator: Communicator | None) -> list[Tensor]:
        model = made(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
        ended = steps(model, momentum(model, communicator), communicator)
        if communicator is not None:
            statistics[communicator.rank] = model.get_buffer("0.running_mean").clone()
        return ended

    assert_as_one(kind, train)
    for rank, kept in statistics.items():
        own = nn.BatchNorm1d(4)
        for batch in batches():
            own(batch.chunk(2)[rank])
        torch.testing.assert_close(kept, own.running_mean)


# Steps that are not alike


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
@pytest.mark.usefixtures("compiler_forgets")
@pytest.mark.parametrize(
    ("kind", "part"),
    [
        (Hub, "all"),
        (Ring, "function"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                *((Hub, "function"), (Hub, "step"), (Aggregate, "all"), (Ring, "all"), (Ring, "step"))
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
        ends: Any = optimizer.step if part != "function" else lambda: optimizer.step()
        ends = ends if part == "all" else compiled(ends)

        def whole(batch: Tensor) -> None:
            optimizer.zero_grad()
            backward(model, batch, communicator)
            ends()
            hubring_mean = None if communicator is None else allreduce(batch, communicator=communicator)
            assert hubring_mean is None or torch.equal(hubring_mean, batch)

        whole = compiled(whole) if part == "all" else whole
        for batch in batches():
            whole(batch)
        return values(model)

    assert_as_one(kind, train)
