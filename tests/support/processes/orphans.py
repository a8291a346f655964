"""Orphans: processes whose parent ended before them."""

from __future__ import annotations

import ctypes

_PR_SET_CHILD_SUBREAPER = 36


def take_in_orphans() -> None:
    """Makes this process the parent of every process below it that is orphaned from now on: prctl(2)."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
