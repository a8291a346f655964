"""The optimizer with Adasum: it reduces the parameter changes of local steps instead of gradients.

Adasum (Maleki et al., 2020) adds orthogonal changes and averages parallel changes. It needs the changes that
the optimizer makes, not the gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from hubring.workers.horovod.collectives.allreduce import grouped_allreduce_async
from hubring.workers.horovod.collectives.waiting import synchronize
from hubring.workers.horovod.optimizer.compression import Compressor
from hubring.workers.horovod.optimizer.gradient_group import Bucket
from hubring.workers.horovod.optimizer.passes import Passes
from hubring.workers.horovod.optimizer.trainer import Trainer
from hubring.workers.horovod.reduce_ops import Adasum

if TYPE_CHECKING:
    _Base = Optimizer
else:
    _Base = object  # a mixin in front of an optimizer's class


class DeltaOptimizer(_Base):
    """Mixin in front of the wrapped optimizer's class."""

    backward_passes_per_step: int
    _trainer: Trainer
    _passes: Passes
    _buckets: Sequence[Bucket]
    _compression: type[Compressor]
    _seconds: float

    def prepare(self, buckets: Sequence[Bucket], per_step: int, compression: type[Compressor]) -> None:
        """Initializes the exchange; `DistributedOptimizer` calls this."""
        self._buckets, self._compression, self._seconds = buckets, compression, 0.0
        self._passes = Passes(buckets, per_step, lambda bucket: None)

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

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets the number of backward passes per step."""
        self.backward_passes_per_step = passes
        self._passes.set_per_step(passes)

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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients.

        Raises:
            AssertionError: A backward pass ran since the last step.
        """
        if self._passes.begun:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or"
                " optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(set_to_none)

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
