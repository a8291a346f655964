"""CPU time of a child and its descendants."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(session: int) -> float:
    """Returns the CPU seconds that the living processes of a session have used.

    Args:
        session: Id of the session, which is the pid of its leader.
    """
    return sum(ticks for leader, ticks in _living() if leader == session) / _TICKS


def _living() -> list[tuple[int, int]]:
    """Returns session and used ticks of every process; see proc(5), /proc/pid/stat."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has just ended
        found.append((int(fields[3]), int(fields[11]) + int(fields[12])))
    return found
