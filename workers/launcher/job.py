"""A job on this machine: its server, its workers, and what they are told."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ps.config import environment
from ps.errors import UsageError
from workers.launcher import host
from workers.launcher.server import Server
from workers.launcher.team import Team
from workers.launchers.torchrun import told


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """What `ps-run` was told; the fields are its flags."""

    num_proc: int | None = None
    hosts: str | None = None
    hostfile: Path | None = None
    topology: str = "hub"
    backend: str | None = None
    transport: str | None = None
    aggregate: bool = False
    shards: int = 1
    output_filename: Path | None = None
    timeline_filename: str | None = None
    start_timeout: float = 300.0
    verbose: bool = False

    @property
    def size(self) -> int:
        """How many workers there are.

        Raises:
            UsageError: The hosts have no room for them, or are other machines.
        """
        given = [host.slots(self.hosts)] if self.hosts else []
        given += [host.slots_in(self.hostfile)] if self.hostfile else []
        room = given[0] if given else None
        if room is not None and self.num_proc is not None and self.num_proc > room:
            raise UsageError(
                f"-np {self.num_proc}: the hosts have {room} slot(s); give them more, or start fewer"
            )
        return self.num_proc or room or 1

    def run(self, words: list[str]) -> int:
        """Runs a script and its arguments; returns the exit code.

        Raises:
            UsageError: The flags make no sense.
            ServerUnreachable: The server does not start.
        """
        size, flags = self.size, ["--shards", str(self.shards)]
        limit = self.start_timeout
        with Server(size, flags, environment(), verbose=self.verbose, timeout=limit) as server:
            command = [*self._command(server.address), *words]
            team = Team(
                [command] * size, [self._variables(rank, size) for rank in range(size)], self.output_filename
            )
            with _passing_on(team):
                code = team.wait(_say)
            if code:
                server.end(0.0)
        return code

    def _command(self, server: str) -> list[str]:
        command = [sys.executable, "-m", "workers.cli", "--server", server, "--as-horovod"]
        command += ["--topology", self.topology]
        if self.backend:
            command += ["--backend", self.backend]
        if self.transport:
            command += ["--transport", self.transport]
        return [*command, "--aggregate"] if self.aggregate else command

    def _variables(self, rank: int, size: int) -> dict[str, str]:
        variables = {**environment(), **told(rank, size, rank, size, 0)}
        variables["PYTHONUNBUFFERED"] = "1"  # or the last lines before a crash are lost
        if self.timeline_filename:
            variables["HOROVOD_TIMELINE"] = self.timeline_filename
        return variables


def _say(rank: int, code: int) -> None:
    print(f"ps-run: rank {rank} ended with exit code {code}; ending the others", file=sys.stderr)


@contextmanager
def _passing_on(team: Team) -> Iterator[None]:
    """Lets the workers have the signals that this process gets."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        team.signal(number)

    earlier = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
