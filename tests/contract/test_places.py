"""Where a rank, its buckets and its memory are."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.hub import PSCommunicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.reports.training import take
from tests.support.training.ranks import HubRanks, PlacedRanks, Ranks, StagedRanks


@pytest.mark.parametrize(("wired", "compress", "held"), [((), "", 1), ((0,), "", 0), ((), "powersgd:1", 0)])
def test_buckets_wait_for_each_other_only_where_none_of_them_travels(
    wired: Collection[int], compress: str, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HubRanks, "compress", compress)
    ranks = HubRanks()
    ranks.wired = wired
    communicator = cast(PSCommunicator, ranks.join(0))
    with communicator.together():
        assert bool(communicator._client._connections._batches) == bool(held)
    assert not communicator._client._connections._batches
    communicator.close(finished=True)
    ranks.close()


def trained(kind: type[HubRanks]) -> tuple[list[torch.Tensor], int, HubRanks]:
    """Rank 0's parameters after three steps of momentum, the bytes that it sent, and what it trained on."""

    def train(communicator: Communicator) -> tuple[list[torch.Tensor], int]:
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(-0.1, 0.1, generator=generator)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = DistributedOptimizer(inner, model, communicator=communicator, bucket_bytes=1 << 20)
        before = 0
        data = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(communicator.rank))
        for batch in data:
            take(optimizer, model(batch).square().mean())
            before = before or communicator.traffic.bytes_sent  # without the first step, which shows means
        return list(model.state_dict().values()), communicator.traffic.bytes_sent - before

    ranks = kind()
    ranks.slice_bytes = 8192  # type: ignore[misc]
    try:
        parameters, sent = ranks.run(train)[0]
    finally:
        ranks.close()
    return parameters, sent, ranks


@pytest.mark.parametrize("kind", [StagedRanks, PlacedRanks])
def test_where_buckets_and_store_are_makes_no_difference_to_the_bits(kind: type[HubRanks]) -> None:
    plain, _, _ = trained(HubRanks)
    parameters, _, _ = trained(kind)
    assert all(torch.equal(one, two) for one, two in zip(parameters, plain, strict=True))


def test_buckets_placed_in_the_shards_memory_are_not_sent() -> None:
    _, whole, _ = trained(HubRanks)
    _, sent, _ = trained(PlacedRanks)
    assert sent < whole / 20


def test_values_are_copied_behind_the_step_that_made_them() -> None:
    _, _, ranks = trained(PlacedRanks)
    assert isinstance(ranks, PlacedRanks)
    slices = len(ranks.shared.slices) if ranks.shared else 0
    assert ranks.memory.device.log.count("step") == 3 * slices * ranks.size


@pytest.mark.slow
def test_no_rank_starts_on_the_ring_before_all_connect(ring: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    gloo, opened = dist.ProcessGroupGloo, threading.Event()

    class LateByOne:
        """Rank 2 has its connections and knows it a moment later."""

        _Options, create_device = gloo._Options, gloo.create_device  # type: ignore[attr-defined]

        def __new__(cls, store: Any, rank: int, *others: Any) -> Any:
            group = gloo(store, rank, *others)
            assert rank != 2 or not opened.wait(0.5)
            return group

    monkeypatch.setattr(dist, "ProcessGroupGloo", LateByOne)
    ring.run(lambda communicator: opened.set())
