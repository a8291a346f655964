"""Files with tokens, which only their user can read.

A server without `--token-file` writes its tokens to the user's runtime directory, in a file that is named
after its port. So a program of the same user on the same host finds them without any setting.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections import Counter
from pathlib import Path

from hubring.ps.config.environment import environment
from hubring.ps.core.errors import ConfigError
from hubring.ps.security import private_file
from hubring.ps.security.token import Tokens, parse

OPTION = "--token-file"

_LISTENING = "0A"
"""TCP_LISTEN in /proc/net/tcp."""

_COPY = (
    "delete it, so that the server makes new tokens; or copy the server's file again, to a folder where no"
    " other user can write"
)


def runtime_file(port: int) -> Path:
    """Returns the file for the tokens of this user's server on a port of this host.

    Raises:
        ConfigError: The directory belongs to another user, or others may use it.
    """
    return _made(runtime_directory()) / _name(port)


def find_runtime_file(port: int) -> Path | None:
    """Returns that file if it exists. Looking makes no directory, and trusts none that others may use."""
    file = runtime_directory() / _name(port)
    return file if is_private(file.parent) and private_file.exists(file, OPTION) else None


def network() -> int:
    """Returns the number of this process's network namespace: each has its own ports."""
    return os.stat("/proc/self/ns/net").st_ino


def _name(port: int) -> str:
    return f"{port}-{network()}.token"


def forget(port: int) -> None:
    """Deletes the tokens of an earlier server on a port, on which only the caller listens now."""
    with contextlib.suppress(OSError, ConfigError):
        if (file := find_runtime_file(port)) is not None and listening()[port] <= 1:
            file.unlink()


def listening() -> Counter[int]:
    """Returns the number of TCP listeners by port, whosever they are. Raises OSError."""
    ports: Counter[int] = Counter()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # without IPv6
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state == _LISTENING:
                    ports[int(local.rpartition(":")[2], 16)] += 1
    return ports


def text_of(tokens: Tokens) -> str:
    """Returns the text of a file with these tokens, one in each line."""
    return "".join(f"{token}\n" for token in tokens.values())


def write_tokens(path: Path, tokens: Tokens) -> None:
    """Writes tokens. Raises as `private_file.write`."""
    private_file.write(path, text_of(tokens))


def read(path: Path) -> Tokens:
    """Returns the tokens in a file.

    Raises:
        ConfigError: The file cannot be read, others can read it, or it has no valid token.
    """
    return parse(read_secret(path, OPTION, _COPY).splitlines(), str(path))


def read_secret(path: Path, option: str, renew: str, content: str = private_file.TOKENS) -> str:
    """Returns the text of a file that only this user can read.

    Args:
        path: The file, of at most 64 KiB.
        option: The option that names it.
        renew: What to do if another user knows the text.
        content: What the file has, for messages.

    Raises:
        ConfigError: The file cannot be read, belongs to another user, or others can read it.
    """
    with private_file.readable(path, option, content):
        text = private_file.read(path, content, renew)
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {content} in {path}: it is not text; check {option}") from error


def runtime_directory() -> Path:
    """Returns the directory for this user's tokens, which may not exist, or may be another user's."""
    given = environment().get("XDG_RUNTIME_DIR")
    for parent in (given, f"/run/user/{os.getuid()}"):
        if parent and is_private(Path(parent)):
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
    if not is_private(directory):
        raise ConfigError(f"{directory}, the directory for tokens, {_fault(directory)}")
    return directory


def _fault(directory: Path) -> str:
    """Returns why a directory is not this user's own, and the fix."""
    elsewhere = "set XDG_RUNTIME_DIR to a directory of your own, or use --token-file"
    status = os.lstat(directory)
    if status.st_uid != os.getuid():  # who cannot be stopped from making it again, nor forced to remove it
        return (
            f"belongs to another user, uid {status.st_uid}; {elsewhere}. Only that user or an administrator"
            " can remove it"
        )
    if not stat.S_ISDIR(status.st_mode):
        return f"is not a directory; remove it, or {elsewhere}"
    return f"is open to other users; run: chmod 700 {directory}, or {elsewhere}"


def is_private(directory: Path) -> bool:
    """Whether a directory belongs to this user, and no other user may use it."""
    try:
        status = os.lstat(directory)
    except OSError:
        return False
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return ours and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
