"""The control group of this process: how many cores and how much memory it can use.

Version 2 has one tree; version 1 has one per resource (cgroups(7)). In both, a parent's limit also binds its
children, so the smallest limit counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

UNLIMITED_V1 = 1 << 60
"""Version 1 writes "no limit" as the largest multiple of the page size, which is above this."""


class Memory(NamedTuple):
    """A group's memory limit and use, in bytes. `used` excludes file pages that the kernel can drop."""

    limit: int
    used: int


class Cgroup:
    """Reads the limits of one process.

    Args:
        process: The folder of the process in /proc.
    """

    def __init__(self, process: Path = Path("/proc/self")) -> None:
        self._membership = (process / "cgroup").read_text().splitlines()
        self._mounts = (process / "mountinfo").read_text().splitlines()

    def cores(self) -> float | None:
        """Returns the CPU quota in cores, or None if there is no limit."""
        two = [_quota(folder / "cpu.max") for folder in self._folders("")]
        one = [
            _quota(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
            for folder in self._folders("cpu")
        ]
        return min((cores for cores in two + one if cores is not None), default=None)

    def memory(self) -> Memory | None:
        """Returns the limit of the group with the least memory left, or None if there is no limit."""
        two = [
            _memory(folder, "memory.max", "memory.current", "inactive_file") for folder in self._folders("")
        ]
        one = [
            _memory(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            for folder in self._folders("memory")
        ]
        limited = [memory for memory in two + one if memory is not None]
        return min(limited, key=lambda memory: memory.limit - memory.used, default=None)

    def _folders(self, controller: str) -> Iterator[Path]:
        """Yields the folders of the group and of its parents. An empty controller selects version 2."""
        path, mounted = self._path(controller), self._mount(controller)
        if path is None or mounted is None:
            return
        root, point = mounted
        # In a container, the mount can start at the group itself, under another name than on the host.
        inside = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath()
        for part in (inside, *inside.parents):
            yield point / part

    def _path(self, controller: str) -> PurePosixPath | None:
        for line in self._membership:
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                return PurePosixPath(path)
        return None

    def _mount(self, controller: str) -> tuple[PurePosixPath, Path] | None:
        """Returns the root group of the controller's mount, and the mount point."""
        for line in self._mounts:
            before, _, after = line.partition(" - ")
            kind, _, options = after.split(" ", 2)
            if controller in {"cgroup": options.split(","), "cgroup2": [""]}.get(kind, []):
                _, _, _, root, point, *_ = before.split(" ")
                return PurePosixPath(root), Path(point)
        return None


def _quota(*files: Path) -> float | None:
    """Returns a quota in cores, read from one file or two; None if there is no limit or no file."""
    if not files[0].exists():
        return None
    quota, period = " ".join(file.read_text() for file in files).split()
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _memory(folder: Path, limit_file: str, used_file: str, droppable: str) -> Memory | None:
    if not (folder / limit_file).exists():
        return None
    limit = (folder / limit_file).read_text().strip()
    if limit == "max" or int(limit) > UNLIMITED_V1:
        return None
    stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
    used = int((folder / used_file).read_text()) - int(stat.get(droppable, 0))
    return Memory(int(limit), max(0, used))
