"""Changed parameter groups, and new optimizers."""

from __future__ import annotations

from collections.abc import Callable
from operator import delitem, setitem
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.reports.report import report
from tests.reports.training import Job, batches, mlp, prepared, seeded, step, trained, values


def two_groups(model: nn.Sequential) -> Optimizer:
    first, last = model[0].parameters(), model[2].parameters()
    groups = [{"params": first, "lr": 0.01, "name": "trunk"}, {"params": last, "lr_scale": 0.5}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)


def reorder(optimizer: Optimizer) -> None:
    optimizer.param_groups.reverse()
    optimizer.param_groups[0]["lr"] = 0.02


def swap_parameters(optimizer: Optimizer) -> None:
    first, last = optimizer.param_groups
    first["params"], last["params"] = last["params"], first["params"]


def split(optimizer: Optimizer) -> None:
    first, *others = optimizer.param_groups
    optimizer.param_groups[:] = [
        {**first, "params": [one], "lr": 0.01 * (2 + at)} for at, one in enumerate(first["params"])
    ] + others


def merge(optimizer: Optimizer) -> None:
    first, last = optimizer.param_groups
    first["params"] += last["params"]
    optimizer.param_groups.pop()


SIZES = pytest.mark.parametrize("size", [64, 1 << 20], ids=["apart", "together"])
"""Of a bucket: groups are in buckets of their own, or share one."""

CHANGES: dict[str, Callable[[Optimizer], Any]] = {
    "split": split,
    "merge": merge,
    "remove_first": lambda one: one.param_groups.pop(0),
    "remove_last": lambda one: delitem(one.param_groups, -1),
    "empty_first": lambda one: setitem(one.param_groups[0], "params", []),
    "reorder": reorder,
    "drop_weight": lambda one: delitem(one.param_groups[0]["params"], 0),
    "swap_parameters": swap_parameters,
    "stop_first": lambda one: one.param_groups[0].update(lr=0.0, weight_decay=0.0),
    "unchanged": lambda one: None,
}


@report("freud14/poutyne#37, facebookresearch/pytext#1533, brian6091/Dreambooth#28")
@pytest.mark.parametrize("change", CHANGES)
@SIZES
def test_groups_are_changed_after_two_steps(job: Job, change: str, size: int) -> list[Tensor]:
    """Removes, empties, reorders, swaps, splits, merges and stops groups."""
    model, optimizer = prepared(job, mlp(), two_groups, bucket_bytes=size)
    trained(job, model, optimizer, stop=2)
    CHANGES[change](optimizer)
    return trained(job, model, optimizer, start=2)


@report("Lightning-AI/pytorch-lightning#20340, NVIDIA/apex#310")
def test_a_layer_is_added_when_it_is_thawed(job: Job) -> list[Tensor]:
    """`add_param_group` for a thawed layer."""
    model = mlp()
    trunk, head = model[0], model[2]
    trunk.requires_grad_(False)
    optimizer = job.wrap(torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9), model)
    trained(job, model, optimizer, stop=2)
    trunk.requires_grad_(True)
    optimizer.add_param_group({"params": list(trunk.parameters()), "lr": 0.01})
    return trained(job, model, optimizer, start=2)


@report("pytorch/pytorch#2374")
def test_a_new_layer_is_added_to_a_model_that_grows(job: Job) -> list[Tensor]:
    """`add_param_group` for a new layer."""
    model, optimizer = prepared(job, mlp())
    trained(job, model, optimizer, stop=2)
    grown = seeded(lambda: nn.Linear(2, 2))
    model.append(grown)
    optimizer.add_param_group({"params": list(grown.parameters())})
    return trained(job, model, optimizer, start=2)


@report("fastai/fastai#2133, allenai/rslearn#217")
@pytest.mark.parametrize("thaw", [True, False], ids=["thawed", "same"])
def test_a_new_optimizer_is_made_for_the_next_stage(job: Job, thaw: bool) -> list[Tensor]:
    """Wraps a new optimizer after two steps."""
    model = mlp()
    model[0].requires_grad_(not thaw)
    first = [one for one in model.parameters() if one.requires_grad]
    optimizer = job.wrap(torch.optim.SGD(first, lr=0.1, momentum=0.9), model)
    trained(job, model, optimizer, stop=2)
    model.requires_grad_(True)
    optimizer = job.wrap(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model)
    return trained(job, model, optimizer, start=2)


