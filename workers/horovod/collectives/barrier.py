"""`barrier` and `join`: ranks wait for each other without a tensor."""

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
        ValueError: This rank is not a member of the set.
        HorovodInternalError: A rank is lost.
    """
    world, members = current(), checked(process_set)

    def start(full: str) -> Any:
        here = world.communicator
        return [collectives.barrier_async(full, group=members.group, communicator=here)]

    synchronize(world.begin("barrier", None, members, start, lambda result: None))


def join(device: int = -1) -> int:
    """Declares that this rank has no more data, and waits until all ranks have called `join`.

    Until then this rank contributes zeros to the others' allreduces. Their barriers do not wait for it. Any
    other operation, such as an allgather or a sparse allreduce, raises HorovodInternalError on the ranks that
    call it, as in Horovod: this rank's part would be missing.

    Args:
        device: Accepted, but has no effect: Horovod allocates the zeros there, but Hubring allocates none.

    Returns:
        The last rank that called `join`.

    Raises:
        HorovodInternalError: A rank is lost.
    """
    world = current()
    with translated():
        last = collectives.join(communicator=world.communicator)
    world.recount_unnamed()
    return world.members.index(last)
