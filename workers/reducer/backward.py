"""Follows the backward passes of one step.

The first gradient of a pass starts the pass. From the step's last pass on, buckets are sent when they have
all their gradients, or, before `loss.backward()` returns, when the pass ends. A pass need not produce all
gradients.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial

import torch

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.torch_internals import (
    graph_task,
    is_last_gradient_hook,
    is_outermost_backward,
    when_backward_ends,
)
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.reducer.exchange import Exchange
from hubring.workers.reducer.overlap import Overlap

LARGE_BYTES = 64 << 10
"""A larger gradient moves into its bucket at once, while the cache has it, and its own memory is free again.
Small ones move together: a call costs more than the bytes."""


class _Filling:
    """One bucket in a backward pass.

    Attributes:
        passes: What follows the passes.
        missing: Positions without a gradient in this pass.
        hooks: The number of each parameter's hook.
        came_again: Whether one of its gradients has come twice in a pass, as when checkpoint(...,
            use_reentrant=True) runs one layer several times. It then waits for the end of every pass.
    """

    def __init__(self, bucket: Bucket, passes: BackwardPasses) -> None:
        self.bucket = bucket
        self.passes = passes
        self.missing: set[int] = set()
        self.hooks = list(map(self._register, range(len(bucket.parameters))))
        self.came_again = False

    def _register(self, position: int) -> int:
        """Registers the hook of one parameter. It runs in every pass, so it does as little as possible.

        The hook references nothing strongly. The garbage collector cannot see torch's hooks, so a parameter
        that its own hook references would never be freed.
        """
        parameter = self.bucket.parameters[position]
        missing, alive, large = self.missing, weakref.ref(self), parameter.nbytes >= LARGE_BYTES

        def accumulated(_: torch.Tensor) -> None:
            filling = alive()
            if filling is None:  # the optimizer was deleted and the model is still in use
                return
            passes = filling.passes
            if graph_task() != passes.graph_task:
                passes.enter()
            if passes.due:
                passes.release()
            if position not in missing:
                passes.came_again(filling, position)
                return
            missing.remove(position)
            if large:
                passes.take(filling, position)
            if not missing:
                passes.filled(filling, position)

        handle = parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
        number: int = handle.id
        return number


class BackwardPasses:
    """Counts the passes of a step, and sends buckets once they are complete.

    Args:
        exchange: Sends the buckets.
        begins: Called when a pass begins, before anything else.
        has_begun: Called when a pass has begun.
        lock: Backward runs one thread per device. A model can span several devices; a bucket cannot.

    Attributes:
        count: Passes since the step began, including the current one.
        per_step: Passes after which a step's gradients are complete.
        overlap: Decides when buckets are sent.
        graph_task: torch's number of the backward that the current pass began in; -1 before the first.
        refused: The error if two threads ran backward at the same time.
        due: Complete buckets, of which the script's hooks on the last gradient may not have run yet.
    """

    overlap: Overlap

    def __init__(
        self,
        exchange: Exchange,
        begins: Callable[[], None],
        has_begun: Callable[[], None],
        lock: threading.RLock,
    ) -> None:
        self.count = 0
        self.per_step = 1
        self.graph_task = -1
        self.due: list[_Filling] = []
        self._exchange = exchange
        self._begins, self._has_begun = begins, has_begun
        self._fillings: list[_Filling] = []
        self._left: list[_Filling] = []
        """Buckets that were in flight when the pass began."""
        self._seen_pass = False
        """Whether a pass has shown which buckets wait for its end. None is sent before."""
        self._end: Callable[[], object] = _nothing
        """Weak: autograd has the only reference to what it calls at the end of a pass, and drops it with a
        pass that fails."""
        self._lock = lock
        self._inner = -1
        """The last backward that is known to run inside the pass."""
        self._ending = False
        self.refused: ConfigError | None = None

    @property
    def is_open(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self._end() is not None

    def add(self, buckets: list[Bucket]) -> None:
        """Follows more buckets, also in a pass that is open."""
        fillings = [_Filling(bucket, self) for bucket in buckets]
        self._include(fillings)
        if self.is_open:
            self._begin(fillings)

    def absorb(self, other: BackwardPasses) -> None:
        """Follows the buckets of another one, which then has none. If it has an open pass, so has this."""
        fillings, other._fillings = other._fillings, []
        for filling in fillings:
            filling.passes = self
        self._include(fillings)
        self.due += other.due
        self.count = max(self.count, other.count)
        if self.is_open and not other.is_open:  # otherwise they have begun, and may have gradients
            self._begin(fillings)

    def give_up(self) -> None:
        """Follows nothing any more: the hooks do nothing without what they call."""
        self._fillings.clear()
        self.reset()

    def _include(self, fillings: list[_Filling]) -> None:
        self._fillings += fillings
        self._seen_pass = False

    def reset(self) -> None:
        """Prepares for the next step."""
        self.count = 0
        self.graph_task = -1
        self._end = _nothing
        self.due.clear()

    # What the hooks on the parameters call.

    def enter(self) -> None:
        """Counts the pass that runs now, once. A pass that fails midway counts too."""
        meets = self._ending  # before the lock, which another thread may hold until it has ended its pass
        with self._lock:
            task = graph_task()
            if task in (self.graph_task, self._inner):  # another device's thread was here first
                return
            is_open = self._end() is not None
            if meets or (is_open and is_outermost_backward()):
                self._refuse()
            if is_open:  # a backward inside this one, of checkpoint(..., use_reentrant=True)
                self._inner = task
                return
            self.due.clear()  # of a pass that failed
            self._begins()
            if self.count >= self.per_step:
                # Where workers step, the gradients are means by now. This pass adds to them, and the mean of
                # the sums is the sum of the means, so they are exchanged again, as in DDP.
                self.overlap.check_unsent()
                self._exchange.reset()
            self.count += 1
            self._begin(self._fillings)
            self.overlap.begin_pass()
            end = partial(self._pass_ended)
            when_backward_ends(end)
            self.graph_task, self._end = task, weakref.ref(end)
        self._has_begun()

    def _refuse(self) -> None:
        """Raises ConfigError, also in the next call of `step` or `zero_grad`: threads may hide an error."""
        self.refused = ConfigError(
            "two threads ran backward at the same time, so gradients of one may be missing in the exchange of"
            " the other: run one backward after the other, or add the losses and call backward once"
        )
        raise self.refused

    def _begin(self, fillings: list[_Filling]) -> None:
        """Expects all gradients of some buckets in the current pass."""
        if not self._exchange.begun:
            self._exchange.free_memory()
        if self.count > 1 and not self.overlap.means:
            self._check_graphs()
        self._left = []
        if self.overlap.crossing:
            self._left = [one for one in self._fillings if self._exchange.has_left(one.bucket)]
        for filling in fillings:
            filling.missing.update(range(len(filling.hooks)))

    def take(self, filling: _Filling, position: int) -> None:
        """Moves a gradient into its bucket."""
        with self._lock:
            self._check_settled(filling)
            filling.bucket.shown.take([position])

    def filled(self, filling: _Filling, position: int) -> None:
        """Handles the last gradient of a bucket. Hooks that the script has registered later may change it."""
        with self._lock:
            if self._left:
                self._check_settled(filling)
            if filling.came_again:
                return
            self.due.append(filling)
            if is_last_gradient_hook(filling.bucket.parameters[position], filling.hooks[position]):
                self.release()

    def came_again(self, filling: _Filling, position: int) -> None:
        """Handles a gradient that has changed once more in one pass.

        Raises:
            ConfigError: It was sent without the change.
        """
        bucket = filling.bucket
        with self._lock:
            if self._exchange.has_sent(bucket):
                raise ConfigError(
                    f"parameter {bucket.spec.tensors[position].name} got another gradient in one backward"
                    " pass after the first was sent, as if checkpoint(..., use_reentrant=True) ran its layer"
                    " several times: pass overlap=False to DistributedOptimizer, or use_reentrant=False"
                )
            filling.came_again = True
            self._exchange.withdraw(bucket)
            self.overlap.forget(bucket)
            self.due = [one for one in self.due if one is not filling]

    def release(self) -> None:
        """Handles buckets whose hooks have all run."""
        with self._lock:
            due, self.due = self.due, []
            for filling in due:
                filling.bucket.shown.collect()
                may_leave = self.overlap.note_gradients(filling.bucket) and self._seen_pass
                if may_leave and self.count >= self.per_step:
                    self._exchange.ready(filling.bucket)
                    self._exchange.send_ready()

    def _pass_ended(self) -> None:
        if not self._fillings:  # absorbed in this pass, which ends there
            return
        self._ending = True
        try:
            if self.refused is not None:
                raise self.refused
            self._end = _nothing
            if self.due:
                self.release()
            for filling in self._left:
                self._check_settled(filling)
                self._exchange.settle(filling.bucket)
            for filling in self._fillings:
                if filling.missing or filling.came_again:
                    filling.bucket.shown.collect()
            self._seen_pass = True
            self.overlap.note_end()
            if self.count < self.per_step:
                return
            if self.overlap.first_means is not None:
                self.overlap.show_first_means(is_whole=self.count == self.per_step)
            if not self._exchange.complete and self.overlap.leaves_after_backward:
                self._exchange.send_rest()
            if self.overlap.waits_after_backward:
                self._exchange.finish()
        finally:
            self._ending = False

    def _check_settled(self, filling: _Filling) -> None:
        """Raises ConfigError if the bucket got a gradient while its parameters are still in flight."""
        came = set(range(len(filling.hooks))) - filling.missing
        if came and self._exchange.has_left(filling.bucket):
            name = filling.bucket.spec.tensors[min(came)].name
            raise ConfigError(
                f"parameter {name} was used before its exchange was done: its module did not run its forward,"
                " so nothing waited for it; call optimizer.synchronize() before the forward, or remove"
                " cross_barrier=True"
            )

    def _check_graphs(self) -> None:
        """Raises ConfigError if this pass may go through gradients that are not means."""
        if any(one.bucket.shown.keeps_graphs for one in self._fillings):
            raise ConfigError(
                "backward ran again after backward(create_graph=True), and would go through this rank's own"
                " gradients in parameter.grad instead of the mean: compute the first gradients with"
                " torch.autograd.grad(loss, parameters, create_graph=True), and call backward once"
            )


def _nothing() -> None:
    """Does nothing."""
