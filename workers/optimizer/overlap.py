"""When gradients are exchanged: during backward, in `step()`, or on into the next forward.

The law: a mean that is on its way, or was handed over, cannot be changed. So the first step is
watched, and a script that unscales, clips or otherwise changes gradients after backward has them
exchanged in `step()` for good. One that begins with it later is refused.
"""

from __future__ import annotations

import logging

from hubring.ps.core.errors import ConfigError
from hubring.workers.buckets.bucketing import Bucket
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.exchange import Exchange
from hubring.workers.optimizer.forward import ForwardGuard
from hubring.workers.optimizer.gradient_changes import CHANGED, ChangeWatch

log = logging.getLogger(__name__)


class Overlap:
    """Decides after the first step what one optimizer's exchange may hide behind.

    Args:
        communicator: Carries the exchange.
        exchange: What backward hands buckets over to.
        watch: Sees how the script changes gradients.
        guard: Lets forwards wait, under `cross_barrier`.
        wanted: Whether the caller allows an exchange during backward.

    Attributes:
        backward: Whether a bucket is exchanged as soon as backward has it; None: the first step is watched.
        crossing: Whether `step()` leaves the exchange under way; None: wanted, and the first step is watched.
    """

    def __init__(
        self,
        communicator: Communicator,
        exchange: Exchange,
        watch: ChangeWatch,
        guard: ForwardGuard | None,
        *,
        wanted: bool,
    ) -> None:
        self._on_server = communicator.steps_on == "server"
        self._communicator = communicator
        self._exchange = exchange
        self._watch = watch
        self._guard = guard
        self.backward: bool | None = None if wanted and self._on_server else wanted
        self.crossing: bool | None = False if guard is None else None
        self.fix = "overlap=False" if self._on_server else "cross_barrier=False"
        """What the caller passes to have nothing exchanged too early."""

    def bucket_ready(self, bucket: Bucket) -> None:
        """Backward has a bucket's gradients."""
        if self.backward:
            self._exchange.ready(bucket)

    def backward_ended(self) -> None:
        """Backward has all gradients of this step."""
        if not self._on_server and not self.crossing:
            self._exchange.finish()
        elif self.backward:
            self._exchange.hand_over_rest()

    @property
    def handed_over(self) -> bool:
        """Whether gradients of this step are beyond recall."""
        return bool(self._on_server or self.crossing) and self._exchange.begun

    def settle(self, passes: int, *, scales: bool) -> None:
        """Decides after the first step, for good, and holds the script to it.

        Args:
            passes: Backward passes since the last step.
            scales: The script uses a `GradScaler`.

        Raises:
            ConfigError: The script changes gradients that were handed over.
        """
        if not self._on_server and self.crossing is False:
            return
        changes = "uses a GradScaler" if scales else self._watch.changes()
        if not self._on_server:
            self._settle_crossing(passes, changes)
        elif self.backward is None and passes:
            self.backward = not changes
            if changes:
                log.info("gradients are exchanged in step(), not during backward: the script %s", changes)
            if changes == CHANGED and self._communicator.size > 1:
                log.warning(
                    "each rank changes its own gradient before the hub takes the mean, where a ring or one"
                    " process changes the mean itself: give --aggregate for the same steps as there"
                )
        elif self._exchange.begun:
            self._refuse(changes)

    def _settle_crossing(self, passes: int, changes: str) -> None:
        """The same where workers step: a mean that is not there yet cannot be changed."""
        if self.crossing:
            self._refuse(changes)
        elif changes and passes:
            self.crossing = False
            assert self._guard is not None
            self._guard.give_up()
            log.info("step() waits for the exchange in spite of cross_barrier: the script %s", changes)

    def _refuse(self, changes: str) -> None:
        if changes:
            raise ConfigError(
                f"the script {changes}, but its gradients were exchanged during backward, as nothing of "
                f"the kind happened in the first step: pass {self.fix} to DistributedOptimizer"
            )

    def step_taken(self, passes: int) -> None:
        """After the first step that nothing speaks against, forwards wait from now on."""
        if self.crossing is None and passes:
            assert self._guard is not None
            self._guard.begin()
            self.crossing = True
