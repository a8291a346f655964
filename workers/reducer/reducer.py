"""The exchange of one set of parameters' gradients, whichever optimizers step them.

A parameter's gradient is exchanged by the reducer that got it first. A later `DistributedOptimizer` over the
same parameters, instead of the first or beside it, steps with what that reducer exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol
from weakref import WeakSet

import torch

from hubring.ps.core.types import Hyper
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.communicators.base import Communicator
from hubring.workers.reducer.backward import BackwardPasses
from hubring.workers.reducer.exchange import Exchange
from hubring.workers.reducer.forward import ForwardGuard
from hubring.workers.reducer.gradient_changes import ChangeWatch
from hubring.workers.reducer.overlap import Overlap
from hubring.workers.reducer.tuning import Tuner
from hubring.workers.runtime.in_flight import FlightRecorder


class Wishes(NamedTuple):
    """How a `DistributedOptimizer` wants its gradients exchanged; see there.

    Attributes:
        bucket_bytes: None: the first steps measure how many bytes to send together.
    """

    passes_per_step: int
    overlap: bool
    cross_barrier: bool
    timeout: float | None
    bucket_bytes: int | None
    recorder: FlightRecorder | None = None


class Owner(Protocol):
    """What a reducer needs from the optimizer of its parameters."""

    def hyper(self, bucket: Bucket) -> Hyper:
        """Returns the hyperparameters with which the hub steps a bucket."""

    def left_out(self, bucket: Bucket) -> frozenset[int]:
        """Returns the positions of a bucket's parameters that the hub does not step."""


class Reducer:
    """Exchanges the gradients of attached buckets.

    Args:
        communicator: Connects the ranks.
        buckets: Attached buckets.
        wishes: How to exchange.
        owner: See below.
        guard: Makes what makes forwards wait, with `cross_barrier`.

    Attributes:
        parameters: The parameters of all buckets.
        owner: Whose hyperparameters the hub uses: those of the newest optimizer of the parameters.
    """

    def __init__(
        self,
        communicator: Communicator,
        buckets: list[Bucket],
        wishes: Wishes,
        owner: Owner,
        guard: Callable[[Exchange, list[Bucket]], ForwardGuard | None],
    ) -> None:
        self.communicator = communicator
        self.buckets = buckets
        self.parameters = {parameter for bucket in buckets for parameter in bucket.parameters}
        self.owner = owner
        self.exchange = Exchange(
            communicator,
            buckets,
            self._hyper,
            lambda bucket: self.owner.left_out(bucket),
            wishes.timeout,
            wishes.recorder,
        )
        made = guard(self.exchange, buckets)
        # Where workers step, the mean replaces the gradients in place before step().
        exact = wishes.overlap and communicator.steps_on == "server"
        self.watch = ChangeWatch(buckets, self._hyper, exact=exact)
        self.overlap = Overlap(communicator, self.exchange, self.watch, made, wanted=wishes.overlap)
        self.passes = BackwardPasses(buckets, wishes.passes_per_step, self.watch, self.exchange, self.overlap)
        tuned = wishes.bucket_bytes is None
        self.tuner = Tuner(communicator, self.exchange, wishes.timeout) if tuned else None
        _living.add(self)

    @property
    def steps(self) -> int:
        """Completed steps."""
        return self.exchange.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self.exchange.steps = steps

    def _hyper(self, bucket: Bucket) -> Hyper:
        return self.owner.hyper(bucket)

    def begin_step(self) -> None:
        """Prepares for the next step's gradients."""
        self.exchange.reset()
        self.passes.reset()
        self.watch.reset()


_living: WeakSet[Reducer] = WeakSet()


def reducers_of(communicator: Communicator, parameters: Iterable[torch.Tensor]) -> list[Reducer]:
    """Returns the reducers that exchange some of these parameters' gradients already."""
    wanted = set(parameters)
    return [one for one in _living if one.communicator is communicator and one.parameters & wanted]
