"""Horovod's handles, names, sets, errors and timeline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hubring.horovod as hvd
from tests.workers.horovod.conftest import Everybody, every_rank, every_rank_of_three


@every_rank
def test_a_handle_is_a_number_that_counts_once() -> None:
    handle = hvd.allreduce_async(torch.ones(2))
    assert isinstance(handle, int)
    assert hvd.poll(handle) in (True, False)
    assert hvd.synchronize(handle).tolist() == [1, 1]
    assert hvd.synchronize(handle) is None
    with pytest.raises(ValueError, match="was not created or has been cleared"):
        hvd.poll(handle)


@every_rank
def test_a_name_under_way_cannot_be_taken_twice() -> None:
    handle = None
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="same")
        with pytest.raises(ValueError, match="is running; call synchronize"):
            hvd.allreduce_async(torch.ones(1), name="same")
    hvd.barrier()
    if handle is None:
        handle = hvd.allreduce_async(torch.ones(1), name="same")
    assert hvd.synchronize(handle).tolist() == [1]


@every_rank
def test_a_mismatch_is_an_error_on_every_rank_that_says_who_sent_what() -> None:
    with pytest.raises(
        hvd.HorovodInternalError, match=r"rank 0 sent.*float32\[2\].*rank 1 sent.*float32\[3\]"
    ):
        hvd.allreduce(torch.ones(2 + hvd.rank()), name="x")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2  # and the job goes on


@every_rank_of_three
def test_what_needs_a_joined_rank_is_an_internal_error_until_all_have_joined() -> None:
    if hvd.rank() != 1:
        with pytest.raises(hvd.HorovodInternalError, match=r"group is not supported after join\(\)"):
            hvd.add_process_set([0, 2])
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
        hvd.barrier()
    assert hvd.join() in (0, 2)
    assert hvd.add_process_set([0, 2]).included() == (hvd.rank() != 1)


@every_rank_of_three
def test_only_members_of_a_set_take_part() -> None:
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


@every_rank
def test_objects_of_any_kind_go_to_all() -> None:
    class Local:
        def __init__(self) -> None:
            self.rows = list(range(hvd.rank()))

    twice = hvd.broadcast_object((lambda x: 2 * x) if hvd.rank() == 1 else None, root_rank=1)
    assert twice(4) == 8
    assert [one.rows for one in hvd.allgather_object(Local())] == [[], [0]]


def test_the_place_is_told_by_rank_and_host(on_two: Everybody) -> None:
    def act() -> tuple[int, ...]:
        assert hvd.is_initialized()
        assert hvd.is_homogeneous()
        return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()

    assert on_two(act) == [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]


def test_capabilities_are_told_truthfully() -> None:
    assert (hvd.mpi_enabled(), hvd.gloo_enabled()) == (False, hvd.gloo_built())
    assert hvd.cuda_built() is torch.backends.cuda.is_built()
    with pytest.raises(ValueError, match="no MPI"):
        hvd.mpi_threads_supported()


def test_before_init_every_function_says_so() -> None:
    calls: list[Callable[[], Any]] = [
        hvd.rank,
        hvd.local_rank,
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.broadcast_async(torch.ones(1), 0),
        lambda: hvd.reducescatter(torch.ones(1), op=hvd.Min),
        hvd.stop_timeline,
        hvd.barrier,
        hvd.join,
    ]
    for call in calls:
        for kind in (hvd.HorovodInternalError, ValueError):
            with pytest.raises(kind, match=r"not been initialized; use hvd\.init\(\)"):
                call()
    assert not hvd.is_initialized()
    assert hvd.synchronize(7) is None
    with pytest.raises(ValueError, match="was not created"):
        hvd.poll(7)
    assert hvd.global_process_set.ranks == []
    assert str(hvd.global_process_set) == "ProcessSet(process_set_id=0, ranks=[], mpi_comm=None)"
    hvd.shutdown()


@every_rank
def test_a_polled_result_is_in_place() -> None:
    alone = [hvd.add_process_set([rank]) for rank in range(2)][hvd.rank()]
    tensor = torch.full((2,), hvd.rank() + 1.0)
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
    while not hvd.poll(handle):
        hvd.allreduce(torch.ones(1), name=f"pass the time {hvd.rank()}", process_set=alone)
    assert tensor.tolist() == [3, 3]
    assert hvd.synchronize(handle) is tensor


@every_rank
def test_a_set_has_no_rank_for_those_outside_and_numbers_are_used_again() -> None:
    first, second = hvd.add_process_set([0]), hvd.add_process_set([1])
    assert (first.process_set_id, second.process_set_id) == (1, 2)
    with pytest.raises(ValueError, match="is not a member"):
        (first, second)[1 - hvd.rank()].rank()
    assert hvd.remove_process_set(first)
    assert hvd.add_process_set([0]).process_set_id == 1


def test_rank_0_writes_a_complete_event_for_every_operation(on_two: Everybody, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"

    def act() -> str:
        hvd.allreduce(torch.ones(2), name="before")
        hvd.start_timeline(str(file), mark_cycles=True)
        hvd.allreduce(torch.ones(2), name="loss")
        hvd.allreduce(torch.ones(2), name="loss")  # by then the line about the first is written
        so_far = file.read_text() if hvd.rank() == 0 else ""
        hvd.allgather(torch.ones(2), name="rows")
        hvd.stop_timeline()
        hvd.allreduce(torch.ones(2), name="after")
        return so_far

    # A run that dies leaves a file whose array has no end: the viewers forgive that; json does not.
    so_far = json.loads(on_two(act)[0].rstrip().rstrip(",") + "]")
    assert "ALLREDUCE" in [event["name"] for event in so_far]
    events = json.loads(file.read_text())
    operations = [event for event in events if event["ph"] == "X"]
    expected = [("ALLREDUCE", "allreduce.loss")] * 2 + [("ALLGATHER", "allgather.rows")]
    waits = [one for one in operations if one["name"].startswith("NEGOTIATE_")]
    operations = [one for one in operations if one not in waits]
    assert [(one["name"], one["args"]["tensor"]) for one in operations] == expected
    assert [(one["name"][len("NEGOTIATE_") :], one["args"]["tensor"]) for one in waits] == expected
    for wait, one in zip(waits, operations, strict=False):
        assert wait["ts"] + wait["dur"] == pytest.approx(one["ts"])
    for one in waits + operations:
        assert min(one["ts"], one["dur"]) >= 0
        assert {"pid", "tid", "cat"} <= one.keys()
    rows = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert rows == {"allreduce.loss": 1, "allgather.rows": 2}
    assert [one["tid"] for one in operations] == [1, 1, 2]
