"""join(): what is refused while a rank waits there; tests/contract/test_groups.py has the collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hubring.horovod as hvd
from hubring.workers.horovod import lifecycle
from hubring.workers.horovod.world import current
from hubring.workers.launchers.placement import Placement
from tests.workers.horovod.conftest import Everybody

REFUSED: dict[str, Callable[[], Any]] = {
    "grouped allgather": lambda: hvd.grouped_allgather([torch.ones(2), torch.ones(3)]),
    "allgather of objects": lambda: hvd.allgather_object("mine"),
    "broadcast in place": lambda: hvd.broadcast_(torch.ones(2), 2),
    "broadcast of parameters": lambda: hvd.broadcast_parameters({"weight": torch.ones(2)}, 0),
    "grouped reduce_scatter": lambda: hvd.grouped_reducescatter([torch.ones(3)]),
    "group": lambda: hvd.add_process_set([0, 2]),
    "allgather of init": lambda: lifecycle.begin(current().communicator, Placement(), thread=True),
}


@pytest.mark.parametrize("what", REFUSED)
def test_operations_that_need_the_joined_rank_are_refused(on_three: Everybody, what: str) -> None:
    words = {"allgather", "broadcast", "reduce_scatter", "group"} & set(what.split())
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
