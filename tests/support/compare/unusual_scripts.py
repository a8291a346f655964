"""Scripts that train correctly, and handle gradients or the optimizer in unusual ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.compare.audited import Script, Training, sgd, taking


def norms_logged(training: Training, inputs: Tensor, labels: Tensor) -> None:
    """Computes gradients a second time, to log their norm."""
    training.optimizer.zero_grad()
    loss = training.loss(inputs, labels)
    loss.backward(retain_graph=True)
    gradients = torch.autograd.grad(loss, list(training.model.parameters()))
    training.kept["norm"] = sum(float(one.norm()) for one in gradients)
    training.optimizer.step()


def norm_of_last_layer(training: Training, inputs: Tensor, labels: Tensor) -> Tensor:
    """Computes some gradients before backward, as GradNorm does."""
    loss = training.loss(inputs, labels)
    last = list(training.model.parameters())[-1:]
    training.kept["norm"] = float(torch.autograd.grad(loss, last, retain_graph=True)[0].norm())
    return loss


def penalized_gradient(training: Training, inputs: Tensor, labels: Tensor) -> Tensor:
    loss = training.loss(inputs, labels)
    gradients = torch.autograd.grad(loss, list(training.model.parameters()), create_graph=True)
    return loss + 1e-2 * sum((one.square().sum() for one in gradients), torch.zeros(()))


def assigned(training: Training, inputs: Tensor, labels: Tensor) -> None:
    """Sets gradients without backward()."""
    training.optimizer.zero_grad()
    parameters = list(training.model.parameters())
    gradients = torch.autograd.grad(training.loss(inputs, labels), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    training.optimizer.step()


def by_hand(training: Training, inputs: Tensor, labels: Tensor) -> None:
    """Sets gradients that depend on the samples, without autograd."""
    training.optimizer.zero_grad()
    for parameter in training.model.parameters():
        parameter.grad = torch.full_like(parameter, float(inputs.mean()) * 0.1)
    training.optimizer.step()


def dropped(training: Training) -> None:
    """Leaves out one parameter in every third step."""
    if training.number % 3 == 0:
        training.layers[0].weight.grad = None


def checkpointed(training: Training, inputs: Tensor, labels: Tensor) -> Tensor:
    hidden: Any = torch.utils.checkpoint.checkpoint(
        training.model, inputs.requires_grad_(), use_reentrant=True
    )
    return torch.nn.functional.cross_entropy(hidden, labels)


def from_step(number: int, action: Callable[[Training], None]) -> Callable[[Training], None]:
    """Returns what acts before one step."""

    def before(training: Training) -> None:
        if training.number == number:
            action(training)

    return before


def hooking(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)


def hooking_behind(training: Training) -> None:
    """Halves gradients behind autograd."""

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    for parameter in training.model.parameters():
        parameter.register_post_accumulate_grad_hook(halve)


def clearing(training: Training) -> None:
    training.inner.state.clear()


def zeroing(training: Training) -> None:
    """Zeroes momenta in place, where workers step."""
    for state in training.inner.state.values():
        state["momentum_buffer"].zero_()


def swapping(training: Training) -> None:
    """Evaluates with other parameters, and puts those of training back."""
    with torch.no_grad():
        kept = [one.clone() for one in training.model.parameters()]
        for one in training.model.parameters():
            one.mul_(0.9)
        for one, old in zip(training.model.parameters(), kept, strict=True):
            one.copy_(old)


UNUSUAL: dict[str, Script] = {
    "norms logged": Script(take=norms_logged),
    "norm of the last layer": Script(take=taking(norm_of_last_layer)),
    "gradient penalty": Script(take=taking(penalized_gradient)),
    "gradients assigned": Script(take=assigned),
    "gradients by hand": Script(take=by_hand),
    "gradient dropped": Script(take=taking(after=dropped), options={"overlap": False}),
    "checkpointed": Script(take=taking(checkpointed)),
    "hooks from step 5 on": Script(before=from_step(5, hooking)),
    "hooks behind autograd from step 5 on": Script(
        before=from_step(5, hooking_behind), options={"overlap": False}
    ),
    "momentum cleared": Script(before=from_step(6, clearing)),
    "momentum zeroed": Script(optimizer=sgd, before=from_step(6, zeroing)),
    "parameters swapped": Script(before=from_step(8, swapping), options={"overlap": False}),
}
"""Scripts that run on every row."""
