"""step() leaves its exchange under way, and whoever reads a parameter waits for it alone."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal

import pytest
import torch
from torch import nn

from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.errors import ConfigError, DeadlineExceeded, Preempted, RingBroken
from hubring.ps.core.types import Hyper
from hubring.ps.core.work import Work
from hubring.ps.observe import logs
from hubring.workers.buckets.bucketing import Bucket
from hubring.workers.collectives import barrier
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.launchers.placement import Placement
from hubring.workers.optimizer import exchange
from hubring.workers.optimizer.distributed import DistributedOptimizer
from hubring.workers.runtime import context
from hubring.workers.runtime.record import Record
from tests.support.fake_hub import FakeHub, FakeRank
from tests.workers.optimizer.test_optimizer import (
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
    scaled_step,
    sgd,
    wrap,
)

Side = Literal["server", "worker"]
Step = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], None]
SOON = 0.01
"""Seconds after which a wait for something that is held back is given up."""


class HeldRank(FakeRank):
    """A lone rank whose answers are held back while `holding`, until they are let through."""

    def __init__(self, steps_on: Side = "server") -> None:
        super().__init__(FakeHub(1, steps_on))
        self.holding = False
        self.held: dict[int, Callable[[], None]] = {}

    def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
        if not self.holding:
            return super().push_pull(bucket, hyper)
        self.log.append(f"push {bucket.spec.index}")
        work = Work(f"bucket {bucket.spec.index}")

        def answer() -> None:
            super(HeldRank, self).push_pull(bucket, hyper).wait(0)
            work.complete_part()

        self.held[bucket.spec.index] = answer
        return work

    def let_through(self, *indices: int) -> None:
        for index in indices or list(self.held):
            self.held.pop(index)()


def crossing(rank: FakeRank, **kwargs: Any) -> tuple[nn.Sequential, DistributedOptimizer]:
    """A model of three layers in five buckets or so, past its first step."""
    model = build()
    optimizer = wrap(model, rank, cross_barrier=True, **kwargs)
    plain_step(model, optimizer, batches()[0])
    return model, optimizer


def bucket_of(optimizer: DistributedOptimizer, name: str) -> int:
    (index,) = [
        bucket.spec.index
        for bucket in optimizer._buckets
        if name in {tensor.name for tensor in bucket.spec.tensors}
    ]
    return index


def waits(action: Callable[[], object]) -> bool:
    """Whether it gives up in vain on an answer that is held back."""
    try:
        action()
    except DeadlineExceeded:
        return True
    return False


# The same training


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
    assert not any(optimizer._exchange.has_left(bucket) for bucket in optimizer._buckets)


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
    assert order == [str(bucket.spec.index) for bucket in reversed(optimizer._buckets)]
    assert optimizer._buckets[-1].spec.tensors[-1].name.startswith("0.")


@pytest.mark.parametrize("steps_on", ["server", "worker"])
@pytest.mark.parametrize("zero", ["optimizer", "model"])
def test_gradients_on_their_way_are_left_alone_until_answered(steps_on: Side, zero: str) -> None:
    rank = HeldRank(steps_on)
    model, optimizer = crossing(rank, timeout=SOON)
    rank.holding = True
    loss_of(model, batches()[1]).backward()
    given = [bucket.gradients.clone() for bucket in optimizer._buckets]
    optimizer.step()
    (optimizer if zero == "optimizer" else model).zero_grad()
    assert_same([bucket.gradients for bucket in optimizer._buckets], given)
    rank.let_through()
    optimizer.synchronize()
    if zero == "optimizer":
        assert not any(bucket.gradients.any() for bucket in optimizer._buckets)


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
    assert optimizer._crossing is False
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


# Steps


@pytest.mark.parametrize("steps_on", ["server", "worker"])
def test_a_learning_rate_set_after_the_step_is_for_the_next_one(steps_on: Side) -> None:
    rank, plain = HeldRank(steps_on), build()
    model, optimizer = crossing(rank)
    reference = sgd(plain)
    plain_step(plain, reference, batches()[0])
    rank.holding = True
    plain_step(model, optimizer, batches()[1])
    plain_step(plain, reference, batches()[1])
    optimizer.param_groups[0]["lr"] = 100.0
    rank.let_through()
    optimizer.synchronize()
    torch.testing.assert_close(parameters_of(model), parameters_of(plain))


def test_a_step_is_completed_before_its_answers_are_here() -> None:
    rank, told = HeldRank(), list[int]()
    model, optimizer = crossing(rank, after_step=told.append)
    rank.holding = True
    plain_step(model, optimizer, batches()[1])
    assert len(rank.held) == len(optimizer._buckets)
    assert told == [1, 2]
    assert optimizer.completed_steps == 2


def test_who_is_stopped_after_a_step_leaves_it_whole() -> None:
    def stop(step: int) -> None:
        if step == 2:
            rank.let_through()
            raise Preempted("stopped on request")

    rank = HeldRank()
    model, optimizer = crossing(rank, after_step=stop)
    rank.holding = True
    with pytest.raises(Preempted):
        plain_step(model, optimizer, batches()[1])
    assert not any(optimizer._exchange.has_left(bucket) for bucket in optimizer._buckets)


def test_where_the_first_bucket_tells_of_the_end_a_step_waits_for_it() -> None:
    class Draining(HeldRank):
        drains = True

    rank = Draining()
    model, optimizer = crossing(rank, timeout=SOON)
    rank.holding = True
    loss_of(model, batches()[1]).backward()
    with pytest.raises(DeadlineExceeded, match="bucket 0 "):
        optimizer.step()


# What goes wrong


def test_a_failed_exchange_is_raised_by_the_module_that_needs_it_and_by_all_who_wait_later() -> None:
    class Failing(HeldRank):
        def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
            work = super().push_pull(bucket, hyper)
            if self.holding and bucket.spec.index == late:
                work.fail(RingBroken("rank 1 is gone"))
            return work

    rank, late = Failing(), 0
    model, optimizer = crossing(rank)
    late = bucket_of(optimizer, "4.weight")
    rank.holding = True
    plain_step(model, optimizer, batches()[1])
    rank.let_through(*(rank.held.keys() - {late}))
    model[0](batches()[2])
    for wait in (lambda: model(batches()[2]), optimizer.synchronize, model.state_dict):
        with pytest.raises(RingBroken, match="rank 1 is gone"):
            wait()


def test_a_parameter_that_is_used_past_its_module_is_an_error_with_its_mend() -> None:
    rank = HeldRank()
    model, optimizer = crossing(rank)
    rank.holding = True
    plain_step(model, optimizer, batches()[1])
    with pytest.raises(ConfigError, match=r"parameter 4\.(bias|weight) was used before it was back"):
        (model.get_parameter("4.weight").sum() + model.get_parameter("4.bias").sum()).backward()


@pytest.mark.parametrize("steps_on", ["server", "worker"])
def test_what_autograd_saved_of_parameters_that_were_on_their_way_is_refused(steps_on: Side) -> None:
    rank = HeldRank(steps_on)
    model, optimizer = crossing(rank)
    rank.holding = True
    plain_step(model, optimizer, batches()[1])
    penalty = model.get_parameter("0.weight").square().sum()  # before any forward has waited
    rank.let_through()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss_of(model, batches()[2]) + penalty).backward()


def test_a_step_without_a_backward_counts_its_wait_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(HeldRank):
        def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
            super().push_pull(bucket, hyper)
            return Second("answers after a second")

    class Second(Work):
        def wait(self, timeout: float | None = None) -> None:
            clock.seconds += 1.0

    class Clock:
        seconds = 0.0

        def monotonic(self) -> float:
            return self.seconds

        def monotonic_ns(self) -> int:
            return round(self.seconds * 1e9)

    clock = Clock()
    _, optimizer = crossing(Slow())
    optimizer.synchronize()
    before = optimizer.exchange_seconds
    monkeypatch.setattr(exchange, "time", clock)
    clock.seconds = 0.0
    for _ in range(3):
        optimizer.step()
    assert clock.seconds == 2.0 * len(optimizer._buckets), "the third step's exchange is still on its way"
    assert optimizer.exchange_seconds - before == pytest.approx(clock.seconds)


def test_a_model_that_never_runs_itself_is_refused() -> None:
    model = build()
    optimizer = wrap(model, FakeRank(FakeHub(1)), cross_barrier=True)
    torch.func.functional_call(model[0], dict(model[0].named_parameters()), batches()[0]).sum().backward()
    with pytest.raises(ConfigError, match=r"no module around 4\.bias ran its forward"):
        optimizer.step()


def test_without_a_model_there_is_nothing_to_wait() -> None:
    model = build()
    with pytest.raises(ConfigError, match="needs the model"):
        DistributedOptimizer(sgd(model), communicator=LocalCommunicator(), cross_barrier=True)


def test_optimizers_that_step_as_a_whole_are_refused() -> None:
    class Own(torch.optim.SGD):
        """Steps in some way of its own."""

    model = build()
    for inner in (torch.optim.LBFGS(model.parameters()), Own(model.parameters(), lr=0.1)):
        with pytest.raises(ConfigError, match="cross_barrier=True"):
            wrap(model, LocalCommunicator(), inner=inner, cross_barrier=True)
    hooked = sgd(model)
    optimizer = wrap(model, LocalCommunicator(), inner=hooked, cross_barrier=True)
    plain_step(model, optimizer, batches()[0])
    hooked.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="hooks on its step"):
        plain_step(model, optimizer, batches()[1])


def test_where_workers_step_a_script_that_clips_or_scales_has_step_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scaled = scaled_step(torch.amp.GradScaler("cpu", init_scale=2.0**10))
    for step in (clipped_step, scaled):
        caplog.clear()
        model, plain = build(), build()
        optimizer = wrap(model, LocalCommunicator(), cross_barrier=True)
        reference = wrap(plain, LocalCommunicator())
        with caplog.at_level(logging.INFO):
            for batch in batches():
                step(model, optimizer, batch)
                step(plain, reference, batch)
                assert_same(parameters_of(model), parameters_of(plain))
        assert "in spite of cross_barrier" in caplog.text


def test_where_workers_step_clipping_that_begins_later_is_an_error_with_its_mend() -> None:
    model, optimizer = crossing(FakeRank(FakeHub(1, "worker")))
    with pytest.raises(ConfigError, match=r"clipping.*cross_barrier=False"):
        clipped_step(model, optimizer, batches()[1])


def test_a_barrier_of_the_script_comes_after_its_last_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = HeldRank()
    model, optimizer = crossing(rank, timeout=SOON)
    place = context.Context(
        WorkerConfig(), Placement(), rank, torch.device("cpu"), None, Record(None), logs.Place()
    )
    monkeypatch.setattr(context, "_current", place)
    place.adopt(optimizer)
    rank.holding = True
    plain_step(model, optimizer, batches()[1])
    assert waits(barrier)
    assert not any("barrier" in entry for entry in rank.log)
