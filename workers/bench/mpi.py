"""Peer `mpi`: Open MPI's allreduce by mpi4py over shared memory, and torch's fused optimizer."""

from __future__ import annotations

from hubring.workers.bench.job import Job
from hubring.workers.bench.side import FlatSide


class Mpi(FlatSide):
    """Buckets are reduced in place and stepped, one after the other; MPI finalizes as the process ends."""

    def __init__(self, job: Job, rank: int) -> None:
        from mpi4py import MPI

        # mpirun gives all ranks the same arguments: MPI alone knows which is which.
        super().__init__(job, MPI.COMM_WORLD.rank)
        self._world, self._in_place = MPI.COMM_WORLD, MPI.IN_PLACE
        self._arrays = [bucket.gradients.numpy() for bucket in self._buckets]

    def step(self) -> None:
        for bucket, array in zip(self._buckets, self._arrays, strict=True):
            self._world.Allreduce(self._in_place, array)
            bucket.step()
