"""DistributedOptimizer: wraps the script's optimizer, and reduces gradients over all ranks.

This package's allreduces reduce the gradients while backward still runs, and the script's optimizer takes
the step. With a hub too, the hub only reduces.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

from hubring.workers.horovod.collectives.compression import Compression, Compressor
from hubring.workers.horovod.collectives.operation import Adasum, Average
from hubring.workers.horovod.gradient_groups import Groups, NamedParameters, duplicates
from hubring.workers.horovod.gradients import ExchangeOptions, GradientExchange
from hubring.workers.horovod.world import ProcessSet, current, global_process_set

__all__ = ["DistributedOptimizer", "_DistributedAdasumOptimizer", "_DistributedOptimizer"]


NEVER_CALLED = {
    *("_allreduce_grad_async", "_grouped_allreduce_grad_async", "_sparse_allreduce_grad_async"),
    *("_make_hook", "_register_hooks"),
}
"""Methods of Horovod's wrappers that send one gradient. Here many gradients are sent together."""


class WrappedOptimizer(Optimizer):
    """Mixin in front of the wrapped optimizer's class.

    Scripts use the underscored attributes of Horovod's wrappers, so they mean the same here.

    Attributes:
        backward_passes_per_step: Number of backward passes per step. Change it with the method.
        _parameter_names: The name of every parameter.
        _compression: Compresses what is exchanged.
    """

    backward_passes_per_step: int
    _parameter_names: dict[torch.Tensor, str]
    _compression: type[Compressor]
    _exchange: GradientExchange

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        overridden = sorted(NEVER_CALLED & vars(cls).keys())
        if overridden:
            raise TypeError(
                f"{cls.__name__} overrides {', '.join(overridden)}, which Hubring never calls, because it"
                " exchanges many gradients together; pass a compressor as compression=, or exchange gradients"
                " with hvd.allreduce_async_ and step an optimizer that is not wrapped"
            )

    def wrap(self, options: ExchangeOptions) -> None:
        """Begins the exchange of an optimizer whose groups are complete."""
        self._exchange = GradientExchange(self, options)
        self._parameter_names = self._exchange.names
        self._compression = options.compression
        self.backward_passes_per_step = options.backward_passes_per_step
        self.op, self.process_set = options.op, options.process_set
        self.sparse_as_dense = options.sparse_as_dense
        self.gradient_predivide_factor = options.gradient_predivide_factor

    @property
    def _allreduce_delay(self) -> dict[torch.Tensor, int]:
        """The number of backward passes that each parameter still waits for; a script may change it."""
        return self._exchange.passes.left

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

    find_duplicates = staticmethod(duplicates)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets the number of backward passes per step."""
        self.backward_passes_per_step = passes
        self._exchange.passes.set_per_step(passes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients.

        Raises:
            AssertionError: A backward pass ran since the last step or `synchronize`.
        """
        if self._exchange.passes.begun:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or"
                " optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(set_to_none)


def check_derived(optimizer: Optimizer, wrapper: type, name: str) -> None:
    """Checks that the optimizer's class is derived from the wrapper, which Horovod calls `name`.

    Raises:
        TypeError: The class has copies of the wrapper's methods, as in Horovod's own code.
    """
    if not isinstance(optimizer, wrapper):
        kind = type(optimizer).__name__
        raise TypeError(
            f"{kind} has copies of the methods of {name}; derive it instead:"
            f" type({kind!r}, ({name}, {kind}), {{}}), or call hvd.DistributedOptimizer"
        )


