"""Gradients that several optimizers of one process step with, and parameters that join later."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.reports.report import as_torch
from tests.reports.training import (
    STEPS,
    Job,
    batches,
    mlp,
    momentum,
    prepared,
    seeded,
    square,
    step,
    take,
    trained,
    values,
)


def linear() -> nn.Linear:
    return seeded(lambda: nn.Linear(4, 4))


def loaded(model: nn.Module) -> torch.optim.SGD:
    """An optimizer whose momentum is not zero."""
    optimizer = momentum(model)
    state = optimizer.state_dict()
    state["state"] = {
        index: {"momentum_buffer": torch.ones_like(one)} for index, one in enumerate(model.parameters())
    }
    optimizer.load_state_dict(state)
    return optimizer


class Several(nn.ModuleList):
    """Two models that share their first layer."""

    def __init__(self) -> None:
        encoder, *heads = (linear() for _ in range(3))
        super().__init__([nn.Sequential(encoder, head) for head in heads])

    def optimizers(self, job: Job, apart: bool = False, **options: Any) -> list[torch.optim.Optimizer]:
        return [job.wrap(momentum(model), model if apart else self, **options) for model in self]

    def loss(self, job: Job, batch: Tensor) -> Tensor:
        return job.loss(batch, lambda part: torch.stack([square(model)(part) for model in self]).mean())


# One order of sends, whatever the ranks' losses reach.


@as_torch(on="aggregate ring")
def test_a_rank_without_a_batch_joins_after_a_group_was_added(job: Job) -> list[Tensor]:
    back, head = linear(), linear()
    model = nn.Sequential(back, head)
    optimizer = job.wrap(momentum(back), model, uneven=True)
    optimizer.add_param_group({"params": list(head.parameters())})
    for number, batch in enumerate(batches()):
        shares = job.parts(batch)
        if number == STEPS - 1:
            if job.ranks == [1]:
                break
            shares = shares[:1]
        take(optimizer, sum(map(square(model), shares), torch.zeros(())) / len(job.ranks))
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.join()
    return values(model)


@as_torch(on="aggregate ring")
def test_an_optimizer_of_what_two_others_have_trained_sends_in_one_order(job: Job) -> list[Tensor]:
    model = nn.ModuleList([linear(), linear()])
    earlier = [job.wrap(momentum(layer), model) for layer in reversed(model)]
    both = job.wrap(momentum(model), model)
    for batch in batches():
        take(both, job.loss_by_rank(batch, lambda rank, part: square(model[rank])(part)))
    del earlier
    return values(model)


# One exchange for every optimizer that steps with it.


@as_torch(on="aggregate ring")
def test_two_optimizers_step_after_one_backward_with_one_exchange(job: Job) -> list[Tensor]:
    model = Several()
    optimizers = model.optimizers(job)
    hub = job.communicator
    with patch.object(hub, "push_pull", wraps=hub.push_pull) if hub is not None else nullcontext() as sent:
        for batch in batches():
            model.zero_grad()
            model.loss(job, batch).backward()
            for optimizer in optimizers:
                optimizer.step()
    buckets = 6  # at most 64 bytes each
    assert sent is None or sent.call_count == buckets * len(batches())
    return values(model)


@as_torch(on="aggregate ring")
@pytest.mark.parametrize("order", [1, -1])
def test_a_grad_scaler_steps_two_optimizers_that_share_an_encoder(job: Job, order: int) -> list[Tensor]:
    model = Several()
    optimizers = model.optimizers(job)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for batch in batches():
        model.zero_grad()
        scaler.scale(model.loss(job, batch)).backward()
        for optimizer in optimizers[::order]:
            scaler.step(optimizer)
        scaler.update()
    return values(model)


@as_torch(on="aggregate ring")
@pytest.mark.parametrize("apart", [True, False])
def test_steps_that_share_an_encoder_may_cross_the_barrier(job: Job, apart: bool) -> list[Tensor]:
    """The second optimizer steps with what the first has left in flight."""
    model = Several()
    optimizers = model.optimizers(job, apart=apart, cross_barrier=True)
    for batch in batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        model.loss(job, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
    for optimizer in optimizers:
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.synchronize()
    return values(model)


# A later optimizer of the same parameters.


@as_torch(refused="clips-hub", error="let the workers step, with means")
@pytest.mark.parametrize("clips", [True, False], ids=["clips", "plain"])
def test_a_layer_is_thawed_after_the_optimizer_was_made_anew(job: Job, clips: bool) -> list[Tensor]:
    model = mlp()
    model[0].requires_grad_(False)
    for turn in range(2):
        optimizer = job.wrap(momentum(model), model, overlap=False)
        gc.collect()  # the first one is gone
        trained(job, model, optimizer, start=turn, stop=turn + 1)
    model[0].requires_grad_(True)
    return trained(
        job,
        model,
        optimizer,
        start=2,
        before=lambda _: clips and nn.utils.clip_grad_norm_(model.parameters(), 0.05),
    )


@as_torch()
def test_a_later_optimizers_learning_rate_may_be_loaded(job: Job) -> list[Tensor]:
    model = mlp()
    for _ in range(2):
        optimizer = job.wrap(momentum(model), model)
        trained(job, model, optimizer)
    loaded = optimizer.state_dict()
    loaded["param_groups"][0]["lr"] = 0.01
    optimizer.load_state_dict(loaded)
    return trained(job, model, optimizer)


def halve_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


@as_torch(refused="hub", error="let the workers step, with means")
def test_a_later_optimizer_of_a_hub_watches_its_first_step(job: Job) -> list[Tensor]:
    """The first optimizer's script changes nothing; the second one's changes gradients after backward.

    A hub has taken steps by then, and cannot average any more.
    """
    model = mlp()
    trained(job, model, job.wrap(momentum(model), model))
    optimizer = job.wrap(momentum(model), model)
    return trained(job, model, optimizer, before=lambda _: halve_gradients(model))


@as_torch()
def test_one_torch_optimizer_may_be_wrapped_twice(job: Job) -> list[Tensor]:
    model = mlp()
    inner = momentum(model)
    for _ in range(2):
        optimizer = job.wrap(inner, model)
        trained(job, model, optimizer)
    assert len(inner._optimizer_state_dict_pre_hooks) <= 1
    return [*values(model), optimizer.state_dict()["state"][0]["momentum_buffer"].detach().clone()]


@as_torch()
def test_new_parameters_continue_from_loaded_momentum(job: Job) -> list[Tensor]:
    model = nn.Sequential(linear(), linear())
    earlier = job.wrap(momentum(model[0]), model)
    trained(job, *prepared(job, model, loaded))
    del earlier
    return values(model)


@as_torch()
def test_loaded_momentum_of_a_frozen_layer_is_there_when_it_thaws(job: Job) -> list[Tensor]:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = job.wrap(loaded(model), model)
    for number, batch in enumerate(batches()):
        model[0].requires_grad_(number >= 2)
        step(job, model, optimizer, batch)
    return values(model)


@as_torch()
def test_a_group_that_cannot_be_added_leaves_the_optimizer_as_it_was(job: Job) -> list[Tensor]:
    model = mlp()
    optimizer = job.wrap(momentum(model[2]), model)
    if isinstance(optimizer, DistributedOptimizer):
        named = set(optimizer.named_parameters)
        with (
            patch.object(job.communicator, "attach", side_effect=RuntimeError("no memory")),
            pytest.raises(RuntimeError, match="no memory"),
        ):
            optimizer.add_param_group({"params": list(model[0].parameters())})
        assert len(optimizer.param_groups) == 1
        assert set(optimizer.named_parameters) == named
    return trained(job, model, optimizer)


@as_torch(on="hub", refused="hub", error="a later DistributedOptimizer steps some of")
def test_a_replaced_optimizer_does_not_overwrite_the_hubs_state(job: Job) -> list[Tensor]:
    model = mlp()
    earlier, later = (job.wrap(momentum(model), model) for _ in range(2))
    step(job, model, later, batches()[0])
    earlier.load_state_dict(earlier.state_dict())
    return []


@as_torch(on="aggregate ring")
def test_what_an_earlier_optimizer_thaws_is_clipped_as_the_mean(job: Job) -> list[Tensor]:
    model = nn.Sequential(*[linear() for _ in range(3)])
    model[:2].requires_grad_(False)
    earlier = job.wrap(momentum(model), model)
    trained(job, model, earlier, stop=1)
    model[0].requires_grad_(True)
    later = job.wrap(momentum(model[0], momentum=0.0), model)
    for batch in batches()[1:]:
        model[1].requires_grad_(True)
        model.zero_grad()
        job.loss(batch, square(model)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        later.step()
        earlier.step()
    return values(model)
