"""Optimizer state that is saved, loaded, reset or copied."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from operator import delitem
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.reports.report import EVERYWHERE, report
from tests.reports.training import (
    STEPS,
    Job,
    adam,
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

Saved = dict[str, Any]


def trained_before() -> Saved:
    """A checkpoint of torch's own training, of the kind that scripts save under DistributedDataParallel."""
    model = mlp()
    optimizer = adam(model)
    for batch in batches(steps=3):
        step(Job(None), model, optimizer, batch)
    return {
        "model": {f"module.{name}": one.clone() for name, one in model.state_dict().items()},
        "optimizer": copy.deepcopy(optimizer.state_dict()),
    }


def load_model(model: nn.Module, saved: Saved) -> None:
    model.load_state_dict({name.removeprefix("module."): one for name, one in saved["model"].items()})


def moments(optimizer: Optimizer) -> list[Tensor]:
    """Adam's state in the order of `state_dict`."""
    state = optimizer.state_dict()["state"]
    return [one[name] for _, one in sorted(state.items()) for name in ("step", "exp_avg", "exp_avg_sq")]


@report("NVIDIA/apex#647, pytorch/pytorch#3805, horovod/horovod#392")
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_checkpoint_is_loaded_before_or_after_wrapping(job: Job, late: bool) -> list[Tensor]:
    """Checkpoint of DistributedDataParallel with `module.`."""
    saved, model = trained_before(), mlp()
    optimizer: Optimizer = adam(model)
    if late:
        optimizer = job.wrap(optimizer, model)
    load_model(model, saved)
    optimizer.load_state_dict(saved["optimizer"])
    return trained(job, model, optimizer if late else job.wrap(optimizer, model))


@report(
    "horovod/horovod#526, horovod/horovod#936",
    refused="aggregate ring",
    error=r"of rank 0 and rank [12] have different state: rank 0 has ",
)
def test_only_rank_0_has_the_checkpoint(job: Job) -> list[Tensor]:
    """Only rank 0 loads.

    As `hvd.broadcast_optimizer_state`: what rank 0 loaded is everybody's.
    """
    saved, model = trained_before(), mlp()
    inner = adam(model)
    if 0 in job.ranks:
        load_model(model, saved)
        inner.load_state_dict(saved["optimizer"])
    return trained(job, model, job.wrap(inner, model))


@report("horovod/horovod#1725")
def test_a_saved_state_is_torchs_own(job: Job) -> list[Tensor]:
    """`torch.save(optimizer.state_dict())`, loaded by plain torch."""
    model, optimizer = prepared(job, mlp(), adam)
    trained(job, model, optimizer)
    plain = adam(model)
    plain.load_state_dict(loaded(optimizer.state_dict()))
    return [*values(model), *moments(plain)]


@report("Loss spikes")
def test_model_and_optimizer_are_rolled_back(job: Job) -> list[Tensor]:
    """Restores model and optimizer from a copy."""
    model, optimizer = prepared(job, mlp(), adam)
    trained(job, model, optimizer, stop=1)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for _ in range(2):
        trained(job, model, optimizer, start=1)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
    return trained(job, model, optimizer, stop=1)


@report("facebookresearch/schedule_free#32, NVIDIA/apex#451", refused=EVERYWHERE, error="state_dict")
@pytest.mark.parametrize("copied", [lambda one: pickle.loads(pickle.dumps(one)), copy.deepcopy])
def test_an_optimizer_is_copied_as_a_whole(job: Job, copied: Callable[..., Optimizer]) -> list[Tensor]:
    """`torch.save(optimizer)`, `copy.deepcopy(optimizer)`.

    A refusal names `state_dict`.
    """
    model, optimizer = prepared(job, mlp(), adam)
    trained(job, model, optimizer)
    return moments(copied(optimizer))


