"""Several backward passes a step, and loss scaling."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from hubring.ps.core.errors import ConfigError
from hubring.workers.communicators.local import LocalCommunicator
from tests.support.fakes.hub import FakeHub, FakeRank
from tests.support.training.training_scripts import (
    STEPS,
    Step,
    assert_close,
    assert_same,
    batches,
    build,
    loss_of,
    new_scaler,
    number_of_buckets,
    parameters_of,
    plain_step,
    pushes_during_backward,
    scaled_step,
    single_server,
    train_plain,
    wrap,
)


def accumulating(passes: int, *, zero: bool = True) -> Step:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        if zero:
            optimizer.zero_grad()
        for part in batch.chunk(passes):
            (loss_of(model, part) / passes).backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("communicator", [single_server, LocalCommunicator])
@pytest.mark.parametrize("passes", [2, 4])
def test_accumulated_passes_train_as_in_torch(communicator: Any, passes: int) -> None:
    model = build()
    optimizer = wrap(model, communicator(), backward_passes_per_step=passes)
    for batch in batches():
        accumulating(passes)(model, optimizer, batch)
    assert_close(parameters_of(model), train_plain(accumulating(passes)))


def test_buckets_are_pushed_in_the_last_pass_alone() -> None:
    buckets = number_of_buckets()
    counts = pushes_during_backward(accumulating(2), single_server(), backward_passes_per_step=2)
    assert counts == [0, 0, *[0, buckets] * (STEPS - 1)]


@pytest.mark.parametrize("communicator", [single_server, LocalCommunicator])
def test_fewer_passes_than_said_are_exchanged_in_step(communicator: Any) -> None:
    model = build()
    optimizer = wrap(model, communicator(), backward_passes_per_step=3)
    for batch in batches():
        accumulating(2)(model, optimizer, batch)
    assert_close(parameters_of(model), train_plain(accumulating(2)))


def test_more_passes_than_said_after_the_push_raise_with_the_fix() -> None:
    model = build()
    optimizer = wrap(model, single_server())
    plain_step(model, optimizer, batches()[0])
    optimizer.zero_grad()
    loss_of(model, batches()[1]).backward()
    with pytest.raises(ConfigError, match=r"backward_passes_per_step.*overlap=False"):
        loss_of(model, batches()[2]).backward()


@pytest.mark.parametrize("communicator", [single_server, LocalCommunicator])
def test_more_passes_than_said_from_the_first_step_on_are_exchanged_in_step(communicator: Any) -> None:
    model = build()
    optimizer = wrap(model, communicator())
    for batch in batches():
        accumulating(2)(model, optimizer, batch)
    assert_close(parameters_of(model), train_plain(accumulating(2)))


def test_a_backward_pass_that_fails_may_be_repeated_after_zero_grad() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("out of memory")

    model = build()
    optimizer = wrap(model, LocalCommunicator())
    hidden = Failing.apply(model[:2](batches()[0]))
    with pytest.raises(RuntimeError, match="out of memory"):
        model[2:](hidden).square().mean().backward()
    for batch in batches():
        plain_step(model, optimizer, batch)
    assert_same(parameters_of(model), train_plain(plain_step))


@pytest.mark.parametrize("communicator", [single_server, LocalCommunicator])
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_grad_scaler_works_as_in_torch(communicator: Any, max_norm: float | None, enabled: bool) -> None:
    model = build()
    optimizer = wrap(model, communicator())
    scaler, reference = new_scaler(enabled=enabled), new_scaler(enabled=enabled)
    for batch in batches():
        scaled_step(scaler, max_norm)(model, optimizer, batch)
    assert_close(parameters_of(model), train_plain(scaled_step(reference, max_norm)))
    assert scaler.get_scale() == reference.get_scale()
    assert optimizer.completed_steps == STEPS


def test_a_grad_scaler_has_gradients_exchanged_in_step(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert pushes_during_backward(scaled_step(new_scaler()), single_server()) == [0] * STEPS
    assert "uses a GradScaler" in caplog.text


def test_a_grad_scaler_that_comes_later_is_an_error_with_its_mend() -> None:
    model = build()
    optimizer = wrap(model, single_server())
    first, second, *_ = batches()
    plain_step(model, optimizer, first)
    with pytest.raises(ConfigError, match=r"GradScaler.*overlap=False"):
        scaled_step(new_scaler())(model, optimizer, second)


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("steps_on", ["server", "worker"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(steps_on: Any, max_norm: float | None) -> None:
    def train(rank: FakeRank) -> tuple[list[torch.Tensor], int, list[int], float]:
        model = build()
        optimizer = wrap(model, rank)
        scaler = new_scaler()
        step = scaled_step(scaler, max_norm)
        pushed = []
        for index, batch in enumerate(batches()):
            before = parameters_of(model)
            poisoned = index == 2 and rank.rank == 1
            step(model, optimizer, batch * float("inf") if poisoned else batch)
            pushed.append(len(rank.pushed))
            if index == 2:
                assert_same(parameters_of(model), before)
        return parameters_of(model), optimizer.completed_steps, pushed, scaler.get_scale()

    (zero, steps, pushed, scale), (one, other_steps, other_pushed, other_scale) = FakeHub(2, steps_on).run(
        train
    )
    assert_same(zero, one)
    assert (steps, other_steps) == (STEPS - 1, STEPS - 1)
    assert pushed == other_pushed
    skipped = [later == earlier for earlier, later in pairwise(pushed)]
    assert skipped == [False, steps_on == "server", False]
    assert other_scale < 2.0**10 * 2
    assert (scale == other_scale) is (steps_on == "worker")


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
