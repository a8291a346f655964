"""Decides when gradients are exchanged: during backward, in `step()`, or into the next forward.

A hub steps as soon as it has the gradients, and what is sent cannot be changed. So the first step shows what
the script does. If it unscales, clips or otherwise changes gradients or parameters between backward and step,
or hyperparameters after backward has begun, all later exchanges run in `step()`. A script that starts to do
so after the first step gets a ConfigError.

torch counts in-place changes in a tensor's version, which views share, so one number per bucket shows them.
A change through `.grad.data` is not counted. In the first step, which decides, bytes are compared instead;
later a few elements of each gradient that was sent, and on a GPU the answer is read in the next step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from hubring.ps.core.errors import ConfigError
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.value_memory import Look, later, nothing
from hubring.workers.communicators.base import Communicator
from hubring.workers.reducer.exchange import Exchange
from hubring.workers.reducer.first_means import FirstMeans
from hubring.workers.reducer.forward import ForwardGuard

log = logging.getLogger(__name__)

CHANGED = "changes gradients between backward and step, as clipping does"
WRITTEN = "changes parameters between backward and step"


class _Noted(NamedTuple):
    """A bucket's gradients at the end of a backward pass."""

    state: tuple[int, tuple[int, ...]]
    copy: torch.Tensor | None
    sample: torch.Tensor | None
    written: dict[int, torch.Tensor]
    """Parameters that the script has changed since the last step, by position."""


