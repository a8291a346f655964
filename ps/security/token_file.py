"""Files with tokens, which only their user can read.

A server without `--token-file` writes its tokens to the user's runtime directory, in a file that is named
after its port. So a program of the same user on the same host finds them without any setting.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hubring.ps.config.environment import environment
from hubring.ps.core.errors import ConfigError
from hubring.ps.security.token import Tokens, parse

_MOUNTS = ("/run/secrets", "/var/run/secrets")
"""Where engines mount Secrets."""


def runtime_file(port: int) -> Path:
    """Returns the file for the tokens of this user's server on a port of this host.

    Raises:
        ConfigError: The directory belongs to another user, or others may use it.
    """
    return _made(_runtime_directory()) / _name(port)


def find_runtime_file(port: int) -> Path | None:
    """Returns that file if it exists. Looking makes no directory, and trusts none that others may use."""
    file = _runtime_directory() / _name(port)
    return file if _is_private(file.parent) and file.exists() else None


def _name(port: int) -> str:
    network = os.stat("/proc/self/ns/net").st_ino  # each network namespace has its own ports
    return f"{port}-{network}.token"


def forget(port: int) -> None:
    """Deletes the tokens of an earlier server on a port, which now is another one's."""
    with contextlib.suppress(OSError, ConfigError):
        runtime_file(port).unlink()


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file that only this user can read, in one piece. Raises OSError."""
    with _fresh(path, data) as fresh:
        fresh.rename(path)


def write(path: Path, text: str) -> None:
    """Writes a file that only this user can read, in one piece.

    Raises:
        ConfigError: The file cannot be written.
    """
    with _explained(path):
        replace_file(path, text.encode())


def create(path: Path, text: str) -> None:
    """Writes such a file unless there is one. Of several programs that try at once, one succeeds.

    Raises:
        ConfigError: The file cannot be written.
    """
    with _explained(path), _fresh(path, text.encode()) as fresh, contextlib.suppress(FileExistsError):
        os.link(fresh, path)


@contextlib.contextmanager
def _fresh(path: Path, data: bytes) -> Iterator[Path]:
    """Writes a file beside `path`, and deletes it unless it was renamed."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    yield fresh
    fresh.unlink(missing_ok=True)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write the tokens to {path}: {error.strerror}; use a --token-file in a writable folder"
        ) from error


def text_of(tokens: Tokens) -> str:
    """Returns the text of a file with these tokens, one in each line."""
    return "".join(f"{token}\n" for token in tokens.values())


def write_tokens(path: Path, tokens: Tokens) -> None:
    """Writes tokens. Raises as `write`."""
    write(path, text_of(tokens))


def read(path: Path) -> Tokens:
    """Returns the tokens in a file.

    Raises:
        ConfigError: The file cannot be read, others can read it, or it has no valid token.
    """
    return parse(read_secret(path, "--token-file").splitlines(), str(path))


def read_secret(path: Path, option: str) -> str:
    """Returns the text of a file that only this user can read.

    Args:
        path: The file, of at most 64 KiB.
        option: The option that names it.

    Raises:
        ConfigError: The file cannot be read, belongs to another user, or others can read it.
    """
    try:
        with path.open() as file:
            status = os.fstat(file.fileno())
            text = file.read(1 << 16)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read the tokens in {path}: {why}; check {option}") from error
    if _is_mounted_secret(path):
        return text
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"other users can read the tokens in {path}; run: chmod 600 {path}")
    if status.st_uid not in (os.getuid(), 0):
        raise ConfigError(
            f"the tokens in {path} belong to another user, uid {status.st_uid}, who can change them;"
            f" run: chown {os.getuid()} {path}"
        )
    return text


def _is_mounted_secret(path: Path) -> bool:
    """Whether an engine has mounted the file, whose mode it chooses: a Secret of Kubernetes or Compose."""
    return any(path.resolve().is_relative_to(place) for place in _MOUNTS)


def _runtime_directory() -> Path:
    given = environment().get("XDG_RUNTIME_DIR")
    for parent in (given, f"/run/user/{os.getuid()}"):
        if parent and _is_private(Path(parent)):
            return Path(parent) / "hubring"
    return Path(tempfile.gettempdir()) / f"hubring-{os.getuid()}"


def _made(directory: Path) -> Path:
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the directory {directory} for tokens: {error.strerror}; set XDG_RUNTIME_DIR or"
            " use --token-file"
        ) from error
    if not _is_private(directory):
        raise ConfigError(
            f"{directory}, the directory for tokens, belongs to another user or is open to others; remove it,"
            " set XDG_RUNTIME_DIR, or use --token-file"
        )
    return directory


def _is_private(directory: Path) -> bool:
    try:
        status = os.lstat(directory)
    except OSError:
        return False
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return ours and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
