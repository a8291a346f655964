"""Scripts whose parameters share memory, or are replaced by others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.reports.training import (
    Job,
    Topology,
    assert_as_torch,
    batches,
    mlp,
    momentum,
    seeded,
    step,
    topologies,
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


@topologies()
@pytest.mark.parametrize("tie", [one_parameter, wrapped_again, shared_data, transposed])
def test_weights_that_share_memory_stay_tied(topology: Topology, tie: object) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(Autoencoder)
        tie(model)  # type: ignore[operator]
        optimizer = job.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for batch in batches():
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script, refusal="weight")


@topologies()
def test_weights_are_tied_after_the_optimizer_was_made(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(Autoencoder)
        former = model.decode.weight
        optimizer = job.wrap(momentum(model), model)
        model.decode.weight = model.encode.weight
        for batch in batches():
            step(job, model, optimizer, batch)
        return [*values(model), former.detach().clone()]

    assert_as_torch(topology, script)


@topologies()
def test_a_parameter_that_replaces_another_is_not_trained(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(Autoencoder)
        optimizer = job.wrap(momentum(model), model)
        model.decode.weight = nn.Parameter(torch.full((4, 4), 0.5))
        for batch in batches():
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script, refusal="decode.weight")


@topologies()
def test_a_view_that_the_script_made_before_still_reads_and_writes_the_weights(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        row = model.get_parameter("0.weight").data[0]
        optimizer = job.wrap(momentum(model), model)
        rows = []
        for batch in batches():
            step(job, model, optimizer, batch)
            rows.append(row.clone())
            row.clamp_(-0.2, 0.2)
        return [*values(model), *rows]

    assert_as_torch(topology, script)


@topologies()
def test_a_network_whose_weights_are_views_of_one_vector(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        vector = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        nn.utils.vector_to_parameters(vector, model.parameters())
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            step(job, model, optimizer, batch)
            vector.clamp_(-0.3, 0.3)
        return values(model)

    assert_as_torch(topology, script, refusal="share")


@topologies()
def test_a_layer_used_twice_and_a_module_registered_twice(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        layer = seeded(lambda: nn.Linear(4, 4))
        model = nn.Sequential(layer, nn.Tanh(), layer)
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)
