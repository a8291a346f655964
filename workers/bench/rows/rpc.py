"""Peer `rpc`: a parameter server on torch.distributed.rpc."""

from __future__ import annotations

from hubring.workers.bench.job import Job
from hubring.workers.bench.rows.model import on_server
from hubring.workers.bench.rows.row_member import FlatSide
from hubring.workers.peers import rpc


class Rpc(FlatSide):
    """A worker; the optimizer runs on the server."""

    def __init__(self, job: Job, rank: int) -> None:
        super().__init__(job, rank, job.slice_bytes)
        self._client = rpc.Client(job.seat(rank))
        name, self._hyper = on_server(job.optimizer)
        self._slices = [
            (number, rpc.own(bucket.gradients), bucket.values) for number, bucket in enumerate(self._buckets)
        ]
        for number, _, values in self._slices if rank == 0 else ():
            self._client.hold(number, values, name)
        self._client.gather(None)  # now the server has all slices

    def step(self) -> None:
        for answer in [self._client.push_pull(*one, self._hyper) for one in self._slices]:
            answer()

    def close(self) -> None:
        self._client.leave()
