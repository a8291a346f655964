"""What a step across the barrier means to scripts, and what goes wrong."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.errors import ConfigError, DeadlineExceeded, Preempted, RingBroken
from hubring.ps.core.types import StepHyper
from hubring.ps.core.work import Work
from hubring.ps.observe import logs
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.collectives import barrier
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.launchers.placement import Placement
from hubring.workers.reducer import exchange
from hubring.workers.runtime import context
from hubring.workers.runtime.training_record import Record
from hubring.workers.runtime.worker import Worker
from tests.support.fakes.clock import FakeTime
from tests.support.fakes.hub import FakeHub, FakeRank
from tests.support.training.held_rank import (
    SOON,
    HeldRank,
    Side,
    bucket_of,
    crossing,
    in_flight,
    under_way,
    waits,
)
from tests.support.training.training_scripts import (
    assert_same,
    batches,
    build,
    clipped_step,
    loss_of,
    parameters_of,
    plain_step,
    scaled_step,
    sgd,
    wrap,
)


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
    _, optimizer = under_way(rank, after_step=told.append)
    assert len(rank.held) == len(optimizer._trained.reducer.buckets)
    assert told == [1, 2]
    assert optimizer.completed_steps == 2


def test_a_stop_after_a_step_leaves_no_exchange_pending() -> None:
    def stop(step: int) -> None:
        if step == 2:
            rank.let_through()
            raise Preempted("stopped on request")

    rank = HeldRank()
    model, optimizer = crossing(rank, after_step=stop)
    rank.holding = True
    with pytest.raises(Preempted):
        plain_step(model, optimizer, batches()[1])
    assert in_flight(optimizer) == []


def test_where_the_first_bucket_tells_of_the_end_a_step_waits_for_it() -> None:
    class Draining(HeldRank):
        draining = False

    rank = Draining()
    model, optimizer = crossing(rank, timeout=SOON)
    rank.holding = True
    loss_of(model, batches()[1]).backward()
    with pytest.raises(DeadlineExceeded, match="bucket 0 "):
        optimizer.step()


# What goes wrong


def test_a_failed_exchange_is_raised_by_the_module_that_needs_it_and_by_all_who_wait_later() -> None:
    class Failing(HeldRank):
        def push_pull(self, bucket: Bucket, hyper: StepHyper) -> Work:
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
    model, _ = under_way(rank)
    with pytest.raises(
        ConfigError, match=r"parameter 4\.(bias|weight) was used before its exchange was done"
    ):
        (model.get_parameter("4.weight").sum() + model.get_parameter("4.bias").sum()).backward()


def test_a_step_without_a_backward_counts_its_wait_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(HeldRank):
        def push_pull(self, bucket: Bucket, hyper: StepHyper) -> Work:
            super().push_pull(bucket, hyper)
            return Second("answers after a second")

    class Second(Work):
        def wait(self, timeout: float | None = None) -> None:
            clock.advance(1.0)

    clock = FakeTime()
    now = SimpleNamespace(monotonic=clock.now, monotonic_ns=lambda: round(clock.now() * 1e9))
    _, optimizer = crossing(Slow())
    optimizer.synchronize()
    before = optimizer.exchange_seconds
    monkeypatch.setattr(exchange, "time", now)
    began = clock.now()
    for _ in range(3):
        optimizer.step()
    assert clock.now() - began == 2.0 * len(optimizer._trained.reducer.buckets), (
        "the third step's exchange is still on its way"
    )
    assert optimizer.exchange_seconds - before == pytest.approx(clock.now() - began)


def test_a_model_that_never_runs_itself_is_refused() -> None:
    model = build()
    optimizer = wrap(model, FakeRank(FakeHub(1)), cross_barrier=True)
    torch.func.functional_call(model[0], dict(model[0].named_parameters()), batches()[0]).sum().backward()
    before = parameters_of(model)
    with pytest.raises(ConfigError, match=r"no module that contains 4\.bias ran its forward"):
        optimizer.step()
    assert optimizer.completed_steps == 0
    assert_same(parameters_of(model), before)


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
    with pytest.raises(ConfigError, match=r"hooks on step\(\)"):
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
        assert "despite cross_barrier" in caplog.text


def test_where_workers_step_clipping_that_begins_later_is_an_error_with_its_mend() -> None:
    model, optimizer = crossing(FakeRank(FakeHub(1, "worker")))
    with pytest.raises(ConfigError, match=r"clipping.*cross_barrier=False"):
        clipped_step(model, optimizer, batches()[1])


def test_a_barrier_of_the_script_comes_after_its_last_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = HeldRank()
    model, optimizer = crossing(rank, timeout=SOON)
    place = Worker(
        WorkerConfig(), Placement(), rank, torch.device("cpu"), None, Record(None), logs.LogOrigin()
    )
    monkeypatch.setattr(context, "_current", place)
    place.adopt(optimizer)
    rank.holding = True
    plain_step(model, optimizer, batches()[1])
    assert waits(barrier)
    assert not any("barrier" in entry for entry in rank.log)
