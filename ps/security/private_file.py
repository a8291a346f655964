"""Files that only their user can read: tokens, private keys, the state of a server.

Law: what is checked is what is read. A name in a folder of others can mean another file a moment later, so
the checks are those of the open file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hubring.ps.core.errors import ConfigError

_MOUNTS = ("/run/secrets", "/var/run/secrets")
"""Where engines mount Secrets."""


TOKENS = "the tokens"


@contextlib.contextmanager
def readable(path: Path, option: str, content: str = TOKENS) -> Iterator[None]:
    """Turns an OSError into the ConfigError of a file with this content. `option` names the file."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot read {content} in {path}: {error.strerror}; check {option}") from error


def exists(path: Path, option: str, content: str = TOKENS) -> bool:
    """Returns whether there is such a file.

    Raises:
        ConfigError: This user cannot find out, for example in a folder of others.
    """
    with readable(path, option, content):
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def read(path: Path, secret: str, renew: str, most: int = 1 << 16) -> bytes:
    """Returns the content of a file that only this user can read.

    Args:
        path: The file.
        secret: What it has, for messages.
        renew: What to do if another user knows the secret.
        most: Maximum number of bytes to return.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
        ConfigError: It belongs to another user, or others can read it.
    """
    with opened(path) as descriptor:
        if not is_mounted(descriptor):
            _check(path, os.fstat(descriptor), secret, renew)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(most)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Opens a regular file for reading. Raises OSError."""
    # A pipe without a writer would block the call for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "It is not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def is_mounted(descriptor: int) -> bool:
    """Whether an engine has mounted the open file and chosen its mode: a Secret of Kubernetes or Compose."""
    there = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    return any(there.is_relative_to(place) for place in _MOUNTS)


def _check(path: Path, status: os.stat_result, secret: str, renew: str) -> None:
    if status.st_uid not in (os.getuid(), 0):
        raise ConfigError(
            f"{path} belongs to another user, uid {status.st_uid}, who knows {secret} in it and can change"
            f" it; do not use it: {renew}"
        )
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"other users can read {secret} in {path}; run: chmod 600 {path}")


def replace(path: Path, data: bytes) -> None:
    """Writes a file that only this user can read, in one piece. Raises OSError."""
    with _fresh(path, data) as fresh:
        fresh.rename(path)


def write(path: Path, text: str) -> None:
    """Writes a file that only this user can read, in one piece.

    Raises:
        ConfigError: The file cannot be written.
    """
    with _explained(path):
        replace(path, text.encode())


def create(path: Path, text: str) -> None:
    """Writes such a file unless there is one. Of several programs that try at once, one succeeds.

    Raises:
        ConfigError: The file cannot be written.
    """
    with _explained(path), _fresh(path, text.encode()) as fresh, contextlib.suppress(FileExistsError):
        os.link(fresh, path)


@contextlib.contextmanager
def _fresh(path: Path, data: bytes) -> Iterator[Path]:
    """Writes a file beside `path`, and deletes it unless it was renamed.

    Other users cannot guess its name, which they could otherwise take in a folder like /tmp.
    """
    descriptor, name = tempfile.mkstemp(".new", f"{path.name}.", path.parent)  # with the mode 0600
    fresh = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        yield fresh
    finally:
        fresh.unlink(missing_ok=True)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; use a file in a writable folder"
        ) from error
