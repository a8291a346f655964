"""`barrier` and `join`: where ranks wait for each other without any tensor."""

from __future__ import annotations

from typing import Any

from hubring.workers import collectives
from hubring.workers.horovod.collectives.waiting import synchronize
from hubring.workers.horovod.errors import translated
from hubring.workers.horovod.world.process_set import ProcessSet, checked, global_process_set
from hubring.workers.horovod.world.world import current


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns once every rank of the set has called it.

    Raises:
        ValueError: This rank is no member of the set.
        HorovodInternalError: Somebody is gone.
    """
    world, members = current(), checked(process_set)

    def start(full: str) -> Any:
        here = world.communicator
        return [collectives.barrier_async(full, group=members.group, communicator=here)]

    synchronize(world.begin("barrier", None, members, start, lambda result: None))


def join(device: int = -1) -> int:
    """Tells that this rank has no more data, and waits until all ranks have told so.

    Until then the others' allreduces get zeros from it, and their allgathers no rows.

    Args:
        device: Where Horovod makes the zeros; without effect here, where none are made.

    Returns:
        The last rank that joined.

    Raises:
        HorovodInternalError: Somebody is gone.
    """
    world = current()
    with translated():
        last = collectives.join(communicator=world.communicator)
    return world.members.index(last)
