"""The communicator of a worker that trains alone."""

from __future__ import annotations

import torch

from ps.errors import ConfigError
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
    tunable = False

    def __init__(self) -> None:
        self.traffic = Traffic()

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype)

    def attach(self, buckets: list[Bucket]) -> Start:
        return Start()

    def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
        return Work(f"the exchange of bucket {bucket.spec.index}", 0)

    def collective(
        self,
        collective: Collective,
        tensor: torch.Tensor | None,
        *,
        name: str,
        op: ReduceOp = ReduceOp.AVERAGE,
        root: int = 0,
    ) -> CollectiveWork:
        work = CollectiveWork(f"{collective.name.lower()} {name!r}")
        if tensor is not None and op is ReduceOp.AVERAGE and not _has_average(collective, tensor):
            # What could not be done with others is not done alone either.
            work.fail(ConfigError(f"{work.what}: no average of {tensor.dtype}; sum it, or convert it"))
            return work
        work.result = None if tensor is None else tensor.detach().clone()
        work.complete_part()
        return work

    def close(self, *, finished: bool) -> None:
        """Does nothing: there is nobody to tell."""


def _has_average(collective: Collective, tensor: torch.Tensor) -> bool:
    return collective is not Collective.ALLREDUCE or tensor.is_floating_point()
