"""Shared memory: the hub's own, which has no name, and /dev/shm, where others keep theirs."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hubring.ps.doctor.finding import Finding, failure, ok, warning
from hubring.ps.doctor.sizes import GIB, MIB, spelt

OURS = "shared memory"
SHM = "/dev/shm"  # noqa: S108 - what is examined

LEAST = 16 * MIB
"""NCCL's pieces have 9.6 MB each, and a DataLoader's batch of images tens."""

ENOUGH = 1 * GIB
"""What NVIDIA advises for containers with NCCL; Docker gives 64 MiB unless told."""

_LARGER = (
    "mount -o remount,size=1g /dev/shm; docker run --shm-size 1g, Compose shm_size: 1gb, Kubernetes an"
    " emptyDir of medium Memory at /dev/shm"
)


def judge(total: int, free: int, trouble: str) -> Finding:
    """Whether there is room for what DataLoader's processes and NCCL pass on.

    Args:
        total: Bytes.
        free: Bytes.
        trouble: Why nothing can be written there; empty if it can.
    """
    users = "DataLoader(num_workers=...) and NCCL need it, the hub does not"
    if trouble:
        mend = "mount -t tmpfs -o size=1g,mode=1777 tmpfs /dev/shm"
        return failure(SHM, f"{trouble}; {users}", mend)
    found = f"{spelt(free)} of {spelt(total)} free"
    if free < LEAST:
        return failure(SHM, f"{found}: not enough for one batch; {users}", _LARGER)
    if free < ENOUGH:
        return warning(SHM, f"{found}: may run out (a bus error); {users}", _LARGER)
    return ok(SHM, found)


def judge_own(trouble: str) -> Finding:
    """Whether workers and shards of one host can share memory; `trouble` says why not."""
    if trouble:
        return failure(
            OURS,
            f"memory without a name (memfd) cannot be had: {trouble}",
            "ps-worker --transport zmq; or Linux from 5.1 on, and no seccomp profile against memfd_create",
        )
    return ok(OURS, "workers and shards of this host can share memory (memfd)")


def examine() -> Iterator[Finding]:
    """Writes a byte to each."""
    yield judge_own(_own_trouble())
    trouble = _trouble(Path(SHM))
    room = None if trouble else os.statvfs(SHM)
    yield (
        judge(room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize, "")
        if room
        else judge(0, 0, trouble)
    )


def _own_trouble() -> str:
    from hubring.ps.transport.shm.segment import Arena

    try:
        Arena(guarded=True).allocate(1)[0] = 1
    except OSError as error:
        return str(error)
    return ""


def _trouble(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no {folder}"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"1")
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return ""  # its size tells
        return f"cannot be written: {error.strerror}"
    return ""
