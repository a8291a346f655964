"""Scripts with schedulers, hooks and patched steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

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

from tests.reports.training import (
    Job,
    Topology,
    adam,
    assert_as_torch,
    batches,
    mlp,
    momentum,
    square,
    step,
    topologies,
    values,
)


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


@topologies()
@SCHEDULES
@pytest.mark.parametrize("early", [True, False], ids=["inner", "wrapped"])
def test_a_schedule_is_followed(topology: Topology, schedule: Schedule, early: bool) -> None:
    """The scheduler has the wrapped optimizer or the optimizer before it was wrapped; nothing warns."""

    def script(job: Job) -> list[Tensor]:
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

    assert_as_torch(topology, script)


@topologies()
def test_the_rate_falls_on_a_plateau_of_the_mean_loss(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(adam(model), model)
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0, threshold_mode="abs")
        for batch in batches():
            loss = step(job, model, optimizer, batch)
            scheduler.step(job.mean_over_ranks(loss).item())
        assert optimizer.param_groups[0]["lr"] < 0.05
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_a_scheduler_is_saved_and_loaded(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
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

    assert_as_torch(topology, script)


@topologies()
def test_a_rate_that_is_a_tensor(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(torch.optim.Adam(model.parameters(), lr=torch.tensor(0.05)), model)
        for batch in batches():
            step(job, model, optimizer, batch)
            optimizer.param_groups[0]["lr"].mul_(0.5)
        return values(model)

    assert_as_torch(topology, script, refusal="lr")


@topologies()
def test_weight_decay_and_moments_follow_a_schedule(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(torch.optim.AdamW(model.parameters(), lr=0.05), model)
        for turn, batch in enumerate(batches()):
            for group in optimizer.param_groups:
                group["weight_decay"], group["betas"] = 0.1 * turn, (0.5 + 0.1 * turn, 0.99)
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


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


@topologies()
@pytest.mark.parametrize("early", [True, False], ids=["inner", "wrapped"])
def test_a_hook_after_the_step_clips_weights(topology: Topology, early: bool) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        inner = momentum(model)
        if early:
            inner.register_step_post_hook(clip_weights(model))
        optimizer = job.wrap(inner, model)
        if not early:
            optimizer.register_step_post_hook(clip_weights(model))
        for batch in batches():
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


@topologies()
@pytest.mark.parametrize("early", [True, False], ids=["inner", "wrapped"])
def test_a_hook_before_the_step_halves_gradients(topology: Topology, early: bool) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        inner = momentum(model)
        if early:
            inner.register_step_pre_hook(halve_gradients(model))
        optimizer = job.wrap(inner, model)
        if not early:
            optimizer.register_step_pre_hook(halve_gradients(model))
        for batch in batches():
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


def patch(optimizer: Optimizer, model: nn.Module) -> None:
    """Replaces `step` by one that clips weights afterwards."""
    original = optimizer.step

    @wraps(original)
    def patched(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        clip_weights(model)()
        return result

    optimizer.step = patched  # type: ignore[method-assign]


@topologies()
@pytest.mark.parametrize("early", [True, False], ids=["inner", "wrapped"])
def test_a_step_that_the_script_replaced_runs(topology: Topology, early: bool) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        inner = momentum(model)
        if early:
            patch(inner, model)
        optimizer = job.wrap(inner, model)
        if not early:
            patch(optimizer, model)
        for batch in batches():
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script, refusal="step")


class ClippingSGD(torch.optim.SGD):
    """An optimizer of the script's own, which keeps weights in a range."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.3, 0.3)
        return result


@topologies()
def test_an_optimizer_of_the_scripts_own(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(ClippingSGD(model.parameters(), lr=0.1, momentum=0.9), model)
        for batch in batches():
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script, refusal="--aggregate")


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


@topologies()
def test_an_optimizer_that_swaps_weights_for_evaluation(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        inner = Averaging(model)
        optimizer = job.wrap(inner, model)
        scores = []
        for batch in batches():
            step(job, model, optimizer, batch)
            inner.average()
            inner.swap()
            with torch.inference_mode():
                scores.append(square(model)(batch).item())
            inner.swap()
        return [*values(model), torch.tensor(scores)]

    assert_as_torch(topology, script, refusal="--aggregate")


@topologies()
def test_a_closure_is_called_once_and_its_loss_is_returned(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(adam(model), model)
        losses = []
        for batch in batches():

            def closure(batch: Tensor = batch) -> Any:
                optimizer.zero_grad()
                loss = job.loss(batch, square(model))
                loss.backward()
                return loss

            losses.append(job.mean_over_ranks(optimizer.step(closure).detach()))  # type: ignore[attr-defined]
        return [*values(model), *losses]

    assert_as_torch(topology, script)


@topologies()
def test_a_hook_of_all_optimizers_runs_once_per_step(topology: Topology) -> None:
    """Ranks are threads, and torch's global hooks are those of all of them."""

    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        here = threading.get_ident()
        runs = torch.zeros(1)

        def note(*_: Any) -> None:
            if threading.get_ident() == here:
                runs.add_(1)

        hook = register_optimizer_step_pre_hook(note)
        for batch in batches():
            step(job, model, optimizer, batch)
        hook.remove()
        return [*values(model), runs]

    assert_as_torch(topology, script)
