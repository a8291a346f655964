"""Peer `mpi`: Open MPI's allreduce through mpi4py over shared memory, and torch's fused optimizer."""

from __future__ import annotations

from hubring.workers.bench.job import Job
from hubring.workers.bench.rows.row_member import FlatSide
from hubring.workers.peers.mpi import World


class Mpi(FlatSide):
    """Reduces and steps the buckets one after another, in place."""

    def __init__(self, job: Job, rank: int) -> None:
        super().__init__(job, rank)
        self._world = World(job.seat(rank))

    def step(self) -> None:
        for bucket in self._buckets:
            self._world.sum(bucket.gradients)
            bucket.step()
