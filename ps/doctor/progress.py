"""Tells a process that works slowly from one that hangs."""

from __future__ import annotations

import os
from pathlib import Path

from hubring.ps.doctor.machine import allowed_cores

_BLOCK_IO_TICKS = 41
"""Index of the field of /proc/PID/stat that counts ticks of waiting for a disk."""


def seconds_at_work(pid: int) -> float:
    """Returns how long a process has computed, waited for a core or waited for a disk; 0 if unknown.

    A process that waits for a lock, a driver or a name server does none of these.
    """
    folder = Path(f"/proc/{pid}")
    try:
        on_core, for_core, _ = map(int, (folder / "schedstat").read_text().split())
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return 0.0
    for_disk = int(fields[_BLOCK_IO_TICKS - 2]) / os.sysconf("SC_CLK_TCK")
    return (on_core + for_core) / 1e9 + for_disk


def load() -> str:
    """Returns how busy this machine is, in words."""
    return f"load {os.getloadavg()[0]:.1f} on {allowed_cores():.3g} core(s)"
