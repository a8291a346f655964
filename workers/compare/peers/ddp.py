"""Peer `ddp`: torch's DistributedDataParallel on the script's own model, and torch's own optimizer.

Gloo's threads give up a finished exchange's tensors some time after its end, and need the
interpreter for that: one that does so while the interpreter ends aborts the process. Only the
end of the group joins them, so nothing may keep it: models are released, and what takes the group
of its time for a default is imported before there is one.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.distributed.nn.functional  # noqa: F401 - before there is a group
from torch.nn import Module

from hubring.ps.core.errors import UsageError
from hubring.ps.core.types import Hyper
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucketing import Bucket
from hubring.workers.compare.peers.ddp_optimizer import DdpOptimizer, release
from hubring.workers.compare.peers.peer import Peer
from hubring.workers.peers import process_group
from hubring.workers.peers.seat import Seat


class Ddp(Peer):
    """torch's default process group.

    Attributes:
        replicated: Models that keep the group, until `close`.
    """

    topology = "ddp"
    exposes = False
    bytes_are = "computed"
    optimizer = DdpOptimizer

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self.replicated: list[Module] = []
        process_group.join(seat)

    def gather(self, value: Any) -> list[Any]:
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
        raise UsageError("DDP exchanges by itself: use hubring.DistributedOptimizer")

    def close(self, *, finished: bool) -> None:
        if not finished:  # it would wait for what may never come
            return
        try:
            for model in self.replicated:
                release(model)
            self.replicated.clear()
        finally:
            dist.destroy_process_group()
