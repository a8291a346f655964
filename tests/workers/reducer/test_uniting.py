"""Optimizers that share parameters: reducers that become one, and whose options and parameters count."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from hubring.ps.core.errors import ConfigError, HubringError
from hubring.ps.core.types import StepHyper
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.communicators.base import ParameterState
from hubring.workers.communicators.local import LocalCommunicator
from tests.support.fakes.hub import FakeHub, FakeRank
from tests.support.training.held_rank import in_flight
from tests.support.training.training_scripts import sgd, wrap

ONES = torch.ones(2, 3)


class Recording(LocalCommunicator):
    """`sent`: the names of the parameters that were sent, in order; `fails`: the next `attach` does."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []
        self.fails = False

    def attach(self, buckets: list[Bucket], state: Mapping[str, ParameterState] | None = None) -> int:
        if self.fails:
            self.fails = False
            raise HubringError("the ranks add different parameters")
        return super().attach(buckets, state)

    def push_pull(self, bucket: Bucket, hyper: StepHyper) -> Work:
        self.sent += [tensor.name for tensor in bucket.spec.tensors]
        return super().push_pull(bucket, hyper)

    def take(self) -> list[str]:
        sent, self.sent = self.sent, []
        return sent


def three_layers(*frozen: int) -> nn.Sequential:
    model = nn.Sequential(*[nn.Linear(3, 3, bias=False) for _ in range(3)])
    for layer in frozen:
        model[layer].requires_grad_(False)
    return model


def over(model: nn.Sequential, *layers: int) -> torch.optim.Optimizer:
    return sgd(nn.Sequential(*[model[layer] for layer in layers]))


def backward(model: nn.Module) -> torch.Tensor:
    model.zero_grad()
    loss: torch.Tensor = model(ONES).square().sum()
    loss.backward()
    return loss


@pytest.mark.parametrize("cross_barrier", [False, True])
@pytest.mark.parametrize("begins", ["earlier", "later"])
def test_a_pass_that_unites_reducers_sends_each_bucket_once_in_one_order(
    begins: str, cross_barrier: bool
) -> None:
    rank, model = Recording(), three_layers(2)
    earlier = wrap(model, rank)
    model[2].requires_grad_(True)
    later = wrap(model, rank, inner=over(model, 2), cross_barrier=cross_barrier)
    # A loss that does not reach the last layer begins with a pass of the earlier reducer.
    backward(model if begins == "later" else model[:2])
    earlier.step()
    later.step()
    assert rank.take() == ["1.weight", "0.weight", "2.weight"]
    assert later._trained.reducer is earlier._trained.reducer
    assert later._trained.reducer.options.cross_barrier is cross_barrier, "the newest optimizer's options"


def test_a_step_goes_on_with_the_reducer_that_its_closures_backward_has_made() -> None:
    rank, model = Recording(), three_layers(0)
    earlier = wrap(model, rank)
    for _ in range(2):
        backward(model)
        earlier.step()
    model[0].requires_grad_(True)
    later = wrap(model, rank, inner=over(model, 0), cross_barrier=True)
    absorbed = later._trained.reducer
    for _ in range(3):
        rank.take()
        later.step(lambda: backward(model))
        assert sorted(rank.take()) == ["0.weight", "1.weight", "2.weight"]
        earlier.step()
    gone = earlier._trained.reducer if absorbed.became is None else absorbed
    assert gone is absorbed
    with pytest.raises(AttributeError, match="exchange"):
        absorbed.exchange  # noqa: B018


def test_a_module_waits_for_its_own_parameters_after_reducers_have_become_one() -> None:
    rank, model = Recording(), three_layers()
    apart = [wrap(model, rank, inner=over(model, *layers)) for layers in [(0,), (1, 2)]]
    whole = wrap(model, rank, cross_barrier=True)
    assert apart
    for _ in range(2):
        backward(model)
        whole.step()
    assert in_flight(whole) == ["0.weight", "1.weight", "2.weight"]
    model[0](ONES)
    assert in_flight(whole) == ["1.weight", "2.weight"]
    model[2](ONES)
    assert in_flight(whole) == ["1.weight"]


def test_an_optimizer_that_cannot_be_made_leaves_the_forwards_of_another_waiting() -> None:
    rank, model = Recording(), three_layers()
    optimizer = wrap(model, rank, cross_barrier=True)
    with pytest.raises(ConfigError, match="backward_passes_per_step is 0"):
        wrap(model, rank, backward_passes_per_step=0)
    for _ in range(2):
        backward(model)
        optimizer.step()
    model[0](ONES)
    assert in_flight(optimizer) == ["1.weight", "2.weight"]


def test_parameters_that_could_not_be_taken_in_are_at_the_next_backward() -> None:
    rank, model = Recording(), three_layers(0)
    optimizer = wrap(model, rank)
    model[0].requires_grad_(True)
    rank.fails = True
    with pytest.raises(HubringError, match="different parameters"):
        backward(model)
    optimizer.zero_grad()
    rank.take()
    backward(model)
    assert sorted(rank.take()) == ["0.weight", "1.weight", "2.weight"]


def test_a_hub_steps_only_what_the_newest_optimizer_has() -> None:
    class Noting(FakeRank):
        def push_pull(self, bucket: Bucket, hyper: StepHyper) -> Work:
            names = [tensor.name for tensor in bucket.spec.tensors]
            absent.update(names[position] for position in bucket.absent)
            return super().push_pull(bucket, hyper)

    absent = set[str]()
    rank, model = Noting(FakeHub(1)), three_layers()
    earlier = wrap(model, rank)
    backward(model)
    earlier.step()
    assert not absent
    later = wrap(model, rank, inner=over(model, 0))
    backward(model)
    later.step()
    assert absent == {"1.weight", "2.weight"}


def test_reducers_that_have_both_begun_a_pass_become_one() -> None:
    def add(_: torch.Tensor) -> None:
        first.add_param_group({"params": model[2].weight})

    rank, model = Recording(), three_layers()
    second = wrap(model, rank, inner=over(model, 2))
    first = wrap(model, rank, inner=over(model, 0, 1))
    front = model.get_parameter("0.weight")
    front.register_post_accumulate_grad_hook(add)
    backward(model)
    assert rank.take() == ["2.weight", "1.weight", "0.weight"]
    assert first._trained.reducer is second._trained.reducer
