"""All ranks of a hub try sizes of slices before the first values exist, and agree on one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from hubring.ps.client.session import Assignment
from hubring.ps.core.errors import DeadlineExceeded, HubringError, JobFailed
from hubring.ps.core.types import BucketSpec, Member, ShardPlan, Slice, Slicing, TensorSpec, View
from hubring.ps.job.sharding import plan
from hubring.ps.shard.loop import ShardLoop
from hubring.workers.collectives.groups import barrier
from hubring.workers.communicators import slice_sizes
from hubring.workers.communicators import slice_tuning as slicing
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.slice_tuning import SliceTrial
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.contract.models import attached, linear
from tests.reports.training import Job, mlp, prepared, trained
from tests.support.training.ranks import LIMIT, HubRanks, Seat, of_shard

SIZES = (128, 64, 256, 1 << 20)
"""Whole cache lines: cuts between them change no bit."""


LONG = 1e6
"""Seconds in which every turn has its time, however slow the machine."""


def train(communicator: Communicator) -> list[torch.Tensor]:
    job = Job(communicator)
    return trained(job, *prepared(job, mlp()))


class AskingSeat(Seat):
    """A session at a server that leaves the size to the workers; `late`, it has been found out meanwhile."""

    def __init__(self, hub: AskedRanks, rank: int, late: bool = False) -> None:
        super().__init__(hub, rank, late)
        self.asked = 0
        self._asked = hub

    def plan(
        self, buckets: Sequence[BucketSpec], slicing: Slicing | None = None, *, trial: int = 0
    ) -> Assignment:
        self.asked += 1
        if self.late and self.asked > 2:
            slicing = Slicing(SIZES[-1])
        if slicing is None:
            return Assignment(ShardPlan(()), step=0, initialised=False, undecided=True)
        return Assignment(self._asked.cut(buckets, slicing, trial), step=0, initialised=False)


class AskedRanks(HubRanks):
    size = 2

    def __init__(self) -> None:
        super().__init__()
        self.held: tuple[Sequence[BucketSpec], Slicing] | None = None
        self.tried: list[int] = []
        self.chosen: list[int] = []

    def join(self, rank: int) -> Communicator:
        return self.seated(AskingSeat(self, rank))

    def cut(self, buckets: Sequence[BucketSpec], slicing: Slicing, trial: int) -> ShardPlan:
        with self.lock:
            slice_bytes = slicing.slice_bytes
            drawn = plan(buckets, slicing.shards or len(self.loops), slice_bytes)
            if (buckets, slicing) != self.held:
                self.held = (buckets, slicing)
                self.tried += [slice_bytes] if trial else []
                for shard, loop in enumerate(self.loops):
                    mine = of_shard(drawn, shard)
                    loop.command(partial(loop.store.assign, mine, buckets)).result(LIMIT)
            self.chosen += [] if trial else [slice_bytes]
            return drawn


def asked(action: Callable[[Communicator], Any] = train, **settings: Any) -> tuple[AskedRanks, list[Any]]:
    """Runs an action on all ranks; returns them, and their results."""
    ranks = AskedRanks()
    vars(ranks).update(settings)
    try:
        return ranks, ranks.run(action)
    finally:
        ranks.close()


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every size is tried to the end."""
    monkeypatch.setattr(slicing, "SIZES", SIZES)
    monkeypatch.setattr(slicing, "BUDGET", LONG)


