"""Horovod's operations: results, in-place rules, gradients and refused calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hubring.horovod as hvd
from tests.workers.horovod.conftest import every_rank, every_rank_of_three

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
@every_rank
def test_allreduce_averages_unless_told_otherwise(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1, 2, 6], dtype=dtype) * (hvd.rank() + 1)
    mean, total = hvd.allreduce(tensor, name="n"), hvd.allreduce(tensor, op=hvd.Sum)
    assert tensor.tolist() == [(hvd.rank() + 1) * value for value in (1, 2, 6)]
    assert mean.dtype == total.dtype == dtype
    assert mean.tolist() == ([1.5, 3, 9] if dtype.is_floating_point else [1, 3, 9])
    assert total.tolist() == [3, 6, 18]


@every_rank
def test_every_reduction_has_its_meaning() -> None:
    tensor = torch.tensor([1.0, 4.0]) if hvd.rank() == 0 else torch.tensor([3.0, 2.0])
    reduced = [hvd.allreduce(tensor, op=op).tolist() for op in (hvd.Min, hvd.Max, hvd.Product)]
    assert reduced == [[1, 2], [3, 4], [3, 8]]
    assert hvd.allreduce(torch.eye(2)[hvd.rank()], op=hvd.Adasum).tolist() == [1, 1]  # orthogonal


@every_rank_of_three
def test_adasum_wants_a_power_of_two_and_all_ranks() -> None:
    with pytest.raises(NotImplementedError, match="power of 2"):
        hvd.allreduce(torch.ones(2), op=hvd.Adasum)
    some = hvd.add_process_set([0, 1])
    if some.included():
        with pytest.raises(NotImplementedError, match="process sets"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum, process_set=some)


@every_rank
def test_factors_scale_before_and_after() -> None:
    of_floats = hvd.allreduce(torch.ones(2), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    of_ints = hvd.allreduce(torch.tensor([3, -3]), op=hvd.Sum, prescale_factor=0.5)
    assert of_floats.tolist() == [3, 3]
    assert of_ints.tolist() == [2, -2]  # 1.5 is cut to 1 on each rank, towards zero


@every_rank
def test_in_place_forms_write_into_their_tensor() -> None:
    tensor, parameter = torch.empty(2, 2), torch.nn.Parameter(torch.full((2,), float(hvd.rank())))
    ways: list[Callable[[], Any]] = [
        lambda: hvd.allreduce_(tensor, op=hvd.Sum),
        lambda: hvd.synchronize(hvd.allreduce_async_(tensor, op=hvd.Sum)),
    ]
    for way in ways:
        tensor.fill_(hvd.rank())
        assert way() is tensor
        assert tensor.tolist() == [[1, 1], [1, 1]]
    assert hvd.broadcast_(parameter, root_rank=1) is parameter
    assert parameter.tolist() == [1, 1]
    pair = [torch.ones(2), torch.ones(1, dtype=torch.int64)]
    first, second = hvd.grouped_allreduce_(pair, op=hvd.Sum)
    assert first is pair[0]
    assert second is pair[1]
    assert (first.tolist(), second.tolist()) == ([2, 2], [2])


@every_rank
def test_grouped_allreduce_is_as_one_by_one() -> None:
    tensors = [torch.ones(3) * hvd.rank(), torch.tensor(5.0), torch.arange(2) + hvd.rank()]
    results = hvd.grouped_allreduce(tensors, name="group", compression=hvd.Compression.fp16)
    assert isinstance(results, list)
    for tensor, result in zip(tensors, results, strict=True):
        assert torch.equal(result, hvd.allreduce(tensor, compression=hvd.Compression.fp16))
        assert result.dtype == tensor.dtype
    assert isinstance(hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Sum)), tuple)


@every_rank
def test_the_autograd_functions_take_horovods_arguments() -> None:
    ops, everybody = hvd.mpi_ops, hvd.global_process_set
    own = torch.full((2,), 1.0 + hvd.rank(), requires_grad=True)
    reduced = ops.HorovodAllreduce.apply(own, None, "a", hvd.Sum, 2.0, 1.0, everybody)
    scattered = ops.HorovodReducescatter.apply(own, None, hvd.Sum, everybody, 1.0, 0.5)
    for result, value, slope in ((reduced, [6, 6], [4, 4]), (scattered, [1.5], [1, 1])):
        (gradient,) = torch.autograd.grad(result.sum(), own)
        assert (result.tolist(), gradient.tolist()) == (value, slope)
    rows, counts = ops.HorovodAlltoall.apply(own, [2, 0], "split", everybody)
    assert (len(rows), counts.tolist()) == ((4, [2, 2]) if hvd.rank() == 0 else (0, [0, 0]))
    results = (
        *ops.HorovodGroupedAllreduce.apply(None, None, hvd.Average, 1.0, 1.0, everybody, own, 2 * own),
        *ops.HorovodGroupedAllgather.apply("g", everybody, own),
        *ops.HorovodGroupedReducescatter.apply("s", hvd.Average, everybody, 1.0, 1.0, own),
        ops.HorovodAllgather.apply(own, None, everybody),
        ops.HorovodBroadcast.apply(own, 1, None, everybody),
        ops.HorovodAlltoall.apply(own, None, None, everybody),
    )
    assert [one.tolist() for one in results] == [
        *([1.5, 1.5], [3, 3], [1, 1, 2, 2], [1.5], [1, 1, 2, 2], [2, 2], [1, 2])
    ]


@every_rank
def test_allgather_joins_rows_of_differing_number() -> None:
    rank = hvd.rank()
    none = torch.empty(0, 2) if rank == 0 else torch.ones(1, 2)
    many = hvd.grouped_allgather([torch.tensor(rank), torch.ones(rank)])
    assert hvd.allgather(torch.full((rank + 1, 2), rank)).tolist() == [[0, 0], [1, 1], [1, 1]]
    assert hvd.allgather(none).tolist() == [[1, 1]]
    assert [one.tolist() for one in many] == [[0, 1], [1]]


@every_rank
def test_alltoall_deals_rows_by_splits() -> None:
    rank = hvd.rank()
    rows = torch.arange(4) + 10 * rank
    assert hvd.alltoall(rows).tolist() == [2 * rank, 2 * rank + 1, 10 + 2 * rank, 11 + 2 * rank]
    output, received = hvd.alltoall(rows, splits=torch.tensor([1, 3], dtype=torch.int32))
    assert output.tolist() == ([0, 10] if rank == 0 else [1, 2, 3, 11, 12, 13])
    assert received.tolist() == ([1, 1] if rank == 0 else [3, 3])
    assert received.dtype == torch.int32
    output, received = hvd.synchronize(hvd.alltoall_async(rows))
    assert received.tolist() == [2, 2]


@every_rank
def test_reducescatter_gives_the_first_ranks_a_row_more() -> None:
    tensor = torch.arange(3.0) * (hvd.rank() + 1)
    total = hvd.reducescatter(tensor, op=hvd.Sum, postscale_factor=2.0)
    grouped = hvd.grouped_reducescatter([tensor, tensor], op=hvd.Sum)
    assert isinstance(grouped, list)
    found = [one.tolist() for one in (hvd.reducescatter(tensor), total, grouped[1])]
    assert found == ([[0, 1.5], [0, 6], [0, 3]], [[3], [12], [6]])[hvd.rank()]


@every_rank
def test_sparse_tensors_are_added_up_where_they_meet() -> None:
    where, what = torch.tensor([[0, 1 + hvd.rank()]]), torch.ones(2, 2) * (hvd.rank() + 1)
    tensor = torch.sparse_coo_tensor(where, what, (3, 2), check_invariants=True)
    mean = hvd.sparse_allreduce_async(tensor, name="rows", op=hvd.Average)()
    assert mean.to_dense().tolist() == [[1.5, 1.5], [0.5, 0.5], [1, 1]]


FLOWS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[list[float]]]] = {
    "allreduce, sum": (lambda one: hvd.allreduce(one, op=hvd.Sum), [[3, 3], [3, 3]]),
    "allreduce": (hvd.allreduce, [[1.5, 1.5], [1.5, 1.5]]),
    "allgather": (hvd.allgather, [[1.5, 1.5], [1.5, 1.5]]),
    "broadcast": (lambda one: hvd.broadcast(one, 1), [[0, 0], [1.5, 1.5]]),
    "alltoall": (hvd.alltoall, [[1, 2], [1, 2]]),
    "reducescatter": (hvd.reducescatter, [[1, 2], [1, 2]]),
    "reducescatter, sum": (lambda one: hvd.reducescatter(one, op=hvd.Sum), [[2, 4], [2, 4]]),
    "grouped allreduce": (lambda one: hvd.grouped_allreduce([one], op=hvd.Sum)[0], [[3, 3], [3, 3]]),
    "grouped allgather": (lambda one: hvd.grouped_allgather([one])[0], [[1.5, 1.5], [1.5, 1.5]]),
}


@pytest.mark.parametrize("what", FLOWS)
@every_rank
def test_gradients_flow_as_in_horovod(what: str) -> None:
    operation, expected = FLOWS[what]
    tensor = torch.ones(2, requires_grad=True)
    (operation(tensor) * (hvd.rank() + 1.0)).sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == expected[hvd.rank()]


MEANINGLESS: dict[str, tuple[Callable[[], Any], str]] = {
    "op and average": (lambda: hvd.allreduce(torch.ones(2), True, op=hvd.Sum), "supersedes average"),
    "an unknown op": (lambda: hvd.allreduce(torch.ones(2), op=17), "op is 17"),
    "the mean of booleans": (lambda: hvd.allreduce(torch.tensor([True])), r"no average of torch\.bool"),
    "no process set": (
        lambda: hvd.allreduce(torch.ones(2), process_set="all"),  # type: ignore[arg-type]
        "process_set is 'all'",
    ),
    "an unknown root": (lambda: hvd.broadcast(torch.ones(2), root_rank=2), "root_rank is 2"),
    "splits for others": (lambda: hvd.alltoall(torch.arange(4), [1, 2, 1]), "expected 2 numbers"),
    "more rows than there are": (lambda: hvd.alltoall(torch.arange(4), [3, 3]), "at most the 4 rows"),
    "splits of int64": (lambda: hvd.alltoall(torch.ones(2), torch.tensor([1, 1])), r"as torch\.int32 with"),
    "splits of two dimensions": (
        lambda: hvd.alltoall(torch.ones(2), torch.ones(2, 1, dtype=torch.int32)),
        "with one dimension",
    ),
    "uneven rows": (
        lambda: hvd.alltoall(torch.arange(3)),
        "3 rows do not divide evenly among 2 ranks; pass splits",
    ),
    "a scalar to scatter": (lambda: hvd.reducescatter(torch.tensor(1.0)), "at least one dimension"),
    "nothing to reduce": (lambda: hvd.grouped_allreduce([]), "at least one"),
    "nothing to gather": (lambda: hvd.grouped_allgather([]), "at least one"),
    "nothing to scatter": (lambda: hvd.grouped_reducescatter([]), "at least one"),
}


@pytest.mark.parametrize("what", MEANINGLESS)
@every_rank
def test_a_call_without_meaning_is_a_value_error_and_sends_nothing(what: str) -> None:
    call, told = MEANINGLESS[what]
    with pytest.raises(ValueError, match=told):
        call()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2


@every_rank
def test_operations_that_only_horovods_core_refuses_raise_both_errors() -> None:
    for kind in (hvd.HorovodInternalError, ValueError):
        with pytest.raises(kind, match=r"hvd\.Average, hvd\.Sum"):
            hvd.reducescatter(torch.ones(2), op=hvd.Min)


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (torch.ones(2, 4).t(), "required to be contiguous"),
        (torch.ones(4, dtype=torch.complex64), "not supported"),
        (torch.eye(4).to_sparse(), "not supported"),
    ],
    ids=["view", "complex", "sparse"],
)
@every_rank
def test_tensors_that_cannot_be_sent_are_a_value_error(tensor: torch.Tensor, told: str) -> None:
    calls: list[Callable[[torch.Tensor], Any]] = [
        hvd.allreduce,
        hvd.allreduce_,
        hvd.allgather_async,
        hvd.alltoall,
        hvd.reducescatter,
        lambda one: hvd.broadcast_(one, 0),
        lambda one: hvd.grouped_allreduce([one]),
        lambda one: hvd.grouped_allgather([one]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=told):
            call(tensor)