class AveragingOptimizer(WrappedOptimizer):
    """Mixin in front of the wrapped optimizer's class: Horovod's `_DistributedOptimizer`.

    `DistributedOptimizer` makes one from an optimizer. A script that derives a class from this mixin and an
    optimizer's class constructs it with:

    Args:
        params: Parameters or groups, as for the optimizer's class.
        arguments: Those of `ExchangeOptions`; `named` likewise.

    Raises:
        TypeError: The class has copies of these methods instead of this class as a base, or overrides a
            method of Horovod's that is never called here.
    """

    _synchronized = False
    _should_synchronize = True

    def __init__(self, params: Any, *arguments: Any, **named: Any) -> None:
        check_derived(self, AveragingOptimizer, "_DistributedOptimizer")
        super().__init__(params)  # type: ignore[call-arg]  # the wrapped class has defaults
        self.wrap(ExchangeOptions(*arguments, **named))

    def synchronize(self) -> None:
        """Waits until every `.grad` is reduced. Call this before you clip gradients, for example.

        Raises:
            HorovodInternalError: Ranks disagree, or a rank is lost.
        """
        self._exchange.reduce()
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
        self._exchange.step_completed()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # the wrapped step runs torch's hooks

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the wrapped optimizer's state, and starts a new step."""
        self._exchange.passes.reset()
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


class DeltaOptimizer(WrappedOptimizer):
    """Mixin in front of the wrapped optimizer's class: Horovod's `_DistributedAdasumOptimizer`.

    Adasum (Maleki et al., 2020) adds orthogonal changes and averages parallel changes. It needs the changes
    that the optimizer makes, not the gradients. So nothing is sent before `step`.

    Args:
        params: Parameters or groups, as for the optimizer's class.
        named_parameters: See `DistributedOptimizer`; so are the other arguments.
    """

    def __init__(
        self,
        params: Any,
        named_parameters: NamedParameters = None,
        compression: type[Compressor] = Compression.none,
        backward_passes_per_step: int = 1,
    ) -> None:
        check_derived(self, DeltaOptimizer, "_DistributedAdasumOptimizer")
        super().__init__(params)  # type: ignore[call-arg]  # the wrapped class has defaults
        self.wrap(ExchangeOptions(named_parameters, compression, backward_passes_per_step, op=Adasum))

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
        step: Callable[[], Any] = super().step if closure is None else partial(super().step, closure)
        loss = self._exchange.reduce_changes(step)
        self._exchange.step_completed()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # the wrapped step runs torch's hooks


_DistributedOptimizer = AveragingOptimizer
_DistributedAdasumOptimizer = DeltaOptimizer


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Optimizer,
    named_parameters: NamedParameters = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wraps an optimizer so that its gradients are reduced over all ranks.

    Args:
        optimizer: The optimizer to wrap; the result shares its groups and state.
        named_parameters: Names of all parameters, which match the exchanges across ranks.
        compression: Compresses gradients for the exchange.
        backward_passes_per_step: Number of backward passes whose gradients one step sums.
        op: `hvd.Average`, `hvd.Sum`, or `hvd.Adasum`, which reduces the changes of local steps.
        gradient_predivide_factor: Divides gradients before the sum; the average does not change.
        num_groups: The older form of `groups`.
        groups: Number of exchanges per step, or lists of the parameters of each exchange; None: exchanges of
            HOROVOD_FUSION_THRESHOLD bytes, by default 4 MiB.
        sparse_as_dense: Whether to send sparse gradients as dense tensors.
        process_set: The ranks that take part; other ranks step alone.

    Returns:
        An instance of a class that is derived from the optimizer's class and has its name.

    Raises:
        ValueError: Names are missing, duplicate or invalid; or another argument is invalid.
        NotImplementedError: Adasum of a process set, or of a number of ranks that is not a power of 2.
    """
    if num_groups:
        warnings.warn("num_groups= is deprecated; use groups=", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step is {backward_passes_per_step}; expected at least 1")
    made = _derived(optimizer, DeltaOptimizer if op == Adasum and current().size > 1 else AveragingOptimizer)
    options = ExchangeOptions(
        *(named_parameters, compression, backward_passes_per_step, op),
        *(gradient_predivide_factor, groups, sparse_as_dense, process_set),
    )
    made.wrap(options)
    return made


def _derived(optimizer: Optimizer, front: type) -> Any:
    """Returns the same optimizer as an instance of its class with `front` as a mixin."""
    kind = type(optimizer)
    made: Any = object.__new__(type(kind.__name__, (front, kind), {"__module__": kind.__module__}))
    # A scheduler sets a wrapper of the old `step` on the optimizer. The new optimizer must not have it.
    made.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    return made
