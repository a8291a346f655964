"""Checkpoints on disk: one folder each, published atomically.

A writer writes and syncs all files into a hidden folder, then the manifest with their digests, and then
renames the folder. Only one process at a time writes to a directory of checkpoints: it holds the
directory's lock.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TextIO

import msgspec

from hubring.ps.core.errors import CheckpointCorrupt, ConfigError
from hubring.ps.core.types import BucketSpec, Slice

log = logging.getLogger(__name__)

FORMAT = 2
UNSIGNED_FORMAT = 1
"""The format of checkpoints whose manifest has no digest. They are still read."""
KEEP = 3
"""How many checkpoints stay on disk. Publishing a checkpoint removes the older ones."""

OF_WORKERS = "workers"
"""The folder within --checkpoint-dir for a job whose workers step."""
VERIFIERS = 4
"""How many files are verified at once, so that the disk limits the speed, not the digests."""

_NAME = "manifest.json"
_DIGEST_NAME = "manifest.sha256"
_PUBLISHED = re.compile(r"[0-9]{6,}-step-[0-9]+")


class FileEntry(msgspec.Struct, frozen=True):
    """One shard's file and the keys in it."""

    name: str
    sha256: str
    bytes: int
    keys: tuple[int, ...]


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint contains, except the tensors.

    `step` is the number of completed steps: of every key with `bsp`, of the
    slowest key or worker in other modes. `joined` are the numbers of buckets of those
    that joined together, in order, if some joined later than others.
    """

    job: str
    mode: str
    step: int
    next_incarnation: int
    buckets: tuple[BucketSpec, ...]
    slices: tuple[Slice, ...]
    files: tuple[FileEntry, ...]
    format: int = FORMAT
    joined: tuple[int, ...] = ()


def begin(directory: Path) -> Path:
    """Creates a hidden folder for a new checkpoint's files.

    Raises:
        ConfigError: The directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for stale in directory.glob(".writing-*"):
            shutil.rmtree(stale)
        folder = directory / f".writing-{os.getpid()}"
        folder.mkdir()
    except OSError as error:
        raise unwritable(directory, error) from error
    return folder


def unwritable(directory: Path, cause: OSError) -> ConfigError:
    """Returns the error for a checkpoint directory that cannot be written."""
    return ConfigError(
        f"cannot write checkpoints to {directory}: {cause.strerror or cause}; set --checkpoint-dir to a"
        " folder that this user can write to"
    )


def unwritten(path: Path, nbytes: int, cause: Exception) -> ConfigError:
    """Removes a file of a checkpoint that could not be written completely, and returns the error.

    Args:
        path: The file.
        nbytes: Bytes of the file's tensors.
        cause: The error of the write.
    """
    try:
        path.unlink(missing_ok=True)
        free = shutil.disk_usage(path.parent).free
    except OSError as error:
        fix = (
            f"this host cannot use that folder ({error.strerror}). Put --checkpoint-dir on a file system that"
            " the server shares with the hosts of all shards"
        )
    else:
        fix = f"it needs {nbytes} bytes, but only {free} bytes are free. Free some space, or use another disk"
    why = cause.strerror if isinstance(cause, OSError) and cause.strerror else cause
    return ConfigError(f"cannot write {path} ({why}); {fix}")


def publish(folder: Path, manifest: Manifest) -> Path:
    """Writes the manifest, renames the folder, and removes all but the newest KEEP checkpoints.

    Raises:
        ConfigError: The disk is full, or another process changed the directory.
    """
    try:
        return _publish(folder, manifest)
    except OSError as error:
        raise ConfigError(
            f"cannot publish a checkpoint in {folder.parent}: {error}; free some space, and make sure that"
            " only one server writes to this folder"
        ) from error


def _publish(folder: Path, manifest: Manifest) -> Path:
    content = msgspec.json.format(msgspec.json.encode(manifest))
    for name, data in ((_NAME, content), (_DIGEST_NAME, _digest_line(content))):
        (folder / name).write_bytes(data)
        sync(folder / name)
    sync(folder)  # its entries: without them a rename that survives a power loss would name an empty folder
    directory = folder.parent
    existing = published(directory)
    number = _number(existing[0]) + 1 if existing else 1
    final = directory / f"{number:06d}-step-{manifest.step}"
    folder.rename(final)
    sync(directory)
    for old in published(directory)[KEEP:]:
        _remove(old)
    return final


def _digest_line(content: bytes) -> bytes:
    return f"{hashlib.sha256(content).hexdigest()}  {_NAME}\n".encode()


def _remove(old: Path) -> None:
    try:
        shutil.rmtree(old)
    except OSError as error:  # owned by another user, or open on NFS; the new checkpoint is published anyway
        log.warning("cannot remove the old checkpoint %s: %s; remove it manually", old, error)


