"""Where checkpoints go: writable, in safety once synced, and with room for the next one."""

from __future__ import annotations

import errno
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hubring.ps.doctor.finding import Finding, failure, ok, skipped, warning
from hubring.ps.doctor.sizes import GIB, MIB, spelt

NAME = "checkpoint dir"
ENOUGH = 1 * GIB
"""Where no checkpoint tells how large they are: 80 million parameters and Adam's two moments."""

TRIED_BYTES = 1 * MIB
SLOW_SECONDS = 1.0
"""To sync that much; a disk takes milliseconds."""

_PASSING = {
    "tmpfs": "memory: gone when this machine restarts",
    "ramfs": "memory: gone when this machine restarts",
}
_PASSING["overlay"] = "a container's own layer: gone with the container"
_PUBLISHED = re.compile(r"\d{6,}-step-\d+")
_ESCAPED = re.compile(r"\\([0-7]{3})")


class Disk(NamedTuple):
    """What was found.

    Attributes:
        folder: That was named.
        tried: Where a file was written: the folder, or the nearest above it that is there.
        refusal: The errno with which that ended; 0: well.
        seconds: That writing and syncing took.
        free: Bytes that are left.
        kind: Of file system, as the kernel calls it.
        newest: Bytes of the newest checkpoint there; 0: there is none.
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
    folder = str(disk.folder)
    elsewhere = "or another --checkpoint-dir"
    if disk.refusal in (errno.ENOSPC, errno.EDQUOT):
        found = f"{disk.tried} is full ({os.strerror(disk.refusal)})"
        return failure(NAME, found, f"make room (df -h {disk.tried}), {elsewhere}")
    if disk.refusal == errno.EROFS:
        found = f"{disk.tried} is read-only"
        return failure(NAME, found, f"mount -o remount,rw $(stat -c %m {disk.tried}), {elsewhere}")
    if disk.refusal in (errno.EACCES, errno.EPERM):
        found = f"{disk.tried} may not be written by user {os.geteuid()}"
        owner = f"chown -R {os.geteuid()}" if disk.tried == disk.folder else f"install -d -o {os.geteuid()}"
        return failure(NAME, found, f"as root: {owner} {disk.folder}, {elsewhere}")
    if disk.refusal == errno.ENOTDIR:
        return failure(NAME, f"{disk.tried} is no folder", "another --checkpoint-dir")
    if disk.refusal:
        found = f"{disk.tried} cannot be written: {os.strerror(disk.refusal)}"
        return failure(NAME, found, f"dmesg tells of a broken disk or mount; {elsewhere}")
    room = f"{spelt(disk.free)} free"
    if disk.free < disk.newest:
        return failure(
            NAME,
            f"{folder}: {room}, too little for one more checkpoint like the newest, {spelt(disk.newest)}",
            f"make room (df -h {disk.tried}), {elsewhere}",
        )
    if disk.free < ENOUGH and not disk.newest:
        mend = f"make room (df -h {disk.tried}), {elsewhere}"
        return warning(NAME, f"{folder}: {room} only, of which a large model's checkpoint needs more", mend)
    if disk.kind in _PASSING:
        mend = "a volume or a disk: docker run -v, Kubernetes a PersistentVolumeClaim"
        return warning(NAME, f"{folder} is {_PASSING[disk.kind]}", mend)
    if disk.seconds > SLOW_SECONDS:
        found = f"{folder}: {spelt(TRIED_BYTES)} took {disk.seconds:.1f} s to sync"
        return warning(NAME, found, "a disk of this machine for --checkpoint-dir, or fewer users of this one")
    return ok(NAME, f"{folder}: {room}, {spelt(TRIED_BYTES)} synced in {disk.seconds * 1e3:.3g} ms")


def mounted(mountinfo: str, folder: Path) -> str:
    """The kind of file system that a folder lies on, of what /proc/self/mountinfo holds."""
    best, kind = Path(), ""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        point = Path(_ESCAPED.sub(lambda match: chr(int(match[1], 8)), before.split(" ")[4]))
        if folder.is_relative_to(point) and len(point.parts) >= len(best.parts):
            best, kind = point, after.split(" ")[0]  # a later mount hides an earlier one
    return kind


def examine(folder: Path | None) -> Iterator[Finding]:
    """Writes a file there and takes it away again; makes no folder."""
    if folder is None:
        yield skipped(NAME, "none is set (--checkpoint-dir, PS_CHECKPOINT_DIR): nothing would be saved")
        return
    yield judge(_look(folder.absolute()))


def _look(folder: Path) -> Disk:
    tried = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    began = time.monotonic()
    try:
        _try(tried)
    except OSError as error:
        return Disk(folder, tried, error.errno or errno.EIO)
    seconds = time.monotonic() - began
    room = os.statvfs(tried)
    kind = mounted(Path("/proc/self/mountinfo").read_text(), tried.resolve())
    return Disk(folder, tried, 0, seconds, room.f_bavail * room.f_frsize, kind, _newest(folder))


def _try(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:  # without a name, so nothing is left of it
        file.write(bytes(TRIED_BYTES))
        file.flush()
        os.fsync(file.fileno())
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # the list of its files, as after a checkpoint
        finally:
            os.close(descriptor)


def _newest(folder: Path) -> int:
    """Bytes of the newest checkpoint."""
    published = [each for each in folder.glob("*-step-*") if _PUBLISHED.fullmatch(each.name)]
    if not published:
        return 0
    newest = max(published, key=lambda each: int(each.name.partition("-")[0]))
    return sum(file.stat().st_size for file in newest.iterdir())
