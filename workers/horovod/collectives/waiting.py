"""`poll` and `synchronize`."""

from __future__ import annotations

from typing import Any

from hubring.workers.horovod.collectives.handles import Handles
from hubring.workers.horovod.world.world import started


def poll(handle: int) -> bool:
    """Whether the operation has ended. If so, the tensor of an in-place operation holds the result.

    Raises:
        ValueError: The handle is unknown, or was synchronized before.
    """
    world = started()
    return (Handles() if world is None else world.handles).poll(handle)


def synchronize(handle: int) -> Any:
    """Waits until an operation ends.

    Returns:
        The result: a tensor or a tuple of tensors; None for a handle that was synchronized before.

    Raises:
        HorovodInternalError: Ranks disagree, or a rank is lost. The message names the ranks.
    """
    world = started()
    return None if world is None else world.handles.synchronize(handle)