@report("roboflow/rf-detr#1409")
@pytest.mark.parametrize("late", [False, True], ids=["fixed", "scheduled"])
@SIZES
def test_each_parameter_has_a_group_of_its_own(job: Job, late: bool, size: int) -> list[Tensor]:
    """One group per parameter."""
    model = mlp()
    groups = [
        {"params": [one], "lr": 0.02 * (index + 1), "weight_decay": 0.1 * (one.dim() > 1)}
        for index, one in enumerate(model.parameters())
    ]
    optimizer = job.wrap(torch.optim.AdamW(groups), model, bucket_bytes=size)
    for batch in batches():
        step(job, model, optimizer, batch)
        for group in optimizer.param_groups if late else ():
            group["lr"] *= 0.5
    return values(model)


FLAGS: list[tuple[type[Optimizer], list[dict[str, Any]]]] = [
    (torch.optim.SGD, [{"maximize": True}, {"momentum": 0.9, "nesterov": True}, {}, {"weight_decay": 0.1}]),
    (torch.optim.SGD, [{"lr": torch.tensor(0.05)}, {"lr": 0.0, "momentum": 0.9}, {"dampening": 0.5}, {}]),
    (torch.optim.Adam, [{"amsgrad": True}, {"maximize": True}, {"betas": (0.5, 0.9)}, {"weight_decay": 0.1}]),
    (
        torch.optim.AdamW,
        [{"eps": 1e-3}, {"amsgrad": True}, {"weight_decay": 0.0}, {"lr": torch.tensor(0.05)}],
    ),
    (torch.optim.RMSprop, [{"momentum": 0.9}, {"centered": True}, {"alpha": 0.5}, {"maximize": True}]),
    (torch.optim.Adagrad, [{"lr_decay": 0.1}, {"initial_accumulator_value": 0.5}, {"eps": 1e-3}, {}]),
]


@report("open-mmlab/mmcv paramwise_cfg, detectron2")
@pytest.mark.parametrize("case", FLAGS, ids=lambda case: case[0].__name__)
@SIZES
def test_groups_have_flags_of_their_own(
    job: Job, case: tuple[type[Optimizer], list[dict[str, Any]]], size: int
) -> list[Tensor]:
    """`maximize`, `nesterov`, `amsgrad`, a rate of 0 or a tensor in some."""
    model, (kind, flags) = mlp(), case
    groups = [
        {"params": [one], "lr": 0.05, **own} for one, own in zip(model.parameters(), flags, strict=True)
    ]
    optimizer = job.wrap(kind(groups), model, bucket_bytes=size)  # type: ignore[call-arg]
    ended = trained(job, model, optimizer)
    states = [sorted(one.items()) for _, one in sorted(optimizer.state_dict()["state"].items())]
    return [*ended, *(value for state in states for _, value in state if isinstance(value, Tensor))]


@report("Mixed precision")
def test_groups_have_dtypes_of_their_own(job: Job) -> list[Tensor]:
    """Groups with parameters of float32 and float64."""
    model = mlp()
    model[2].double()
    model.insert(2, ToDouble())
    groups = [{"params": [one], "lr": 0.02 * (at + 1)} for at, one in enumerate(model.parameters())]
    optimizer = job.wrap(torch.optim.SGD(groups, lr=0.1, momentum=0.9), model, bucket_bytes=1 << 20)
    return trained(job, model, optimizer)


class ToDouble(nn.Module):
    """Goes on in float64."""

    def forward(self, given: Tensor) -> Tensor:
        return given.double()


@report("Lightning-AI")
def test_a_group_is_empty_from_the_start(job: Job) -> list[Tensor]:
    """Empty groups between others."""
    model = mlp()
    groups: list[dict[str, object]] = [
        {"params": [], "lr": 0.5},
        {"params": list(model[0].parameters())},
        {"params": [], "weight_decay": 0.0},
        {"params": list(model[2].parameters()), "lr": 0.02},
    ]
    return trained(job, model, job.wrap(torch.optim.SGD(groups, lr=0.1, momentum=0.9), model))


@report("facebookresearch/pytext#1533")
def test_groups_made_anew_by_the_script(job: Job) -> list[Tensor]:
    """Clears `param_groups` and adds one again.

    The list of groups is cleared and filled again, with another rate.
    """
    model, optimizer = prepared(job, mlp())
    trained(job, model, optimizer, stop=2)
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": list(model.parameters()), "lr": 0.02})
    return trained(job, model, optimizer, start=2)
