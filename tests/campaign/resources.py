"""What a process holds: descriptors, threads, sockets and memory."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

MEBI = 2**20


@dataclass(frozen=True)
class Held:
    """The resources of one process.

    Attributes:
        descriptors: Open files, sockets and shared memory.
        threads: Threads.
        sockets: Internet sockets.
        memory: Private memory in bytes.
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
        return Held(process.num_fds(), process.num_threads(), sockets, process.memory_full_info().uss)
    except psutil.NoSuchProcess:
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
