"""hvd.DistributedOptimizer: the script's own optimizer on the gradients of all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import hubring.horovod as hvd
from tests.workers.horovod.conftest import Everybody, every_rank, every_rank_of_three

Make = Callable[[Any], torch.optim.Optimizer]


def network() -> nn.Module:
    """The same on all ranks, whose threads share one default generator."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return model


def batch(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a batch of 12."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 4, generator=generator), torch.randn(12, 2, generator=generator)
    return x[rank::size], y[rank::size]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def wrapped(model: nn.Module, make: Make = sgd, **options: Any) -> Any:
    return hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **options)


def subtracting(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def trained(make: Make, rank: int, size: int, wrap: Callable[..., Any], steps: int = 4) -> list[torch.Tensor]:
    model = network()
    optimizer = wrap(make(model.parameters()), named_parameters=model.named_parameters())
    for step in range(steps):
        x, y = batch(step, rank, size)
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"groups": 2}, {"groups": "first and last"}, {"gradient_predivide_factor": 2.0}],
    ids=str,
)
def test_ranks_train_as_one_process_with_the_whole_batch(
    on_two: Everybody, make: Make, arguments: dict[str, Any]
) -> None:
    def act() -> list[torch.Tensor]:
        def wrap(optimizer: torch.optim.Optimizer, named_parameters: Any) -> Any:
            (first, *_, last), options = optimizer.param_groups[0]["params"], dict(arguments)
            if options.get("groups") == "first and last":
                options["groups"] = [[first, last]]
            return hvd.DistributedOptimizer(optimizer, named_parameters, **options)

        return trained(make, hvd.rank(), hvd.size(), wrap)

    first, second = on_two(act)
    assert all(map(torch.equal, first, second))
    torch.testing.assert_close(first, trained(make, 0, 1, lambda optimizer, named_parameters: optimizer))


@every_rank
def test_the_optimizer_is_an_instance_of_the_wrapped_class_and_shares_its_state() -> None:
    model = network()
    inner = sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    inner.step()  # a scheduler asks whether its own optimizer has stepped
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert len(optimizer.state) == 4
    ours = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    ours.step()
    assert optimizer.param_groups[0]["lr"] == 0.025


