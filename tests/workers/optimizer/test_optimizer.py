from __future__ import annotations

import copy
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from torch import nn

from hubring.ps.core.errors import ConfigError, DeadlineExceeded, RingBroken
from hubring.ps.core.types import Hyper
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucketing import Bucket
from hubring.workers.communicators.base import Communicator, Start
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.optimizer import distributed as optimizer_module
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.support.fake_hub import FakeHub, FakeRank

STEPS = 4
SMALL = 64
"""Bytes: cuts the test model into several buckets."""


SEEDING = threading.Lock()
"""Ranks are threads here, and torch's generator is one for all of them."""


def build(seed: int = 0) -> nn.Sequential:
    with SEEDING:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(count: int = STEPS, rows: int = 4, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 6, generator=generator) for _ in range(count)]


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def wrap(model: nn.Module, communicator: Communicator, **kwargs: Any) -> DistributedOptimizer:
    kwargs.setdefault("bucket_bytes", SMALL)
    inner = kwargs.pop("inner", None) or sgd(model)
    return DistributedOptimizer(inner, model, communicator=communicator, **kwargs)


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_same(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def assert_close(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    torch.testing.assert_close(first, second)


Step = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], None]


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def module_zero_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    loss_of(model, batch).backward()
    optimizer.step()


def clipped_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def replacing_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5
    optimizer.step()


def late_lr_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.step()


def never_zeroing_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    loss_of(model, batch).backward()
    optimizer.step()


def graph_keeping_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward(create_graph=True)
    optimizer.step()


def retrying_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    loss_of(model, batch * 2).backward()
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def closure_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss.item()

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert isinstance(loss, float)


SCRIPTS = [
    plain_step,
    module_zero_step,
    clipped_step,
    replacing_step,
    late_lr_step,
    never_zeroing_step,
    retrying_step,
    closure_step,
    graph_keeping_step,
]


def train_plain(step: Step, make: Callable[[nn.Module], torch.optim.Optimizer] = sgd) -> list[torch.Tensor]:
    model = build()
    optimizer = make(model)
    for batch in batches():
        step(model, optimizer, batch)
    return parameters_of(model)


def single_server() -> FakeRank:
    return FakeRank(FakeHub(1))


# Alone


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("step", SCRIPTS)
@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    ],
    ids=["SGD", "AdamW"],
)
def test_alone_training_is_bitwise_that_of_torch(step: Step, make: Any) -> None:
    model = build()
    optimizer = DistributedOptimizer(make(model), model, communicator=LocalCommunicator(), bucket_bytes=SMALL)
    for batch in batches():
        step(model, optimizer, batch)
    assert_same(parameters_of(model), train_plain(step, make))
    assert optimizer.completed_steps == STEPS


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("step", SCRIPTS)
def test_a_hub_of_one_applies_what_the_script_meant(step: Step) -> None:
    model = build()
    optimizer = wrap(model, single_server())
    for batch in batches():
        step(model, optimizer, batch)
    assert_close(parameters_of(model), train_plain(step))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("steps_on", ["server", "worker"])
def test_two_ranks_train_as_one_with_the_joint_batch(steps_on: Any, overlap: bool) -> None:
    def train(rank: FakeRank) -> list[torch.Tensor]:
        model = build(seed=rank.rank)  # rank 0's parameters must reach the other
        optimizer = wrap(model, rank, overlap=overlap)
        for batch in batches():
            plain_step(model, optimizer, batch[rank.rank * 2 : rank.rank * 2 + 2])
        return parameters_of(model)

    zero, one = FakeHub(2, steps_on).run(train)
    assert_same(zero, one)
    assert_close(zero, train_plain(plain_step))


# When the exchange happens


