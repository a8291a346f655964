"""The peers: what each is, what it needs, and how its programs are started. No torch is imported here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from hubring.ps.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One peer. All of them are synchronous.

    Attributes:
        name: What the user calls it.
        about: What it does, in one sentence.
        served: It has servers of its own, which run `hubring.workers.peers.serve`.
        leads: It has one server, and workers start once that has written the file where all meet.
        launched: `mpirun` starts all workers at once.
        needs: Library that it needs, and the extra that brings it; None: torch alone.
        linked: It can be run on hosts behind links.
    """

    name: str
    about: str
    served: bool = False
    leads: bool = False
    launched: bool = False
    needs: tuple[str, str] | None = None
    linked: bool = True

    def missing(self) -> str:
        """What this machine lacks for the row, and how to get it; empty where nothing is."""
        if self.launched and which("mpirun") is None:
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

    def serve(self, size: int, meet: Path, number: int = 0, servers: int = 1) -> list[str]:
        """The module that a server runs, and its arguments.

        Args:
            size: How many workers there are.
            meet: The file by which all find each other.
            number: Which server this is.
            servers: How many there are.
        """
        flags = {"peer": self.name, "world-size": size, "meet": meet, "number": number, "servers": servers}
        return ["hubring.workers.peers.serve", *spelt(flags)]


PEERS = {
    row.name: row
    for row in (
        PeerRow("ddp", "torch's DistributedDataParallel, every worker steps"),
        PeerRow(
            "mpi",
            "Open MPI's allreduce after backward, every worker steps",
            launched=True,
            needs=("mpi4py", "peers-mpi"),
        ),
        PeerRow("rpc", "a parameter server on torch's RPC waits for all, averages and steps", served=True),
        PeerRow(
            "ray",
            "a parameter server as an actor of Ray's waits for all, averages and steps",
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


def mpirun(commands: Iterable[Sequence[str]]) -> list[str]:
    """The command that starts these as one world of Open MPI's, each as one rank, in this order."""
    words = [word for command in commands for word in (":", "-n", "1", *command)]
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", *words[1:]]


def spelt(flags: Mapping[str, object]) -> list[str]:
    """Flags as words of a command line."""
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]
