"""The optimizer under Adasum: what local steps changed is reduced, rather than gradients.

Adasum (Maleki et al., 2020) adds up what ranks agree on and averages the rest, which
needs the changes that an optimizer makes and not the gradients that it makes them of.
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
from hubring.workers.horovod.optimizer.gradient_group import Parcel
from hubring.workers.horovod.optimizer.passes import Passes
from hubring.workers.horovod.optimizer.trainer import Trainer
from hubring.workers.horovod.reduce_ops import Adasum

if TYPE_CHECKING:
    _Base = Optimizer
else:
    _Base = object  # it stands before an optimizer's class, which brings the rest


class DeltaOptimizer(_Base):
    """What a wrapped optimizer's class gets in front of it."""

    backward_passes_per_step: int
    _trainer: Trainer
    _passes: Passes
    _parcels: Sequence[Parcel]
    _compression: type[Compressor]
    _seconds: float

    def prepare(self, parcels: Sequence[Parcel], per_step: int, compression: type[Compressor]) -> None:
        """Settles what is exchanged; `DistributedOptimizer` calls it."""
        self._parcels, self._compression, self._seconds = parcels, compression, 0.0
        self._passes = Passes(parcels, per_step, lambda parcel: None)

    def waited(self) -> float:
        """Seconds for which exchanges have kept training waiting."""
        return self._seconds

    def synchronize(self) -> None:
        """Does nothing: gradients are not exchanged."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Refuses.

        Raises:
            AssertionError: Always, as in Horovod.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes one step sums up."""
        self.backward_passes_per_step = passes
        self._passes.set_per_step(passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps here, then brings the ranks' changes together.

        Raises:
            HorovodInternalError: Ranks disagree, or somebody is gone.
            Preempted: The job stops at this step.
        """
        parameters = [parameter for parcel in self._parcels for parameter in parcel.parameters]
        before = {parameter: parameter.detach().clone() for parameter in parameters}
        loss = super().step(closure) if closure is not None else super().step()
        self._bring_together(before)
        self._passes.reset()
        self._trainer.step_completed()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch runs a step's hooks in the wrapped one

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients.

        Raises:
            AssertionError: A backward pass has come since the last step.
        """
        if self._passes.begun:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or"
                " optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(set_to_none)

    def _bring_together(self, before: dict[torch.Tensor, torch.Tensor]) -> None:
        began = time.perf_counter()
        under_way = []
        for parcel in self._parcels:
            deltas = [parameter.detach() - before[parameter] for parameter in parcel.parameters]
            small = [self._compression.compress(delta) for delta in deltas]
            handle = grouped_allreduce_async(
                [delta.contiguous() for delta, _ in small], name=parcel.name, op=Adasum
            )
            under_way.append((parcel, handle, [ctx for _, ctx in small]))
        for parcel, handle, contexts in under_way:
            for parameter, delta, ctx in zip(parcel.parameters, synchronize(handle), contexts, strict=True):
                parameter.detach().copy_(before[parameter] + self._compression.decompress(delta, ctx))
        self._seconds += time.perf_counter() - began
