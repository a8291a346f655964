"""Identifies the kernel that runs this process by its boot id."""

from __future__ import annotations

import socket
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def name_kernel() -> str:
    """Returns an id that all processes on one kernel share, in containers too.

    Falls back to the host name if the kernel has no boot id.
    """
    return _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()
