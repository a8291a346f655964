"""Follows backward passes through hooks on the parameters.

The first gradient of a pass starts the pass. In the last pass of a step,
`on_ready(bucket)` is called when a bucket has all its gradients, and `on_end()` is
called before `loss.backward()` returns. Gradients that the pass did not produce
count as zeros.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch
from torch.autograd import Variable

from hubring.ps.core.errors import ConfigError
from hubring.workers.buckets.bucketing import Bucket
from hubring.workers.optimizer.exchange import Exchange
from hubring.workers.optimizer.gradient_changes import ChangeWatch


class BackwardPasses:
    """Follows the backward passes of one step.

    Attributes:
        count: Passes since the step began, including the current one.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        passes_per_step: int,
        watch: ChangeWatch,
        exchange: Exchange,
        on_ready: Callable[[Bucket], None],
        on_end: Callable[[], None],
    ) -> None:
        if passes_per_step < 1:
            raise ConfigError(f"backward_passes_per_step is {passes_per_step}; it must be at least 1")
        self.count = 0
        self._buckets = buckets
        self._passes_per_step = passes_per_step
        self._watch = watch
        self._exchange = exchange
        self._on_ready = on_ready
        self._on_end = on_end
        self._graph_task = -1
        self._missing: list[set[int]] = [set() for _ in buckets]
        self._all = [frozenset(range(len(bucket.parameters))) for bucket in buckets]
        self._left: list[Bucket] = []
        # Backward runs one thread per device. A model can span several devices; a bucket cannot.
        self._lock = threading.Lock()
        for bucket in buckets:
            for position, parameter in enumerate(bucket.parameters):
                hook = self._hook(bucket, position)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def reset(self) -> None:
        """Prepares for the next step."""
        self.count = 0
        self._graph_task = -1

    def _hook(self, bucket: Bucket, position: int) -> Callable[[torch.Tensor], None]:
        """Returns the hook of one parameter. It runs in every pass, so it does as little as possible.

        The hook has no strong reference to `self`. The garbage collector cannot see torch's hooks, so a
        parameter that its own hook references would never be freed.
        """
        missing = self._missing[index := bucket.spec.index]
        current = torch._C._current_graph_task_id
        alive = weakref.ref(self)

        def accumulated(_: torch.Tensor) -> None:
            passes = alive()
            if passes is None:  # the optimizer was deleted and the model is still in use
                return
            if current() != passes._graph_task:
                passes._enter_pass()
            missing.discard(position)
            if not missing:
                passes._filled(passes._buckets[index])

        return accumulated

    def _enter_pass(self) -> None:
        """Counts the pass at its first gradient. A pass that fails midway counts too."""
        with self._lock:
            graph_task = torch._C._current_graph_task_id()
            if graph_task == self._graph_task:  # another device's thread was here first
                return
            self._check_count()
            self.count += 1
            self._watch.begin_pass()
            self._left = [bucket for bucket in self._buckets if self._exchange.has_left(bucket)]
            for bucket in self._buckets:
                self._missing[bucket.spec.index].update(self._all[bucket.spec.index])
                if not self._exchange.has_left(bucket):
                    bucket.collect()
            Variable._execution_engine.queue_callback(self._pass_ended)
            self._graph_task = graph_task

    def _check_count(self) -> None:
        if self.count == self._passes_per_step:
            raise ConfigError(
                f"backward ran more often than backward_passes_per_step={self._passes_per_step} before"
                " optimizer.step(): to"
                " accumulate gradients, pass backward_passes_per_step=... to DistributedOptimizer; to drop"
                " them, call optimizer.zero_grad(); with activation checkpointing, use"
                " checkpoint(..., use_reentrant=False)"
            )

    def _filled(self, bucket: Bucket) -> None:
        with self._lock:
            self._check_settled(bucket)
            bucket.collect()
            self._watch.note_gradients(bucket)
            if self.count == self._passes_per_step:
                self._on_ready(bucket)

    def _pass_ended(self) -> None:
        for bucket in self._left:
            self._check_settled(bucket)
            self._exchange.settle(bucket)
        for bucket in self._buckets:
            if self._missing[bucket.spec.index]:
                bucket.collect()
        self._watch.note_end()
        if self.count == self._passes_per_step:
            self._on_end()

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
