"""What a script does to parameters, gradients and buffers has torch's effect.

`tests/reports` has many more such scripts. These run with models on a GPU too, where changes are noticed in
another way: `make gpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.reports.report import as_torch
from tests.reports.training import (
    DEVICE,
    Job,
    adam,
    batches,
    mlp,
    momentum,
    prepared,
    seeded,
    square,
    step,
    take,
    trained,
    values,
)

NUMPY = ["numpy"] if DEVICE.type == "cpu" else []
"""Ways to change tensors that the device has."""
Change = Callable[[Any], object]


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


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
    "reset": lambda model: seeded(model[2].reset_parameters),
    "load": lambda model: model.load_state_dict(mlp(4).state_dict()),
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
    **{name: (lambda model: None, change) for name, change in AFTER_STEP.items()},
    **{f"{name} before the step": (change, lambda model: None) for name, change in BEFORE_STEP.items()},
}


@as_torch()
@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES)
def test_what_a_script_changes_in_each_step_counts(job: Job, before: Change, after: Change) -> list[Tensor]:
    # One after the other, on a GPU too: parameters that share memory are stepped twice.
    model, optimizer = prepared(job, mlp(4), partial(momentum, foreach=False))
    return trained(job, model, optimizer, before=lambda _: before(model), after=lambda: after(model))


class Sometimes(nn.Module):
    """A layer that always counts, and one that counts while `both` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 2), nn.Linear(4, 2)
        self.both = True

    def forward(self, batch: Tensor) -> Tensor:
        return self.always(batch) + (self.sometimes(batch) if self.both else 0)


OPTIMIZERS = {
    "momentum": momentum,
    "adam": adam,
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1, lr_decay=0.1),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9),
}


@as_torch(tolerance=(1e-4, 1e-5))
@pytest.mark.parametrize(
    ("make", "bucket_bytes"), list(zip(OPTIMIZERS.values(), 2 * (16, 1 << 20), strict=True)), ids=OPTIMIZERS
)
def test_a_parameter_without_a_gradient_anywhere_is_not_stepped(
    job: Job, make: Callable[[Any], torch.optim.Optimizer], bucket_bytes: int
) -> list[Tensor]:
    model, optimizer = prepared(job, seeded(Sometimes).to(DEVICE), make, bucket_bytes=bucket_bytes)
    for number, batch in enumerate(batches(steps=8)):
        model.both = number % 3 != 1
        step(job, model, optimizer, batch)
        assert (model.sometimes.weight.grad is None) is not model.both
    return values(model)


@as_torch(on="aggregate ring")
def test_an_accumulation_that_ends_early_is_a_mean_after_synchronize(job: Job) -> list[Tensor]:
    model, optimizer = prepared(job, mlp(), backward_passes_per_step=4)
    for batch in batches():
        optimizer.zero_grad()
        for _ in range(2):
            job.loss(batch, square(model)).backward()
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return values(model)


@pytest.mark.differing
@as_torch(refused="hub aggregate ring", error=r"got another gradient in one backward.*overlap=False")
def test_a_second_gradient_after_the_first_was_sent_is_refused(job: Job) -> list[Tensor]:
    first, body, head = (seeded(lambda: nn.Linear(4, 4)) for _ in range(3))
    optimizer = job.wrap(momentum(whole := nn.Sequential(first, body, head)), whole)
    for number, batch in enumerate(batches()):
        hidden = first(batch)
        for _ in range(3 if number == 2 else 1):
            hidden = torch.utils.checkpoint.checkpoint(body, hidden, use_reentrant=True)
        take(optimizer, head(hidden).square().mean())
    return []