def replace_tensor(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"] = 0.5 * state["momentum_buffer"]


CHANGES: dict[str, Callable[[Optimizer], Any]] = {
    "halve": lambda one: [state["momentum_buffer"].mul_(0.5) for state in one.state.values()],
    "halve_data": lambda one: [
        state["momentum_buffer"].data.mul_(0.5) for state in one.state_dict()["state"].values()
    ],
    "clear": lambda one: one.state.clear(),
    "forget_first": lambda one: delitem(one.state, one.param_groups[0]["params"][0]),
    "replace": lambda one: setattr(one, "state", type(one.state)(dict)),
    "replace_tensor": replace_tensor,
}


@report("pytorch/pytorch#196083")
@pytest.mark.parametrize("own", [True, False], ids=["own", "wrapper"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_moments_change_in_the_scripts_own_optimizer(
    job: Job, change: Callable[[Optimizer], Any], own: bool
) -> list[Tensor]:
    """Halves, drops or replaces moments, in the wrapper or the optimizer inside."""
    model = mlp()
    inner = momentum(model)
    optimizer = job.wrap(inner, model)
    return trained(job, model, optimizer, after=lambda: change(inner if own else optimizer))


@report("Late changes", refused="hub", error="changes the optimizer's state between backward and step")
def test_moments_change_between_backward_and_step(job: Job) -> list[Tensor]:
    """Clears moments after a backward."""
    model, optimizer = prepared(job, mlp())

    def clear(turn: int) -> None:
        if turn == 2:
            torch._foreach_zero_([optimizer.state[one]["momentum_buffer"] for one in model.parameters()])

    return trained(job, model, optimizer, before=clear)


@report("skorch, fastai, Lightning")
@pytest.mark.parametrize("closure", [True, False], ids=["closure", "plain"])
@pytest.mark.parametrize("begin", [0, 2], ids=["always", "later"])
def test_the_scripts_own_optimizer_steps(job: Job, begin: int, closure: bool) -> list[Tensor]:
    """`step()` and `zero_grad()` of the optimizer inside."""
    model = mlp()
    inner = adam(model)
    optimizer = job.wrap(inner, model)
    losses: list[Any] = []
    for turn, batch in enumerate(batches()):
        one: Any = inner if turn >= begin else optimizer
        evaluate = job.closure(one, batch, square(model))
        losses.append(one.step(evaluate) if closure else evaluate())
        if not closure:
            one.step()
    steps = getattr(optimizer, "completed_steps", STEPS)
    total = sum(job.mean_over_ranks(torch.as_tensor(loss).detach()) for loss in losses)
    return [*values(model), torch.as_tensor(total), torch.tensor(steps)]


@report("Wrapped optimizers")
def test_the_state_is_taken_once_and_used_in_all_steps(job: Job) -> list[Tensor]:
    """Keeps `optimizer.state`, halves moments and counts steps in it."""
    model, optimizer = prepared(job, mlp())
    state, norms = optimizer.state, []
    for number, batch in enumerate(batches()):
        step(job, model, optimizer, batch)
        for one in model.parameters():
            norms.append(state[one]["momentum_buffer"].norm())
            state[one]["momentum_buffer"].mul_(0.5)
            assert state[one].setdefault("seen", number) == 0, "it stays"
    return [*values(model), *norms]


@report("Wrapped optimizers", refused="hub", error="has kept from an earlier step")
def test_a_moment_that_was_kept_is_cleared_two_steps_later(job: Job) -> list[Tensor]:
    """Keeps a momentum buffer and clears it later."""
    model, optimizer = prepared(job, mlp())
    kept: list[Tensor] = []
    for batch in batches():
        step(job, model, optimizer, batch)
        kept = kept or [optimizer.state[one]["momentum_buffer"] for one in model.parameters()]
        torch._foreach_zero_(kept)
    return values(model)


def loaded(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=not isinstance(saved, nn.Module))


def loaded_state(model: nn.Module) -> nn.Module:
    again = mlp()
    again.load_state_dict(loaded(model.state_dict()))
    return again


@report("locuslab/deq#23, pytorch/pytorch#48386")
@pytest.mark.parametrize("copied", [loaded, loaded_state, copy.deepcopy])
def test_a_copy_of_the_model_is_trained_locally(
    job: Job, copied: Callable[[nn.Module], nn.Module]
) -> list[Tensor]:
    """Saves and loads or copies the model; trains the copy locally."""
    model, optimizer = prepared(job, mlp())
    trained(job, model, optimizer)
    again = copied(model)
    step(Job(None), again, momentum(again), batches()[0])
    return values(model, again)


@report("Step hooks")
def test_hooks_run_once_where_the_scripts_own_optimizer_steps(job: Job) -> list[Tensor]:
    """Step hooks, with `step()` of the optimizer inside."""
    model = mlp()
    inner = momentum(model)
    calls = [0, 0]

    def before(*_: object) -> None:
        calls[0] += 1

    def after(*_: object) -> None:
        calls[1] += 1

    inner.register_step_pre_hook(before)
    optimizer = job.wrap(inner, model)
    inner.register_step_post_hook(after)
    for batch in batches():
        backward(job, model, optimizer, batch)
        inner.step()
    return [*values(model), torch.tensor(calls)]
