"""Horovod's operations: names, argument orders, results, in-place rules and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hubring.horovod as hvd
from tests.workers.horovod.conftest import Everybody

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_allreduce_averages_unless_told_otherwise(on_two: Everybody, dtype: torch.dtype) -> None:
    def act() -> tuple[torch.Tensor, ...]:
        tensor = torch.tensor([1, 2, 6], dtype=dtype) * (hvd.rank() + 1)
        return (
            tensor,
            hvd.allreduce(tensor),
            hvd.allreduce(tensor, op=hvd.Sum),
            hvd.allreduce(tensor, name="n"),
        )

    for rank, (tensor, mean, total, named) in enumerate(on_two(act)):
        assert tensor.tolist() == [(rank + 1) * value for value in (1, 2, 6)]
        expected = torch.tensor([3, 6, 18], dtype=torch.float64) / 2
        if not dtype.is_floating_point:
            expected = expected.trunc()
        assert mean.dtype == total.dtype == dtype
        assert mean.tolist() == named.tolist() == expected.tolist()
        assert total.tolist() == [3, 6, 18]


def test_every_reduction_has_its_meaning(on_two: Everybody) -> None:
    def act() -> list[list[float]]:
        tensor = torch.tensor([1.0, 4.0]) if hvd.rank() == 0 else torch.tensor([3.0, 2.0])
        return [hvd.allreduce(tensor, op=op).tolist() for op in (hvd.Min, hvd.Max, hvd.Product)]

    for result in on_two(act):
        assert result == [[1, 2], [3, 4], [3, 8]]


def test_adasum_of_orthogonal_tensors_is_their_sum(on_two: Everybody) -> None:
    def act() -> torch.Tensor:
        return hvd.allreduce(torch.eye(2)[hvd.rank()], op=hvd.Adasum)

    for result in on_two(act):
        torch.testing.assert_close(result, torch.ones(2))


def test_adasum_wants_a_power_of_two_and_all_ranks(on_three: Everybody) -> None:
    def act() -> None:
        with pytest.raises(NotImplementedError, match="power of 2"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum)
        some = hvd.add_process_set([0, 1])
        if some.included():
            with pytest.raises(NotImplementedError, match="process sets"):
                hvd.allreduce(torch.ones(2), op=hvd.Adasum, process_set=some)

    on_three(act)


def test_factors_scale_before_and_after(on_two: Everybody) -> None:
    def act() -> tuple[Any, Any]:
        of_floats = hvd.allreduce(torch.ones(2), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
        of_ints = hvd.allreduce(torch.tensor([3, -3]), op=hvd.Sum, prescale_factor=0.5)
        return of_floats.tolist(), of_ints.tolist()

    for floats, ints in on_two(act):
        assert floats == [3.0, 3.0]
        assert ints == [2, -2]  # 1.5 is cut to 1 on each rank, towards zero


def test_in_place_forms_write_into_their_tensor(on_two: Everybody) -> None:
    def act() -> None:
        tensor = torch.full((2, 2), float(hvd.rank()))
        assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
        assert tensor.tolist() == [[1, 1], [1, 1]]
        tensor.fill_(hvd.rank())
        handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
        assert hvd.synchronize(handle) is tensor
        assert tensor.tolist() == [[1, 1], [1, 1]]
        whole = torch.full((3,), float(hvd.rank()))
        assert hvd.broadcast_(whole, 1) is whole
        assert whole.tolist() == [1, 1, 1]
        pair = [torch.ones(2), torch.ones(1, dtype=torch.int64)]
        first, second = hvd.grouped_allreduce_(pair, op=hvd.Sum)
        assert first is pair[0]
        assert second is pair[1]
        assert (pair[0].tolist(), pair[1].tolist()) == ([2, 2], [2])

    on_two(act)


def test_a_parameter_may_be_overwritten_in_place(on_two: Everybody) -> None:
    def act() -> list[float]:
        parameter = torch.nn.Parameter(torch.full((2,), float(hvd.rank())))
        hvd.broadcast_(parameter, root_rank=1)
        return parameter.tolist()

    assert on_two(act) == [[1, 1], [1, 1]]


def test_grouped_allreduce_is_as_one_by_one(on_two: Everybody) -> None:
    def act() -> None:
        tensors = [torch.ones(3) * hvd.rank(), torch.tensor(5.0), torch.arange(2) + hvd.rank()]
        results = hvd.grouped_allreduce(tensors, name="group")
        assert isinstance(results, list)
        for tensor, result in zip(tensors, results, strict=True):
            assert torch.equal(result, hvd.allreduce(tensor))
            assert result.dtype == tensor.dtype
        handle = hvd.grouped_allreduce_async(tensors, op=hvd.Sum)
        assert isinstance(hvd.synchronize(handle), tuple)

    on_two(act)


def test_fp16_compression_gives_the_dtype_back(on_two: Everybody) -> None:
    def act() -> torch.Tensor:
        return hvd.allreduce(torch.full((2,), 1.0 + hvd.rank()), compression=hvd.Compression.fp16)

    for result in on_two(act):
        assert result.dtype == torch.float32
        assert result.tolist() == [1.5, 1.5]


def test_the_autograd_functions_take_horovods_arguments(on_two: Everybody) -> None:
    ops, everybody = hvd.mpi_ops, hvd.global_process_set

    def act() -> None:
        rank, own = hvd.rank(), torch.full((2,), 1.0 + hvd.rank(), requires_grad=True)
        reduced = ops.HorovodAllreduce.apply(own, None, "a", hvd.Sum, 2.0, 1.0, everybody)
        assert reduced.tolist() == [6, 6]
        (gradient,) = torch.autograd.grad(reduced.sum(), own)
        assert gradient.tolist() == [4, 4]
        one, two = ops.HorovodGroupedAllreduce.apply(
            None, None, hvd.Average, 1.0, 1.0, everybody, own, 2 * own
        )
        assert (one[0].item(), two[0].item()) == (1.5, 3)
        assert ops.HorovodAllgather.apply(own, None, everybody).tolist() == [1, 1, 2, 2]
        assert len(ops.HorovodGroupedAllgather.apply("g", everybody, own, own)) == 2
        assert ops.HorovodBroadcast.apply(own, 1, None, everybody).tolist() == [2, 2]
        assert ops.HorovodAlltoall.apply(own, None, None, everybody).tolist() == [1, 2]
        rows, counts = ops.HorovodAlltoall.apply(own, [2, 0], "split", everybody)
        assert (len(rows), counts.tolist()) == ((4, [2, 2]) if rank == 0 else (0, [0, 0]))
        scattered = ops.HorovodReducescatter.apply(own, None, hvd.Sum, everybody, 1.0, 0.5)
        assert scattered.tolist() == [1.5]
        (gradient,) = torch.autograd.grad(scattered.sum(), own)
        assert gradient.tolist() == [1, 1]
        (part,) = ops.HorovodGroupedReducescatter.apply("s", hvd.Average, everybody, 1.0, 1.0, own)
        assert part.tolist() == [1.5]

    on_two(act)


def test_allgather_joins_rows_of_differing_number(on_two: Everybody) -> None:
    def act() -> tuple[list[Any], ...]:
        rank = hvd.rank()
        rows = hvd.allgather(torch.full((rank + 1, 2), rank))
        none = hvd.allgather(torch.empty(0, 2) if rank == 0 else torch.ones(1, 2))
        many = hvd.grouped_allgather([torch.tensor(rank), torch.ones(rank)])
        return rows.tolist(), none.tolist(), [one.tolist() for one in many]

    for rows, none, many in on_two(act):
        assert rows == [[0, 0], [1, 1], [1, 1]]
        assert none == [[1, 1]]
        assert many == [[0, 1], [1]]


def test_alltoall_deals_rows_by_splits(on_two: Everybody) -> None:
    def act() -> None:
        rank = hvd.rank()
        rows = torch.arange(4) + 10 * rank
        assert hvd.alltoall(rows).tolist() == [2 * rank, 2 * rank + 1, 10 + 2 * rank, 11 + 2 * rank]
        output, received = hvd.alltoall(rows, splits=torch.tensor([1, 3], dtype=torch.int32))
        assert output.tolist() == ([0, 10] if rank == 0 else [1, 2, 3, 11, 12, 13])
        assert received.tolist() == ([1, 1] if rank == 0 else [3, 3])
        assert received.dtype == torch.int32
        output, received = hvd.synchronize(hvd.alltoall_async(rows))
        assert received.tolist() == [2, 2]

    on_two(act)


@pytest.mark.parametrize(
    ("splits", "told"),
    [
        ([1, 2, 1], "expected 2 numbers"),
        ([3, 3], "at most the 4 rows"),
        (torch.tensor([1.0, 3.0]), "numbers of rows"),
    ],
)
def test_splits_that_do_not_fit_are_a_value_error(on_two: Everybody, splits: Any, told: str) -> None:
    def act() -> None:
        with pytest.raises(ValueError, match=told):
            hvd.alltoall(torch.arange(4), splits=splits)
        with pytest.raises(ValueError, match="3 rows do not divide evenly among 2 ranks; pass splits"):
            hvd.alltoall(torch.arange(3))

    on_two(act)


def test_reducescatter_gives_the_first_ranks_a_row_more(on_two: Everybody) -> None:
    def act() -> tuple[list[float], ...]:
        tensor = torch.arange(3.0) * (hvd.rank() + 1)
        mean = hvd.reducescatter(tensor)
        total = hvd.reducescatter(tensor, op=hvd.Sum, postscale_factor=2.0)
        grouped = hvd.grouped_reducescatter([tensor, tensor], op=hvd.Sum)
        assert isinstance(grouped, list)
        return mean.tolist(), total.tolist(), grouped[1].tolist()

    assert on_two(act) == [([0, 1.5], [0, 6], [0, 3]), ([3], [12], [6])]


def test_reducescatter_refuses_other_reductions(on_two: Everybody) -> None:
    def act() -> None:
        with pytest.raises(ValueError, match=r"hvd\.Average, hvd\.Sum"):
            hvd.reducescatter(torch.ones(2), op=hvd.Max)
        with pytest.raises(ValueError, match="at least one dimension"):
            hvd.reducescatter(torch.tensor(1.0))

    on_two(act)


def test_sparse_tensors_are_added_up_where_they_meet(on_two: Everybody) -> None:
    def act() -> list[list[float]]:
        rank = hvd.rank()
        tensor = torch.sparse_coo_tensor(
            torch.tensor([[0, 1 + rank]]), torch.ones(2, 2) * (rank + 1), (3, 2), check_invariants=True
        )
        return hvd.sparse_allreduce_async(tensor, name="rows", op=hvd.Average)().to_dense().tolist()

    for result in on_two(act):
        assert result == [[1.5, 1.5], [0.5, 0.5], [1, 1]]


def test_gradients_flow_as_in_horovod(on_two: Everybody) -> None:
    def gradient(operation: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
        tensor = torch.ones(2, requires_grad=True)
        result = operation(tensor)
        (result * (hvd.rank() + 1.0)).sum().backward()
        assert tensor.grad is not None
        return tensor.grad.tolist()

    def act() -> list[list[float]]:
        return [
            gradient(lambda tensor: hvd.allreduce(tensor, op=hvd.Sum)),
            gradient(lambda tensor: hvd.allreduce(tensor)),
            gradient(lambda tensor: hvd.allgather(tensor)),
            gradient(lambda tensor: hvd.broadcast(tensor, 1)),
            gradient(lambda tensor: hvd.alltoall(tensor)),
            gradient(lambda tensor: hvd.reducescatter(tensor)),
            gradient(lambda tensor: hvd.reducescatter(tensor, op=hvd.Sum)),
            gradient(lambda tensor: hvd.grouped_allreduce([tensor], op=hvd.Sum)[0]),
            gradient(lambda tensor: hvd.grouped_allgather([tensor])[0]),
        ]

    for rank, gradients in enumerate(on_two(act)):
        assert gradients == [
            [3, 3],
            [1.5, 1.5],
            [1.5, 1.5],
            [1.5, 1.5] if rank == 1 else [0, 0],
            [1, 2],
            [1, 2],
            [2, 4],
            [3, 3],
            [1.5, 1.5],
        ]
