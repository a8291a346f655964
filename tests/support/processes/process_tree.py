"""The descendants of this process in /proc, their ends, and the shared memory that they leave."""

from __future__ import annotations

import ctypes
import os
import select
import sys
import time
from collections.abc import Iterable
from pathlib import Path

GRACE = 20.0
"""Seconds within which a process must end after a request; long, because the machine can be busy."""


def descendants() -> set[int]:
    """Returns the live descendants of this process, without multiprocessing's resource tracker."""
    own = Path(f"/proc/self/task/{os.getpid()}/children")
    assert own.exists(), "this kernel lists no children (CONFIG_PROC_CHILDREN): no process could be missed"
    # Read twice: a list that is read while a child ends can lack another child.
    found = {*below(os.getpid()), *below(os.getpid())}
    return {pid for pid in found if "multiprocessing.resource_tracker" not in command(pid)}


def below(pid: int) -> list[int]:
    """Returns the live descendants of a process."""
    found: list[int] = []
    unseen = [pid]
    while unseen:
        started = [child for child in children(unseen.pop()) if parent(child)]
        found += started
        unseen += started
    return found


def coordinators() -> list[int]:
    """Returns the coordinator below this process and its standby, if it has one, by age."""
    return by_age(pid for pid in below(os.getpid()) if runs(pid, "hubring.ps.server_process"))


def by_age(pids: Iterable[int]) -> list[int]:
    """Returns processes, the oldest first: their ids begin again at some time. One that has ended is last."""
    times = {pid: entry(pid, "stat").rpartition(")")[2].split()[19:20] for pid in pids}
    return sorted(times, key=lambda pid: int(*times[pid]) if times[pid] else sys.maxsize)


def runs(pid: int, module: str) -> bool:
    """Whether a process runs this module; a fork has no command line of its own, but a short name."""
    return module in command(pid) or entry(pid, "comm").strip() == module[:15]


def children(pid: int) -> list[int]:
    """Returns the children of all threads from the kernel's lists; reading all processes takes too long."""
    return [int(child) for thread in threads(pid) for child in entry(pid, f"task/{thread}/children").split()]


def parent(pid: int) -> int:
    """Returns the parent's id; 0 for an ended process, including a zombie."""
    state, ppid, *_ = (entry(pid, "stat").rpartition(")")[2] or "X 0").split()
    return 0 if state in "ZX" else int(ppid)


def command(pid: int) -> str:
    return entry(pid, "cmdline").replace("\0", " ").strip()


def entry(pid: int, name: str) -> str:
    """Returns a file of /proc for a process; empty if the process has ended, which can happen at any time."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def threads(pid: int) -> list[int]:
    """Returns a process's command; empty if the process has ended."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except (FileNotFoundError, ProcessLookupError):
        return []


def ends_by(pid: int, deadline: float) -> bool:
    """Waits until the process ends; uses a pidfd instead of polling."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        return bool(ready)
    finally:
        os.close(descriptor)


_PR_SET_CHILD_SUBREAPER = 36


def take_in_orphans() -> None:
    """Makes this process the parent of all descendants that are orphaned from now on; see prctl(2)."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def shared_memory() -> set[str]:
    """Returns the shared memory files, without the temporary semaphores of scikit-learn's joblib."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.loky-")}


def left_behind(before: set[str]) -> set[str]:
    """Returns new files that remain; parallel tests unlink their files immediately."""
    return set.intersection(*(shared_memory() - before for _ in range(3)))
