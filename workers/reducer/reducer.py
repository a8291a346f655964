"""The exchange of one set of parameters' gradients, whichever optimizers step them.

A parameter's gradient is exchanged by the reducer that got it first. A later `DistributedOptimizer` over the
same parameters, instead of the first or beside it, steps with what that reducer exchanges.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from hubring.ps.core.types import Hyper
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.communicators.base import Communicator
from hubring.workers.reducer.exchange import Exchange
from hubring.workers.reducer.forward import ForwardGuard
from hubring.workers.reducer.gradient_changes import ChangeWatch
from hubring.workers.reducer.gradient_hooks import GradientHooks
from hubring.workers.reducer.overlap import Overlap
from hubring.workers.reducer.reducer_set import ReducerSet
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
    """What a reducer needs from the newest optimizer of its parameters."""

    def hyper(self, bucket: Bucket) -> Hyper:
        """Returns the hyperparameters with which the hub steps a bucket."""

    def left_out(self, bucket: Bucket) -> frozenset[int]:
        """Returns the positions of a bucket's parameters that the hub does not step."""

    def guard(self, exchange: Exchange, buckets: list[Bucket]) -> ForwardGuard | None:
        """Returns what makes forwards wait, with `cross_barrier`."""

    def pass_began(self) -> None:
        """Handles the first gradient of a backward pass."""


class Reducer:
    """Exchanges the gradients of attached buckets.

    Args:
        communicator: Connects the ranks.
        buckets: Attached buckets.
        wishes: How to exchange.
        owner: See below.

    Attributes:
        number: Counts the communicator's reducers.
        parameters: The parameters of all buckets.
        owner: The newest optimizer of the parameters, whose hyperparameters the hub uses.
        together: The reducers that are exchanged with this one.
    """

    def __init__(
        self, communicator: Communicator, buckets: list[Bucket], wishes: Wishes, owner: Owner
    ) -> None:
        self.number = -1
        self.communicator = communicator
        self.buckets = buckets
        self.parameters = {parameter for bucket in buckets for parameter in bucket.parameters}
        self.on_server = communicator.steps_on == "server"
        self.exchange = Exchange(
            communicator, buckets, self._hyper, lambda bucket: self.owner.left_out(bucket), wishes.recorder
        )
        self._obey(wishes, owner)
        tuned = wishes.bucket_bytes is None
        self.tuner = Tuner(communicator, self.exchange, wishes.timeout) if tuned else None
        self.together = ReducerSet()
        self.together.include(self)
        self.hooks = GradientHooks(self)

    def take_over(self, wishes: Wishes, owner: Owner) -> None:
        """Exchanges for a newer optimizer from now on, as it wishes."""
        self.exchange.settle_all()
        self.overlap.remove_hooks()
        self._obey(wishes, owner)

    def _obey(self, wishes: Wishes, owner: Owner) -> None:
        self.owner = owner
        self.exchange.timeout = wishes.timeout
        guard = owner.guard(self.exchange, self.buckets)
        # Where workers step, the mean replaces the gradients in place before step().
        self.watch = ChangeWatch(self.buckets, self._hyper, exact=wishes.overlap and self.on_server)
        self.overlap = Overlap(self.communicator, self.exchange, self.watch, guard, wanted=wishes.overlap)

    @property
    def steps(self) -> int:
        """Completed steps."""
        return self.exchange.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self.exchange.steps = steps

    @property
    def passes(self) -> int:
        """Backward passes of this step that the reducer has taken part in."""
        return self.together.passes.count if self.watch.has_noted else 0

    def _hyper(self, bucket: Bucket) -> Hyper:
        return self.owner.hyper(bucket)

    def reset(self) -> None:
        """Prepares for the next gradients. Raises as `Exchange.reset`."""
        self.exchange.reset()
        self.watch.reset()

    def begin_again(self) -> None:
        """Prepares to exchange more gradients in a step that has had all the passes that it needs.

        Where workers step, the gradients are means by now. A further pass adds to them, and the mean of the
        sums is the sum of the means, so they are exchanged again, as in DDP.

        Raises:
            ConfigError: They were sent, and cannot be sent again.
        """
        if self.exchange.begun:
            self.overlap.check_unsent()
        self.exchange.reset()
