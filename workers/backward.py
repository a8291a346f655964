"""What happens during backward, told by hooks on the parameters.

At the first gradient of a pass the pass is counted and missing gradients become
zeros. In the last pass of a step, a bucket counts its gradients down and
`on_ready(bucket)` is called when it has them all; `on_end()` is called before
`loss.backward()` returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch
from torch.autograd import Variable

from ps.errors import ConfigError
from workers.bucketing import Bucket
from workers.watch import ChangeWatch


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
        on_ready: Callable[[Bucket], None],
        on_end: Callable[[], None],
    ) -> None:
        if passes_per_step < 1:
            raise ConfigError(f"backward_passes_per_step is {passes_per_step}; it must be at least 1")
        self.count = 0
        self._buckets = buckets
        self._passes_per_step = passes_per_step
        self._watch = watch
        self._on_ready = on_ready
        self._on_end = on_end
        self._graph_task = -1
        self._missing = self._all_positions()
        # Backward runs one thread a device; a model may lie on several.
        self._lock = threading.Lock()
        for bucket in buckets:
            for position, parameter in enumerate(bucket.parameters):
                hook = partial(self._accumulated, bucket, position)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def reset(self) -> None:
        """Begins the next step."""
        self.count = 0
        self._graph_task = -1
        self._missing = self._all_positions()

    def _all_positions(self) -> list[set[int]]:
        return [set(range(len(bucket.parameters))) for bucket in self._buckets]

    def _accumulated(self, bucket: Bucket, position: int, _parameter: torch.Tensor) -> None:
        with self._lock:
            self._enter_pass()
            bucket.collect_one(position)
            self._watch.note_gradients(bucket)
            if self.count == self._passes_per_step:
                self._count_down(bucket, position)

    def _enter_pass(self) -> None:
        """Counts the pass at its first gradient; a pass that failed half-way counts too."""
        graph_task = torch._C._current_graph_task_id()
        if graph_task == self._graph_task:
            return
        if self.count == self._passes_per_step:
            raise ConfigError(
                f"backward ran more than {self._passes_per_step} time(s) before optimizer.step(): pass "
                "backward_passes_per_step=... to DistributedOptimizer to accumulate, call "
                "optimizer.zero_grad() to start over, or use checkpoint(..., use_reentrant=False)"
            )
        self._graph_task = graph_task
        self.count += 1
        for bucket in self._buckets:
            bucket.collect()
        Variable._execution_engine.queue_callback(self._pass_ended)

    def _count_down(self, bucket: Bucket, position: int) -> None:
        missing = self._missing[bucket.spec.index]
        missing.discard(position)
        if not missing:
            self._on_ready(bucket)

    def _pass_ended(self) -> None:
        if self.count == self._passes_per_step:
            self._watch.note_end()
            self._on_end()
