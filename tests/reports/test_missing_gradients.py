"""Missing gradients and frozen parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.reports.report import report
from tests.reports.training import (
    OPTIMIZERS,
    Job,
    backward,
    batches,
    mlp,
    prepared,
    seeded,
    square,
    take,
    trained,
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


@report("pytorch/pytorch#41101", "the mean with zeros")
@OPTIMIZERS
def test_a_parameter_that_one_rank_uses_has_a_mean_with_zeros(job: Job, make: Make) -> list[Tensor]:
    """Each rank uses another head."""
    model, optimizer = prepared(job, seeded(Heads), make)
    for batch in batches():
        take(optimizer, job.loss_by_rank(batch, lambda rank, part: model(part, rank).square().mean()))
    return values(model)


@report("pytorch/pytorch#28294, KellerJordan/Muon#54, pytorch/pytorch#57081", "only the used head moves")
@OPTIMIZERS
@pytest.mark.parametrize("heads", [1, 2], ids=["one", "both"])
def test_tasks_that_take_turns_move_only_their_own_head(job: Job, make: Make, heads: int) -> list[Tensor]:
    """A head is never used, or tasks take turns."""
    model, optimizer = prepared(job, seeded(Heads), make)
    for turn, batch in enumerate(batches()):
        job.step(optimizer, batch, task(model, turn % heads))
    return values(model)


@report("pytorch/pytorch#18404", "a zero gradient is stepped, none is not")
@OPTIMIZERS
def test_zeroed_gradients_of_an_unused_head_still_move_it(job: Job, make: Make) -> list[Tensor]:
    """`zero_grad(set_to_none=False)` with an unused head."""
    model, optimizer = prepared(job, seeded(Heads), make)
    for turn, batch in enumerate(batches()):
        optimizer.zero_grad(set_to_none=False)
        job.loss(batch, task(model, min(turn, 1))).backward()
        optimizer.step()
    return values(model)


@report("JDAI-CV/fast-reid#178", "it stays")
@OPTIMIZERS
def test_a_layer_frozen_after_two_steps_stays(job: Job, make: Make) -> list[Tensor]:
    """`requires_grad_(False)` after two steps."""
    model, optimizer = prepared(job, mlp(), make)
    trained(job, model, optimizer, stop=2)
    model.get_submodule("0").requires_grad_(False)
    return trained(job, model, optimizer, start=2)


@report("facebookresearch/detectron2#2486, Lightning-AI/pytorch-lightning#450")
@OPTIMIZERS
@pytest.mark.parametrize("thawed", [0, 2], ids=["at once", "later"])
def test_a_layer_frozen_at_first_is_trained_once_it_is_thawed(
    job: Job, make: Make, thawed: int
) -> list[Tensor]:
    """Thaws before the first step, or after two."""
    model = mlp()
    model.get_submodule("0").requires_grad_(False)
    optimizer = job.wrap(make(model), model)
    for turn, batch in enumerate(batches()):
        model.get_submodule("0").requires_grad_(turn >= thawed)
        backward(job, model, optimizer, batch)
        if not thawed:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return values(model)


@report("DINO scripts", error="gradient", refused="later-*-hub")
@OPTIMIZERS
@pytest.mark.parametrize("late", [False, True], ids=["first", "later"])
def test_gradients_of_the_last_layer_are_cancelled(job: Job, late: bool, make: Make) -> list[Tensor]:
    """`p.grad = None` before `step()`, at first or later."""
    model, optimizer = prepared(job, mlp(), make)

    def cancel(turn: int) -> None:
        if late == (turn > 1):
            model.get_submodule("2").zero_grad()

    return trained(job, model, optimizer, before=cancel)


@report("pytorch/pytorch#41101")
def test_a_parameter_without_a_gradient_has_none(job: Job) -> list[Tensor]:
    """Looks which `.grad` is None."""
    model, optimizer = prepared(job, seeded(Heads))
    missing = []
    for batch in batches():
        optimizer.zero_grad()
        missing.append([one.grad is None for one in model.parameters()])
        job.loss(batch, square(model)).backward()
        missing.append([one.grad is None for one in model.parameters()])
        optimizer.step()
    return [torch.tensor(missing)]


@report("skorch-dev/skorch#562", "nothing moves")
@OPTIMIZERS
def test_a_step_before_the_first_backward_changes_nothing(job: Job, make: Make) -> list[Tensor]:
    """`step()` before the first backward."""
    model, optimizer = prepared(job, mlp(), make)
    optimizer.zero_grad()
    optimizer.step()
    return trained(job, model, optimizer)


@report("peft")
def test_only_adapters_are_given_to_the_optimizer(job: Job) -> list[Tensor]:
    """A frozen layer outside the optimizer."""
    model = mlp()
    model.get_submodule("0").requires_grad_(False)
    adapters = [one for one in model.parameters() if one.requires_grad]
    return trained(job, model, job.wrap(torch.optim.AdamW(adapters, lr=0.05), model))


@report("LayerDrop")
def test_a_layer_is_dropped_at_random_on_each_rank(job: Job) -> list[Tensor]:
    """Each rank skips other layers in each step."""
    model, optimizer = prepared(job, seeded(lambda: nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])))
    kept = torch.rand(4, 2, 3, generator=torch.Generator().manual_seed(5)) < 0.5

    def loss(turn: int, rank: int, part: Tensor) -> Tensor:
        for layer, use in zip(model, kept[turn, rank], strict=True):
            part = part + torch.tanh(layer(part)) if use else part
        return part.square().mean() + 0 * sum(one.sum() for one in model[0].parameters())

    for turn, batch in enumerate(batches()):
        take(optimizer, job.loss_by_rank(batch, partial(loss, turn)))
    return values(model)
