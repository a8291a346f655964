"""Peer `ddp`: torch's DistributedDataParallel on the script's own model, and torch's own optimizer."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ps.errors import RingBroken, UsageError
from ps.types import Hyper
from ps.work import Work
from workers.bucketing import Bucket
from workers.compare.peers.ddp_optimizer import DdpOptimizer
from workers.compare.peers.peer import Peer, Seat, init_method


class Ddp(Peer):
    """torch's default process group."""

    topology = "ddp"
    exposes = False
    bytes_are = "computed"
    optimizer = DdpOptimizer

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        try:
            dist.init_process_group(
                seat.backend,
                init_method=init_method(seat.meet),
                rank=seat.rank,
                world_size=seat.size,
                timeout=timedelta(seconds=seat.timeout),
            )
        except (RuntimeError, ValueError) as cause:
            raise RingBroken(f"rank {seat.rank} did not find the others at {seat.meet}: {cause}") from cause

    def gather(self, value: Any) -> list[Any]:
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
        raise UsageError("DDP exchanges by itself: use workers.DistributedOptimizer")

    def close(self, *, finished: bool) -> None:
        if finished:  # else it would wait for what may never come
            dist.destroy_process_group()
