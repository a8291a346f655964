"""Peer `gloo+sgd`: torch.distributed's allreduce and torch's fused optimizer, coded by hand."""

from __future__ import annotations

import torch.distributed as dist

from hubring.workers.bench.job import Job
from hubring.workers.bench.rows.row_member import FlatSide
from hubring.workers.peers import process_group


class Gloo(FlatSide):
    """Starts all buckets, so that Gloo's threads overlap them, and steps each bucket when it arrives."""

    def __init__(self, job: Job, rank: int) -> None:
        process_group.join(job.seat(rank))
        super().__init__(job, rank)

    def step(self) -> None:
        works = [dist.all_reduce(bucket.gradients, async_op=True) for bucket in self._buckets]
        for work, bucket in zip(works, self._buckets, strict=True):
            assert work is not None
            work.wait()
            bucket.step()

    def close(self) -> None:
        dist.destroy_process_group()
