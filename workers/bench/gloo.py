"""Peer `gloo+sgd`: torch.distributed's allreduce and torch's fused optimizer, by hand."""

from __future__ import annotations

import torch.distributed as dist

from hubring.workers.bench.job import Job
from hubring.workers.bench.side import FlatSide


def join(job: Job, rank: int) -> None:
    """Makes this process a rank of a Gloo group, whose ranks find each other by a file."""
    store = f"file://{job.place / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=job.size)


class Gloo(FlatSide):
    """All buckets are under way at once, so that Gloo's threads overlap them; each is stepped as it lands."""

    def __init__(self, job: Job, rank: int) -> None:
        join(job, rank)
        super().__init__(job, rank)

    def step(self) -> None:
        works = [dist.all_reduce(bucket.gradients, async_op=True) for bucket in self._buckets]
        for work, bucket in zip(works, self._buckets, strict=True):
            assert work is not None
            work.wait()
            bucket.step()

    def close(self) -> None:
        dist.destroy_process_group()
