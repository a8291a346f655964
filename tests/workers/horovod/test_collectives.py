"""Horovod's operations: names, argument orders, results, in-place rules, handles and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hubring.workers.horovod as hvd
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
        with pytest.raises(ValueError, match="3 rows cannot be dealt out equally"):
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


def test_named_operations_may_come_in_any_order(on_two: Everybody) -> None:
    def act() -> list[float]:
        names = ["a", "b", "c"][:: 1 if hvd.rank() == 0 else -1]
        handles = {name: hvd.allreduce_async(torch.tensor(float(ord(name))), name=name) for name in names}
        return [hvd.synchronize(handles[name]).item() for name in "abc"]

    assert on_two(act) == [[97, 98, 99]] * 2


def test_a_handle_is_a_number_that_counts_once(on_two: Everybody) -> None:
    def act() -> None:
        handle = hvd.allreduce_async(torch.ones(2))
        assert isinstance(handle, int)
        assert hvd.poll(handle) in (True, False)
        assert hvd.synchronize(handle).tolist() == [1, 1]
        assert hvd.synchronize(handle) is None
        with pytest.raises(ValueError, match="was not created or has been cleared"):
            hvd.poll(handle)

    on_two(act)


def test_a_name_under_way_cannot_be_taken_twice(on_two: Everybody) -> None:
    def act() -> None:
        handle = None
        if hvd.rank() == 0:
            handle = hvd.allreduce_async(torch.ones(1), name="same")
            with pytest.raises(ValueError, match="is under way"):
                hvd.allreduce_async(torch.ones(1), name="same")
        hvd.barrier()
        if handle is None:
            handle = hvd.allreduce_async(torch.ones(1), name="same")
        assert hvd.synchronize(handle).tolist() == [1]

    on_two(act)


MISMATCHES: dict[str, tuple[Callable[[int], Any], str]] = {
    "shape": (lambda rank: hvd.allreduce(torch.ones(2 + rank), name="x"), r"float32\[2\].*float32\[3\]"),
    "dtype": (
        lambda rank: hvd.allreduce(torch.ones(2, dtype=(torch.float32, torch.float64)[rank]), name="x"),
        "float32.*float64",
    ),
    "op": (
        lambda rank: hvd.allreduce(torch.ones(2), name="x", op=(hvd.Sum, hvd.Max)[rank]),
        "rank 0 sent.*sum.*rank 1 sent.*max",
    ),
    "root": (lambda rank: hvd.broadcast(torch.ones(2), rank, name="x"), "from rank 0.*from rank 1"),
    "columns": (lambda rank: hvd.allgather(torch.ones(2, 2 + rank), name="x"), r"\[2, 2\].*\[2, 3\]"),
    "broadcast shape": (lambda rank: hvd.broadcast(torch.ones(2 + rank), 0, name="x"), r"\[2\].*\[3\]"),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_a_mismatch_is_an_error_on_every_rank_that_says_who_sent_what(on_two: Everybody, what: str) -> None:
    call, told = MISMATCHES[what]

    def act() -> None:
        with pytest.raises(hvd.HorovodInternalError, match=told):
            call(hvd.rank())
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2  # and the job goes on

    on_two(act)


def test_calls_without_meaning_are_value_errors(on_two: Everybody) -> None:
    def act() -> None:
        tensor = torch.ones(2)
        with pytest.raises(ValueError, match="supersedes average"):
            hvd.allreduce(tensor, average=True, op=hvd.Sum)
        with pytest.raises(ValueError, match="op is 17"):
            hvd.allreduce(tensor, op=17)
        with pytest.raises(ValueError, match="root_rank is 2"):
            hvd.broadcast(tensor, root_rank=2)
        with pytest.raises(ValueError, match="process_set is 'all'"):
            hvd.allreduce(tensor, process_set="all")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"no average of torch\.bool"):
            hvd.allreduce(torch.tensor([True]))
        assert hvd.allreduce(tensor, False).tolist() == [2, 2]

    with pytest.warns(DeprecationWarning, match="average="):
        on_two(act)


def test_join_gives_zeros_until_all_have_joined(on_two: Everybody) -> None:
    def act() -> tuple[list[float], int]:
        sums = [hvd.allreduce(torch.ones(1), name=f"step{step}").item() for step in range(1 + hvd.rank())]
        return sums, hvd.join()

    assert on_two(act) == [([1.0], 1), ([1.0, 0.5], 1)]


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


def test_only_members_of_a_set_take_part(on_three: Everybody) -> None:
    def act() -> None:
        some = hvd.add_process_set(hvd.ProcessSet([2, 0]))
        assert (some.ranks, some.size(), some.included()) == ([0, 2], 2, hvd.rank() != 1)
        if some.included():
            assert some.rank() == hvd.rank() // 2
            assert hvd.allreduce(torch.tensor(1.0), op=hvd.Sum, process_set=some).item() == 2
            assert hvd.allgather(torch.tensor([hvd.rank()]), process_set=some).tolist() == [0, 2]
            assert hvd.broadcast(torch.tensor(hvd.rank()), 2, process_set=some).item() == 2
            assert hvd.broadcast_object(f"from {hvd.rank()}", 2, process_set=some) == "from 2"
            hvd.barrier(process_set=some)
            with pytest.raises(ValueError, match="root_rank is 1"):
                hvd.broadcast(torch.ones(1), 1, process_set=some)
        else:
            with pytest.raises(ValueError, match="rank 1 is no member"):
                hvd.allreduce(torch.ones(1), process_set=some)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3
        with pytest.raises(ValueError, match="duplicate"):
            hvd.add_process_set([0, 2])
        assert hvd.remove_process_set(some)
        assert some.process_set_id is None
        assert not hvd.remove_process_set(some)
        assert not hvd.remove_process_set(hvd.global_process_set)
        with pytest.raises(ValueError, match="was not added"):
            hvd.allreduce(torch.ones(1), process_set=some)
        assert hvd.add_process_set([0, 2]).process_set_id is not None

    on_three(act)


def test_objects_of_any_kind_go_to_all(on_two: Everybody) -> None:
    def act() -> tuple[Any, Any]:
        mine = {"rank": hvd.rank(), "rows": list(range(hvd.rank()))}
        sent = hvd.broadcast_object(mine if hvd.rank() == 1 else None, root_rank=1)
        return sent, hvd.allgather_object(mine)

    for sent, gathered in on_two(act):
        assert sent == {"rank": 1, "rows": [0]}
        assert gathered == [{"rank": 0, "rows": []}, {"rank": 1, "rows": [0]}]


def test_the_place_is_told_by_rank_and_host(on_two: Everybody) -> None:
    def act() -> tuple[int, ...]:
        assert hvd.is_initialized()
        assert hvd.is_homogeneous()
        return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()

    assert on_two(act) == [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]


def test_before_init_every_function_says_so() -> None:
    calls: list[Callable[[], Any]] = [
        hvd.rank,
        hvd.size,
        hvd.local_rank,
        lambda: hvd.allreduce(torch.ones(1)),
        hvd.stop_timeline,
        hvd.barrier,
        hvd.join,
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"use hvd\.init\(\)"):
            call()
    assert not hvd.is_initialized()


def test_capabilities_are_told_truthfully() -> None:
    assert not hvd.mpi_built()
    assert not hvd.mpi_enabled()
    assert not hvd.ddl_built()
    assert not hvd.ccl_built()
    assert hvd.gloo_built() is hvd.gloo_enabled() is torch.distributed.is_gloo_available()
    assert bool(hvd.nccl_built()) is torch.distributed.is_nccl_available()
    assert hvd.cuda_built() is torch.backends.cuda.is_built()
    with pytest.raises(ValueError, match="no MPI"):
        hvd.mpi_threads_supported()
