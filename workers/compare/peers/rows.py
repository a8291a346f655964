"""The peers as rows of the comparison, and the programs that each consists of. No torch is imported here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple, Protocol

from hubring.ps.core.errors import UsageError
from hubring.ps.process.command import module_command


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One peer. All of them are synchronous: they stand before the gate.

    Attributes:
        name: What the user calls it.
        about: What it does, in one sentence.
        side: Module and class in this folder of what its workers run.
        served: It has servers of its own; only then a setting's number of servers counts.
        leads: Its server comes first: workers are to be started once it has written `PeerPrograms.meet`.
        needs: Library that it needs, and the extra that brings it; none: torch alone.
        linked: It can be run on hosts behind links.
    """

    name: str
    about: str
    side: str
    served: bool = False
    leads: bool = False
    needs: tuple[str, str] | None = None
    linked: bool = True

    def missing(self) -> str:
        """What this machine lacks for the row, and how to get it; empty where nothing is."""
        if self.name == "mpi" and which("mpirun") is None:
            return "there is no mpirun here (apt install openmpi-bin)"
        if self.needs is not None and find_spec(self.needs[0]) is None:
            return f"{self.needs[0]} is not installed (pip install 'hubring[{self.needs[1]}]')"
        return ""

    def check(self) -> None:
        """Makes sure that the row can be run here.

        Raises:
            UsageError: It cannot; says what to install.
        """
        if missing := self.missing():
            raise UsageError(f"row {self.name}: {missing}")


PEERS = {
    row.name: row
    for row in (
        PeerRow("ddp", "torch's DistributedDataParallel, every worker steps", "ddp:Ddp"),
        PeerRow(
            "mpi",
            "Open MPI's allreduce after backward, every worker steps",
            "mpi:Mpi",
            needs=("mpi4py", "peers-mpi"),
        ),
        PeerRow(
            "rpc",
            "a parameter server on torch's RPC waits for all, averages and steps",
            "rpc:Rpc",
            served=True,
        ),
        PeerRow(
            "ray",
            "a parameter server as an actor of Ray's waits for all, averages and steps",
            "ray:Ray",
            served=True,
            leads=True,
            needs=("ray", "peers-ray"),
            linked=False,
        ),
    )
}


def find(name: str) -> PeerRow:
    """The peer of that name.

    Raises:
        UsageError: There is none.
    """
    if name not in PEERS:
        raise UsageError(f"there is no peer {name!r}; there are {', '.join(PEERS)}")
    return PEERS[name]


class Hosts(Protocol):
    """Where programs run: as `compare.hardship` or `compare.cluster` has it."""

    @property
    def apart(self) -> bool:
        """Whether each is on a host of its own, which others reach by its address alone."""

    def local_rank(self, rank: int) -> int:
        """A worker's number among those of its host."""

    def command(self, role: str, argv: Sequence[str]) -> list[str]:
        """What runs a program on its role's host."""

    def address(self, role: str) -> str:
        """Under which address the others reach that host."""


class Program(NamedTuple):
    """What is started: its name among the run's processes, and its command line."""

    name: str
    argv: list[str]


@dataclass(frozen=True, slots=True)
class PeerPrograms:
    """What one run of a peer starts.

    Attributes:
        row: Which peer.
        size: How many workers there are.
        servers: How many servers, where it has any; Ray's actor is one.
        folder: Where the run writes; an absolute path without a file `meet`.
        hosts: Where the programs run.
        backend: Of DDP.
    """

    row: PeerRow
    size: int
    folder: Path
    hosts: Hosts
    servers: int = 1
    backend: str = "gloo"

    @property
    def meet(self) -> Path:
        """The file by which all find each other; of a `row.leads`, workers can start once it is there."""
        return self.folder / "meet"

    def server_programs(self) -> list[Program]:
        """The servers, to be started first; none for a peer without."""
        count = (1 if self.row.leads else self.servers) if self.row.served else 0
        return [self._server(number, count) for number in range(count)]

    def worker_programs(self, words: Callable[[int], Sequence[str]]) -> list[Program]:
        """The workers: a program each, or one for all under mpirun.

        Args:
            words: A rank's flags of `ps-worker` (record, save-parameters and so on) and the job, as
                `--job NAME -- ARGS` or `SCRIPT ARGS`; without rank, size, server and backend.
        """
        argvs = [self._worker(rank, words(rank)) for rank in range(self.size)]
        if self.row.name != "mpi":
            return [Program(f"worker {rank}", argv) for rank, argv in enumerate(argvs)]
        flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        each = [["-n", "1", *argv] for argv in argvs]
        colons = [word for one in each for word in (":", *one)]
        return [Program("workers", self._mpirun([*flags, *colons[1:]]))]

    def result(self, rank: int) -> Mapping[str, Any]:
        """A worker's last line, once all have ended."""
        line: dict[str, Any] = json.loads(self._result(rank).read_text())
        return line

    def _server(self, number: int, count: int) -> Program:
        role = "server" if number == 0 else f"shard {number}"
        flags = {"peer": self.row.name, "world-size": self.size, "meet": self.meet}
        if not self.row.leads:
            flags |= {"number": number, "servers": count}
        return Program(role, self._command("serve", role, flags))

    def _worker(self, rank: int, words: Sequence[str]) -> list[str]:
        role = f"worker {rank}"
        flags = {"peer": self.row.name, "rank": rank, "world-size": self.size}
        flags |= {"meet": self.meet, "result": self._result(rank), "servers": len(self.server_programs())}
        if self.row.name != "mpi":  # whom mpirun tells
            flags["local-rank"] = self.hosts.local_rank(rank)
        if self.row.name == "ddp":
            flags["backend"] = self.backend
        return self._command("run", role, flags, words)

    def _mpirun(self, words: Sequence[str]) -> list[str]:
        if not self.hosts.apart:
            return ["mpirun", *words]
        # Ranks report to mpirun, by default over the loopback, which hosts do not share.
        reached = f"PMIX_MCA_ptl_base_if_include={self.hosts.address('server')}/31"  # PMIx 4 makes /32 of all
        told = ["env", "PMIX_MCA_ptl_base_remote_connections=1", reached]
        return self.hosts.command("server", [*told, "mpirun", *words])

    def _command(
        self, module: str, role: str, flags: Mapping[str, object], words: Sequence[str] = ()
    ) -> list[str]:
        host = {"host": self.hosts.address(role)} if self.hosts.apart else {}
        spelt = [word for name, value in {**flags, **host}.items() for word in (f"--{name}", str(value))]
        return self.hosts.command(
            role, module_command(f"hubring.workers.compare.peers.{module}", *spelt, *words)
        )

    def _result(self, rank: int) -> Path:
        return self.folder / f"result {rank}.json"
