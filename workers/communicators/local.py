"""The communicator of a worker without a server."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hubring.ps.core.counters import Traffic
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.messages import Call, Collective, Refusal
from hubring.ps.core.types import StepHyper
from hubring.ps.core.work import Work
from hubring.ps.store.collective import Part, outcome
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.communicators.base import CollectiveWork, Communicator, ParameterState


class LocalCommunicator(Communicator):
    """One rank: its gradient is the mean, its tensors are the result, and nothing is sent."""

    topology = "local"
    rank = 0
    size = 1
    steps_on = "worker"
    tunable = False

    def __init__(self) -> None:
        self.traffic = Traffic()

    def attach(self, buckets: list[Bucket], state: Mapping[str, ParameterState] | None = None) -> int:
        return 0

    def push_pull(self, bucket: Bucket, hyper: StepHyper) -> Work:
        return Work(f"the exchange of bucket {bucket.spec.index}", 0)

    def take_part(self, call: Call, tensors: tuple[torch.Tensor, ...], work: CollectiveWork) -> None:
        if call.collective is Collective.JOIN:
            work.deliver([torch.tensor([0], device="cpu")])
            return
        results = outcome([Part(0, call, tensors)])
        if isinstance(results, Refusal):
            # A call that is invalid on several ranks is invalid on one rank too.
            work.fail(ConfigError(results.text))
        else:
            work.deliver(results[0])

    def close(self, *, finished: bool) -> None:
        """Does nothing: there are no other ranks."""