def pushes_during_backward(step: Step, rank: FakeRank, **kwargs: Any) -> list[int]:
    """For every step, how many buckets were handed over by the time backward returned."""
    model = build()
    optimizer = wrap(model, rank, **kwargs)
    counts: list[int] = []

    original = torch.Tensor.backward

    def backward(loss: torch.Tensor, *args: Any) -> None:
        before = len(rank.pushed)
        original(loss, *args)
        counts.append(len(rank.pushed) - before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", backward)
        for batch in batches():
            step(model, optimizer, batch)
    return counts


def number_of_buckets() -> int:
    rank = single_server()
    model = build()
    optimizer = wrap(model, rank)
    plain_step(model, optimizer, batches()[0])
    return len(rank.pushed)


@pytest.mark.parametrize("step", [plain_step, module_zero_step, closure_step, never_zeroing_step])
def test_after_a_watched_first_step_a_hub_gets_gradients_during_backward(step: Step) -> None:
    buckets = number_of_buckets()
    assert buckets > 2
    assert pushes_during_backward(step, single_server()) == [0, *[buckets] * (STEPS - 1)]


@pytest.mark.parametrize("step", [clipped_step, replacing_step, late_lr_step])
def test_a_script_that_changes_gradients_has_them_exchanged_in_step(
    step: Step, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert pushes_during_backward(step, single_server()) == [0] * STEPS
    (line,) = [record.message for record in caplog.records if "exchanged in step()" in record.message]
    assert "between backward and step" in line


def test_a_script_that_throws_gradients_away_has_them_exchanged_in_step() -> None:
    assert pushes_during_backward(retrying_step, single_server()) == [0] * STEPS * 2


def test_without_overlap_a_hub_gets_gradients_in_step() -> None:
    assert pushes_during_backward(plain_step, single_server(), overlap=False) == [0] * STEPS


def test_where_workers_step_the_mean_is_there_when_backward_returns() -> None:
    def train(rank: FakeRank) -> torch.Tensor:
        model = build()
        optimizer = wrap(model, rank)
        loss_of(model, batches()[0] * (rank.rank + 1)).backward()
        gradient = model.get_parameter("0.weight").grad
        assert gradient is not None
        seen = gradient.clone()
        optimizer.step()
        assert torch.equal(gradient, seen)
        return seen

    zero, one = FakeHub(2, "worker").run(train)
    expected = torch.zeros_like(zero)
    for factor in (1, 2):
        model = build()
        loss_of(model, batches()[0] * factor).backward()
        gradient = model.get_parameter("0.weight").grad
        assert gradient is not None
        expected += gradient / 2
    assert torch.equal(zero, one)
    torch.testing.assert_close(zero, expected)


def test_where_workers_step_clipping_sees_the_mean() -> None:
    def train(rank: FakeRank) -> list[torch.Tensor]:
        model = build()
        optimizer = wrap(model, rank)
        for batch in batches():
            clipped_step(model, optimizer, batch[rank.rank * 2 : rank.rank * 2 + 2])
        return parameters_of(model)

    zero, one = FakeHub(2, "worker").run(train)
    assert_same(zero, one)
    assert_close(zero, train_plain(clipped_step))


@pytest.mark.parametrize(("steps_on", "told"), [("server", True), ("worker", False)])
def test_whoever_clips_before_the_mean_is_told_so(
    caplog: pytest.LogCaptureFixture, steps_on: Literal["server", "worker"], told: bool
) -> None:
    def train(rank: FakeRank) -> None:
        model = build()
        clipped_step(model, wrap(model, rank), batches()[0][rank.rank * 2 : rank.rank * 2 + 2])

    FakeHub(2, steps_on).run(train)
    assert ("--aggregate for the same steps" in caplog.text) is told


def test_buckets_are_handed_over_in_order_whatever_backward_does() -> None:
    class Branches(nn.Module):
        """Runs its layers in the order of registration, or against it."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
            self.turned = False

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            for layer in reversed(self.layers) if self.turned else self.layers:
                batch = layer(batch)
            return batch

    rank, model = single_server(), Branches()
    optimizer = wrap(model, rank)
    for batch in batches():
        model.turned = not model.turned
        plain_step(model, optimizer, batch)
    order = [int(entry.split()[1]) for entry in rank.log]
    assert order == list(range(len(order) // STEPS)) * STEPS


def test_clipping_that_begins_after_the_first_step_is_an_error_with_its_mend() -> None:
    model = build()
    optimizer = wrap(model, single_server())
    first, second, *_ = batches()
    plain_step(model, optimizer, first)
    with pytest.raises(ConfigError, match=r"clipping.*overlap=False"):
        clipped_step(model, optimizer, second)


def test_a_learning_rate_set_late_after_the_first_step_is_an_error() -> None:
    model = build()
    optimizer = wrap(model, single_server())
    first, second, *_ = batches()
    plain_step(model, optimizer, first)
    with pytest.raises(ConfigError, match="hyperparameters"):
        late_lr_step(model, optimizer, second)


def test_dropping_gradients_that_were_pushed_is_an_error() -> None:
    model = build()
    optimizer = wrap(model, single_server())
    first, second, *_ = batches()
    plain_step(model, optimizer, first)
    optimizer.zero_grad()
    loss_of(model, second).backward()
    with pytest.raises(ConfigError, match="step"):
        optimizer.zero_grad()


def test_a_hook_that_changes_gradients_after_ours_is_noticed() -> None:
    rank, model = single_server(), build()
    optimizer = wrap(model, rank)

    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    for batch in batches():
        plain_step(model, optimizer, batch)

    plain = build()
    reference = sgd(plain, lr=0.05)
    for batch in batches():
        plain_step(plain, reference, batch)
    assert_close(parameters_of(model), parameters_of(plain))


# How much at a time


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
    monkeypatch.setattr(optimizer_module, "BUCKET_BYTES", SMALL)


@pytest.mark.usefixtures("small")
def test_a_hub_without_overlap_gets_one_bucket_a_kind() -> None:
    model, inner = kinds()
    optimizer = wrap(model, single_server(), inner=inner, overlap=False, bucket_bytes=None)
    found = [
        (bucket.spec.group, bucket.spec.dtype, [tensor.name for tensor in bucket.spec.tensors])
        for bucket in optimizer._buckets
    ]
    assert found == [
        (0, "float64", ["4.weight"]),
        (1, "float32", ["2.bias", "0.bias"]),
        (0, "float32", ["2.weight", "0.weight"]),
    ]
    assert optimizer._tuner is not None
    assert optimizer._tuner._tuning is None, "there is nothing to try"


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
    assert len(optimizer._buckets) == number_of_buckets()


@pytest.mark.parametrize(("device", "bounded"), [("cpu", False), ("meta", True)])
def test_buckets_that_are_copied_to_the_host_are_bounded(device: str, bounded: bool) -> None:
    parameters = [torch.zeros(1), torch.zeros(1, device=device)]
    found = optimizer_module._bucket_bytes(parameters, at_once=True)
    assert (found == optimizer_module.BUCKET_BYTES) is bounded


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
def test_a_parameter_without_a_gradient_counts_as_zeros(zero: str) -> None:
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


# Several backward passes a step


def accumulating(passes: int, *, zero: bool = True) -> Step:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        if zero:
            optimizer.zero_grad()
        for part in batch.chunk(passes):
            (loss_of(model, part) / passes).backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("communicator", [single_server, LocalCommunicator])
@pytest.mark.parametrize("passes", [2, 4])
def test_accumulated_passes_train_as_in_torch(communicator: Any, passes: int) -> None:
    model = build()
    optimizer = wrap(model, communicator(), backward_passes_per_step=passes)
    for batch in batches():
        accumulating(passes)(model, optimizer, batch)
    assert_close(parameters_of(model), train_plain(accumulating(passes)))


def test_buckets_are_pushed_in_the_last_pass_alone() -> None:
    buckets = number_of_buckets()
    counts = pushes_during_backward(accumulating(2), single_server(), backward_passes_per_step=2)
    assert counts == [0, 0, *[0, buckets] * (STEPS - 1)]


@pytest.mark.parametrize("communicator", [single_server, LocalCommunicator])
def test_fewer_passes_than_said_are_exchanged_in_step(communicator: Any) -> None:
    model = build()
    optimizer = wrap(model, communicator(), backward_passes_per_step=3)
    for batch in batches():
        accumulating(2)(model, optimizer, batch)
    assert_close(parameters_of(model), train_plain(accumulating(2)))


@pytest.mark.parametrize("communicator", [single_server, LocalCommunicator])
def test_more_passes_than_said_raise_with_the_mend(communicator: Any) -> None:
    model = build()
    optimizer = wrap(model, communicator())
    loss_of(model, batches()[0]).backward()
    with pytest.raises(ConfigError, match="backward_passes_per_step"):
        loss_of(model, batches()[1]).backward()
    optimizer.zero_grad()
    plain_step(model, optimizer, batches()[0])


def test_a_backward_pass_that_fails_may_be_repeated_after_zero_grad() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("out of memory")

    model = build()
    optimizer = wrap(model, LocalCommunicator())
    hidden = Failing.apply(model[:2](batches()[0]))
    with pytest.raises(RuntimeError, match="out of memory"):
        model[2:](hidden).square().mean().backward()
    for batch in batches():
        plain_step(model, optimizer, batch)
    assert_same(parameters_of(model), train_plain(plain_step))


# Loss scaling


def scaled_step(scaler: torch.amp.GradScaler, max_norm: float | None = None) -> Step:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()

    return step


def new_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, **kwargs)


@pytest.mark.parametrize("communicator", [single_server, LocalCommunicator])
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_grad_scaler_works_as_in_torch(communicator: Any, max_norm: float | None, enabled: bool) -> None:
    model = build()
    optimizer = wrap(model, communicator())
    scaler, reference = new_scaler(enabled=enabled), new_scaler(enabled=enabled)
    for batch in batches():
        scaled_step(scaler, max_norm)(model, optimizer, batch)
    assert_close(parameters_of(model), train_plain(scaled_step(reference, max_norm)))
    assert scaler.get_scale() == reference.get_scale()
    assert optimizer.completed_steps == STEPS


def test_a_grad_scaler_has_gradients_exchanged_in_step(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert pushes_during_backward(scaled_step(new_scaler()), single_server()) == [0] * STEPS
    assert "uses a GradScaler" in caplog.text


def test_a_grad_scaler_that_comes_later_is_an_error_with_its_mend() -> None:
    model = build()
    optimizer = wrap(model, single_server())
    first, second, *_ = batches()
    plain_step(model, optimizer, first)
    with pytest.raises(ConfigError, match=r"GradScaler.*overlap=False"):
        scaled_step(new_scaler())(model, optimizer, second)


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("steps_on", ["server", "worker"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(steps_on: Any, max_norm: float | None) -> None:
    def train(rank: FakeRank) -> tuple[list[torch.Tensor], int, list[int], float]:
        model = build()
        optimizer = wrap(model, rank)
        scaler = new_scaler()
        step = scaled_step(scaler, max_norm)
        pushed = []
        for index, batch in enumerate(batches()):
            before = parameters_of(model)
            poisoned = index == 2 and rank.rank == 1
            step(model, optimizer, batch * float("inf") if poisoned else batch)
            pushed.append(len(rank.pushed))
            if index == 2:
                assert_same(parameters_of(model), before)
        return parameters_of(model), optimizer.completed_steps, pushed, scaler.get_scale()

    (zero, steps, pushed, scale), (one, other_steps, other_pushed, other_scale) = FakeHub(2, steps_on).run(
        train
    )
    assert_same(zero, one)
    assert (steps, other_steps) == (STEPS - 1, STEPS - 1)
    assert pushed == other_pushed
    skipped = [later == earlier for earlier, later in pairwise(pushed)]
    assert skipped == [False, steps_on == "server", False]
    assert other_scale < 2.0**10 * 2
    assert (scale == other_scale) is (steps_on == "worker")


def test_on_an_asynchronous_hub_a_rank_skips_for_itself() -> None:
    hub = FakeHub(2)
    hub.size = 1  # a hub that answers every push at once
    rank = FakeRank(hub)
    model = build()
    optimizer = wrap(model, rank)
    rank.size, rank.lockstep = 2, False
    step = scaled_step(new_scaler())
    step(model, optimizer, batches()[0] * float("inf"))
    step(model, optimizer, batches()[0])
    assert optimizer.completed_steps == 1
    assert not any(entry.startswith("allreduce") for entry in rank.log)


def test_a_grad_scaler_wants_all_passes_where_workers_step() -> None:
    model = build()
    optimizer = wrap(model, LocalCommunicator(), backward_passes_per_step=2)
    with pytest.raises(ConfigError, match="with a GradScaler every step needs them all"):
        scaled_step(new_scaler())(model, optimizer, batches()[0])


# An optimizer as any other


def test_it_is_an_optimizer_that_shares_everything_with_the_wrapped_one() -> None:
    model = build()
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, model, communicator=LocalCommunicator())
    assert isinstance(optimizer, torch.optim.Optimizer)
    plain_step(model, optimizer, batches()[0])
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.state
    assert optimizer.defaults is inner.defaults
    assert repr(optimizer).startswith("DistributedOptimizer(Adam (")


def test_its_state_can_be_loaded_into_another() -> None:
    def adam(model: nn.Module) -> DistributedOptimizer:
        inner = torch.optim.Adam(model.parameters(), lr=0.1)
        return DistributedOptimizer(inner, model, communicator=LocalCommunicator())

    first, second = build(), build()
    optimizer, resumed = adam(first), adam(second)
    begin, *rest = batches()
    plain_step(first, optimizer, begin)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for batch in rest:
        plain_step(first, optimizer, batch)
        plain_step(second, resumed, batch)
    assert_same(parameters_of(first), parameters_of(second))


def test_loading_state_where_the_hub_holds_it_warns(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    plain_step(model, inner, batches()[0])
    optimizer = DistributedOptimizer(inner, model, communicator=single_server())
    optimizer.load_state_dict({**inner.state_dict()})
    assert "the hub holds the optimizer's state" in caplog.text


def test_step_hooks_and_state_dict_hooks_are_called_once() -> None:
    model = build()
    inner = sgd(model)
    optimizer = DistributedOptimizer(inner, model, communicator=LocalCommunicator())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("state"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("load"))
    plain_step(model, optimizer, batches()[0])
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["pre", "post", "state", "load"]


def test_groups_cannot_be_added_afterwards() -> None:
    model = build()
    optimizer = wrap(model, LocalCommunicator())
    with pytest.raises(ConfigError, match="before making DistributedOptimizer"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_it_is_not_wrapped_twice() -> None:
    model = build()
    optimizer = wrap(model, LocalCommunicator())
    with pytest.raises(ConfigError, match="DistributedOptimizer already"):
        DistributedOptimizer(optimizer, model, communicator=LocalCommunicator())


def test_a_model_that_is_none_is_refused_with_the_call_that_was_meant() -> None:
    model = build()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"a generator, not .*named_parameters="):
        DistributedOptimizer(inner, model.named_parameters(), communicator=LocalCommunicator())  # type: ignore[arg-type]


def test_an_optimizer_that_the_hub_cannot_run_is_refused_at_once() -> None:
    model = build()
    with pytest.raises(ConfigError, match="Adadelta"):
        DistributedOptimizer(torch.optim.Adadelta(model.parameters()), model, communicator=single_server())
    DistributedOptimizer(torch.optim.Adadelta(model.parameters()), model, communicator=LocalCommunicator())


def test_another_optimizer_of_the_same_name_is_not_taken_for_torchs_on_the_hub() -> None:
    class SGD(torch.optim.SGD):
        """Steps in some way of its own."""

    model = build()
    with pytest.raises(ConfigError, match="--aggregate"):
        wrap(model, single_server(), inner=SGD(model.parameters(), lr=0.1))
    wrap(model, LocalCommunicator(), inner=SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("communicator", [LocalCommunicator, single_server])
def test_a_parameter_that_is_thawed_afterwards_is_an_error_with_its_mend(communicator: Any) -> None:
    model = build()
    first = next(model.parameters()).requires_grad_(False)
    optimizer = wrap(model, communicator())
    plain_step(model, optimizer, batches()[0])
    first.requires_grad_(True)
    with pytest.raises(ConfigError, match="freeze them afterwards"):
        plain_step(model, optimizer, batches()[1])


def test_a_group_of_frozen_parameters_alone_changes_nothing() -> None:
    model = build()
    frozen, *rest = model.parameters()
    frozen.requires_grad_(False)
    groups: list[dict[str, Any]] = [{"params": [frozen], "lr": 0.5}, {"params": rest}]
    optimizer = wrap(model, single_server(), inner=torch.optim.SGD(groups, lr=0.1))
    before = frozen.clone()
    plain_step(model, optimizer, batches()[0])
    assert torch.equal(frozen, before)
    assert optimizer.completed_steps == 1


def test_a_model_that_was_moved_is_found_out_in_step() -> None:
    model = build()
    optimizer = wrap(model, LocalCommunicator(), overlap=False)
    plain_step(model, optimizer, batches()[0])
    weight = model.get_parameter("0.weight")
    weight.data = weight.data.clone()
    with pytest.raises(ConfigError, match=r"0\.weight was given other memory"):
        plain_step(model, optimizer, batches()[1])


# Beginning, end, and what goes wrong


def test_buffers_and_frozen_parameters_come_from_rank_0() -> None:
    def begin(rank: FakeRank) -> dict[str, torch.Tensor]:
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        model[2].weight.requires_grad_(False)
        torch.manual_seed(rank.rank)
        with torch.no_grad():
            for tensor in (*model.parameters(), model.get_buffer("1.running_mean")):
                tensor.copy_(torch.randn_like(tensor))
        model.get_buffer("1.num_batches_tracked").fill_(rank.rank + 3)
        wrap(model, rank)
        return model.state_dict()

    zero, one = FakeHub(2).run(begin)
    assert zero["1.num_batches_tracked"] == 3
    for name, tensor in zero.items():
        assert torch.equal(tensor, one[name]), name


def test_who_joins_late_waits_for_no_broadcast() -> None:
    rank = single_server()
    rank.late = True
    rank.size = 2
    optimizer = wrap(nn.BatchNorm1d(3), rank)
    assert optimizer.completed_steps == 0


def test_steps_go_on_from_where_the_hub_stands() -> None:
    rank, model = single_server(), build()
    rank.hub.start = Start(step=40)
    told: list[int] = []
    optimizer = wrap(model, rank, after_step=told.append)
    for batch in batches():
        plain_step(model, optimizer, batch)
    assert told == [41, 42, 43, 44]
    assert optimizer.completed_steps == 44


@pytest.mark.parametrize(("begun", "asks", "warned"), [(40, False, 1), (40, True, 0), (0, False, 0)])
def test_a_script_that_does_not_ask_where_its_job_goes_on_is_told_once(
    begun: int, asks: bool, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    rank, model = single_server(), build()
    rank.hub.start = Start(step=begun)
    optimizer = wrap(model, rank)
    if asks:
        assert optimizer.completed_steps == begun
    for batch in batches():
        plain_step(model, optimizer, batch)
    assert caplog.text.count("this is step 41 of a job that goes on") == warned


def test_refresh_brings_the_hubs_newest_parameters() -> None:
    rank, model = single_server(), build()
    optimizer = wrap(model, rank)
    for values in rank.hub.values.values():
        values.fill_(0.25)
    optimizer.refresh()
    assert all(bool((parameter == 0.25).all()) for parameter in model.parameters())


def test_parameters_are_known_by_name() -> None:
    model = build()
    optimizer = wrap(model, LocalCommunicator())
    assert set(optimizer.named_parameters) == {name for name, _ in model.named_parameters()}


class Stuck(LocalCommunicator):
    """Never finishes an exchange."""

    def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
        return Work(f"the exchange of bucket {bucket.spec.index}")


class Broken(LocalCommunicator):
    """Fails every exchange."""

    def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
        work = Work(f"the exchange of bucket {bucket.spec.index}")
        work.fail(RingBroken("rank 1 is gone"))
        return work


class Noting(LocalCommunicator):
    """Notes what is handed over together."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    @contextmanager
    def together(self) -> Iterator[None]:
        self.noted.append("(")
        yield
        self.noted.append(")")

    def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
        self.noted.append(str(bucket.spec.index))
        return super().push_pull(bucket, hyper)


@pytest.mark.parametrize(
    ("overlap", "unused", "noted"),
    [(False, False, "(012345)"), (True, False, "012345"), (True, True, "(012345)")],
)
def test_what_is_left_when_backward_is_over_is_handed_over_together(
    overlap: bool, unused: bool, noted: str
) -> None:
    rank, model = Noting(), build()
    optimizer = wrap(model, rank, overlap=overlap, bucket_bytes=16)
    for batch in batches()[:3]:
        rank.noted.clear()
        optimizer.zero_grad()
        loss_of(model[:-1] if unused else model, batch).backward()
        optimizer.step()
    assert "".join(rank.noted) == noted


def test_an_exchange_that_does_not_end_ends_with_the_timeout() -> None:
    model = build()
    optimizer = wrap(model, Stuck(), timeout=0.01)
    with pytest.raises(DeadlineExceeded, match="bucket 0"):
        loss_of(model, batches()[0]).backward()
    assert optimizer.completed_steps == 0


def test_a_failed_exchange_comes_out_of_backward_as_it_is() -> None:
    model = build()
    wrap(model, Broken())
    with pytest.raises(RingBroken, match="rank 1 is gone"):
        loss_of(model, batches()[0]).backward()


def test_time_spent_waiting_is_counted() -> None:
    model = build()
    optimizer = wrap(model, LocalCommunicator())
    assert optimizer.exchange_seconds == 0
    plain_step(model, optimizer, batches()[0])
    assert optimizer.exchange_seconds > 0


@pytest.mark.parametrize("passes", [0, -1])
def test_a_number_of_passes_below_one_is_refused(passes: int) -> None:
    with pytest.raises(ConfigError, match="backward_passes_per_step"):
        wrap(build(), LocalCommunicator(), backward_passes_per_step=passes)


def test_a_model_is_freed_with_its_optimizer_and_goes_on_without_it() -> None:
    model, kept = build(), build()
    for one in (model, kept):
        plain_step(one, wrap(one, single_server()), batches()[0])
    weight = weakref.ref(model[0].weight)
    del model, one
    gc.collect()
    assert weight() is None
    for batch in batches():
        loss_of(kept, batch).backward()
