"""Scripts in which some parameters have no gradient, or are frozen for a while."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.reports.training import (
    OPTIMIZERS,
    Job,
    Topology,
    assert_as_torch,
    batches,
    mlp,
    momentum,
    seeded,
    square,
    step,
    topologies,
    values,
)

Make = Callable[[nn.Module], Optimizer]


class Heads(nn.Module):
    """A trunk with two heads, of which each pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])

    def forward(self, batch: Tensor, head: int = 0) -> Tensor:
        return self.heads[head](torch.tanh(self.trunk(batch)))


def task(model: Heads, head: int) -> Callable[[Tensor], Tensor]:
    """The loss of a task that uses this head."""
    return lambda part: model(part, head).square().mean()


@topologies()
@OPTIMIZERS
def test_a_parameter_that_no_rank_uses_stays(topology: Topology, make: Make) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(Heads)
        optimizer = job.wrap(make(model), model)
        for batch in batches():
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


@topologies()
@OPTIMIZERS
def test_a_parameter_that_one_rank_uses_has_a_mean_with_zeros(topology: Topology, make: Make) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(Heads)
        optimizer = job.wrap(make(model), model)
        for batch in batches():
            optimizer.zero_grad()
            job.loss_by_rank(batch, lambda rank, part: model(part, rank).square().mean()).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)


@topologies()
@OPTIMIZERS
def test_tasks_that_take_turns_move_only_their_own_head(topology: Topology, make: Make) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(Heads)
        optimizer = job.wrap(make(model), model)
        for turn, batch in enumerate(batches()):
            head = turn % 2
            optimizer.zero_grad()
            job.loss(batch, task(model, head)).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)


@topologies()
@OPTIMIZERS
def test_zeroed_gradients_of_an_unused_head_still_move_it(topology: Topology, make: Make) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(Heads)
        optimizer = job.wrap(make(model), model)
        for turn, batch in enumerate(batches()):
            head = min(turn, 1)
            optimizer.zero_grad(set_to_none=False)
            job.loss(batch, task(model, head)).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)


@topologies()
@OPTIMIZERS
def test_a_layer_frozen_after_two_steps_stays(topology: Topology, make: Make) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(make(model), model)
        for turn, batch in enumerate(batches()):
            model.get_submodule("0").requires_grad_(turn < 2)
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


@topologies()
@OPTIMIZERS
def test_a_layer_frozen_at_first_is_trained_once_it_is_thawed(topology: Topology, make: Make) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        model.get_submodule("0").requires_grad_(False)
        optimizer = job.wrap(make(model), model)
        for turn, batch in enumerate(batches()):
            model.get_submodule("0").requires_grad_(turn > 1)
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


@topologies()
@OPTIMIZERS
def test_gradients_of_the_last_layer_are_cancelled_in_the_first_steps(topology: Topology, make: Make) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(make(model), model)
        for turn, batch in enumerate(batches()):
            optimizer.zero_grad()
            job.loss(batch, square(model)).backward()
            if turn < 2:
                for parameter in model.get_submodule("2").parameters():
                    parameter.grad = None
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)


@topologies()
@OPTIMIZERS
def test_gradients_are_cancelled_only_after_some_steps(topology: Topology, make: Make) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(make(model), model)
        for turn, batch in enumerate(batches()):
            optimizer.zero_grad()
            job.loss(batch, square(model)).backward()
            if turn > 1:
                model.get_parameter("2.bias").grad = None
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script, refusal="gradient")


@topologies()
def test_a_parameter_without_a_gradient_has_none(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(Heads)
        optimizer = job.wrap(momentum(model), model)
        missing = []
        for batch in batches():
            optimizer.zero_grad()
            missing.append([one.grad is None for one in model.parameters()])
            job.loss(batch, square(model)).backward()
            missing.append([one.grad is None for one in model.parameters()])
            optimizer.step()
        return [torch.tensor(missing)]

    assert_as_torch(topology, script)


@topologies()
@OPTIMIZERS
def test_a_step_before_the_first_backward_changes_nothing(topology: Topology, make: Make) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(make(model), model)
        optimizer.zero_grad()
        optimizer.step()
        for batch in batches():
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_only_adapters_are_given_to_the_optimizer(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        model.get_submodule("0").requires_grad_(False)
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = job.wrap(torch.optim.AdamW(trained, lr=0.05), model)
        for batch in batches():
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_a_layer_is_dropped_at_random_on_each_rank(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(lambda: nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]))
        optimizer = job.wrap(momentum(model), model)
        kept = torch.rand(4, 2, 3, generator=torch.Generator().manual_seed(5)) < 0.5

        def loss(turn: int, rank: int, part: Tensor) -> Tensor:
            for layer, use in zip(model, kept[turn, rank], strict=True):
                part = part + torch.tanh(layer(part)) if use else part
            return part.square().mean() + 0 * sum(one.sum() for one in model[0].parameters())

        for turn, batch in enumerate(batches()):
            optimizer.zero_grad()
            job.loss_by_rank(batch, partial(loss, turn)).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)
