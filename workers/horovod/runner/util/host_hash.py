"""A name of this host that differs between containers."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

__all__ = ["host_hash"]

NAMESPACES = Path("/proc/self/ns")


def host_hash(salt: object = None) -> str:
    """Returns the host's short name, a dash and a hash; equal for processes that can share memory.

    Args:
        salt: Distinguishes groups of processes on one host; None: no groups.
    """
    name = socket.gethostname()
    parts = (
        [name, *sorted(str(one.readlink()) for one in NAMESPACES.iterdir())]
        if NAMESPACES.exists()
        else [name]
    )
    digest = hashlib.sha256("\n".join([*parts, str(salt or "")]).encode()).hexdigest()
    return f"{name.partition('.')[0]}-{digest[:32]}"
