"""Follows backward passes through hooks on the parameters.

The first gradient of a pass starts the pass. From the step's last pass on, the overlap learns when
a bucket has all its gradients, and, before `loss.backward()` returns, that the pass has ended. A pass
need not produce all gradients.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch.autograd import Variable

from hubring.ps.core.errors import ConfigError
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.reducer.exchange import Exchange
from hubring.workers.reducer.gradient_changes import ChangeWatch
from hubring.workers.reducer.overlap import Overlap

LARGE_BYTES = 64 << 10
"""A larger gradient moves into its bucket at once, while the cache has it, and its own memory is free again.
Small ones move together: a call costs more than the bytes."""


class BackwardPasses:
    """Follows the backward passes of one step.

    Args:
        buckets: All buckets.
        passes_per_step: Passes after which a step's gradients are complete.
        watch: Notes the gradients of each pass.
        exchange: Sends the buckets.
        overlap: Decides when.

    Attributes:
        count: Passes since the step began, including the current one.
        on_begin: Called at the first gradient of a pass.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        passes_per_step: int,
        watch: ChangeWatch,
        exchange: Exchange,
        overlap: Overlap,
    ) -> None:
        self.count = 0
        self.on_begin: Callable[[], None] = _nothing
        self._buckets = buckets
        self._numbered = {bucket.spec.index: bucket for bucket in buckets}
        self._watch = watch
        self._exchange = exchange
        self._overlap = overlap
        self._graph_task = -1
        self._end: Callable[[], object] = _nothing
        """Weak: autograd has the only reference to what it calls at the end of a pass, and drops it with a
        pass that fails."""
        self._missing: dict[int, set[int]] = {bucket.spec.index: set() for bucket in buckets}
        self._all = {bucket.spec.index: frozenset(range(len(bucket.parameters))) for bucket in buckets}
        self._left: list[Bucket] = []
        self._hooks: dict[tuple[int, int], int] = {}
        """Numbers of the hooks."""
        self._due: list[Bucket] = []
        """Complete buckets, of which the script's hooks on the last gradient may not have run yet."""
        # Backward runs one thread per device. A model can span several devices; a bucket cannot.
        self._lock = threading.RLock()
        self.set_per_step(passes_per_step)
        for bucket in buckets:
            for position, parameter in enumerate(bucket.parameters):
                hook = self._hook(bucket, position)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._hooks[bucket.spec.index, position] = handle.id

    def set_per_step(self, passes: int) -> None:
        """Sets the number of passes after which a step's gradients are complete.

        Raises:
            ConfigError: It is less than 1.
        """
        if passes < 1:
            raise ConfigError(f"backward_passes_per_step is {passes}; it must be at least 1")
        self._per_step = passes

    @property
    def exceeded(self) -> bool:
        """Whether this step has had more passes than it needs."""
        return self.count > self._per_step

    def reset(self) -> None:
        """Prepares for the next step."""
        self.count = 0
        self._graph_task = -1
        self._end = _nothing
        self._due.clear()

    def _hook(self, bucket: Bucket, position: int) -> Callable[[torch.Tensor], None]:
        """Returns the hook of one parameter. It runs in every pass, so it does as little as possible.

        The hook has no strong reference to `self`. The garbage collector cannot see torch's hooks, so a
        parameter that its own hook references would never be freed.
        """
        index = bucket.spec.index
        missing = self._missing[index]
        current = torch._C._current_graph_task_id
        alive = weakref.ref(self)
        large = bucket.parameters[position].nbytes >= LARGE_BYTES

        def accumulated(_: torch.Tensor) -> None:
            passes = alive()
            if passes is None:  # the optimizer was deleted and the model is still in use
                return
            if current() != passes._graph_task:
                passes.enter()
            if passes._due:
                passes._release()
            missing.discard(position)
            if large:
                passes._take(passes._numbered[index], position)
            if not missing:
                passes._filled(passes._numbered[index], position)

        return accumulated

    def enter(self) -> None:
        """Counts the pass that runs now, once. A pass that fails midway counts too."""
        with self._lock:
            graph_task = torch._C._current_graph_task_id()
            if graph_task == self._graph_task:  # another device's thread was here first
                return
            if self._end() is not None:  # a backward inside this one, of checkpoint(..., use_reentrant=True)
                return
            self._due.clear()  # of a pass that failed
            self._begin_exchange(self.count >= self._per_step)
            self.count += 1
            self._check_graphs()
            self._overlap.begin_pass()
            self._watch.begin_pass()
            self._left = [bucket for bucket in self._buckets if self._exchange.has_left(bucket)]
            for bucket in self._buckets:
                self._missing[bucket.spec.index].update(self._all[bucket.spec.index])
            end = partial(self._pass_ended)
            Variable._execution_engine.queue_callback(end)
            self._graph_task, self._end = graph_task, weakref.ref(end)
        self.on_begin()

    def _check_graphs(self) -> None:
        """Raises ConfigError if this pass may go through gradients that are not means."""
        if self.count == 1 or self._overlap.means or not any(one.keeps_graphs for one in self._buckets):
            return
        raise ConfigError(
            "backward ran again after backward(create_graph=True), and would go through this rank's own"
            " gradients in parameter.grad instead of the mean: compute the first gradients with"
            " torch.autograd.grad(loss, parameters, create_graph=True), and call backward once"
        )

    def _begin_exchange(self, again: bool) -> None:
        """Prepares the exchange for more gradients; `again`: the step has had all the passes that it needs.

        Where workers step, the gradients are means by now. A further pass adds to them, and the mean of the
        sums is the sum of the means, so they are exchanged again, as in DDP.
        """
        if again and self._exchange.begun:
            if self._overlap.sent:
                raise ConfigError(
                    "backward ran again after the gradients of this step were sent: to accumulate gradients,"
                    " pass backward_passes_per_step=... to DistributedOptimizer; to drop them, call"
                    " optimizer.zero_grad(); otherwise, as for checkpoint(..., use_reentrant=True), pass"
                    f" {self._overlap.fix}"
                )
            self._exchange.reset()
        if not self._exchange.begun:
            self._exchange.free_memory()

    def _take(self, bucket: Bucket, position: int) -> None:
        with self._lock:
            self._check_settled(bucket)
            bucket.take(position)

    def _filled(self, bucket: Bucket, position: int) -> None:
        """Handles the last gradient of a bucket. Hooks that the script has registered later may change it."""
        with self._lock:
            self._check_settled(bucket)
            self._due.append(bucket)
            hooks = bucket.parameters[position]._post_accumulate_grad_hooks
            if next(reversed(hooks)) == self._hooks[bucket.spec.index, position]:
                self._release()

    def _release(self) -> None:
        """Handles buckets whose hooks have all run."""
        with self._lock:
            due, self._due = self._due, []
            for bucket in due:
                bucket.collect()
                self._watch.note_gradients(bucket, writes=self._overlap.holds)
                if self.count >= self._per_step:
                    self._overlap.bucket_ready(bucket)

    def _pass_ended(self) -> None:
        self._end = _nothing
        self._release()
        for bucket in self._left:
            self._check_settled(bucket)
            self._exchange.settle(bucket)
        for bucket in self._buckets:
            if self._missing[bucket.spec.index]:
                bucket.collect()
        self._watch.note_end(writes=self._overlap.holds)
        if self.count >= self._per_step:
            self._overlap.backward_ended()

    def _check_settled(self, bucket: Bucket) -> None:
        """Raises ConfigError if the bucket got a gradient while its parameters are still in flight."""
        index = bucket.spec.index
        if not self._exchange.has_left(bucket) or len(self._missing[index]) == len(self._all[index]):
            return
        position = min(self._all[index] - self._missing[index])
        raise ConfigError(
            f"parameter {bucket.spec.tensors[position].name} was used before its exchange was done: its"
            " module did not run its forward, so nothing waited for it; call optimizer.synchronize() before"
            " the forward, or remove cross_barrier=True"
        )


def _nothing() -> None:
    """Does nothing."""
