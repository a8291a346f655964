"""Processes below this one, as /proc lists them, and their ends."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

GRACE = 20.0
"""Seconds in which a process that was told to end may do so; a busy machine takes its time."""


def descendants() -> set[int]:
    """Live processes below this one; multiprocessing's own servant, which stays for good, is none of them."""
    own = Path(f"/proc/self/task/{os.getpid()}/children")
    assert own.exists(), "this kernel lists no children (CONFIG_PROC_CHILDREN): no process could be missed"
    found = {*below(os.getpid()), *below(os.getpid())}  # a list that is read as a child ends may lack another
    return {pid for pid in found if "multiprocessing.resource_tracker" not in command(pid)}


def below(pid: int) -> list[int]:
    """Live processes that this one started, and those that they started."""
    found: list[int] = []
    unseen = [pid]
    while unseen:
        started = [child for child in children(unseen.pop()) if parent(child)]
        found += started
        unseen += started
    return found


def children(pid: int) -> list[int]:
    """What each of its threads started, as the kernel lists it: to look at all processes takes too long."""
    return [int(child) for thread in threads(pid) for child in entry(pid, f"task/{thread}/children").split()]


def parent(pid: int) -> int:
    """Its parent's id; 0 for a process that has ended, whether or not somebody waited for it."""
    state, ppid, *_ = (entry(pid, "stat").rpartition(")")[2] or "X 0").split()
    return 0 if state in "ZX" else int(ppid)


def command(pid: int) -> str:
    return entry(pid, "cmdline").replace("\0", " ").strip()


def entry(pid: int, name: str) -> str:
    """What /proc holds of a process; nothing once it has ended, as it may while somebody looks."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def threads(pid: int) -> list[int]:
    """Of a process; none once it has ended."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except (FileNotFoundError, ProcessLookupError):
        return []


def ends_by(pid: int, deadline: float) -> bool:
    """Waits for the process's end, by its descriptor rather than by looking again and again."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        return bool(ready)
    finally:
        os.close(descriptor)
