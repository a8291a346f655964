"""Models and steps that are awkward: they train as in one process, or are refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.reports.report import as_torch, report
from tests.reports.training import (
    DEVICE,
    Job,
    backward,
    batches,
    mlp,
    prepared,
    seeded,
    trained,
    values,
)


@pytest.mark.differing
@as_torch()
def test_normalisation_sees_each_ranks_own_batch_and_keeps_its_own_statistics(job: Job) -> list[Tensor]:
    """As DDP without SyncBatchNorm: parameters are everybody's, running mean and variance a rank's own."""
    model = seeded(lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))).to(DEVICE)
    ended = trained(job, *prepared(job, model))
    if job.communicator is not None:
        own = nn.BatchNorm1d(4)
        for batch in batches():
            own(*job.parts(batch))
        torch.testing.assert_close(model.get_buffer("0.running_mean"), own.running_mean)
    return ended


# Steps that are not alike


@pytest.fixture
def compiler_forgets() -> Iterator[None]:
    yield
    torch.compiler.reset()


COMPILING = threading.Lock()
PATIENT = 60.0
"""Seconds that a rank waits for another, which compiles."""


@pytest.mark.slow
@pytest.mark.usefixtures("compiler_forgets")
@as_torch()
def test_a_compiled_model_trains_as_in_one_process(job: Job) -> list[Tensor]:
    plain, optimizer = prepared(job, mlp(4), timeout=PATIENT)
    model: Any = torch.compile(plain, backend="eager")

    def forward(part: Tensor) -> Tensor:
        with COMPILING:
            return model(part)

    return trained(job, plain, optimizer, forward)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.usefixtures("compiler_forgets")
@report("", on="hub aggregate ring")
@pytest.mark.parametrize("part", ["all", "function", "step"])
def test_a_compiled_step_runs_the_exchange_as_it_is(job: Job, part: str) -> list[Tensor]:
    """A script compiles `optimizer.step`, a function that calls it, or all of a training step."""
    compiled = partial(torch.compile, backend="aot_eager")
    model, optimizer = prepared(job, mlp(4), timeout=PATIENT)
    ends: Any = optimizer.step if part != "function" else lambda: optimizer.step()
    ends = ends if part == "all" else compiled(ends)

    def whole(batch: Tensor) -> None:
        backward(job, model, optimizer, batch)
        ends()
        assert torch.equal(job.mean_over_ranks(batch), batch)

    whole = compiled(whole) if part == "all" else whole
    for batch in batches():
        whole(batch)
    return values(model)
