"""What a script does to parameters, gradients and buffers has torch's effect.

`tests/reports` has many more such scripts. These run with models on a GPU too, where changes are noticed in
another way: `make gpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from hubring.ps.core.errors import ConfigError
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.contract.awkward import (
    KINDS,
    NUMPY,
    OPTIMIZERS,
    STEPPING_HERE,
    assert_as_one,
    backward,
    batches,
    ends,
    gradient,
    layers,
    made,
    momentum,
    step,
    values,
    wrapped,
)
from tests.support.training.ranks import Ranks

Change = Callable[[Any], object]


class Changes(NamedTuple):
    """What a script does to a model of `layers` in each step."""

    before_step: Change = lambda model: None
    after_step: Change = lambda model: None


def with_numpy(model: Any) -> None:
    array = model[0].weight.detach().numpy()
    array[array > 0.1] = 0.1


def swap(model: Any) -> None:
    first, second = model[0].weight.data.clone(), model[0].weight.data.t().clone()
    model[0].weight.data.copy_((first + second) / 2)


def transpose(model: Any) -> None:
    """The weight is square: it keeps its address, and has other strides."""
    model[0].weight.data = model[0].weight.data.t()


def halve_numpy(model: Any) -> None:
    for one in model.parameters():
        gradient(one).numpy()[...] *= 0.5


def replace_data(model: Any) -> None:
    for one in model.parameters():
        own = gradient(one)
        own.data = own.data * 0.5


def drop(model: Any) -> None:
    model[0].bias.grad = None


AFTER_STEP: dict[str, Change] = {
    "clamp": lambda model: [one.data.clamp_(-0.1, 0.1) for one in model.parameters()],
    "in place": lambda model: torch.no_grad()(model[0].weight.mul_)(0.9),
    **dict.fromkeys(NUMPY, with_numpy),
    "one element": lambda model: model[2].bias.data[1:].fill_(0.25),
    "swap": swap,
    "reset": lambda model: made(model[2]),
    "load": lambda model: model.load_state_dict(layers().state_dict()),
    "vector": lambda model: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(model.parameters()).clamp(-0.2, 0.2), model.parameters()
    ),
    "transpose": transpose,
}
BEFORE_STEP: dict[str, Change] = {
    "parameters": lambda model: model[0].weight.data.mul_(0.9),
    # The same on both ranks and on their mean, since a hub gets each rank's own gradient.
    "data": lambda model: [gradient(one).data.mul_(0.5) for one in model.parameters()],
    **{f"{name} gradients": halve_numpy for name in NUMPY},
    "replaced data": replace_data,
    "dropped": drop,
}
CHANGES = {
    **{name: Changes(after_step=change) for name, change in AFTER_STEP.items()},
    **{f"{name} before the step": Changes(before_step=change) for name, change in BEFORE_STEP.items()},
}


@KINDS
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_what_a_script_changes_in_each_step_counts(kind: type[Ranks], changes: Changes) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator)
        for batch in batches():
            optimizer.zero_grad()
            backward(model, batch, communicator)
            changes.before_step(model)
            optimizer.step()
            changes.after_step(model)
        return values(model)

    assert_as_one(kind, train)


class Sometimes(nn.Module):
    """A layer that always counts, and one that counts while `both` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 2), nn.Linear(4, 2)
        self.both = True

    def forward(self, batch: Tensor) -> Tensor:
        return self.always(batch) + (self.sometimes(batch) if self.both else 0)


@KINDS
@pytest.mark.parametrize(
    ("make", "bucket_bytes"), list(zip(OPTIMIZERS.values(), 2 * (16, 1 << 20), strict=True)), ids=OPTIMIZERS
)
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


@STEPPING_HERE
def test_an_accumulation_that_ends_early_is_a_mean_after_synchronize(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator, backward_passes_per_step=4)
        for batch in batches():
            optimizer.zero_grad()
            for _ in range(2):
                backward(model, batch, communicator)
            if isinstance(optimizer, DistributedOptimizer):
                optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        return values(model)

    assert_as_one(kind, train)


@pytest.mark.differing
@KINDS
def test_a_second_gradient_after_the_first_was_sent_is_refused(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        first, body, head = (made(nn.Linear(4, 4)) for _ in range(3))
        optimizer = momentum(nn.Sequential(first, body, head), communicator)
        for number, batch in enumerate(batches()):
            hidden = first(batch)
            for _ in range(3 if number == 2 else 1):
                hidden = torch.utils.checkpoint.checkpoint(body, hidden, use_reentrant=True)
            optimizer.zero_grad()
            head(hidden).square().mean().backward()
            optimizer.step()
        return []

    with pytest.raises(ConfigError, match=r"got another gradient in one backward.*overlap=False"):
        ends(kind, train)
