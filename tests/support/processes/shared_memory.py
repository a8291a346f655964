"""Leftover shared memory."""

from __future__ import annotations

import os


def shared_memory() -> set[str]:
    """Returns the shared memory files, without the temporary semaphores of scikit-learn's joblib."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.loky-")}


def left_behind(before: set[str]) -> set[str]:
    """Returns new files that remain; parallel tests unlink their files immediately."""
    return set.intersection(*(shared_memory() - before for _ in range(3)))
