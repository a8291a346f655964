"""Ends a process when its parent ends."""

from __future__ import annotations

import ctypes
import os
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
