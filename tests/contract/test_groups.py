"""Groups of ranks, and ranks that have joined: the others go on without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hubring.ps.core.errors import ConfigError, UsageError
from hubring.ps.core.messages import Call, Collective, ReduceOp
from hubring.workers import collectives as c
from hubring.workers.communicators.base import CollectiveWork, Communicator
from hubring.workers.communicators.ring.healing.healing_ring import HealingRing
from tests.contract.numbers import LARGE
from tests.support.processes.stopwatch import until
from tests.support.training.healing import HealingRanks, together
from tests.support.training.rank_pool import RankPool


def test_a_group_does_everything_among_its_members_alone(three: RankPool) -> None:
    def action(communicator: Communicator) -> None:
        rank = communicator.rank
        group = c.new_group([2, 0], communicator=communicator)
        assert (group.ranks, group.size(), group.included()) == ((0, 2), 2, rank != 1)
        if rank == 1:
            with pytest.raises(UsageError, match=r"rank 1 is not in the group of ranks \[0, 2\]"):
                c.allreduce(torch.ones(1), group=group, communicator=communicator)
            with pytest.raises(UsageError, match=r"rank 1 is not in"):
                group.rank()
        else:
            own = torch.full((2, 2), float(rank))
            assert group.rank() == rank // 2
            assert c.allreduce(own, group=group, communicator=communicator)[0, 0] == 1.0
            assert len(c.allgather(own, group=group, communicator=communicator)) == 4
            assert c.broadcast(own, 2, group=group, communicator=communicator)[0, 0] == 2.0
            assert (c.reduce(own, 2, group=group, communicator=communicator) is None) == (rank == 0)
            assert (c.gather(own, 2, group=group, communicator=communicator) is None) == (rank == 0)
            dealt = [own, own + 1] if rank == 2 else None
            assert c.scatter(dealt, 2, group=group, communicator=communicator)[0, 0] == 2 + rank // 2
            assert len(c.reduce_scatter(own, group=group, communicator=communicator)) == 1
            output, _ = c.alltoall(own, group=group, communicator=communicator)
            assert output[:, 0].tolist() == [0.0, 2.0]
            c.barrier(group=group, communicator=communicator)
            with pytest.raises(UsageError, match=r"root is 1, which is not in the group of ranks \[0, 2\]"):
                c.broadcast(own, 1, group=group, communicator=communicator)
        assert c.allreduce(torch.tensor(1.0), ReduceOp.SUM, communicator=communicator) == 3.0
        c.remove_group(group, communicator=communicator)
        with pytest.raises(UsageError, match="was removed: make a new group"):
            c.barrier(group=group, communicator=communicator)
        with pytest.raises(UsageError, match="was already removed"):
            c.remove_group(group, communicator=communicator)

    three.run(action)
    three.run(action)  # what was removed may be made again


def test_groups_that_overlap_do_not_wait_for_each_other(three: RankPool) -> None:
    def action(communicator: Communicator) -> list[float]:
        rank = communicator.rank
        groups = [c.new_group(pair, communicator=communicator) for pair in ([0, 1], [1, 2], [0, 2])]
        mine = [group for group in groups if group.included()]
        if rank % 2:
            mine.reverse()
        works = {
            group.ranks: c.allreduce_async(
                torch.tensor(float(rank)), ReduceOp.SUM, group=group, communicator=communicator
            )
            for group in mine
        }
        totals = [works[ranks].get().item() for ranks in sorted(works)]
        for group in groups:
            c.remove_group(group, communicator=communicator)
        return totals

    assert three.run(action) == [[1.0, 2.0], [1.0, 3.0], [2.0, 3.0]]


def test_a_group_made_twice_is_there_until_it_is_removed_twice(three: RankPool) -> None:
    def action(communicator: Communicator) -> list[float]:
        groups = [c.new_group([0, 1], communicator=communicator) for _ in range(2)]
        c.remove_group(groups[0], communicator=communicator)
        totals = []
        if communicator.rank < 2:
            own = torch.tensor(1.0)
            totals = [c.allreduce(own, ReduceOp.SUM, group=groups[1], communicator=communicator).item()]
        c.remove_group(groups[1], communicator=communicator)
        return totals

    assert three.run(action) == [[2.0], [2.0], []]


def test_remove_group_waits_for_the_operations_started_in_the_group(three: RankPool) -> None:
    def action(communicator: Communicator) -> list[float]:
        group, works = c.new_group([0, 1], communicator=communicator), []
        if group.included():
            for turn in range(20):
                own = torch.full((LARGE * 10,), float(turn))
                works.append(
                    c.allreduce_async(own, name=f"turn {turn}", group=group, communicator=communicator)
                )
        c.remove_group(group, communicator=communicator)
        return [work.get()[0].item() for work in works]

    whole = [float(turn) for turn in range(20)]
    assert three.run(action) == [whole, whole, []]


def test_a_group_of_all_and_a_group_of_one_are_groups(three: RankPool) -> None:
    def action(communicator: Communicator) -> tuple[float, float]:
        everybody = c.new_group(range(3), communicator=communicator)
        alone = [c.new_group([rank], communicator=communicator) for rank in range(3)][communicator.rank]
        own = torch.tensor(float(communicator.rank))
        total = c.allreduce(own, ReduceOp.SUM, group=everybody, communicator=communicator)
        return total.item(), c.allreduce(own, ReduceOp.SUM, group=alone, communicator=communicator).item()

    assert three.run(action) == [(3.0, 0.0), (3.0, 1.0), (3.0, 2.0)]


@pytest.mark.parametrize("ranks", [[], [0, 0], [1, 3], [-1]])
def test_a_group_that_cannot_be_is_refused(three: RankPool, ranks: list[int]) -> None:
    with pytest.raises(UsageError, match="pass one or more different ranks from 0 to 2"):
        c.new_group(ranks, communicator=three.communicators[0])


def test_a_collective_takes_no_argument_that_it_does_not_have(three: RankPool) -> None:
    for unknown in ({"root": 1}, {"then": len}, {"grup": None}):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{next(iter(unknown))}'; expected"):
            c.allgather(torch.ones(1), communicator=three.communicators[0], **unknown)


# Join


@pytest.mark.slow
def test_a_rank_without_data_joins_and_the_others_go_on(pool: RankPool) -> None:
    """Rank r has r + 1 batches."""
    size = pool.size

    def action(communicator: Communicator) -> tuple[list[float], int]:
        rank, totals = communicator.rank, []
        for _ in range(rank + 1):
            totals.append(c.allreduce(torch.full((2,), 6.0), communicator=communicator)[0].item())
            c.grouped_allreduce([torch.ones(LARGE), torch.tensor(1)], ReduceOp.SUM, communicator=communicator)
            c.reduce(torch.ones(2), size - 1, communicator=communicator)
            c.barrier_async(communicator=communicator).wait()
        return totals, c.join(communicator=communicator)

    for _ in range(2):
        for rank, (totals, last) in enumerate(pool.run(action)):
            assert totals == [pytest.approx(6.0 * (size - step) / size) for step in range(rank + 1)]
            assert last == size - 1


CANNOT_MISS: dict[str, Callable[[Communicator], object]] = {
    "allgather": lambda here: c.allgather(torch.ones(2), communicator=here),
    "gather": lambda here: c.gather(torch.ones(2), communicator=here),
    "broadcast": lambda here: c.broadcast(torch.ones(2), 0, communicator=here),
    "broadcast from": lambda here: c.broadcast(torch.ones(2), 1, communicator=here),
    "scatter": lambda here: c.scatter([torch.ones(1)] * 3, communicator=here),
    "reduce": lambda here: c.reduce(torch.ones(2), 1, communicator=here),
    "reduce_scatter": lambda here: c.reduce_scatter(torch.ones(3), communicator=here),
    "alltoall": lambda here: c.alltoall(torch.ones(3), communicator=here),
    "group": lambda here: c.new_group([0, 2], communicator=here),
    "allgather sparse": lambda here: c.allreduce(torch.ones(2).to_sparse(), communicator=here),
}


@pytest.mark.parametrize("what", CANNOT_MISS)
def test_collectives_that_need_a_joined_rank_are_refused_on_every_caller(three: RankPool, what: str) -> None:
    def action(communicator: Communicator) -> int:
        if communicator.rank != 1:
            told = rf"{what.split()[0]} is not supported after join\(\): rank 1 has joined"
            with pytest.raises(ConfigError, match=told):
                CANNOT_MISS[what](communicator)
            assert c.allreduce(torch.ones(1), ReduceOp.SUM, communicator=communicator).item() == 2
        last = c.join(communicator=communicator)
        assert c.allreduce(torch.ones(1), ReduceOp.SUM, communicator=communicator).item() == 3
        return last

    assert set(three.run(action)) <= {0, 2}


def test_a_group_goes_on_without_a_member_that_has_joined(three: RankPool) -> None:
    def action(communicator: Communicator) -> list[float]:
        group = c.new_group([0, 1], communicator=communicator)
        c.barrier(communicator=communicator)
        totals = []
        if communicator.rank == 0:
            own = torch.tensor(1.0)
            totals = [c.allreduce(own, ReduceOp.SUM, group=group, communicator=communicator).item()]
        c.join(communicator=communicator)
        c.remove_group(group, communicator=communicator)
        return totals

    assert three.run(action)[0] == [1.0]


@pytest.mark.slow
def test_a_join_counts_though_a_group_of_the_ring_loses_a_member() -> None:
    """Otherwise member 1 would join again, and wait for member 0."""
    ranks = HealingRanks(3)

    def live(ring: HealingRing) -> Any:
        c.new_group([1, 2], communicator=ring)
        if (own := ring.rank) == 2:
            call = Call(Collective.JOIN, "join")  # no public call joins all ranks and not the group
            ring._ring._schedulers[()].take_part(call, (), CollectiveWork(call, list, ring))  # type: ignore[union-attr]
            until(lambda: {one._results.count for one in ranks.rings.values()} == {2})  # new_group and join
            return ranks.lose(2)
        c.join(communicator=ring)
        return c.allreduce(torch.tensor([float(own)]), communicator=ring).item()

    assert together(ranks, live) == [0.5, 0.5, None]
