"""Failed backward passes, as for lack of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.reports.report import report
from tests.reports.training import Job, batches, prepared, seeded, square, values


class Failing(nn.Module):
    """A network whose backward fails on request, when the last layers have gradients already."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.fails = False

    def forward(self, batch: Tensor) -> Tensor:
        hidden: Tensor = self.first(batch)
        hidden.register_hook(self._check)
        result: Tensor = self.third(self.second(hidden.tanh()).tanh())
        return result

    def _check(self, _: Tensor) -> None:
        if self.fails:
            raise MemoryError


Drop = Callable[[nn.Module, Optimizer], None]


def by_optimizer(_: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()


def by_model(model: nn.Module, _: Optimizer) -> None:
    model.zero_grad()


def by_hand(model: nn.Module, _: Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = None


@report("Out of memory", refused="default-later-*-hub", error="overlap=False")
@pytest.mark.parametrize("drop", [by_optimizer, by_model, by_hand])
@pytest.mark.parametrize("failing", [0, 3], ids=["first", "later"])
@pytest.mark.parametrize("options", [{}, {"overlap": False}], ids=["default", "apart"])
def test_a_backward_that_failed_is_repeated(
    job: Job, drop: Drop, failing: int, options: dict[str, Any]
) -> list[Tensor]:
    """Catches the error and repeats the backward.

    The gradients of the failed pass are of a larger batch, so none of them may count.
    """
    model, optimizer = prepared(job, seeded(Failing), **options)
    for turn, batch in enumerate(batches(steps=6)):
        model.fails = turn == failing
        drop(model, optimizer)
        try:
            (3 * job.loss(batch, square(model))).backward()
        except MemoryError:
            model.fails = False
            drop(model, optimizer)
            job.loss(batch, square(model)).backward()
        optimizer.step()
    return values(model)


@report("Out of memory", refused="later-hub", error="overlap=False")
@pytest.mark.parametrize("failing", [0, 3], ids=["first", "later"])
def test_a_batch_is_given_up_after_its_backward_failed(job: Job, failing: int) -> list[Tensor]:
    """Catches the error and goes on to the next batch."""
    model, optimizer = prepared(job, seeded(Failing))
    for turn, batch in enumerate(batches(steps=6)):
        model.fails = turn == failing
        optimizer.zero_grad()
        try:
            job.loss(batch, square(model)).backward()
        except MemoryError:
            continue
        optimizer.step()
    return values(model)
