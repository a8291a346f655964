"""What a process holds: descriptors, threads, sockets and memory."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
from msgspec import Struct

MEBI = 2**20
_MEMORY = re.compile(r"^RssAnon:\s+(\d+) kB", re.MULTILINE)


class Held(Struct, frozen=True):
    """The resources of one process.

    Attributes:
        descriptors: Open files, sockets and shared memory.
        threads: Threads.
        sockets: Internet sockets.
        memory: Anonymous memory in bytes, shared or not: memory that a process shares with others becomes its
            own when they end, which is no growth.
    """

    descriptors: int
    threads: int
    sockets: int
    memory: int


def held(pid: int) -> Held | None:
    """Returns what a process holds; None if it has ended."""
    try:
        process = psutil.Process(pid)
        sockets = len(process.net_connections("inet"))
        memory = _MEMORY.search(Path(f"/proc/{pid}/status").read_text())
        if memory is None:  # a zombie
            return None
        return Held(process.num_fds(), process.num_threads(), sockets, int(memory[1]) << 10)
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return None


def growth(before: Held, after: Held) -> list[str]:
    """Returns which resources a process holds more of than it may after a fault.

    A reconnect may leave one connection in its closing state, and a library starts threads lazily.
    """
    allowed = Held(descriptors=4, threads=4, sockets=4, memory=32 * MEBI)
    return [
        f"{name} grew from {old} to {new}"
        for name in ("descriptors", "threads", "sockets", "memory")
        if (new := getattr(after, name)) > (old := getattr(before, name)) + getattr(allowed, name)
    ]
