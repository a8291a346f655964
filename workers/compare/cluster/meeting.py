"""How followers find their conductor: a file in the folder that all machines share.

It holds an address and a key, and only its owner can read it. A connection without the key is refused;
otherwise anyone who reaches the port could start programs here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from hubring.ps.core.errors import HubringError, UsageError
from hubring.ps.transport.host import bracketed
from hubring.workers.compare.cluster.link import Lost, Wire
from hubring.workers.compare.cluster.messages import Hello
from hubring.workers.compare.cluster.task import Task

FILE = "conductor.json"
MEETING_SECONDS = 120.0
"""Time for all to join: launchers are slow, and network file systems can show a new file late."""
_DIAL_SECONDS = 5.0
AGAIN_SECONDS = 0.2
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""Mode bits that the file must not have."""


class Place(Struct, frozen=True):
    """Address and key of the conductor."""

    host: str
    port: int
    key: str

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


def invite(
    task: Task, folder: Path, host: str, timeout: float = MEETING_SECONDS
) -> dict[int, tuple[Hello, Wire]]:
    """Waits for all followers; called by the conductor.

    Args:
        task: The conductor's.
        folder: Existing folder that all machines share.
        host: Address of this machine for the others.
        timeout: Seconds for all of them together.

    Returns:
        The first message and the connection of each follower, by rank.

    Raises:
        HubringError: Some followers did not join.
        UsageError: Two have the same rank, or one belongs to another job.
    """
    joined: dict[int, tuple[Hello, Wire]] = {}
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    file = folder / FILE
    with socket.create_server((host, 0), family=family, backlog=task.size) as door:
        place = Place(host, door.getsockname()[1], secrets.token_hex())
        _write(file, place)
        try:
            deadline = time.monotonic() + timeout
            while len(joined) < task.size - 1:
                left = deadline - time.monotonic()
                welcomed = _welcome(door, place.key.encode(), left) if left > 0 else None
                if welcomed is None:
                    raise _absent(task, joined, folder, timeout)
                hello, wire = welcomed
                if hello.rank in joined or hello.size != task.size:
                    raise UsageError(
                        f"{hello.host} joined as rank {hello.rank} of {hello.size}, but there are {task.size}"
                        f" tasks here. Another job uses {folder}; use another --out"
                    )
                joined[hello.rank] = hello, wire
        except BaseException:
            for _, wire in joined.values():
                wire.close()
            raise
        finally:
            _delete(file, place)
    return joined


def _delete(file: Path, place: Place) -> None:
    """Deletes the file, unless another conductor has replaced it."""
    with contextlib.suppress(FileNotFoundError):
        if file.read_bytes() == msgspec.json.encode(place):
            file.unlink()


def _write(file: Path, place: Place) -> None:
    fresh = file.with_name(f"{FILE}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(msgspec.json.encode(place))
    fresh.rename(file)


def _welcome(door: socket.socket, key: bytes, timeout: float) -> tuple[Hello, Wire] | None:
    """Returns the next member; None if none joins in time."""
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        door.settimeout(left)
        try:
            wire = Wire(door.accept()[0])
        except TimeoutError:
            return None
        try:
            wire.prove(key, first=True)
            hello = wire.receive(left)
        except Lost:  # a stranger, or a member that left; it is reported as missing
            wire.close()
            continue
        if isinstance(hello, Hello):
            return hello, wire
        wire.close()
    return None


def _absent(task: Task, joined: Iterable[int], folder: Path, timeout: float) -> HubringError:
    missing = sorted(set(range(1, task.size)) - set(joined))
    return HubringError(
        f"of the {task.size} tasks that {task.launcher} started, rank {', '.join(map(str, missing))} did not"
        f" join within {timeout:g} s; {folder} must be a folder that all machines share, and they must be"
        f" able to reach {socket.gethostname()}"
    )


def join(task: Task, folder: Path, timeout: float = MEETING_SECONDS) -> tuple[Wire, Place]:
    """Finds the conductor; called by the followers.

    Args:
        task: This follower's.
        folder: Folder that all machines share.
        timeout: Limit of the search in seconds.

    Raises:
        HubringError: There is no conductor, or it does not answer.
        UsageError: Another user could have written the file.
    """
    deadline, last = time.monotonic() + timeout, ""
    while time.monotonic() < deadline:
        try:
            place = _read(folder / FILE)
            return _dial(place), place
        except FileNotFoundError:
            pass  # not there yet
        except (OSError, Lost, msgspec.DecodeError) as cause:  # the file can be that of an earlier conductor
            last = f" (last try: {cause})"
        time.sleep(AGAIN_SECONDS)
    raise HubringError(
        f"rank {task.rank} on {socket.gethostname()} found no conductor in {folder} within"
        f" {timeout:g} s{last}; --out must be a folder that all machines share, and rank 0 must be running"
    )


def _read(file: Path) -> Place:
    """Reads address and key from a file that only this user can write and read.

    Raises:
        UsageError: Another user could write it; followers obey its conductor.
    """
    with file.open("rb") as stream:
        owner = os.fstat(stream.fileno())
        if owner.st_uid != os.geteuid() or owner.st_mode & _OTHERS:
            raise UsageError(
                f"{file} belongs to user {owner.st_uid} with mode {stat.S_IMODE(owner.st_mode):o}; expected"
                f" user {os.geteuid()} with mode 600. Run all tasks as one user, with --out on a file system"
                " that stores owners and modes; delete the file if it is from an earlier run"
            )
        return msgspec.json.decode(stream.read(), type=Place)


def _dial(place: Place) -> Wire:
    try:
        wire = Wire(socket.create_connection((place.host, place.port), _DIAL_SECONDS))
    except OSError as cause:
        raise Lost(f"{place} does not answer: {cause}") from cause
    wire.prove(place.key.encode(), first=False)
    return wire
