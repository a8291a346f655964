"""Open MPI through mpi4py."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hubring.ps.config.environment import export
from hubring.ps.core.errors import ConfigError
from hubring.workers.peers.interface import talk_through
from hubring.workers.peers.seat import Seat


class World:
    """MPI's world, which `mpirun` creates.

    MPI finalizes when the process ends. If one rank fails, mpirun ends all ranks.

    Raises:
        ConfigError: `mpirun` did not start this process, or assigned it another rank.
    """

    def __init__(self, seat: Seat) -> None:
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