def one_weight(value: float = 0.0, **options: Any) -> tuple[nn.Linear, Any]:
    """A layer whose gradient is its input, and an optimizer that subtracts the gradient."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer, hvd.DistributedOptimizer(subtracting(layer.parameters()), **options)


def backward(layer: nn.Module, value: float) -> None:
    layer(torch.full((1, 1), float(value))).sum().backward()


@every_rank
def test_gradients_are_the_means_after_synchronize_so_that_clipping_works() -> None:
    layer, optimizer = one_weight(1.0)
    backward(layer, 2 + 4 * hvd.rank())
    optimizer.synchronize()
    assert layer.weight.grad is not None
    assert layer.weight.grad.item() == 4.0
    nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert layer.weight.item() == pytest.approx(0.0, abs=1e-5)


def test_synchronize_without_skip_is_warned_of_and_does_no_harm(on_two: Everybody) -> None:
    def act() -> float:
        layer, optimizer = one_weight(1.0)
        backward(layer, 1 + hvd.rank())
        optimizer.synchronize()
        optimizer.step()
        return layer.weight.item()

    # Python keeps one list of filters for all threads, so that ranks cannot each have their own.
    with pytest.warns(UserWarning, match="skip_synchronize"):
        assert on_two(act) == [-0.5, -0.5]


@every_rank
def test_a_missing_gradient_counts_as_zeros() -> None:
    model = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    optimizer = wrapped(model, subtracting)
    backward(model[hvd.rank()], 1)  # no rank reaches the last
    optimizer.step()
    assert [parameter.item() for parameter in model.parameters()] == [-0.5, -0.5, 0.0]


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
@every_rank
def test_sum_and_several_passes_add_up(compression: Any) -> None:
    layer, optimizer = one_weight(backward_passes_per_step=2, op=hvd.Sum, compression=compression)
    for value in (1, 10):
        backward(layer, value)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    backward(layer, 100)
    optimizer.step()
    assert layer.weight.dtype == torch.float32
    assert layer.weight.item() == -222.0


@every_rank
def test_more_passes_than_promised_are_an_assertion() -> None:
    layer, optimizer = one_weight()
    backward(layer, 1)
    with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
        backward(layer, 1)
    with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


@every_rank
def test_names_must_be_unique_and_complete() -> None:
    model = network()
    named = list(model.named_parameters())
    optimizer, twice = sgd(model.parameters()), [[named[0][1]], [named[0][1]]]
    refused: list[tuple[str, Any, dict[str, Any]]] = [
        ("Found duplicates: same", [("same", parameter) for _, parameter in named], {}),
        ("1 of the optimizer's parameters were not named", named[:-1], {}),
        ("sequence of tuples", [parameter for _, parameter in named], {}),
        ("backward_passes_per_step is 0", named, {"backward_passes_per_step": 0}),
        ("gradient_predivide_factor", named, {"op": hvd.Sum, "gradient_predivide_factor": 2.0}),
        ("non-negative integer", named, {"groups": -1}),
        ("appear once", named, {"groups": twice}),
        ("op is 17", named, {"op": 17}),
    ]
    for told, names, options in refused:
        with pytest.raises(ValueError, match=told):
            hvd.DistributedOptimizer(optimizer, names, **options)


@pytest.mark.parametrize("sparse_as_dense", [False, True])
@every_rank
def test_sparse_gradients_are_those_of_all_ranks(sparse_as_dense: bool) -> None:
    table = nn.Embedding(4, 1, sparse=True)
    nn.init.zeros_(table.weight)
    optimizer = wrapped(table, subtracting, sparse_as_dense=sparse_as_dense)
    table(torch.tensor([0, 1 + hvd.rank()])).sum().backward()
    optimizer.synchronize()
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    with optimizer.skip_synchronize():
        optimizer.step()
    assert table.weight.tolist() == [[-1.0], [-0.5], [-0.5], [0.0]]


def test_a_closure_has_its_gradients_reduced_each_time(on_two: Everybody) -> None:
    def act() -> tuple[float, list[torch.Tensor]]:
        model = network()
        x, y = batch(0, hvd.rank(), hvd.size())
        optimizer = wrapped(model, lambda parameters: torch.optim.LBFGS(parameters, lr=0.5, max_iter=3))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = hvd.allreduce(mse_loss(model(x), y))
            loss.backward()
            return loss

        before = optimizer.step(closure).item()
        assert hvd.allreduce(mse_loss(model(x), y)).item() < before
        return before, [parameter.detach() for parameter in model.parameters()]

    (_, first), (_, second) = on_two(act)
    assert all(map(torch.equal, first, second))


@every_rank
def test_under_adasum_changes_are_reduced_and_not_gradients() -> None:
    weights = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weights], lr=0.5), op=hvd.Adasum)
    (weights * torch.eye(2)[hvd.rank()]).sum().backward()
    optimizer.step()
    assert weights.tolist() == [-0.5, -0.5]  # orthogonal changes add up
    with pytest.raises(AssertionError, match="not supported when using Adasum"):
        optimizer.skip_synchronize()
    assert isinstance(optimizer, torch.optim.SGD)


@every_rank_of_three
def test_only_members_of_a_set_exchange_gradients() -> None:
    layer, optimizer = one_weight(process_set=hvd.add_process_set([0, 2]))
    backward(layer, hvd.rank())
    optimizer.step()
    assert layer.weight.item() == -1.0  # the mean of 0 and 2; rank 1 alone


def test_a_memory_format_survives_training(on_two: Everybody) -> None:
    def act() -> list[float]:
        model = nn.utils.convert_conv2d_weight_memory_format(nn.Conv2d(2, 3, 2), torch.channels_last)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = wrapped(model)
        samples = torch.full((1, 2, 3, 3), hvd.rank() + 1.0).to(memory_format=torch.channels_last)
        model(samples).sum().backward()
        optimizer.step()
        assert model.weight.is_contiguous(memory_format=torch.channels_last)
        return model.weight.flatten().tolist()

    first, second = on_two(act)
    assert first == second


@every_rank
def test_parameters_may_be_frozen_and_freed_between_steps() -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 1)]
    optimizers = [wrapped(model) for model in models]
    for turn in (0, 1, 0, 1):
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model.requires_grad_(index == turn)
            optimizer.zero_grad()
        models[1](models[0](torch.ones(3, 2))).sum().backward()
        assert [model.weight.grad is None for model in models] == [turn == 1, turn == 0]
        optimizers[turn].step()


@every_rank
def test_fresh_optimizers_have_zero_gradients_once_their_state_was_broadcast() -> None:
    frozen, dense = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
    hvd.broadcast_optimizer_state(sgd([frozen, dense]), root_rank=0)
    assert frozen.grad is None
    assert dense.grad is not None
    assert dense.grad.tolist() == [0, 0]
    table = nn.Embedding(4, 2, sparse=True)
    hvd.broadcast_optimizer_state(torch.optim.SGD(table.parameters(), lr=0.1), 0, model=table)
    table(torch.tensor([1])).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse


@pytest.mark.parametrize("make", [sgd, adam])
def test_optimizer_state_and_hyperparameters_come_from_the_root(on_two: Everybody, make: Make) -> None:
    def act() -> dict[str, Any]:
        model = network()
        optimizer = make(model.parameters())
        if hvd.rank() == 0:
            optimizer.param_groups[0]["lr"] = 0.25
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        return copy.deepcopy(optimizer.state_dict())

    first, second = on_two(act)
    assert first["param_groups"] == second["param_groups"]
    assert first["param_groups"][0]["lr"] == 0.25
    assert len(first["state"]) == 4
    torch.testing.assert_close(first["state"], second["state"], rtol=0, atol=0)


@every_rank
def test_an_empty_state_stays_empty_everywhere() -> None:
    model = network()
    optimizer = adam(model.parameters())
    if hvd.rank() == 1:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert not optimizer.state_dict()["state"]


@every_rank
def test_parameters_come_from_the_root_however_they_are_given() -> None:
    ways: list[Callable[[nn.Module], Any]] = [
        lambda model: model.state_dict(),
        lambda model: list(model.named_parameters()),
        lambda model: model.named_parameters(),
        lambda model: list(model.parameters()),
    ]
    for way in ways:
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, hvd.rank())
        nn.init.constant_(model.bias, hvd.rank())
        hvd.broadcast_parameters(way(model), root_rank=1)
        assert model.weight.sum().item() == 4
        assert model.bias.sum().item() == 2
    with pytest.raises(ValueError, match="invalid params of type"):
        hvd.broadcast_parameters(7, root_rank=0)
    with pytest.raises(ValueError, match="'extra' is not a tensor"):
        hvd.broadcast_parameters({"extra": 7}, root_rank=0)
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(nn.Linear(1, 1).parameters()), root_rank=0)
