"""What holds for ranks on a hub alone."""

from __future__ import annotations

import pytest
import torch

from hubring.ps.core.errors import ConfigError
from hubring.ps.optim.hyperparameters import hyper_of
from hubring.workers.buckets.bucketing import make_buckets
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.contract.models import attached, linear
from tests.support.training.ranks import LIMIT, AggregatingRanks, HubRanks, Ranks, Seat


def test_a_hub_steps_with_the_hyperparameters_that_come_along(hub: Ranks) -> None:
    def action(communicator: Communicator) -> None:
        buckets = attached(communicator)
        for lr in (1.0, 0.5):
            hyper = hyper_of(torch.optim.SGD([torch.zeros(1)], lr=lr).param_groups[0], "SGD")
            before = [bucket.values.clone() for bucket in buckets]
            for bucket in buckets:
                bucket.gradients.fill_(communicator.rank)
            for bucket, work in [(bucket, communicator.push_pull(bucket, hyper)) for bucket in buckets]:
                work.wait(LIMIT)
                torch.testing.assert_close(bucket.values, before[bucket.spec.index] - lr)

    hub.run(action)


def test_a_second_optimizer_on_one_hub_is_refused(hub: Ranks) -> None:
    def action(communicator: Communicator) -> None:
        attached(communicator)
        with pytest.raises(ConfigError, match="the second DistributedOptimizer"):
            attached(communicator)

    hub.run(action)


def test_nobody_joins_late_where_only_the_workers_hold_the_parameters() -> None:
    ranks = AggregatingRanks()
    late = ranks.seated(Seat(ranks, 1, late=True))
    with pytest.raises(ConfigError, match="--aggregate"):
        attached(late)
    model = linear(1)
    with pytest.raises(ConfigError, match="--aggregate"):  # before it waits for the others
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, communicator=late)
    late.close(finished=False)
    ranks.close()


def test_who_joins_late_begins_where_the_shards_are() -> None:
    """The coordinator, which hears of steps by heartbeats, still takes them for at step 0."""
    ranks = HubRanks()
    ranks.see(0)
    first, late = (ranks.seated(Seat(ranks, rank, late=rank > 0)) for rank in (0, 1))
    hyper = hyper_of(torch.optim.SGD([torch.zeros(1)], lr=0.1).param_groups[0], "SGD")
    buckets = attached(first)
    for _ in range(3):
        for bucket in buckets:
            first.push_pull(bucket, hyper).wait(LIMIT)
    ranks.see(0, 1)
    model = linear(1)
    named = list(model.named_parameters())
    own = make_buckets(torch.optim.SGD(model.parameters(), lr=0.1), named, late.allocate, 8, "SGD")
    assert late.attach(own).step == 3
    for communicator in (first, late):
        communicator.close(finished=True)
    ranks.close()
