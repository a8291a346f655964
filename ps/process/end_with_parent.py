"""A process that ends with the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def follow(parent: int) -> None:
    """Ends this process, as by SIGTERM, when its parent ends.

    Args:
        parent: The process to end with; if it is not our parent, we end only where it is gone already.
            0: none.
    """
    if os.getppid() == parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # It may have ended before it could be followed.
    if parent and not os.path.exists(f"/proc/{parent}"):
        signal.raise_signal(signal.SIGTERM)
