"""Sparse tensors are summed as dense ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError, UsageError
from hubring.ps.core.messages import ReduceOp
from hubring.workers import collectives as c
from hubring.workers.communicators.base import Communicator
from tests.contract.numbers import FLOATS, ops
from tests.support.training.rank_pool import RankPool


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE])
def test_sparse_tensors_are_summed_as_dense_ones(pool: RankPool, op: ReduceOp) -> None:
    def dense(rank: int) -> Tensor:
        whole = torch.zeros(10, 3)
        whole[rank], whole[5] = rank + 1.0, 1.0
        return whole

    def action(communicator: Communicator) -> None:
        sparse = dense(communicator.rank).to_sparse(1)
        result = c.allreduce(sparse, op, communicator=communicator)
        assert result.is_sparse
        whole = c.allreduce(dense(communicator.rank), op, communicator=communicator)
        torch.testing.assert_close(result.to_dense(), whole)
        empty = c.allreduce(torch.zeros(4).to_sparse(), op, communicator=communicator)
        assert empty.to_dense().tolist() == [0.0] * 4

    pool.run(action)


def test_sparse_sums_are_those_of_dense_tensors_in_every_dtype(pool: RankPool) -> None:
    """In bfloat16 256 + 1 is 256: rounded at every addition, the ones would be lost."""

    def check(communicator: Communicator, dtype: torch.dtype) -> None:
        rows = torch.tensor([[0, 2, 2, 2, communicator.rank]])
        values = torch.tensor([[1], [256 if dtype.is_floating_point else 3], [1], [1], [1]]).to(dtype)
        own = torch.sparse_coo_tensor(rows, values, (5, 1), check_invariants=True)
        dense = own.to(torch.float64).to_dense()
        if dtype is torch.bool:
            dense = dense.bool()
        for op in ops(dtype)[: 2 if dtype.is_floating_point else 1]:
            result = c.allreduce(own, op, communicator=communicator)
            assert result.dtype is dtype
            expected = c.allreduce(dense, op, communicator=communicator).to(dtype)
            assert torch.equal(result.to_dense(), expected)

    def action(communicator: Communicator) -> None:
        for dtype in (*FLOATS, torch.int16, torch.int64, torch.uint8, torch.bool):
            check(communicator, dtype)

    pool.run(action)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool], ids=str)
def test_an_average_of_sparse_integers_is_refused_as_of_dense_ones(
    pool: RankPool, dtype: torch.dtype
) -> None:
    own = torch.eye(3).to(dtype).to_sparse()

    def action(communicator: Communicator) -> None:
        with pytest.raises(ConfigError, match=f"average does not support {dtype}; use sum, or convert"):
            c.allreduce(own, communicator=communicator)

    pool.run(action)


def test_unsupported_operations_on_sparse_tensors_are_refused(three: RankPool) -> None:
    sparse = torch.eye(3).to_sparse()
    own = three.communicators[0]
    with pytest.raises(UsageError, match="max does not support sparse tensors: use sum or average"):
        c.allreduce(sparse, ReduceOp.MAX, communicator=own)
    with pytest.raises(UsageError, match="only allreduce supports sparse tensors"):
        c.broadcast(sparse, communicator=own)

    def action(communicator: Communicator) -> None:
        shape = (3, 3 + (communicator.rank == 1))
        with pytest.raises(
            ConfigError, match=r"different shapes, in rank order: \[\[3, 3\], \[3, 4\], \[3, 3\]\]"
        ):
            c.allreduce(torch.zeros(shape).to_sparse(), communicator=communicator)

    three.run(action)
