"""Tokens, and the files with them, which only their user can read.

    hubring:worker:8d1f...:4be0...

A join token is one string with a role, the digest of the server's certificate, and the role's secret. The
digest proves the server to its clients, also on one host: any user may take a port that a server has
left. No secret is sent before.

A server without `--token-file` writes its tokens to the user's runtime directory, in a file that is named
after its port. So a program of the same user on the same host finds them without any setting.

Law: of what killed servers left in that directory, no file goes that a running server, or a standby that
takes over, may need. A file is deleted only if it is older than a day, its port has no listener in this
network namespace, and no process of this user names it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hubring.ps.config.environment import environment
from hubring.ps.core.errors import ConfigError
from hubring.ps.security import private_file
from hubring.ps.security.guard import Role

ROLES = (Role.WORKER, Role.SHARD, Role.READER, Role.OPERATOR)
"""Roles that a token can have."""

_TOKEN = re.compile(r"hubring:([a-z]+):([0-9a-f]{64}):([0-9a-f]{64})")


class Token(NamedTuple):
    """A secret for one role.

    Attributes:
        role: What it lets its holder do.
        digest: SHA-256 of the server's certificate, in hexadecimal.
        secret: 256 random bits, in hexadecimal.
    """

    role: Role
    digest: str
    secret: str

    def __repr__(self) -> str:
        return f"Token({self.role}, digest={self.digest!r})"  # logs and errors must not show a secret

    def __str__(self) -> str:
        return f"hubring:{self.role}:{self.digest}:{self.secret}"


Tokens = Mapping[Role, Token]
"""One token for each of some roles."""


def draw_tokens(digest: str) -> Tokens:
    """Returns new tokens for all roles."""
    return {role: Token(role, digest, secrets.token_hex(32)) for role in ROLES}


def parse_tokens(lines: Iterable[str], where: str) -> Tokens:
    """Returns the tokens in some lines.

    Raises:
        ConfigError: A line is no token, two have one role, or there is none. Does not repeat the line.
    """
    tokens: dict[Role, Token] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        found = _TOKEN.fullmatch(line.strip())
        if found is None or found[1] not in ROLES:
            raise ConfigError(
                f"{where}, line {number}, is no token; expected hubring:ROLE:DIGEST:SECRET, as"
                " `ps-server token show` prints it"
            )
        role = Role(found[1])
        if role in tokens:
            raise ConfigError(f"{where}, line {number}, is a second token for the role {role}; keep one")
        tokens[role] = Token(role, found[2], found[3])
    if not tokens:
        raise ConfigError(f"{where} has no token; copy one that `ps-server token show` prints")
    return tokens


def choose_token(tokens: Tokens, role: Role) -> Token | None:
    """Returns the token to act in a role; None if there is none. An operator may also read."""
    wanted = (role, Role.OPERATOR, Role.WORKER) if role is Role.READER else (role,)
    return next((tokens[each] for each in wanted if each in tokens), None)


log = logging.getLogger(__name__)

FILE_OPTION = "--token-file"

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
    return _made_directory(runtime_directory()) / _file_name(port)


def find_runtime_file(port: int) -> Path | None:
    """Returns that file if it exists. Looking makes no directory, and trusts none that others may use."""
    file = runtime_directory() / _file_name(port)
    return file if is_private(file.parent) and private_file.exists(file, FILE_OPTION) else None


CONTROL = "control"
"""The kind of a coordinator's unix socket."""

MAX_PATH_BYTES = 107
"""Of a unix socket's path on Linux."""


def socket_place(port: int, kind: str) -> str:
    """Returns the path of a unix socket for what has a port, beside its tokens; empty if there is no place.

    Only processes of this user reach it, since the directory is private.
    """
    try:
        path = str(runtime_file(port).with_suffix(f".{kind}"))
    except ConfigError as error:
        log.info("processes on this host connect over TCP: %s", error)
        return ""
    return path if len(os.fsencode(path)) <= MAX_PATH_BYTES else ""


def find_control_socket(port: int) -> str:
    """Returns the path of the coordinator's socket beside a port; empty if there is none of this user."""
    path = str((runtime_directory() / _file_name(port)).with_suffix(f".{CONTROL}"))
    return path if is_ours(path) else ""


def is_ours(path: str) -> bool:
    """Whether a path is a unix socket in a directory that only this user may use, so that it made it."""
    return Path(path).is_socket() and is_private(Path(path).parent)


def network() -> int:
    """Returns the number of this process's network namespace: each has its own ports."""
    return os.stat("/proc/self/ns/net").st_ino


def _file_name(port: int) -> str:
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


def read_tokens(path: Path) -> Tokens:
    """Returns the tokens in a file.

    Raises:
        ConfigError: The file cannot be read, others can read it, or it has no valid token.
    """
    return parse_tokens(read_secret(path, FILE_OPTION, _COPY).splitlines(), str(path))


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
    """Returns the directory for this user's tokens, which may not exist, or may be another user's.

    Any user can take the name in the folder for temporary files first. Then it is in the home directory.
    """
    given = environment().get("XDG_RUNTIME_DIR")
    for parent in (given, f"/run/user/{os.getuid()}"):
        if parent and is_private(Path(parent)):
            return Path(parent) / "hubring"
    shared = Path(tempfile.gettempdir()) / f"hubring-{os.getuid()}"
    home = Path(os.path.expanduser("~"))  # which Path's method would demand to exist
    own = home / ".cache" / f"hubring-{socket.gethostname()}"  # hosts may share it
    taken = os.path.lexists(shared) and os.lstat(shared).st_uid != os.getuid()
    return own if taken or is_private(own) else shared


def _made_directory(directory: Path) -> Path:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
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
    if not stat.S_ISDIR(os.lstat(directory).st_mode):
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


OLD_SECONDS = 86400.0
"""A server that starts writes its files before it listens."""

_OLD_NAME = re.compile(
    r"(?P<port>[0-9]{1,5})-(?P<network>[0-9]+)\.(token|page|state|control|zmq|grpc)(\.[^.]+\.new)?"
)


def remove_old_files() -> None:
    """Deletes the files, if the directory is this user's own."""
    directory = runtime_directory()
    if not is_private(directory):
        return
    try:
        old = list(_old_files(directory))
        if not old:
            return
        occupied, named = listening(), _environments()
    except OSError as error:
        log.info("files of killed servers stay in %s: %s", directory, error)
        return
    for file, port in old:
        stem = f"{directory / file.name.partition('.')[0]}."  # those of one server stay together
        with contextlib.suppress(OSError):
            # A server may have started on this port since, and have replaced the file.
            if port not in occupied and stem.encode() not in named and _is_old(file):
                file.unlink()


def _old_files(directory: Path) -> Iterator[tuple[Path, int]]:
    """Yields the old files of this network namespace, and their ports."""
    here = str(network())
    for file in directory.iterdir():
        found = _OLD_NAME.fullmatch(file.name)
        if found is None or found["network"] != here:
            continue
        with contextlib.suppress(FileNotFoundError):  # another server also cleans up
            if _is_old(file):
                yield file, int(found["port"])


def _is_old(file: Path) -> bool:
    return time.time() - file.lstat().st_mtime > OLD_SECONDS


def _environments() -> bytes:
    """Returns the environments of this user's processes: a standby's has the name of the state file."""
    found = []
    for process in os.listdir("/proc"):
        if process.isdigit():
            with contextlib.suppress(OSError):  # it ended, or is another user's
                found.append(Path(f"/proc/{process}/environ").read_bytes())
    return b"\0".join(found)
