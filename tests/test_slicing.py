"""All ranks of a hub try sizes of slices before the first values exist, and agree on one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from ps.session import Assignment
from ps.sharding import plan
from ps.types import BucketSpec, ShardPlan
from tests.contract.test_communicators import LIMIT, HubRanks, Seat, linear, train_two_groups
from workers import slicing
from workers.bucketing import make_buckets
from workers.communicator import Communicator
from workers.ps_communicator import PSCommunicator

SIZES = (128, 64, 256, 1 << 20)
"""Whole cache lines: cuts between them change no bit."""


class AskingSeat(Seat):
    """A session at a server that leaves the size to the workers."""

    def __init__(self, hub: AskedRanks, rank: int) -> None:
        super().__init__(hub, rank)
        self._asked = hub

    def plan(self, buckets: Sequence[BucketSpec], slice_bytes: int = 0, *, trial: bool = False) -> Assignment:
        if not slice_bytes:
            return Assignment(ShardPlan(()), step=0, initialised=False, undecided=True)
        return Assignment(self._asked.cut(buckets, slice_bytes, trial), step=0, initialised=False)


class AskedRanks(HubRanks):
    size = 2

    def __init__(self) -> None:
        super().__init__()
        self.held: tuple[Sequence[BucketSpec], int] | None = None
        self.tried: list[int] = []
        self.chosen: list[int] = []

    def join(self, rank: int) -> Communicator:
        return self.seated(AskingSeat(self, rank))

    def cut(self, buckets: Sequence[BucketSpec], slice_bytes: int, trial: bool) -> ShardPlan:
        with self.lock:
            drawn = plan(buckets, len(self.loops), slice_bytes)
            if (buckets, slice_bytes) != self.held:
                self.held = (buckets, slice_bytes)
                self.tried += [slice_bytes] if trial else []
                for shard, loop in enumerate(self.loops):
                    loop.command(partial(loop.store.assign, drawn.of_shard(shard), buckets)).result(LIMIT)
            self.chosen += [] if trial else [slice_bytes]
            return drawn


def test_every_size_gets_its_turns_and_all_ranks_choose_alike(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slicing, "SIZES", SIZES)
    ranks, plain = AskedRanks(), AskedRanks()
    train = partial(train_two_groups, make=lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    with caplog.at_level(logging.INFO):
        first, second = ranks.run(train)
    ranks.close()
    monkeypatch.setattr(slicing, "SIZES", SIZES[-1:])
    untried, _ = plain.run(train)
    plain.close()
    assert plain.tried == []
    assert ranks.tried == [*SIZES[:2]] * slicing.TURNS, "larger ones cut the model no differently"
    assert ranks.chosen in [[size] * 2 for size in SIZES[:2]]
    (line,) = [record.message for record in caplog.records if "in slices of" in record.message]
    assert line.count(" ms") == 2
    for one, other, without in zip(first, second, untried, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, without)


def test_nothing_is_tried_where_it_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = AskedRanks()
    train = partial(train_two_groups, make=lambda groups: torch.optim.SGD(groups, lr=0.1))
    ranks.run(train)
    ranks.close()
    assert ranks.tried == []
    assert ranks.chosen == [slicing.SIZES[0]] * 2


def test_what_a_trial_moved_is_no_traffic_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(communicator: Communicator) -> tuple[int, int]:
        train_two_groups(communicator, lambda groups: torch.optim.SGD(groups, lr=0.1))
        return communicator.traffic.bytes_sent, communicator.traffic.bytes_received

    counts = []
    for sizes in (SIZES, SIZES[-1:]):
        monkeypatch.setattr(slicing, "SIZES", sizes)
        ranks = AskedRanks()
        counts.append(ranks.run(moved))
        ranks.close()
        assert bool(ranks.tried) == (sizes is SIZES)
    assert counts[0] == counts[1]


def test_a_large_model_is_tried_in_part() -> None:
    ranks = AskedRanks()

    def action(communicator: Communicator) -> list[int]:
        assert isinstance(communicator, PSCommunicator)
        model = linear(0, 64)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        buckets = make_buckets(inner, model.named_parameters(), communicator.allocate, 8, "SGD")
        return [len(slicing._up_to(nbytes, buckets)) for nbytes in (1, 256, 100_000)]

    assert ranks.run(action)[0] == [1, 1, 2]
    ranks.close()
