"""Scripts that keep, replace, change or drop gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.reports.training import (
    Job,
    Topology,
    assert_as_torch,
    batches,
    mlp,
    momentum,
    square,
    topologies,
    values,
)

Change = Callable[[nn.Module], None]


def gradients(model: nn.Module) -> list[Tensor]:
    return [one.grad for one in model.parameters() if one.grad is not None]


# Kept


@topologies()
def test_gradients_of_two_tasks_are_kept_and_added(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            kept = []
            for scale in (1.0, 0.5):
                optimizer.zero_grad()
                (scale * job.loss(batch, square(model))).backward()
                kept.append(gradients(model))
            for parameter, first, second in zip(model.parameters(), *kept, strict=True):
                parameter.grad = first + 2 * second
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)


@topologies()
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_the_last_step_are_kept_for_the_next(topology: Topology, set_to_none: bool) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        last: list[Tensor] = []
        for batch in batches():
            optimizer.zero_grad(set_to_none=set_to_none)
            job.loss(batch, square(model)).backward()
            for now, before in zip(gradients(model), last, strict=False):
                now.add_(before, alpha=0.5)
            optimizer.step()
            last = [one.clone() for one in gradients(model)] if not set_to_none else gradients(model)
        return values(model)

    assert_as_torch(topology, script, refusal="changes gradients")


@topologies()
def test_all_steps_gradients_are_kept_for_later(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        history = []
        for batch in batches():
            optimizer.zero_grad()
            job.loss(batch, square(model)).backward()
            optimizer.step()
            history.append(gradients(model))
        return [job.mean_over_ranks(one) for step in history for one in step]

    assert_as_torch(topology, script)


@topologies()
def test_a_model_whose_gradients_are_reset_to_none_by_hand(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            for parameter in model.parameters():
                parameter.grad = None
            job.loss(batch, square(model)).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_gradients_are_detached_and_zeroed_by_hand(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            for gradient in gradients(model):
                gradient.detach_()
                gradient.zero_()
            job.loss(batch, square(model)).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)


# Changed between backward and step


def halve(model: nn.Module) -> None:
    for gradient in gradients(model):
        gradient.mul_(0.5)


def halve_data(model: nn.Module) -> None:
    for gradient in gradients(model):
        gradient.data.mul_(0.5)


def halve_numpy(model: nn.Module) -> None:
    for gradient in gradients(model):
        gradient.numpy()[...] *= 0.5


def replace(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


def replace_data(model: nn.Module) -> None:
    for gradient in gradients(model):
        gradient.data = gradient.data * 0.5


def halve_together(model: nn.Module) -> None:
    torch._foreach_mul_(gradients(model), 0.5)


CHANGES = [halve, halve_data, halve_numpy, replace, replace_data, halve_together]


def changing(change: Change, when: Callable[[int], bool]) -> Callable[[Job], list[Tensor]]:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for turn, batch in enumerate(batches()):
            optimizer.zero_grad()
            job.loss(batch, square(model)).backward()
            if when(turn):
                change(model)
            optimizer.step()
        return values(model)

    return script


@topologies()
@pytest.mark.parametrize("change", CHANGES)
def test_gradients_are_halved_before_every_step(topology: Topology, change: Change) -> None:
    assert_as_torch(topology, changing(change, lambda _: True))


@topologies()
@pytest.mark.parametrize("change", CHANGES)
def test_gradients_are_halved_from_the_third_step(topology: Topology, change: Change) -> None:
    assert_as_torch(topology, changing(change, lambda turn: turn > 1), refusal="changes gradients")


@topologies()
def test_the_norm_of_the_mean_gradient_is_clipped(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        norms = []
        for batch in batches():
            optimizer.zero_grad()
            job.loss(batch, square(model)).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
            optimizer.step()
        return [*values(model), *norms]

    assert_as_torch(topology, script)


@topologies()
def test_elements_of_the_mean_gradient_are_clipped_through_data(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            optimizer.zero_grad()
            job.loss(batch, square(model)).backward()
            for gradient in gradients(model):
                gradient.data.clamp_(-0.01, 0.01)
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_a_hook_scales_the_gradient_of_a_layer(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        model.get_parameter("0.weight").register_hook(lambda gradient: 0.1 * gradient)
        optimizer = job.wrap(momentum(model), model)
        model.get_parameter("2.weight").register_hook(lambda gradient: -gradient)
        for batch in batches():
            optimizer.zero_grad()
            job.loss(batch, square(model)).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)


def scale_accumulated(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.1)


@topologies()
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_hook_scales_the_accumulated_gradient(topology: Topology, before: bool) -> None:
    """The hook is registered before or after the optimizer is wrapped."""

    def script(job: Job) -> list[Tensor]:
        model = mlp()
        weight = model.get_parameter("0.weight")
        if before:
            weight.register_post_accumulate_grad_hook(scale_accumulated)
        optimizer = job.wrap(momentum(model), model)
        if not before:
            weight.register_post_accumulate_grad_hook(scale_accumulated)
        for batch in batches():
            optimizer.zero_grad()
            job.loss(batch, square(model)).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script, refusal="gradient")


# Dropped, or used more than once


@topologies()
def test_a_step_is_skipped_and_its_gradients_dropped(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for turn, batch in enumerate(batches()):
            optimizer.zero_grad()
            job.loss(batch, square(model)).backward()
            if turn != 2:
                optimizer.step()
        return values(model)

    assert_as_torch(topology, script, refusal="overlap=False")


@topologies()
def test_a_second_step_with_the_same_gradients(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            optimizer.zero_grad()
            job.loss(batch, square(model)).backward()
            optimizer.step()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_one_rank_makes_a_backward_for_itself(topology: Topology) -> None:
    """Rank 0 looks at the gradients of one sample, and drops them."""

    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model, timeout=5.0)
        for turn, batch in enumerate(batches()):
            if turn == 2 and job.ranks[0] == 0:
                model(batch[:1]).sum().backward()
            optimizer.zero_grad()
            job.loss(batch, square(model)).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script, refusal="backward")


@topologies()
def test_one_rank_asks_autograd_for_a_gradient(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            if job.ranks[0] == 0:
                torch.autograd.grad(model(batch[:1]).sum(), list(model.parameters()))
            optimizer.zero_grad()
            job.loss(batch, square(model)).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)
