"""Parameters that share memory or are replaced."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.reports.report import report
from tests.reports.training import (
    Job,
    backward,
    batches,
    mlp,
    momentum,
    prepared,
    seeded,
    step,
    trained,
    values,
)


class Autoencoder(nn.Module):
    """Encodes and decodes with weights of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, batch: Tensor) -> Tensor:
        return self.decode(torch.tanh(self.encode(batch))) - batch


def wrapped_again(model: Autoencoder) -> None:
    model.decode.weight = nn.Parameter(model.encode.weight)


def shared_data(model: Autoencoder) -> None:
    model.decode.weight.data = model.encode.weight.data


def transposed(model: Autoencoder) -> None:
    model.decode.weight = nn.Parameter(model.encode.weight.T)


def one_parameter(model: Autoencoder) -> None:
    model.decode.weight = model.encode.weight


@report("allenai/OLMo#485, huggingface/transformers#13030, huggingface/accelerate#138")
@pytest.mark.parametrize("tie", [one_parameter, wrapped_again, shared_data, transposed])
def test_weights_that_share_memory_stay_tied(job: Job, tie: object) -> list[Tensor]:
    """Ties by parameter, storage, `.data` or transposed view."""
    model = seeded(Autoencoder)
    tie(model)  # type: ignore[operator]
    return trained(job, model, job.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model))


@report("huggingface/transformers#13030")
def test_weights_are_tied_after_the_optimizer_was_made(job: Job) -> list[Tensor]:
    """Ties after wrapping."""
    model = seeded(Autoencoder)
    former = model.decode.weight
    optimizer = job.wrap(momentum(model), model)
    model.decode.weight = model.encode.weight
    trained(job, model, optimizer)
    return [*values(model), former.detach().clone()]


@report("pytorch/pytorch#12603", refused="hub aggregate ring", error="model has got decode.weight since")
@pytest.mark.parametrize("closure", [True, False], ids=["closure", "plain"])
def test_a_parameter_that_replaces_another_is_not_trained(job: Job, closure: bool) -> list[Tensor]:
    """Assigns a new `Parameter` after wrapping."""
    model, optimizer = prepared(job, seeded(Autoencoder))
    model.decode.weight = nn.Parameter(torch.full((4, 4), 0.5))
    for batch in batches():
        evaluate: Any = partial(backward, job, model, optimizer, batch)
        if not closure:
            evaluate()
        optimizer.step(evaluate if closure else None)
    return values(model)


@report("pytorch/pytorch#35858")
def test_a_view_that_the_script_made_before_still_reads_and_writes_the_weights(job: Job) -> list[Tensor]:
    """Keeps, reads and clamps `weight.data[0]`."""
    model = mlp()
    row = model.get_parameter("0.weight").data[0]
    optimizer = job.wrap(momentum(model), model)
    rows = []
    for batch in batches():
        step(job, model, optimizer, batch)
        rows.append(row.clone())
        row.clamp_(-0.2, 0.2)
    return [*values(model), *rows]


@report("PhilJd/contiguous_pytorch_params#2")
def test_a_network_whose_weights_are_views_of_one_vector(job: Job) -> list[Tensor]:
    """All weights are views of one vector, which is clamped."""
    model = mlp()
    vector = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    nn.utils.vector_to_parameters(vector, model.parameters())
    optimizer = job.wrap(momentum(model), model)
    return trained(job, model, optimizer, after=lambda: vector.clamp_(-0.3, 0.3))


@report("Module reuse")
def test_a_layer_used_twice_and_a_module_registered_twice(job: Job) -> list[Tensor]:
    """One `Linear` twice in a `Sequential`."""
    layer = seeded(lambda: nn.Linear(4, 4))
    return trained(job, *prepared(job, nn.Sequential(layer, nn.Tanh(), layer)))