def newest(directory: Path) -> tuple[Path, Manifest] | None:
    """Returns the newest valid checkpoint; None if the directory has no checkpoints.

    Raises:
        CheckpointCorrupt: All checkpoints are damaged.
        ConfigError: The directory cannot be read.
    """
    try:
        folders = published(directory)
    except OSError as error:
        raise ConfigError(
            f"cannot read checkpoints in {directory}: {error}; check the permissions of --checkpoint-dir"
        ) from error
    damage = []
    for folder in folders:
        try:
            return folder, read(folder)
        except CheckpointCorrupt as error:
            log.warning("%s; trying the previous checkpoint", error)
            damage.append(str(error))
    if damage:
        raise CheckpointCorrupt(
            f"no valid checkpoint in {directory}: {'; '.join(damage)}. Restore the files or their"
            " permissions, or use another --checkpoint-dir to start without a checkpoint"
        )
    return None


def newest_step(directory: Path) -> int | None:
    """Returns the step of the newest checkpoint, without reading it; None if the directory has none."""
    folders = published(directory)
    return step_of(folders[0]) if folders else None


def step_of(folder: Path) -> int:
    """Returns the step of a checkpoint, without reading it."""
    return int(folder.name.rpartition("-")[2])


def with_age(folder: Path) -> str:
    """Returns a checkpoint's path, and how long ago it was saved."""
    minutes = (time.time() - folder.stat().st_mtime) / 60
    return f"{folder}, saved {f'{minutes:.0f} min' if minutes < 120 else f'{minutes / 60:.0f} h'} ago"


def read(folder: Path) -> Manifest:
    """Returns a checkpoint's manifest after it has verified the digest of every file.

    Raises:
        CheckpointCorrupt: A file is missing, truncated or changed, or the format is unknown.
    """
    manifest = described(folder)
    with ThreadPoolExecutor(VERIFIERS) as pool:
        list(pool.map(partial(verify, folder), manifest.files))
    return manifest


def described(folder: Path) -> Manifest:
    """Returns a checkpoint's manifest, after it has verified its digest, without verifying the files.

    Raises:
        CheckpointCorrupt: The manifest is missing, truncated or changed, or its format is unknown.
    """
    path, signature = folder / _NAME, folder / _DIGEST_NAME
    try:
        signed = signature.exists()  # raises if this user cannot search the folder
        content = path.read_bytes()
        if signed and signature.read_bytes() != _digest_line(content):
            raise CheckpointCorrupt(f"{path} does not match {_DIGEST_NAME}; a file was changed or damaged")
        manifest = msgspec.json.decode(content, type=Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointCorrupt(f"cannot read {path}: {error}") from error
    expected = FORMAT if signed else UNSIGNED_FORMAT
    if manifest.format != expected:
        what = "" if signed else f" without {_DIGEST_NAME}"
        raise CheckpointCorrupt(f"{folder} has format {manifest.format}{what}; expected format {expected}")
    return manifest


def verify(folder: Path, entry: FileEntry) -> None:
    """Verifies size and digest of one file of a checkpoint.

    Raises:
        CheckpointCorrupt: The file is missing, truncated or changed.
    """
    path = folder / entry.name
    if path.name != entry.name or entry.name != os.path.basename(entry.name):
        raise CheckpointCorrupt(f"the manifest of {folder} lists the file {entry.name!r}, which is invalid")
    try:
        if not path.is_file():
            raise CheckpointCorrupt(f"{path} is missing")
        if path.stat().st_size != entry.bytes:
            raise CheckpointCorrupt(f"{path} has {path.stat().st_size} bytes, expected {entry.bytes}")
        if digest(path) != entry.sha256:
            raise CheckpointCorrupt(f"{path} does not match its digest; the file was changed or damaged")
    except OSError as error:
        raise CheckpointCorrupt(f"cannot read {path}: {error.strerror}") from error


def digest(path: Path) -> str:
    """Returns a file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flushes a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def published(directory: Path) -> list[Path]:
    """Returns the published checkpoints, newest first."""
    # Not glob: it takes an unreadable folder for an empty one.
    names = os.listdir(directory) if directory.exists() else []
    found = (directory / name for name in names if _PUBLISHED.fullmatch(name))
    return sorted(found, key=_number, reverse=True)


def _number(folder: Path) -> int:
    return int(folder.name.partition("-")[0])


_LOCK_FILE = ".claim"


def lock_directory(directory: Path) -> TextIO:
    """Locks a directory until the returned file is closed or this process exits.

    Without the lock, two servers would delete each other's unfinished checkpoints and resume from each
    other's steps.

    Raises:
        ConfigError: The directory cannot be written, or another process has locked it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / _LOCK_FILE).open("a+")
    except OSError as error:
        raise unwritable(directory, error) from error
    try:
        _lock_file(file, directory)
        begin(directory).rmdir()  # fails now, not at the first checkpoint, if the directory is not writable
    except BaseException:
        file.close()
        raise
    return file


def _lock_file(file: TextIO, directory: Path) -> None:
    try:
        # Not flock: children inherit its lock and can hold it after this process exits.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.seek(0)
            raise ConfigError(
                f"{directory} is locked by {file.read().strip() or 'another process'}; wait until that"
                " process exits, or use another --checkpoint-dir"
            ) from error
        log.warning(
            "cannot lock %s (%s); make sure that no other server writes to it", directory, error.strerror
        )
    try:
        file.truncate(0)
        file.write(f"{socket.gethostname()} pid {os.getpid()}\n")
        file.flush()
    except OSError as error:
        raise unwritable(directory, error) from error
