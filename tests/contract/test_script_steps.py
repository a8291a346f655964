"""What a script does to the optimizer, its state, groups and hooks has torch's effect."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from hubring.ps.core.errors import ConfigError
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.contract.awkward import (
    ALL,
    KINDS,
    OPTIMIZERS,
    STEPPING_HERE,
    Hub,
    assert_as_one,
    backward,
    batches,
    ends,
    gradient,
    layers,
    made,
    momentum,
    step,
    values,
    wrapped,
)
from tests.support.training.ranks import Ranks

# S9: the optimizer's state.


@KINDS
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_state_dicts_move_between_topologies_and_torch(
    kind: type[Ranks], make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    first, second = batches()[:2], batches()[2:]

    def begin(communicator: Communicator | None) -> tuple[nn.Module, dict[str, Any]]:
        model = layers()
        optimizer = wrapped(make(model.parameters()), model, communicator)
        for batch in first:
            step(model, optimizer, batch, communicator)
        return model, copy.deepcopy(optimizer.state_dict())

    _, expected = begin(None)
    saved: dict[int, dict[str, Any]] = {}

    def save(communicator: Communicator | None) -> list[Tensor]:
        assert communicator is not None
        model, saved[communicator.rank] = begin(communicator)
        return values(model)

    ends(kind, save)
    for found in saved.values():
        assert found["param_groups"] == expected["param_groups"]
        assert found["state"].keys() == expected["state"].keys()
        for place, state in expected["state"].items():
            torch.testing.assert_close(
                dict(found["state"][place]),
                {k: v for k, v in state.items() if v is not None},
                rtol=1e-4,
                atol=1e-6,
            )

    def go_on(before: bool) -> Callable[[Communicator | None], list[Tensor]]:
        def train(communicator: Communicator | None) -> list[Tensor]:
            model = layers()
            own = make(model.parameters())
            if before:
                own.load_state_dict(copy.deepcopy(expected))
            optimizer = wrapped(own, model, communicator)
            if not before:
                optimizer.load_state_dict(copy.deepcopy(expected))
            for batch in second:
                step(model, optimizer, batch, communicator)
            return values(model)

        return train

    assert_as_one(kind, go_on(before=True), rtol=1e-4, atol=1e-5)
    assert_as_one(kind, go_on(before=False), rtol=1e-4, atol=1e-5)


# S10: hooks on the wrapped optimizer's step, and a step of the script's own.


@KINDS
def test_hooks_and_a_patched_step_run_as_in_torch(kind: type[Ranks]) -> None:
    calls: dict[int, list[str]] = {}

    def train(communicator: Communicator | None) -> list[Tensor]:
        rank = -1 if communicator is None else communicator.rank
        mine = calls[rank] = []
        model = layers()
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def halve(optimizer: torch.optim.Optimizer, *_: object) -> None:
            mine.append("before")
            for group in optimizer.param_groups:
                for one in group["params"]:
                    gradient(one).mul_(0.5)

        def clamp(optimizer: torch.optim.Optimizer, *_: object) -> None:
            mine.append("after")
            for group in optimizer.param_groups:
                for one in group["params"]:
                    assert one.grad is not None
                    one.data.clamp_(-0.3, 0.3)

        inner.register_step_pre_hook(halve)
        inner.register_step_post_hook(clamp)
        optimizer = wrapped(inner, model, communicator)
        own = inner.step

        def patched(*args: Any, **kwargs: Any) -> Any:
            mine.append("patched")
            return own(*args, **kwargs)

        inner.step = patched  # type: ignore[method-assign]
        for batch in batches():
            step(model, optimizer, batch, communicator)
        return values(model)

    assert_as_one(kind, train)
    assert all(each == calls[-1] for each in calls.values())
    assert calls[-1][:3] == ["patched", "before", "after"]


# S11: groups that change.


def regroup(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups.reverse()


def drop_first(optimizer: torch.optim.Optimizer) -> None:
    del optimizer.param_groups[0]


def empty_first(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"] = []


@KINDS
@pytest.mark.parametrize("change", [regroup, drop_first, empty_first])
def test_groups_that_change_are_stepped_as_they_are(
    kind: type[Ranks], change: Callable[[torch.optim.Optimizer], None]
) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        groups: list[dict[str, Any]] = [
            {"params": list(model[0].parameters()), "lr": 0.01},
            {"params": list(model[2].parameters()), "lr": 0.2},
        ]
        optimizer = wrapped(torch.optim.SGD(groups, lr=0.1, momentum=0.9), model, communicator)
        for number, batch in enumerate(batches()):
            if number == 2:
                change(optimizer)
            model.zero_grad()
            backward(model, batch, communicator)
            optimizer.step()
        return values(model)

    assert_as_one(kind, train)


@KINDS
def test_a_group_may_be_added(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        inner = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
        optimizer = wrapped(inner, model, communicator)
        for number, batch in enumerate(batches()):
            if number == 2:
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})
            model.zero_grad()
            backward(model, batch, communicator)
            optimizer.step()
        return values(model)

    assert_as_one(kind, train)


# New optimizers of the same parameters, and several over one model.


@KINDS
def test_an_optimizer_may_be_made_anew(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        earlier = []
        for number, batch in enumerate(batches()):
            if number % 2 == 0:
                optimizer = momentum(model, communicator)
                earlier.append(optimizer)  # as a scheduler would
            step(model, optimizer, batch, communicator)
        if isinstance(optimizer, DistributedOptimizer):
            assert optimizer.completed_steps == len(batches())
        return values(model)

    assert_as_one(kind, train)


@STEPPING_HERE
def test_two_optimizers_may_share_an_encoder(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        encoder, heads = made(nn.Linear(4, 4)), [made(nn.Linear(4, 2)), made(nn.Linear(4, 3))]
        models = [nn.Sequential(encoder, head) for head in heads]
        optimizers = [momentum(model, communicator) for model in models]
        for batch in batches():
            for model, optimizer in zip(models, optimizers, strict=True):
                step(model, optimizer, batch, communicator)
        return [tensor for model in models for tensor in values(model)]

    assert_as_one(kind, train)


# S12.


@pytest.mark.differing
@pytest.mark.parametrize("kind", ALL.values(), ids=ALL)
def test_torchs_synchronized_batch_norm_is_refused_with_what_to_use(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        momentum(nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)), communicator)
        return []

    with pytest.raises(ConfigError, match=r"^1 is a torch\.nn\.SyncBatchNorm.*hubring\.horovod"):
        ends(kind, train)


def test_one_process_may_use_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, communicator=LocalCommunicator())


def test_a_hub_refuses_an_optimizer_that_another_has_replaced() -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        earlier, later = momentum(model, communicator), momentum(model, communicator)
        step(model, later, batches()[0], communicator)
        step(model, earlier, batches()[1], communicator)
        return []

    with pytest.raises(ConfigError, match="a later DistributedOptimizer steps some of"):
        ends(Hub, train)
