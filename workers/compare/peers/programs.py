"""The programs of a peer's row. This module does not import torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hubring.ps.process.command import module_command
from hubring.workers.peers.rows import PeerRow, mpirun, spelt


class Hosts(Protocol):
    """The hosts of programs; see `compare.hardship` and `compare.cluster`."""

    @property
    def apart(self) -> bool:
        """Whether each program has its own host, which others reach only by address."""

    def local_rank(self, rank: int) -> int:
        """Returns a worker's number among those of its host."""

    def command(self, role: str, argv: Sequence[str]) -> list[str]:
        """Returns the command that runs a program on its role's host."""

    def address(self, role: str) -> str:
        """Returns the address of a role's host for the others."""


class Program(NamedTuple):
    """A program to start: its name among the run's processes, and its command line."""

    name: str
    argv: list[str]


@dataclass(frozen=True, slots=True)
class PeerPrograms:
    """The programs of one run of a peer.

    Attributes:
        row: The peer.
        size: Number of workers.
        servers: Number of servers, if the peer has any; Ray's actor is one.
        folder: The run's folder; an absolute path without a file `meet`.
        hosts: Hosts of the programs.
        backend: Backend of torch's process group.
    """

    row: PeerRow
    size: int
    folder: Path
    hosts: Hosts
    servers: int = 1
    backend: str = "gloo"

    @property
    def meet(self) -> Path:
        """File through which all find each other. With `row.leads`, workers start once it exists."""
        return self.folder / "meet"

    def server_programs(self) -> list[Program]:
        """Returns the servers, which must start first; empty for a peer without servers."""
        count = (1 if self.row.leads else self.servers) if self.row.served else 0
        return [self._server(number, count) for number in range(count)]

    def worker_programs(self, words: Callable[[int], Sequence[str]]) -> list[Program]:
        """Returns the workers: one program each, or one for all under mpirun.

        Args:
            words: Returns a rank's flags of `ps-worker` (record, save-parameters and so on) and the job, as
                `--job NAME -- ARGS` or `SCRIPT ARGS`, without rank, size, server and backend.
        """
        argvs = [self._worker(rank, words(rank)) for rank in range(self.size)]
        if self.row.launched:
            return [Program("workers", self._launched(argvs))]
        return [Program(f"worker {rank}", argv) for rank, argv in enumerate(argvs)]

    def result(self, rank: int) -> Mapping[str, Any]:
        """Returns a worker's last line once all have ended."""
        line: dict[str, Any] = json.loads(self._result(rank).read_text())
        return line

    def _server(self, number: int, count: int) -> Program:
        role = "server" if number == 0 else f"shard {number}"
        return Program(role, self._command(role, self.row.serve(self.size, self.meet, number, count)))

    def _worker(self, rank: int, words: Sequence[str]) -> list[str]:
        role = f"worker {rank}"
        flags = {"peer": self.row.name, "rank": rank, "world-size": self.size}
        flags |= {"meet": self.meet, "result": self._result(rank), "servers": len(self.server_programs())}
        if not self.row.launched:  # mpirun sets it
            flags["local-rank"] = self.hosts.local_rank(rank)
        if self.row.grouped:
            flags["backend"] = self.backend
        return self._command(role, ["hubring.workers.compare.peers.run", *spelt(flags)], words)

    def _launched(self, argvs: Sequence[Sequence[str]]) -> list[str]:
        if not self.hosts.apart:
            return mpirun(argvs)
        # Ranks report to mpirun over loopback by default, which hosts do not share.
        reached = f"PMIX_MCA_ptl_base_if_include={self.hosts.address('server')}/31"  # PMIx 4 makes /32 of all
        variables = ["env", "PMIX_MCA_ptl_base_remote_connections=1", reached]
        return self.hosts.command("server", [*variables, *mpirun(argvs)])

    def _command(self, role: str, module: Sequence[str], words: Sequence[str] = ()) -> list[str]:
        host = ["--host", self.hosts.address(role)] if self.hosts.apart else []
        return self.hosts.command(role, module_command(*module, *host, *words))

    def _result(self, rank: int) -> Path:
        return self.folder / f"result {rank}.json"
