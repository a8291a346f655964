"""The checkpoint folder: whether it is writable, persistent, fast, and large enough."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from hubring.ps.checkpoint.checkpoint_folder import sync
from hubring.ps.doctor.finding import GIB, MIB, Finding, failure, format_bytes, ok, skipped, warning

NAME = "checkpoint dir"
ENOUGH = 1 * GIB
"""Assumed size of a first checkpoint: 80 million fp32 parameters and Adam's two moments."""

TRIED_BYTES = 1 * MIB
SLOW_SECONDS = 1.0
"""Limit for syncing TRIED_BYTES; a disk takes milliseconds."""

_MEMORY = "in memory: lost when this machine restarts"
_PASSING = {
    "tmpfs": _MEMORY,
    "ramfs": _MEMORY,
    "overlay": "on a container's own layer: lost with the container",
}
_PUBLISHED = re.compile(r"\d{6,}-step-\d+")


class Disk(NamedTuple):
    """The state of a checkpoint folder.

    Attributes:
        folder: The folder in the settings.
        tried: The folder that was written to: `folder`, or its nearest parent that exists.
        refusal: The errno of the write; 0 if it succeeded.
        seconds: Time to write and sync the file.
        free: Free space in bytes.
        kind: The kernel's name of the file system.
        newest: Size of the newest checkpoint in bytes; 0 if there is none.
    """

    folder: Path
    tried: Path
    refusal: int = 0
    seconds: float = 0.0
    free: int = 0
    kind: str = ""
    newest: int = 0


def judge(disk: Disk) -> Finding:
    """Judges whether a checkpoint can be written to the folder."""
    if disk.refusal:
        return failure(NAME, *_refused(disk))
    folder, room = disk.folder, f"{format_bytes(disk.free)} free"
    make_room = f"free some space (df -h {disk.tried}), or use another --checkpoint-dir"
    if disk.free < disk.newest:
        found = f"{folder}: {room}, but the newest checkpoint takes {format_bytes(disk.newest)}"
        return failure(NAME, found, make_room)
    if disk.free < ENOUGH and not disk.newest:
        found = f"{folder}: only {room}; a large model's checkpoint needs more"
        return warning(NAME, found, make_room)
    if disk.kind in _PASSING:
        fix = "use a volume or a disk (docker run -v, or a Kubernetes PersistentVolumeClaim)"
        return warning(NAME, f"{folder} is {_PASSING[disk.kind]}", fix)
    if disk.seconds > SLOW_SECONDS:
        found = f"{folder}: {format_bytes(TRIED_BYTES)} took {disk.seconds:.1f} s to sync"
        return warning(NAME, found, "use a --checkpoint-dir on a local disk, or reduce the load on this disk")
    return ok(NAME, f"{folder}: {room}, {format_bytes(TRIED_BYTES)} synced in {disk.seconds * 1e3:.3g} ms")


def file_system(mounts: Iterable[tuple[Path, str]], folder: Path) -> str:
    """Returns the kind of file system that holds a folder.

    Args:
        mounts: Mount point and kind of each mount, oldest first.
        folder: A resolved path.
    """
    above = [(len(point.parts), kind) for point, kind in mounts if folder.is_relative_to(point)]
    above.reverse()  # a later mount hides an earlier one
    return max(above, key=lambda each: each[0], default=(0, ""))[1]


def examine(folder: Path | None) -> Iterator[Finding]:
    """Writes a file to the folder and removes it; creates no folder."""
    if folder is None:
        yield skipped(NAME, "not set (--checkpoint-dir, PS_CHECKPOINT_DIR): a job saves no checkpoints")
    else:
        yield judge(look(folder.absolute()))


def look(folder: Path) -> Disk:
    """Examines an absolute path."""
    import psutil

    tried = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    began = time.monotonic()
    try:
        _write(tried)
    except OSError as error:
        return Disk(folder, tried, error.errno or errno.EIO)
    seconds = time.monotonic() - began
    mounts = [(Path(each.mountpoint), each.fstype) for each in psutil.disk_partitions(all=True)]
    kind = file_system(mounts, tried.resolve())
    return Disk(folder, tried, 0, seconds, shutil.disk_usage(tried).free, kind, _newest(folder))


def _refused(disk: Disk) -> tuple[str, str]:
    """Returns the problem and its fix."""
    tried, why, elsewhere = disk.tried, os.strerror(disk.refusal), "or use another --checkpoint-dir"
    match disk.refusal:
        case errno.ENOSPC | errno.EDQUOT:
            return f"{tried} is full ({why})", f"free some space (df -h {tried}), {elsewhere}"
        case errno.EROFS:
            return f"{tried} is read-only", f"mount -o remount,rw $(stat -c %m {tried}), {elsewhere}"
        case errno.EACCES | errno.EPERM:
            user = os.geteuid()
            own = f"chown -R {user}" if tried == disk.folder else f"install -d -o {user}"
            found = f"user {user} cannot write to {tried} ({why})"
            return found, f"run as root: {own} {disk.folder}, {elsewhere}"
        case errno.ENOTDIR:
            return f"{tried} is not a folder", "use another --checkpoint-dir"
        case _:
            found = f"cannot write to {tried}: {why}"
            return found, f"check dmesg for disk or mount errors, {elsewhere}"


def _write(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:  # unnamed: a crash leaves nothing behind
        file.write(bytes(TRIED_BYTES))
        file.flush()
        os.fsync(file.fileno())
        sync(folder)  # the writer of checkpoints does the same


def _newest(folder: Path) -> int:
    """Returns the size of the newest checkpoint in bytes, or 0."""
    published = [each for each in folder.glob("*-step-*") if _PUBLISHED.fullmatch(each.name)]
    if not published:
        return 0
    newest = max(published, key=lambda each: int(each.name.partition("-")[0]))
    return sum(file.stat().st_size for file in newest.iterdir())
