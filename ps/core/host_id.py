"""Which kernel runs this process, by the id that it drew when it booted."""

from __future__ import annotations

import socket
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def name_kernel() -> str:
    """Equal for all processes of one machine, also in containers; the host's name where no kernel tells."""
    return _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()
