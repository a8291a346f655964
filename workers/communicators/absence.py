"""Parameters without a gradient: on this rank, and on every rank."""

from __future__ import annotations

import torch

from hubring.ps.client.client import OnAbsent
from hubring.ps.core.messages import Call, Collective, ReduceOp
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucketing import Bucket
from hubring.workers.communicators.base import Communicator


class Absence:
    """The parameters without a gradient in one exchange of a bucket. Costs nothing if there are none.

    Args:
        bucket: The bucket that is about to be sent.
        reports: Whether to leave only the parameters that are absent on every rank in `bucket.absent`.
    """

    def __init__(self, bucket: Bucket, *, reports: bool) -> None:
        self.positions = tuple(sorted(bucket.absent))
        self._bucket = bucket
        self._reports = reports

    def on_reply(self, also: OnAbsent | None = None) -> OnAbsent | None:
        """Returns what to do with the answer to one slice, first `also`; None if there is nothing to do."""
        if not self.positions or not (self._reports or also):
            return None

        def note(absent: tuple[int, ...]) -> None:
            if also is not None:
                also(absent)
            if self._reports:
                self._bucket.absent = self._bucket.absent.intersection(absent)

        return note


def mean_with_absence(communicator: Communicator, name: str, bucket: Bucket) -> Work:
    """Starts the mean of all ranks' gradients, and the set of parameters that no rank has a gradient for.

    Both are collectives, which every rank calls. The second has one byte for each parameter.
    """
    gradients = bucket.host_gradients
    whole = Work(f"the exchange of {name}", 2)
    present = torch.tensor(
        [position not in bucket.absent for position in range(len(bucket.spec.tensors))], dtype=torch.uint8
    )

    def note(came: torch.Tensor) -> None:
        bucket.absent = frozenset((came == 0).nonzero().flatten().tolist())

    mean = Call(Collective.ALLREDUCE, name, ReduceOp.AVERAGE)
    union = Call(Collective.ALLREDUCE, f"{name}: present", ReduceOp.MAX)
    works = [
        communicator.collective(mean, gradients, then=lambda came: gradients.copy_(came[0])),
        communicator.collective(union, present, then=lambda came: note(came[0])),
    ]
    whole.attend = works[0].attend
    for work in works:
        work.when_done(lambda one: whole.fail(one.error) if one.error else whole.complete_part())
    return whole
