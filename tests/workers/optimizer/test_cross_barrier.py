"""step() leaves its exchange under way, and whoever reads a parameter waits for it."""

from __future__ import annotations

import copy
import threading
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import nn

from hubring.ps.core.errors import ConfigError, DeadlineExceeded
from hubring.ps.core.types import Hyper
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.communicators.local import LocalCommunicator
from tests.support.fakes.hub import FakeHub, FakeRank
from tests.support.training.held_rank import SOON, HeldRank, Side, Step, bucket_of, crossing, waits
from tests.support.training.training_scripts import (
    assert_same,
    batches,
    build,
    clipped_step,
    closure_step,
    loss_of,
    module_zero_step,
    never_zeroing_step,
    parameters_of,
    plain_step,
    wrap,
)


@pytest.mark.parametrize(
    "step", [plain_step, module_zero_step, never_zeroing_step, closure_step, clipped_step]
)
@pytest.mark.parametrize("steps_on", ["server", "worker"])
@pytest.mark.parametrize("size", [1, 2])
def test_the_parameters_are_bitwise_those_without(step: Step, steps_on: Side, size: int) -> None:
    def train(rank: FakeRank, **kwargs: Any) -> list[torch.Tensor]:
        model = build()
        make = torch.optim.AdamW if steps_on == "worker" else torch.optim.SGD
        optimizer = wrap(model, rank, inner=make(model.parameters(), lr=0.05), **kwargs)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        for batch in batches(6):
            step(model, optimizer, batch * (rank.rank + 1))
            scheduler.step()
        optimizer.synchronize()
        return parameters_of(model)

    plain, *_ = FakeHub(size, steps_on).run(train)
    for crossed in FakeHub(size, steps_on).run(lambda rank: train(rank, cross_barrier=True)):
        assert_same(crossed, plain)


@pytest.mark.parametrize("steps_on", ["server", "worker"])
def test_accumulated_passes_and_skipped_steps_train_as_without(steps_on: Side) -> None:
    def train(cross_barrier: bool) -> list[torch.Tensor]:
        model = build()
        rank = FakeRank(FakeHub(1, steps_on))
        optimizer = wrap(model, rank, cross_barrier=cross_barrier, backward_passes_per_step=2)
        for batch in batches():
            optimizer.zero_grad()
            for part in batch.chunk(2):
                loss_of(model, part).backward()
            optimizer.step()
        optimizer.synchronize()
        return parameters_of(model)

    assert_same(train(True), train(False))


