"""Open MPI by mpi4py."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hubring.ps.config.environment import export
from hubring.ps.core.errors import ConfigError
from hubring.workers.peers.interface import talk_through
from hubring.workers.peers.seat import Seat


class World:
    """MPI's world, which `mpirun` has made.

    MPI finalizes as the process ends, and mpirun ends all when one fails.

    Raises:
        ConfigError: `mpirun` did not start this process, or gave it another rank.
    """

    def __init__(self, seat: Seat) -> None:
        talk_through(seat.host)
        if seat.host is not None:
            # Hosts that are namespaces of one machine share its memory, which would go past their links.
            export({"OMPI_MCA_btl": "self,tcp"})
        from mpi4py import MPI  # begins MPI

        self._world, self._in_place = MPI.COMM_WORLD, MPI.IN_PLACE
        found = self._world.rank, self._world.size
        if found != (seat.rank, seat.size):
            raise ConfigError(
                f"MPI says rank {found[0]} of {found[1]}, and the command line rank {seat.rank} of"
                f" {seat.size}: start all ranks by one mpirun, as `ps-compare run` does"
            )

    def gather(self, value: Any) -> list[Any]:
        """What every rank has given, in rank order."""
        values: list[Any] = self._world.allgather(value)
        return values

    def sum(self, flat: Tensor) -> None:
        """Makes a flat tensor in host memory the sum of all ranks', in place."""
        self._world.Allreduce(self._in_place, flat.numpy())
