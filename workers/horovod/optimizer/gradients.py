"""The gradients of one optimizer, on their way to all ranks and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from hubring.workers.horovod.collectives.allreduce import grouped_allreduce_async
from hubring.workers.horovod.collectives.reduction import Reduction
from hubring.workers.horovod.collectives.sparse import sparse_allreduce_async
from hubring.workers.horovod.collectives.waiting import synchronize
from hubring.workers.horovod.optimizer.compression import Compressor
from hubring.workers.horovod.optimizer.gradient_group import Parcel
from hubring.workers.horovod.optimizer.passes import Passes
from hubring.workers.horovod.world.process_set import ProcessSet

Settle = Callable[[], None]
"""Waits for an exchange and puts what came where it belongs."""


class GradientExchange:
    """Hands parcels over as backward fills them, and brings the reduced gradients into `.grad`.

    Args:
        names: Every trained parameter with its name.
        parcels: What is exchanged together; empty where this rank exchanges nothing.
        per_step: How many backward passes a step sums up.
        how: The reduction.
        compression: What dense gradients become for their way.
        sparse_as_dense: Sparse gradients travel as dense ones.
        process_set: Who takes part.

    Attributes:
        seconds: How long `settle` has kept training waiting so far.
    """

    def __init__(
        self,
        names: Mapping[torch.Tensor, str],
        parcels: Sequence[Parcel],
        per_step: int,
        how: Reduction,
        compression: type[Compressor],
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.seconds = 0.0
        self.passes = Passes(parcels, per_step, self._hand_over)
        self._names = names
        self._parcels = parcels
        self._how = how
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set

    def settle(self) -> None:
        """Waits until every `.grad` holds what all ranks made of it; a missing one counts as zeros.

        Raises:
            HorovodInternalError: Ranks disagree, or somebody is gone.
        """
        began = time.perf_counter()
        for parcel in self._parcels:
            if parcel.handles is None:
                self._hand_over(parcel)
        for parcel in self._parcels:
            for settle in parcel.handles:
                settle()
        self.passes.reset()
        self.seconds += time.perf_counter() - began

    def _hand_over(self, parcel: Parcel) -> None:
        for parameter in parcel.parameters:
            if parameter.grad is None:  # other ranks may have one
                parameter.grad = torch.zeros_like(parameter)
        alone = [one for one in parcel.parameters if _is_sparse(one) and not self._sparse_as_dense]
        together = [one for one in parcel.parameters if one not in set(alone)]
        parcel.handles = [self._begin_sparse(parameter) for parameter in alone]
        if together:
            parcel.handles.append(self._begin_dense(parcel.name, together))

    def _begin_dense(self, name: str, parameters: list[torch.Tensor]) -> Settle:
        small = [self._compression.compress(_dense(parameter)) for parameter in parameters]
        handle = grouped_allreduce_async(
            [tensor.contiguous() for tensor, _ in small],  # channels_last ones are not
            name=name,
            op=self._how.op,
            prescale_factor=self._how.prescale,
            postscale_factor=self._how.postscale,
            process_set=self._process_set,
        )

        def settle() -> None:
            for parameter, result, (_, ctx) in zip(parameters, synchronize(handle), small, strict=True):
                _assign(parameter, self._compression.decompress(result, ctx))

        return settle

    def _begin_sparse(self, parameter: torch.Tensor) -> Settle:
        assert parameter.grad is not None
        name, gradient = self._names[parameter], parameter.grad
        result = sparse_allreduce_async(gradient, name, self._how.op, self._process_set)

        def settle() -> None:
            parameter.grad = result()

        return settle


def _is_sparse(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None and parameter.grad.is_sparse


def _dense(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    gradient = parameter.grad.detach()
    return gradient.to_dense() if gradient.is_sparse else gradient


def _assign(parameter: torch.Tensor, result: torch.Tensor) -> None:
    """Puts a dense result into the gradient, of whichever layout it is."""
    assert parameter.grad is not None
    if parameter.grad.is_sparse:
        parameter.grad = result.to_sparse(parameter.grad.sparse_dim())
    else:
        parameter.grad.detach().copy_(result)
