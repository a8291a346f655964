"""One optimizer's training: its backward passes, the exchange of its gradients, and its steps.

A group of gradients is sent when backward has completed it. Adasum reduces the parameters' changes of a
local step instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch.optim import Optimizer

from hubring.workers.horovod.collectives.allreduce import grouped_allreduce_async
from hubring.workers.horovod.collectives.compression import Compression, Compressor
from hubring.workers.horovod.collectives.moving import sparse_allreduce_async
from hubring.workers.horovod.collectives.operation import Adasum, Average, Reduction, chosen, synchronize
from hubring.workers.horovod.gradient_groups import (
    GradientGroup,
    Groups,
    NamedParameters,
    buckets_of,
    names_of,
)
from hubring.workers.horovod.world import ProcessSet, current, global_process_set
from hubring.workers.runtime import context
from hubring.workers.runtime.worker import unwatched

T = TypeVar("T")


@dataclass(frozen=True)
class ExchangeOptions:
    """How an optimizer exchanges: the arguments of Horovod's wrappers, in their order.

    `DistributedOptimizer` describes them.
    """

    named_parameters: NamedParameters = None
    compression: type[Compressor] = Compression.none
    backward_passes_per_step: int = 1
    op: int = Average
    gradient_predivide_factor: float = 1.0
    groups: Groups = None
    sparse_as_dense: bool = False
    process_set: ProcessSet = global_process_set


def reduction(options: ExchangeOptions) -> Reduction:
    """Returns the reduction of gradients.

    Raises:
        ValueError: `op` is unknown, or is not Average with a factor.
        NotImplementedError: Adasum of a process set, or of a number of ranks that is not a power of 2.
    """
    op, predivide = chosen(options.op, None), options.gradient_predivide_factor
    if predivide != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    how = Reduction(op, 1.0 / predivide, predivide)
    how.check(options.process_set)
    return how


class PassCounter:
    """Counts the backward passes of the parameters of all buckets.

    Args:
        buckets: Each parameter is in one bucket.
        per_step: Number of backward passes per step.
        on_ready: Called during backward with each bucket whose gradients are complete; None: nothing is sent.

    Attributes:
        begun: Whether a backward pass ran since the last `reset`.
        left: The number of backward passes that each parameter still waits for in this step.
    """

    def __init__(
        self,
        buckets: Sequence[GradientGroup],
        per_step: int,
        on_ready: Callable[[GradientGroup], None] | None,
    ) -> None:
        self.begun = False
        self._buckets = buckets
        self._per_step = per_step
        self._on_ready = on_ready
        self._of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        self.left: dict[torch.Tensor, int] = {}
        self.reset()
        for parameter in self._of:
            parameter.register_post_accumulate_grad_hook(self._came)

    def set_per_step(self, per_step: int) -> None:
        """Sets the number of backward passes per step, and starts a new step."""
        self._per_step = per_step
        self.reset()

    def came(self) -> list[torch.Tensor]:
        """Returns the parameters with a backward pass in this step."""
        return [parameter for parameter, left in self.left.items() if left < self._per_step]

    def reset(self) -> None:
        """Starts a step."""
        self.begun = False
        self.left = dict.fromkeys(self._of, self._per_step)
        for bucket in self._buckets:
            bucket.missing, bucket.handles = set(bucket.parameters), None

    def _came(self, parameter: torch.Tensor) -> None:
        if self.left[parameter] <= 0:
            raise AssertionError(
                f"Gradients were computed more than backward_passes_per_step times ({self._per_step}) before"
                " call to step(). Increase backward_passes_per_step to accumulate gradients locally."
            )
        self.begun = True
        self.left[parameter] -= 1
        if self.left[parameter] == 0:
            bucket = self._of[parameter]
            bucket.missing.discard(parameter)
            if not bucket.missing and self._on_ready is not None:
                self._on_ready(bucket)


class SentGradients(NamedTuple):
    """One running operation on the gradients of some parameters."""

    parameters: list[torch.Tensor]
    handle: Any
    """The operation's handle; for a sparse gradient a function that returns the result."""
    contexts: list[Any]
    """What the compressor needs to decompress each result."""


