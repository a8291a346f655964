"""Scripts that accumulate gradients over several passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.reports.training import (
    Hub,
    Job,
    Topology,
    assert_as_torch,
    batches,
    ends,
    mlp,
    momentum,
    square,
    topologies,
    values,
)


def windows(length: int) -> list[list[Tensor]]:
    """Five batches in windows of `length`; the last window is shorter."""
    whole = list(batches(steps=5))
    return [whole[begin : begin + length] for begin in range(0, len(whole), length)]


@topologies()
@pytest.mark.parametrize("length", [2, 3])
def test_the_last_window_of_an_epoch_is_shorter(topology: Topology, length: int) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model, backward_passes_per_step=length)
        for window in windows(length) * 2:
            optimizer.zero_grad()
            for batch in window:
                (job.loss(batch, square(model)) / len(window)).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_a_shorter_window_is_clipped_by_the_norm_of_the_mean(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model, backward_passes_per_step=2)
        norms = []
        for window in windows(2):
            optimizer.zero_grad()
            for batch in window:
                (job.loss(batch, square(model)) / len(window)).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
            optimizer.step()
        return [*values(model), *norms]

    assert_as_torch(topology, script, refusal="synchronize")


@topologies()
def test_windows_without_backward_passes_per_step(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for window in windows(2):
            optimizer.zero_grad()
            for batch in window:
                (job.loss(batch, square(model)) / len(window)).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script, refusal="backward_passes_per_step")


@topologies()
def test_more_passes_than_the_optimizer_was_told(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model, backward_passes_per_step=2)
        for window in windows(3):
            optimizer.zero_grad()
            for batch in window:
                (job.loss(batch, square(model)) / len(window)).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script, refusal="backward_passes_per_step")


@topologies()
def test_a_window_is_given_up_after_its_first_pass(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model, backward_passes_per_step=2)
        for turn, (first, second) in enumerate(windows(2)[:2] * 2):
            optimizer.zero_grad()
            job.loss(first, square(model)).backward()
            if turn == 1:
                continue
            job.loss(second, square(model)).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_gradients_are_divided_by_the_number_of_passes_at_the_end(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model, backward_passes_per_step=2)
        for window in windows(2):
            optimizer.zero_grad()
            for batch in window:
                job.loss(batch, square(model)).backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(len(window))
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script, refusal="synchronize")


@topologies()
def test_two_losses_of_one_graph_have_a_backward_each(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model, backward_passes_per_step=2)
        for batch in batches():
            optimizer.zero_grad()
            outputs = [model(part) for part in job.parts(batch)]
            torch.stack([one.square().mean() for one in outputs]).mean().backward(retain_graph=True)
            torch.stack([one.abs().mean() for one in outputs]).mean().backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)


def loss_of_tokens(model: nn.Module, total: Tensor) -> Callable[[Tensor], Tensor]:
    """Sums over the tokens of a rank; the fifth column says which rows are tokens."""
    return lambda part: 2 * (model(part[:, :4]).square().mean(1) * part[:, 4]).sum() / total


@topologies()
def test_losses_are_summed_by_tokens_and_ranks_have_different_numbers(topology: Topology) -> None:
    """Each rank multiplies its sum by the number of ranks and divides by the tokens of all ranks."""

    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            tokens = (batch.sum(1) > 0).float()
            weighed = torch.cat([batch, tokens[:, None]], 1)
            optimizer.zero_grad()
            job.loss(weighed, loss_of_tokens(model, tokens.sum())).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_gradients_are_clipped_after_every_pass(topology: Topology, caplog: pytest.LogCaptureFixture) -> None:
    """On a hub that steps the warning is there, as for one pass."""

    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for window in windows(2):
            optimizer.zero_grad()
            for batch in window:
                job.loss(batch, square(model)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        return values(model)

    if topology is not Hub:
        assert_as_torch(topology, script)
        return
    first, second = ends(topology, script)
    assert all(map(torch.equal, first, second))
    assert "pass --aggregate to change the mean" in caplog.text
