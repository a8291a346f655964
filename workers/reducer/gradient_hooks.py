"""Hooks on the parameters of one reducer, which tell which gradients a backward pass has brought."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from hubring.ps.core.errors import ConfigError
from hubring.workers.buckets.bucket import Bucket

if TYPE_CHECKING:
    from hubring.workers.reducer.reducer import Reducer

LARGE_BYTES = 64 << 10
"""A larger gradient moves into its bucket at once, while the cache has it, and its own memory is free again.
Small ones move together: a call costs more than the bytes."""


class GradientHooks:
    """Notes the gradients of a reducer's buckets during a backward pass.

    A bucket waits for the end of the pass if one of its gradients came twice, as when checkpoint(...,
    use_reentrant=True) runs one layer several times. The first pass shows which buckets these are, so
    no bucket is sent before it has ended.

    Args:
        reducer: The reducer.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = weakref.proxy(reducer)
        self._missing: dict[int, set[int]] = {bucket.spec.index: set() for bucket in reducer.buckets}
        self._all = {
            bucket.spec.index: frozenset(range(len(bucket.parameters))) for bucket in reducer.buckets
        }
        self._left: list[Bucket] = []
        self._waits: set[int] = set()
        """Buckets with a gradient that came twice in a pass."""
        self._seen_pass = False
        self._numbers: dict[tuple[int, int], int] = {}
        for place, bucket in enumerate(reducer.buckets):
            for position, parameter in enumerate(bucket.parameters):
                hook = self._hook(reducer, place, position)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._numbers[bucket.spec.index, position] = handle.id

    def _hook(self, reducer: Reducer, place: int, position: int) -> Callable[[torch.Tensor], None]:
        """Returns the hook of one parameter. It runs in every pass, so it does as little as possible.

        The hook has no strong reference to the reducer. The garbage collector cannot see torch's hooks, so a
        parameter that its own hook references would never be freed.
        """
        bucket = reducer.buckets[place]
        missing = self._missing[bucket.spec.index]
        current = torch._C._current_graph_task_id
        alive = weakref.ref(reducer)
        large = bucket.parameters[position].nbytes >= LARGE_BYTES

        def accumulated(_: torch.Tensor) -> None:
            reducer = alive()
            if reducer is None:  # the optimizer was deleted and the model is still in use
                return
            passes = reducer.together.passes
            if current() != passes.graph_task:
                passes.enter()
            if passes.due:
                passes.release()
            if position not in missing:
                passes.came_again(reducer, reducer.buckets[place], position)
                return
            missing.remove(position)
            if large:
                passes.take(reducer, reducer.buckets[place], position)
            if not missing:
                passes.filled(reducer, reducer.buckets[place], position)

        return accumulated

    def begin_pass(self) -> None:
        """Expects all gradients."""
        exchange = self._reducer.exchange
        self._left = [bucket for bucket in self._reducer.buckets if exchange.has_left(bucket)]
        for index, missing in self._missing.items():
            missing.update(self._all[index])

    def end_pass(self) -> None:
        """Moves the gradients of buckets that are not complete, or were so too early, into the bucket."""
        for bucket in self._left:
            self.check_settled(bucket)
            self._reducer.exchange.settle(bucket)
        for bucket in self._reducer.buckets:
            if self._missing[bucket.spec.index] or bucket.spec.index in self._waits:
                bucket.collect()
        self._seen_pass = True

    def may_leave(self, bucket: Bucket) -> bool:
        """Whether a complete bucket may be sent before the pass has ended."""
        return self._seen_pass and bucket.spec.index not in self._waits

    def waits(self, bucket: Bucket) -> bool:
        """Whether the bucket is complete only when the pass has ended."""
        return bucket.spec.index in self._waits

    def make_wait(self, bucket: Bucket) -> None:
        """Makes a bucket wait for the end of the pass, in this pass and later ones."""
        self._waits.add(bucket.spec.index)

    def is_last(self, bucket: Bucket, position: int) -> bool:
        """Whether the script has no later hook on the parameter, which may change the gradient."""
        hooks = bucket.parameters[position]._post_accumulate_grad_hooks
        last: int = next(reversed(hooks))
        return last == self._numbers[bucket.spec.index, position]

    def check_settled(self, bucket: Bucket) -> None:
        """Raises ConfigError if the bucket got a gradient while its parameters are still in flight."""
        index = bucket.spec.index
        if not self._reducer.exchange.has_left(bucket) or len(self._missing[index]) == len(self._all[index]):
            return
        position = min(self._all[index] - self._missing[index])
        raise ConfigError(
            f"parameter {bucket.spec.tensors[position].name} was used before its exchange was done: its"
            " module did not run its forward, so nothing waited for it; call optimizer.synchronize() before"
            " the forward, or remove cross_barrier=True"
        )
