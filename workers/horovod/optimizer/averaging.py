"""The optimizer that steps with reduced gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch

from hubring.workers.horovod.collectives.reduction import Reduction
from hubring.workers.horovod.compression import Compression, Compressor
from hubring.workers.horovod.optimizer.gradient_group import Groups, check_groups
from hubring.workers.horovod.optimizer.gradients import GradientExchange
from hubring.workers.horovod.optimizer.trainer import Trainer
from hubring.workers.horovod.optimizer.wrapped import (
    NamedParameters,
    WrappedOptimizer,
    buckets_of,
    check_derived,
    names_of,
)
from hubring.workers.horovod.reduce_ops import Average, chosen
from hubring.workers.horovod.world.process_set import ProcessSet, global_process_set


class AveragingOptimizer(WrappedOptimizer):
    """Mixin in front of the wrapped optimizer's class: Horovod's `_DistributedOptimizer`.

    `DistributedOptimizer` makes one from an optimizer. A script that derives a class from this mixin and an
    optimizer's class constructs it with:

    Args:
        params: Parameters or groups, as for the optimizer's class.
        named_parameters: See `DistributedOptimizer`; so are the other arguments.

    Raises:
        TypeError: The class has copies of these methods instead of this class as a base, or overrides a
            method of Horovod's that is never called here.
    """

    _exchange: GradientExchange
    _synchronized: bool
    _should_synchronize: bool

    def __init__(
        self,
        params: Any,
        named_parameters: NamedParameters = None,
        compression: type[Compressor] = Compression.none,
        backward_passes_per_step: int = 1,
        op: int = Average,
        gradient_predivide_factor: float = 1.0,
        groups: Groups = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        check_derived(self, AveragingOptimizer, "_DistributedOptimizer")
        super().__init__(params)  # type: ignore[call-arg]  # the wrapped class has defaults
        self.wrap(
            named_parameters,
            compression,
            backward_passes_per_step,
            op,
            gradient_predivide_factor,
            groups,
            sparse_as_dense,
            process_set,
        )

    def wrap(
        self,
        named_parameters: NamedParameters,
        compression: type[Compressor],
        backward_passes_per_step: int,
        op: int,
        gradient_predivide_factor: float,
        groups: Groups,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        """Begins the exchange of the gradients of an optimizer whose groups are complete."""
        how = reduction(op, gradient_predivide_factor, process_set)
        self._parameter_names = names_of(self, named_parameters)
        trained = self._trained()
        buckets = buckets_of(trained, check_groups(groups), process_set)
        # Before the exchange, so that the delays of a slowed worker run before the exchange's gradient hooks.
        named = {name: one for one, name in trained.items()}
        self._trainer = Trainer(named, lambda: self._exchange.seconds, lambda: self.param_groups)
        self._compression, self.backward_passes_per_step = compression, backward_passes_per_step
        self.op, self.process_set, self.sparse_as_dense = op, process_set, sparse_as_dense
        self.gradient_predivide_factor = gradient_predivide_factor
        self._exchange = GradientExchange(
            trained, buckets, backward_passes_per_step, how, compression, sparse_as_dense, process_set
        )
        self._passes = self._exchange.passes
        self._synchronized, self._should_synchronize = False, True
        self._trainer.begin()

    @property
    def _handles(self) -> Mapping[torch.Tensor, tuple[Any, Any]]:
        """Handle and compression context of each parameter with a backward pass in this step.

        The handle is None until the gradients that are sent together are complete.
        """
        return MappingProxyType(self._exchange.running())

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        """The parameters whose missing gradient counts as zeros: all trained ones, or those a script sets.

        The gradient of any other parameter stays None if no rank has one.
        """
        return self._exchange.required

    @_requires_update.setter
    def _requires_update(self, parameters: Set[torch.Tensor]) -> None:
        self._exchange.required = set(parameters)

    def synchronize(self) -> None:
        """Waits until every `.grad` is reduced. Call this before you clip gradients, for example.

        Raises:
            HorovodInternalError: Ranks disagree, or a rank is lost.
        """
        self._exchange.settle()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context in which `step` does not synchronize. Use it after a call of `synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Waits for the gradients, then takes the wrapped optimizer's step.

        Args:
            closure: Recomputes loss and gradients. The optimizer can call it several times; the gradients are
                reduced each time.

        Returns:
            The result of the closure.

        Raises:
            HorovodInternalError: Ranks disagree, or a rank is lost.
            Preempted: The job stops at this step.
        """
        if closure is None:
            self._synchronize_gradients()
            loss = super().step()
        else:
            loss = super().step(lambda: self._after_backward(closure))
        self._synchronized = False
        self._trainer.step_completed()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # the wrapped step runs torch's hooks

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the wrapped optimizer's state, and starts a new step."""
        self._passes.reset()
        self._synchronized = False
        self._should_synchronize = True
        super().load_state_dict(state_dict)

    def _after_backward(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._synchronize_gradients()
        self._synchronized = False  # each call of the closure, for example by LBFGS, has new gradients
        return loss

    def _synchronize_gradients(self) -> None:
        if not self._should_synchronize:
            return
        if self._synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after"
                " optimizer.synchronize(). This can cause training slowdown.",
                stacklevel=3,
            )
        self.synchronize()


def reduction(op: int, predivide: float, process_set: ProcessSet) -> Reduction:
    """Returns the reduction of gradients.

    Raises:
        ValueError: `op` is unknown, or is not Average with a factor.
        NotImplementedError: Adasum of a process set, or of a number of ranks that is not a power of 2.
    """
    chosen(op, None)
    if predivide != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    how = Reduction(op, 1.0 / predivide, predivide)
    how.check(process_set)
    return how
