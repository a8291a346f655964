"""Checkpoints on disk: a folder each, whole or not there.

Files are written and synced into a hidden folder, the manifest with their
digests last; then the folder gets its name in one rename. A reader believes a
folder only if every file has the size and digest that its manifest states, and
otherwise falls back to the one before.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from hubring.ps.core.errors import CheckpointCorrupt, ConfigError
from hubring.ps.core.types import BucketSpec, Slice

log = logging.getLogger(__name__)

FORMAT = 1
KEEP = 3
"""How many checkpoints stay; older ones are removed once a newer one is published."""

VERIFIERS = 4
"""Files whose digests are taken at once; a large job's are read as fast as the disk gives them."""

_NAME = "manifest.json"
_PUBLISHED = re.compile(r"[0-9]{6,}-step-[0-9]+")


class FileEntry(msgspec.Struct, frozen=True):
    """One shard's file and the keys in it."""

    name: str
    sha256: str
    bytes: int
    keys: tuple[int, ...]


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint holds; everything but the tensors.

    `step` is the number of completed steps: of every key in lockstep modes, of
    the slowest key in the others.
    """

    job: str
    mode: str
    step: int
    next_incarnation: int
    buckets: tuple[BucketSpec, ...]
    slices: tuple[Slice, ...]
    files: tuple[FileEntry, ...]
    format: int = FORMAT

    def file_of(self, key: int) -> str:
        """Name of the file that holds a key."""
        for entry in self.files:
            if key in entry.keys:
                return entry.name
        raise CheckpointCorrupt(f"no file of this checkpoint holds key {key}")


def begin(directory: Path) -> Path:
    """A fresh hidden folder to write a checkpoint's files into.

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
    """Why a directory takes no checkpoints, and the mend."""
    return ConfigError(
        f"cannot write checkpoints to {directory}: {cause.strerror or cause}; give --checkpoint-dir a"
        " folder that this user may write to"
    )


def unwritten(path: Path, nbytes: int, cause: Exception) -> ConfigError:
    """Why a file of a checkpoint could not be written, and what room it needs; removes what there is of it.

    Args:
        path: The file.
        nbytes: Of its tensors.
        cause: What writing it failed with.
    """
    try:
        path.unlink(missing_ok=True)
        free = shutil.disk_usage(path.parent).free
    except OSError as error:
        room = f"this host has no such folder ({error.strerror}), and all that write there must share it"
    else:
        room = f"it needs {nbytes} bytes, and {free} bytes are free there: make room, or take another disk"
    why = cause.strerror if isinstance(cause, OSError) and cause.strerror else cause
    return ConfigError(f"{path} cannot be written ({why}); {room}")


def publish(folder: Path, manifest: Manifest) -> Path:
    """Gives a written folder its manifest and its name, and removes what is older than the last KEEP.

    Raises:
        ConfigError: The disk is full, or somebody else's hands are in the directory.
    """
    try:
        return _publish(folder, manifest)
    except OSError as error:
        raise ConfigError(
            f"cannot publish a checkpoint in {folder.parent}: {error}; make room there, and let one server"
            " alone write there"
        ) from error


def _publish(folder: Path, manifest: Manifest) -> Path:
    (folder / _NAME).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    sync(folder / _NAME)
    directory = folder.parent
    existing = _folders(directory)
    number = _number(existing[0]) + 1 if existing else 1
    final = directory / f"{number:06d}-step-{manifest.step}"
    folder.rename(final)
    sync(directory)
    for old in _folders(directory)[KEEP:]:
        _remove(old)
    return final


def _remove(old: Path) -> None:
    try:
        shutil.rmtree(old)
    except OSError as error:  # another user's, or open on NFS; the new one is published all the same
        log.warning("the old checkpoint %s cannot be removed: %s; remove it by hand", old, error)


def newest(directory: Path) -> tuple[Path, Manifest] | None:
    """The newest checkpoint that is whole; None if the directory holds none at all.

    Raises:
        CheckpointCorrupt: There are checkpoints, and every one is damaged.
        ConfigError: The directory cannot be read.
    """
    try:
        folders = _folders(directory)
    except OSError as error:
        raise ConfigError(f"cannot read checkpoints in {directory}: {error}") from error
    damage = []
    for folder in folders:
        try:
            return folder, read(folder)
        except CheckpointCorrupt as error:
            log.warning("%s; trying the one before", error)
            damage.append(str(error))
    if damage:
        raise CheckpointCorrupt(
            f"no checkpoint in {directory} is whole: {'; '.join(damage)}. Mend the file or who may read it,"
            " or start with another --checkpoint-dir to begin afresh"
        )
    return None


def read(folder: Path) -> Manifest:
    """A checkpoint's manifest, after every file was held against its digest.

    Raises:
        CheckpointCorrupt: Something is missing, torn, flipped, or of a format we do not know.
    """
    manifest = described(folder)
    with ThreadPoolExecutor(VERIFIERS) as pool:
        list(pool.map(partial(verify, folder), manifest.files))
    return manifest


def described(folder: Path) -> Manifest:
    """A checkpoint's manifest, as it lies there: its files may be damaged.

    Raises:
        CheckpointCorrupt: It is missing, torn, or of a format we do not know.
    """
    try:
        manifest = msgspec.json.decode((folder / _NAME).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointCorrupt(f"{folder / _NAME} cannot be read: {error}") from error
    if manifest.format != FORMAT:
        raise CheckpointCorrupt(f"{folder} has format {manifest.format}; this version reads {FORMAT}")
    return manifest


def verify(folder: Path, entry: FileEntry) -> None:
    """Holds one file of a checkpoint against its digest.

    Raises:
        CheckpointCorrupt: It is missing, torn or flipped.
    """
    path = folder / entry.name
    if path.name != entry.name or entry.name != os.path.basename(entry.name):
        raise CheckpointCorrupt(f"{entry.name!r} is no plain file name")
    try:
        if not path.is_file():
            raise CheckpointCorrupt(f"{path} is missing")
        if path.stat().st_size != entry.bytes:
            raise CheckpointCorrupt(
                f"{path} has {path.stat().st_size} bytes where {entry.bytes} were written"
            )
        if digest(path) != entry.sha256:
            raise CheckpointCorrupt(f"{path} differs from its digest: it was changed or damaged")
    except OSError as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error.strerror}") from error


def digest(path: Path) -> str:
    """A file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Forces a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folders(directory: Path) -> list[Path]:
    """Published checkpoints, newest first."""
    names = (
        os.listdir(directory) if directory.exists() else []
    )  # glob would take a locked folder for an empty one
    return sorted(
        (directory / name for name in names if _PUBLISHED.fullmatch(name)), key=_number, reverse=True
    )


def _number(folder: Path) -> int:
    return int(folder.name.partition("-")[0])
