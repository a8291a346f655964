"""The wrapped optimizer trains as torch's, and exchanges when it may."""

from __future__ import annotations

import logging
from typing import Any, Literal

import pytest
import torch
from torch import nn

from hubring.ps.core.errors import ConfigError
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.support.fakes.hub import FakeHub, FakeRank
from tests.support.training.training_scripts import (
    SCRIPTS,
    SMALL,
    STEPS,
    Step,
    assert_close,
    assert_same,
    batches,
    build,
    clipped_step,
    closure_step,
    late_lr_step,
    loss_of,
    module_zero_step,
    never_zeroing_step,
    number_of_buckets,
    parameters_of,
    plain_step,
    pushes_during_backward,
    replacing_step,
    retrying_step,
    sgd,
    single_server,
    train_plain,
    wrap,
)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("step", SCRIPTS)
@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    ],
    ids=["SGD", "AdamW"],
)
def test_alone_training_is_bitwise_that_of_torch(step: Step, make: Any) -> None:
    model = build()
    optimizer = DistributedOptimizer(make(model), model, communicator=LocalCommunicator(), bucket_bytes=SMALL)
    for batch in batches():
        step(model, optimizer, batch)
    assert_same(parameters_of(model), train_plain(step, make))
    assert optimizer.completed_steps == STEPS


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("step", SCRIPTS)
def test_a_hub_of_one_applies_what_the_script_meant(step: Step) -> None:
    model = build()
    optimizer = wrap(model, single_server())
    for batch in batches():
        step(model, optimizer, batch)
    assert_close(parameters_of(model), train_plain(step))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("steps_on", ["server", "worker"])
def test_two_ranks_train_as_one_with_the_joint_batch(steps_on: Any, overlap: bool) -> None:
    def train(rank: FakeRank) -> list[torch.Tensor]:
        model = build(seed=rank.rank)  # rank 0's parameters must reach the other
        optimizer = wrap(model, rank, overlap=overlap)
        for batch in batches():
            plain_step(model, optimizer, batch[rank.rank * 2 : rank.rank * 2 + 2])
        return parameters_of(model)

    zero, one = FakeHub(2, steps_on).run(train)
    assert_same(zero, one)
    assert_close(zero, train_plain(plain_step))


@pytest.mark.parametrize("step", [plain_step, module_zero_step, closure_step, never_zeroing_step])
def test_after_a_watched_first_step_a_hub_gets_gradients_during_backward(step: Step) -> None:
    buckets = number_of_buckets()
    assert buckets > 2
    assert pushes_during_backward(step, single_server()) == [0, *[buckets] * (STEPS - 1)]


@pytest.mark.parametrize("step", [clipped_step, replacing_step, late_lr_step])
def test_a_script_that_changes_gradients_has_them_exchanged_in_step(
    step: Step, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert pushes_during_backward(step, single_server()) == [0] * STEPS
    (line,) = [record.message for record in caplog.records if "exchanged in step()" in record.message]
    assert "between backward and step" in line


def test_a_script_that_throws_gradients_away_has_them_exchanged_in_step() -> None:
    assert pushes_during_backward(retrying_step, single_server()) == [0] * STEPS * 2


def test_without_overlap_a_hub_gets_gradients_in_step() -> None:
    assert pushes_during_backward(plain_step, single_server(), overlap=False) == [0] * STEPS


def test_where_workers_step_the_mean_is_there_when_backward_returns() -> None:
    def train(rank: FakeRank) -> torch.Tensor:
        model = build()
        optimizer = wrap(model, rank)
        loss_of(model, batches()[0] * (rank.rank + 1)).backward()
        gradient = model.get_parameter("0.weight").grad
        assert gradient is not None
        seen = gradient.clone()
        optimizer.step()
        assert torch.equal(gradient, seen)
        return seen

    zero, one = FakeHub(2, "worker").run(train)
    expected = torch.zeros_like(zero)
    for factor in (1, 2):
        model = build()
        loss_of(model, batches()[0] * factor).backward()
        gradient = model.get_parameter("0.weight").grad
        assert gradient is not None
        expected += gradient / 2
    assert torch.equal(zero, one)
    torch.testing.assert_close(zero, expected)


def test_where_workers_step_clipping_sees_the_mean() -> None:
    def train(rank: FakeRank) -> list[torch.Tensor]:
        model = build()
        optimizer = wrap(model, rank)
        for batch in batches():
            clipped_step(model, optimizer, batch[rank.rank * 2 : rank.rank * 2 + 2])
        return parameters_of(model)

    zero, one = FakeHub(2, "worker").run(train)
    assert_same(zero, one)
    assert_close(zero, train_plain(clipped_step))


@pytest.mark.parametrize(("steps_on", "told"), [("server", True), ("worker", False)])
def test_whoever_clips_before_the_mean_is_told_so(
    caplog: pytest.LogCaptureFixture, steps_on: Literal["server", "worker"], told: bool
) -> None:
    def train(rank: FakeRank) -> None:
        model = build()
        clipped_step(model, wrap(model, rank), batches()[0][rank.rank * 2 : rank.rank * 2 + 2])

    FakeHub(2, steps_on).run(train)
    assert ("pass --aggregate to change the mean" in caplog.text) is told


def test_buckets_are_handed_over_in_order_whatever_backward_does() -> None:
    class Branches(nn.Module):
        """Runs its layers in the order of registration, or against it."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
            self.turned = False

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            for layer in reversed(self.layers) if self.turned else self.layers:
                batch = layer(batch)
            return batch

    rank, model = single_server(), Branches()
    optimizer = wrap(model, rank)
    for batch in batches():
        model.turned = not model.turned
        plain_step(model, optimizer, batch)
    order = [int(entry.split()[1]) for entry in rank.log]
    assert order == list(range(len(order) // STEPS)) * STEPS


def test_clipping_that_begins_after_the_first_step_is_an_error_with_its_mend() -> None:
    model = build()
    optimizer = wrap(model, single_server())
    first, second, *_ = batches()
    plain_step(model, optimizer, first)
    with pytest.raises(ConfigError, match=r"clipping.*overlap=False"):
        clipped_step(model, optimizer, second)


def test_a_learning_rate_set_late_after_the_first_step_is_an_error() -> None:
    model = build()
    optimizer = wrap(model, single_server())
    first, second, *_ = batches()
    plain_step(model, optimizer, first)
    with pytest.raises(ConfigError, match="hyperparameters"):
        late_lr_step(model, optimizer, second)


def test_dropping_gradients_that_were_pushed_is_an_error() -> None:
    model = build()
    optimizer = wrap(model, single_server())
    first, second, *_ = batches()
    plain_step(model, optimizer, first)
    optimizer.zero_grad()
    loss_of(model, second).backward()
    with pytest.raises(ConfigError, match="step"):
        optimizer.zero_grad()


def test_a_hook_that_changes_gradients_after_ours_is_noticed() -> None:
    rank, model = single_server(), build()
    optimizer = wrap(model, rank)

    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    for batch in batches():
        plain_step(model, optimizer, batch)

    plain = build()
    reference = sgd(plain, lr=0.05)
    for batch in batches():
        plain_step(plain, reference, batch)
    assert_close(parameters_of(model), parameters_of(plain))
