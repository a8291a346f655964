"""Gradients that are kept, replaced, changed or dropped."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.reports.report import report
from tests.reports.training import (
    Job,
    backward,
    batches,
    mlp,
    momentum,
    prepared,
    square,
    step,
    trained,
    values,
)

Change = Callable[[nn.Module], Any]


def gradients(model: nn.Module) -> list[Tensor]:
    return [one.grad for one in model.parameters() if one.grad is not None]


def saved_alone(tensor: Tensor) -> Tensor:
    """Whether a tensor takes no more room than a copy of it: in a file, pickled, and copied."""

    def sizes(one: Tensor) -> tuple[int, int, int]:
        file = io.BytesIO()
        torch.save(one, file)
        return file.tell(), len(pickle.dumps(one)), copy.deepcopy(one).untyped_storage().nbytes()

    # Names of storages differ in length by some bytes.
    pairs = zip(sizes(tensor.detach()), sizes(tensor.detach().clone()), strict=True)
    return torch.tensor([own - alone < 32 for own, alone in pairs])


# Kept


@report("pytorch/pytorch#40157, pytorch/pytorch#1995")
@pytest.mark.parametrize("what", ["grad", "data"])
def test_a_gradient_or_parameter_is_saved_alone(job: Job, what: str) -> list[Tensor]:
    """Saves, pickles and copies one small `.grad` or `.data`."""
    model, optimizer = prepared(job, mlp(), bucket_bytes=1 << 20)
    alone = []
    for batch in batches():
        backward(job, model, optimizer, batch)
        alone += [saved_alone(getattr(one, what)) for one in model.parameters()]
        optimizer.step()
        alone += [saved_alone(getattr(one, what)) for one in model.parameters()]
    return alone


@report("horovod/horovod#947")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_two_tasks_are_kept_and_added(job: Job, set_to_none: bool) -> list[Tensor]:
    """Assigns the sum of two tasks' gradients, one projected."""
    model, optimizer = prepared(job, mlp())
    for batch in batches():
        kept = []
        for output in range(2):
            optimizer.zero_grad()
            job.loss(batch, lambda part, at=output: model(part)[:, at].square().mean()).backward()  # type: ignore[misc]
            kept.append([one.clone() for one in gradients(model)])
        optimizer.zero_grad(set_to_none)
        for parameter, first, second in zip(model.parameters(), *kept, strict=True):
            parameter.grad = first + second - (first * second).sum() / (first * first).sum() * first
        optimizer.step()
    return values(model)


@report("Auxiliary loss")
def test_gradients_are_clipped_between_two_passes(job: Job) -> list[Tensor]:
    """`clip_grad_norm_` after the first of two losses."""
    model, optimizer = prepared(job, mlp())
    for batch in batches():
        backward(job, model, optimizer, batch)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        job.loss(batch, lambda part: model(part).mean()).backward()
        optimizer.step()
    return values(model)


@report("GradNorm and PCGrad scripts", error="changes gradients", refused="hub")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_the_last_step_are_kept_for_the_next(job: Job, set_to_none: bool) -> list[Tensor]:
    """Adds half of the last step's gradients to the next."""
    model, optimizer = prepared(job, mlp())
    last: list[Tensor] = []
    for batch in batches():
        optimizer.zero_grad(set_to_none=set_to_none)
        job.loss(batch, square(model)).backward()
        for now, before in zip(gradients(model), last, strict=False):
            now.add_(before, alpha=0.5)
        optimizer.step()
        last = [one.clone() for one in gradients(model)] if not set_to_none else gradients(model)
    return values(model)


@report("pytorch/pytorch#41954")
def test_all_steps_gradients_are_kept_for_later(job: Job) -> list[Tensor]:
    """Keeps a list of all gradients."""
    model, optimizer = prepared(job, mlp())
    history: list[Tensor] = []
    trained(job, model, optimizer, after=lambda: history.extend(gradients(model)))
    return [job.mean_over_ranks(one) for one in history]


