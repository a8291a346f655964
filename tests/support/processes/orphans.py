"""Adopts orphans: processes whose parent has ended."""

from __future__ import annotations

import ctypes

_PR_SET_CHILD_SUBREAPER = 36


def take_in_orphans() -> None:
    """Makes this process the parent of all descendants that are orphaned from now on; see prctl(2)."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
