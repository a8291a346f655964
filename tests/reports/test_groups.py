"""Scripts that add, remove, reorder or rewrite parameter groups, or make a new optimizer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.reports.training import (
    Job,
    Topology,
    assert_as_torch,
    batches,
    mlp,
    momentum,
    step,
    topologies,
    values,
)


def two_groups(model: nn.Sequential) -> Optimizer:
    first, last = model[0].parameters(), model[2].parameters()
    groups = [{"params": first, "lr": 0.01, "name": "trunk"}, {"params": last, "lr_scale": 0.5}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)


def remove_first(optimizer: Optimizer) -> None:
    optimizer.param_groups.pop(0)


def remove_last(optimizer: Optimizer) -> None:
    del optimizer.param_groups[-1]


def empty_first(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"] = []


def reorder(optimizer: Optimizer) -> None:
    optimizer.param_groups.reverse()
    optimizer.param_groups[0]["lr"] = 0.02


def drop_weight(optimizer: Optimizer) -> None:
    del optimizer.param_groups[0]["params"][0]


def swap_parameters(optimizer: Optimizer) -> None:
    first, last = optimizer.param_groups
    first["params"], last["params"] = last["params"], first["params"]


def stop_first(optimizer: Optimizer) -> None:
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)


def unchanged(optimizer: Optimizer) -> None:
    """Both groups go on."""


CHANGES = [
    remove_first,
    remove_last,
    empty_first,
    reorder,
    drop_weight,
    swap_parameters,
    stop_first,
    unchanged,
]


@topologies()
@pytest.mark.parametrize("change", CHANGES)
def test_groups_are_changed_after_two_steps(topology: Topology, change: Callable[[Optimizer], None]) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(two_groups(model), model)
        for turn, batch in enumerate(batches()):
            if turn == 2:
                change(optimizer)
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script, refusal="group")


@topologies()
def test_a_layer_is_added_when_it_is_thawed(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        trunk, head = model[0], model[2]
        trunk.requires_grad_(False)
        optimizer = job.wrap(torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9), model)
        for turn, batch in enumerate(batches()):
            if turn == 2:
                trunk.requires_grad_(True)
                optimizer.add_param_group({"params": list(trunk.parameters()), "lr": 0.01})
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_a_new_layer_is_added_to_a_model_that_grows(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for turn, batch in enumerate(batches()):
            if turn == 2:
                grown = nn.Linear(2, 2)
                nn.init.constant_(grown.weight, 0.5)
                nn.init.zeros_(grown.bias)
                model.append(grown)
                optimizer.add_param_group({"params": list(grown.parameters())})
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


@topologies()
@pytest.mark.parametrize("thaw", [True, False], ids=["thawed", "same"])
def test_a_new_optimizer_is_made_for_the_next_stage(topology: Topology, thaw: bool) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        model[0].requires_grad_(not thaw)
        first = [one for one in model.parameters() if one.requires_grad]
        optimizer = job.wrap(torch.optim.SGD(first, lr=0.1, momentum=0.9), model)
        for turn, batch in enumerate(batches()):
            if turn == 2:
                model.requires_grad_(True)
                optimizer = job.wrap(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model)
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script, refusal="second DistributedOptimizer")


@topologies()
def test_each_parameter_has_a_group_of_its_own(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        groups = [
            {"params": [one], "lr": 0.02 * (index + 1), "weight_decay": 0.1 * (one.dim() > 1)}
            for index, one in enumerate(model.parameters())
        ]
        optimizer = job.wrap(torch.optim.AdamW(groups), model)
        for batch in batches():
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_a_group_is_empty_from_the_start(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        groups: list[dict[str, object]] = [
            {"params": [], "lr": 0.5},
            {"params": list(model[0].parameters())},
            {"params": [], "weight_decay": 0.0},
            {"params": list(model[2].parameters()), "lr": 0.02},
        ]
        optimizer = job.wrap(torch.optim.SGD(groups, lr=0.1, momentum=0.9), model)
        for batch in batches():
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_groups_made_anew_by_the_script(topology: Topology) -> None:
    """The list of groups is cleared and filled again, with another rate."""

    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for turn, batch in enumerate(batches()):
            if turn == 2:
                optimizer.param_groups.clear()
                optimizer.add_param_group({"params": list(model.parameters()), "lr": 0.02})
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script, refusal="group")
