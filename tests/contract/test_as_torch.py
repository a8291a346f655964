"""What a script does to parameters, gradients, groups, state and hooks has torch's effect."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from hubring.ps.core.errors import ConfigError, HubringError
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.contract.awkward import (
    ALL,
    KINDS,
    STEPPING_HERE,
    Hub,
    assert_as_one,
    batches,
    ends,
    made,
    mean,
    momentum,
    parts,
    values,
    wrapped,
)
from tests.support.training.ranks import Ranks


def layers() -> nn.Sequential:
    return made(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, communicator: Communicator | None
) -> None:
    optimizer.zero_grad()
    backward(model, batch, communicator)
    optimizer.step()


def backward(model: nn.Module, batch: Tensor, communicator: Communicator | None) -> None:
    mean([model(share).square().mean() for share in parts(batch, communicator)]).backward()


Between = Callable[[nn.Sequential, torch.optim.Optimizer], Any]


# S1: parameters that the script changes between steps.


def with_numpy(model: nn.Sequential, _: object) -> None:
    array = model[0].weight.detach().numpy()
    array[array > 0.1] = 0.1


def swap(model: nn.Sequential, _: object) -> None:
    first, second = model[0].weight.data.clone(), model[0].weight.data.t().clone()
    model[0].weight.data.copy_((first + second) / 2)


def reset(model: nn.Sequential, _: object) -> None:
    made(model[2])


def load(model: nn.Sequential, _: object) -> None:
    model.load_state_dict(layers().state_dict())


BETWEEN: dict[str, Between] = {
    "clamp": lambda model, _: [one.data.clamp_(-0.1, 0.1) for one in model.parameters()],
    "in place": lambda model, _: torch.no_grad()(model[0].weight.mul_)(0.9),
    "numpy": with_numpy,
    "one element": lambda model, _: model[2].bias.data[1:].fill_(0.25),
    "swap": swap,
    "reset": reset,
    "load": load,
    "vector": lambda model, _: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(model.parameters()).clamp(-0.2, 0.2), model.parameters()
    ),
}


@KINDS
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_parameters_changed_between_steps_stay_changed(kind: type[Ranks], between: Between) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator)
        for batch in batches():
            step(model, optimizer, batch, communicator)
            between(model, optimizer)
        return values(model)

    assert_as_one(kind, train)


@KINDS
def test_parameters_changed_between_backward_and_step_stay_changed(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator)
        for batch in batches():
            optimizer.zero_grad()
            backward(model, batch, communicator)
            model[0].weight.data.mul_(0.9)
            optimizer.step()
        return values(model)

    assert_as_one(kind, train)


def test_a_change_that_one_rank_makes_ends_the_job_and_is_named() -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        assert communicator is not None
        model = layers()
        optimizer = momentum(model, communicator)
        for batch in batches():
            step(model, optimizer, batch, communicator)
            if communicator.rank:
                model[2].bias.data.clamp_(max=-1.0)
        return values(model)

    with pytest.raises(HubringError, match=r"2\.bias"):
        ends(Hub, train)


# S2: parameters without a gradient.


class Sometimes(nn.Module):
    """Its second layer takes part when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 2), nn.Linear(4, 2)
        self.both = True

    def forward(self, batch: Tensor) -> Tensor:
        return self.always(batch) + (self.sometimes(batch) if self.both else 0)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda own: torch.optim.AdamW(own, lr=0.05, weight_decay=0.1),
    "adagrad": lambda own: torch.optim.Adagrad(own, lr=0.1, lr_decay=0.1),
    "rmsprop": lambda own: torch.optim.RMSprop(own, lr=0.01, momentum=0.9),
}


@KINDS
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("bucket_bytes", [16, 1 << 20])
def test_a_parameter_without_a_gradient_anywhere_is_not_stepped(
    kind: type[Ranks], make: Callable[[Any], torch.optim.Optimizer], bucket_bytes: int
) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = made(Sometimes())
        optimizer = wrapped(make(model.parameters()), model, communicator, bucket_bytes=bucket_bytes)
        for number, batch in enumerate([*batches(), *batches()]):
            model.both = number % 3 != 1
            step(model, optimizer, batch, communicator)
            assert (model.sometimes.weight.grad is None) is not model.both
        return values(model)

    assert_as_one(kind, train, rtol=1e-4, atol=1e-5)


