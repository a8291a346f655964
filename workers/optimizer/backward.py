"""What happens during backward, told by hooks on the parameters.

At the first gradient of a pass the pass is counted and missing gradients become
zeros. A bucket counts its gradients down, and in the last pass of a step
`on_ready(bucket)` is called when it has them all; `on_end()` is called before
`loss.backward()` returns.
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
        count: Passes since the step began, the one under way included.
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
        # Backward runs one thread a device; a model may lie on several, but no bucket does.
        self._lock = threading.Lock()
        for bucket in buckets:
            for position, parameter in enumerate(bucket.parameters):
                hook = self._hook(bucket, position)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def reset(self) -> None:
        """Begins the next step."""
        self.count = 0
        self._graph_task = -1

    def _hook(self, bucket: Bucket, position: int) -> Callable[[torch.Tensor], None]:
        """What runs once a parameter and pass: a model may have thousands, so it does the least it can.

        It holds no strong reference: torch keeps hooks where the garbage collector does not see them,
        so a parameter that was reached from its own hook would never be freed.
        """
        missing = self._missing[index := bucket.spec.index]
        current = torch._C._current_graph_task_id
        alive = weakref.ref(self)

        def accumulated(_: torch.Tensor) -> None:
            passes = alive()
            if passes is None:  # the optimizer is gone, and the model goes on without it
                return
            if current() != passes._graph_task:
                passes._enter_pass()
            missing.discard(position)
            if not missing:
                passes._filled(passes._buckets[index])

        return accumulated

    def _enter_pass(self) -> None:
        """Counts the pass at its first gradient; a pass that failed half-way counts too."""
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
                f"backward ran more than {self._passes_per_step} time(s) before optimizer.step(): pass "
                "backward_passes_per_step=... to DistributedOptimizer to accumulate, call "
                "optimizer.zero_grad() to start over, or use checkpoint(..., use_reentrant=False)"
            )

    def _filled(self, bucket: Bucket) -> None:
        with self._lock:
            self._check_waited_for(bucket)
            bucket.collect()
            self._watch.note_gradients(bucket)
            if self.count == self._passes_per_step:
                self._on_ready(bucket)

    def _pass_ended(self) -> None:
        for bucket in self._left:
            self._check_waited_for(bucket)
            self._exchange.settle(bucket)
        for bucket in self._buckets:
            if self._missing[bucket.spec.index]:
                bucket.collect()
        self._watch.note_end()
        if self.count == self._passes_per_step:
            self._on_end()

    def _check_waited_for(self, bucket: Bucket) -> None:
        """A gradient for parameters that are still on their way: some forward used them unasked."""
        index = bucket.spec.index
        if not self._exchange.has_left(bucket) or len(self._missing[index]) == len(self._all[index]):
            return
        position = min(self._all[index] - self._missing[index])
        raise ConfigError(
            f"parameter {bucket.spec.tensors[position].name} was used before it was back: the module that"
            " holds it did not run its forward, so nothing waited; call optimizer.synchronize() before"
            " the forward, or leave out cross_barrier=True"
        )
