"""Ends a process when its parent ends, or waits for that."""

from __future__ import annotations

import ctypes
import os
import select
import signal

PARENT = "HUBRING_PARENT"
"""Environment variable with the id of the process whose end ends this process."""
_PR_SET_PDEATHSIG = 1


def follow(parent: int) -> None:
    """Sends this process SIGTERM when its parent ends.

    Args:
        parent: The process to follow. If it is not the parent, this process ends only if `parent` has
            ended already. 0 for none.
    """
    if os.getppid() == parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # The parent may have ended before prctl.
    if parent and not os.path.exists(f"/proc/{parent}"):
        signal.raise_signal(signal.SIGTERM)


def await_end(parent: int, *also: int) -> None:
    """Waits until the parent has ended and closed its ports; not if it is no longer the parent.

    Args:
        parent: The parent's process id.
        also: Descriptors; the wait ends too when one is readable.
    """
    if os.getppid() != parent:
        return
    alive = os.pidfd_open(parent)
    if os.getppid() == parent:  # otherwise the descriptor may be of another process
        select.select([alive, *also], [], [])
    os.close(alive)