class Overlap:
    """Decides after the first step what an exchange overlaps with.

    Args:
        communicator: Carries the exchange.
        exchange: Sends the buckets.
        guard: Makes forwards wait, with `cross_barrier`.
        wanted: Whether the caller allows exchange during backward.

    Attributes:
        backward: Whether buckets are sent during backward; None until the first step decides.
        crossing: Whether `step()` leaves the exchange in flight; None until the first step decides.
        first_means: Shows means in a first step, until it has decided whether the hub steps.
        shows_means: Whether gradients are means that `first_means` has shown.
        has_noted: Whether gradients of this step are on record.
    """

    def __init__(
        self, communicator: Communicator, exchange: Exchange, guard: ForwardGuard | None, *, wanted: bool
    ) -> None:
        self._on_server = exchange.on_server
        self._lockstep = exchange.on_server and communicator.lockstep and communicator.size > 1
        """Whether the ranks' own gradients are of no use to a script that changes them."""
        self._communicator = communicator
        self._exchange = exchange
        self._guard = guard
        self._look: Look = nothing
        self._holds: bool | None = None
        self._noted: dict[Bucket, _Noted] = {}
        self._late: list[tuple[Look, str]] = []
        """Looks at what was sent, and what they may find."""
        self._dropped = False
        self._between = False
        """Whether the script changed means between two passes of the first step."""
        # Where workers step, the mean replaces the gradients in place before step().
        self._exact = wanted and self._on_server
        self._seen_pass = False
        """Whether a pass, and so a forward, has run since the guard was made."""
        self.has_noted = False
        self.backward: bool | None = None if wanted and self._on_server else wanted
        self.crossing: bool | None = False if guard is None else None
        self.first_means: FirstMeans | None = None
        self.shows_means = False
        self.fix = "overlap=False" if self._on_server else "cross_barrier=False"
        """The argument that makes the exchange wait for `step()`."""

    def begin_with_means(self) -> None:
        """Shows means in the first step, where the hub steps; see `FirstMeans`."""
        self.first_means = FirstMeans(self._communicator, self._exchange)
        self._exact = True

    # During backward.

    def begin_pass(self) -> None:
        """Handles the first gradient of a pass. Changes before it are allowed: the pass adds to them."""
        self._seen_pass = True
        if self.first_means is not None and self.shows_means:  # one gradient has come when a pass begins
            altered = sum(bucket.shown.altered(one.state, one.copy) for bucket, one in self._noted.items())
            self._between |= altered > 1
        self._look = self._exchange.look_for_writes() if self._on_server else nothing
        self._holds = False if self._look is nothing else None
        self._noted, self.has_noted, self.shows_means = {}, False, False

    def reset(self) -> None:
        """Prepares for the next gradients. Discarded gradients stay on record."""
        self._noted = {}
        self.has_noted = False

    @property
    def holds(self) -> bool:
        """Whether the script had changed parameters before this pass.

        Then this step's exchange waits for `step()`: the changes go first, and the script may go on changing.
        """
        if self._holds is None:  # asked when there is something to send: on a GPU the answer takes a while
            self._holds = self._look()
        return self._holds

    def note_gradients(self, bucket: Bucket) -> bool:
        """Records a bucket whose last gradient was just accumulated; returns whether it may be sent now."""
        holds = self._holds if self._holds is not None else self.holds
        written = {}
        if holds:
            for position in bucket.written():
                written[position] = bucket.parameters[position].detach().clone()
        leaves = bool(self.backward and not holds)
        shows = self.first_means is None or self.shows_means
        copy = bucket.gradients.clone() if self._exact and shows else None
        state, sample = bucket.shown.state(), None
        if self._on_server and not self._exact:
            for position in state[1]:
                bucket.shown.clear(position)  # as when the bucket is sent
            sample = bucket.shown.sample()
        self._noted[bucket] = _Noted(state, copy, sample, written)
        self.has_noted = True
        return leaves

    def forget(self, bucket: Bucket) -> None:
        """Drops the record of a bucket that is not complete after all; `note_end` records it."""
        self._noted.pop(bucket, None)

    def note_end(self) -> None:
        """Records the end of a pass, and buckets that did not get all gradients."""
        for bucket in self._exchange.buckets:
            if bucket not in self._noted:
                self.note_gradients(bucket)

    def show_first_means(self, *, is_whole: bool) -> None:
        """Shows means once the last pass of a first step has ended; see `FirstMeans.show`."""
        assert self.first_means is not None
        self._noted = {}
        self.first_means.show(is_whole=is_whole)
        self.shows_means = True
        self.note_end()

    def note_dropped(self) -> None:
        """Records that gradients were discarded without a step."""
        self._dropped = True

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

    # What the script changed.

    def _changes(self) -> str:
        """Returns what the script changed since backward, as text; empty if nothing.

        Once gradients were sent, what only a GPU knows is asked for in the next step, so that no step waits.
        """
        late, self._late = self._late, []
        if self._changes_gradients():
            return CHANGED
        for bucket in self._exchange.buckets:
            if bucket in self._noted and self._is_written(bucket, self._noted[bucket].written):
                return WRITTEN
        if self._on_server and self.has_noted:
            now = self._exchange.read_hypers()
            if not self._exchange.hypers.items() <= now.items():  # more buckets may have come
                return "changes hyperparameters between the start of backward and step"
            if self._exchange.begun and self._exchange.groups.state_changed():
                return "changes the optimizer's state between backward and step"
        return next((text for look, text in late if look()), "") if late else ""

    def _changes_gradients(self, *, drops: bool = True) -> bool:
        """Whether the script has changed gradients; without `drops`, only if it has not dropped them."""
        for bucket in self._exchange.buckets:
            noted = self._noted.get(bucket)
            if noted is not None and self._is_changed(bucket, noted, drops=drops):
                return True
        return False

    def _is_changed(self, bucket: Bucket, noted: _Noted, *, drops: bool) -> bool:
        if not bucket.shown.is_in(noted.state):
            same = bucket.shown.state()[0] == noted.state[0] and bucket.shown.is_current()
            if drops or not same:
                return True
        if noted.sample is not None:
            sample = bucket.shown.sample()
            if bucket.stage is not None:
                return self._finds(later((noted.sample != sample).any()), CHANGED)
            if not torch.equal(noted.sample, sample):
                return True
        return noted.copy is not None and not _same_bytes(noted.copy, bucket.gradients)

    def _is_written(self, bucket: Bucket, noted: dict[int, torch.Tensor]) -> bool:
        if bucket.values.is_cuda and not noted:
            return self._finds(bucket.look_for_writes(), WRITTEN)
        written = bucket.written()
        return written != list(noted) or any(
            not _same_bytes(noted[position], bucket.parameters[position].detach()) for position in written
        )

    def _finds(self, look: Look, change: str) -> bool:
        if not self._exchange.begun:
            return look()
        self._late.append((look, change))
        return False

    def _habits(self) -> str:
        """Returns what the script did so far that a gradient must not be sent before, as text."""
        return "discards gradients without a step" if self._dropped else self._changes()

    @property
    def sent(self) -> bool:
        """Whether gradients of this step were sent and can no longer be changed."""
        return self._exchange.begun and bool(self._on_server or self.crossing)

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

    # In step().

    def settle(self, passes: int, *, habit: str, runs_code: bool = False) -> str:
        """Decides once, at the first step. Later it checks that the script still fits the decision.

        Args:
            passes: Backward passes since the last step.
            habit: What the script does that gradients must not be sent before, as text; empty for nothing.
            runs_code: Whether the script has code that runs in the step, and may change gradients there.

        Returns:
            Why the hub must average, and the worker step, from this step on; empty if it need not.

        Raises:
            ConfigError: The script changed gradients that were already sent, or before they were sent.
        """
        passes = passes if self.has_noted else 0
        means, self.first_means = self.first_means, None
        if means is not None:
            if not passes:  # this rank's loss has reached nothing
                means.show(is_whole=True)
            changed = bool(passes) and (runs_code or self._changes() == CHANGED)
            if means.are_changed(changed or self._dropped or self._between):
                return f"the script {CHANGED}"
        if self._on_server:
            if self.backward is None and passes:
                self._settle_backward(habit)
            elif self._exchange.begun:
                self._refuse(habit or self._changes())
            elif passes and self._lockstep and self._changes_gradients(drops=False):
                self._refuse(CHANGED)
        elif self.crossing:
            if self._exchange.begun:
                self._refuse(habit or self._changes())
        elif self.crossing is None:
            self._settle_crossing(passes, habit)
        elif passes and not self._exchange.begun and self._changes() == CHANGED:
            raise ConfigError(
                f"the script {CHANGED}, but only {passes} backward pass(es) ran, fewer than"
                " backward_passes_per_step, so the gradients are not means yet: call"
                " optimizer.synchronize() after the last backward, before you read or change gradients"
            )
        if self.crossing is None and passes and self._seen_pass:
            assert self._guard is not None
            self._guard.check()  # before the step is taken
        if means is not None:
            means.put_back()
            self._exact = False
        return ""

    def check(self) -> None:
        """Checks that hooks on `step()` have changed no gradients that were sent. Raises as `settle`."""
        if self.sent:
            self._refuse(self._changes())

    def _settle_backward(self, habit: str) -> None:
        own = self._changes()
        changes = habit or ("discards gradients without a step" if self._dropped else own)
        self.backward = not changes
        if own == CHANGED and self._lockstep:
            self._refuse(CHANGED)
        if changes:
            log.info("gradients are exchanged in step(), not during backward: the script %s", changes)
        self._exact = False

    def _settle_crossing(self, passes: int, habit: str) -> None:
        """Decides `crossing` where workers step."""
        changes = habit or self._habits()
        if changes and passes:
            self.crossing = self._exact = False
            self.remove_hooks()
            log.info("step() waits for the exchange despite cross_barrier=True: the script %s", changes)

    def _refuse(self, changes: str) -> None:
        if changes == CHANGED and self._lockstep:
            raise ConfigError(
                f"the script {changes}, but the hub steps already, with each rank's own gradients: let the"
                " workers step, with means, from the start, with hubring.init(aggregate=True) or --aggregate"
            )
        if changes:
            raise ConfigError(
                f"the script {changes}, but its gradients were already sent during backward, because it did"
                f" not do so in the first step: pass {self.fix} to DistributedOptimizer"
            )

    def begin_crossing(self, passes: int) -> None:
        """Turns `crossing` on after the first step, unless `settle` turned it off."""
        if passes and self.has_noted and self._seen_pass:
            assert self._guard is not None
            self._guard.begin()
            self.crossing = True
            self._exact = False

    def decide_anew(self, guard: Callable[[], ForwardGuard | None]) -> None:
        """Lets the next step decide again, because the exchange has more buckets.

        Args:
            guard: Returns what makes forwards wait for all of them.
        """
        if self.backward and self._on_server:
            self.backward, self._exact = None, True
        if self._guard is not None and self.crossing is not False:
            self._exchange.settle_all()
            self._guard.remove_hooks()
            self._guard, self._seen_pass = guard(), False
            self.crossing = False if self._guard is None else None

    def remove_hooks(self) -> None:
        """Removes what makes forwards wait. Nothing is in flight."""
        if self._guard is not None:
            self._guard.remove_hooks()


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
