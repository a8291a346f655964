"""Decides when gradients are exchanged: during backward, in `step()`, or into the next forward.

Gradients cannot be changed once they are sent. So the first step shows what the script does. If it
unscales, clips or otherwise changes gradients after backward, all later exchanges run in `step()`.
A script that starts to do so after the first step gets a ConfigError.
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
    """Decides after the first step what one optimizer's exchange overlaps with.

    Args:
        communicator: Carries the exchange.
        exchange: Sends the buckets.
        watch: Detects changes to gradients.
        guard: Makes forwards wait, with `cross_barrier`.
        wanted: Whether the caller allows exchange during backward.

    Attributes:
        backward: Whether buckets are sent during backward; None until the first step decides.
        crossing: Whether `step()` leaves the exchange in flight; None until the first step decides.
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
        """The argument that makes the exchange wait for `step()`."""

    def bucket_ready(self, bucket: Bucket) -> None:
        """Handles a bucket whose gradients are complete."""
        if self.backward:
            self._exchange.ready(bucket)

    def backward_ended(self) -> None:
        """Handles the end of the step's last backward pass."""
        if not self._on_server and not self.crossing:
            self._exchange.finish()
        elif self.backward:
            self._exchange.send_rest()

    @property
    def sent(self) -> bool:
        """Whether gradients of this step were sent and can no longer be changed."""
        return bool(self._on_server or self.crossing) and self._exchange.begun

    def settle(self, passes: int, *, scales: bool) -> None:
        """Decides once, at the first step. Later it checks that the script still fits the decision.

        Args:
            passes: Backward passes since the last step.
            scales: Whether the script uses a `GradScaler`.

        Raises:
            ConfigError: The script changed gradients that were already sent.
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
                    "each rank changes its own gradient before the hub averages; on a ring or in one process"
                    " the script changes the mean instead: pass --aggregate to change the mean here too"
                )
        elif self._exchange.begun:
            self._refuse(changes)

    def _settle_crossing(self, passes: int, changes: str) -> None:
        """Decides and checks `crossing` where workers step."""
        if self.crossing:
            self._refuse(changes)
        elif changes and passes:
            self.crossing = False
            assert self._guard is not None
            self._guard.remove_hooks()
            log.info("step() waits for the exchange despite cross_barrier=True: the script %s", changes)

    def _refuse(self, changes: str) -> None:
        if changes:
            raise ConfigError(
                f"the script {changes}, but its gradients were already sent during backward, because it did"
                f" not do so in the first step: pass {self.fix} to DistributedOptimizer"
            )

    def step_taken(self, passes: int) -> None:
        """Turns `crossing` on after the first step, unless `settle` turned it off."""
        if self.crossing is None and passes:
            assert self._guard is not None
            self._guard.begin()
            self.crossing = True
