"""The programs that a peer's row of the comparison consists of. No torch is imported here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hubring.ps.process.command import module_command
from hubring.workers.peers.rows import PeerRow, mpirun, spelt


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
        if self.row.launched:
            return [Program("workers", self._launched(argvs))]
        return [Program(f"worker {rank}", argv) for rank, argv in enumerate(argvs)]

    def result(self, rank: int) -> Mapping[str, Any]:
        """A worker's last line, once all have ended."""
        line: dict[str, Any] = json.loads(self._result(rank).read_text())
        return line

    def _server(self, number: int, count: int) -> Program:
        role = "server" if number == 0 else f"shard {number}"
        return Program(role, self._command(role, self.row.serve(self.size, self.meet, number, count)))

    def _worker(self, rank: int, words: Sequence[str]) -> list[str]:
        role = f"worker {rank}"
        flags = {"peer": self.row.name, "rank": rank, "world-size": self.size}
        flags |= {"meet": self.meet, "result": self._result(rank), "servers": len(self.server_programs())}
        if not self.row.launched:  # mpirun tells it
            flags["local-rank"] = self.hosts.local_rank(rank)
        if self.row.name == "ddp":
            flags["backend"] = self.backend
        return self._command(role, ["hubring.workers.compare.peers.run", *spelt(flags)], words)

    def _launched(self, argvs: Sequence[Sequence[str]]) -> list[str]:
        if not self.hosts.apart:
            return mpirun(argvs)
        # Ranks report to mpirun, by default over the loopback, which hosts do not share.
        reached = f"PMIX_MCA_ptl_base_if_include={self.hosts.address('server')}/31"  # PMIx 4 makes /32 of all
        told = ["env", "PMIX_MCA_ptl_base_remote_connections=1", reached]
        return self.hosts.command("server", [*told, *mpirun(argvs)])

    def _command(self, role: str, module: Sequence[str], words: Sequence[str] = ()) -> list[str]:
        host = ["--host", self.hosts.address(role)] if self.hosts.apart else []
        return self.hosts.command(role, module_command(*module, *host, *words))

    def _result(self, rank: int) -> Path:
        return self.folder / f"result {rank}.json"
