"""What is moved between ranks arrives as it was."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from hubring.ps.core.errors import UsageError
from hubring.ps.core.messages import Call, Collective
from hubring.workers import collectives as c
from hubring.workers.collectives.moving import broadcast_into
from hubring.workers.communicators.base import Communicator
from tests.contract.numbers import DTYPES, LARGE, given_by
from tests.support.training.rank_pool import RankPool
from tests.support.training.ranks import LIMIT


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moving_collectives_keep_the_values_in_every_dtype(pool: RankPool, dtype: torch.dtype) -> None:
    size = pool.size

    def rows(rank: int, count: int) -> Tensor:
        return given_by(rank, dtype, count, 3)

    def action(communicator: Communicator) -> None:
        rank = communicator.rank
        whole = c.allgather(rows(rank, rank * 2), communicator=communicator)
        assert torch.equal(whole, torch.cat([rows(one, one * 2) for one in range(size)]))
        for root in range(size):
            assert torch.equal(
                c.broadcast(rows(rank, 4).t(), root, communicator=communicator), rows(root, 4).t()
            )
            gathered = c.gather(rows(rank, rank), root, communicator=communicator)
            assert (gathered is None) == (rank != root)
            for one, tensor in enumerate(gathered or []):
                assert torch.equal(tensor, rows(one, one))
            dealt = [rows(one, 2 + one) for one in range(size)] if rank == root else None
            assert torch.equal(c.scatter(dealt, root, communicator=communicator), rows(rank, 2 + rank))
        splits = [[(one + 2 * to) % 3 for to in range(size)] for one in range(size)]
        given = rows(rank, sum(splits[rank]))
        output, received = c.alltoall(given, torch.tensor(splits[rank]), communicator=communicator)
        assert received.tolist() == [its[rank] for its in splits]
        pieces = [rows(one, sum(its)).split(its)[rank] for one, its in enumerate(splits)]
        assert torch.equal(output, torch.cat(pieces))

    pool.run(action)


def test_scalars_and_empty_tensors_are_moved(pool: RankPool) -> None:
    def action(communicator: Communicator) -> None:
        rank, size = communicator.rank, pool.size
        scalars = c.allgather(torch.tensor(rank + 0.5), communicator=communicator)
        assert scalars.tolist() == [one + 0.5 for one in range(size)]
        gathered = c.gather(torch.tensor(rank), size - 1, communicator=communicator)
        assert gathered is None or [tensor.item() for tensor in gathered] == list(range(size))
        one = c.scatter(
            [torch.tensor(at) for at in range(size)] if rank == 0 else None, communicator=communicator
        )
        assert (one.item(), one.shape) == (rank, ())
        for shape in [(0,), (0, 3), (size, 0)]:
            empty = torch.empty(shape)
            assert c.allgather(empty, communicator=communicator).shape == (shape[0] * size, *shape[1:])
            assert c.broadcast(empty, communicator=communicator).shape == shape
            output, received = c.alltoall(empty, communicator=communicator)
            assert (output.shape, received.sum().item()) == (shape, shape[0])
            assert c.scatter([empty] * size if rank == 0 else None, communicator=communicator).shape == shape
            gathered = c.gather(empty, communicator=communicator)
            assert gathered is None or [tensor.shape for tensor in gathered] == [shape] * size

    pool.run(action)


def test_many_tensors_are_gathered_as_one_by_one(pool: RankPool) -> None:
    def action(communicator: Communicator) -> None:
        rank = communicator.rank
        tensors = [torch.full((rank, 2), rank), torch.tensor(rank * 0.5), torch.ones(3, dtype=torch.bool)]
        together = c.grouped_allgather(tensors, communicator=communicator)
        for one, other in zip(together, tensors, strict=True):
            assert torch.equal(one, c.allgather(other, communicator=communicator))

    pool.run(action)


def test_the_root_of_a_scatter_may_give_each_another_shape_and_dtype(pool: RankPool) -> None:
    def action(communicator: Communicator) -> Tensor:
        given = [torch.zeros([2] * rank, dtype=DTYPES[rank]) for rank in range(pool.size)]
        return c.scatter(given if communicator.rank == 0 else None, communicator=communicator)

    results = pool.run(action)
    assert [(len(result.shape), result.dtype) for result in results] == [
        (rank, DTYPES[rank]) for rank in range(pool.size)
    ]


def test_broadcast_needs_a_tensor_on_the_root_alone(pool: RankPool) -> None:
    def action(communicator: Communicator) -> None:
        given = [torch.tensor([1.0, 2.0])] if communicator.rank == 0 else []
        work = communicator.collective(Call(Collective.BROADCAST, "from the root"), *given)
        work.wait(LIMIT)
        assert work.result is not None
        assert work.result.tolist() == [1.0, 2.0]

    pool.run(action)


def test_broadcasting_into_tensors_of_many_dtypes_overwrites_them(pool: RankPool) -> None:
    def action(communicator: Communicator) -> None:
        rank = communicator.rank
        flag, numbers = torch.tensor(rank == 0), torch.full((3, 2), rank + 0.5, dtype=torch.float64).t()
        count, complex_ = torch.tensor([rank]), torch.full((3,), rank, dtype=torch.complex64)
        broadcast_into([flag, numbers, count, complex_, torch.empty(0)], communicator, "buffers", LIMIT)
        assert flag.item() is True
        assert torch.equal(numbers, torch.full((2, 3), 0.5, dtype=torch.float64))
        assert count.tolist() == [0]
        assert not complex_.any()

    pool.run(action)


def test_one_expanded_element_is_sent_as_any_other(pool: RankPool) -> None:
    def action(communicator: Communicator) -> list[float]:
        one = torch.tensor(2.0 + communicator.rank).expand(1)
        rows: list[float] = c.allgather(one, communicator=communicator).tolist()
        return [*rows, *c.broadcast(one, 0, communicator=communicator).tolist()]

    assert pool.run(action) == [[*(2.0 + rank for rank in range(pool.size)), 2.0]] * pool.size


# From one to another


def test_a_tensor_goes_from_rank_to_rank_as_it_is(three: RankPool) -> None:
    def action(communicator: Communicator) -> None:
        rank = communicator.rank
        for dtype, shape in itertools.product(DTYPES, [(), (0,), (2, 3), (LARGE,)]):
            if rank == 0:
                c.send(given_by(0, dtype, *shape), 2, communicator=communicator)
            elif rank == 2:
                assert torch.equal(c.recv(0, communicator=communicator), given_by(0, dtype, *shape))

    three.run(action)


def test_all_may_send_and_receive_at_once_under_one_name(three: RankPool) -> None:
    def action(communicator: Communicator) -> None:
        rank = communicator.rank
        others = [other for other in range(3) if other != rank]
        received = [c.recv_async(other, "all", communicator=communicator) for other in others for _ in (1, 2)]
        sent = [
            c.send_async(torch.tensor([rank, other, turn]), other, "all", communicator=communicator)
            for turn in (1, 2)
            for other in others
        ]
        for work in sent:
            work.wait()
        assert [work.get().tolist() for work in received] == [
            [other, rank, turn] for other in others for turn in (1, 2)
        ]

    three.run(action)


def test_transfers_are_matched_by_name_in_any_order(three: RankPool) -> None:
    def action(communicator: Communicator) -> list[float]:
        if communicator.rank == 0:
            works = [
                c.send_async(torch.tensor(at), 1, at_name, communicator=communicator)
                for at, at_name in [(1.0, "a"), (2.0, "b"), (3.0, "c")]
            ]
            for work in works:
                work.wait()
        if communicator.rank == 1:
            return [c.recv(0, name, communicator=communicator).item() for name in "cab"]
        return []

    assert three.run(action)[1] == [3.0, 1.0, 2.0]


@pytest.mark.parametrize("other", [-1, 0, 3])
def test_send_and_recv_refuse_the_own_rank_and_unknown_ranks(three: RankPool, other: int) -> None:
    communicator = three.communicators[0]
    with pytest.raises(UsageError, match=f"from rank 0 to rank {other}: pass a rank from 0 to 2"):
        c.send(torch.ones(1), other, communicator=communicator)
    with pytest.raises(UsageError, match=f"from rank {other} to rank 0"):
        c.recv(other, communicator=communicator)
