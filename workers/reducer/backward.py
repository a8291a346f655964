"""Follows the backward passes of reducers that are exchanged together.

The first gradient of a pass starts the pass, for all of them. From the step's last pass on, the overlap
learns when a bucket has all its gradients, and, before `loss.backward()` returns, that the pass has ended. A
pass need not produce all gradients.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable

from hubring.ps.core.errors import ConfigError
from hubring.workers.buckets.bucket import Bucket

if TYPE_CHECKING:
    from hubring.workers.reducer.reducer import Reducer
    from hubring.workers.reducer.reducer_set import ReducerSet


class BackwardPasses:
    """Follows the backward passes of one step.

    Args:
        reducers: The reducers.

    Attributes:
        count: Passes since the step began, including the current one.
        graph_task: torch's number of the backward that the current pass began in; -1 before the first.
        due: Complete buckets, of which the script's hooks on the last gradient may not have run yet.
    """

    def __init__(self, reducers: ReducerSet) -> None:
        self.count = 0
        self.graph_task = -1
        self.due: list[tuple[Reducer, Bucket]] = []
        self._set = reducers
        self._per_step = 1
        self._end: Callable[[], object] = _nothing
        """Weak: autograd has the only reference to what it calls at the end of a pass, and drops it with a
        pass that fails."""
        # Backward runs one thread per device. A model can span several devices; a bucket cannot.
        self._lock = threading.RLock()

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

    @property
    def is_open(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self._end() is not None

    def reset(self) -> None:
        """Prepares for the next step."""
        self.count = 0
        self.graph_task = -1
        self._end = _nothing
        self.due.clear()

    # What the hooks on the parameters call.

    def enter(self) -> None:
        """Counts the pass that runs now, once. A pass that fails midway counts too."""
        with self._lock:
            graph_task = torch._C._current_graph_task_id()
            if graph_task == self.graph_task:  # another device's thread was here first
                return
            if self.is_open:  # a backward inside this one, of checkpoint(..., use_reentrant=True)
                return
            self.due.clear()  # of a pass that failed
            self._set.begin_turn()
            again = self.count >= self._per_step
            self.count += 1
            for reducer in self._set.reducers:
                self.begin(reducer, again=again)
            end = partial(self._pass_ended)
            Variable._execution_engine.queue_callback(end)
            self.graph_task, self._end = graph_task, weakref.ref(end)
        for owner in self._set.owners:
            owner.pass_began()

    def begin(self, reducer: Reducer, *, again: bool = False) -> None:
        """Lets a reducer take part in the current pass; `again`: the step has had all the passes it needs."""
        if again:
            reducer.begin_again()
        if not reducer.exchange.begun:
            reducer.exchange.free_memory()
        self._check_graphs(reducer)
        reducer.overlap.begin_pass()
        reducer.watch.begin_pass()
        reducer.hooks.begin_pass()

    def take(self, reducer: Reducer, bucket: Bucket, position: int) -> None:
        """Moves a gradient into its bucket."""
        with self._lock:
            reducer.hooks.check_settled(bucket)
            bucket.take(position)

    def filled(self, reducer: Reducer, bucket: Bucket, position: int) -> None:
        """Handles the last gradient of a bucket. Hooks that the script has registered later may change it."""
        with self._lock:
            reducer.hooks.check_settled(bucket)
            if reducer.hooks.waits(bucket):
                return
            self.due.append((reducer, bucket))
            if reducer.hooks.is_last(bucket, position):
                self.release()

    def came_again(self, reducer: Reducer, bucket: Bucket, position: int) -> None:
        """Handles a gradient that has changed once more in one pass.

        Raises:
            ConfigError: It was sent without the change.
        """
        with self._lock:
            if reducer.exchange.has_sent(bucket):
                raise ConfigError(
                    f"parameter {bucket.spec.tensors[position].name} got another gradient in one backward"
                    " pass after the first was sent, as if checkpoint(..., use_reentrant=True) ran its layer"
                    " several times: pass overlap=False to DistributedOptimizer, or use_reentrant=False"
                )
            reducer.hooks.make_wait(bucket)
            reducer.exchange.withdraw(bucket)
            reducer.watch.forget(bucket)
            self.due = [(each, one) for each, one in self.due if one is not bucket]

    def release(self) -> None:
        """Handles buckets whose hooks have all run."""
        with self._lock:
            due, self.due = self.due, []
            for reducer, bucket in due:
                bucket.collect()
                reducer.watch.note_gradients(bucket, writes=reducer.overlap.holds)
                if self.count >= self._per_step and reducer.hooks.may_leave(bucket):
                    reducer.overlap.bucket_ready(bucket)
                    self._set.send_ready()

    def _pass_ended(self) -> None:
        self._end = _nothing
        self.release()
        for reducer in self._set.reducers:
            reducer.hooks.end_pass()
            reducer.watch.note_end(writes=reducer.overlap.holds)
        if self.count >= self._per_step:
            self._set.backward_ended()

    def _check_graphs(self, reducer: Reducer) -> None:
        """Raises ConfigError if this pass may go through gradients that are not means."""
        means = self.count == 1 or reducer.overlap.means
        if means or not any(bucket.keeps_graphs for bucket in reducer.buckets):
            return
        raise ConfigError(
            "backward ran again after backward(create_graph=True), and would go through this rank's own"
            " gradients in parameter.grad instead of the mean: compute the first gradients with"
            " torch.autograd.grad(loss, parameters, create_graph=True), and call backward once"
        )


def _nothing() -> None:
    """Does nothing."""
