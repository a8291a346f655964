"""step() leaves its exchange under way, and whoever reads a parameter waits for it."""

from __future__ import annotations

import copy
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import nn

from hubring.ps.core.errors import ConfigError, DeadlineExceeded
from hubring.workers.communicators.local import LocalCommunicator
from tests.support.training.held_rank import (
    SOON,
    HeldRank,
    Side,
    bucket_of,
    crossing,
    in_flight,
    under_way,
    waits,
)
from tests.support.training.training_scripts import (
    assert_same,
    batches,
    build,
    clipped_step,
    loss_of,
    plain_step,
    wrap,
)


def test_attention_waits_for_a_projection_that_never_runs_its_forward() -> None:
    class Attentive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(6, 8)
            self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            rows = self.before(batch).unsqueeze(1)
            attended: torch.Tensor = self.attend(rows, rows, rows)[0]
            return attended

    rank = HeldRank()
    model = Attentive()
    optimizer = wrap(model, rank, cross_barrier=True, timeout=SOON)
    plain_step(model, optimizer, batches()[0])
    rank.holding = True
    plain_step(model, optimizer, batches()[1])
    projection = bucket_of(optimizer, "attend.out_proj.weight")
    rank.let_through(*(rank.held.keys() - {projection}))
    with pytest.raises(DeadlineExceeded, match=f"bucket {projection} "):
        model(batches()[2])


# Who waits for what


@pytest.mark.parametrize("steps_on", ["server", "worker"])
def test_a_forward_waits_for_its_own_parameters_alone(steps_on: Side) -> None:
    rank = HeldRank(steps_on)
    model, optimizer = under_way(rank, timeout=SOON)
    first, last = batches()[2], torch.zeros(1, 8)
    assert waits(lambda: model[0](first))
    rank.let_through(bucket_of(optimizer, "0.weight"), bucket_of(optimizer, "0.bias"))
    assert model[0](first).shape == (4, 8)
    assert waits(lambda: model[4](last))
    rank.let_through()
    assert model[4](last).shape == (1, 3)


@pytest.mark.parametrize("steps_on", ["server", "worker"])
@pytest.mark.parametrize(
    "read",
    [
        lambda model, optimizer: model.state_dict(),
        lambda model, optimizer: model[2].state_dict(),
        lambda model, optimizer: model.load_state_dict(build().state_dict()),
        lambda model, optimizer: optimizer.state_dict(),
        lambda model, optimizer: optimizer.wrapped.state_dict(),
        lambda model, optimizer: optimizer.synchronize(),
        lambda model, optimizer: optimizer.refresh(),
        lambda model, optimizer: torch.no_grad()(model[0])(batches()[2]),
    ],
)
def test_reading_all_parameters_waits_for_all_buckets(steps_on: Side, read: Any) -> None:
    rank = HeldRank(steps_on)
    model, optimizer = under_way(rank, timeout=SOON)
    late = bucket_of(optimizer, "2.weight")
    rank.let_through(*(rank.held.keys() - {late}))
    assert waits(lambda: read(model, optimizer))
    rank.let_through()
    read(model, optimizer)
    assert in_flight(optimizer) == []


@pytest.mark.parametrize("steps_on", ["server", "worker"])
@pytest.mark.parametrize("zero", ["optimizer", "model"])
def test_gradients_on_their_way_are_left_alone_until_answered(steps_on: Side, zero: str) -> None:
    rank = HeldRank(steps_on)
    model, optimizer = crossing(rank, timeout=SOON)
    rank.holding = True
    loss_of(model, batches()[1]).backward()
    given = [bucket.gradients.clone() for bucket in optimizer._trained.reducer.buckets]
    optimizer.step()
    (optimizer if zero == "optimizer" else model).zero_grad()
    assert_same([bucket.gradients for bucket in optimizer._trained.reducer.buckets], given)
    rank.let_through()
    optimizer.synchronize()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("steps_on", ["server", "worker"])
@pytest.mark.parametrize(
    "touch",
    [
        lambda model, optimizer: model.zero_grad(set_to_none=False),
        lambda model, optimizer: optimizer.wrapped.zero_grad(set_to_none=False),
        lambda model, optimizer: model[2].weight.grad.mul_(0.5),
    ],
)
def test_gradients_that_are_changed_on_their_way_are_an_error_with_its_mend(
    steps_on: Side, touch: Any
) -> None:
    rank = HeldRank(steps_on)
    model, optimizer = under_way(rank)
    touch(model, optimizer)
    rank.let_through()
    for wait in (lambda: model(batches()[2]), optimizer.synchronize):
        with pytest.raises(ConfigError, match=r"changed in place after step\(\).*optimizer.zero_grad"):
            wait()


@pytest.mark.parametrize("crossed", [True, False])
@pytest.mark.parametrize("steps_on", ["server", "worker"])
def test_a_model_can_be_pickled_and_its_copy_waits_for_nothing(steps_on: Side, crossed: bool) -> None:
    rank = HeldRank(steps_on)
    model, optimizer = build(), None
    if crossed:
        model, optimizer = crossing(rank, timeout=SOON)
        optimizer.synchronize()
    else:  # the first step is being watched
        optimizer = wrap(model, rank, cross_barrier=True, timeout=SOON)
    twin, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._state_dict_pre_hooks):
            assert ForkingPickler.dumps(hooks), "as saving the model would"
    if crossed:
        rank.holding = True
        plain_step(model, optimizer, batches()[1])
        assert waits(lambda: model(batches()[2]))
    assert twin(batches()[2]).shape == (4, 3)
    assert_same(list(twin.state_dict().values()), list(before.values()))


def test_a_guard_that_is_given_up_leaves_no_hook_behind() -> None:
    model = build()
    optimizer = wrap(model, LocalCommunicator(), cross_barrier=True)
    clipped_step(model, optimizer, batches()[0])
    assert optimizer._trained.reducer.overlap.crossing is False
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._state_dict_pre_hooks
        assert not module._load_state_dict_pre_hooks


def test_modules_run_by_an_early_evaluation_are_not_those_of_training() -> None:
    class Branched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 3)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            if self.training:  # reads what is the inner module's, past its forward
                return nn.functional.linear(batch, self.inner.weight, self.inner.bias)
            outputs: torch.Tensor = self.inner(batch)
            return outputs

    rank, model = HeldRank(), Branched()
    optimizer = wrap(model, rank, cross_barrier=True, timeout=SOON)
    with torch.no_grad():
        model.eval()(batches()[0])
    model.train()
    plain_step(model, optimizer, batches()[0])
    rank.holding = True
    plain_step(model, optimizer, batches()[1])
    assert waits(lambda: model(batches()[2]))
