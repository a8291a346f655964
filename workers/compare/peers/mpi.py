"""Peer `mpi`: Open MPI's allreduce through mpi4py, as in scripts without a framework."""

from __future__ import annotations

from typing import Any

from hubring.ps.core.types import Hyper
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.compare.peers.after_backward import AfterBackward
from hubring.workers.compare.peers.peer import Peer
from hubring.workers.peers.mpi import World
from hubring.workers.peers.seat import Seat


class Mpi(Peer):
    """Reduces buckets in place, one after another."""

    topology = "mpi"
    bytes_are = "computed"
    sums_presence = True
    optimizer = AfterBackward

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self._world = World(seat)

    def gather(self, value: Any) -> list[Any]:
        return self._world.gather(value)

    def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
        self._world.sum(bucket.memory)
        bucket.memory.div_(self.size)
        self.count_passes(2, bucket.memory.nbytes)
        return Work(f"the exchange of bucket {bucket.spec.index}", 0)

    def close(self, *, finished: bool) -> None:
        """Does nothing: see `World`."""
