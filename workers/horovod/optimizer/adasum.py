"""The optimizer with Adasum: it reduces the parameter changes of local steps instead of gradients.

Adasum (Maleki et al., 2020) adds orthogonal changes and averages parallel changes. It needs the changes that
the optimizer makes, not the gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch

from hubring.workers.horovod.collectives.allreduce import grouped_allreduce_async
from hubring.workers.horovod.collectives.waiting import synchronize
from hubring.workers.horovod.compression import Compression, Compressor
from hubring.workers.horovod.optimizer.gradient_group import Bucket, Groups, check_groups
from hubring.workers.horovod.optimizer.passes import Passes
from hubring.workers.horovod.optimizer.trainer import Trainer
from hubring.workers.horovod.optimizer.wrapped import (
    NamedParameters,
    WrappedOptimizer,
    buckets_of,
    check_derived,
    names_of,
)
from hubring.workers.horovod.reduce_ops import Adasum
from hubring.workers.horovod.world.process_set import global_process_set


class DeltaOptimizer(WrappedOptimizer):
    """Mixin in front of the wrapped optimizer's class: Horovod's `_DistributedAdasumOptimizer`.

    Args:
        params: Parameters or groups, as for the optimizer's class.
        named_parameters: See `DistributedOptimizer`; so are the other arguments.
    """

    _buckets: Sequence[Bucket]
    _requires_update: set[torch.Tensor]
    _seconds: float

    def __init__(
        self,
        params: Any,
        named_parameters: NamedParameters = None,
        compression: type[Compressor] = Compression.none,
        backward_passes_per_step: int = 1,
    ) -> None:
        check_derived(self, DeltaOptimizer, "_DistributedAdasumOptimizer")
        super().__init__(params)  # type: ignore[call-arg]  # the wrapped class has defaults
        self.wrap(named_parameters, compression, backward_passes_per_step, None)

    def wrap(
        self,
        named_parameters: NamedParameters,
        compression: type[Compressor],
        backward_passes_per_step: int,
        groups: Groups,
    ) -> None:
        """Begins the exchange of the changes of an optimizer whose groups are complete."""
        self._parameter_names = names_of(self, named_parameters)
        trained = self._trained()
        self._buckets = buckets_of(trained, check_groups(groups), global_process_set)
        self._compression, self._seconds = compression, 0.0
        named = {name: one for one, name in trained.items()}
        self._trainer = Trainer(named, self.waited, lambda: self.param_groups)
        self.op, self.process_set = Adasum, global_process_set
        self.backward_passes_per_step = backward_passes_per_step
        self._requires_update = set(trained)
        self._passes = Passes(self._buckets, backward_passes_per_step, lambda bucket: None)
        self._trainer.begin()

    @property
    def _handles(self) -> Mapping[torch.Tensor, tuple[Any, Any]]:
        """The parameters with a backward pass in this step. Nothing is sent before `step`."""
        return MappingProxyType(dict.fromkeys(self._passes.came(), (None, None)))

    def waited(self) -> float:
        """Returns the seconds that training has waited for exchanges."""
        return self._seconds

    def synchronize(self) -> None:
        """Does nothing, since gradients are not exchanged."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Is not supported.

        Raises:
            AssertionError: Always, as in Horovod.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a local step, then reduces the ranks' changes.

        Raises:
            HorovodInternalError: Ranks disagree, or a rank is lost.
            Preempted: The job stops at this step.
        """
        parameters = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        before = {parameter: parameter.detach().clone() for parameter in parameters}
        loss = super().step(closure) if closure is not None else super().step()
        self._reduce_changes(before)
        self._passes.reset()
        self._trainer.step_completed()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # the wrapped step runs torch's hooks

    def _reduce_changes(self, before: dict[torch.Tensor, torch.Tensor]) -> None:
        began = time.perf_counter()
        under_way = []
        for bucket in self._buckets:
            deltas = [parameter.detach() - before[parameter] for parameter in bucket.parameters]
            small = [self._compression.compress(delta) for delta in deltas]
            handle = grouped_allreduce_async(
                [delta.contiguous() for delta, _ in small], name=bucket.name, op=Adasum
            )
            under_way.append((bucket, handle, [ctx for _, ctx in small]))
        for bucket, handle, contexts in under_way:
            for parameter, delta, ctx in zip(bucket.parameters, synchronize(handle), contexts, strict=True):
                parameter.detach().copy_(before[parameter] + self._compression.decompress(delta, ctx))
        self._seconds += time.perf_counter() - began
