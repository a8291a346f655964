"""The peers: a description, requirements and commands for each, and how rows are chosen by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any, TypeVar

from hubring.ps.config.declaration import flag_words
from hubring.ps.core import packages
from hubring.ps.core.errors import UsageError

_Row = TypeVar("_Row")


def chosen(names: Iterable[str], rows: Mapping[str, _Row]) -> list[_Row]:
    """Returns the rows with these names, in this order.

    Raises:
        UsageError: No row has that name, or a name occurs twice.
    """
    found: dict[str, _Row] = {}
    for name in names:
        if name not in rows:
            raise UsageError(f"--rows: no row {name!r}; expected one of {', '.join(rows)}")
        if name in found:
            raise UsageError(f"--rows names {name} twice")
        found[name] = rows[name]
    return list(found.values())


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One peer. All peers are synchronous.

    Attributes:
        name: The name on the command line.
        about: One-line description.
        served: Whether the peer has server processes, which run `hubring.workers.peers.serve`.
        leads: Whether the peer has a single server, and workers start after it wrote the rendezvous file.
        launched: Whether `mpirun` starts all workers.
        needs: The required optional module, a key of `extras.EXTRAS`; None: only torch.
        linked: Whether the peer can run on hosts with an emulated link.
        grouped: Whether workers exchange in torch's default process group, on Gloo or NCCL.
    """

    name: str
    about: str
    served: bool = False
    leads: bool = False
    launched: bool = False
    needs: str | None = None
    linked: bool = True
    grouped: bool = False

    def missing(self) -> str:
        """Returns what this machine lacks for the row, and how to install it; empty if nothing is missing."""
        if self.launched and which("mpirun") is None:
            return "mpirun is not installed (apt install openmpi-bin)"
        return "" if self.needs is None else packages.missing(self.needs)

    def check(self) -> None:
        """Checks that the row can run on this machine.

        Raises:
            UsageError: A requirement is missing. The message names what to install.
        """
        if missing := self.missing():
            raise UsageError(f"row {self.name}: {missing}")

    def serve(self, size: int, meet: Path, number: int = 0, servers: int = 1) -> list[str]:
        """Returns the module of a server, and its arguments.

        Args:
            size: Number of workers.
            meet: The rendezvous file of all processes.
            number: Index of this server.
            servers: Number of servers.
        """
        flags = {"peer": self.name, "world-size": size, "meet": meet, "number": number, "servers": servers}
        return ["hubring.workers.peers.serve", *flag_words(flags)]


_grouped = partial(PeerRow, grouped=True)


def _served(name: str, where: str, **more: Any) -> PeerRow:
    about = f"a parameter server {where} waits for all, averages, and steps"
    return PeerRow(name, about, served=True, **more)


PEERS = {
    row.name: row
    for row in (
        _grouped("ddp", "torch's DistributedDataParallel, every worker steps"),
        _grouped("fsdp2", "torch's fully_shard, every worker keeps and steps a part of each parameter"),
        _grouped(
            "zero1", "DistributedDataParallel and ZeroRedundancyOptimizer, every worker steps some parameters"
        ),
        PeerRow(
            "mpi", "Open MPI's allreduce after backward, every worker steps", launched=True, needs="mpi4py"
        ),
        _served("rpc", "on torch's RPC"),
        _served("ray", "in a Ray actor", leads=True, needs="ray", linked=False),
    )
}


def find_peer(name: str) -> PeerRow:
    """Returns the peer with this name.

    Raises:
        UsageError: No peer has this name.
    """
    if name not in PEERS:
        raise UsageError(f"no peer {name!r}; expected one of {', '.join(PEERS)}")
    return PEERS[name]


def mpirun(commands: Iterable[Sequence[str]]) -> list[str]:
    """Returns the mpirun command that starts these commands as the ranks of one Open MPI world, in order."""
    words = [word for command in commands for word in (":", "-n", "1", *command)]
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", *words[1:]]
