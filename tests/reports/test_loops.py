"""Scripts whose training loop is unusual: mixed precision, skipped steps, uneven batches, evaluation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hubring.ps.core.errors import HubringError
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.reports.training import (
    Job,
    Topology,
    assert_as_torch,
    assert_matches,
    batches,
    ends,
    mlp,
    momentum,
    square,
    step,
    topologies,
    values,
)


def weighed(model: nn.Module, factors: Tensor) -> Callable[[int, Tensor], Tensor]:
    """The loss of each rank, times the rank's factor."""
    return lambda rank, part: model(part).square().mean() * factors[rank]


@topologies()
def test_scaled_gradients_are_unscaled(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = job.loss(batch, square(model))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [*values(model), torch.tensor(scaler.get_scale())]

    assert_as_torch(topology, script, rtol=0.02, atol=0.02)


@topologies(on="aggregate ring alone")
def test_scaled_gradients_are_unscaled_and_clipped(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=64.0)
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            optimizer.zero_grad()
            scaler.scale(job.loss(batch, square(model))).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_one_ranks_gradients_overflow_and_all_skip_the_step(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=64.0)
        optimizer = job.wrap(momentum(model), model)
        for turn, batch in enumerate(batches()):
            factor = torch.tensor([float("inf"), 1.0]) if turn == 1 else torch.ones(2)
            optimizer.zero_grad()
            loss = job.loss_by_rank(batch, weighed(model, factor))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_a_scaler_that_is_turned_off(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model, scaler = mlp(), torch.amp.GradScaler("cpu", enabled=False)
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            optimizer.zero_grad()
            scaler.scale(job.loss(batch, square(model))).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_all_ranks_leave_the_loop_early_by_agreement(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        losses: list[Tensor] = []
        for batch in batches(steps=8):
            losses.append(job.mean_over_ranks(step(job, model, optimizer, batch)))
            if len(losses) > 2 and losses[-1] > losses[-2]:
                break
        return [*values(model), *losses]

    assert_as_torch(topology, script)


@topologies()
def test_one_rank_evaluates_while_the_other_waits(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        score = torch.zeros(())
        for batch in batches():
            step(job, model, optimizer, batch)
            if 0 in job.ranks:
                model.eval()
                with torch.no_grad():
                    score = square(model)(batch)
                model.train()
        return [*values(model), 2 * job.mean_over_ranks(score) if len(job.ranks) == 1 else score]

    assert_as_torch(topology, script)


@topologies(on="hub aggregate ring")
def test_ranks_with_more_batches_go_on_with_uneven_inputs(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model, uneven=True)
        for turn, batch in enumerate(batches()):
            if turn < 2 or 0 in job.ranks:
                optimizer.zero_grad()
                loss = job.loss_by_rank(batch, weighed(model, torch.tensor([1.0, turn < 2])))
                loss.backward()
                optimizer.step()
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.join()
        return values(model)

    assert_as_torch(topology, script)


@topologies(on="ring")
def test_a_rank_that_runs_out_of_batches_is_named_with_uneven(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model, timeout=2.0)
        for turn, batch in enumerate(batches()):
            if turn < 2 or 0 in job.ranks:
                step(job, model, optimizer, batch)
        return values(model)

    with pytest.raises(HubringError) as caught:
        ends(topology, script)
    assert_matches(r"uneven=True", caught.value)


@topologies()
def test_parameters_are_given_to_the_optimizer_in_another_order(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(torch.optim.SGD([*model.parameters()][::-1], lr=0.1, momentum=0.9), model)
        for batch in batches():
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_weights_are_drawn_with_another_seed_on_each_rank(topology: Topology) -> None:
    """All ranks start with rank 0's weights."""

    def script(job: Job) -> list[Tensor]:
        model = mlp()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(job.ranks[0])
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_a_penalty_on_weights_is_a_part_of_the_loss(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model, weight_decay=0.0), model)
        for batch in batches():
            optimizer.zero_grad()
            penalty = torch.stack([one.abs().sum() for one in model.parameters()]).sum()
            (job.loss(batch, square(model)) + 0.01 * penalty).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_weights_are_compared_with_those_at_the_start(topology: Topology) -> None:
    """As proximal training does: the start is kept as a detached list, without a copy of the module."""

    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        start = [one.detach().clone() for one in model.parameters()]
        for batch in batches():
            optimizer.zero_grad()
            apart = [(one - kept).square().sum() for one, kept in zip(model.parameters(), start, strict=True)]
            (job.loss(batch, square(model)) + torch.stack(apart).sum()).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)