@KINDS
def test_a_gradient_that_the_script_drops_is_none(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator)
        for batch in batches():
            optimizer.zero_grad()
            backward(model, batch, communicator)
            model[0].bias.grad = None
            optimizer.step()
        return values(model)

    assert_as_one(kind, train)


@KINDS
@pytest.mark.parametrize("late", [False, True])
def test_frozen_and_thawed_parameters_are_stepped_as_in_torch(kind: type[Ranks], late: bool) -> None:
    """Where workers step, a parameter may also be frozen at first."""
    if late and kind is Hub:
        pytest.skip("refused: test_a_hub_refuses_what_is_thawed_and_says_what_to_write")

    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        model[0].weight.requires_grad_(not late)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        optimizer = wrapped(sgd, model, communicator)
        for number, batch in enumerate(batches()):
            model[0].weight.requires_grad_((number > 1) is late)
            step(model, optimizer, batch, communicator)
        return values(model)

    assert_as_one(kind, train)


def test_a_hub_refuses_what_is_thawed_and_says_what_to_write() -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        model[0].weight.requires_grad_(False)
        optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1), model, communicator)
        step(model, optimizer, batches()[0], communicator)
        model[0].weight.requires_grad_(True)
        step(model, optimizer, batches()[1], communicator)
        return values(model)

    with pytest.raises(ConfigError, match=r"while all of them are trainable.*--aggregate"):
        ends(Hub, train)


# S3: buffers and frozen parameters.


@KINDS
@pytest.mark.parametrize("shapes", [((3,), (4,)), ((4,), (2, 2))])
def test_buffers_that_differ_by_rank_are_refused_naming_both(
    kind: type[Ranks], shapes: tuple[tuple[int, ...], ...]
) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        assert communicator is not None
        model = layers()
        model.register_buffer("mask", torch.ones(shapes[communicator.rank]))
        momentum(model, communicator)
        return []

    with pytest.raises(ConfigError, match=r"rank 0 and rank 1 .*mask float32"):
        ends(kind, train)


@KINDS
def test_buffers_of_every_kind_come_from_rank_0(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        rank = 0 if communicator is None else communicator.rank
        model = layers()
        own = torch.arange(6.0).view(2, 3) + rank
        buffers = {
            "expanded": own[:1].expand(4, 3),
            "sparse": own.to_sparse(),
            "conjugate": torch.complex(own, own).conj(),
            "transposed": own.t(),
            "flags": own > 3,
            "count": torch.tensor(rank),
        }
        for name, tensor in buffers.items():
            model.register_buffer(name, tensor)
        momentum(model, communicator)
        return [model.get_buffer(name).to_dense().resolve_conj().clone() for name in buffers]

    assert_as_one(kind, train)


# S4: gradients that the script keeps.


@KINDS
@pytest.mark.parametrize("keep", [lambda g: g, lambda g: g.view(-1), lambda g: g.detach()])
def test_gradients_that_the_script_keeps_are_not_overwritten(
    kind: type[Ranks], keep: Callable[[Tensor], Tensor]
) -> None:
    """As in gradient surgery: the second gradient is corrected by the first."""

    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator, overlap=False)
        for batch in batches():
            optimizer.zero_grad()
            backward(model, batch, communicator)
            first = [keep(gradient(one)) for one in model.parameters()]
            optimizer.zero_grad()
            backward(model, batch * 2, communicator)
            for own, one in zip(first, model.parameters(), strict=True):
                gradient(one).add_(own.view_as(one), alpha=0.5)
            optimizer.step()
        return values(model)

    assert_as_one(kind, train)


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


# S6: parameters that share memory.


