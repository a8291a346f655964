"""The gradient exchange of one optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hubring.workers.horovod.collectives.allreduce import grouped_allreduce_async
from hubring.workers.horovod.collectives.reduction import Reduction
from hubring.workers.horovod.collectives.sparse import sparse_allreduce_async
from hubring.workers.horovod.collectives.waiting import synchronize
from hubring.workers.horovod.compression import Compressor
from hubring.workers.horovod.optimizer.gradient_group import Bucket
from hubring.workers.horovod.optimizer.passes import Passes
from hubring.workers.horovod.world.process_set import ProcessSet


class Sent(NamedTuple):
    """One running operation on the gradients of some parameters."""

    parameters: list[torch.Tensor]
    handle: int | Callable[[], torch.Tensor]
    """The operation's handle; for a sparse gradient a function that returns the result."""
    contexts: list[Any]
    """What the compressor needs to decompress each result."""


class GradientExchange:
    """Sends buckets as backward fills them, and writes the reduced gradients into `.grad`.

    Args:
        names: The name of every trained parameter.
        buckets: Empty if this rank exchanges nothing.
        per_step: Number of backward passes per step.
        how: The reduction.
        compression: Compresses dense gradients for the exchange.
        sparse_as_dense: Whether to send sparse gradients as dense tensors.
        process_set: The ranks that take part.

    Attributes:
        seconds: Seconds that `settle` has waited so far.
        required: The parameters whose missing gradient counts as zeros and becomes the reduced gradient. At
            first all. A parameter that a script takes out keeps no gradient if no rank has one.
    """

    def __init__(
        self,
        names: Mapping[torch.Tensor, str],
        buckets: Sequence[Bucket],
        per_step: int,
        how: Reduction,
        compression: type[Compressor],
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.seconds = 0.0
        self.passes = Passes(buckets, per_step, self._send)
        self.required = set(names) if buckets else set()
        self._names = names
        self._buckets = buckets
        self._how = how
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set

    def settle(self) -> None:
        """Waits until every `.grad` holds the reduced gradient; a missing gradient counts as zeros.

        Raises:
            HorovodInternalError: Ranks disagree, or a rank is lost.
        """
        began = time.perf_counter()
        for bucket in self._buckets:
            if bucket.handles is None:
                self._send(bucket)
        for bucket in self._buckets:
            for sent in bucket.handles:
                self._finish(sent)
        self.passes.reset()
        self.seconds += time.perf_counter() - began

    def running(self) -> dict[torch.Tensor, tuple[Any, Any]]:
        """Returns handle and context of each parameter whose backward has run in this step.

        The handle is None until the parameter's bucket is complete and sent.
        """
        found: dict[torch.Tensor, tuple[Any, Any]] = dict.fromkeys(self.passes.came(), (None, None))
        for sent in (sent for bucket in self._buckets for sent in bucket.handles or ()):
            found |= {
                parameter: (sent.handle, context)
                for parameter, context in zip(sent.parameters, sent.contexts, strict=True)
            }
        return found

    def _send(self, bucket: Bucket) -> None:
        for parameter in bucket.parameters:
            if parameter.grad is None and parameter in self.required:  # other ranks can have a gradient
                parameter.grad = torch.zeros_like(parameter)
        alone = [one for one in bucket.parameters if _is_sparse(one) and not self._sparse_as_dense]
        together = [one for one in bucket.parameters if one not in set(alone)]
        bucket.handles = [self._begin_sparse(parameter) for parameter in alone]
        if together:
            bucket.handles.append(self._begin_dense(bucket.name, together))

    def _begin_dense(self, name: str, parameters: list[torch.Tensor]) -> Sent:
        small = [self._compression.compress(_dense(parameter)) for parameter in parameters]
        handle = grouped_allreduce_async(
            [tensor.contiguous() for tensor, _ in small],  # channels_last tensors are not contiguous
            name=name,
            op=self._how.op,
            prescale_factor=self._how.prescale,
            postscale_factor=self._how.postscale,
            process_set=self._process_set,
        )
        return Sent(parameters, handle, [context for _, context in small])

    def _begin_sparse(self, parameter: torch.Tensor) -> Sent:
        assert parameter.grad is not None
        name, gradient = self._names[parameter], parameter.grad
        handle = sparse_allreduce_async(gradient, name, self._how.op, self._process_set)
        return Sent([parameter], handle, [None])

    def _finish(self, sent: Sent) -> None:
        """Waits for an operation, and writes its results into the gradients."""
        if callable(sent.handle):
            sent.parameters[0].grad = sent.handle()
            return
        results = zip(sent.parameters, synchronize(sent.handle), sent.contexts, strict=True)
        for parameter, result, context in results:
            _assign(parameter, self._compression.decompress(result, context))


def _is_sparse(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None and parameter.grad.is_sparse


def _dense(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    gradient = parameter.grad.detach()
    return gradient.to_dense() if gradient.is_sparse else gradient


def _assign(parameter: torch.Tensor, result: torch.Tensor) -> None:
    """Writes a dense result into the gradient, dense or sparse; into a missing one only if it is not zero."""
    if parameter.grad is None:
        parameter.grad = result.clone() if result.any() else None
    elif parameter.grad.is_sparse:
        parameter.grad = result.to_sparse(parameter.grad.sparse_dim())
    else:
        parameter.grad.detach().copy_(result)
