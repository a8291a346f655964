"""Schedulers, hooks and patched steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.reports.report import report
from tests.reports.training import Job, adam, batches, mlp, momentum, prepared, square, step, trained, values


def warm_up(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda turn: min(1.0, (turn + 1) / 3))


def one_cycle(optimizer: Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, 0.2, total_steps=6)


def sequence(optimizer: Optimizer) -> LRScheduler:
    parts: list[LRScheduler] = [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, 4)]
    return SequentialLR(optimizer, parts, milestones=[2])


def restarts(optimizer: Optimizer) -> LRScheduler:
    return CosineAnnealingWarmRestarts(optimizer, 2)


SCHEDULES = pytest.mark.parametrize("schedule", [warm_up, one_cycle, sequence, restarts])
Schedule = Callable[[Optimizer], LRScheduler]


@report(
    "huggingface/accelerate#843, huggingface/accelerate#1382, huggingface/transformers#24088,"
    " ultralytics/yolov5#313"
)
@SCHEDULES
@pytest.mark.parametrize("early", [True, False], ids=["inner", "wrapped"])
def test_a_schedule_is_followed(job: Job, schedule: Schedule, early: bool) -> list[Tensor]:
    """Warm-up, OneCycle, sequences and restarts.

    The scheduler has the wrapped optimizer or the optimizer before it was wrapped; nothing warns.
    """
    model = mlp()
    inner = momentum(model)
    scheduler = schedule(inner) if early else None
    optimizer = job.wrap(inner, model)
    scheduler = scheduler or schedule(optimizer)
    rates = []
    for batch in batches():
        step(job, model, optimizer, batch)
        scheduler.step()
        rates += scheduler.get_last_lr()
    return [*values(model), torch.tensor(rates)]


@report("lucidrains/DALLE-pytorch#268, huggingface/accelerate#3797")
def test_the_rate_falls_on_a_plateau_of_the_mean_loss(job: Job) -> list[Tensor]:
    """`ReduceLROnPlateau` with the mean loss."""
    model, optimizer = prepared(job, mlp(), adam)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0, threshold_mode="abs")
    for batch in batches():
        loss = step(job, model, optimizer, batch)
        scheduler.step(job.mean_over_ranks(loss).item())
    assert optimizer.param_groups[0]["lr"] < 0.05
    return values(model)


@report("huggingface/accelerate#2318")
def test_a_scheduler_is_saved_and_loaded(job: Job) -> list[Tensor]:
    """State of a scheduler in the middle."""
    model, optimizer = prepared(job, mlp())
    scheduler = sequence(optimizer)
    for turn, batch in enumerate(batches()):
        step(job, model, optimizer, batch)
        scheduler.step()
        if turn == 1:
            saved, rate = scheduler.state_dict(), optimizer.param_groups[0]["lr"]
            scheduler = sequence(optimizer)
            scheduler.load_state_dict(saved)
            optimizer.param_groups[0]["lr"] = rate
    return values(model)


NUMBERS: dict[str, tuple[Callable[[nn.Module], Optimizer], str, Callable[[int], Any]]] = {
    "float32": (momentum, "lr", lambda turn: np.float32(0.2) / (turn + 1)),
    "float64": (momentum, "lr", lambda turn: np.linspace(0.2, 0.05, 4)[turn]),
    "array": (momentum, "lr", lambda turn: np.array(0.2 / (turn + 1))),
    "tensor": (momentum, "lr", lambda turn: torch.tensor(0.2 / (turn + 1), dtype=torch.float64)),
    "integer": (momentum, "lr", lambda turn: np.int64(1) if turn == 1 else 0.1),
    "decay": (momentum, "weight_decay", lambda turn: np.float16(0.5)),
    "momentum": (momentum, "momentum", lambda turn: np.array([0.5, 0.9], np.float32)[turn % 2]),
    "flag": (momentum, "nesterov", lambda turn: np.bool_(turn % 2)),
    "betas": (adam, "betas", lambda turn: (np.float32(0.5), np.float64(0.99))),
    "list": (adam, "betas", lambda turn: [0.5, torch.tensor(0.9)]),
    "pair": (adam, "betas", lambda turn: np.array([0.5, 0.9]) if turn else (0.9, 0.99)),
    "epsilon": (adam, "eps", lambda turn: np.float64(1e-3)),
    "amsgrad": (adam, "amsgrad", lambda turn: np.bool_(True)),
}
"""Optimizers, options, and their values in each step."""


@report("horovod/horovod#605")
@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
def test_a_schedule_has_numbers_of_numpy(job: Job, number: Any) -> list[Tensor]:
    """Hyperparameters of NumPy, or tensors."""
    make, option, value = number
    model, optimizer = prepared(job, mlp(), make)
    for turn, batch in enumerate(batches()):
        optimizer.param_groups[0][option] = value(turn)
        step(job, model, optimizer, batch)
    return values(model)


@report("pytorch")
def test_a_rate_that_is_a_tensor(job: Job) -> list[Tensor]:
    """`lr=torch.tensor(...)`, changed in place."""
    model = mlp()
    optimizer = job.wrap(torch.optim.Adam(model.parameters(), lr=torch.tensor(0.05)), model)
    return trained(job, model, optimizer, after=lambda: optimizer.param_groups[0]["lr"].mul_(0.5))


@report("Late schedules")
def test_the_rate_falls_between_backward_and_step(job: Job) -> list[Tensor]:
    """Sets a rate between a backward and its step."""
    model, optimizer = prepared(job, mlp())
    group = optimizer.param_groups[0]
    return trained(job, model, optimizer, before=lambda turn: group.update(lr=0.05 / (turn + 1)))


# Hooks and patches


def clip_weights(model: nn.Module) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.3, 0.3)

    return hook


def halve_gradients(model: nn.Module) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    return hook


def patch(optimizer: Optimizer, model: nn.Module) -> None:
    """Replaces `step` by one that clips weights afterwards."""
    original = optimizer.step

    @wraps(original)
    def patched(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        clip_weights(model)()
        return result

    optimizer.step = patched  # type: ignore[method-assign]


def after_step(optimizer: Optimizer, model: nn.Module) -> None:
    optimizer.register_step_post_hook(clip_weights(model))


def before_step(optimizer: Optimizer, model: nn.Module) -> None:
    optimizer.register_step_pre_hook(halve_gradients(model))


@report("pytorch/pytorch#20203, pytorch/pytorch#71272")
@pytest.mark.parametrize("change", [after_step, before_step, patch])
@pytest.mark.parametrize("early", [True, False], ids=["inner", "wrapped"])
def test_a_step_is_changed(job: Job, early: bool, change: Callable[..., None]) -> list[Tensor]:
    """`register_step_post_hook`, `register_step_pre_hook` or another `step`."""
    model = mlp()
    inner = momentum(model)
    if early:
        change(inner, model)
    optimizer = job.wrap(inner, model)
    if not early:
        change(optimizer, model)
    return trained(job, model, optimizer)


class ClippingSGD(torch.optim.SGD):
    """An optimizer of the script's own, which keeps weights in a range."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.3, 0.3)
        return result