def test_attention_whose_projection_never_runs_its_forward_trains_as_without() -> None:
    class Attentive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(6, 8)
            self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            rows = self.before(batch).unsqueeze(1)
            attended: torch.Tensor = self.attend(rows, rows, rows)[0]
            return attended

    def train(rank: FakeRank, cross_barrier: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Attentive()
        optimizer = wrap(model, rank, cross_barrier=cross_barrier)
        for batch in batches():
            plain_step(model, optimizer, batch)
        optimizer.synchronize()
        return parameters_of(model)

    assert_same(train(FakeRank(FakeHub(1)), True), train(FakeRank(FakeHub(1)), False))
    rank = HeldRank()
    model = Attentive()
    optimizer = wrap(model, rank, cross_barrier=True, timeout=SOON)
    plain_step(model, optimizer, batches()[0])
    rank.holding = True
    plain_step(model, optimizer, batches()[1])
    projection = bucket_of(optimizer, "attend.out_proj.weight")
    rank.let_through(*(rank.held.keys() - {projection}))
    with pytest.raises(DeadlineExceeded, match=f"bucket {projection} "):
        model(batches()[2])


# Who waits for what


@pytest.mark.parametrize("steps_on", ["server", "worker"])
def test_a_forward_waits_for_its_own_parameters_alone(steps_on: Side) -> None:
    rank = HeldRank(steps_on)
    model, optimizer = crossing(rank, timeout=SOON)
    rank.holding = True
    plain_step(model, optimizer, batches()[1])
    first, last = batches()[2], torch.zeros(1, 8)
    assert waits(lambda: model[0](first))
    rank.let_through(bucket_of(optimizer, "0.weight"), bucket_of(optimizer, "0.bias"))
    assert model[0](first).shape == (4, 8)
    assert waits(lambda: model[4](last))
    rank.let_through()
    assert model[4](last).shape == (1, 3)


def test_a_forward_goes_on_when_the_answer_comes() -> None:
    rank = HeldRank()
    model, optimizer = crossing(rank)
    rank.holding = True
    plain_step(model, optimizer, batches()[1])
    asked, through = threading.Event(), threading.Event()

    class Waiting:
        def __enter__(self) -> None:
            asked.set()

        def __exit__(self, *_: object) -> None:
            through.set()

    rank.waiting = Waiting()
    thread = threading.Thread(target=lambda: model[0](batches()[2]))
    thread.start()
    assert asked.wait(20)
    assert not through.is_set()
    rank.let_through()
    thread.join(20)
    assert through.is_set()


@pytest.mark.parametrize("steps_on", ["server", "worker"])
@pytest.mark.parametrize(
    "read",
    [
        lambda model, optimizer: model.state_dict(),
        lambda model, optimizer: model[2].state_dict(),
        lambda model, optimizer: model.load_state_dict(build().state_dict()),
        lambda model, optimizer: optimizer.state_dict(),
        lambda model, optimizer: optimizer.wrapped.state_dict(),
        lambda model, optimizer: optimizer.synchronize(),
        lambda model, optimizer: optimizer.refresh(),
        lambda model, optimizer: torch.no_grad()(model[0])(batches()[2]),
    ],
)
def test_who_reads_everything_waits_for_everything(steps_on: Side, read: Any) -> None:
    rank = HeldRank(steps_on)
    model, optimizer = crossing(rank, timeout=SOON)
    rank.holding = True
    plain_step(model, optimizer, batches()[1])
    late = bucket_of(optimizer, "2.weight")
    rank.let_through(*(rank.held.keys() - {late}))
    assert waits(lambda: read(model, optimizer))
    rank.let_through()
    read(model, optimizer)
    assert not any(
        optimizer._reducers._all[0].exchange.has_left(bucket) for bucket in optimizer._reducers.buckets
    )


def test_waiting_for_all_begins_with_the_front_layers() -> None:
    class Last(Work):
        def wait(self, timeout: float | None = None) -> None:
            order.append(self.what)

    class Rank(LocalCommunicator):
        def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
            return Last(str(bucket.spec.index))

    order: list[str] = []
    model, optimizer = build(), None
    optimizer = wrap(model, Rank(), cross_barrier=True)
    plain_step(model, optimizer, batches()[0])
    plain_step(model, optimizer, batches()[1])
    order.clear()
    optimizer.synchronize()
    assert order == [str(bucket.spec.index) for bucket in reversed(optimizer._reducers.buckets)]
    assert optimizer._reducers.buckets[-1].spec.tensors[-1].name.startswith("0.")


@pytest.mark.parametrize("steps_on", ["server", "worker"])
@pytest.mark.parametrize("zero", ["optimizer", "model"])
def test_gradients_on_their_way_are_left_alone_until_answered(steps_on: Side, zero: str) -> None:
    rank = HeldRank(steps_on)
    model, optimizer = crossing(rank, timeout=SOON)
    rank.holding = True
    loss_of(model, batches()[1]).backward()
    given = [bucket.gradients.clone() for bucket in optimizer._reducers.buckets]
    optimizer.step()
    (optimizer if zero == "optimizer" else model).zero_grad()
    assert_same([bucket.gradients for bucket in optimizer._reducers.buckets], given)
    rank.let_through()
    optimizer.synchronize()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("steps_on", ["server", "worker"])
@pytest.mark.parametrize(
    "touch",
    [
        lambda model, optimizer: model.zero_grad(set_to_none=False),
        lambda model, optimizer: optimizer.wrapped.zero_grad(set_to_none=False),
        lambda model, optimizer: model[2].weight.grad.mul_(0.5),
    ],
)
def test_gradients_that_are_changed_on_their_way_are_an_error_with_its_mend(
    steps_on: Side, touch: Any
) -> None:
    rank = HeldRank(steps_on)
    model, optimizer = crossing(rank)
    rank.holding = True
    plain_step(model, optimizer, batches()[1])
    touch(model, optimizer)
    rank.let_through()
    for wait in (lambda: model(batches()[2]), optimizer.synchronize):
        with pytest.raises(ConfigError, match=r"changed in place after step\(\).*optimizer.zero_grad"):
            wait()


@pytest.mark.parametrize("crossed", [True, False])
@pytest.mark.parametrize("steps_on", ["server", "worker"])
def test_a_model_can_be_pickled_and_its_copy_waits_for_nothing(steps_on: Side, crossed: bool) -> None:
    rank = HeldRank(steps_on)
    model, optimizer = build(), None
    if crossed:
        model, optimizer = crossing(rank, timeout=SOON)
        optimizer.synchronize()
    else:  # the first step is being watched
        optimizer = wrap(model, rank, cross_barrier=True, timeout=SOON)
    twin, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._state_dict_pre_hooks):
            assert ForkingPickler.dumps(hooks), "as saving the model would"
    if crossed:
        rank.holding = True
        plain_step(model, optimizer, batches()[1])
        assert waits(lambda: model(batches()[2]))
    assert twin(batches()[2]).shape == (4, 3)
    assert_same(list(twin.state_dict().values()), list(before.values()))


def test_a_guard_that_is_given_up_leaves_no_hook_behind() -> None:
    model = build()
    optimizer = wrap(model, LocalCommunicator(), cross_barrier=True)
    clipped_step(model, optimizer, batches()[0])
    assert optimizer._reducers._all[0].overlap.crossing is False
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._state_dict_pre_hooks
        assert not module._load_state_dict_pre_hooks


def test_what_an_evaluation_ran_before_the_first_step_is_not_what_training_runs() -> None:
    class Branched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 3)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            if self.training:  # reads what is the inner module's, past its forward
                return nn.functional.linear(batch, self.inner.weight, self.inner.bias)
            outputs: torch.Tensor = self.inner(batch)
            return outputs

    rank, model = HeldRank(), Branched()
    optimizer = wrap(model, rank, cross_barrier=True, timeout=SOON)
    with torch.no_grad():
        model.eval()(batches()[0])
    model.train()
    plain_step(model, optimizer, batches()[0])
    rank.holding = True
    plain_step(model, optimizer, batches()[1])
    assert waits(lambda: model(batches()[2]))
