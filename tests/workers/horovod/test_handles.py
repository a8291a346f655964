"""Horovod's handles, names, sets and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hubring.horovod as hvd
from tests.workers.horovod.conftest import Everybody


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
            with pytest.raises(ValueError, match="is running; call synchronize"):
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
            with pytest.raises(ValueError, match="rank 1 is not a member"):
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
