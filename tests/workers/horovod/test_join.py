"""join(): what the other ranks can still do while a rank waits there, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hubring.horovod as hvd
from hubring.workers.horovod.world import lifecycle
from hubring.workers.horovod.world.world import current
from hubring.workers.launchers.placement import Placement
from tests.workers.horovod.conftest import Everybody

REFUSED: dict[str, Callable[[], Any]] = {
    "allgather": lambda: hvd.allgather(torch.ones(2)),
    "grouped allgather": lambda: hvd.grouped_allgather([torch.ones(2), torch.ones(3)]),
    "allgather of objects": lambda: hvd.allgather_object("mine"),
    "broadcast": lambda: hvd.broadcast(torch.ones(2), 0),
    "broadcast in place": lambda: hvd.broadcast_(torch.ones(2), 2),
    "broadcast of parameters": lambda: hvd.broadcast_parameters({"weight": torch.ones(2)}, 0),
    "alltoall": lambda: hvd.alltoall(torch.ones(3)),
    "reduce_scatter": lambda: hvd.reducescatter(torch.ones(3)),
    "grouped reduce_scatter": lambda: hvd.grouped_reducescatter([torch.ones(3)]),
    "sparse allgather": lambda: hvd.sparse_allreduce_async(torch.ones(2).to_sparse(), "sparse", hvd.Sum)(),
    "group": lambda: hvd.add_process_set([0, 2]),
    "allgather of init": lambda: lifecycle.begin(current().communicator, Placement(), thread=True),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_miss_the_joined_rank_is_refused_on_every_other_rank(
    on_three: Everybody, what: str
) -> None:
    words = {"allgather", "broadcast", "alltoall", "reduce_scatter", "group"} & set(what.split())
    told = rf"{words.pop()} is not supported after join\(\): rank 1 has joined"

    def act() -> int:
        if hvd.rank() != 1:
            with pytest.raises(hvd.HorovodInternalError, match=told):
                REFUSED[what]()
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
            hvd.barrier()
        last = hvd.join()
        assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == [0, 1, 2]
        some = hvd.add_process_set([0, 2])
        assert some.included() == (hvd.rank() != 1)
        return last

    last = on_three(act)
    assert len(set(last)) == 1
    assert last[0] != 1


def test_an_operation_that_began_before_the_join_is_whole(on_three: Everybody) -> None:
    def act() -> list[int]:
        handle = hvd.allgather_async(torch.tensor([hvd.rank()]), name="whole")
        if hvd.rank() == 1:
            hvd.join()
        rows: list[int] = hvd.synchronize(handle).tolist()
        if hvd.rank() != 1:
            hvd.join()
        return rows

    assert on_three(act) == [[0, 1, 2]] * 3


def test_a_process_set_without_the_joined_rank_goes_on(on_three: Everybody) -> None:
    def act() -> list[int]:
        some = hvd.add_process_set([0, 2])
        mine = torch.tensor([hvd.rank()])
        rows: list[int] = hvd.allgather(mine, process_set=some).tolist() if some.included() else []
        hvd.join()
        return rows

    assert on_three(act) == [[0, 2], [], [0, 2]]
