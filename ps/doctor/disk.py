"""Where checkpoints go: writable, safe once synced, and with room for the next one."""

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
from hubring.ps.doctor.finding import GIB, MIB, Finding, failure, ok, skipped, spelt, warning

NAME = "checkpoint dir"
ENOUGH = 1 * GIB
"""Where no checkpoint shows how large they are: 80 million parameters and Adam's two moments."""

TRIED_BYTES = 1 * MIB
SLOW_SECONDS = 1.0
"""To sync that much; a disk takes milliseconds."""

_MEMORY = "memory: gone when this machine restarts"
_PASSING = {
    "tmpfs": _MEMORY,
    "ramfs": _MEMORY,
    "overlay": "a container's own layer: gone with the container",
}
_PUBLISHED = re.compile(r"\d{6,}-step-\d+")


class Disk(NamedTuple):
    """What was found.

    Attributes:
        folder: The one that was named.
        tried: Where a file was written: the folder, or the nearest above it that exists.
        refusal: The errno of that; 0: it worked.
        seconds: How long writing and syncing took.
        free: Bytes that are left.
        kind: The file system's, as the kernel calls it.
        newest: Bytes of the newest checkpoint there, if any.
    """

    folder: Path
    tried: Path
    refusal: int = 0
    seconds: float = 0.0
    free: int = 0
    kind: str = ""
    newest: int = 0


def judge(disk: Disk) -> Finding:
    """Whether a checkpoint can be written there."""
    if disk.refusal:
        return failure(NAME, *_refused(disk))
    folder, room = disk.folder, f"{spelt(disk.free)} free"
    make_room = f"make room (df -h {disk.tried}), or another --checkpoint-dir"
    if disk.free < disk.newest:
        found = f"{folder}: {room}, too little for one more checkpoint like the newest, {spelt(disk.newest)}"
        return failure(NAME, found, make_room)
    if disk.free < ENOUGH and not disk.newest:
        found = f"{folder}: {room} only, of which a large model's checkpoint needs more"
        return warning(NAME, found, make_room)
    if disk.kind in _PASSING:
        mend = "a volume or a disk: docker run -v, Kubernetes a PersistentVolumeClaim"
        return warning(NAME, f"{folder} is {_PASSING[disk.kind]}", mend)
    if disk.seconds > SLOW_SECONDS:
        found = f"{folder}: {spelt(TRIED_BYTES)} took {disk.seconds:.1f} s to sync"
        return warning(NAME, found, "a disk of this machine for --checkpoint-dir, or fewer users of this one")
    return ok(NAME, f"{folder}: {room}, {spelt(TRIED_BYTES)} synced in {disk.seconds * 1e3:.3g} ms")


def file_system(mounts: Iterable[tuple[Path, str]], folder: Path) -> str:
    """The kind of file system that a folder lies on, by each mount's folder and kind, the oldest first."""
    above = [(len(point.parts), kind) for point, kind in mounts if folder.is_relative_to(point)]
    above.reverse()  # a later mount hides an earlier one
    return max(above, key=lambda each: each[0], default=(0, ""))[1]


def examine(folder: Path | None) -> Iterator[Finding]:
    """Writes a file there and removes it; makes no folder."""
    if folder is None:
        yield skipped(NAME, "none is set (--checkpoint-dir, PS_CHECKPOINT_DIR): nothing would be saved")
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
    """What is wrong, and how to fix it."""
    tried, why, elsewhere = disk.tried, os.strerror(disk.refusal), "or another --checkpoint-dir"
    match disk.refusal:
        case errno.ENOSPC | errno.EDQUOT:
            return f"{tried} is full ({why})", f"make room (df -h {tried}), {elsewhere}"
        case errno.EROFS:
            return f"{tried} is read-only", f"mount -o remount,rw $(stat -c %m {tried}), {elsewhere}"
        case errno.EACCES | errno.EPERM:
            user = os.geteuid()
            own = f"chown -R {user}" if tried == disk.folder else f"install -d -o {user}"
            found = f"{tried} may not be written by user {user}"
            return found, f"as root: {own} {disk.folder}, {elsewhere}"
        case errno.ENOTDIR:
            return f"{tried} is no folder", "another --checkpoint-dir"
        case _:
            found = f"{tried} cannot be written: {why}"
            return found, f"dmesg tells of a broken disk or mount; {elsewhere}"


def _write(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:  # without a name, so nothing is left of it
        file.write(bytes(TRIED_BYTES))
        file.flush()
        os.fsync(file.fileno())
        sync(folder)  # as after a checkpoint


def _newest(folder: Path) -> int:
    """Bytes of the newest checkpoint."""
    published = [each for each in folder.glob("*-step-*") if _PUBLISHED.fullmatch(each.name)]
    if not published:
        return 0
    newest = max(published, key=lambda each: int(each.name.partition("-")[0]))
    return sum(file.stat().st_size for file in newest.iterdir())
