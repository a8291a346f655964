"""What the wrapped optimizer exchanges, and how much at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.optimizer import setup
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.support.fakes.hub import FakeHub, FakeRank
from tests.support.training.training_scripts import (
    SMALL,
    Step,
    assert_close,
    assert_same,
    batches,
    build,
    clipped_step,
    loss_of,
    number_of_buckets,
    parameters_of,
    plain_step,
    sgd,
    single_server,
    wrap,
)


def kinds() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A model of two groups, one of them in two dtypes."""
    model = build()
    model[4].to(torch.float64)
    weights = [layer.weight for layer in (model[0], model[2], model[4])]
    biases = [layer.bias for layer in (model[0], model[2])]
    return model, torch.optim.SGD([{"params": weights}, {"params": biases}], lr=0.1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets that nobody asked for are of `SMALL` bytes, so that the test model has several."""
    monkeypatch.setattr(setup, "BUCKET_BYTES", SMALL)


@pytest.mark.usefixtures("small")
def test_a_hub_without_overlap_gets_one_bucket_a_kind() -> None:
    model, inner = kinds()
    optimizer = wrap(model, single_server(), inner=inner, overlap=False, bucket_bytes=None)
    found = [
        (bucket.spec.group, bucket.spec.dtype, [tensor.name for tensor in bucket.spec.tensors])
        for bucket in optimizer._reducers.buckets
    ]
    assert found == [
        (0, "float64", ["4.weight"]),
        (1, "float32", ["2.bias", "0.bias"]),
        (0, "float32", ["2.weight", "0.weight"]),
    ]
    assert optimizer._reducers._all[0].tuner is not None
    assert optimizer._reducers._all[0].tuner._tuning is None, "there is nothing to try"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("communicator", "how"),
    [
        (single_server, {}),
        (single_server, {"overlap": False, "cross_barrier": True}),
        (single_server, {"overlap": False, "bucket_bytes": SMALL}),
        (lambda: FakeRank(FakeHub(1, "worker")), {"overlap": False}),
        (LocalCommunicator, {"overlap": False}),
    ],
    ids=["overlap", "cross_barrier", "bucket_bytes", "aggregate", "local"],
)
def test_buckets_are_bounded_where_one_may_go_on_before_the_others(communicator: Any, how: Any) -> None:
    model = build()
    optimizer = wrap(model, communicator(), **{"bucket_bytes": None, **how})
    assert len(optimizer._reducers.buckets) == number_of_buckets()


@pytest.mark.parametrize(
    ("device", "at_once", "most"),
    [
        ("cpu", True, setup.UNBOUNDED),
        ("meta", True, setup.UNBOUNDED),
        ("cpu", False, setup.BUCKET_BYTES),
        ("meta", False, setup.GPU_BUCKET_BYTES),
    ],
)
def test_buckets_on_a_device_are_larger(device: str, at_once: bool, most: int) -> None:
    parameters = [torch.zeros(1), torch.zeros(1, device=device)]
    assert setup.bytes_of_bucket(parameters, at_once=at_once) == most


@pytest.mark.parametrize("step", [plain_step, clipped_step])
def test_one_bucket_trains_as_many_do(step: Step) -> None:
    def train(bucket_bytes: int | None) -> list[torch.Tensor]:
        model = build()
        optimizer = wrap(model, single_server(), overlap=False, bucket_bytes=bucket_bytes)
        for batch in batches():
            step(model, optimizer, batch)
        return parameters_of(model)

    assert_same(train(None), train(SMALL))


# What is exchanged


def test_the_learning_rate_travels_with_each_push() -> None:
    rank, model = single_server(), build()
    optimizer = wrap(model, rank)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    for batch in batches(3):
        plain_step(model, optimizer, batch)
        scheduler.step()
    rates = [hyper["lr"] for hyper in rank.hypers]
    assert sorted(set(rates), reverse=True) == [0.1, 0.05, 0.025]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("communicator", [single_server, LocalCommunicator])
def test_a_scheduler_on_the_wrapped_optimizer_works_without_a_warning(communicator: Any) -> None:
    model = build()
    inner = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=1, gamma=0.1)
    optimizer = DistributedOptimizer(inner, model, communicator=communicator())
    plain_step(model, optimizer, batches()[0])
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize("zero", ["optimizer", "model"])
def test_a_parameter_without_a_gradient_is_told_to_the_hub(zero: str) -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(6, 1)
            self.other = nn.Linear(6, 1)
            self.both = True

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.used(batch) + (self.other(batch) if self.both else 0)

    torch.manual_seed(0)
    rank, model = single_server(), Sometimes()
    optimizer = wrap(model, rank, bucket_bytes=1 << 20)
    for index, batch in enumerate(batches()):
        model.both = index % 2 == 0
        (optimizer if zero == "optimizer" else model).zero_grad()
        before = model.other.weight.detach().clone()
        loss_of(model, batch).backward()
        optimizer.step()
        assert torch.equal(model.other.weight, before) is not model.both
        names = [name for name, _ in reversed(list(model.named_parameters()))]
        assert names[:2] == ["other.bias", "other.weight"]
        assert bool(rank.pushed[-1][:7].any()) is model.both


def test_a_step_without_backward_exchanges_zeros_and_decides_nothing() -> None:
    rank, model = single_server(), build()
    optimizer = wrap(model, rank)
    before = parameters_of(model)
    optimizer.step()
    assert_same(parameters_of(model), before)
    assert not any(gradient.any() for gradient in rank.pushed)
    first, second, *_ = batches()
    clipped_step(model, optimizer, first)
    clipped_step(model, optimizer, second)


def test_tied_and_frozen_parameters_train_as_in_torch() -> None:
    def make() -> nn.Sequential:
        model = build()
        model[2].weight.requires_grad_(False)
        one, other = nn.Linear(8, 8), nn.Linear(8, 8)
        one.weight = model.get_parameter("2.weight")
        other.bias = model.get_parameter("0.bias")
        model[4] = nn.Sequential(one, other, nn.Linear(8, 3))
        return model

    model, plain = make(), make()
    optimizer, reference = wrap(model, single_server()), sgd(plain)
    for batch in batches():
        plain_step(model, optimizer, batch)
        plain_step(plain, reference, batch)
    assert_close(parameters_of(model), parameters_of(plain))
