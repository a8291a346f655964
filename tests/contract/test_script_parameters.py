"""What a script does to parameters and buffers has torch's effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from hubring.ps.core.errors import ConfigError, HubringError
from hubring.workers.communicators.base import Communicator
from tests.contract.awkward import (
    KINDS,
    NUMPY,
    OPTIMIZERS,
    STEPPING_HERE,
    Hub,
    assert_as_one,
    backward,
    batches,
    ends,
    layers,
    made,
    momentum,
    step,
    values,
    wrapped,
)
from tests.support.training.ranks import Ranks

Between = Callable[[Any, torch.optim.Optimizer], Any]


# S1: parameters that the script changes between steps.


def with_numpy(model: Any, _: object) -> None:
    array = model[0].weight.detach().numpy()
    array[array > 0.1] = 0.1


def swap(model: Any, _: object) -> None:
    first, second = model[0].weight.data.clone(), model[0].weight.data.t().clone()
    model[0].weight.data.copy_((first + second) / 2)


def reset(model: Any, _: object) -> None:
    made(model[2])


def load(model: Any, _: object) -> None:
    model.load_state_dict(layers().state_dict())


BETWEEN: dict[str, Between] = {
    "clamp": lambda model, _: [one.data.clamp_(-0.1, 0.1) for one in model.parameters()],
    "in place": lambda model, _: torch.no_grad()(model[0].weight.mul_)(0.9),
    **dict.fromkeys(NUMPY, with_numpy),
    "one element": lambda model, _: model[2].bias.data[1:].fill_(0.25),
    "swap": swap,
    "reset": reset,
    "load": load,
    "vector": lambda model, _: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(model.parameters()).clamp(-0.2, 0.2), model.parameters()
    ),
}


@KINDS
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_parameters_changed_between_steps_stay_changed(kind: type[Ranks], between: Between) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator)
        for batch in batches():
            step(model, optimizer, batch, communicator)
            between(model, optimizer)
        return values(model)

    assert_as_one(kind, train)


@KINDS
def test_parameters_changed_between_backward_and_step_stay_changed(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator)
        for batch in batches():
            optimizer.zero_grad()
            backward(model, batch, communicator)
            model[0].weight.data.mul_(0.9)
            optimizer.step()
        return values(model)

    assert_as_one(kind, train)


@pytest.mark.differing
def test_a_change_that_one_rank_makes_ends_the_job_and_is_named() -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        assert communicator is not None
        model = layers()
        optimizer = momentum(model, communicator)
        for batch in batches():
            step(model, optimizer, batch, communicator)
            if communicator.rank:
                model[2].bias.data.clamp_(max=-1.0)
        return values(model)

    with pytest.raises(HubringError, match=r"2\.bias"):
        ends(Hub, train)


# S2: parameters without a gradient.


class Sometimes(nn.Module):
    """Its second layer takes part while `both` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 2), nn.Linear(4, 2)
        self.both = True

    def forward(self, batch: Tensor) -> Tensor:
        return self.always(batch) + (self.sometimes(batch) if self.both else 0)


@KINDS
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("bucket_bytes", [16, 1 << 20])
def test_a_parameter_without_a_gradient_anywhere_is_not_stepped(
    kind: type[Ranks], make: Callable[[Any], torch.optim.Optimizer], bucket_bytes: int
) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = made(Sometimes())
        optimizer = wrapped(make(model.parameters()), model, communicator, bucket_bytes=bucket_bytes)
        for number, batch in enumerate([*batches(), *batches()]):
            model.both = number % 3 != 1
            step(model, optimizer, batch, communicator)
            assert (model.sometimes.weight.grad is None) is not model.both
        return values(model)

    assert_as_one(kind, train, rtol=1e-4, atol=1e-5)


@KINDS
def test_a_gradient_that_the_script_drops_is_none(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator)
        for batch in batches():
            optimizer.zero_grad()
            backward(model, batch, communicator)
            model[0].bias.grad = None
            optimizer.step()
        return values(model)

    assert_as_one(kind, train)


@KINDS
@pytest.mark.parametrize("late", [False, True])
def test_frozen_and_thawed_parameters_are_stepped_as_in_torch(kind: type[Ranks], late: bool) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        model[0].weight.requires_grad_(not late)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        optimizer = wrapped(sgd, model, communicator)
        for number, batch in enumerate(batches()):
            model[0].weight.requires_grad_((number > 1) is late)
            step(model, optimizer, batch, communicator)
        return values(model)

    assert_as_one(kind, train)


# S3: buffers and frozen parameters.


@pytest.mark.differing
@KINDS
@pytest.mark.parametrize("shapes", [((3,), (4,)), ((4,), (2, 2))])
def test_buffers_that_differ_by_rank_are_refused_naming_both(
    kind: type[Ranks], shapes: tuple[tuple[int, ...], ...]
) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        assert communicator is not None
        model = layers()
        model.register_buffer("mask", torch.ones(shapes[communicator.rank]))
        momentum(model, communicator)
        return []

    with pytest.raises(ConfigError, match=r"rank 0 and rank 1 .*mask float32"):
        ends(kind, train)


@KINDS
def test_buffers_of_every_kind_come_from_rank_0(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        rank = 0 if communicator is None else communicator.rank
        model = layers()
        own = torch.arange(6.0).view(2, 3) + rank
        buffers = {
            "expanded": own[:1].expand(4, 3),
            "sparse": own.to_sparse(),
            "conjugate": torch.complex(own, own).conj(),
            "transposed": own.t(),
            "flags": own > 3,
            "count": torch.tensor(rank),
        }
        for name, tensor in buffers.items():
            model.register_buffer(name, tensor)
        momentum(model, communicator)
        return [model.get_buffer(name).to_dense().resolve_conj().clone() for name in buffers]

    assert_as_one(kind, train)


# S6: parameters that share memory.


@STEPPING_HERE
def test_two_parameters_over_one_storage_stay_tied(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model: Any = made(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        model[1].weight = nn.Parameter(model[0].weight.data)
        optimizer = momentum(model, communicator)
        for batch in batches():
            step(model, optimizer, batch, communicator)
        assert model[0].weight.data_ptr() == model[1].weight.data_ptr()
        return values(model)

    assert_as_one(kind, train)


def test_a_hub_refuses_two_parameters_over_one_storage() -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model: Any = made(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        model[1].weight = nn.Parameter(model[0].weight.data)
        momentum(model, communicator)
        return []

    with pytest.raises(ConfigError, match=r"weight and .*weight share memory"):
        ends(Hub, train)


@STEPPING_HERE
def test_views_that_the_script_keeps_show_the_parameters(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        kept = [one.data for one in model.parameters()]
        optimizer = momentum(model, communicator)
        for batch in batches():
            step(model, optimizer, batch, communicator)
            kept[0].clamp_(-0.1, 0.1)
            model[2].weight.data = model[2].weight.data.clamp(-0.2, 0.2)
        return [one.clone() for one in kept[:2]] + values(model)

    assert_as_one(kind, train)


@KINDS
def test_a_square_weight_may_be_transposed(kind: type[Ranks]) -> None:
    """It has the same address, and other strides."""

    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator)
        for number, batch in enumerate(batches()):
            step(model, optimizer, batch, communicator)
            if number % 2:
                weight = model[0].weight
                weight.data = weight.data.t()
        return values(model)

    assert_as_one(kind, train)
