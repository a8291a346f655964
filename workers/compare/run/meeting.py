"""How a launcher's tasks find each other: which task this is, and where the conductor is.

The meeting file holds the conductor's address and a key, and only its owner can read it. A connection without
the key is refused; otherwise anyone who reaches the port could start programs here.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from hubring.ps.config.environment import environment
from hubring.ps.config.values import is_loopback
from hubring.ps.core.errors import HubringError, UsageError
from hubring.ps.core.trace import name_kernel
from hubring.ps.transport.host import bracketed, numeric, reachable, towards
from hubring.workers.compare.plan.experiment import Experiment
from hubring.workers.compare.run.link import Hello, Message, OtherEndLost, TaskConnection
from hubring.workers.launchers.placement import detect
from hubring.workers.peers import machine

ONE_MACHINE = {"mpi", "ray"}
"""Rows that start all of their workers on one machine."""


class LauncherTask(Struct, frozen=True):
    """One of several tasks.

    Attributes:
        rank: Its rank; 0 conducts.
        size: Number of tasks.
        local_rank: Its number on this machine.
        launcher: Name of the launcher.
        together: All tasks are known to be on one machine.
    """

    rank: int
    size: int
    local_rank: int
    launcher: str
    together: bool = False


def find_task(environment: Mapping[str, str], hostname: str | None = None) -> LauncherTask | None:
    """Returns the task of this process; None if no launcher started several.

    A rank in the hostname alone does not count: such a pod, for example of a StatefulSet, is one machine.

    Args:
        environment: The process's variables.
        hostname: This machine's hostname; None: look it up.

    Raises:
        ConfigError: Sources disagree.
        UsageError: A launcher sets the rank but not the number of tasks.
    """
    place = detect(environment, hostname=socket.gethostname() if hostname is None else hostname)
    if place.rank is None or place.size == 1:
        return None
    if place.size is None:
        if detect(environment).rank is None:
            return None
        raise UsageError(
            f"{', '.join(place.sources)} ({place.launcher}) sets the rank of this task, but the number of"
            " tasks is unknown; set WORLD_SIZE in every task, or run on this host with --alone"
        )
    together = place.local_size == place.size
    return LauncherTask(place.rank, place.size, place.local_rank, place.launcher, together)


def check_experiment(experiment: Experiment, task: LauncherTask, out: Path | None) -> Path:
    """Checks that a cluster's tasks can run this experiment; returns the folder to write to.

    Raises:
        UsageError: They cannot run it.
    """
    most = max(experiment.workers)
    if most > task.size:
        raise UsageError(
            f"the experiment has {most} workers, but {task.launcher} started {task.size} tasks, one for each"
            f" worker; start {most} tasks, or set at most {task.size} workers"
        )
    if out is None:
        raise UsageError(
            f"{task.launcher} started {task.size} tasks, which write to one folder; with --out, name a folder"
            " that all machines share"
        )
    if experiment.link is not None:
        raise UsageError(
            "[link] emulates links on one machine, but these tasks use real links; remove [link]"
            f" (--rate, --latency), or run without {task.launcher}"
        )
    if experiment.fault is not None:
        raise UsageError(
            "[fault] can kill only a worker on the conductor's machine;"
            f" remove [fault], or run without {task.launcher}"
        )
    if alone := ONE_MACHINE.intersection(experiment.rows):
        raise UsageError(
            f"rows = {', '.join(sorted(alone))} start all workers on one machine; remove them, or run"
            f" without {task.launcher}"
        )
    return out


_MASTER = "MASTER_ADDR"
"""Set by launchers of torch's kind to rank 0's address."""


def describe_task(task: LauncherTask, conductor: str | None) -> Hello:
    """Returns a task's first message.

    Args:
        task: This process's task.
        conductor: The conductor's address; None: this is the conductor.
    """
    return Hello(
        rank=task.rank,
        size=task.size,
        local_rank=task.local_rank,
        host=socket.gethostname(),
        boot=name_kernel(),
        address=_address(task) if conductor is None else towards(conductor),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        machine=dict(machine.describe()),
    )


def _address(task: LauncherTask) -> str:
    """Returns the conductor's address for the others; loopback if all are on one machine."""
    if task.together:
        return "127.0.0.1"
    master = environment().get(_MASTER)
    own = "" if master is None else towards(master)
    return numeric(reachable("")) if not own or is_loopback(own) else own


