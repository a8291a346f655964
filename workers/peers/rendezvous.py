"""How a peer's processes meet: its rank and rendezvous, its network interface, and the groups that it joins.

The groups are torch's default process group, and Open MPI's through mpi4py.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from hubring.ps.config.environment import export
from hubring.ps.core.errors import ConfigError, RingBroken, UsageError
from hubring.ps.transport.host import interface_addresses

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRendezvous:
    """A process's rank and rendezvous in a peer's group.

    Attributes:
        rank: This worker's rank.
        size: Number of workers.
        meet: The rendezvous of all processes: `HOST:PORT`, or a file that all of them can access.
        host: This worker's address; it uses only the interface with this address, except for NCCL. None: no
            restriction.
        servers: Number of the peer's server processes.
        backend: Backend of a process group: `gloo`, `nccl` or `hubring`.
        timeout: Seconds within which one exchange must finish.
        aggregate: Whether a server only averages, because the script needs the mean.

    Raises:
        UsageError: The rank or the backend is invalid.
    """

    rank: int
    size: int
    meet: str
    host: str | None = None
    servers: int = 0
    backend: Literal["gloo", "nccl", "hubring"] = "gloo"
    timeout: float = 300.0
    aggregate: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise UsageError(
                f"--rank {self.rank} of --world-size {self.size}: expected a rank from 0 to {self.size - 1}"
            )
        if self.backend not in ("gloo", "nccl", "hubring"):
            raise UsageError(f"--backend {self.backend}: expected gloo, nccl or hubring")

    @property
    def init_method(self) -> str:
        """The rendezvous as torch's init_method: file:// for a path, tcp:// for an address."""
        return f"file://{self.meet}" if "/" in self.meet else f"tcp://{self.meet}"


_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include")
"""The variables from which Gloo, TensorPipe and Open MPI read the name.

NCCL is not among them: our ring leaves the choice to NCCL_SOCKET_IFNAME or NCCL, and so must peers.
"""


def talk_through(address: str | None) -> None:
    """Restricts libraries that start later to the interface with this address; None: no restriction.

    Raises:
        ConfigError: No interface of this host has the address.
    """
    if address is not None:
        export(dict.fromkeys(_VARIABLES, interface(address)))


def interface(address: str) -> str:
    """Returns the name of this host's interface with the IPv4 address.

    Raises:
        ConfigError: No interface of this host has the address.
    """
    found = interface_addresses()
    for name, own in found.items():
        if own == address:
            return name
    shown = ", ".join(f"{name} {own}" for name, own in found.items() if own)
    raise ConfigError(f"--host {address}: no interface has that address; expected one of {shown}")


def join(seat: PeerRendezvous) -> None:
    """Joins the process group as a rank.

    Raises:
        RingBroken: The ranks could not connect.
    """
    import torch.distributed as dist  # late: the command line that lists the rows needs no torch

    talk_through(seat.host)
    try:
        dist.init_process_group(
            seat.backend,
            init_method=seat.init_method,
            rank=seat.rank,
            world_size=seat.size,
            timeout=timedelta(seconds=seat.timeout),
        )
    except (RuntimeError, ValueError) as cause:
        raise RingBroken(f"rank {seat.rank} could not join the others at {seat.meet}: {cause}") from cause


class MpiWorld:
    """MPI's world, which `mpirun` creates.

    MPI finalizes when the process ends. If one rank fails, mpirun ends all ranks.

    Raises:
        ConfigError: `mpirun` did not start this process, or assigned it another rank.
    """

    def __init__(self, seat: PeerRendezvous) -> None:
        talk_through(seat.host)
        if seat.host is not None:
            # Hosts that are network namespaces of one machine share memory, which would bypass their links.
            export({"OMPI_MCA_btl": "self,tcp"})
        from mpi4py import MPI  # initializes MPI

        self._world, self._in_place = MPI.COMM_WORLD, MPI.IN_PLACE
        found = self._world.rank, self._world.size
        if found != (seat.rank, seat.size):
            raise ConfigError(
                f"rank {seat.rank} of {seat.size} on the command line, but MPI reports rank {found[0]} of"
                f" {found[1]}; start all ranks with one mpirun, as `ps-compare run` does"
            )

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in rank order."""
        values: list[Any] = self._world.allgather(value)
        return values

    def sum(self, flat: Tensor) -> None:
        """Sums a flat tensor in host memory over all ranks, in place."""
        self._world.Allreduce(self._in_place, flat.numpy())
