"""The communicator of a worker that trains alone."""

from __future__ import annotations

import torch

from ps.messages import Collective, ReduceOp
from ps.traffic import Traffic
from ps.types import Hyper
from ps.work import Work
from workers.bucketing import Bucket
from workers.communicator import CollectiveWork, Communicator, Start


class LocalCommunicator(Communicator):
    """One rank: its gradient is the mean, its tensors are the result, and nothing travels."""

    topology = "local"
    rank = 0
    size = 1
    steps_on = "worker"

    def __init__(self) -> None:
        self.traffic = Traffic()

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype)

    def attach(self, buckets: list[Bucket]) -> Start:
        return Start()

    def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
        return Work(f"the exchange of bucket {bucket.spec.index}", 0)

    def pull(self, bucket: Bucket) -> Work:
        return Work(f"the pull of bucket {bucket.spec.index}", 0)

    def collective(
        self,
        collective: Collective,
        tensor: torch.Tensor | None,
        *,
        name: str,
        op: ReduceOp = ReduceOp.AVERAGE,
        root: int = 0,
    ) -> CollectiveWork:
        work = CollectiveWork(f"{collective.name.lower()} {name!r}", 0)
        work.result = None if tensor is None else tensor.detach().clone()
        return work

    def close(self, *, finished: bool) -> None:
        """Does nothing: there is nobody to tell."""