MEETING_FILE = "conductor.json"
MEETING_SECONDS = 120.0
"""Time for all to join: launchers are slow, and network file systems can show a new file late."""
_DIAL_SECONDS = 5.0
AGAIN_SECONDS = 0.2
STRANGER_SECONDS = 10.0
"""Time for a connection to prove itself and to say who it is."""
MOST_STRANGERS = 64
"""Connections that may wait for that; then the oldest ends. A member connects again."""
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""Mode bits that the file must not have."""


class ConductorAddress(Struct, frozen=True):
    """Address and key of the conductor."""

    host: str
    port: int
    key: str

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


def invite(
    task: LauncherTask, folder: Path, host: str, timeout: float = MEETING_SECONDS
) -> dict[int, tuple[Hello, TaskConnection]]:
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
    joined: dict[int, tuple[Hello, TaskConnection]] = {}
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    file = folder / MEETING_FILE
    with socket.create_server((host, 0), family=family, backlog=task.size) as door:
        place = ConductorAddress(host, door.getsockname()[1], secrets.token_hex())
        newcomers = _Newcomers(door, place.key.encode())
        _write(file, place)
        try:
            deadline = time.monotonic() + timeout
            while len(joined) < task.size - 1:
                if time.monotonic() > deadline:
                    raise _absent(task, joined, folder, timeout)
                for hello, wire in newcomers.look():
                    if hello.rank in joined or hello.size != task.size:
                        wire.close()
                        raise UsageError(
                            f"{hello.host} joined as rank {hello.rank} of {hello.size}, but there are"
                            f" {task.size} tasks here. Another job uses {folder}; use another --out"
                        )
                    joined[hello.rank] = hello, wire
        except BaseException:
            for _, wire in joined.values():
                wire.close()
            raise
        finally:
            newcomers.close()
            _delete(file, place)
    return joined


def _delete(file: Path, place: ConductorAddress) -> None:
    """Deletes the file, unless another conductor has replaced it."""
    with contextlib.suppress(FileNotFoundError):
        if file.read_bytes() == msgspec.json.encode(place):
            file.unlink()


def _write(file: Path, place: ConductorAddress) -> None:
    fresh = file.with_name(f"{MEETING_FILE}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(msgspec.json.encode(place))
    fresh.rename(file)


class _Newcomers:
    """Admits connections that prove the key. Each has its own thread, so one that stalls delays no other.

    Args:
        door: Accepts connections.
        key: The key of this comparison.
    """

    def __init__(self, door: socket.socket, key: bytes) -> None:
        door.settimeout(AGAIN_SECONDS)
        self._door, self._key = door, key
        self._came: queue.SimpleQueue[tuple[TaskConnection, Message | None]] = queue.SimpleQueue()
        self._since: dict[TaskConnection, float] = {}
        """When those came that have not said who they are, the oldest first."""

    def look(self) -> Iterator[tuple[Hello, TaskConnection]]:
        """Waits a moment for a connection; yields those that have said who they are."""
        with contextlib.suppress(OSError):  # no connection came, or it closed at once
            wire = TaskConnection(self._door.accept()[0])
            self._since[wire] = time.monotonic()
            threading.Thread(target=self._welcome, args=(wire,), name="newcomer", daemon=True).start()
        for wire, since in list(self._since.items()):
            if len(self._since) > MOST_STRANGERS or time.monotonic() - since > STRANGER_SECONDS:
                del self._since[wire]
                wire.hang_up()
        while not self._came.empty():
            wire, said = self._came.get()
            if self._since.pop(wire, None) is not None and isinstance(said, Hello):
                yield said, wire
            else:
                wire.close()

    def close(self) -> None:
        """Ends the connections that have not said who they are."""
        for wire in self._since:
            wire.hang_up()

    def _welcome(self, wire: TaskConnection) -> None:
        said = None
        with contextlib.suppress(OtherEndLost):  # a stranger, or a member that left: reported as missing
            wire.prove(self._key, first=True)
            said = wire.receive(STRANGER_SECONDS)
        self._came.put((wire, said))


def _absent(task: LauncherTask, joined: Iterable[int], folder: Path, timeout: float) -> HubringError:
    missing = sorted(set(range(1, task.size)) - set(joined))
    return HubringError(
        f"of the {task.size} tasks that {task.launcher} started, rank {', '.join(map(str, missing))} did not"
        f" join within {timeout:g} s; {folder} must be a folder that all machines share, and they must be"
        f" able to reach {socket.gethostname()}"
    )


def join(
    task: LauncherTask, folder: Path, timeout: float = MEETING_SECONDS
) -> tuple[TaskConnection, ConductorAddress]:
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
            place = _read(folder / MEETING_FILE)
            return _dial(place), place
        except FileNotFoundError:
            pass  # not there yet
        except (
            OSError,
            OtherEndLost,
            msgspec.DecodeError,
        ) as cause:  # the file can be that of an earlier conductor
            last = f" (last try: {cause})"
        time.sleep(AGAIN_SECONDS)
    raise HubringError(
        f"rank {task.rank} on {socket.gethostname()} found no conductor in {folder} within"
        f" {timeout:g} s{last}; --out must be a folder that all machines share, and rank 0 must be running"
    )


def _read(file: Path) -> ConductorAddress:
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
        return msgspec.json.decode(stream.read(), type=ConductorAddress)


def _dial(place: ConductorAddress) -> TaskConnection:
    try:
        wire = TaskConnection(socket.create_connection((place.host, place.port), _DIAL_SECONDS))
    except OSError as cause:
        raise OtherEndLost(f"{place} does not answer: {cause}") from cause
    wire.prove(place.key.encode(), first=False)
    return wire
