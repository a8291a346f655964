"""What a training exchanges is the same on every kind of ranks."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import StepHyper
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.collectives import barrier
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.ring.communicator import AllreduceCommunicator
from hubring.workers.optimizer import parameters as trained_parameters
from hubring.workers.optimizer.distributed import DistributedOptimizer
from hubring.workers.reducer import tuning
from tests.contract.models import attached, linear
from tests.reports.training import momentum, seeded, take, values
from tests.support.training.ranks import LIMIT, Ranks, RingRanks


def test_an_optimizer_trains_all_ranks_alike(ranks: Ranks) -> None:
    data = torch.randn(4, ranks.size, 2, 3, generator=torch.Generator().manual_seed(0))

    def train(communicator: Communicator) -> list[torch.Tensor]:
        model = linear(communicator.rank)
        optimizer = DistributedOptimizer(momentum(model), model, communicator=communicator, bucket_bytes=8)
        for step in range(4):
            take(optimizer, model(data[step, communicator.rank]).square().mean())
        return values(model)

    alone = linear(0)
    optimizer = momentum(alone)
    for step in range(4):
        take(optimizer, alone(data[step].flatten(0, 1)).square().mean())
    first, *others = ranks.run(train)
    torch.testing.assert_close(first, values(alone))
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def five_layers() -> nn.Sequential:
    return seeded(
        lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    )


def test_crossing_the_barrier_changes_no_bit(basic: Ranks) -> None:
    def train(communicator: Communicator, cross_barrier: bool) -> list[torch.Tensor]:
        model = five_layers()
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = DistributedOptimizer(
            inner, model, communicator=communicator, bucket_bytes=64, cross_barrier=cross_barrier
        )
        scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, gamma=0.9)
        data = torch.randn(8, 2, 3, generator=torch.Generator().manual_seed(communicator.rank))
        for batch in data:
            take(optimizer, model(batch).square().mean())
            scheduler.step()
        assert optimizer._trained.reducer.overlap.crossing is cross_barrier
        return list(model.state_dict().values())

    crossing, waiting = (type(basic).run_once(partial(train, cross_barrier=cross)) for cross in (True, False))
    for crossed, plain in zip(crossing, waiting, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(crossed, plain, strict=True))


def test_trying_bucket_sizes_changes_the_parameters_by_rounding_at_most(
    basic: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trained_parameters, "BUCKET_BYTES", 16)
    monkeypatch.setattr(tuning, "SIZES", (200, 16, 10**6))

    def train(communicator: Communicator, bucket_bytes: int | None) -> list[torch.Tensor]:
        model = five_layers()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, communicator=communicator, bucket_bytes=bucket_bytes)
        trying, used = _trial_of(optimizer), set()
        assert trying is (bucket_bytes is None and communicator.tunable)
        data = torch.randn(40, 2, 3, generator=torch.Generator().manual_seed(communicator.rank))
        for batch in data:
            used.add(len(optimizer._trained.reducer.exchange._groups))
            take(optimizer, model(batch).square().mean())
        assert not _trial_of(optimizer), "the trial has ended"
        assert len(used) == (3 if trying else 1), "every size was used"
        return values(model)

    first, *others = type(basic).run_once(partial(train, bucket_bytes=None))
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
    torch.testing.assert_close(first, type(basic).run_once(partial(train, bucket_bytes=16))[0])


def _trial_of(optimizer: DistributedOptimizer) -> bool:
    """Whether it is trying sizes still."""
    return (
        optimizer._trained.reducer.tuner is not None and optimizer._trained.reducer.tuner._tuning is not None
    )


class Told(torch.autograd.Function):
    """Passes everything on, and tells when backward comes by."""

    @staticmethod
    def forward(ctx: Any, batch: torch.Tensor, tell: Callable[[], None]) -> torch.Tensor:
        ctx.tell = tell
        return batch.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.tell()
        return gradients[0], None


def test_late_layers_are_exchanged_while_backward_of_early_ones_runs(ranks: Ranks) -> None:
    def train(communicator: Communicator) -> list[str]:
        events: list[str] = []
        push_pull = communicator.push_pull

        def told(bucket: Bucket, hyper: StepHyper) -> Work:
            events.append(bucket.spec.tensors[-1].name)
            return push_pull(bucket, hyper)

        communicator.push_pull = told  # type: ignore[method-assign]
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, communicator=communicator, bucket_bytes=16)
        for _ in range(2):  # a hub watches the first
            events.clear()
            hidden = Told.apply(model[0](torch.ones(2, 3)), lambda: events.append("backward of 0"))
            model[2](model[1](hidden)).sum().backward()
            optimizer.step()
        return events

    for events in ranks.run(train):
        assert events == ["2.bias", "2.weight", "1.bias", "1.weight", "backward of 0", "0.bias", "0.weight"]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 4)), ["bias float32[4]", "bias float32[2]"]),
        (lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), ["1.bias float32[1]"]),
    ],
    ids=["wider", "deeper"],
)
def test_ranks_with_other_models_are_told_the_first_difference(
    ring: Ranks, other: Callable[[], nn.Module], told: list[str]
) -> None:
    def action(communicator: Communicator) -> str:
        model = other() if communicator.rank == 1 else nn.Sequential(nn.Linear(3, 2))
        with pytest.raises(ConfigError) as caught:
            attached(communicator, model)
        return str(caught.value)

    (text,) = set(ring.run(action))
    assert "rank 1" in text
    assert all(words in text for words in told)


def test_traffic_is_that_of_a_ring(ring: Ranks) -> None:
    def action(communicator: Communicator) -> tuple[int, int]:
        for bucket in attached(communicator):
            communicator.push_pull(bucket, {}).wait(LIMIT)
        return communicator.traffic.bytes_sent, communicator.traffic.bytes_received

    assert isinstance(ring, RingRanks)
    exchangers = [2, 1, 2] if ring.hosts else [3, 3, 3]  # on two levels one for each host
    sent = [sum(2 * (n - 1) * nbytes // n for nbytes in (2 * 4, 6 * 4)) for n in exchangers]
    assert ring.run(action) == [(each, each) for each in sent]


class LoneOnARing(RingRanks):
    """The garbage collector runs in one thread at a time."""

    size = 1


def _collects(gone: Callable[[], bool], communicator: Communicator) -> bool:
    """Collects garbage until it is gone.

    A collection does nothing while one runs in another thread, and the ring's threads hold the last
    operation until the next one, such as a barrier.
    """
    deadline = time.monotonic() + LIMIT / 3
    while not gone() and time.monotonic() < deadline:
        barrier(communicator=communicator)
        gc.collect()
    return gone()


def test_a_ring_keeps_nothing_of_models_that_are_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trained_parameters, "BUCKET_BYTES", 16)
    monkeypatch.setattr(tuning, "SIZES", (200, 16, 10**6))
    caplog.set_level(logging.INFO, "hubring")  # the records are kept until the test ends

    def train(communicator: Communicator) -> weakref.ref[torch.Tensor]:
        assert isinstance(communicator, AllreduceCommunicator)
        model = five_layers()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model, communicator=communicator)
        done = False
        while not done:
            done = not _trial_of(optimizer)  # one step more, in which all that is left travels
            take(optimizer, model(torch.ones(2, 3)).square().mean())
        used = {load for group in optimizer._trained.reducer.exchange._groups for load in group.loads}
        kept = {*optimizer._trained.reducer.buckets, *used}
        assert _collects(lambda: set(communicator._means) == kept, communicator), "of sizes that were tried"
        return weakref.ref(model.get_parameter("0.weight"))

    def action(communicator: Communicator) -> bool:
        assert isinstance(communicator, AllreduceCommunicator)
        gone = train(communicator)
        return _collects(lambda: gone() is None and not communicator._means, communicator)

    assert LoneOnARing().run(action) == [True]
