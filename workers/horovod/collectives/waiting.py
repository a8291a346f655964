"""`poll` and `synchronize`: what became of a handle."""

from __future__ import annotations

from typing import Any

from hubring.workers.horovod.collectives.handles import Handles
from hubring.workers.horovod.world.world import started


def poll(handle: int) -> bool:
    """Whether the operation is over, so that `synchronize` returns at once and an in-place result is there.

    Raises:
        ValueError: There is no such operation, or it was synchronised already.
    """
    world = started()
    return (Handles() if world is None else world.handles).poll(handle)


def synchronize(handle: int) -> Any:
    """Waits for an operation to end.

    Returns:
        Its result: a tensor, or a tuple of them; None for a handle that was synchronised already.

    Raises:
        HorovodInternalError: Ranks disagree, or somebody is gone; says who sent what.
    """
    world = started()
    return None if world is None else world.handles.synchronize(handle)
