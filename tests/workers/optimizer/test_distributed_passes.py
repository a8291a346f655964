"""Several backward passes a step, and loss scaling."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hubring.ps.core.errors import ConfigError
from hubring.workers.communicators.local import LocalCommunicator
from tests.support.fakes.hub import FakeHub, FakeRank
from tests.support.training.training_scripts import (
    STEPS,
    batches,
    build,
    loss_of,
    new_scaler,
    number_of_buckets,
    pushes_during_backward,
    scaled_step,
    single_server,
    wrap,
)


def accumulating_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    for part in batch.chunk(2):
        (loss_of(model, part) / 2).backward()
    optimizer.step()


def test_buckets_are_pushed_in_the_last_pass_alone() -> None:
    buckets = number_of_buckets()
    counts = pushes_during_backward(accumulating_step, single_server(), backward_passes_per_step=2)
    assert counts == [0, 0, *[0, buckets] * (STEPS - 1)]


def test_on_an_asynchronous_hub_a_rank_skips_for_itself() -> None:
    hub = FakeHub(2)
    hub.size = 1  # a hub that answers every push at once
    rank = FakeRank(hub)
    model = build()
    optimizer = wrap(model, rank)
    rank.size, rank.lockstep = 2, False
    step = scaled_step(new_scaler())
    step(model, optimizer, batches()[0] * float("inf"))
    step(model, optimizer, batches()[0])
    assert optimizer.completed_steps == 1
    assert not any(entry.startswith("allreduce") for entry in rank.log)


def test_a_grad_scaler_wants_all_passes_where_workers_step() -> None:
    model = build()
    optimizer = wrap(model, LocalCommunicator(), backward_passes_per_step=2)
    with pytest.raises(ConfigError, match="with a GradScaler, run all passes before every step"):
        scaled_step(new_scaler())(model, optimizer, batches()[0])
