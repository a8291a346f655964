"""The control group of this process: how much of the cores and the memory it may have.

Version 2 has one tree, version 1 one a resource (cgroups(7)). In both a group has at most what every
group above it has, so the least of all counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

UNLIMITED_V1 = 1 << 60
"""Version 1 spells no limit as the largest multiple of a page."""


class Memory(NamedTuple):
    """Bytes that a group may have, and has; pages of files that can be dropped at once are left out."""

    limit: int
    used: int


class Cgroup:
    """Reads the limits of one process.

    Args:
        process: Its folder in /proc.
    """

    def __init__(self, process: Path = Path("/proc/self")) -> None:
        self._membership = (process / "cgroup").read_text()
        self._mounts = (process / "mountinfo").read_text()

    def cores(self) -> float | None:
        """Cores whose time it may use; None where nothing limits it."""
        two = [_quota(folder / "cpu.max") for folder in self._folders("")]
        one = [
            _quota(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
            for folder in self._folders("cpu")
        ]
        return min((cores for cores in two + one if cores is not None), default=None)

    def memory(self) -> Memory | None:
        """Bytes that it may have; None where nothing limits it."""
        two = (_memory(folder, _V2) for folder in self._folders(""))
        one = (_memory(folder, _V1) for folder in self._folders("memory"))
        limited = [memory for memory in (*two, *one) if memory is not None]
        return min(limited, key=lambda memory: memory.limit - memory.used, default=None)

    def _folders(self, controller: str) -> Iterator[Path]:
        """The group's folder and all above it, by a controller of version 1, or if empty of version 2."""
        path, mounted = self._path(controller), self._mount(controller)
        if path is None or mounted is None:
            return
        root, point = mounted
        # In a container the mount may begin at the group itself, by whatever name it is known outside.
        inside = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath()
        for part in (inside, *inside.parents):
            yield point / part

    def _path(self, controller: str) -> PurePosixPath | None:
        for line in self._membership.splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                return PurePosixPath(path)
        return None

    def _mount(self, controller: str) -> tuple[PurePosixPath, Path] | None:
        """The group that the controller's mount begins with, and where it is mounted."""
        for line in self._mounts.splitlines():
            before, _, after = line.partition(" - ")
            kind, _, options = after.split(" ", 2)
            wanted = (
                kind == "cgroup" and controller in options.split(",") if controller else kind == "cgroup2"
            )
            if wanted:
                fields = before.split(" ")
                return PurePosixPath(fields[3]), Path(fields[4])
        return None


class _Files(NamedTuple):
    """How a version names what it tells of memory."""

    limit: str
    used: str
    droppable: str


_V2 = _Files("memory.max", "memory.current", "inactive_file")
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _quota(quota: Path, period: Path | None = None) -> float | None:
    """Microseconds in each period, in one file or two, as cores; None for no limit, or no such file."""
    if not quota.exists():
        return None
    words = [*quota.read_text().split(), *(period.read_text().split() if period else [])]
    return None if words[0] in ("max", "-1") else int(words[0]) / int(words[1])


def _memory(folder: Path, files: _Files) -> Memory | None:
    if not (folder / files.limit).exists():
        return None
    limit = (folder / files.limit).read_text().strip()
    if limit == "max" or int(limit) > UNLIMITED_V1:
        return None
    stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
    used = int((folder / files.used).read_text()) - int(stat.get(files.droppable, 0))
    return Memory(int(limit), max(0, used))