@pytest.mark.usefixtures("sizes")
def test_every_size_gets_its_turns_and_all_ranks_choose_alike(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        ranks, (first, second) = asked()
    monkeypatch.setattr(slicing, "SIZES", SIZES[-1:])
    plain, (untried, _) = asked()
    assert plain.tried == []
    assert ranks.tried == [*SIZES[:2]] * slice_sizes.TURNS, "larger ones cut the model no differently"
    assert ranks.chosen in [[size] * 2 for size in SIZES[:2]]
    (line,) = [record.message for record in caplog.records if "in slices of" in record.message]
    assert line.count(" ms") == 2
    for one, other, without in zip(first, second, untried, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, without)


def test_bytes_moved_by_a_trial_are_not_counted_as_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(communicator: Communicator) -> tuple[int, int]:
        train(communicator)
        found = communicator.traffic.bytes_sent, communicator.traffic.bytes_received
        barrier(communicator=communicator)  # a rank that leaves makes the others exchange what they know
        return found

    counts = []
    monkeypatch.setattr(slicing, "BUDGET", LONG)
    for sizes in (SIZES, SIZES[-1:]):
        monkeypatch.setattr(slicing, "SIZES", sizes)
        ranks, moves = asked(moved)
        counts.append(moves)
        assert bool(ranks.tried) == (sizes is SIZES)
    assert counts[0] == counts[1]


def test_nothing_is_tried_in_shared_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slicing, "SIZES", SIZES)
    monkeypatch.setattr(slice_sizes, "SIZES_IN_MEMORY", (1 << 20, 32))
    monkeypatch.setattr(slice_sizes, "OVERHEAD", 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with caplog.at_level(logging.INFO):
        ranks, _ = asked(wired=())
    assert ranks.tried == []
    assert ranks.chosen == [32] * 2, "larger ones leave one of the two shards with more"
    (line,) = [record.message for record in caplog.records if "in slices of" in record.message]
    assert "shared memory" in line
    assert "cores" not in line


def test_in_shared_memory_shards_without_a_core_of_their_own_hold_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slice_sizes, "SIZES_IN_MEMORY", (32,))
    ends = []
    for cores in (1, 2):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        with caplog.at_level(logging.INFO):
            ranks, (first, _) = asked(wired=())
        ends.append(first)
        assert [loop.store.stats().pushes > 0 for loop in ranks.loops] == [True, cores == 2]
    assert "on 1 of 2 shards" in caplog.text
    for one, two in zip(*ends, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("buckets", "shards", "size"),
    [
        ([100], 1, 64),
        ([100], 2, 64),
        ([100], 4, 32),
        ([50, 50], 2, 32),  # of 64, one shard would have all of what comes last
        ([25, 25, 25, 22], 2, 16),
        ([25, 25, 25], 2, 16),  # of 32, one shard would have two and the other one
        ([25, 25, 25, 12], 2, 8),
        ([4] * 25, 2, 4),  # larger ones would cut the buckets no differently
        ([0.04], 4, 4),
    ],
)
def test_shared_memory_has_few_slices_that_give_all_shards_alike(
    buckets: list[float], shards: int, size: int
) -> None:
    specs = [
        BucketSpec(index, "float32", "SGD", (TensorSpec("one", (int(mib * (1 << 18)),)),))
        for index, mib in enumerate(buckets)
    ]
    assert slice_sizes.in_memory(specs, shards) == size << 20


def test_on_a_wire_too_slow_for_one_rank_all_keep_the_default_after_one_slice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def pull(trial: SliceTrial, slices: Sequence[Slice]) -> float:
        pulled.append(len(slices))
        return slice_sizes.BUDGET if trial._communicator.rank == 1 else 1e-6

    pulled: list[int] = []
    monkeypatch.setattr(slicing, "SIZES", SIZES)
    monkeypatch.setattr(SliceTrial, "_pull", pull)
    with caplog.at_level(logging.INFO):
        ranks, _ = asked()
    assert pulled == [len(ranks.loops)] * 4, "a slice of each shard, to warm up and to count, by two ranks"
    assert ranks.tried == [SIZES[0]]
    assert ranks.chosen == [SIZES[0]] * 2
    assert "takes too long" in caplog.text


@pytest.mark.usefixtures("sizes")
def test_the_trial_leaves_the_models_gradients_alone() -> None:
    def action(communicator: Communicator) -> list[torch.Tensor]:
        model = linear(communicator.rank, 64)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 7.0)
        DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model, communicator=communicator, bucket_bytes=8
        )
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    ranks, results = asked(action)
    for gradients in results:
        assert [bool((gradient == 7.0).all()) for gradient in gradients] == [True, True]
    assert len(ranks.tried) > 1


def test_a_late_worker_asks_again_until_the_others_have_chosen() -> None:
    ranks = AskedRanks()
    seat = AskingSeat(ranks, 0, late=True)
    communicator = ranks.seated(seat)
    attached(communicator)
    communicator.close(finished=True)
    ranks.close()
    assert seat.asked == 3
    assert ranks.tried == []


def test_a_late_worker_times_out_if_the_others_never_choose() -> None:
    ranks = AskedRanks()
    communicator = ranks.seated(AskingSeat(ranks, 0, late=True))
    communicator.timeout = -1.0
    with pytest.raises(DeadlineExceeded, match="did not complete a step"):
        attached(communicator)
    communicator.close(finished=False)
    ranks.close()


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("how", ["dropped", "failed"])
def test_a_rank_lost_before_its_turn_does_not_hold_up_the_others(how: str) -> None:
    ranks = AskedRanks()

    def lose(loop: ShardLoop) -> None:
        """What the coordinator tells the shards."""
        alone = View(2, (Member(0, 1),))
        loop.send(loop.store.on_view(alone) if how == "dropped" else loop.store.fail("rank 1 is gone"))

    def action(communicator: Communicator) -> str:
        if communicator.rank == 0:
            try:
                attached(communicator, linear(0, 64))
            except HubringError as error:
                return f"{type(error).__name__}: {error}"
            return "went on"
        for loop in ranks.loops:
            loop.command(partial(lose, loop)).result(LIMIT)
        return "left"

    told, _ = ranks.run(action)
    ranks.close()
    if how == "dropped":
        assert told == "went on"
        assert ranks.chosen[0] in SIZES
    else:
        assert told.startswith(JobFailed.__name__)
        assert "rank 1 is gone" in told
