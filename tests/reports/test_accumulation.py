"""Accumulation over several passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.reports.report import EVERYWHERE, report
from tests.reports.training import Job, batches, mlp, prepared, square, values


def windows(length: int) -> list[list[Tensor]]:
    """Five batches in windows of `length`; the last window is shorter."""
    whole = list(batches(steps=5))
    return [whole[begin : begin + length] for begin in range(0, len(whole), length)]


def accumulate(job: Job, model: nn.Module, optimizer: Optimizer, window: list[Tensor]) -> None:
    optimizer.zero_grad()
    for batch in window:
        (job.loss(batch, square(model)) / len(window)).backward()


@report(
    "huggingface/transformers#38837, Lightning-AI/pytorch-lightning#4653, horovod/horovod#1624,"
    " horovod/horovod#1549"
)
@pytest.mark.parametrize(("told", "length"), [(2, 2), (3, 3), (1, 2), (2, 3)])
def test_a_window_has_another_length_than_the_optimizer_was_told(
    job: Job, told: int, length: int
) -> list[Tensor]:
    """More or fewer passes than `backward_passes_per_step`, or none announced."""
    model, optimizer = prepared(job, mlp(), backward_passes_per_step=told)
    for window in windows(length) * 2:
        accumulate(job, model, optimizer, window)
        optimizer.step()
    return values(model)


@report("huggingface/accelerate#641, huggingface/diffusers#721", error="synchronize", refused=EVERYWHERE)
def test_a_shorter_window_is_clipped_by_the_norm_of_the_mean(job: Job) -> list[Tensor]:
    """Clips a shorter window."""
    model, optimizer = prepared(job, mlp(), backward_passes_per_step=2)
    norms = []
    for window in windows(2):
        accumulate(job, model, optimizer, window)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
    return [*values(model), *norms]


@report("Haian-Jin/LVSM#19")
def test_a_window_is_given_up_after_its_first_pass(job: Job) -> list[Tensor]:
    """Drops the rest of one window."""
    model, optimizer = prepared(job, mlp(), backward_passes_per_step=2)
    for turn, (first, second) in enumerate(windows(2)[:2] * 2):
        optimizer.zero_grad()
        job.loss(first, square(model)).backward()
        if turn == 1:
            continue
        job.loss(second, square(model)).backward()
        optimizer.step()
    return values(model)


@report("huggingface/transformers#37766", error="synchronize", refused=EVERYWHERE)
def test_gradients_are_divided_by_the_number_of_passes_at_the_end(job: Job) -> list[Tensor]:
    """Divides `.grad` by the passes before `step()`."""
    model, optimizer = prepared(job, mlp(), backward_passes_per_step=2)
    for window in windows(2):
        optimizer.zero_grad()
        for batch in window:
            job.loss(batch, square(model)).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(len(window))
        optimizer.step()
    return values(model)


@report("horovod/horovod#947")
def test_two_losses_of_one_graph_have_a_backward_each(job: Job) -> list[Tensor]:
    """Two losses, `retain_graph=True`, two passes."""
    model, optimizer = prepared(job, mlp(), backward_passes_per_step=2)
    for batch in batches():
        optimizer.zero_grad()
        outputs = [model(part) for part in job.parts(batch)]
        torch.stack([one.square().mean() for one in outputs]).mean().backward(retain_graph=True)
        torch.stack([one.abs().mean() for one in outputs]).mean().backward()
        optimizer.step()
    return values(model)


def loss_of_tokens(model: nn.Module, total: Tensor) -> Callable[[Tensor], Tensor]:
    """Sums over the tokens of a rank; the fifth column says which rows are tokens."""
    return lambda part: 2 * (model(part[:, :4]).square().mean(1) * part[:, 4]).sum() / total


@report("huggingface/transformers#35438")
def test_losses_are_summed_by_tokens_and_ranks_have_different_numbers(job: Job) -> list[Tensor]:
    """Weighs each rank's loss by its tokens.

    Each rank multiplies its sum by the number of ranks and divides by the tokens of all ranks.
    """
    model, optimizer = prepared(job, mlp())
    for batch in batches():
        tokens = (batch.sum(1) > 0).float()
        weighed = torch.cat([batch, tokens[:, None]], 1)
        job.step(optimizer, weighed, loss_of_tokens(model, tokens.sum()))
    return values(model)


@report("Clipping")
def test_gradients_are_clipped_after_every_pass(job: Job, caplog: pytest.LogCaptureFixture) -> list[Tensor]:
    """`clip_grad_norm_` after every pass.

    On a hub that steps the warning is there, as for one pass.
    """

    model, optimizer = prepared(job, mlp())
    for window in windows(2):
        optimizer.zero_grad()
        for batch in window:
            job.loss(batch, square(model)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return values(model)
