"""Shows a script the mean gradients in the first step of a hub that steps, to see whether it changes them.

A hub that steps has no use for a clipped or otherwise changed gradient of one rank: the script would change
the mean under DDP, in a ring, or alone. So the first backward ends as it does there. A script that changes
what it sees keeps the means in all later steps too, and its own optimizer steps. For any other, each rank's
own gradients are put back, and the hub steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hubring.ps.core.messages import Call, Collective, ReduceOp
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.slice_exchange import start_mean
from hubring.workers.reducer.exchange import Exchange


class _Own(NamedTuple):
    """This rank's own gradients in a bucket, and the positions without one."""

    gradients: torch.Tensor
    missing: tuple[int, ...]


def can_average(communicator: Communicator) -> bool:
    """Whether a hub that steps can still average instead, before its first step."""
    hub = communicator.stepping_hub
    others = communicator.size > 1 and communicator.lockstep and not communicator.late
    return others and hub is not None and hub.has_model


def any_rank(communicator: Communicator, name: str, own: bool = False, timeout: float | None = None) -> bool:
    """Returns whether `own` is true on some rank; every rank calls it. So it also is a barrier."""
    call = Call(Collective.ALLREDUCE, name, ReduceOp.MAX)
    tensor = torch.tensor([own], dtype=torch.uint8, device="cpu")
    return bool(communicator.collective(call, tensor).get(timeout).item())


class FirstMeans:
    """The means of one step.

    Args:
        communicator: Connects the ranks, which are in lockstep.
        exchange: Has the buckets.
    """

    def __init__(self, communicator: Communicator, exchange: Exchange) -> None:
        self._communicator = communicator
        self._exchange = exchange
        self._own: dict[Bucket, _Own] = {}

    def show(self, *, is_whole: bool) -> None:
        """Makes every gradient the mean over all ranks. Every rank calls it.

        Args:
            is_whole: Whether the gradients are this rank's own, without means of an earlier call.
        """
        here, started = self._communicator, []
        self._own.clear()
        for bucket in self._exchange.buckets:
            bucket.seal()
            bucket.weight = self._exchange.weight
            if is_whole:
                self._own[bucket] = _Own(bucket.gradients.clone(), bucket.shown.missing())
            name = f"first gradients {bucket.spec.index}"
            started.append((bucket, start_mean(here, name, bucket, bucket.gradients)))
        for bucket, work in started:
            with here.waiting:
                work.wait(self._exchange.timeout)
            bucket.show_means()

    def are_changed(self, own: bool) -> bool:
        """Whether some rank's script changes gradients; every rank calls it with whether its `own` does."""
        return any_rank(self._communicator, "first gradients: changed", own, self._exchange.timeout)

    def put_back(self) -> None:
        """Puts back each rank's own gradients, unless several passes have added to means: those stay."""
        for bucket, own in self._own.items():
            bucket.gradients.copy_(own.gradients)
            bucket.shown.show(own.missing)
        self._own.clear()
