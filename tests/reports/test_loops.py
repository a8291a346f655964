"""Unusual loops: mixed precision, skipped steps, uneven batches, evaluation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.reports.report import report
from tests.reports.training import Job, batches, mlp, momentum, prepared, square, step, take, trained, values


def weighed(model: nn.Module, factors: Tensor) -> Callable[[int, Tensor], Tensor]:
    """The loss of each rank, times the rank's factor."""
    return lambda rank, part: model(part).square().mean() * factors[rank]


def scaled_step(
    scaler: torch.amp.GradScaler, optimizer: Optimizer, loss: Tensor, clip: nn.Module | None = None
) -> None:
    """Takes a step with a scaled loss; clips the unscaled gradients of a model."""
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if clip is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(clip.parameters(), 0.05)
    scaler.step(optimizer)
    scaler.update()


@report("horovod/horovod#3160", tolerance=(0.02, 0.02))
def test_scaled_gradients_are_unscaled(job: Job) -> list[Tensor]:
    """Autocast and GradScaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    model, optimizer = prepared(job, mlp())
    for batch in batches():
        with torch.autocast("cpu", torch.bfloat16):
            loss = job.loss(batch, square(model))
        scaled_step(scaler, optimizer, loss)
    return [*values(model), torch.tensor(scaler.get_scale())]


@report("pytorch/pytorch#185915, pytorch/examples#1196", on="aggregate ring alone")
def test_scaled_gradients_are_unscaled_and_clipped(job: Job) -> list[Tensor]:
    """GradScaler, `unscale_` and clipping."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    model, optimizer = prepared(job, mlp())
    for batch in batches():
        scaled_step(scaler, optimizer, job.loss(batch, square(model)), clip=model)
    return values(model)


@report("GradScaler", "all skip")
def test_one_ranks_gradients_overflow_and_all_skip_the_step(job: Job) -> list[Tensor]:
    """Rank 0 overflows in one step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    model, optimizer = prepared(job, mlp())
    for turn, batch in enumerate(batches()):
        factor = torch.tensor([float("inf"), 1.0]) if turn == 1 else torch.ones(2)
        scaled_step(scaler, optimizer, job.loss_by_rank(batch, weighed(model, factor)))
    return values(model)


@report("GradScaler")
def test_a_scaler_that_is_turned_off(job: Job) -> list[Tensor]:
    """`GradScaler(enabled=False)`, `unscale_` and clipping."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    model, optimizer = prepared(job, mlp())
    for batch in batches():
        scaled_step(scaler, optimizer, job.loss(batch, square(model)), clip=model)
    return values(model)


@report("Early stopping")
def test_all_ranks_leave_the_loop_early_by_agreement(job: Job) -> list[Tensor]:
    """Stops by the mean loss."""
    model, optimizer = prepared(job, mlp())
    losses: list[Tensor] = []
    for batch in batches(steps=8):
        losses.append(job.mean_over_ranks(step(job, model, optimizer, batch)))
        if len(losses) > 2 and losses[-1] > losses[-2]:
            break
    return [*values(model), *losses]


@report("Evaluation")
def test_one_rank_evaluates_while_the_other_waits(job: Job) -> list[Tensor]:
    """Only rank 0 evaluates."""
    model, optimizer = prepared(job, mlp())
    score = torch.zeros(())
    for batch in batches():
        step(job, model, optimizer, batch)
        if 0 in job.ranks:
            model.eval()
            with torch.no_grad():
                score = square(model)(batch)
            model.train()
    return [*values(model), 2 * job.mean_over_ranks(score) if len(job.ranks) == 1 else score]


@report("pytorch/pytorch#38174, huggingface/accelerate#820", "the mean with zeros", on="hub aggregate ring")
def test_ranks_with_more_batches_go_on_with_uneven_inputs(job: Job) -> list[Tensor]:
    """`uneven=True` and `join()`."""
    model, optimizer = prepared(job, mlp(), uneven=True)
    for turn, batch in enumerate(batches()):
        if turn < 2 or 0 in job.ranks:
            # The rank without a batch has an older option, of another type.
            optimizer.param_groups[0]["lr"] = np.float32(0.2) if turn > 1 else 1
            take(optimizer, job.loss_by_rank(batch, weighed(model, torch.tensor([1.0, turn < 2]))))
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.join()
    return values(model)


@report("pytorch/pytorch#38174", on="ring", refused="ring", error="uneven=True")
def test_a_rank_that_runs_out_of_batches_is_named_with_uneven(job: Job) -> list[Tensor]:
    """Ranks have different numbers of batches."""
    model, optimizer = prepared(job, mlp(), timeout=2.0)
    for turn, batch in enumerate(batches()):
        if turn < 2 or 0 in job.ranks:
            step(job, model, optimizer, batch)
    return values(model)


@report("roytseng-tw/Detectron.pytorch#37")
def test_parameters_are_given_to_the_optimizer_in_another_order(job: Job) -> list[Tensor]:
    """Reversed order of parameters."""
    model = mlp()
    optimizer = job.wrap(torch.optim.SGD([*model.parameters()][::-1], lr=0.1, momentum=0.9), model)
    return trained(job, model, optimizer)


@report("pytorch/pytorch#34270", "rank 0's")
def test_weights_are_drawn_with_another_seed_on_each_rank(job: Job) -> list[Tensor]:
    """Ranks start with other weights.

    All ranks start with rank 0's weights.
    """
    model = mlp()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(job.ranks[0])
    return trained(job, model, job.wrap(momentum(model), model))


@report("Proximal training")
def test_weights_are_compared_with_those_at_the_start(job: Job) -> list[Tensor]:
    """Distance from the first weights in the loss.

    As proximal training does: the start is kept as a detached list, without a copy of the module.
    """
    model, optimizer = prepared(job, mlp())
    start = [one.detach().clone() for one in model.parameters()]
    for batch in batches():
        apart = [(one - kept).square().sum() for one, kept in zip(model.parameters(), start, strict=True)]
        take(optimizer, job.loss(batch, square(model)) + torch.stack(apart).sum())
    return values(model)
