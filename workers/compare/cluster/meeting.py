"""How followers find their conductor: a file in the folder that all machines share.

It holds an address and a key, and only its owner can read it. Whoever does not hold the key is no member:
else anybody who reaches the port could start programs here.
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
"""For all to come: launchers take their time, and network file systems may show a new file late."""
_DIAL_SECONDS = 5.0
AGAIN_SECONDS = 0.2
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""What the file's mode must not hold."""


class Place(Struct, frozen=True):
    """Where the conductor is to be found."""

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
        folder: Which all share; exists.
        host: Address of this machine under which the others reach it.
        timeout: Seconds for all of them together.

    Returns:
        Each one's first word and connection, by rank.

    Raises:
        HubringError: Some did not come, or two have the same rank.
    """
    came: dict[int, tuple[Hello, Wire]] = {}
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    file = folder / FILE
    with socket.create_server((host, 0), family=family, backlog=task.size) as door:
        place = Place(host, door.getsockname()[1], secrets.token_hex())
        _write(file, place)
        try:
            deadline = time.monotonic() + timeout
            while len(came) < task.size - 1:
                left = deadline - time.monotonic()
                welcomed = _welcome(door, place.key.encode(), left) if left > 0 else None
                if welcomed is None:
                    raise _absent(task, came, folder, timeout)
                hello, wire = welcomed
                if hello.rank in came or hello.size != task.size:
                    raise UsageError(
                        f"{hello.host} joined as rank {hello.rank} of {hello.size}, and there are {task.size}"
                        f" tasks here: another job uses {folder}; give another --out"
                    )
                came[hello.rank] = hello, wire
        except BaseException:
            for _, wire in came.values():
                wire.close()
            raise
        finally:
            _take_back(file, place)
    return came


def _take_back(file: Path, place: Place) -> None:
    """Deletes the file, unless another conductor has put its own there."""
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
    """The next member; None if none comes in time."""
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
        except Lost:  # a stranger, or a member that has gone again and will be missed
            wire.close()
            continue
        if isinstance(hello, Hello):
            return hello, wire
        wire.close()
    return None


def _absent(task: Task, came: Iterable[int], folder: Path, timeout: float) -> HubringError:
    missing = sorted(set(range(1, task.size)) - set(came))
    return HubringError(
        f"of the {task.size} tasks that {task.launcher} started, rank {', '.join(map(str, missing))} did not"
        f" come within {timeout:g} s: {folder} must be a folder that all machines share, and they must reach"
        f" {socket.gethostname()}"
    )


def join(task: Task, folder: Path, timeout: float = MEETING_SECONDS) -> tuple[Wire, Place]:
    """Finds the conductor; called by the followers.

    Args:
        task: This follower's.
        folder: Which all share.
        timeout: Seconds that the search may take.

    Raises:
        HubringError: There is none to be seen, or none that answers.
        UsageError: Others could have written the file.
    """
    deadline, last = time.monotonic() + timeout, ""
    while time.monotonic() < deadline:
        try:
            place = _read(folder / FILE)
            return _dial(place), place
        except FileNotFoundError:
            pass  # not there yet
        except (OSError, Lost, msgspec.DecodeError) as cause:  # of a conductor that is no more, it may be
            last = f" (the last try: {cause})"
        time.sleep(AGAIN_SECONDS)
    raise HubringError(
        f"rank {task.rank} on {socket.gethostname()} found no conductor in {folder} within"
        f" {timeout:g} s{last}: --out must be a folder that all machines share, and rank 0 must have started"
    )


def _read(file: Path) -> Place:
    """Where the conductor is, from a file that nobody else can have written, nor read the key in it.

    Raises:
        UsageError: Somebody could: whoever wrote it would be obeyed.
    """
    with file.open("rb") as stream:
        owner = os.fstat(stream.fileno())
        if owner.st_uid != os.geteuid() or owner.st_mode & _OTHERS:
            raise UsageError(
                f"{file} is of user {owner.st_uid} with mode {stat.S_IMODE(owner.st_mode):o}, and has to be"
                f" of user {os.geteuid()}, with mode 600: run all tasks as one user, with --out"
                " in a file system that keeps owners and modes, and delete the file if it is left from before"
            )
        return msgspec.json.decode(stream.read(), type=Place)


def _dial(place: Place) -> Wire:
    try:
        wire = Wire(socket.create_connection((place.host, place.port), _DIAL_SECONDS))
    except OSError as cause:
        raise Lost(f"{place} does not answer: {cause}") from cause
    wire.prove(place.key.encode(), first=False)
    return wire
