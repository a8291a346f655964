"""Around a ring with two levels, the ranks of a host exchange first, and one of them with the other hosts."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from functools import reduce
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from hubring.ps.core.errors import HubringError
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.host import meeting
from hubring.workers.communicators.ring.communicator import AllreduceCommunicator
from hubring.workers.communicators.ring.group import RingStore
from hubring.workers.communicators.ring.healing.healing_ring import HealingRing
from hubring.workers.communicators.ring.two_levels import open_two_levels
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.contract.models import attached, linear, squares
from tests.reports.training import momentum, take, values
from tests.support.training.healing import HealingRanks, together
from tests.support.training.notes import SharedNotes
from tests.support.training.ranks import LIMIT, GlooRingRanks, RingRanks, TwoLevelRingRanks


def placed(hosts: str, compress: str = "") -> type[RingRanks]:
    """Returns a class of ranks, each on the host with its letter."""
    given = {"size": len(hosts), "hosts": hosts, "compress": compress}
    return type(f"ring on {hosts}", (TwoLevelRingRanks,), given)


def numbers(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def mean(communicator: Communicator, numel: int) -> Tensor:
    """Returns the mean of all ranks' numbers."""
    assert isinstance(communicator, AllreduceCommunicator)
    flat = numbers(communicator.rank, numel)
    communicator.average("the mean", flat).wait(LIMIT)
    return flat


@pytest.mark.parametrize(
    ("hosts", "numel"), [("AABB", 2_100_001), ("ABAB", 2_100_001), ("AAAB", 1_001), ("ABACB", 10)]
)
def test_a_hosts_ranks_are_added_in_order_and_then_the_hosts(hosts: str, numel: int) -> None:
    """Three pieces, uneven hosts, and a host with one rank."""
    means = placed(hosts).run_once(lambda communicator: mean(communicator, numel))
    parts = [
        reduce(torch.add, (numbers(rank, numel) for rank, one in enumerate(hosts) if one == host))
        for host in dict.fromkeys(hosts)
    ]
    expected = reduce(torch.add, parts) / len(hosts)
    assert all(torch.equal(one, means[0]) for one in means)
    # Gloo adds three hosts or more in another order in each part of a tensor.
    torch.testing.assert_close(means[0], expected, rtol=0 if len(parts) == 2 else 1e-6, atol=0)


@pytest.mark.parametrize(
    ("compress", "rtol"), [("bf16", 0.02), ("int8", 0.0), ("topk:0.1", 0.0), ("powersgd:1", 1e-5)]
)
def test_compressed_gradients_are_those_of_one_level(compress: str, rtol: float) -> None:
    def exchange(communicator: Communicator) -> Tensor:
        (bucket,) = attached(communicator, linear(communicator.rank, 300), bucket_bytes=1 << 20)
        bucket.gradients.copy_(numbers(communicator.rank, bucket.gradients.numel()))
        communicator.push_pull(bucket, {}).wait(LIMIT)
        return bucket.gradients.clone()

    one_level: type[RingRanks] = type("one level", (GlooRingRanks,), {"size": 4, "compress": compress})
    expected = one_level.run_once(exchange)[0]
    for gradients in placed("AAAB", compress).run_once(exchange):
        torch.testing.assert_close(gradients, expected, rtol=rtol, atol=rtol)


def test_hosts_whose_ranks_cannot_share_memory_use_one_level(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dial, calls = meeting._dial, count()

    def fails_once(*given: Any) -> object:
        if next(calls) == 0:
            raise OSError
        return dial(*given)

    monkeypatch.setattr(meeting, "_dial", fails_once)
    with caplog.at_level(logging.WARNING):
        means = placed("AABB").run_once(lambda communicator: mean(communicator, 10))
    expected = reduce(torch.add, (numbers(rank, 10) for rank in range(4))) / 4
    torch.testing.assert_close(means[0], expected)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("--local has no effect: on the hosts of ranks [")


@pytest.mark.parametrize(("hosts", "says"), [("AA", "all ranks are on"), ("AB", "each rank has a host")])
def test_why_one_level_is_logged_once(hosts: str, says: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        placed(hosts).run_once(lambda communicator: mean(communicator, 10))
    assert caplog.text.count(f"--local has no effect: {says}") == 1


@pytest.mark.slow
def test_another_host_that_is_late_is_not_taken_for_the_first_rank_of_the_own() -> None:
    waits = threading.Barrier(4, timeout=LIMIT)

    def action(communicator: Communicator) -> None:
        assert isinstance(communicator, AllreduceCommunicator)
        mean(communicator, 10)
        try:
            if communicator.rank < 2:
                communicator.ring._group.set_timeout(timedelta(seconds=0.1))
                with pytest.raises(HubringError, match="Timed out") as raised:
                    mean(communicator, 10)
                assert "waiting for rank" not in str(raised.value)
        finally:
            waits.wait()

    placed("AABB").run_once(action)


def test_a_later_generation_does_not_repeat_why_there_is_one_level(caplog: pytest.LogCaptureFixture) -> None:
    store = RingStore(SharedNotes(), "ring", LIMIT, generation=2)
    with caplog.at_level(logging.INFO):
        assert open_two_levels(0, 1, store, "host", "127.0.0.1", LIMIT) is None
    assert not caplog.records


STEPS, LOST_IN = 5, 2


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1], ids=["first of its host", "other"])
def test_a_ring_that_heals_keeps_its_two_levels(lost: int) -> None:
    ranks = HealingRanks(4)
    ranks.hosts = "AABB"

    def live(ring: HealingRing) -> Any:
        model = linear(0)
        optimizer = DistributedOptimizer(momentum(model), model, communicator=ring)
        for step in range(STEPS):
            if (ring.rank, ring.size, step) == (lost, 4, LOST_IN):
                return ranks.lose(lost)
            take(optimizer, squares(model, step, ring.rank))
            ring.between_steps(step + 1)
        assert ring._ring is not None
        return values(model), ring._ring.ring.hosts

    trained = [one for one in together(ranks, live) if one is not None]
    alone = linear(0)
    optimizer = momentum(alone)
    for step in range(STEPS):
        left = range(4) if step < LOST_IN else [one for one in range(4) if one != lost]
        if step > LOST_IN:
            left = range(3)
        take(optimizer, torch.stack([squares(alone, step, rank) for rank in left]).mean())
    for one, hosts in trained:
        assert hosts == 2
        torch.testing.assert_close(one, values(alone))
        torch.testing.assert_close(one, trained[0][0], rtol=0, atol=0)
