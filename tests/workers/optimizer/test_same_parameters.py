"""Ranks that step on their own notice when their parameters part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.rank_checks import EVERY, check_same_parameters, due
from tests.support.training.ranks import AggregatingRanks, Ranks, RingRanks
from tests.support.training.training_scripts import batches, build, wrap


@pytest.fixture(params=[RingRanks, AggregatingRanks])
def stepping(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made: Ranks = request.param()
    yield made
    made.close()


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"scalar": (), "bias": (3,), "weight": (4, 3), "filters": (2, 3, 2, 2)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_equal_parameters_pass_in_any_memory_format(
    stepping: Ranks, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    def action(communicator: Communicator) -> None:
        own = parameters(dtype)
        if communicator.rank:
            own["filters"] = own["filters"].to(memory_format=torch.channels_last)
        check_same_parameters(own, communicator)

    stepping.run(action)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def flip(name: str) -> Callable[[dict[str, Tensor]], object]:
    """Writes the rows of a parameter in another order."""
    return lambda own: own[name].copy_(own[name].flip(0))


@pytest.mark.parametrize(
    ("ranks", "change", "told"),
    [
        (
            [2],
            lambda own: own["weight"][1].zero_(),
            "rank 2 and rank 0 have different values of parameter weight",
        ),
        ([1], lambda own: own["scalar"].fill_(torch.nan), "rank 1 and rank 0 .* scalar,"),
        *(
            ([1, 2], flip(name), f"ranks 1, 2 and rank 0 .* {name},")
            for name in ("bias", "weight", "filters")
        ),
    ],
    ids=["value", "nan", "bias", "weight", "filters"],
)
def test_the_parameter_and_the_ranks_that_differ_are_named(
    stepping: Ranks, ranks: list[int], change: Callable[[dict[str, Tensor]], object], told: str
) -> None:
    """Other values, a nan, and the same rows in another order."""

    def action(communicator: Communicator) -> None:
        own = parameters()
        if communicator.rank in ranks:
            change(own)
        with pytest.raises(ConfigError, match=f"^{told}"):
            check_same_parameters(own, communicator)

    stepping.run(action)


def halve(communicator: Communicator, optimizer: torch.optim.Optimizer) -> None:
    if communicator.rank:
        optimizer.param_groups[0]["lr"] /= 2


def scale(communicator: Communicator, optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad *= communicator.rank + 1


def write(communicator: Communicator, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"][-1].data += communicator.rank


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (halve, r"rank 0 has param_groups\[0\]\[lr\] 0.1, and rank 1 has param_groups\[0\]\[lr\] 0.05; set"),
        (
            scale,
            r"the mean gradient of \S+ was the same on all ranks, and a script or an optimizer has changed",
        ),
        (write, r"make the same changes to parameters, gradients, hyperparameters and optimizer state"),
    ],
)
def test_what_a_rank_does_otherwise_is_named_as_the_cause(
    stepping: Ranks, change: Callable[[Communicator, torch.optim.Optimizer], None], cause: str
) -> None:
    def action(communicator: Communicator) -> None:
        model = build()
        optimizer = wrap(model, communicator, inner=torch.optim.SGD(model.parameters(), lr=0.1))
        model(batches()[0]).square().mean().backward()
        change(communicator, optimizer)
        with pytest.raises(ConfigError, match=rf"have different values of parameter .*: {cause}"):
            optimizer.step()

    stepping.run(action)


def test_rounding_is_logged_and_is_no_error(stepping: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    def action(communicator: Communicator) -> None:
        own = parameters()
        own["bias"] *= 1 + communicator.rank * 1e-6
        check_same_parameters(own, communicator)

    with caplog.at_level(logging.WARNING):
        stepping.run(action)
    assert "values of bias differ by rounding" in caplog.text


def test_checks_are_frequent_at_first_and_rare_later() -> None:
    steps = [step for step in range(1, 4 * EVERY + 1) if due(step)]
    assert steps == [*(2**power for power in range(11)), 2 * EVERY, 3 * EVERY, 4 * EVERY]
