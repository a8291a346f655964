"""Peer `rpc`: a parameter server on torch.distributed.rpc."""

from __future__ import annotations

from hubring.workers.bench.job import Job
from hubring.workers.bench.rows.model import on_server
from hubring.workers.bench.rows.side import FlatSide
from hubring.workers.peers import rpc


class Rpc(FlatSide):
    """A worker; what it steps with is on the server."""

    def __init__(self, job: Job, rank: int) -> None:
        super().__init__(job, rank, job.slice_bytes)
        self._client = rpc.Client(job.seat(rank))
        name, self._hyper = on_server(job.optimizer)
        if rank == 0:
            for number, bucket in enumerate(self._buckets):
                self._client.hold(number, bucket.values, name)
        self._client.gather(None)  # the server holds everything from here on
        self._given = [rpc.own(bucket.gradients) for bucket in self._buckets]

    def step(self) -> None:
        answers = [
            self._client.push_pull(number, gradients, self._hyper, bucket.values)
            for number, (gradients, bucket) in enumerate(zip(self._given, self._buckets, strict=True))
        ]
        for answer in answers:
            answer()

    def close(self) -> None:
        self._client.leave()
