"""What holds for ranks on a hub alone."""

from __future__ import annotations

import pytest
import torch

from hubring.ps.core.errors import ConfigError
from hubring.ps.optim.hyperparameters import hyper_of
from hubring.workers.buckets.bucketing import make_buckets
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.contract.models import attached, linear
from tests.support.training.ranks import LIMIT, AggregatingRanks, HubRanks, Seat


def test_a_late_worker_is_refused_if_only_workers_hold_the_parameters() -> None:
    ranks = AggregatingRanks()
    late = ranks.seated(Seat(ranks, 1, late=True))
    with pytest.raises(ConfigError, match="--aggregate"):
        attached(late)
    model = linear(1)
    with pytest.raises(ConfigError, match="--aggregate"):  # before it waits for the others
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, communicator=late)
    late.close(finished=False)
    ranks.close()


def test_a_late_worker_starts_at_the_shards_step() -> None:
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
    assert late.attach(own) == 3
    for communicator in (first, late):
        communicator.close(finished=True)
    ranks.close()
