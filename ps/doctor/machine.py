"""This machine: cores, memory, shared memory, the checkpoint folder, and the clock.

The control group of this process limits how many cores and how much memory it can use (cgroups(7), version 2;
limits of version 1 are not read).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from hubring.ps.checkpoint.checkpoint_folder import published, sync
from hubring.ps.doctor.check import GIB, MIB, Finding, failure, format_bytes, ok, skipped, warning


class CgroupMemory(NamedTuple):
    """A group's memory limit and use, in bytes. `used` excludes file pages that the kernel can drop."""

    limit: int
    used: int


class Cgroup:
    """Reads the limits of one process from its control group and the groups above.

    Args:
        process: The folder of the process in /proc.
    """

    def __init__(self, process: Path = Path("/proc/self")) -> None:
        self._folders: list[Path] = []
        own = [line[3:] for line in (process / "cgroup").read_text().splitlines() if line.startswith("0::")]
        for line in (process / "mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            if own and after.startswith("cgroup2 "):
                root, point = before.split(" ")[3:5]
                path = PurePosixPath(own[0])
                # In a container, the mount can start at the group itself, under another name than outside.
                inside = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath()
                self._folders = [Path(point) / part for part in (inside, *inside.parents)]

    def cores(self) -> float | None:
        """Returns the CPU quota in cores, or None if there is no limit."""
        quotas = [file.read_text().split() for _, file in self._limits("cpu.max")]
        return min((int(quota) / int(period) for quota, period in quotas), default=None)

    def memory(self) -> CgroupMemory | None:
        """Returns the limit of the group with the least memory left, or None if there is no limit."""
        limited = [_memory_of(folder, int(file.read_text())) for folder, file in self._limits("memory.max")]
        return min(limited, key=lambda memory: memory.limit - memory.used, default=None)

    def _limits(self, name: str) -> Iterator[tuple[Path, Path]]:
        """Yields the groups that have such a limit, and the limit's file."""
        for folder in self._folders:
            file = folder / name
            if file.exists() and not file.read_text().startswith("max"):
                yield folder, file


def _memory_of(folder: Path, limit: int) -> CgroupMemory:
    stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
    used = int((folder / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
    return CgroupMemory(limit, max(0, used))


MEMORY, SHARED, DISK, CLOCK = "memory", "shared memory", "checkpoint dir", "clock"
SHM = "/dev/shm"  # noqa: S108 - examined, not used

LEAST_MEMORY = 512 * MIB
"""For a shard and one worker of a small job. Each uses about 200 MiB for torch, without parameters."""

ENOUGH_MEMORY = 2 * GIB
"""For a hub and two workers of a medium-sized job."""

LEAST_SHM = 16 * MIB
"""An NCCL segment takes 9.6 MB; a DataLoader's batch of images takes tens of MB."""

ENOUGH_SHM = 1 * GIB
"""NVIDIA recommends this for NCCL in containers. Docker's default is 64 MiB."""

WRITTEN = datetime(2026, 1, 1, tzinfo=UTC)
"""Older than every release of this program: a clock that shows an earlier time is not set."""


def allowed_cores() -> float:
    """Returns the CPU time that this process can use, in cores."""
    here = float(len(os.sched_getaffinity(0)))
    return min(here, Cgroup().cores() or here)


def judge_memory(total: int, available: int, group: CgroupMemory | None) -> Finding:
    """Judges whether a job fits into memory. All values are in bytes."""
    found = f"{format_bytes(available)} of {format_bytes(total)} available"
    fix = "stop other programs (ps aux --sort -rss lists them), or use a machine with more memory"
    if group is not None and group.limit - group.used < available:
        available = max(0, group.limit - group.used)
        found = f"{format_bytes(available)} left of the control group's limit of {format_bytes(group.limit)}"
        fix = "raise the limit: docker run --memory, Compose mem_limit, Kubernetes limits.memory, SLURM --mem"
    if available < LEAST_MEMORY:
        found += f"; a server and a worker need {format_bytes(LEAST_MEMORY)} without a model"
        return failure(MEMORY, found, fix)
    if available < ENOUGH_MEMORY:
        return warning(MEMORY, f"{found}: enough only for a small job", fix)
    return ok(MEMORY, found)


def examine_memory() -> Iterator[Finding]:
    """Reads the machine's memory and the control group's limit."""
    import psutil

    memory = psutil.virtual_memory()
    yield judge_memory(memory.total, memory.available, Cgroup().memory())


def judge_shared(trouble: str) -> Finding:
    """Judges whether workers and shards on the same host can share memory. `trouble` is why not, or empty."""
    if not trouble:
        return ok(SHARED, "workers and shards on this host can share memory (memfd)")
    fix = (
        "use ps-worker --transport zmq; or Linux 5.1 or later and a seccomp profile that allows memfd_create"
    )
    return failure(SHARED, f"cannot create shared memory with memfd: {trouble}", fix)


def judge_shm(total: int, free: int) -> Finding:
    """Judges whether /dev/shm is large enough for DataLoader's processes and NCCL. Values are in bytes."""
    users = "DataLoader(num_workers=...) and NCCL need it, the hub does not"
    found = f"{format_bytes(free)} of {format_bytes(total)} free"
    fix = (
        f"mount -o remount,size=1g {SHM}; in containers: docker run --shm-size 1g, Compose shm_size: 1gb, or"
        f" in Kubernetes an emptyDir of medium Memory at {SHM}"
    )
    if free < LEAST_SHM:
        return failure(SHM, f"{found}: not enough for one batch; {users}", fix)
    if free < ENOUGH_SHM:
        return warning(SHM, f"{found}: can run out, which raises a bus error; {users}", fix)
    return ok(SHM, found)


def examine_shared() -> Iterator[Finding]:
    """Writes a byte to a memfd, which the hub uses; reads the size of /dev/shm, which others use."""
    yield judge_shared(_memfd_trouble())
    total, _, free = shutil.disk_usage(SHM)
    yield judge_shm(total, free)


def judge_clock(wall: datetime) -> Finding:
    """Judges the time of day. Leases use another clock, which the kernel never sets back."""
    if wall < WRITTEN:
        found = f"the clock shows {wall:%Y-%m-%d %H:%M}, before this program existed: it is not set"
        return warning(CLOCK, found, "timedatectl set-ntp true, or chronyc makestep")
    return ok(CLOCK, f"{wall:%Y-%m-%d %H:%M:%S} UTC")


def examine_clock() -> Iterator[Finding]:
    """Reads the clock."""
    yield judge_clock(datetime.now(UTC))


ENOUGH_DISK = 1 * GIB
"""Assumed size of a first checkpoint: 80 million fp32 parameters and Adam's two moments."""

TRIED_BYTES = 1 * MIB
SLOW_SECONDS = 1.0
"""Limit for syncing TRIED_BYTES; a disk takes milliseconds."""

_MEMORY = "in memory: lost when this machine restarts"
_LAYER = "on a container's own layer: lost with the container"
_PASSING = {"tmpfs": _MEMORY, "ramfs": _MEMORY, "overlay": _LAYER}


def judge_disk(folder: Path, seconds: float, free: int, kind: str, newest: int) -> Finding:
    """Judges whether a folder, which can be written to, is a good place for checkpoints.

    Args:
        folder: The folder.
        seconds: Time to write and sync TRIED_BYTES.
        free: Free space in bytes.
        kind: The kernel's name of the file system.
        newest: Size of the newest checkpoint in bytes; 0 if there is none.
    """
    room = f"{format_bytes(free)} free"
    make_room = f"free some space (df -h {folder}), or use another --checkpoint-dir"
    if free < newest:
        found = f"{folder}: {room}, but the newest checkpoint takes {format_bytes(newest)}"
        return failure(DISK, found, make_room)
    if free < ENOUGH_DISK and not newest:
        return warning(DISK, f"{folder}: only {room}; a large model's checkpoint needs more", make_room)
    if kind in _PASSING:
        fix = "use a volume or a disk (docker run -v, or a Kubernetes PersistentVolumeClaim)"
        return warning(DISK, f"{folder} is {_PASSING[kind]}", fix)
    synced = f"{folder}: {room}, {format_bytes(TRIED_BYTES)} synced in {seconds * 1e3:.3g} ms"
    if seconds > SLOW_SECONDS:
        fix = "use a --checkpoint-dir on a local disk, or reduce the load on this disk"
        return warning(DISK, synced, fix)
    return ok(DISK, synced)


def examine_disk(folder: Path | None) -> Iterator[Finding]:
    """Writes a file to the folder, or to its nearest parent that exists, and removes it."""
    if folder is None:
        yield skipped(DISK, "not set (--checkpoint-dir, PS_CHECKPOINT_DIR): a job saves no checkpoints")
        return
    folder = folder.absolute()
    tried = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    began = time.monotonic()
    try:
        _write(tried)
    except OSError as error:
        found = f"user {os.geteuid()} cannot write to {tried}: {error.strerror}"
        fix = f"check df -h {tried}, ls -ld {tried} and mount, or use another --checkpoint-dir"
        yield failure(DISK, found, fix)
    else:
        seconds, free = time.monotonic() - began, shutil.disk_usage(tried).free
        yield judge_disk(folder, seconds, free, file_system(tried), newest_bytes(folder))


def file_system(folder: Path) -> str:
    """Returns the kind of file system that holds a folder; empty if that is unknown."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            return after.split()[0]
    return ""


def _write(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:  # unnamed: a crash leaves nothing behind
        file.write(bytes(TRIED_BYTES))
        file.flush()
        os.fsync(file.fileno())
        sync(folder)  # the writer of checkpoints does the same


def newest_bytes(folder: Path) -> int:
    """Returns the size of the newest checkpoint in bytes, or 0."""
    newest = published(folder)[:1]
    return sum(file.stat().st_size for checkpoint in newest for file in checkpoint.iterdir())


def _memfd_trouble() -> str:
    from hubring.ps.transport.mapping import Arena

    try:
        Arena(guarded=True).allocate(1)[0] = 1
    except OSError as error:
        return str(error)
    return ""
