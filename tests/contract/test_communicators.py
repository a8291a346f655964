"""Every communicator does every collective: what a script may rely on, whatever it runs on."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from queue import SimpleQueue

import pytest
import torch

from hubring.ps.core.errors import ConfigError, UsageError
from hubring.ps.core.messages import Call, Collective, ReduceOp
from hubring.workers.collectives import allgather, allreduce, barrier, broadcast
from hubring.workers.collectives.broadcasts import broadcast_into
from hubring.workers.communicators.base import Communicator
from tests.support.training.ranks import LIMIT, Ranks

REDUCED: dict[ReduceOp, Callable[[torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: lambda parts: parts.sum(0),
    ReduceOp.AVERAGE: lambda parts: parts.mean(0),
    ReduceOp.MIN: lambda parts: parts.amin(0),
    ReduceOp.MAX: lambda parts: parts.amax(0),
    ReduceOp.PRODUCT: lambda parts: parts.prod(0),
}


def part(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([[1, 2, 3], [6, 5, 4]]).add(rank).to(dtype)


FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def test_allreduce_does_every_op_on_floating_dtypes(ranks: Ranks) -> None:
    def action(communicator: Communicator) -> None:
        for op, dtype in product(REDUCED, FLOATS):
            given = part(communicator.rank, dtype)
            result = allreduce(given, op, communicator=communicator)
            assert torch.equal(given, part(communicator.rank, dtype))
            parts = torch.stack([part(rank, dtype) for rank in range(ranks.size)])
            torch.testing.assert_close(result, REDUCED[op](parts))

    ranks.run(action)


def test_allreduce_does_every_op_but_the_average_on_integers(ranks: Ranks) -> None:
    parts = torch.stack([part(rank, torch.int64) for rank in range(ranks.size)])

    def action(communicator: Communicator) -> None:
        for op, dtype in product([op for op in REDUCED if op is not ReduceOp.AVERAGE], INTEGERS):
            result = allreduce(part(communicator.rank, dtype), op, communicator=communicator)
            assert torch.equal(result, REDUCED[op](parts).to(dtype)), (op, dtype)

    ranks.run(action)


def test_allreduce_of_booleans_is_or_and_and(ranks: Ranks) -> None:
    def action(communicator: Communicator) -> tuple[list[bool], list[bool]]:
        given = torch.tensor([communicator.rank == 0, True, False])
        any_of_them = allreduce(given, ReduceOp.SUM, communicator=communicator)
        all_of_them = allreduce(given, ReduceOp.PRODUCT, communicator=communicator)
        return any_of_them.tolist(), all_of_them.tolist()

    alone = ranks.size == 1
    assert ranks.run(action) == [([True, True, False], [alone, True, False])] * ranks.size


def test_an_average_of_integers_is_refused(ranks: Ranks) -> None:
    def action(communicator: Communicator) -> None:
        with pytest.raises(ConfigError, match=r"average does not support torch\.int64"):
            allreduce(torch.tensor([1]), communicator=communicator)

    ranks.run(action)


def test_shapes_are_kept(ranks: Ranks) -> None:
    last = ranks.size - 1

    def action(communicator: Communicator) -> None:
        for shape in [(), (0,), (2, 0, 3), (1, 1), (5, 2, 3)]:
            given = torch.full(shape, float(communicator.rank))
            total = allreduce(given, ReduceOp.SUM, communicator=communicator)
            assert torch.equal(total, torch.full(shape, float(sum(range(ranks.size)))))
            assert torch.equal(
                broadcast(given, last, communicator=communicator), torch.full(shape, float(last))
            )

    ranks.run(action)


def test_what_is_not_contiguous_is_taken_as_it_reads(ranks: Ranks) -> None:
    def action(communicator: Communicator) -> None:
        given = part(communicator.rank).t()
        total = allreduce(given, ReduceOp.MAX, communicator=communicator)
        assert torch.equal(total, part(ranks.size - 1).t())

    ranks.run(action)


def test_broadcast_gives_everybody_the_roots_tensor(ranks: Ranks) -> None:
    root = ranks.size - 1

    def action(communicator: Communicator) -> None:
        for dtype in (torch.float32, torch.float16, torch.int16, torch.bool):
            result = broadcast(part(communicator.rank, dtype), root, communicator=communicator)
            assert torch.equal(result, part(root, dtype))

    ranks.run(action)


def test_broadcast_needs_a_tensor_on_the_root_alone(ranks: Ranks) -> None:
    def action(communicator: Communicator) -> torch.Tensor | None:
        given = [part(0)] if communicator.rank == 0 else []
        work = communicator.collective(Call(Collective.BROADCAST, "from the root"), *given)
        work.wait(LIMIT)
        return work.result

    for result in ranks.run(action):
        assert result is not None
        assert torch.equal(result, part(0))


def test_a_root_that_is_no_rank_is_refused(ranks: Ranks) -> None:
    def action(communicator: Communicator) -> None:
        for root in (-1, 7):
            with pytest.raises(UsageError, match=f"root is {root}"):
                broadcast(torch.zeros(1), root, communicator=communicator)

    ranks.run(action)


def test_broadcasting_into_tensors_of_many_dtypes_overwrites_them(ranks: Ranks) -> None:
    def action(communicator: Communicator) -> list[torch.Tensor]:
        rank = communicator.rank
        tensors = [
            torch.tensor(rank == 0),
            torch.full((3, 2), rank + 0.5, dtype=torch.float64).t(),
            torch.tensor([rank], dtype=torch.int64),
            torch.full((3,), rank, dtype=torch.complex64),
            torch.empty(0),
        ]
        broadcast_into(tensors, communicator, "buffers", LIMIT)
        return tensors

    for tensors in ranks.run(action):
        assert tensors[0].item() is True
        assert torch.equal(tensors[1], torch.full((2, 3), 0.5, dtype=torch.float64))
        assert tensors[2].tolist() == [0]
        assert not tensors[3].any()


def test_allgather_joins_rows_of_which_ranks_may_give_unequally_many(ranks: Ranks) -> None:
    def rows(rank: int) -> torch.Tensor:
        return torch.full((rank * 2, 3), rank, dtype=torch.int16)

    expected = torch.cat([rows(rank) for rank in range(ranks.size)])
    for result in ranks.run(
        lambda communicator: allgather(rows(communicator.rank), communicator=communicator)
    ):
        assert torch.equal(result, expected)


def test_one_expanded_element_is_sent_as_any_other(ranks: Ranks) -> None:
    def action(communicator: Communicator) -> list[float]:
        one = torch.tensor(2.0 + communicator.rank).expand(1)
        rows: list[float] = allgather(one, communicator=communicator).tolist()
        return [*rows, *broadcast(one, 0, communicator=communicator).tolist()]

    for result in ranks.run(action):
        assert result == [*(2.0 + rank for rank in range(ranks.size)), 2.0]


def test_allgather_makes_scalars_rows(ranks: Ranks) -> None:
    results = ranks.run(
        lambda communicator: allgather(torch.tensor(communicator.rank + 0.5), communicator=communicator)
    )
    for result in results:
        assert result.tolist() == [rank + 0.5 for rank in range(ranks.size)]


def test_nobody_passes_a_barrier_before_all_have_come(ranks: Ranks) -> None:
    arrived: SimpleQueue[int] = SimpleQueue()

    def action(communicator: Communicator) -> int:
        arrived.put(communicator.rank)
        barrier(communicator=communicator)
        return arrived.qsize()

    assert ranks.run(action) == [ranks.size] * ranks.size


def test_names_made_in_call_order_tell_rounds_apart(ranks: Ranks) -> None:
    def action(communicator: Communicator) -> list[float]:
        totals = [allreduce(torch.tensor(float(turn)), communicator=communicator) for turn in range(5)]
        return [total.item() for total in totals]

    assert ranks.run(action) == [[0, 1, 2, 3, 4]] * ranks.size


def calls(rank: int) -> dict[str, Callable[[Communicator], object]]:
    odd = rank == 1
    return {
        "shape": lambda c: allreduce(torch.zeros(3 if odd else 2), communicator=c),
        "dtype": lambda c: allreduce(torch.zeros(2, dtype=torch.float64 if odd else None), communicator=c),
        "op": lambda c: allreduce(torch.zeros(2), ReduceOp.MAX if odd else ReduceOp.MIN, communicator=c),
        "root": lambda c: broadcast(torch.zeros(2), 1 if odd else 0, communicator=c),
        "columns": lambda c: allgather(torch.zeros(2, 3 if odd else 2), communicator=c),
        "collective": lambda c: (
            barrier("b", communicator=c) if odd else allgather(torch.zeros(1), "b", communicator=c)
        ),
    }


@pytest.mark.parametrize("what", ["shape", "dtype", "op", "root", "columns", "collective"])
def test_ranks_that_disagree_are_all_told_who_gave_what(several: Ranks, what: str) -> None:
    def action(communicator: Communicator) -> str:
        with pytest.raises(ConfigError) as caught:
            calls(communicator.rank)[what](communicator)
        barrier(communicator=communicator)  # and the others go on
        return str(caught.value)

    (text,) = set(several.run(action))
    assert all(f"rank {rank}" in text for rank in range(several.size))