@STEPPING_HERE
def test_two_parameters_over_one_storage_stay_tied(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = made(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        model[1].weight = nn.Parameter(model[0].weight.data)
        optimizer = momentum(model, communicator)
        for batch in batches():
            step(model, optimizer, batch, communicator)
        assert model[0].weight.data_ptr() == model[1].weight.data_ptr()
        return values(model)

    assert_as_one(kind, train)


def test_a_hub_refuses_two_parameters_over_one_storage() -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = made(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        model[1].weight = nn.Parameter(model[0].weight.data)
        momentum(model, communicator)
        return []

    with pytest.raises(ConfigError, match=r"weight and .*weight share memory"):
        ends(Hub, train)


@STEPPING_HERE
def test_views_that_the_script_keeps_show_the_parameters(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        kept = [one.data for one in model.parameters()]
        optimizer = momentum(model, communicator)
        for batch in batches():
            step(model, optimizer, batch, communicator)
            kept[0].clamp_(-0.1, 0.1)
            model[2].weight.data = model[2].weight.data.clamp(-0.2, 0.2)
        return [one.clone() for one in kept[:2]] + values(model)

    assert_as_one(kind, train)


# S7: accumulation that ends early.


@STEPPING_HERE
def test_an_accumulation_that_ends_early_is_a_mean_after_synchronize(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator, backward_passes_per_step=4)
        for batch in batches():
            optimizer.zero_grad()
            for _ in range(2):
                backward(model, batch, communicator)
            if isinstance(optimizer, DistributedOptimizer):
                optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        return values(model)

    assert_as_one(kind, train)


@STEPPING_HERE
def test_clipping_an_accumulation_that_ended_early_is_refused(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator, backward_passes_per_step=4)
        backward(model, batches()[0], communicator)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        return []

    with pytest.raises(ConfigError, match=r"optimizer\.synchronize\(\)"):
        ends(kind, train)


@KINDS
def test_an_accumulation_may_be_dropped_and_begun_anew(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator, backward_passes_per_step=2)
        for number, batch in enumerate(batches()):
            optimizer.zero_grad()
            backward(model, batch, communicator)
            if number == 2:
                continue  # the rest of the epoch is too short
            backward(model, batch, communicator)
            optimizer.step()
        return values(model)

    assert_as_one(kind, train)


# S8: gradients changed in ways that torch does not count.


@KINDS
@pytest.mark.parametrize("way", ["data", "replaced data", "numpy"])
def test_gradients_changed_behind_torchs_back_count(kind: type[Ranks], way: str) -> None:
    """The same on both ranks and on their mean, since a hub gets each rank's own gradient."""

    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator)
        for batch in batches():
            optimizer.zero_grad()
            backward(model, batch, communicator)
            for one in model.parameters():
                own = gradient(one)
                if way == "data":
                    own.data.mul_(0.5)
                elif way == "numpy":
                    own.numpy()[...] *= 0.5
                else:
                    own.data = own.data * 0.5
            optimizer.step()
        return values(model)

    assert_as_one(kind, train)


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


@STEPPING_HERE
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


# Optimizers that are made anew, and several over one model.


@STEPPING_HERE
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


# More than one backward pass.


@STEPPING_HERE
def test_backward_may_run_more_often_than_was_said(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator)
        for batch in batches():
            optimizer.zero_grad()
            backward(model, batch, communicator)
            backward(model, batch * 2, communicator)
            optimizer.step()
        return values(model)

    assert_as_one(kind, train)


@KINDS
@pytest.mark.parametrize("overlap", [True, False])
def test_reentrant_activation_checkpointing_trains_as_in_torch(kind: type[Ranks], overlap: bool) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        first, second, third = (made(nn.Linear(4, 4)) for _ in range(3))
        model = nn.Sequential(first, second, third)
        optimizer = momentum(model, communicator, overlap=overlap)
        for batch in batches():
            optimizer.zero_grad()
            losses = []
            for share in parts(batch, communicator):
                hidden = torch.utils.checkpoint.checkpoint(second, first(share), use_reentrant=True)
                losses.append(third(hidden).square().mean())
            mean(losses).backward()
            optimizer.step()
        return values(model)

    assert_as_one(kind, train)


@KINDS
def test_a_penalty_on_the_gradient_trains_as_in_torch(kind: type[Ranks]) -> None:
    """Its gradient is that of this rank's own gradient, so the batch is the same on all ranks."""

    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator, overlap=False)
        for batch in batches():
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            own = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            (loss + sum(one.square().sum() for one in own)).backward()
            optimizer.step()
        return values(model)

    assert_as_one(kind, train)


@STEPPING_HERE
def test_sparse_gradients_stay_sparse_for_an_optimizer_that_needs_them(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = made(nn.EmbeddingBag(6, 2, sparse=True, mode="sum"))
        optimizer = wrapped(torch.optim.SparseAdam(model.parameters(), lr=0.1), model, communicator)
        for batch in batches():
            rows = (batch.abs() * 3).long().clamp(max=5)
            optimizer.zero_grad()
            mean([model(share).square().mean() for share in parts(rows, communicator)]).backward()
            optimizer.step()
        return values(model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_as_one(kind, train)


# S12.


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
