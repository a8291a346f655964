"""Writes to parameters between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from tests.reports.report import report
from tests.reports.training import (
    OPTIMIZERS,
    Job,
    adam,
    batches,
    mlp,
    prepared,
    seeded,
    square,
    step,
    take,
    trained,
    trained_by,
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
CHANGES += [assign_data, set_from_vector]
SEVERAL = "hub aggregate ring"


@report(
    "huggingface/transformers#29227 (pruning masks), WGAN scripts (weight clipping), pytorch/pytorch#35858,"
    " pytorch/pytorch#34270",
    "the change is everybody's from then on",
)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_after_the_first_steps_are_kept(job: Job, change: Change) -> list[Tensor]:
    """Clamps, masks, normalises, resets, writes through NumPy, or assigns `p.data`."""
    model, optimizer = prepared(job, mlp())
    for turn in range(2):
        trained(job, model, optimizer, start=turn, stop=turn + 1)
        change(model)
    return trained(job, model, optimizer, start=2)


@report("neuralmagic/sparseml#429, microsoft/nni#5205", on=SEVERAL, refused=SEVERAL, error="rank")
def test_ranks_that_change_parameters_differently_are_told(job: Job) -> list[Tensor]:
    """Each rank zeroes another row."""
    model, optimizer = prepared(job, mlp())
    return trained(
        job, model, optimizer, after=lambda: model.get_parameter("0.weight").data[job.ranks[0]].zero_()
    )


@report("pytorch/pytorch#26596")
def test_embedding_with_max_norm_shortens_the_same_rows_on_all_ranks(job: Job) -> list[Tensor]:
    """`Embedding(max_norm=...)`, same rows on all ranks."""
    model, optimizer = prepared(job, seeded(lambda: nn.Embedding(6, 3, max_norm=0.5)))
    loss = square(lambda part: model(torch.arange(4)) - part)
    return trained_by(job, model, optimizer, loss, batches(width=3))


@report("pytorch/pytorch#37246, pytorch/pytorch#28959", error="rank", refused="hub aggregate ring")
def test_embedding_with_max_norm_shortens_rows_of_one_rank(job: Job) -> list[Tensor]:
    """`Embedding(max_norm=...)`, other rows on each rank."""
    model = seeded(lambda: nn.Embedding(8, 3, max_norm=0.5))
    optimizer = job.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    rows = torch.arange(8).chunk(2)
    for batch in batches(width=3):
        loss = job.loss_by_rank(batch, lambda rank, part: (model(rows[rank]) - part).square().mean())
        take(optimizer, loss)
    return values(model)


@report("huggingface/accelerate#3634")
def test_averaged_weights_are_swapped_in_for_evaluation_and_out_again(job: Job) -> list[Tensor]:
    """EMA weights are copied in and out."""
    model, optimizer = prepared(job, mlp(), adam)
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


@report("transformers, `load_best_model_at_end`")
@OPTIMIZERS
def test_training_goes_on_from_the_best_weights(
    job: Job, make: Callable[[nn.Module], Optimizer]
) -> list[Tensor]:
    """`load_state_dict` in the middle."""
    model, optimizer = prepared(job, mlp(), make)
    trained(job, model, optimizer, stop=1)
    best = copy.deepcopy(model.state_dict())
    trained(job, model, optimizer, start=1)
    model.load_state_dict(best)
    return trained(job, model, optimizer, start=1)


@report("timgaripov/swa#16, Lightning-AI/pytorch-lightning#7505")
def test_training_goes_on_from_averaged_weights(job: Job) -> list[Tensor]:
    """Loads the SWA average and goes on."""
    model, optimizer = prepared(job, mlp())
    average = AveragedModel(model)
    trained(job, model, optimizer, after=lambda: average.update_parameters(model))
    model.load_state_dict(average.module.state_dict())
    trained(job, model, optimizer)
    return [*values(model), *values(average.module)]


class Adapted(nn.Module):
    """A linear layer with a trained update of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(3, 2))

    def forward(self, batch: Tensor) -> Tensor:
        return self.base(batch) + batch @ (self.up @ self.down).T


@report("peft")
def test_an_adapter_is_merged_into_the_weights_while_training_goes_on(job: Job) -> list[Tensor]:
    """`weight.data += up @ down`, then trains on."""
    model, optimizer = prepared(job, seeded(Adapted))

    def merge() -> None:
        model.base.weight.data += (model.up @ model.down).detach()
        model.up.data.zero_()

    return trained(job, model, optimizer, after=merge)


class Clip(nn.Module):
    """Has a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, batch: Tensor) -> Tensor:
        return -self.logit_scale.exp() * self.layer(batch)


@report("CLIP scripts")
def test_a_temperature_is_kept_in_its_range(job: Job) -> list[Tensor]:
    """Clamps a 0-dimensional `logit_scale`."""
    model, optimizer = prepared(job, seeded(Clip), adam)
    return trained(job, model, optimizer, after=lambda: model.logit_scale.data.clamp_(0.98, 1.02))


@report("Binary networks")
def test_weights_are_binarised_for_each_pass(job: Job) -> list[Tensor]:
    """`p.data = p.data.sign()` for each pass, then back.

    The script keeps the memory of the weights, and puts it back after the pass.
    """
    model, optimizer = prepared(job, mlp())
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


@report(
    "Swapped weights",
    fails="hub",
    reason="a hub's answers arrive in the memory of the parameters that it was given first",
)
def test_memory_that_is_swapped_out_during_steps_keeps_its_values(job: Job) -> list[Tensor]:
    """Trains for two steps in other memory, puts `p.data` back."""
    model, optimizer = prepared(job, mlp())
    trained(job, model, optimizer, stop=2)
    kept = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    trained(job, model, optimizer, stop=2)
    for parameter, data in zip(model.parameters(), kept, strict=True):
        parameter.data = data
    return trained(job, model, optimizer, stop=2)
