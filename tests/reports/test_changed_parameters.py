"""Scripts that write to parameters between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from hubring.ps.core.errors import HubringError
from tests.reports.training import (
    OPTIMIZERS,
    Job,
    Topology,
    adam,
    assert_as_torch,
    batches,
    ends,
    mlp,
    momentum,
    seeded,
    square,
    step,
    topologies,
    values,
)

Change = Callable[[nn.Sequential], None]


def clamp_data(model: nn.Sequential) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.3, 0.3)


def clamp_without_grad(model: nn.Sequential) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.3, 0.3)


def mask(model: nn.Sequential) -> None:
    weight = model.get_parameter("0.weight")
    weight.data.mul_(torch.arange(weight.numel()).view_as(weight) % 2)


def normalise_rows(model: nn.Sequential) -> None:
    with torch.no_grad():
        weight = model.get_parameter("2.weight")
        weight.copy_(nn.functional.normalize(weight, dim=1))


def write_numpy(model: nn.Sequential) -> None:
    model.get_parameter("2.bias").detach().numpy()[0] = 0.25


def reset_head(model: nn.Sequential) -> None:
    nn.init.constant_(model.get_parameter("2.weight"), 0.1)


def assign_data(model: nn.Sequential) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-0.3, 0.3)


def set_from_vector(model: nn.Sequential) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector.clamp(-0.3, 0.3), model.parameters())


CHANGES = [clamp_data, clamp_without_grad, mask, normalise_rows, write_numpy, reset_head]
MOVES = [assign_data, set_from_vector]


def in_the_first_steps(change: Change) -> Callable[[Job], list[Tensor]]:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for turn, batch in enumerate(batches()):
            step(job, model, optimizer, batch)
            if turn < 2:
                change(model)
        return values(model)

    return script


@topologies()
@pytest.mark.parametrize("change", CHANGES)
def test_changes_after_the_first_steps_are_kept(topology: Topology, change: Change) -> None:
    assert_as_torch(topology, in_the_first_steps(change))


@topologies()
@pytest.mark.parametrize("change", MOVES)
def test_data_that_the_script_replaces_is_kept(topology: Topology, change: Change) -> None:
    assert_as_torch(topology, in_the_first_steps(change))


@topologies(on="hub aggregate ring")
def test_ranks_that_change_parameters_differently_are_told(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            step(job, model, optimizer, batch)
            model.get_parameter("0.weight").data[job.ranks[0]] = 0.0
        return values(model)

    with pytest.raises(HubringError):
        ends(topology, script)


@topologies()
def test_embedding_with_max_norm_shortens_the_same_rows_on_all_ranks(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(lambda: nn.Embedding(6, 3, max_norm=0.5))
        optimizer = job.wrap(momentum(model), model)
        for batch in batches(width=3):
            optimizer.zero_grad()
            job.loss(batch, lambda part: (model(torch.arange(4)) - part).square().mean()).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_embedding_with_max_norm_shortens_rows_of_one_rank(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(lambda: nn.Embedding(8, 3, max_norm=0.5))
        optimizer = job.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
        rows = torch.arange(8).chunk(2)
        for batch in batches(width=3):
            optimizer.zero_grad()
            job.loss_by_rank(batch, lambda rank, part: (model(rows[rank]) - part).square().mean()).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script, refusal="rank")


@topologies()
def test_averaged_weights_are_swapped_in_for_evaluation_and_out_again(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(adam(model), model)
        averages = values(model)
        scores = []
        for batch in batches():
            step(job, model, optimizer, batch)
            own = values(model)
            for average, parameter in zip(averages, model.parameters(), strict=True):
                average.lerp_(parameter.detach(), 0.5)
                parameter.data.copy_(average)
            with torch.no_grad():
                scores.append(square(model)(batch))
            for saved, parameter in zip(own, model.parameters(), strict=True):
                parameter.data.copy_(saved)
        return [*values(model), *scores]

    assert_as_torch(topology, script)


@topologies()
@OPTIMIZERS
def test_training_goes_on_from_the_best_weights(
    topology: Topology, make: Callable[[nn.Module], Optimizer]
) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(make(model), model)
        first, *rest = batches()
        step(job, model, optimizer, first)
        best = copy.deepcopy(model.state_dict())
        for batch in rest:
            step(job, model, optimizer, batch)
        model.load_state_dict(best)
        for batch in rest:
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_training_goes_on_from_averaged_weights(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        average = AveragedModel(model)
        for batch in batches():
            step(job, model, optimizer, batch)
            average.update_parameters(model)
        model.load_state_dict(average.module.state_dict())
        for batch in batches():
            step(job, model, optimizer, batch)
        return [*values(model), *values(average.module)]

    assert_as_torch(topology, script)


@topologies()
def test_look_ahead_pulls_weights_back_every_two_steps(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(adam(model), model)
        slow = values(model)
        for index, batch in enumerate(batches()):
            step(job, model, optimizer, batch)
            if index % 2:
                for kept, fast in zip(slow, model.parameters(), strict=True):
                    kept.lerp_(fast.detach(), 0.5)
                    fast.data.copy_(kept)
        return values(model)

    assert_as_torch(topology, script)


class Adapted(nn.Module):
    """A linear layer with a trained update of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(3, 2))

    def forward(self, batch: Tensor) -> Tensor:
        return self.base(batch) + batch @ (self.up @ self.down).T


@topologies()
def test_an_adapter_is_merged_into_the_weights_while_training_goes_on(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(Adapted)
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            step(job, model, optimizer, batch)
            model.base.weight.data += (model.up @ model.down).detach()
            model.up.data.zero_()
        return values(model)

    assert_as_torch(topology, script)


class Clip(nn.Module):
    """Has a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, batch: Tensor) -> Tensor:
        return -self.logit_scale.exp() * self.layer(batch)


@topologies()
def test_a_temperature_is_kept_in_its_range(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(Clip)
        optimizer = job.wrap(adam(model), model)
        for batch in batches():
            step(job, model, optimizer, batch)
            with torch.no_grad():
                model.logit_scale.clamp_(0.98, 1.02)
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_weights_are_binarised_for_each_pass(topology: Topology) -> None:
    """The script keeps the memory of the weights, and puts it back after the pass."""

    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for turn, batch in enumerate(batches(steps=6)):
            optimizer.zero_grad()
            own = [parameter.data for parameter in model.parameters()]
            if turn % 3:
                for parameter in model.parameters():
                    parameter.data = parameter.data.sign()
            job.loss(batch, square(model)).backward()
            for parameter, data in zip(model.parameters(), own, strict=True):
                parameter.data = data
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_memory_that_is_swapped_out_during_steps_keeps_its_values(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        kept: list[Tensor] = []
        for turn, batch in enumerate(batches(steps=6)):
            if turn == 2:
                kept = [parameter.data for parameter in model.parameters()]
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
            if turn == 4:
                for parameter, data in zip(model.parameters(), kept, strict=True):
                    parameter.data = data
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)
