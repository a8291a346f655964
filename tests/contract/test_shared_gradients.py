"""Gradients that several optimizers of one process step with, and parameters that join later."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from hubring.ps.core.errors import ConfigError
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.contract.awkward import (
    KINDS,
    STEPPING_HERE,
    Hub,
    assert_as_one,
    backward,
    batches,
    ends,
    layers,
    made,
    mean,
    momentum,
    parts,
    step,
    steps,
    values,
    wrapped,
)
from tests.support.training.ranks import Ranks


def two_layers() -> tuple[nn.Module, nn.Module, nn.ModuleList]:
    first, second = made(nn.Linear(4, 4)), made(nn.Linear(4, 4))
    return first, second, nn.ModuleList([first, second])


def sgd(*models: nn.Module, **options: Any) -> torch.optim.SGD:
    own = [parameter for model in models for parameter in model.parameters()]
    return torch.optim.SGD(own, **{"lr": 0.1, "momentum": 0.9, **options})


def loaded_sgd(model: nn.Module) -> torch.optim.SGD:
    optimizer = sgd(model)
    loaded = optimizer.state_dict()
    loaded["state"] = {
        index: {"momentum_buffer": torch.ones_like(one)} for index, one in enumerate(model.parameters())
    }
    optimizer.load_state_dict(loaded)
    return optimizer


class Several(nn.ModuleList):
    """Two models that share their first layer."""

    def __init__(self) -> None:
        encoder, *heads = (made(nn.Linear(4, 4)) for _ in range(3))
        super().__init__([nn.Sequential(encoder, head) for head in heads])

    def optimizers(
        self, communicator: Communicator | None, apart: bool = False, **options: Any
    ) -> list[torch.optim.Optimizer]:
        return [wrapped(sgd(model), model if apart else self, communicator, **options) for model in self]

    def loss(self, batch: Tensor, communicator: Communicator | None) -> Tensor:
        return mean([model(share).square().mean() for share in parts(batch, communicator) for model in self])


# One order of sends, whatever the ranks' losses reach.


@STEPPING_HERE
def test_a_rank_without_a_batch_joins_after_a_group_was_added(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        back, head, model = two_layers()
        optimizer = wrapped(sgd(back), model, communicator, **({"uneven": True} if communicator else {}))
        optimizer.add_param_group({"params": list(head.parameters())})
        for number, batch in enumerate(batches()):
            shares = parts(batch, communicator)
            if number == len(batches()) - 1:
                if communicator is not None and communicator.rank == 1:
                    break
                shares = shares[:1]
            optimizer.zero_grad()
            loss = mean([head(back(share)).square().mean() for share in shares])
            (loss if communicator is not None or len(shares) == 2 else loss / 2).backward()
            optimizer.step()
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.join()
        return values(model)

    assert_as_one(kind, train)


@STEPPING_HERE
def test_an_optimizer_of_what_two_others_have_trained_sends_in_one_order(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        first, second, model = two_layers()
        earlier = [wrapped(sgd(second), model, communicator), wrapped(sgd(first), model, communicator)]
        both = wrapped(sgd(first, second), model, communicator)
        ranks = [0, 1] if communicator is None or communicator.size == 1 else [communicator.rank]
        for batch in batches():
            both.zero_grad()
            losses = [(first, second)[rank](batch.chunk(2)[rank]).square().mean() for rank in ranks]
            mean(losses).backward()
            both.step()
        del earlier
        return values(model)

    assert_as_one(kind, train)


# One exchange for every optimizer that steps with it.


@STEPPING_HERE
def test_two_optimizers_step_after_one_backward_with_one_exchange(kind: type[Ranks]) -> None:
    pushes: list[int] = []

    def train(communicator: Communicator | None) -> list[Tensor]:
        model = Several()
        optimizers = model.optimizers(communicator)
        counted = patch.object(communicator, "push_pull", wraps=getattr(communicator, "push_pull", None))
        with counted if communicator is not None else nullcontext() as sent:
            for batch in batches():
                model.zero_grad()
                model.loss(batch, communicator).backward()
                for optimizer in optimizers:
                    optimizer.step()
        if sent is not None:
            pushes.append(sent.call_count)
        return values(model)

    assert_as_one(kind, train)
    buckets = 6  # at most 64 bytes each
    assert set(pushes) == {buckets * len(batches())}


@STEPPING_HERE
@pytest.mark.parametrize("order", [1, -1])
def test_a_grad_scaler_steps_two_optimizers_that_share_an_encoder(kind: type[Ranks], order: int) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = Several()
        optimizers = model.optimizers(communicator)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for batch in batches():
            model.zero_grad()
            scaler.scale(model.loss(batch, communicator)).backward()
            for optimizer in optimizers[::order]:
                scaler.step(optimizer)
            scaler.update()
        return values(model)

    assert_as_one(kind, train)


@STEPPING_HERE
@pytest.mark.parametrize("apart", [True, False])
def test_steps_that_share_an_encoder_may_cross_the_barrier(kind: type[Ranks], apart: bool) -> None:
    """The second optimizer steps with what the first has left in flight."""

    def train(communicator: Communicator | None) -> list[Tensor]:
        whole = Several()
        optimizers = whole.optimizers(communicator, apart=apart, cross_barrier=True)
        for batch in batches():
            for optimizer in optimizers:
                optimizer.zero_grad()
            whole.loss(batch, communicator).backward()
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            if isinstance(optimizer, DistributedOptimizer):
                optimizer.synchronize()
        return values(whole)

    assert_as_one(kind, train)


# A later optimizer of the same parameters.


@KINDS
def test_a_layer_is_thawed_after_the_optimizer_was_made_anew(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        model[0].requires_grad_(False)
        optimizer = wrapped(sgd(model), model, communicator, overlap=False)
        step(model, optimizer, batches()[0], communicator)
        optimizer = wrapped(sgd(model), model, communicator, overlap=False)
        gc.collect()  # the first one is gone
        step(model, optimizer, batches()[1], communicator)
        model[0].requires_grad_(True)
        for batch in batches()[2:]:
            optimizer.zero_grad()
            backward(model, batch, communicator)
            if communicator is None or communicator.steps_on == "worker":
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        return values(model)

    if kind is Hub:  # it averages after clipping
        ends(kind, train)
    else:
        assert_as_one(kind, train)


@KINDS
def test_a_later_optimizers_learning_rate_may_be_loaded(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        for _ in range(2):
            optimizer = momentum(model, communicator)
            steps(model, optimizer, communicator)
        loaded = optimizer.state_dict()
        loaded["param_groups"][0]["lr"] = 0.01
        optimizer.load_state_dict(loaded)
        return steps(model, optimizer, communicator)

    assert_as_one(kind, train)


@KINDS
def test_a_later_optimizer_of_a_hub_watches_its_first_step(kind: type[Ranks]) -> None:
    """The first optimizer's script changes nothing; the second one's changes gradients after backward."""

    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator)
        steps(model, optimizer, communicator)
        optimizer = momentum(model, communicator)
        for batch in batches():
            optimizer.zero_grad()
            backward(model, batch, communicator)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
            optimizer.step()
        return values(model)

    if kind is Hub:  # which has taken steps, and cannot average any more
        with pytest.raises(ConfigError, match="let the workers step, with means"):
            ends(kind, train)
    else:
        assert_as_one(kind, train)


@KINDS
def test_one_torch_optimizer_may_be_wrapped_twice(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        inner = sgd(model)
        for _ in range(2):
            optimizer = wrapped(inner, model, communicator)
            steps(model, optimizer, communicator)
        assert len(inner._optimizer_state_dict_pre_hooks) <= 1
        loaded = optimizer.state_dict()["state"][0]["momentum_buffer"]
        return [*values(model), loaded.detach().clone()]

    assert_as_one(kind, train)


@KINDS
def test_new_parameters_continue_from_loaded_momentum(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        first, second, model = two_layers()
        earlier = wrapped(sgd(first), model, communicator)
        optimizer = wrapped(loaded_sgd(model), model, communicator)
        for batch in batches():
            optimizer.zero_grad()
            shares = parts(batch, communicator)
            mean([second(first(share)).square().mean() for share in shares]).backward()
            optimizer.step()
        del earlier
        return values(model)

    assert_as_one(kind, train)


@KINDS
def test_loaded_momentum_of_a_frozen_layer_is_there_when_it_thaws(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        model[0].requires_grad_(False)
        optimizer = wrapped(loaded_sgd(model), model, communicator)
        for number, batch in enumerate(batches()):
            model[0].requires_grad_(number >= 2)
            step(model, optimizer, batch, communicator)
        return values(model)

    assert_as_one(kind, train)


@KINDS
def test_a_group_that_cannot_be_added_leaves_the_optimizer_as_it_was(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = wrapped(sgd(model[2]), model, communicator)
        if isinstance(optimizer, DistributedOptimizer):
            named = set(optimizer.named_parameters)
            assert communicator is not None
            with (
                patch.object(communicator, "attach", side_effect=RuntimeError("no memory")),
                pytest.raises(RuntimeError, match="no memory"),
            ):
                optimizer.add_param_group({"params": list(model[0].parameters())})
            assert len(optimizer.param_groups) == 1
            assert set(optimizer.named_parameters) == named
        return steps(model, optimizer, communicator)

    assert_as_one(kind, train)


def test_a_replaced_optimizer_does_not_overwrite_the_hubs_state() -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        earlier, later = momentum(model, communicator), momentum(model, communicator)
        step(model, later, batches()[0], communicator)
        earlier.load_state_dict(earlier.state_dict())
        return []

    with pytest.raises(ConfigError, match="a later DistributedOptimizer steps some of"):
        ends(Hub, train)


@STEPPING_HERE
def test_what_an_earlier_optimizer_thaws_is_clipped_as_the_mean(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = made(nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]))
        model[:2].requires_grad_(False)
        earlier = wrapped(sgd(model), model, communicator)
        step(model, earlier, batches()[0], communicator)
        model[0].requires_grad_(True)
        later = wrapped(sgd(model[0], momentum=0.0), model, communicator)
        for batch in batches()[1:]:
            model[1].requires_grad_(True)
            model.zero_grad()
            backward(model, batch, communicator)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            later.step()
            earlier.step()
        return values(model)

    assert_as_one(kind, train)
