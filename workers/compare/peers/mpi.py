"""Peer `mpi`: Open MPI's allreduce by mpi4py, as scripts without a framework have it."""

from __future__ import annotations

from typing import Any

from hubring.ps.config.environment import export
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import Hyper
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucketing import Bucket
from hubring.workers.compare.peers.after_backward import AfterBackward
from hubring.workers.compare.peers.peer import Peer, Seat


class Mpi(Peer):
    """MPI's world, which `mpirun` has made; buckets are reduced in place, one after the other.

    Raises:
        ConfigError: `mpirun` did not start this process, or gave it another rank.
    """

    topology = "mpi"
    bytes_are = "computed"
    optimizer = AfterBackward

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
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
        values: list[Any] = self._world.allgather(value)
        return values

    def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
        self._world.Allreduce(self._in_place, bucket.gradients.numpy())
        bucket.gradients.div_(self.size)
        self.count_allreduce(bucket.gradients.nbytes)
        return Work(f"the exchange of bucket {bucket.spec.index}", 0)

    def close(self, *, finished: bool) -> None:
        """Does nothing: MPI finalizes as the process ends, and mpirun ends all when one fails."""
