"""Reductions alone, on hub and ring: every op, every dtype, the same results."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.messages import ReduceOp
from hubring.workers import collectives as c
from hubring.workers.communicators.base import Communicator
from tests.contract.numbers import DTYPES, LARGE, expected, given_by, ops
from tests.support.training.rank_pool import RankPool


def test_allreduce_does_every_op_in_every_dtype_whatever_the_size(pool: RankPool) -> None:
    every = [(dtype, op) for dtype in DTYPES for op in ops(dtype)]

    def action(communicator: Communicator) -> None:
        for (dtype, op), shape in itertools.product(every, [(), (0,), (2, 3), (LARGE,)]):
            parts = [given_by(rank, dtype, *shape) for rank in range(pool.size)]
            mine = parts[communicator.rank].clone()
            result = c.allreduce(mine, op, communicator=communicator)
            torch.testing.assert_close(result, expected(parts, op))
            assert torch.equal(mine, parts[communicator.rank])

    pool.run(action)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.bool], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_hub_and_ring_reduce_to_the_same(
    pools: Callable[[str, int], RankPool], dtype: torch.dtype, size: int
) -> None:
    def part(rank: int, numel: int) -> Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).mul(9).to(dtype)

    def action(communicator: Communicator) -> list[Tensor]:
        return [
            c.allreduce(part(communicator.rank, numel), op, communicator=communicator)
            for numel, op in itertools.product([100, LARGE], ops(dtype))
        ]

    hub, ring = pools("hub", size).run(action), pools("ring", size).run(action)
    small = len(ops(dtype))
    for on_hub, on_ring in zip(hub, ring, strict=True):
        for place, (one, other) in enumerate(zip(on_hub, on_ring, strict=True)):
            if place < small or not dtype.is_floating_point or size < 3:
                assert torch.equal(one, other)
            else:  # the order of summation is the ring's own
                torch.testing.assert_close(one, other)
        assert all(torch.equal(one, first) for one, first in zip(on_hub, hub[0], strict=True))
    for on_ring in ring:
        assert all(torch.equal(one, first) for one, first in zip(on_ring, ring[0], strict=True))


def test_a_lazily_negated_view_counts_as_what_it_shows(pool: RankPool) -> None:
    def action(communicator: Communicator) -> None:
        negated = torch.full((3,), 1 + 2j).conj().imag
        assert negated.is_neg()
        assert c.allreduce(negated, communicator=communicator).tolist() == [-2.0] * 3
        assert c.broadcast(negated, communicator=communicator).tolist() == [-2.0] * 3
        assert (
            c.allreduce_(negated, ReduceOp.SUM, communicator=communicator).tolist() == [-2.0 * pool.size] * 3
        )

    pool.run(action)


@pytest.mark.parametrize("numel", [4, LARGE])
def test_a_nan_of_one_rank_is_everybodys(three: RankPool, numel: int) -> None:
    def action(communicator: Communicator) -> None:
        own = torch.ones(numel)
        own[communicator.rank] = float("nan")
        for op in ReduceOp:
            result = c.allreduce(own, op, communicator=communicator)
            assert result.isnan().tolist()[:3] == [True] * 3

    three.run(action)


@pytest.mark.parametrize("numel", [5, LARGE])
def test_half_precision_sums_are_rounded_once(pool: RankPool, numel: int) -> None:
    # In bfloat16 256 + 1 is 256: rounded at every addition, the ones would be lost.
    def action(communicator: Communicator) -> list[float]:
        own = torch.full((numel,), 256.0 if communicator.rank == 0 else 1.0, dtype=torch.bfloat16)
        return c.allreduce(own, ReduceOp.SUM, communicator=communicator).tolist()

    total = torch.tensor(256.0 + pool.size - 1).bfloat16().item()
    assert pool.run(action) == [[total] * numel] * pool.size


def test_integers_are_summed_exactly_and_wrap_as_torchs_do(pool: RankPool) -> None:
    def action(communicator: Communicator) -> None:
        for numel in (1, LARGE):
            big = torch.full((numel,), 2**60 + 1)
            assert c.allreduce(big, ReduceOp.SUM, communicator=communicator)[-1] == pool.size * (2**60 + 1)
            short = torch.full((numel,), 100, dtype=torch.int8)
            total = torch.tensor(100 * pool.size).to(torch.int8)
            assert c.allreduce(short, ReduceOp.SUM, communicator=communicator)[-1] == total

    pool.run(action)


def test_an_average_of_integers_is_refused(pool: RankPool) -> None:
    def action(communicator: Communicator) -> None:
        for op in (ReduceOp.AVERAGE, ReduceOp.ADASUM):
            with pytest.raises(
                ConfigError, match=rf"{op.name.lower()} does not support torch\.int64; use sum, or convert"
            ):
                c.allreduce(torch.tensor([1]), op, communicator=communicator)

    pool.run(action)


def test_the_forms_that_end_in_an_underscore_write_where_they_read(pool: RankPool) -> None:
    def action(communicator: Communicator) -> None:
        whole = torch.full((2, 4), float(communicator.rank), requires_grad=True)
        column = whole.detach()[:, 1]
        assert c.allreduce_(column, ReduceOp.SUM, communicator=communicator) is column
        total = float(sum(range(pool.size)))
        assert whole[:, 1].tolist() == [total] * 2
        assert whole[:, 0].tolist() == [communicator.rank] * 2
        assert c.broadcast_(whole, pool.size - 1, communicator=communicator) is whole
        assert whole[:, 0].tolist() == [pool.size - 1] * 2
        several = [torch.tensor(1.0), torch.ones(2, dtype=torch.int64)]
        works = [c.grouped_allreduce_async_(several, ReduceOp.SUM, communicator=communicator)]
        assert works[0].get() == several
        assert several[1].tolist() == [pool.size] * 2

    pool.run(action)


@pytest.mark.slow
@pytest.mark.parametrize("numel", [3, LARGE])
@pytest.mark.parametrize("op", [ReduceOp.AVERAGE, ReduceOp.MAX, ReduceOp.ADASUM])
def test_a_group_of_tensors_is_reduced_as_one_by_one(pool: RankPool, op: ReduceOp, numel: int) -> None:
    dtypes = [dtype for dtype in DTYPES if op in ops(dtype)]

    parts = [
        [given_by(rank, dtype, *shape) for rank in range(pool.size)]
        for dtype in dtypes
        for shape in [(), (numel,), (0, 2), (2, 3)]
    ]

    def action(communicator: Communicator) -> None:
        own = [tensors[communicator.rank] for tensors in parts]
        together = c.grouped_allreduce(own, op, communicator=communicator)
        for one, tensors in zip(together, parts, strict=True):
            torch.testing.assert_close(one, expected(tensors, op))

    pool.run(action)


def test_a_group_of_no_tensors_is_no_error(pool: RankPool) -> None:
    assert pool.run(lambda own: c.grouped_allreduce([], communicator=own)) == [[]] * pool.size


@pytest.mark.parametrize("numel", [4, LARGE])
def test_reduce_gives_the_root_alone(pool: RankPool, numel: int) -> None:
    parts = [given_by(rank, torch.float32, numel) for rank in range(pool.size)]
    last = pool.size - 1
    asked = [(last, op) for op in ReduceOp] + [(root, ReduceOp.SUM) for root in range(last)]

    def action(own: Communicator) -> list[Tensor | None]:
        return [c.reduce(parts[own.rank], root, op, communicator=own) for root, op in asked]

    for (root, op), results in zip(asked, zip(*pool.run(action), strict=True), strict=True):
        assert [rank for rank, result in enumerate(results) if result is not None] == [root]
        torch.testing.assert_close(results[root], expected(parts, op))


@pytest.mark.parametrize("rows", [0, 1, 5, 8, LARGE])
def test_reduce_scatter_deals_out_the_rows_of_an_allreduce(pool: RankPool, rows: int) -> None:
    def action(communicator: Communicator) -> Tensor:
        own = given_by(communicator.rank, torch.float64, rows, 2)
        mine = c.reduce_scatter(own, communicator=communicator)
        both = c.grouped_reduce_scatter([own, own.long()], ReduceOp.SUM, communicator=communicator)
        torch.testing.assert_close(both[0], mine * pool.size)
        assert torch.equal(both[0].long(), both[1])
        return mine

    parts = pool.run(action)
    whole = expected([given_by(rank, torch.float64, rows, 2) for rank in range(pool.size)], ReduceOp.AVERAGE)
    torch.testing.assert_close(torch.cat(parts), whole)
    assert [len(part) for part in parts] == [
        rows // pool.size + (rank < rows % pool.size) for rank in range(pool.size)
    ]
