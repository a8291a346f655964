"""A job on this machine: its server, its workers, and what they are told."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hubring.ps.config.environment import environment
from hubring.ps.core.errors import UsageError
from hubring.workers.launchers.torchrun import OURS, told
from hubring.workers.localrun import host
from hubring.workers.localrun.server import Server
from hubring.workers.localrun.team import Patience, Team, Verdict

RESTARTS = 3
"""How many workers are started anew under elastic training, unless --reset-limit says otherwise."""


LEASE_SECONDS = 5.0
"""For how long the hub keeps the place of a worker that it does not hear of."""


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """What `ps-run` was told; the fields are its flags."""

    num_proc: int | None = None
    min_num_proc: int | None = None
    max_num_proc: int | None = None
    reset_limit: int | None = None
    hosts: str | None = None
    hostfile: Path | None = None
    host_discovery_script: str | None = None
    slots_per_host: int | None = None
    topology: str = "hub"
    backend: str | None = None
    transport: str | None = None
    aggregate: bool = False
    shards: int = 1
    output_filename: Path | None = None
    timeline_filename: str | None = None
    fusion_threshold_mb: int | None = None
    start_timeout: float = 300.0
    verbose: bool = False

    @property
    def size(self) -> int:
        """How many workers there are.

        Raises:
            UsageError: The hosts have no room for them, or are other machines.
        """
        room = host.room(self.hosts, self.hostfile, self.host_discovery_script, self.slots_per_host or 1)
        if room is not None and self.num_proc is not None and self.num_proc > room:
            raise UsageError(
                f"-np {self.num_proc}: the hosts have {room} slot(s); give them more, or start fewer"
            )
        return self.num_proc or room or self.min_num_proc or 1

    @property
    def elastic(self) -> bool:
        """Whether training goes on when a worker is lost."""
        return self.min_num_proc is not None or self.host_discovery_script is not None

    def run(self, words: list[str]) -> int:
        """Runs a script and its arguments; returns the exit code.

        Raises:
            UsageError: The flags make no sense.
            ServerUnreachable: The server does not start.
        """
        size, flags = self.size, ["--shards", str(self.shards), "--lease", str(LEASE_SECONDS)]
        patience, limit = self._patience(size), self.start_timeout
        with Server(size, flags, environment(), verbose=self.verbose, timeout=limit) as server:
            command = [*self._command(server.address), *words]
            places = [self._variables(rank, size) for rank in range(size)]
            team = Team([command] * size, places, self.output_filename, patience)
            with _passing_on(team):
                code = team.wait(_say)
            if code:
                server.end(0.0)
        return code

    def _patience(self, size: int) -> Patience | None:
        least, most = self.min_num_proc or size, self.max_num_proc or size
        if not 1 <= least <= size <= most:
            raise UsageError(
                f"-np {size} --min-num-proc {least} --max-num-proc {most}: expected"
                " 1 <= min-num-proc <= np <= max-num-proc"
            )
        if not self.elastic:
            return None
        if self.topology == "ring":
            raise UsageError(
                "elastic training needs a hub: around a ring, who is lost ends the job."
                " Leave out --min-num-proc and --host-discovery-script, or take --topology hub"
            )
        if most > size:
            print(f"ps-run: --max-num-proc {most}: there are never more than -np {size}", file=sys.stderr)
        restarts = RESTARTS if self.reset_limit is None else self.reset_limit
        return Patience(least, restarts, pause=1.5 * LEASE_SECONDS)

    def _command(self, server: str) -> list[str]:
        command = [sys.executable, "-m", "hubring.workers.programs.cli", "--server", server, "--as-horovod"]
        command += ["--topology", self.topology]
        if self.backend:
            command += ["--backend", self.backend]
        if self.transport:
            command += ["--transport", self.transport]
        return [*command, "--aggregate"] if self.aggregate else command

    def _variables(self, rank: int, size: int) -> dict[str, str]:
        variables = {**environment(), **told(rank, size, rank, size, 0), OURS: "ps-run"}
        variables["PYTHONUNBUFFERED"] = "1"  # or the last lines before a crash are lost
        if self.timeline_filename:
            variables["HOROVOD_TIMELINE"] = self.timeline_filename
        if self.fusion_threshold_mb is not None:
            variables["HOROVOD_FUSION_THRESHOLD"] = str(self.fusion_threshold_mb << 20)
        if self.elastic:
            variables["HOROVOD_ELASTIC"] = "1"
        return variables


def _say(rank: int, code: int, verdict: Verdict) -> None:
    print(f"ps-run: rank {rank} ended with exit code {code}; {verdict}", file=sys.stderr)


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