@report("kozistr/pytorch_optimizer")
def test_an_optimizer_of_the_scripts_own(job: Job) -> list[Tensor]:
    """A subclass of SGD that clamps weights."""
    model = mlp()
    return trained(job, model, job.wrap(ClippingSGD(model.parameters(), lr=0.1, momentum=0.9), model))


class Averaging(torch.optim.SGD):
    """Evaluates at the average of its iterates, which `train` and `eval` swap with the parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.other = values(model)

    def swap(self) -> None:
        for other, parameter in zip(self.other, self.param_groups[0]["params"], strict=True):
            kept = parameter.data.clone()
            parameter.data.copy_(other)
            other.copy_(kept)

    def average(self) -> None:
        for other, parameter in zip(self.other, self.param_groups[0]["params"], strict=True):
            other.lerp_(parameter.data, 0.5)


@report("facebookresearch/schedule_free#32")
def test_an_optimizer_that_swaps_weights_for_evaluation(job: Job) -> list[Tensor]:
    """An optimizer swaps `p.data` for evaluation."""
    model = mlp()
    optimizer: Any = job.wrap(Averaging(model), model)
    scores = []
    for batch in batches():
        step(job, model, optimizer, batch)
        optimizer.average()
        optimizer.swap()
        with torch.inference_mode():
            scores.append(square(model)(batch).item())
        optimizer.swap()
    return [*values(model), torch.tensor(scores)]


@report("skorch-dev/skorch#785")
def test_a_closure_is_called_once_and_its_loss_is_returned(job: Job) -> list[Tensor]:
    """`step(closure)` with Adam."""
    model, optimizer = prepared(job, mlp(), adam)
    losses = []
    for batch in batches():
        loss: Any = optimizer.step(job.closure(optimizer, batch, square(model)))
        losses.append(job.mean_over_ranks(loss.detach()))
    return [*values(model), *losses]


@report(
    "pytorch",
    fails="aggregate ring alone",
    reason="torch runs a global hook for the DistributedOptimizer and for the optimizer in it",
)
def test_a_hook_of_all_optimizers_runs_once_per_step(job: Job) -> list[Tensor]:
    """`register_optimizer_step_pre_hook`, for all optimizers.

    Ranks are threads, and torch's global hooks are those of all of them.
    """
    model, optimizer = prepared(job, mlp())
    here = threading.get_ident()
    runs = torch.zeros(1)

    def note(*_: Any) -> None:
        if threading.get_ident() == here:
            runs.add_(1)

    hook = register_optimizer_step_pre_hook(note)
    trained(job, model, optimizer)
    hook.remove()
    return [*values(model), runs]