def reset(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def zero(model: nn.Module) -> None:
    for gradient in gradients(model):
        gradient.detach_()
        gradient.zero_()


@report("pytorch/pytorch#41954, pytorch/pytorch#43557, pytorch/pytorch#43282")
@pytest.mark.parametrize("drop", [reset, zero])
def test_gradients_are_dropped_by_hand(job: Job, drop: Change) -> list[Tensor]:
    """`p.grad = None`, or `p.grad.detach_(); p.grad.zero_()`, instead of `zero_grad()`."""
    model, optimizer = prepared(job, mlp())
    for batch in batches():
        drop(model)
        job.loss(batch, square(model)).backward()
        optimizer.step()
    return values(model)


@report("Gradients that are never cleared")
def test_gradients_are_never_cleared(job: Job) -> list[Tensor]:
    """Never calls `zero_grad()`."""
    model, optimizer = prepared(job, mlp())
    for batch in batches():
        job.loss(batch, square(model)).backward()
        optimizer.step()
    return values(model)


# Changed between backward and step


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


CHANGES: dict[str, Change] = {
    "halve": lambda model: [one.mul_(0.5) for one in gradients(model)],
    "halve_data": lambda model: [one.data.mul_(0.5) for one in gradients(model)],
    "halve_numpy": halve_numpy,
    "replace": replace,
    "replace_data": replace_data,
    "halve_together": lambda model: torch._foreach_mul_(gradients(model), 0.5),
}
EVERY_CHANGE = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


@report("pytorch/tutorials, DQN")
@EVERY_CHANGE
def test_gradients_are_halved_before_every_step(job: Job, change: Change) -> list[Tensor]:
    """Halves in place, by `.data`, NumPy, `_foreach_` or assignment."""
    model, optimizer = prepared(job, mlp())
    return trained(job, model, optimizer, before=lambda _: change(model))


@report("pytorch/tutorials, DQN", refused="hub", error="changes gradients")
@EVERY_CHANGE
def test_gradients_are_halved_from_the_third_step(job: Job, change: Change) -> list[Tensor]:
    """Halves as above, from the third step."""
    model, optimizer = prepared(job, mlp())
    return trained(job, model, optimizer, before=lambda turn: turn > 1 and change(model))


@report("horovod/horovod#1099, modelscope/twinkle#290")
def test_the_norm_of_the_mean_gradient_is_clipped(job: Job) -> list[Tensor]:
    """`clip_grad_norm_`; compares the norm too."""
    model, optimizer = prepared(job, mlp())
    norms: list[Tensor] = []

    def clip(_: int) -> None:
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))

    trained(job, model, optimizer, before=clip)
    return [*values(model), *norms]


@report("Gradient reversal")
def test_a_hook_scales_the_gradient_of_a_layer(job: Job) -> list[Tensor]:
    """`register_hook`."""
    model = mlp()
    model.get_parameter("0.weight").register_hook(lambda gradient: 0.1 * gradient)
    optimizer = job.wrap(momentum(model), model)
    model.get_parameter("2.weight").register_hook(lambda gradient: -gradient)
    return trained(job, model, optimizer)


def scale_accumulated(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.1)


@report("torchtune")
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_hook_scales_the_accumulated_gradient(job: Job, before: bool) -> list[Tensor]:
    """`register_post_accumulate_grad_hook`.

    The hook is registered before or after the optimizer is wrapped.
    """
    model = mlp()
    weight = model.get_parameter("0.weight")
    if before:
        weight.register_post_accumulate_grad_hook(scale_accumulated)
    optimizer = job.wrap(momentum(model), model)
    if not before:
        weight.register_post_accumulate_grad_hook(scale_accumulated)
    return trained(job, model, optimizer)


# Dropped, or used more than once


@report("Haian-Jin/LVSM#19, horovod/horovod#2420", error="overlap=False", refused="hub")
def test_a_step_is_skipped_and_its_gradients_dropped(job: Job) -> list[Tensor]:
    """Does not call `step()` for one batch."""
    model, optimizer = prepared(job, mlp())
    for turn, batch in enumerate(batches()):
        backward(job, model, optimizer, batch)
        if turn != 2:
            optimizer.step()
    return values(model)


@report("Repeated steps")
def test_a_second_step_with_the_same_gradients(job: Job) -> list[Tensor]:
    """`step()` twice."""
    model, optimizer = prepared(job, mlp())
    return trained(job, model, optimizer, after=optimizer.step)


@report("horovod/horovod#2420", error="backward", refused="hub aggregate ring")
def test_one_rank_makes_a_backward_for_itself(job: Job) -> list[Tensor]:
    """Rank 0 has a further backward.

    Rank 0 looks at the gradients of one sample, and drops them.
    """
    model, optimizer = prepared(job, mlp(), timeout=5.0)
    for turn, batch in enumerate(batches()):
        if turn == 2 and job.ranks[0] == 0:
            model(batch[:1]).sum().backward()
        step(job, model, optimizer, batch)
    return values(model)


@report("pytorch/pytorch#63812")
def test_one_rank_asks_autograd_for_a_gradient(job: Job) -> list[Tensor]:
    """Rank 0 calls `torch.autograd.grad`."""
    model, optimizer = prepared(job, mlp())
    for batch in batches():
        if job.ranks[0] == 0:
            torch.autograd.grad(model(batch[:1]).sum(), list(model.parameters()))
        step(job, model, optimizer, batch)
    return values(model)
