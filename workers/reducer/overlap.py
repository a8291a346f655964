"""Decides when gradients are exchanged: during backward, in `step()`, or into the next forward.

Gradients cannot be changed once they are sent. So the first step shows what the script does. If it
unscales, clips or otherwise changes gradients after backward, all later exchanges run in `step()`.
A script that starts to do so after the first step gets a ConfigError.
"""

from __future__ import annotations

import logging

from hubring.ps.core.errors import ConfigError
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.value_memory import Look, nothing
from hubring.workers.communicators.base import Communicator
from hubring.workers.reducer.exchange import Exchange
from hubring.workers.reducer.forward import ForwardGuard
from hubring.workers.reducer.gradient_changes import CHANGED, ChangeWatch

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
        self._look: Look = nothing
        self._holds: bool | None = None
        self.backward: bool | None = None if wanted and self._on_server else wanted
        self.crossing: bool | None = False if guard is None else None
        self.fix = "overlap=False" if self._on_server else "cross_barrier=False"
        """The argument that makes the exchange wait for `step()`."""

    def begin_pass(self) -> None:
        """Handles the first gradient of a backward pass."""
        self._look = self._exchange.look_for_writes() if self._on_server else nothing
        self._holds = None

    @property
    def holds(self) -> bool:
        """Whether the script had changed parameters before this pass.

        Then this step's exchange waits for `step()`: the changes go first, and the script may go on changing.
        """
        if self._holds is None:  # asked when there is something to send: on a GPU the answer takes a while
            self._holds = self._look()
        return self._holds

    def bucket_ready(self, bucket: Bucket) -> None:
        """Handles a bucket whose gradients are complete."""
        if self.backward and not self.holds:
            self._exchange.ready(bucket)

    @property
    def waits_after_backward(self) -> bool:
        """Whether gradients are means once the step's last backward has returned."""
        return not self._on_server and not self.crossing

    @property
    def leaves_after_backward(self) -> bool:
        """Whether gradients are sent once the step's last backward has ended."""
        return self.waits_after_backward or bool(self.backward and not self.holds)

    @property
    def means(self) -> bool:
        """Whether `parameter.grad` is the mean of all ranks' gradients now."""
        return self._communicator.size == 1 or (not self._on_server and self._exchange.begun)

    @property
    def sent(self) -> bool:
        """Whether gradients of this step were sent and can no longer be changed."""
        return bool(self._on_server or self.crossing) and self._exchange.begun

    def check_unsent(self) -> None:
        """Checks that this step's gradients may be exchanged again.

        Raises:
            ConfigError: They were sent.
        """
        if self.sent:
            raise ConfigError(
                "backward ran again after the gradients of this step were sent: to accumulate gradients,"
                " pass backward_passes_per_step=... to DistributedOptimizer; to drop them, call"
                " optimizer.zero_grad(); otherwise, as for checkpoint(..., use_reentrant=True), pass"
                f" {self.fix}"
            )

    def check_droppable(self) -> None:
        """Checks that the script may drop this step's gradients.

        Raises:
            ConfigError: They were sent.
        """
        if self.sent:
            raise ConfigError(
                "zero_grad() was called after the gradients were pushed during backward: call step()"
                f" first; to skip steps or repeat a failed backward, set {self.fix}"
            )

    def remove_hooks(self) -> None:
        """Removes what makes forwards wait. Nothing is in flight."""
        if self._guard is not None:
            self._guard.remove_hooks()

    def settle(self, passes: int, *, habit: str) -> None:
        """Decides once, at the first step. Later it checks that the script still fits the decision.

        Args:
            passes: Backward passes since the last step.
            habit: What the script does that gradients must not be sent before, as text; empty for nothing.

        Raises:
            ConfigError: The script changed gradients that were already sent, or before they were sent.
        """
        if not self._on_server and self.crossing is False:
            if passes and not self._exchange.begun and self._watch.changes() == CHANGED:
                raise ConfigError(
                    f"the script {CHANGED}, but only {passes} backward pass(es) ran, fewer than"
                    " backward_passes_per_step, so the gradients are not means yet: call"
                    " optimizer.synchronize() after the last backward, before you read or change gradients"
                )
            return
        if not self._on_server:
            self._settle_crossing(passes, habit)
        elif self.backward is None and passes:
            self._settle_backward(habit or self._watch.habits())
        elif self._exchange.begun:
            self._refuse(habit or self._watch.changes())

    def check(self) -> None:
        """Checks that hooks on `step()` have changed no gradients that were sent. Raises as `settle`."""
        if self.sent:
            self._refuse(self._watch.changes())

    def _settle_backward(self, changes: str) -> None:
        self.backward = not changes
        if changes:
            log.info("gradients are exchanged in step(), not during backward: the script %s", changes)
        if self._watch.changes() == CHANGED and self._communicator.size > 1:
            log.warning(
                "each rank changes its own gradient before the hub averages; on a ring or in one process"
                " the script changes the mean instead: pass --aggregate to change the mean here too"
            )
        self._watch.exact = False

    def _settle_crossing(self, passes: int, habit: str) -> None:
        """Decides and checks `crossing` where workers step."""
        if self.crossing:
            if self._exchange.begun:
                self._refuse(habit or self._watch.changes())
            return
        changes = habit or self._watch.habits()
        if changes and passes:
            self.crossing = self._watch.exact = False
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
            self._watch.exact = False
