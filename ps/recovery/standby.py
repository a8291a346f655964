"""The wait of a standby for the end of its coordinator."""

from __future__ import annotations

import os
import select


def await_end(coordinator: int) -> None:
    """Waits until the coordinator has ended and closed its ports. One that ends by itself kills its standby.

    Args:
        coordinator: Its process id. It is this process's parent unless it has ended.
    """
    if os.getppid() != coordinator:
        return
    alive = os.pidfd_open(coordinator)
    if os.getppid() == coordinator:  # otherwise the descriptor may be of another process
        select.select([alive], [], [])
    os.close(alive)