class GradientExchange:
    """Sends buckets as backward fills them, and writes the reduced gradients into `.grad`.

    It also counts the optimizer's steps, so that the hub knows them and can stop the worker after a step: the
    public attributes are those of `hubring.workers.runtime.worker.Trainer`.

    Args:
        optimizer: The optimizer, whose groups are complete.
        options: How it exchanges.

    Attributes:
        exchange_seconds: Seconds that training has waited for exchanges so far.
        names: The name of every parameter.
        required: The parameters whose missing gradient counts as zeros and becomes the reduced gradient. At
            first all. A parameter that a script takes out keeps no gradient if no rank has one.
    """

    ahead = 0

    def __init__(self, optimizer: Optimizer, options: ExchangeOptions) -> None:
        self._how = reduction(options)
        self._optimizer, self._options = optimizer, options
        self.names = names_of(optimizer, options.named_parameters)
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        trained = {one: self.names[one] for one in held if one.requires_grad}
        self._buckets = buckets_of(trained, options.groups, options.process_set)
        self.named_parameters = {name: one for one, name in trained.items()}
        self.exchange_seconds = 0.0
        self.completed_steps = 0
        self.required = set(trained) if self._buckets else set()
        place = context.started()
        self._place = place if place is not None and place.communicator is current().communicator else None
        # Before `PassCounter`: the delays of a slowed worker run before the exchange's gradient hooks.
        self._begin_slow = unwatched if self._place is None else self._place.watch(trained)
        ready = None if self._how.op == Adasum else self._send
        self.passes = PassCounter(self._buckets, options.backward_passes_per_step, ready)
        if self._place is not None:
            self._place.adopt(self)
        self._begin_slow(0)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def settle(self) -> None:
        """Does nothing, since no exchange is running after a step."""

    def step_completed(self) -> None:
        """Records a completed step.

        Raises:
            Preempted: The job stops at this step.
        """
        self.completed_steps += 1
        if self._place is not None:
            self._place.step_completed(self.completed_steps)
            self._begin_slow(self.completed_steps)

    def reduce(self) -> None:
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
        self.exchange_seconds += time.perf_counter() - began

    def reduce_changes(self, step: Callable[[], T]) -> T:
        """Replaces each parameter's change in a step by the reduction of the ranks' changes.

        Args:
            step: Takes the step; its result is returned.

        Raises:
            HorovodInternalError: Ranks disagree, or a rank is lost.
        """
        parameters = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        before = {parameter: parameter.detach().clone() for parameter in parameters}
        result = step()
        began = time.perf_counter()
        under_way = []
        for bucket in self._buckets:
            changes = [parameter.detach() - before[parameter] for parameter in bucket.parameters]
            under_way.append(self._begin_dense(bucket.name, bucket.parameters, changes))
        for parameter, change in chain.from_iterable(map(self._results, under_way)):
            parameter.detach().copy_(before[parameter] + change)
        self.passes.reset()
        self.exchange_seconds += time.perf_counter() - began
        return result

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

    def _send(self, bucket: GradientGroup) -> None:
        for parameter in bucket.parameters:
            if parameter.grad is None and parameter in self.required:  # other ranks can have a gradient
                parameter.grad = torch.zeros_like(parameter)
        alone = [one for one in bucket.parameters if _is_sparse(one) and not self._options.sparse_as_dense]
        together = [one for one in bucket.parameters if one not in set(alone)]
        bucket.handles = [self._begin_sparse(parameter) for parameter in alone]
        if together:
            bucket.handles.append(self._begin_dense(bucket.name, together, map(_dense, together)))

    def _begin_dense(
        self, name: str, parameters: list[torch.Tensor], tensors: Iterable[torch.Tensor]
    ) -> SentGradients:
        small = [self._options.compression.compress(tensor) for tensor in tensors]
        handle = grouped_allreduce_async(
            [tensor.contiguous() for tensor, _ in small],  # channels_last tensors are not contiguous
            name=name,
            op=self._how.op,
            prescale_factor=self._how.prescale,
            postscale_factor=self._how.postscale,
            process_set=self._options.process_set,
        )
        return SentGradients(parameters, handle, [context for _, context in small])

    def _begin_sparse(self, parameter: torch.Tensor) -> SentGradients:
        assert parameter.grad is not None
        name, gradient = self.names[parameter], parameter.grad
        handle = sparse_allreduce_async(gradient, name, self._how.op, self._options.process_set)
        return SentGradients([parameter], handle, [None])

    def _finish(self, sent: SentGradients) -> None:
        """Waits for an operation, and writes its results into the gradients."""
        if callable(sent.handle):
            sent.parameters[0].grad = sent.handle()
            return
        for parameter, result in self._results(sent):
            _assign(parameter, result)

    def _results(self, sent: SentGradients) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Waits for an operation on dense tensors, and yields each parameter with its result."""
        results = zip(sent.parameters, synchronize(sent.handle), sent.contexts, strict=True)
        for parameter, result, ctx in results:
            yield parameter, self._options.compression.decompress(result, ctx)


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
